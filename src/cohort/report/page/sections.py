"""What the page of a run says in words and tables. Everything comes from the folder and can be anything: texts are
shortened here and escaped by the template, and what is missing or of another type is left out."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

from cohort.errors import RunFolderError
from cohort.lock import LOCK, Lock
from cohort.report.diagnosis import Finding, Level
from cohort.report.page.charts import MAX_KEY, shown_keys
from cohort.report.series import default_settings
from cohort.report.words import PHASES, cause_words, duration, fine_share
from cohort.runs.reader import Run, flat
from cohort.runs.starts import how_to_continue

HEADLINE = re.compile(r"(^|/)(reward|pass@1)/mean$")
MAX_VALUE = 2_000
"""Characters of a setting's value that are shown."""
MAX_ROWS = 1_000
"""Rows of a table."""
MAX_EVALUATIONS = 200
MAX_ENTRIES = 200_000
"""Files and folders that are looked at for the size of a run folder."""


def number(value: Any) -> str:
    """A number with four digits."""
    if not isinstance(value, int | float) or math.isnan(value):
        return "\N{EN DASH}"
    return (f"{value:,.4g}" if abs(value) < 1e5 else f"{value:,.0f}").replace("-", "\N{MINUS SIGN}")


def short(text: Any, limit: int = MAX_KEY) -> str:
    """The beginning of a text of one line, and its length if it is longer than ``limit``."""
    text = str(text)
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text):,} characters)"


def estimate(mean: Any, low: Any, high: Any) -> str:
    """A mean with its interval, if it has one."""
    bounds = f" ({number(low)} to {number(high)})" if low is not None and high is not None else ""
    return number(mean) + (bounds if isinstance(mean, int | float) else "")


def run_state(history: Run) -> tuple[str, str]:
    """The state of a run, as a word for style and in words."""
    after = f"after step {history.rows[-1]['step'] if history.rows else 0:,}"
    if (summary := history.summary) is not None:
        early = ": stopped early, no better evaluation" if summary.get("stopped_early") else ""
        return "complete", f"complete{early}"
    resume = f"{how_to_continue(history.path)} continues it"
    try:
        known = Lock(history.path).check()
    except RunFolderError:  # a process holds it
        return "running", f"in progress, {after}"
    except OSError:
        known = False
    if not known:
        return "unknown", f"not complete, {after}; whether a process still trains it is unknown"
    if (history.path / LOCK).exists():  # a process that ends in order removes it
        return "killed", f"killed {after}; {resume}"
    return "stopped", f"stopped {after}, before its end; {resume}"


def figures(history: Run) -> list[tuple[str, str, str]]:
    """The figures of the head: name, value, remark."""
    found: list[tuple[str, str, str]] = []
    if history.rows:
        found.append(("Steps", f"{history.rows[-1]['step']:,}", ""))
    if rewards := history.series("reward/mean")[1]:
        part = max(1, len(rewards) // 10)
        ends = f"{number(sum(rewards[:part]) / part)} → {number(sum(rewards[-part:]) / part)}"
        found.append(("Reward", ends, "first and last " + (f"{part:,} steps" if part > 1 else "step")))
    for key in [key for key in evaluation_keys(history) if HEADLINE.search(key)][:4]:
        rows = [row for row in history.rows if row.get(key) is not None]
        low, high = (rows[-1].get(key[:-4] + end) for end in ("low", "high"))
        ends = " → ".join(dict.fromkeys(number(row[key]) for row in (rows[0], rows[-1])))
        interval = f"{number(low)} to {number(high)}" if low is not None and high is not None else ""
        found.append((f"Evaluation: {key[5:-5]}", ends, interval))
    found += [(name, f"{before} → {after}", "") for name, before, after in before_and_after(history)[:4]]
    if seconds := history.series("seconds/step")[1]:
        found.append(("Training time", duration(sum(seconds)), f"{duration(sum(seconds) / len(seconds))} per step"))
    if tokens := history.series("tokens")[1]:
        found.append(("Tokens in updates", f"{int(sum(tokens)):,}", "once per update that used them"))
    settings = history.flat_settings()
    named = (
        ("Model", Path(str(settings.get("model.path") or "")).name),
        ("Objective", settings.get("objective.preset")),
    )
    return found + [(name, str(value)[:80], "") for name, value in named if value]


def evaluation_keys(history: Run) -> list[str]:
    """The means of the evaluations."""
    return [key for key in shown_keys(history) if key.startswith("eval/") and key.endswith("/mean")]


def evaluations(history: Run) -> dict[str, Any]:
    """The evaluations by step: a mean with its interval for each metric."""
    means = evaluation_keys(history)[:24]
    lines = [line for line in history.rows if any(line.get(key) is not None for key in means)]
    shown = lines[:1] + lines[1:][1 - MAX_EVALUATIONS :]
    ends = ("mean", "low", "high")
    rows = [[row["step"], *(estimate(*(row.get(key[:-4] + end) for end in ends)) for key in means)] for row in shown]
    names = [key[5:-5] for key in means]
    return {"names": names, "rows": rows, "left_out": len(lines) - len(rows), "summary": before_and_after(history)}


def before_and_after(history: Run) -> list[tuple[str, str, str]]:
    """Evaluations before and after the training, as the summary has them: ``NAME_before`` and ``NAME_after`` with their
    ``_interval``, or the tables ``before`` and ``after``."""

    def shown(key: str) -> str:
        interval = summary.get(f"{key}_interval")
        bounds = interval if isinstance(interval, list) and len(interval) == 2 else (None, None)
        return estimate(summary[key], *bounds)

    summary = history.summary or {}
    names = [key.removesuffix("_before") for key in summary if key.endswith("_before")]
    names = [name for name in names if isinstance(summary.get(f"{name}_after"), int | float)]
    found = [(name, shown(f"{name}_before"), shown(f"{name}_after")) for name in names]
    before, after = (dict(flat(_mapping(summary.get(when)))) for when in ("before", "after"))
    found += [(name.replace(".", ", "), number(value), number(after.get(name))) for name, value in before.items()]
    return [(short(name), first, last) for name, first, last in found[:40]]


def settings_table(history: Run) -> list[tuple[str, str, str]]:
    """The settings by section: name, value and, where it differs from the value, the default, else nothing."""
    defaults, found = default_settings(), []
    for key, value in islice(history.flat_settings().items(), MAX_ROWS):
        shown, default = _setting(value), _setting(defaults[key]) if key in defaults else "unset"
        same = key == "run.output_dir" or (shown == default and key in defaults)
        found.append((short(key), shown, "" if same else default))
    return found


def _setting(value: Any) -> str:
    is_text = isinstance(value, str) and value
    return short(value if is_text else json.dumps(value, ensure_ascii=False, default=str), MAX_VALUE)


def environment(history: Run) -> dict[str, Any]:
    """Versions and machine of the last start, and all starts."""
    rows: list[tuple[Any, Any]] = []
    starts = history.starts
    for name, value in _mapping(starts[-1].get("facts") if starts else None).items():
        parts = [part.partition("=") for part in str(value).split(", ")]
        several = name in ("versions", "machine") and all(equals for _, equals, _ in parts)
        rows += [(key, text) for key, _, text in parts] if several else [(name, value)]
    shown = [(short(name), short(text, MAX_VALUE)) for name, text in rows[:100]]
    return {"facts": shown, "starts": [_start(one) for one in starts[-50:]]}


def _start(start: Mapping[str, Any]) -> tuple[str, ...]:
    """Time, step, overrides, and what was given in Python."""
    given = ", ".join(f"{key}: {text}" for key, text in _mapping(start.get("missing")).items())
    overrides = ", ".join(map(str, _listed(start.get("overrides"))))
    return (
        *(short(start.get(key, "")) for key in ("time", "step")),
        short(overrides, MAX_VALUE),
        short(given, MAX_VALUE),
    )


def timing(history: Run) -> dict[str, Any]:
    """Seconds by phase with their shares, time beside the steps, and the size of the folder by kind."""
    totals = {name: sum(history.series(f"seconds/{name}")[1]) for name in PHASES}
    if totals["rollout_wait"]:  # sampling and scoring then run beside the updates
        totals |= {"generate": 0.0, "reward": 0.0}
    rows: list[dict[str, Any]] = []
    whole, start = sum(totals.values()), 0.0
    for name, seconds in ((name, seconds) for name, seconds in totals.items() if seconds > 0):
        share = seconds / whole
        bar = {"start": f"{100 * start:.3f}%", "width": f"{100 * share:.3f}%", "colour": len(rows) % 6 + 1}
        rows.append({"name": PHASES[name], "share": f"{share:.1%}", "total": duration(seconds), **bar})
        start += share
    return {"rows": rows, "notes": _clock(history), "sizes": _sizes(history.path)}


def _clock(history: Run) -> list[str]:
    """What the phases do not show."""
    notes = []
    steps, times = history.series("seconds/step")[1], history.series("time")[1]
    if len(times) > 1 and len(steps) == len(times) and len(history.starts) <= 1:
        beside = times[-1] - times[0] - sum(steps[1:])
        if beside > 0.02 * sum(steps):
            notes.append(f"{duration(beside)} passed between steps: evaluations, checkpoints and other work.")
    if waited := sum(history.series("seconds/rollout_hidden")[1]):
        notes.append(f"{duration(waited)} of sampling and scoring ran beside the updates (rollout.lag).")
    with suppress(TypeError, KeyError):
        if (summary := history.summary) and (seconds := summary["seconds_to_first_update"]) is not None:
            notes.append(f"{duration(float(seconds))} from the start of the command to the first update.")
    return notes


def _sizes(run: Path) -> list[tuple[str, str]]:
    """What the folder holds on disk, by kind. Links are not followed."""
    found = []
    for name in ("checkpoints", "best", "rollouts", "evaluations"):
        total, count = 0, 0
        for folder, _, files in os.walk(run / name) if not (run / name).is_symlink() else ():
            for file in islice(files, MAX_ENTRIES - count):
                with suppress(OSError):
                    total += os.lstat(os.path.join(folder, file)).st_size  # noqa: PTH118
            count += 1 + len(files)
            if count >= MAX_ENTRIES:
                break
        size = f"{total / 1e6:,.1f} MB" if total < 1e9 else f"{total / 1e9:,.2f} GB"
        found += [(name, size if count < MAX_ENTRIES else f"more than {size}")] * (total > 0)
    return found


# ----------------------------------------
# The diagnosis on the page: its findings in words, over time, and as marks on the curves.


MAX_FINDINGS = 300
"""Findings that are shown."""
MAX_MARKED = 100
"""Metrics on whose curves a finding is marked."""


def shown(findings: Sequence[Finding]) -> list[Finding]:
    """At most ``MAX_FINDINGS``: those that stand first, the worst first, then by step."""
    return sorted(findings, key=lambda one: (not one.stands, -one.level.rank, one.begin))[:MAX_FINDINGS]


def opening_step(findings: Sequence[Finding]) -> int | None:
    """The step at which the worst alarm begins that stands at the end; None without one."""
    return next((one.begin for one in findings if one.stands and one.level is Level.ALARM), None)


def is_ill(findings: Sequence[Finding]) -> bool:
    """Whether a warning or an alarm stands at the end."""
    return any(one.stands and one.level is not Level.NOTE for one in findings)


def begins(findings: Sequence[Finding]) -> dict[int, str]:
    """The steps at which findings begin, and which; warnings and alarms first."""
    found: dict[int, str] = {}
    for one in sorted(findings, key=lambda one: -one.level.rank):
        found.setdefault(one.begin, f"{one.level}: {one.check.replace('_', ' ')}")
    return found


def listed(history: Run, findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings for the template: in words, and as bars over the steps, a row for each check, with places in per
    cent of the width."""
    last = max((line["step"] for line in history.rows), default=1)
    rows: dict[str, list[dict[str, str]]] = {}
    found = []
    for one in findings:
        end = last if one.end is None else one.end - 1
        when = f"since step {one.begin:,}" if one.end is None else f"steps {one.begin:,} to {end:,}"
        worst = f"Worst, {one.worst.level} at step {one.worst.step:,}: {one.worst.found}" if one.worst else ""
        words = {"level": str(one.level), "check": one.check, "found": one.found, "advice": one.advice}
        found.append(words | {"when": when, "worst": worst})
        width = f"{max(0.6, 100 * (end - one.begin + 1) / max(1, last)):.3f}%"
        bar = {"x": f"{100 * (one.begin - 1) / max(1, last):.3f}%", "width": width}
        rows.setdefault(one.check.replace("_", " "), []).append(bar | {"level": _worst_level(one), "when": when})
    return {"findings": found, "timeline": rows, "last": last}


def marks(history: Run, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Where findings begin, and the metrics on whose curves that is marked: those that the finding is about."""
    known, found = shown_keys(history), []
    for one in findings:
        keys = [key for key in known if any(fnmatchcase(key, pattern) for pattern in one.metrics)][:MAX_MARKED]
        found.append({"step": one.begin, "level": _worst_level(one), "check": one.check, "keys": keys})
    return found


def _worst_level(finding: Finding) -> str:
    return str((finding.worst or finding).level)


# ----------------------------------------
# The replays of a run (``RUN/replays/*.json``, docs/replay.md) as tables.


MAX_REPLAYS = 20
REPLAY_ROWS = 40
MAX_TEXT = 300


def text(value: Any) -> str:
    """Any value as a short text; of a long one, the end."""
    words = "" if value is None else str(value)
    return words if len(words) <= MAX_TEXT else f"...{words[-MAX_TEXT:]}"


def share(value: Any) -> str:
    """A share as a percentage, as the terminal has it."""
    return fine_share(value) if isinstance(value, int | float) and math.isfinite(value) else number(None)


def one_line(value: Any) -> str:
    """A text of the run, with its line breaks shown.

    >>> one_line("\\n6+"), one_line("\\n")
    ('↵6+', '↵')
    """
    return text(value.replace("\n", "↵") if isinstance(value, str) else value)


def words(value: Any) -> str:
    """The name of a cause or change, as the terminal has it."""
    return cause_words(text(value))


NUMBERS = (number, share)
"""How columns are shown that are numbers."""
REPLAY: dict[str, tuple[str, tuple[tuple[str, str, Callable[[Any], str]], ...]]] = {
    "gradients": ("Gradient", (
        ("space", "space", text), ("term", "term", text), ("norm of the run's", "norm_run", number),
        ("of the replay's", "norm_replay", number), ("ratio", "ratio", number), ("cosine", "cosine", number))),
    "causes": ("Tokens by what they have in place of a gradient", (
        ("in the run", "run", words), ("in the replay", "replay", words), ("tokens", "tokens", number),
        ("of all tokens", "tokens_share", share), ("of the run's gradient", "share_run", share),
        ("of the replay's", "share_replay", share))),
    "signs": ("By the sign of the advantage", (
        ("advantage", "advantage", text), ("tokens in the run", "tokens_run", number),
        ("of its gradient", "share_run", share), ("tokens in the replay", "tokens_replay", number),
        ("of its gradient", "share_replay", share))),
    "completions": ("Completions that drive the gradient most", (
        ("group", "group", text), ("row", "row", text), ("reward", "reward", number), ("tokens", "tokens", number),
        ("advantage in the run", "advantage_run", number), ("in the replay", "advantage_replay", number),
        ("of the run's gradient", "share_run", share), ("of the replay's", "share_replay", share),
        ("end of the text", "text", one_line))),
    "strongest": ("Tokens that change most", (
        ("group", "group", text), ("row", "row", text), ("place", "position", text),
        ("text before", "before", one_line), ("token", "text", one_line), ("change", "change", words),
        ("coefficient in the run", "coefficient_run", number), ("in the replay", "coefficient_replay", number))),
}  # fmt: skip
"""The tables of a replay by the key of their rows in the file: title, and head, key and format of the columns."""


def replays_of(history: Run) -> list[dict[str, Any]]:
    """The replays of a run for the template, in the order of their names."""
    try:
        names = sorted(name for name in os.listdir(history.path / "replays") if name.endswith(".json"))  # noqa: PTH208
    except OSError:
        return []
    return [_replay(name, history.json(f"replays/{name}")) for name in names[:MAX_REPLAYS]]


def _replay(name: str, result: Mapping[str, Any] | None) -> dict[str, Any]:
    if result is None:
        return {"title": name[:-5], "sentence": f"replays/{name} cannot be read", "notes": [], "tables": []}
    objective, tables = _mapping(result.get("objective")), []
    rows_of = {**result, "gradients": _gradients(result)}
    for key, (title, columns) in REPLAY.items():
        rows = [_mapping(row) for row in _listed(rows_of.get(key))[:REPLAY_ROWS] if _mapping(row)]
        cells = [[form(row.get(name)) for _, name, form in columns] for row in rows]
        classes = ["number" if form in NUMBERS else "mono" for *_, form in columns]
        if rows:
            heads = [head for head, *_ in columns]
            tables.append({"title": title, "heads": heads, "classes": classes, "rows": cells})
    return {
        "title": f"Step {text(result.get('step'))}: {text(objective.get('run'))} → {text(objective.get('replay'))}",
        "sentence": text(result.get("sentence")),
        "notes": [*map(text, _listed(objective.get("changes"))), *map(text, _listed(result.get("notes")))],
        "tables": tables,
    }


def _gradients(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The gradients in both spaces, whole and by term."""
    found = []
    for space in ("parameters", "logits"):
        whole = _mapping(result.get(space))
        terms = {"whole": whole} | {name: _mapping(one) for name, one in _mapping(whole.get("terms")).items()}
        found += [{**one, "space": space, "term": name} for name, one in terms.items() if one]
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
