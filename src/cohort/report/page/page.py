"""Make the page of a run, or the one that compares several, and write it.

The HTML file has template, styles, scripts and data in one, with a policy that forbids everything else. Text from a run
is data. The template escapes it; data for scripts is JSON without any character that HTML reads; the
Content-Security-Policy lets only the scripts and styles run whose hashes it names, and allows no network.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cohort.errors import RunFolderError
from cohort.report.diagnosis import Diagnosis
from cohort.report.page import sections
from cohort.report.page.charts import CHARTS, Chart, charts_of, evaluated_charts, listed, run_curves, shown_keys
from cohort.report.page.microscope import CAUSES, QUANTITIES, build_microscope, clipped, plain_json
from cohort.report.page.sections import number, short
from cohort.report.series import Curve, Group, common_window, grouped, means_of_groups, reward_functions
from cohort.report.verdict import conclusions, verdicts
from cohort.runs.durable import write_atomically
from cohort.runs.reader import AXES, Run

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("uplot-1.6.32.min.js", "base.js", "charts.js", "tokens.js", "microscope.js", "main.js")
STYLES = ("uplot-1.6.32.min.css", "page.css")
GENERATOR = "Cohort report"
"""Marks the pages that ``cohort report`` may overwrite."""
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
MAX_FILE_TEXT = 50_000
"""Characters of objective.txt and of first_prompt.txt. Control characters become names of up to 12 bytes."""


def write_report(runs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the page of a run, or one that compares several.

    Args:
        runs: run folders.
        output: the file. None: ``report.html`` in the run folder; of several runs, in the working directory.

    Returns:
        The file.

    Raises:
        RunFolderError: a folder holds no run, or the output is a file that ``cohort report`` did not write.
        OSError: the file cannot be written.
    """
    histories = [Run.read(run) for run in dict.fromkeys(map(Path, runs))]
    alone = histories[0].path if len(histories) == 1 else Path()
    target = Path(output).expanduser() if output else alone / "report.html"
    check_target(target)
    write_atomically(target, run_page(histories[0]) if len(histories) == 1 else comparison_page(histories))
    return target


def check_target(target: Path) -> None:
    """Refuse to overwrite anything but an earlier page.

    Raises:
        RunFolderError: the target is something else.
    """
    if target.is_symlink():
        raise RunFolderError(f"{target} is a symbolic link: give another file with --output")
    if target.is_dir():
        raise RunFolderError(f"{target} is a folder: give a file with --output, such as {target / 'report.html'}")
    if not target.parent.is_dir():
        raise RunFolderError(f"there is no folder {target.parent} for --output")
    if target.exists() and not (target.is_file() and f'content="{GENERATOR}'.encode() in _beginning(target)):
        raise RunFolderError(f"{target} exists and was not written by cohort report: give another file with --output")


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1000)


# ----------------------------------------
# The page of a run.


def run_page(history: Run) -> str:
    """The page of a run as HTML."""
    curves = run_curves(history)
    diagnosis = Diagnosis.of(history)
    found = sections.shown(diagnosis.findings)
    microscope = build_microscope(history, sections.begins(found))
    state, state_words = sections.run_state(history)
    content = {
        "title": history.path.resolve().name,
        "state": "ended" if state == "complete" and sections.is_ill(found) else state,  # not in green
        "state_words": state_words,
        "verdict": diagnosis.health,
        "figures": sections.figures(history),
        "missing": history.missing,
        **sections.listed(history, found),
        "stride": curves["stride"],
        "settings": sections.settings_table(history),
        "objective": clipped(history.text("objective.txt"), MAX_FILE_TEXT),
        "first_prompt": clipped(history.text("first_prompt.txt"), MAX_FILE_TEXT),
        "environment": sections.environment(history),
        "evaluations": sections.evaluations(history),
        "timing": sections.timing(history),
        "replays": sections.replays_of(history),
        "microscope": microscope,
    }
    data = {
        "run": curves if history.rows else None,
        "charts": charts_of(list(curves["values"])),
        "findings": sections.marks(history, found),
        "quantities": QUANTITIES,
        "causes": CAUSES,
        "microscope": microscope.data() | {"opens": sections.opening_step(found)},
    }
    return render("report.html", content, data, microscope.blocks)


# ----------------------------------------
# The page that compares runs: curves with bands over seeds on equal axes, and verdicts with their certainty.


SHOWN_AXES = ("step", "updates", "tokens", "seconds")
MAX_POINTS = 400
MAX_CHARTS = 40
MAX_GROUPS = 12
"""Curves of a chart; more cannot be told apart."""


def comparison_page(histories: Sequence[Run]) -> str:
    """The page of several runs as HTML."""
    groups = grouped(histories)
    found = verdicts(groups)
    differs = islice(groups[0].differs if len(groups) > 1 else (), sections.MAX_ROWS)
    runs = [(group.label if run is group.runs[0] else "", run) for group in groups for run in group.runs]
    content = {
        "title": f"Comparison of {len(histories)} runs",
        "conclusions": conclusions(found),
        "verdicts": found,
        "labels": [one.label for one in groups],
        "runs": [[label, *_summary(run)] for label, run in runs],
        "differs": [[short(key), *(short(one.differs[key], 400) for one in groups)] for key in differs],
        "left_out": max(0, len(groups) - MAX_GROUPS),
        "missing": [f"{run.path.name}: {text}" for run in histories for text in run.damaged],
    }
    data = {"axes": {axis: AXES[axis] for axis in SHOWN_AXES}, "charts": _charts(groups[:MAX_GROUPS], histories)}
    return render("compare.html", content, {"compared": data})


def _summary(run: Run) -> list[str]:
    """A run in a row of the table: name, seed, reward at the end, state, health."""
    rewards = run.series("reward/mean")[1]
    part = rewards[-max(1, len(rewards) // 10) :]
    reward, seed = number(sum(part) / len(part) if part else None), run.flat_settings().get("run.seed", "")
    return [run.path.resolve().name, str(seed), reward, sections.run_state(run)[1], Diagnosis.of(run).health]


def _charts(groups: Sequence[Group], histories: Sequence[Run]) -> list[dict[str, Any]]:
    """A chart for each metric that some run has, with a curve for each group on every axis."""
    keys = list(dict.fromkeys(key for run in histories for key in shown_keys(run)))
    rewards = reward_functions(keys).items()
    functions = [Chart(f"Reward: {name}", "", key) for name, key in rewards] if len(rewards) > 1 else []
    plain = [one for one in CHARTS if one.keys.split()[0] in keys]
    found = []
    for chart in [*evaluated_charts(keys), *plain[:1], *functions, *plain[1:]][:MAX_CHARTS]:
        key = chart.keys.split()[0]
        curves, lines = _curves(groups, key, smooth=chart.smooth and not key.startswith("eval/"))
        if curves:
            found.append(
                {"title": chart.title, "about": f"{key}. {lines}".rstrip(), "log": chart.log, "curves": curves}
            )
    return found


def _curves(groups: Sequence[Group], key: str, *, smooth: bool) -> tuple[list[dict[str, Any]], str]:
    """The curve of each group on every axis, and what lines and bands are, in words."""
    window = common_window([run for group in groups for run in group.runs], key) if smooth else 1
    found: dict[str, dict[str, Any]] = {}
    said = ""
    for axis in SHOWN_AXES:
        for mean in (mean for mean, _ in means_of_groups(groups, key, axis, window) if len(mean.x)):
            found.setdefault(mean.label, {"label": mean.label})[axis] = _points(mean)
            smoothed = f"Lines: local linear fits over {mean.window} points. " if mean.window > 1 else ""
            said = said or smoothed + (f"Band: {mean.band}." if mean.band else "")
    return list(found.values()), said


def _points(curve: Curve) -> dict[str, Any]:
    """The points of a curve, at most ``MAX_POINTS``."""
    stride = -(-len(curve.x) // MAX_POINTS)
    band = {"low": curve.low, "high": curve.high} if curve.band else {"low": None, "high": None}
    parts: dict[str, np.ndarray | None] = {"x": curve.x, "y": curve.line, **band}
    return {name: None if values is None else listed(values[::stride]) for name, values in parts.items()}


# ----------------------------------------
# HTML.


def render(template: str, content: Mapping[str, Any], data: Mapping[str, Any], blocks: Sequence[str] = ()) -> str:
    """The page.

    Args:
        template: "report.html" or "compare.html".
        content: what the template shows in words and tables.
        data: what the scripts draw.
        blocks: packed groups of completions.
    """
    script, style = _assets(SCRIPTS), _assets(STYLES)
    allowed = f"script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    try:
        version = metadata.version("cohort-rl")
    except metadata.PackageNotFoundError:  # run from a source tree
        version = ""
    return (
        _environment()
        .get_template(template)
        .render(
            content,
            generator=GENERATOR,
            version=version,
            written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
            policy=f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'",
            script=Markup(script),
            style=Markup(style),
            data=script_json(data),
            blocks=[Markup(block) for block in blocks],
        )
    )


def script_json(value: Any) -> Markup:
    """JSON for a ``<script type="application/json">``: no ``</script>`` or comment in it can end the element."""
    text = re.sub(f"[<>&]|{CONTROL.pattern}", lambda found: f"\\u{ord(found[0]):04x}", plain_json(value))
    return Markup(text)


def visible(value: Any) -> Any:
    """Text with control characters, direction marks among them, as their names: they would act on the page."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return CONTROL.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", value)
    return "\N{EN DASH}" if value is None else value


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _assets(names: tuple[str, ...]) -> str:
    return "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
