"""Make a page of a run folder and write it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cohort.errors import RunFolderError
from cohort.report.diagnosis import Diagnosis
from cohort.report.page import sections
from cohort.report.page.blocks import clipped, plain_json
from cohort.report.page.charts import charts_of, run_curves
from cohort.report.page.compare import compared
from cohort.report.page.microscope import QUANTITIES, build_microscope
from cohort.report.page.sections import replays_of
from cohort.runs.durable import write_atomically
from cohort.runs.reader import Run

# ----------------------------------------
# The HTML file: template, styles, scripts and data in one, with a policy that forbids everything else.
#
# Text from a run is data. The template escapes it; data for scripts is JSON without any character that HTML reads;
# the Content-Security-Policy lets only the scripts and styles run whose hashes it names, and allows no network.


ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("uplot-1.6.32.min.js", "base.js", "charts.js", "tokens.js", "microscope.js", "main.js")
STYLES = ("uplot-1.6.32.min.css", "page.css")
GENERATOR = "Cohort report"
"""Marks the pages that ``cohort report`` may overwrite."""
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


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
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    page = _environment().get_template(template)
    return page.render(
        content,
        generator=GENERATOR,
        policy=policy,
        script=Markup(script),
        style=Markup(style),
        data=script_json(data),
        blocks=[Markup(block) for block in blocks],
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


CAUSES = {
    "masked": "the completion reached the length limit, and objective.truncated masks such completions",
    "no_advantage": "the advantage is 0",
    "low_entropy": "the token is not among the objective.top_entropy tokens",
    "mismatch": "a mismatch rule dropped it, because sampler and trainer differ",
    "off_policy": "the off-policy mask dropped its completion",
    "clipped_low": "the trust region clipped it at a low ratio",
    "clipped_high": "the trust region clipped it at a high ratio",
    "vanished": "the multiplier of the trust region is 0",
    "held": "",
}
"""Why a token has no policy gradient. ``held`` is the exception: it has one, with a clamped log-ratio."""
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
    write_atomically(target, render_run(histories[0]) if len(histories) == 1 else render_comparison(histories))
    return target


def render_comparison(histories: Sequence[Run]) -> str:
    """The page of several runs as HTML."""
    content, data = compared(histories)
    return render("compare.html", content | _origin(), {"compared": data})


def _origin() -> dict[str, str]:
    return {"written": sections.written_at(), "version": _version()}


def render_run(history: Run) -> str:
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
        "findings": sections.listed(found),
        "timeline": sections.timeline(history, found),
        "stride": curves["stride"],
        "settings": sections.settings_table(history),
        "objective": clipped(history.text("objective.txt") or "", MAX_FILE_TEXT),
        "first_prompt": clipped(history.text("first_prompt.txt") or "", MAX_FILE_TEXT),
        "environment": sections.environment(history),
        "evaluations": sections.evaluations(history),
        "timing": sections.timing(history),
        "replays": replays_of(history),
        "notes": microscope.notes,
        "choice": microscope.choice,
        "has_microscope": bool(microscope.groups),
        **_origin(),
    }
    data = {
        "run": curves if history.rows else None,
        "charts": charts_of(list(curves["values"])),
        "findings": sections.marks(history, found),
        "quantities": [dict(zip(("key", "label", "scale", "about"), row, strict=True)) for row in QUANTITIES],
        "causes": CAUSES,
        "microscope": microscope.data() | {"opens": sections.opening_step(found)},
    }
    return render("report.html", content, data, microscope.blocks)


def _version() -> str:
    try:
        return metadata.version("cohort-rl")
    except metadata.PackageNotFoundError:  # run from a source tree
        return ""


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
    if not target.exists():
        return
    if not target.is_file() or not _is_page(target):
        raise RunFolderError(f"{target} exists and was not written by cohort report: give another file with --output")


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return f'content="{GENERATOR}'.encode() in file.read(1000)
