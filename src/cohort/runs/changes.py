"""The differences between a run and the process that resumes it, and which of them change results.

Settings are compared with ``config.toml``, everything else with the facts that a checkpoint stores: hashes of data,
code and model, versions, and the machine. Names of files do not matter, since what they hold is compared.
"""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import torch

from cohort.config import GRPOConfig, hide_secrets, with_absolute_names
from cohort.config.schema import marks_of, value_at
from cohort.errors import ConfigError, RunFolderError, did_you_mean
from cohort.presets import setting_names

# ----------------------------------------
# Facts about a run that are not settings and on which its results depend: versions, threads, the machine.


PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
"""Packages that every run computes with."""
version = functools.cache(metadata.version)
"""The version of an installed package, which a process reads once."""


def entries(values: Mapping[str, str]) -> str:
    """Several values as one fact: "a=1, b=2". Commas and equals signs within are replaced."""
    plain = {name.translate(_SEPARATORS): value.translate(_SEPARATORS) for name, value in values.items()}
    return ", ".join(f"{name}={value}" for name, value in sorted(plain.items()))


_SEPARATORS = str.maketrans({",": ";", "=": ":"})


def versions(more: Iterable[str] = ()) -> str:
    """The versions of Cohort, Python and the packages that a run computes with."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("cohort-rl", *PACKAGES, *more):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return entries(found)


def machine(device: torch.device) -> str:
    """The processor that computes, and the instructions that torch uses on a CPU."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    return f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def take_threads(saved: Mapping[str, str], ranks: int) -> str:
    """Take as many threads as the run had, since rounding depends on them; returns a note if that is a change.

    With another number of ranks, the threads of this process remain: its share of the work is another.
    """
    threads, before = saved.get("threads", ""), torch.get_num_threads()
    if not re.fullmatch("[1-9][0-9]{0,2}", threads) or saved.get("ranks") != str(ranks) or int(threads) == before:
        return ""
    torch.set_num_threads(int(threads))
    return f"threads: {threads}, as the run had, not {before}; --allow-changed threads computes with {before}"


HASHED = {"prompts", "columns", "code", "values", "model"}
"""Facts that are hashes."""
REFUSED = {"prompts", "columns", "values", "model", "rewards", "tools", "precision", "versions"}
"""Facts that change results."""
ROUNDING = {"threads", "ranks", "machine"}
"""Facts that change results by rounding: the owner of a run does not always decide them."""
FACTS = (*sorted(REFUSED), "code", *sorted(ROUNDING))
"""All that are compared. That the files of the user's code have changed is said, and may change nothing."""
MARKS = marks_of(GRPOConfig)
UNSTEADY = ROUNDING | {"code"} | {name for name, mark in MARKS.items() if mark.resume == "drifts"}
"""What may change on resume though later weights change with it, if only by rounding."""


@dataclass(frozen=True, slots=True)
class Change:
    """Something that differs."""

    key: str
    """A setting, or the name of a fact."""
    words: str
    """What it was and is."""
    refused: bool
    """Whether it changes results by more than rounding."""
    keep: str = ""
    """The flag that keeps the run's value; empty if there is none to recommend."""

    @property
    def reaches_weights(self) -> bool:
        """Whether the run has other weights after it, if only by rounding."""
        return self.refused or self.key in UNSTEADY

    def __str__(self) -> str:
        return f"{self.key}: {self.words}"


def check_keys(allowed: Collection[str]) -> None:
    """Check the keys of ``--allow-changed``.

    Raises:
        ConfigError: one is neither a setting nor a fact; names the nearest.
    """
    known = [*FACTS, *MARKS]
    for key in allowed:
        if key not in known:
            facts = ", ".join(sorted(FACTS))
            raise ConfigError(f"--allow-changed {key}: expected a setting or one of {facts}{did_you_mean(key, known)}")


def setting_changes(saved: GRPOConfig, now: GRPOConfig, *, facts_known: bool = True) -> list[Change]:
    """The settings that differ.

    Args:
        saved: the run's settings.
        now: those of this process.
        facts_known: whether the run has stored the facts that stand for settings that are names.
    """
    saved, now = with_absolute_names(saved), with_absolute_names(now)  # those of older runs are relative
    # The same objective may be written in several ways.
    same = saved.resolved_objective.settings() == now.resolved_objective.settings()
    left_out = {f"objective.{name}" for name in ("preset", *setting_names())} if same else set()
    left_out.add("run.output_dir")
    # An unset number of minibatches is the preset's.
    resolved = {"objective.minibatches": (saved.objective.resolved_minibatches, now.objective.resolved_minibatches)}
    may = {"free", "drifts", *(("facts",) if facts_known and not now.data.streaming else ())}
    found = list[Change]()
    if raised := _raised_preset(saved, now, same=same):
        found, left_out = [raised], left_out | {"objective.preset", "objective.minibatches"}
    for key, mark in MARKS.items():
        # A run folder holds no secrets.
        before, after = resolved.get(key) or (hide_secrets(value_at(config, key)) for config in (saved, now))
        if before == after or key in left_out or (mark.resume == "facts" and not (before and after)):
            continue  # the last: given in Python, without a name
        words = f"the run has {_shown(before)}, now {_shown(after)}"
        if key in ("run.max_steps", "run.num_epochs") and now.optim.depends_on_the_end:
            words += (
                f"; the learning rate ({now.optim.lr_scheduler_type}) goes on as that of a run with the new end, which "
                "differs from the run's so far"
            )
        found.append(Change(key, words, mark.resume not in may))
    return found


def _raised_preset(saved: GRPOConfig, now: GRPOConfig, *, same: bool) -> Change | None:
    """The change to another version of the run's preset, if that changes the objective or the updates."""
    before, after = saved.objective, now.objective
    updates = f"minibatches {before.resolved_minibatches}, now {after.resolved_minibatches}"
    updates = updates if before.resolved_minibatches != after.resolved_minibatches else ""
    name, of_run = after.preset.partition("@")[0], before.preset.partition("@")[0]
    if name != of_run or before.preset == after.preset or after.minibatches or (same and not updates):
        return None
    words = f"preset {name} is {after.preset} now; the run has {before.preset}" + (updates and f" ({updates})")
    return Change("objective.preset", words, refused=True, keep=f"--objective.preset {before.preset}")


def fact_changes(saved: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """The facts that differ, of those that both have."""
    found = []
    for key in FACTS:
        before, after = saved.get(key), now.get(key)
        if key == "tools":  # stored only of runs that have some
            before, after = before or "none", after or "none"
        if before is not None and after is not None and before != after:
            found.append(Change(key, _difference(key, before, after), key in REFUSED))
    return sorted(found, key=lambda change: (not change.refused, change.key))


def refuse(path: Path, changes: Sequence[Change], allowed: Collection[str]) -> None:
    """Refuse to resume with changes that change results.

    Raises:
        RunFolderError: names those that are not allowed, and how to allow them.
    """
    never = {name for name, mark in MARKS.items() if mark.resume == "never"}
    refused = [change for change in changes if change.refused and change.key not in {*allowed} - never]
    if not refused:
        return
    lines = "\n  ".join(map(str, refused))
    keys = " ".join(f"--allow-changed {change.key}" for change in refused)
    names = ", ".join(repr(change.key) for change in refused)
    kept = " ".join(change.keep for change in refused if change.keep)
    how = f"To go on all the same: {keys}; in Python, train(resume=True, allow_changed=[{names}])"
    if kept:
        how = f"To keep what the run has: {kept}\n{how}"
    if fixed := [change.key for change in refused if change.key in never]:
        how = f"The checkpoint does not fit another {fixed[0]}: start a new run with the checkpoint as model.path"
    raise RunFolderError(f"cannot resume {path}: what changes its results is different now\n  {lines}\n{how}")


def describe(changes: Sequence[Change]) -> list[str]:
    """The changes that a run goes on with, in words, one line each."""
    if not changes:
        return []
    rounding = {change.key for change in changes} & ROUNDING
    end = f" (rounding may differ from here on: {', '.join(sorted(rounding))})" if rounding else ""
    return [f"different from the run so far{end}:", *(f"  {change}" for change in changes)]


def _difference(key: str, before: str, after: str) -> str:
    """What a fact was and is; of one with several entries, the entries that differ."""
    if key == "prompts":
        return "other prompts, or in other order or weights"
    old, new = _entries(before), _entries(after)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if key in HASHED:
        how = (f"{name} is {_kind(old.get(name), new.get(name))}" for name in names)
        return ", ".join(how)
    if None in (*old, *new):
        return f"the run has {before}, now {after}"
    return ", ".join(f"{name} {new.get(name) or 'none'}, was {old.get(name) or 'none'}" for name in names)


def _kind(before: str | None, after: str | None) -> str:
    return "new" if before is None else "gone" if after is None else "not the same"


def _entries(value: str) -> dict[str | None, str]:
    """The entries of a fact like "a=1, b=2"; of any other, itself under None."""
    pairs = [part.partition("=") for part in value.split(", ") if part]
    return {name: rest for name, _, rest in pairs} if all(equals for _, equals, _ in pairs) else {None: value}


def _shown(value: Any) -> str:
    return "unset" if value is None else f"{value!r:.200}"
