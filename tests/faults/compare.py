"""Where two runs part: the first step and the first quantity in which their folders differ, bit by bit.

    python -m tests.faults.compare RUN_A RUN_B

The exit code is 0 if all that both runs have is equal, even if one is longer, and 1 if not.

The quantities of a step are compared in the order in which they are computed: what was sampled, its rewards, the
updates, the evaluation, the weights and states after it. Times are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from torch import Tensor

from cohort.errors import RunFolderError
from cohort.runs.checkpoints import LOOP, saved_identity
from cohort.runs.models import read_tensors
from cohort.runs.reader import Run, flat
from cohort.runs.reading import damage_named, read_object

SAMPLED = ("prompts/", "completions/", "length/", "episodes/", "rollout/")
SCORED = ("reward", "custom/", "groups/", "advantage/")
EVALUATED = ("eval/",)
"""How the names of metrics begin, by stage; all others are of the updates."""
OF_THE_CLOCK = ("time", "seconds", "tokens_per_second", "memory/", "parallel/", "vllm/")
"""How the names of metrics begin that differ between two runs of the same computation: their times and loads."""
OF_THE_PLACE = ("output_dir",)
"""Names in the settings and in the summary that say where a run is."""
SHOWN = 12
"""Differences of the first step that are printed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A quantity in which two runs differ."""

    step: int
    quantity: str
    """Such as "rollout: token_ids" or "metrics: grad_norm"."""
    detail: str
    """Where, and both values."""

    def __str__(self) -> str:
        return f"step {self.step}, {self.quantity}: {self.detail}"


def read_whole(path: str | Path) -> Run:
    """The run in a folder, none of whose files is damaged.

    Raises:
        RunFolderError: it is not a run folder, or a file of it cannot be read.
    """
    run = Run.read(path)
    if run.damaged:
        raise RunFolderError(f"{run.path} is damaged: {run.damaged[0]}")
    if not run.settings:
        raise RunFolderError(f"{run.path} is not a run folder: it has no config.toml")
    return run


def differences(a: Run, b: Run) -> Iterator[Difference]:
    """The differences of what both runs have, in the order in which it was computed. Checkpoints of a stop
    in an evaluation are left out.

    Raises:
        RunFolderError: a file cannot be read.
    """
    rollouts, evaluations = _common(a.rollouts, b.rollouts), _common(a.evaluations, b.evaluations)
    checkpoints = _common(a.checkpoints, b.checkpoints)
    checkpoints = {step: pair for step, pair in checkpoints.items() if not any(map(_before_its_evaluation, pair))}
    metrics = _common(_by_step(a), _by_step(b))
    steps = {*metrics, *rollouts, *(step for step, _ in evaluations), *checkpoints}
    for step in sorted(steps):
        if step in rollouts:
            yield from _tables(step, "rollout", rollouts[step])
        changed = _changed(*map(_timeless, metrics[step])) if step in metrics else []
        yield from (Difference(step, f"metrics: {key}", text) for key, text in changed if not key.startswith(EVALUATED))
        for key in [key for key in evaluations if key[0] == step]:
            yield from _tables(step, f"evaluation{key[1] and ' of ' + key[1]}", evaluations[key])
        yield from (Difference(step, f"metrics: {key}", text) for key, text in changed if key.startswith(EVALUATED))
        if step in checkpoints:
            yield from _models(step, "checkpoint", checkpoints[step])
    yield from _ends(a, b, max(steps, default=0))


def only_in(a: Run, b: Run) -> list[str]:
    """What the first run has and the second lacks. Files of steps that the second has not made are left out."""
    made, others = _by_step(b), _tables_of(b)
    more = [step for step in sorted(_by_step(a)) if step not in made]
    found = [f"step{'s' * (len(more) > 1)} {_spans(more)}"] if more else []
    found += [name for name, step in _tables_of(a).items() if name not in others and step not in more]
    found += [f"checkpoints/step-{step}" for step in a.checkpoints if step not in b.checkpoints and step not in more]
    return found + [name for name in ("best", "summary.json") if (a.path / name).exists() > (b.path / name).exists()]


def changed_settings(a: Run, b: Run) -> list[tuple[str, str]]:
    """Settings that differ, with both values."""
    changed = _changed(a.flat_settings(), b.flat_settings())
    return [(key, text) for key, text in changed if not key.endswith(OF_THE_PLACE)]


def changed_facts(a: Run, b: Run) -> list[tuple[str, str]]:
    """Recorded facts about data, functions and versions that differ, with both values."""
    return _changed(_facts(a), _facts(b))


def last_step(a: Run, b: Run) -> int:
    """The last step with metrics in both runs; 0 without any."""
    return max(_common(_by_step(a), _by_step(b)), default=0)


def _spans(steps: Sequence[int]) -> str:
    """Steps in order as text.

    >>> _spans([1, 2, 3, 5])
    '1 to 3, 5'
    """
    ends = [step for step in steps if step + 1 not in steps]
    begins = [step for step in steps if step - 1 not in steps]
    return ", ".join(str(one) if one == last else f"{one} to {last}" for one, last in zip(begins, ends, strict=True))


def _ends(a: Run, b: Run, step: int) -> Iterator[Difference]:
    """The differences of the best models and of the summaries: only of runs that have made the same steps."""
    if max(_by_step(a), default=0) != max(_by_step(b), default=0):
        return
    best = (a.path / "best", b.path / "best")
    if all(path.exists() for path in best):
        records = [_table(path / "best.json") for path in best]
        step_of_best = records[0].get("step", step)
        yield from (Difference(step_of_best, f"best model: {key}", text) for key, text in _changed(*records))
        yield from _models(step_of_best, "best model", best)
    summaries = (a.path / "summary.json", b.path / "summary.json")
    if all(path.exists() for path in summaries):
        pair = [_timeless(_table(path)) for path in summaries]
        yield from (Difference(step, f"summary: {key}", text) for key, text in _changed(*pair))


def _tables_of(run: Run) -> dict[str, int]:
    """The steps of the tables, by name."""
    evaluations = ((path, step) for (step, _), path in run.evaluations.items())
    files = [*((path, step) for step, path in run.rollouts.items()), *evaluations]
    return {str(path.relative_to(run.path)): step for path, step in files}


def _facts(run: Run) -> dict[str, str]:
    """What the newest checkpoint records besides the settings, such as the hash of the prompts."""
    return dict(saved_identity(run.checkpoints[max(run.checkpoints)])) if run.checkpoints else {}


def _by_step(run: Run) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in run.rows}


def _table(path: Path) -> dict[str, Any]:
    """The entries of a JSON file, without the times, at any depth."""
    with damage_named(path):
        return dict(_without_times(read_object(path)))


def _without_times(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_times(value) for key, value in tree.items() if not key.startswith(OF_THE_CLOCK)}
    return [_without_times(one) for one in tree] if isinstance(tree, list) else tree


def _common(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    return {key: (value, b[key]) for key, value in a.items() if key in b}


def _timeless(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics by stage, without those of the clock."""
    kept = {key: value for key, value in metrics.items() if not key.startswith(OF_THE_CLOCK + OF_THE_PLACE)}
    names = sorted(kept, key=lambda key: (not key.startswith(SAMPLED), not key.startswith(SCORED)))
    return {key: kept[key] for key in names}


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys whose values differ, with both values."""
    absent = object()
    keys = dict.fromkeys([*a, *b])
    pairs = {key: (a.get(key, absent), b.get(key, absent)) for key in keys}
    return [
        (key, " and ".join("absent" if value is absent else _short(value) for value in pair))
        for key, pair in pairs.items()
        if repr(pair[0]) != repr(pair[1])  # so that NaN equals NaN and 0.0 differs from -0.0
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:80]} ... {text[-30:]}"


def _tables(step: int, what: str, paths: tuple[Path, Path]) -> Iterator[Difference]:
    """The columns in which two tables differ."""
    try:
        a, b = (pyarrow.parquet.read_table(path) for path in paths)
        for table in (a, b):
            table.select(table.column_names)  # which fails if two columns have one name
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise RunFolderError(f"cannot read {paths[0]} and {paths[1]}: {error}") from None
    if a.num_rows != b.num_rows:
        yield Difference(step, f"{what}: rows", f"{a.num_rows} and {b.num_rows}")
        return
    for name in dict.fromkeys(name for name in [*a.column_names, *b.column_names] if not name.startswith(OF_THE_CLOCK)):
        if name not in a.column_names or name not in b.column_names:
            yield Difference(step, f"{what}: {name}", "only one run has this column")
        elif not _same_column(a.select([name]), b.select([name])):
            columns = (a.column(name).to_pylist(), b.column(name).to_pylist())
            rows = [row for row, pair in enumerate(zip(*columns, strict=True)) if repr(pair[0]) != repr(pair[1])]
            if rows:
                groups = a.column("group").to_pylist() if "group" in a.column_names else None
                where = f"completion {rows[0]}" + (f" (group {groups[rows[0]]})" if groups else "")
                text = _first_place(columns[0][rows[0]], columns[1][rows[0]])
                yield Difference(step, f"{what}: {name}", f"{where}{text}; {len(rows)} of {a.num_rows} rows")
    metadata = [
        {key.decode("utf-8", "replace"): value for key, value in (one.schema.metadata or {}).items()} for one in (a, b)
    ]
    yield from (Difference(step, f"{what}: {key}", text) for key, text in _changed(*metadata))


def _same_column(a: Any, b: Any) -> bool:
    """Whether two columns have the same bytes; columns with absent values may be equal and have others."""
    pairs = [one.combine_chunks().to_batches() for one in (a, b)]
    return bool([batch.serialize() for batch in pairs[0]] == [batch.serialize() for batch in pairs[1]])


def _first_place(a: Any, b: Any) -> str:
    """The first place at which two values of a table differ."""
    if isinstance(a, list) and isinstance(b, list):
        for place, pair in enumerate(zip(a, b, strict=False)):
            if repr(pair[0]) != repr(pair[1]):
                return f", position {place}: {_short(pair[0])} and {_short(pair[1])}"
        return f": {len(a)} and {len(b)} entries"
    return f": {_short(a)} and {_short(b)}"


def _before_its_evaluation(checkpoint: Path) -> bool:
    """Whether a checkpoint is of a run that was stopped in the evaluation after its step."""
    return (checkpoint / LOOP).exists() and _table(checkpoint / LOOP).get("metrics") is not None


def _models(step: int, what: str, folders: tuple[Path, Path]) -> Iterator[Difference]:
    """The files of a saved model, and of the state beside it, in which two folders differ."""
    yield from _tensors(step, f"{what}: weights", [sorted(folder.glob("*.safetensors")) for folder in folders])
    for name in ("optimizer", "reference"):
        files = [folder / "state" / f"{name}.safetensors" for folder in folders]
        if all(file.exists() for file in files):
            yield from _tensors(step, f"{what}: {name}", [[file] for file in files])
        elif files[0].exists() != files[1].exists():
            yield Difference(step, f"{what}: {name}", "only one run has it")
    if all((folder / LOOP).exists() for folder in folders):
        pair = [_table(folder / LOOP) for folder in folders]
        for loop in pair:
            loop.pop("identity", None)  # facts, which ``changed_facts`` compares
        yield from (Difference(step, f"{what}: {key}", text) for key, text in _changed(*map(dict, map(flat, pair))))


def _tensors(step: int, quantity: str, files: Sequence[Iterable[Path]]) -> Iterator[Difference]:
    """The first tensor in which two models differ, and how many do."""
    try:
        a, b = ({name: one for file in some for name, one in read_tensors(file).items()} for some in files)
    except Exception as error:  # safetensors raises an error of its own
        raise RunFolderError(f"cannot read {quantity} of step {step}: {error}") from None
    names = list(dict.fromkeys([*a, *b]))
    different = [name for name in names if name not in a or name not in b or not _same_bits(a[name], b[name])]
    if different:
        first = different[0]
        where = _first_number(a[first], b[first]) if first in a and first in b else "only one run has it"
        yield Difference(step, quantity, f"{first}: {where}; {len(different)} of {len(names)} tensors")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _first_number(a: Tensor, b: Tensor) -> str:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    rows = [_bytes(one).reshape(-1, one.element_size()) for one in (a, b)]
    places = (rows[0] != rows[1]).any(1).nonzero().flatten()
    place = int(places[0])
    pair = [one.reshape(-1)[place].item() for one in (a, b)]
    return f"{pair[0]!r} and {pair[1]!r} at {place}, {len(places):,} of {a.numel():,} numbers"


def main(run_a: str, run_b: str) -> int:
    """Print where two runs part; returns the exit code."""
    a, b = read_whole(run_a), read_whole(run_b)
    for title, changed in (("settings", changed_settings(a, b)), ("data and versions", changed_facts(a, b))):
        if changed:
            print(f"{title} that differ:", *(f"  {key}: {values}" for key, values in changed), sep="\n")
    found = differences(a, b)
    first = next(found, None)
    if first is None:
        print(f"no difference in what both runs have, up to step {last_step(a, b)}")
    else:
        print(f"the runs part in step {first.step}, {first.quantity}: {first.detail}")
        later = [one for one in islice(found, SHOWN) if one.step == first.step]
        if later:
            print(f"then in step {first.step}:", *(f"  {one.quantity}: {one.detail}" for one in later), sep="\n")
    for name, missing in (("A", only_in(a, b)), ("B", only_in(b, a))):
        if missing:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            print(f"only {name} has {', '.join(missing[:4])}{more}")
    return 1 if first else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
