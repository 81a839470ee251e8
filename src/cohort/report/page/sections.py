"""What the page says in words and tables: state, figures, settings, environment, evaluation, timing."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

from cohort.errors import RunFolderError
from cohort.lock import LOCK, Lock
from cohort.report.diagnosis import Finding, Level
from cohort.report.page.blocks import MAX_KEY, short
from cohort.report.verdict import default_settings
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


def run_state(history: Run) -> tuple[str, str]:
    """The state of a run, as a word for style and in words."""
    last = history.rows[-1]["step"] if history.rows else 0
    after = f"after step {last:,}"
    if history.summary is not None:
        early = ": stopped early, no better evaluation" if history.summary.get("stopped_early") else ""
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
    _, rewards = history.series("reward/mean")
    if rewards:
        part = max(1, len(rewards) // 10)
        first, last = sum(rewards[:part]) / part, sum(rewards[-part:]) / part
        found.append(("Reward", f"{number(first)} → {number(last)}", f"first and last {_count(part, 'step')}"))
    found += [_evaluated(history, key) for key in _evaluation_keys(history) if HEADLINE.search(key)][:4]
    found += [(name, f"{before} → {after}", "") for name, before, after in _before_and_after(history.summary or {})[:4]]
    if seconds := history.series("seconds/step")[1]:
        found.append(("Training time", duration(sum(seconds)), f"{duration(sum(seconds) / len(seconds))} per step"))
    if tokens := history.series("tokens")[1]:
        found.append(("Tokens in updates", f"{int(sum(tokens)):,}", "once per update that used them"))
    settings = history.flat_settings()
    if path := settings.get("model.path"):
        found.append(("Model", Path(str(path)).name[:80], ""))
    if preset := settings.get("objective.preset"):
        found.append(("Objective", str(preset)[:80], ""))
    return found


def _evaluation_keys(history: Run) -> list[str]:
    keys = [key for key in history.keys() if len(key) <= MAX_KEY]  # noqa: SIM118
    return [key for key in keys if key.startswith("eval/") and key.endswith("/mean")]


def _evaluated(history: Run, key: str) -> tuple[str, str, str]:
    """The first and the last value of an evaluation's mean, with the interval of the last."""
    steps, values = history.series(key)
    last = next(line for line in history.rows if line["step"] == steps[-1])
    low, high = (last.get(key[:-4] + end) for end in ("low", "high"))
    interval = f"{number(low)} to {number(high)}" if low is not None and high is not None else ""
    return f"Evaluation: {key[5:-5]}", " → ".join(dict.fromkeys((number(values[0]), number(values[-1])))), interval


def _count(count: int, word: str) -> str:
    return f"{word}" if count == 1 else f"{count:,} {word}s"


def number(value: Any) -> str:
    """A number with four digits."""
    if not isinstance(value, int | float):
        return "\N{EN DASH}"
    return (f"{value:,.4g}" if abs(value) < 1e5 else f"{value:,.0f}").replace("-", "\N{MINUS SIGN}")


def settings_table(history: Run) -> list[dict[str, Any]]:
    """The settings by section, each with its value, the default, and whether they differ."""
    defaults = default_settings()
    found = []
    for key, value in islice(history.flat_settings().items(), MAX_ROWS):
        text, default = _text(value), _text(defaults[key]) if key in defaults else None
        differs = text != default and key != "run.output_dir"
        found.append({"key": short(key), "value": text, "default": default or "unset", "differs": differs})
    return found


def _text(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)
    return short(text, MAX_VALUE)


def environment(history: Run) -> dict[str, Any]:
    """Versions and machine of the last start, and all starts."""
    rows = []
    facts = history.starts[-1].get("facts") if history.starts else None
    for name, value in facts.items() if isinstance(facts, Mapping) else ():
        parts = [part.partition("=") for part in str(value).split(", ")]
        if all(equals for _, equals, _ in parts) and name in ("versions", "machine"):
            rows += [(key, text) for key, _, text in parts]
        else:
            rows.append((str(name), str(value)))
    shown = [(short(name), short(text, MAX_VALUE)) for name, text in rows[:100]]
    return {"facts": shown, "starts": [_start(one) for one in history.starts[-50:]]}


def _start(start: Mapping[str, Any]) -> dict[str, str]:
    overrides, missing = start.get("overrides"), start.get("missing")
    given = [f"{key}: {text}" for key, text in missing.items()] if isinstance(missing, Mapping) else []
    return {
        "time": short(str(start.get("time", ""))),
        "step": short(str(start.get("step", ""))),
        "overrides": short(", ".join(map(str, overrides)) if isinstance(overrides, list) else "", MAX_VALUE),
        "missing": short(", ".join(given), MAX_VALUE),
    }


def evaluations(history: Run) -> dict[str, Any]:
    """The evaluations by step: a mean with its interval for each metric."""
    means = _evaluation_keys(history)[:24]
    lines = [line for line in history.rows if any(line.get(key) is not None for key in means)]
    rows = []
    for line in lines[:1] + lines[1:][1 - MAX_EVALUATIONS :]:
        cells = [(line.get(key), line.get(f"{key[:-4]}low"), line.get(f"{key[:-4]}high")) for key in means]
        rows.append({"step": line["step"], "cells": [_estimate(*cell) for cell in cells]})
    return {
        "names": [key[5:-5] for key in means],
        "rows": rows,
        "left_out": len(lines) - len(rows),
        "summary": _before_and_after(history.summary or {}),
    }


def _before_and_after(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Evaluations before and after the training, as the summary has them: ``NAME_before`` and ``NAME_after`` with their
    ``_interval``, or the tables ``before`` and ``after``."""
    found: list[tuple[str, str, str]] = []
    for key in summary:
        name, after = key.removesuffix("_before"), summary.get(f"{key.removesuffix('before')}after")
        if key.endswith("_before") and isinstance(after, int | float):
            found.append((name, _with_interval(summary, key), _with_interval(summary, f"{name}_after")))
    tables = [dict(flat(one)) if isinstance(one := summary.get(when), dict) else {} for when in ("before", "after")]
    found += [(name.replace(".", ", "), number(tables[0][name]), number(tables[1].get(name))) for name in tables[0]]
    return [(short(name), before, after) for name, before, after in found[:40]]


def _with_interval(summary: Mapping[str, Any], key: str) -> str:
    interval = summary.get(f"{key}_interval")
    low, high = interval if isinstance(interval, list) and len(interval) == 2 else (None, None)
    return _estimate(summary[key], low, high) if isinstance(summary[key], int | float) else number(None)


def _estimate(mean: float | None, low: float | None, high: float | None) -> str:
    if mean is None:
        return "\N{EN DASH}"
    return number(mean) + (f" ({number(low)} to {number(high)})" if low is not None and high is not None else "")


def timing(history: Run) -> dict[str, Any]:
    """Seconds by phase with their shares, time beside the steps, and the size of the folder by kind."""
    totals = {name: sum(history.series(f"seconds/{name}")[1]) for name in PHASES}
    if totals["rollout_wait"]:  # sampling and scoring then run beside the updates
        totals |= {"generate": 0.0, "reward": 0.0}
    whole = sum(totals.values())
    rows, start = [], 0.0
    for place, (name, seconds) in enumerate((name, seconds) for name, seconds in totals.items() if seconds > 0):
        share = seconds / whole
        rows.append(
            {
                "name": PHASES[name],
                "total": duration(seconds),
                "share": f"{share:.1%}",
                "start": f"{100 * start:.3f}%",
                "width": f"{100 * share:.3f}%",
                "colour": place % 6 + 1,
            }
        )
        start += share
    return {"rows": rows, "notes": _clock(history), "sizes": _sizes(history.path)}


def _clock(history: Run) -> list[str]:
    """What the phases do not show."""
    notes = []
    steps = history.series("seconds/step")[1]
    times = history.series("time")[1]
    if len(times) > 1 and len(steps) == len(times) and len(history.starts) <= 1:
        beside = times[-1] - times[0] - sum(steps[1:])
        if beside > 0.02 * sum(steps):
            notes.append(f"{duration(beside)} passed between steps: evaluations, checkpoints and other work.")
    if waited := sum(history.series("seconds/rollout_hidden")[1]):
        notes.append(f"{duration(waited)} of sampling and scoring ran beside the updates (rollout.lag).")
    with suppress(TypeError, KeyError):
        if history.summary and (seconds := history.summary["seconds_to_first_update"]) is not None:
            notes.append(f"{duration(float(seconds))} from the start of the command to the first update.")
    return notes


def _sizes(run: Path) -> list[tuple[str, str]]:
    """What the folder holds on disk, by kind. Links are not followed."""
    found = []
    for name in ("checkpoints", "best", "rollouts", "evaluations"):
        total, all_of_it = _size(run / name)
        if total:
            size = f"{total / 1e6:,.1f} MB" if total < 1e9 else f"{total / 1e9:,.2f} GB"
            found.append((name, size if all_of_it else f"more than {size}"))
    return found


def _size(folder: Path) -> tuple[int, bool]:
    """The bytes of the files below a folder, and whether that is all: at most ``MAX_ENTRIES`` are looked at."""
    total, left, folders = 0, MAX_ENTRIES, [] if folder.is_symlink() else [str(folder)]
    while folders and left:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in islice(entries, left):
                left -= 1
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_size
    return total, left > 0


def written_at() -> str:
    """The present time."""
    return datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")


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


def listed(findings: Sequence[Finding]) -> list[dict[str, str]]:
    """The findings for the template."""
    return [
        {
            "level": str(one.level),
            "check": one.check,
            "when": _when(one),
            "found": one.found,
            "worst": f"Worst, {one.worst.level} at step {one.worst.step:,}: {one.worst.found}" if one.worst else "",
            "advice": one.advice,
        }
        for one in findings
    ]


def _when(finding: Finding) -> str:
    return f"since step {finding.begin:,}" if finding.end is None else f"steps {finding.begin:,} to {finding.end - 1:,}"


def timeline(history: Run, findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings as bars over the steps, a row for each check; places are in per cent of the width."""
    last = max((line["step"] for line in history.rows), default=1)
    names = list(dict.fromkeys(one.check for one in findings))
    rows: list[dict[str, Any]] = [{"name": name.replace("_", " "), "bars": []} for name in names]
    for one in findings:
        end = last if one.end is None else one.end - 1
        start, width = 100 * (one.begin - 1) / max(1, last), 100 * (end - one.begin + 1) / max(1, last)
        bar = {"x": f"{start:.3f}%", "width": f"{max(width, 0.6):.3f}%", "level": _worst_level(one), "when": _when(one)}
        rows[names.index(one.check)]["bars"].append(bar)
    return {"rows": rows, "last": last}


def marks(history: Run, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Where findings begin, and the metrics on whose curves that is marked: those that the finding is about."""
    keys = [key for key in history.keys() if len(key) <= MAX_KEY]  # noqa: SIM118
    found = []
    for one in findings:
        named = [key for key in keys if any(fnmatchcase(key, pattern) for pattern in one.metrics)]
        mark = {"step": one.begin, "level": _worst_level(one), "check": one.check, "keys": named[:MAX_MARKED]}
        found.append(mark)
    return found


def _worst_level(finding: Finding) -> str:
    return str((finding.worst or finding).level)


def begins(findings: Sequence[Finding]) -> dict[int, str]:
    """The steps at which findings begin, and which; warnings and alarms first."""
    found: dict[int, str] = {}
    for one in sorted(findings, key=lambda one: -one.level.rank):
        found.setdefault(one.begin, f"{one.level}: {one.check.replace('_', ' ')}")
    return found


# ----------------------------------------
# The replays of a run (``RUN/replays/*.json``, docs/replay.md) as tables. The files are data: what is missing or of
# another type is left out.


MAX_REPLAYS = 20
REPLAY_ROWS = 40
MAX_TEXT = 300
Format = Callable[[Any], str]
Column = tuple[str, str, Format]
"""Head, key in the file, and how a value is shown."""


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


GRADIENT: tuple[Column, ...] = (
    ("space", "space", text),
    ("term", "term", text),
    ("norm of the run's", "norm_run", number),
    ("of the replay's", "norm_replay", number),
    ("ratio", "ratio", number),
    ("cosine", "cosine", number),
)
CAUSES: tuple[Column, ...] = (
    ("in the run", "run", words),
    ("in the replay", "replay", words),
    ("tokens", "tokens", number),
    ("of all tokens", "tokens_share", share),
    ("of the run's gradient", "share_run", share),
    ("of the replay's", "share_replay", share),
)
SIGNS: tuple[Column, ...] = (
    ("advantage", "advantage", text),
    ("tokens in the run", "tokens_run", number),
    ("of its gradient", "share_run", share),
    ("tokens in the replay", "tokens_replay", number),
    ("of its gradient", "share_replay", share),
)
COMPLETIONS: tuple[Column, ...] = (
    ("group", "group", text),
    ("row", "row", text),
    ("reward", "reward", number),
    ("tokens", "tokens", number),
    ("advantage in the run", "advantage_run", number),
    ("in the replay", "advantage_replay", number),
    ("of the run's gradient", "share_run", share),
    ("of the replay's", "share_replay", share),
    ("end of the text", "text", one_line),
)
STRONGEST: tuple[Column, ...] = (
    ("group", "group", text),
    ("row", "row", text),
    ("place", "position", text),
    ("text before", "before", one_line),
    ("token", "text", one_line),
    ("change", "change", words),
    ("coefficient in the run", "coefficient_run", number),
    ("in the replay", "coefficient_replay", number),
)
LEFT = {text, words, one_line}
"""How columns are shown that are not numbers."""


def replays_of(history: Run) -> list[dict[str, Any]]:
    """The replays of a run for the template, in the order of their names."""
    try:
        names = sorted(name for name in os.listdir(history.path / "replays") if name.endswith(".json"))  # noqa: PTH208
    except OSError:
        return []
    found = []
    for name in names[:MAX_REPLAYS]:
        result = history.json(f"replays/{name}")
        found.append(
            {"name": name[:-5], "title": "", "sentence": f"replays/{name} cannot be read", "notes": [], "tables": []}
        )
        if result is not None:
            found[-1] |= _replay(result)
    return found


def _replay(result: Mapping[str, Any]) -> dict[str, Any]:
    objective = _mapping(result.get("objective"))
    tables = [
        _table("Gradient", GRADIENT, _gradients(result)),
        _table("Tokens by what they have in place of a gradient", CAUSES, result.get("causes")),
        _table("By the sign of the advantage", SIGNS, result.get("signs")),
        _table("Completions that drive the gradient most", COMPLETIONS, result.get("completions")),
        _table("Tokens that change most", STRONGEST, result.get("strongest")),
    ]
    return {
        "sentence": text(result.get("sentence")),
        "title": f"Step {text(result.get('step'))}: {text(objective.get('run'))} → {text(objective.get('replay'))}",
        "notes": [*map(text, _listed(objective.get("changes"))), *map(text, _listed(result.get("notes")))],
        "tables": [table for table in tables if table["rows"]],
    }


def _gradients(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The gradients in both spaces, whole and by term."""
    found = []
    for space in ("parameters", "logits"):
        whole = _mapping(result.get(space))
        terms = {name: _mapping(one) for name, one in _mapping(whole.get("terms")).items()}
        found += [{**one, "space": space, "term": name} for name, one in ({"whole": whole} | terms).items() if one]
    return found


def _table(title: str, columns: Sequence[Column], rows: Any) -> dict[str, Any]:
    heads = [{"name": name, "number": form not in LEFT} for name, _, form in columns]
    cells = [[form(row.get(key)) for _, key, form in columns] for row in _listed(rows)[:REPLAY_ROWS] if _mapping(row)]
    return {"title": title, "heads": heads, "rows": cells}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
