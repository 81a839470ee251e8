"""What the page says in words and tables: state, figures, settings, environment, evaluation, timing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from cohort.errors import RunFolderError
from cohort.lock import LOCK, Lock
from cohort.report.files import default_settings, flat
from cohort.report.history import RunHistory
from cohort.report.page.blocks import MAX_KEY, short
from cohort.report.words import PHASES, duration
from cohort.runs.starts import how_to_continue

HEADLINE = re.compile(r"(^|/)(reward|pass@1)/mean$")
MAX_VALUE = 2_000
"""Characters of a setting's value that are shown."""
MAX_ROWS = 1_000
"""Rows of a table."""
MAX_EVALUATIONS = 200
MAX_ENTRIES = 200_000
"""Files and folders that are looked at for the size of a run folder."""


def run_state(history: RunHistory) -> tuple[str, str]:
    """The state of a run, as a word for style and in words."""
    last = history.metrics[-1]["step"] if history.metrics else 0
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


def figures(history: RunHistory) -> list[tuple[str, str, str]]:
    """The figures of the head: name, value, remark."""
    found: list[tuple[str, str, str]] = []
    if history.metrics:
        found.append(("Steps", f"{history.metrics[-1]['step']:,}", ""))
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


def _evaluation_keys(history: RunHistory) -> list[str]:
    keys = [key for key in history.keys() if len(key) <= MAX_KEY]  # noqa: SIM118
    return [key for key in keys if key.startswith("eval/") and key.endswith("/mean")]


def _evaluated(history: RunHistory, key: str) -> tuple[str, str, str]:
    """The first and the last value of an evaluation's mean, with the interval of the last."""
    steps, values = history.series(key)
    last = next(line for line in history.metrics if line["step"] == steps[-1])
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


def settings_table(history: RunHistory) -> list[dict[str, Any]]:
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


def environment(history: RunHistory) -> dict[str, Any]:
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


def evaluations(history: RunHistory) -> dict[str, Any]:
    """The evaluations by step: a mean with its interval for each metric."""
    means = _evaluation_keys(history)[:24]
    lines = [line for line in history.metrics if any(line.get(key) is not None for key in means)]
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


def timing(history: RunHistory) -> dict[str, Any]:
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


def _clock(history: RunHistory) -> list[str]:
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
