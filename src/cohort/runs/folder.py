"""The run folder: everything a run produces, readable without Cohort.

config.toml              the settings as resolved
objective.txt            the objective's formula with its numbers, and its coefficients as a table
metrics.jsonl            one line per step
first_prompt.txt         the first prompt as the model reads it, special tokens shown
rollouts/step-N.parquet  every completion of step N
evaluations/step-N.parquet  completions of the evaluation after step N (0: before the first); -NAME for a named set
best/                    the best model by eval.metric_for_best_model, as in checkpoints/, and best.json, which says why
checkpoints/step-N/      see ``checkpoints``
starts.jsonl             a line for each process that started or resumed the run (see ``starts``)
summary.json             written when the run ends
logs/rank-N.log          what ranks other than 0 print, under ``cohort launch``
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from torch import Tensor

from cohort.config import GRPOConfig, load_config, to_toml
from cohort.errors import RunFolderError
from cohort.objective import explain
from cohort.parallel import World, together
from cohort.rewards.scores import Scores
from cohort.runs.changes import Change, check_keys, refuse, setting_changes
from cohort.runs.checkpoints import (
    Models,
    SavedState,
    check_checkpoint,
    save_checkpoint,
    save_model,
    saved_identity,
)
from cohort.runs.durable import replaced, write_atomically, write_file, write_manifest
from cohort.runs.reading import read_best, read_metrics, read_object, steps_of
from cohort.runs.starts import STARTS, Start
from cohort.runs.trust import check_files, remember
from cohort.types import Completion, Episode, Group
from cohort.watchdog import waiting

WRITTEN = (
    *("first_prompt.txt", "objective.txt", "metrics.jsonl", "summary.json", STARTS),
    *("rollouts", "evaluations", "best", "checkpoints", "merged", "nonfinite"),
)
"""What a run writes beside its settings."""
log = logging.getLogger("cohort.runs")
NUMBERS = pyarrow.list_(pyarrow.float64())
"""A column of lists of numbers; None is null."""


class RunFolder:
    """The folder of one run.

    Args:
        path: the folder. It need not exist.
        keep_checkpoints: the number of newest checkpoints to keep; None: all.
    """

    def __init__(self, path: str | Path, *, keep_checkpoints: int | None = None) -> None:
        self.path = Path(path).expanduser()
        self._keep = keep_checkpoints
        self._whole: int | None = None

    @classmethod
    def next_free(cls, name: str, *, keep_checkpoints: int | None = None) -> RunFolder:
        """``runs/NAME-001``, or the first number without a folder."""
        paths = (Path("runs") / f"{name}-{number:03d}" for number in itertools.count(1))
        return cls(next(path for path in paths if not path.exists()), keep_checkpoints=keep_checkpoints)

    def check_free(self) -> None:
        """Check that the folder is empty or does not exist.

        Raises:
            RunFolderError: it is not.
        """
        check_files(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file: choose another run.output_dir")
        if not self.path.exists() or all(_is_no_run(path) for path in self.path.iterdir()):
            return
        if not self.is_run:
            raise RunFolderError(f"{self.path} is not empty: choose another run.output_dir")
        raise RunFolderError(
            f"{self.path} already holds a run: continue it with 'cohort resume {self.path}', or train(resume=True); or "
            "choose another run.output_dir"
        )

    @property
    def is_run(self) -> bool:
        """Whether the folder holds a run."""
        return (self.path / "config.toml").is_file()

    def start(self, config: GRPOConfig, first_prompt: str, *, anew: bool = False) -> None:
        """Create the folder of a new run.

        Args:
            config: the settings.
            first_prompt: the first prompt as the model reads it.
            anew: replace a run that ended before its first checkpoint.
        """
        if anew:
            self._clear()
        else:
            self.check_free()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / "config.toml", to_toml(config))  # first: it marks the folder as a run's
            write_atomically(self.path / "first_prompt.txt", first_prompt)
            write_atomically(self.path / "objective.txt", explain(config.resolved_objective) + "\n")
            remember(config)
        except OSError as error:
            raise RunFolderError(f"cannot write to run.output_dir: {error}") from None

    def _clear(self) -> None:
        """Remove what a run without a checkpoint has written, except its settings: until the new ones take their place,
        they mark the folder as a run's."""
        if steps := self.checkpoint_steps():
            raise RunFolderError(f"{self.path} has a checkpoint of step {steps[-1]} by now: another process writes it")
        for name in WRITTEN:
            path = self.path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def check_resumable(self, config: GRPOConfig, allowed: Collection[str] = ()) -> int:
        """The step of the newest whole checkpoint, if a run with these settings can continue from it. Every file of it
        is read.

        Raises:
            RunFolderError: there is no whole checkpoint, or a setting that changes results differs from the run's.
        """
        self.check_settings(config, allowed)
        if self._whole is None:
            self._whole = self._newest_whole()
        return self._whole

    def check_settings(self, config: GRPOConfig, allowed: Collection[str] = ()) -> list[Change]:
        """The settings that differ from the run's.

        Args:
            config: the settings now.
            allowed: keys of changes that are allowed though they change results.

        Raises:
            RunFolderError: the folder holds no run, or a setting that changes results differs and is not allowed.
        """
        self.check_is_run()
        check_keys(allowed)
        changes = setting_changes(load_config(self.path / "config.toml"), config, facts_known=self._facts_known())
        refuse(self.path, changes, allowed)
        return changes

    def check_is_run(self) -> None:
        """Check that the folder holds a run, and that nothing in it leads elsewhere.

        Raises:
            RunFolderError: it does not, or as ``check_files``.
        """
        check_files(self.path)
        if not self.path.exists():
            raise RunFolderError(f"there is no run folder {self.path} to resume")
        if not self.is_run:
            model = " It holds a model: to train it, set model.path to it, and run.output_dir to another folder."
            has_model = any((self.path / name).exists() for name in ("config.json", "adapter_config.json"))
            raise RunFolderError(f"{self.path} is not a run folder: it has no config.toml.{model if has_model else ''}")

    def _facts_known(self) -> bool:
        """Whether the run has stored the facts that stand for names in its settings."""
        steps = self.checkpoint_steps()
        try:
            return bool(steps) and "code" in saved_identity(self.checkpoint(steps[-1]))
        except RunFolderError:  # the checkpoint is broken, which is said when it is read
            return True

    def _newest_whole(self) -> int:
        """The newest checkpoint that is as it was written. Logs a warning that names what is wrong with newer ones."""
        broken: list[str] = []
        for step in reversed(self.checkpoint_steps()):
            try:
                check_checkpoint(self.checkpoint(step))
            except RunFolderError as error:
                broken.append(str(error))
                continue
            if broken:
                log.warning("%s; going on from step %s instead", "; ".join(broken), step)
            return step
        raise RunFolderError(f"{self.path} has no whole checkpoint to resume from: {'; '.join(broken)}")

    def resume(self, config: GRPOConfig, step: int) -> None:
        """Prepare the folder to continue after ``step``: set later checkpoints aside, which are broken, drop later
        metrics and the summary, and write the current settings."""
        (self.path / "summary.json").unlink(missing_ok=True)  # the end of the run writes it anew
        for later in (found for found in self.checkpoint_steps() if found > step):
            aside = self.checkpoint(later).with_name(f"step-{later}.broken")
            shutil.rmtree(aside, ignore_errors=True)
            self.checkpoint(later).rename(aside)
        self.drop_metrics_after(step)
        write_atomically(self.path / "config.toml", to_toml(config))

    def evaluations(self) -> dict[int, dict[str, Any]]:
        """Metrics of the evaluations so far, by step; 0 is the one before the first step."""
        found = {}
        for _, line in read_metrics(self.path / "metrics.jsonl"):
            if evaluated := {key: value for key, value in line.items() if key.startswith("eval/")}:
                found[line["step"]] = evaluated
        return found

    def record_start(self, start: Start, step: int, facts: Mapping[str, str]) -> None:
        """Append a line to ``starts.jsonl``."""
        with (self.path / STARTS).open("a", encoding="utf-8") as lines:
            lines.write(as_json(start.line(step, facts)))

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(as_json(metrics))

    def drop_metrics_after(self, step: int) -> None:
        """Remove the lines of steps that a resumed run repeats."""
        path = self.path / "metrics.jsonl"
        if path.exists():
            write_atomically(path, "".join(line for line, metrics in read_metrics(path) if metrics["step"] <= step))

    @property
    def has_summary(self) -> bool:
        """Whether the run has ended. A resumed run removes the summary when it begins."""
        return (self.path / "summary.json").is_file()

    def read_summary(self) -> dict[str, Any]:
        """The contents of ``summary.json``."""
        return read_object(self.path / "summary.json")

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json``."""
        write_atomically(self.path / "summary.json", as_json(summary, indent=2))

    def write_rollout(
        self, step: int, groups: Sequence[Group], scores: Scores, advantages: Sequence[Sequence[float] | None]
    ) -> None:
        """Write every completion of a step as a row of a Parquet file.

        Args:
            step: the step.
            groups: all sampled groups.
            scores: their scores.
            advantages: of each completion, the advantages of its tokens; None if no update used it.
        """
        columns = completion_columns(groups) | score_columns(scores)
        means = [None if tokens is None else _mean(tokens) for tokens in advantages]
        columns["advantage"] = pyarrow.array(means, pyarrow.float64())
        if any(len(set(tokens or ())) > 1 for tokens in advantages):
            columns["token_advantages"] = pyarrow.array(advantages, pyarrow.list_(pyarrow.float64()))
        write_table(columns, self.path / "rollouts" / f"step-{step}.parquet")

    def write_evaluation(self, step: int, name: str, table: Any) -> None:
        """Write every completion of an evaluation as a row of a Parquet file; ``name`` is the set's, or empty."""
        write_table(table, self.path / "evaluations" / f"step-{step}{name and '-' + name}.parquet")

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a complete checkpoint, in order."""
        return steps_of(self.path / "checkpoints")

    def checkpoint(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.path / "checkpoints" / f"step-{step}"

    @waiting("checkpoint")
    def save_checkpoint(self, models: Models, state: SavedState, world: World | None = None) -> None:
        """Write a checkpoint: ``step-N`` is always complete. Every rank must call; rank 0 writes."""
        self._replace(self.checkpoint(state.step), partial(save_checkpoint, models=models, state=state), world)
        for old in self.checkpoint_steps()[: -self._keep] if self._keep and (world is None or world.is_main) else []:
            shutil.rmtree(self.checkpoint(old))

    @property
    def best(self) -> Path:
        """The folder of the best model."""
        return self.path / "best"

    @waiting("saving the best model")
    def save_best(self, models: Models, record: dict[str, Any], world: World | None = None) -> None:
        """Replace the best model. ``best/`` is always complete; ``best_record`` recovers it after a kill at the moment
        when the new one takes its name. Every rank must call; rank 0 writes."""

        def save(folder: Path, *, write: bool) -> None:
            save_model(models.policy, models.tokenizer, folder, write=write)
            if write:
                write_manifest(folder, {"best.json": write_file(folder / "best.json", [as_json(record).encode()])})

        self._replace(self.best, save, world)

    def _replace(self, target: Path, save: Callable[..., None], world: World | None) -> None:
        """Run ``save(folder, write=...)`` on every rank, for rank 0 with a folder that takes the target's name."""
        world = world or World()

        def replace() -> None:
            with replaced(target) if world.is_main else nullcontext(target) as folder:
                save(folder, write=world.is_main)

        together(world, replace)

    def best_record(self) -> dict[str, Any] | None:
        """The contents of ``best/best.json``; None without a best model. Recovers what a killed ``save_best`` left."""
        old = self.path / "best.old"
        if old.exists() and not self.best.exists():
            old.rename(self.best)
        return read_best(self.best / "best.json") if self.best.exists() else None


def _is_no_run(path: Path) -> bool:
    """Whether a new run may find this in its folder: logs of ranks, or a file that a kill has left half written."""
    return path.name == "logs" or path.name.endswith(".toml.part")


def _mean(numbers: Sequence[float]) -> float:
    """Exact when all numbers are equal."""
    return numbers[0] if len(set(numbers)) == 1 else math.fsum(numbers) / len(numbers)


def as_json(value: Any, **settings: Any) -> str:
    """A value as JSON with a line break; null for NaN and infinity, which JSON lacks. ``settings`` are those of
    ``json.dumps``."""
    return json.dumps(_finite(value), allow_nan=False, **settings) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def completion_columns(groups: Sequence[Group]) -> dict[str, Any]:
    """The sampled completions. ``full_logps`` only if some completion has them."""
    prompts = [group.prompt for group in groups for _ in group.completions]
    completions = [completion for group in groups for completion in group.completions]
    columns: dict[str, Any] = {
        "group": [prompt.uid for prompt in prompts],
        "row": [prompt.row_index for prompt in prompts],
        "prompt": [prompt.text for prompt in prompts],
        "completion": [completion.text for completion in completions],
        "finish_reason": [str(completion.finish_reason) for completion in completions],
        "weights_version": [completion.weights_version for completion in completions],
        "sampler_logps": pyarrow.array([completion.sampler_logps for completion in completions], NUMBERS),
        **_token_columns(completions),
    }
    if any(prompt.source for prompt in prompts):
        columns["source"] = [prompt.source for prompt in prompts]
    if any(completion.episode for completion in completions):
        columns |= _episode_columns([completion.episode for completion in completions])
    if any(completion.full_logps is not None for completion in completions):
        columns["full_logps"] = pyarrow.array([completion.full_logps for completion in completions], NUMBERS)
    return columns


def _token_columns(completions: Sequence[Completion]) -> dict[str, Any]:
    """The token ids of all segments; which of them were drawn, unless all were; the segments' lengths, if there are
    several."""
    ids = [[segment.token_ids for segment in completion.segments] for completion in completions]
    columns = {"token_ids": _joined(ids, np.int64)}
    if any(segment.drawn is not None for completion in completions for segment in completion.segments):
        drawn = [[segment.is_drawn for segment in completion.segments] for completion in completions]
        columns["drawn"] = _joined(drawn, np.bool_)
    if any(len(some) != 1 for some in ids):
        columns["segment_lengths"] = [[len(one) for one in some] for some in ids]
    return columns


def _joined(arrays: Sequence[Sequence[Any]], dtype: Any) -> Any:
    """A column of lists, each the arrays of one completion end to end."""
    joined = [np.concatenate([np.zeros(0, dtype), *some]) for some in arrays]
    return pyarrow.array(joined, pyarrow.list_(pyarrow.from_numpy_dtype(dtype)))


def _episode_columns(episodes: Sequence[Episode | None]) -> dict[str, Any]:
    """The messages after the prompt as JSON, the environment's rewards, and why an episode is unusable."""
    some = [episode or Episode(()) for episode in episodes]
    return {
        "messages": _text_column([json.dumps(one.messages, ensure_ascii=False, default=str) for one in some]),
        "turn_lengths": [[turn.num_drawn for turn in one.turns] for one in some],
        "turn_rewards": pyarrow.array([[turn.reward for turn in one.turns] for one in some], NUMBERS),
        "environment_reward": pyarrow.array([one.reward for one in some], pyarrow.float64()),
        "episode_error": _text_column([one.error or None for one in some]),
    }


def score_columns(scores: Scores) -> dict[str, Any]:
    """The rewards; null when unscored."""
    columns: dict[str, Any] = {"reward": _reward_column(scores.rewards_S)}
    for name, column_S in zip(scores.names, scores.by_function_SK.T, strict=True):
        columns[f"rewards/{name}"] = _reward_column(column_S)
    if scores.errors:
        columns["reward_error"] = _text_column([scores.errors.get(s) for s in range(len(scores.rewards_S))])
    return columns | {f"extra/{name}": _extra_column(values) for name, values in scores.extras.items()}


def write_table(columns: Any, target: Path) -> None:
    """Write columns or a table as Parquet, atomically."""
    target.parent.mkdir(exist_ok=True)
    table = pyarrow.table(columns) if isinstance(columns, dict) else columns
    pyarrow.parquet.write_table(table, target.with_suffix(".part"))
    target.with_suffix(".part").replace(target)


def _reward_column(values_S: Tensor) -> Any:
    """A column of numbers, even if every entry is null."""
    return pyarrow.array(values_S.double().numpy(), from_pandas=True)  # which makes NaN null


def _extra_column(values: Sequence[Any]) -> Any:
    """A typed column if all values have one type, else text."""
    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError, TypeError, UnicodeError):
        return _text_column(values)


def _text_column(values: Sequence[Any]) -> Any:
    """Text; lone surrogates, which UTF-8 cannot encode, are escaped."""
    texts = [None if value is None else str(value).encode("utf-8", "backslashreplace").decode() for value in values]
    return pyarrow.array(texts, pyarrow.string())
