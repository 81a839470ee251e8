"""A stored step: ``rollouts/step-N.parquet`` as the groups, scores and log-probs that its updates worked on.

Axis N here is that of the file: the drawn tokens of all its completions, end to end, those that no update used
included. A log-prob that no update computed is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from cohort.config import GRPOConfig
from cohort.errors import RunFolderError
from cohort.report.rollouts import StoredStep
from cohort.rewards.runner import Scores
from cohort.runs.reader import Run
from cohort.runs.reading import damage_named
from cohort.types import Completion, Episode, FinishReason, Group, Prompt, Segment, Support, Turn

# ----------------------------------------
# What the file of a stored step says about the whole step, checked: anybody can have written it.


Count = Annotated[int, Field(ge=1, lt=2**31)]


class _Table(BaseModel):
    """A JSON object. Keys that a replay does not use are left out."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class _KL(_Table):
    beta: float = Field(ge=0)


class _Objective(_Table):
    kl: _KL
    top_entropy: float = 1.0


class _Update(_Table):
    skipped: bool
    learning_rate: float | None = Field(None, ge=0)


class Facts(_Table):
    """What holds for the whole step (``docs/store.md``)."""

    groups: int = Field(ge=0, lt=2**31)
    """Groups that were sampled."""
    minibatches: Count
    max_completion_length: Count
    microbatch_tokens: Count
    shared_prompts: bool
    objective: _Objective
    updates: list[_Update]
    reward_weights: dict[str, float]

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Facts:
        """Check the facts of a file.

        Raises:
            ValueError: one is missing, has another type than documented, or is out of bounds.
        """
        try:
            return cls.model_validate(facts)
        except ValidationError as error:
            first = error.errors()[0]
            name, got = ".".join(map(str, first["loc"])), repr(first["input"])
            raise ValueError(f"{name} of the step: {first['msg']}, got {got:.80}") from None

    @property
    def beta(self) -> float:
        """Weight of the KL in this step."""
        return self.objective.kl.beta

    @property
    def learning_rates(self) -> list[float | None]:
        """Of each update; None in the place of one that was skipped."""
        return [None if update.skipped else update.learning_rate for update in self.updates]


PLAIN = ("group", "row", "prompt", "completion", "finish_reason", "weights_version")
LISTS = ("prompt_ids", "token_ids", "sampler_logps", "drawn", "segment_lengths", "turn_lengths", "full_logps")
SUPPORT = tuple(f"support/{name}" for name in ("token_ids", "counts", "excluded"))
NEEDED = ("group", "completion", "finish_reason", "token_ids", "sampler_logps", "reward", "advantage")
"""Columns that every file has."""
CPU = torch.device("cpu")
KNOWN = ("logps", "old_logps", "ref_logps", "entropy", "collision")


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the tokens, float64, shape ``[N]`` each; NaN where it is not known."""

    logps_N: Tensor
    """Of the policy before the first update that used the token."""
    old_logps_N: Tensor
    ref_logps_N: Tensor
    entropy_N: Tensor
    collision_N: Tensor
    """``sum_v p_v^2`` where the token was drawn."""

    def filled(self, other: Known) -> Known:
        """The same with another's numbers where none is known."""
        pairs = {one.name: (getattr(self, one.name), getattr(other, one.name)) for one in fields(self)}
        return Known(**{name: torch.where(mine.isnan(), theirs, mine) for name, (mine, theirs) in pairs.items()})


@dataclass(frozen=True, slots=True)
class Stored:
    """A step as its file holds it."""

    path: Path
    step: int
    groups: list[Group]
    scores: Scores
    is_used_S: NDArray[np.bool_]
    """Whether an update used the completion."""
    minibatch_S: NDArray[np.int64] | None
    """The update of the first pass that used it, -1: none; None: not stored."""
    known: Known
    policy_N: Tensor | None
    """The policy term's coefficients as the updates had them; None: not stored."""
    kl_N: Tensor | None
    weight_N: Tensor | None
    """1/Z in the policy term as the updates had it; None: not stored."""
    dtype: torch.dtype
    """Of the updates' log-probs: float32 or float64."""
    facts: Facts
    """What the file says about the whole step."""
    has_old_logps: bool
    """Whether the updates had old log-probs; without them every ratio to the old policy is 1 by identity."""
    device: torch.device = CPU
    """Where an objective's coefficients are computed."""

    @property
    def completions(self) -> list[Completion]:
        """All completions, row after row."""
        return [completion for group in self.groups for completion in group.completions]

    @property
    def lengths_S(self) -> Tensor:
        """Drawn tokens of each completion."""
        return torch.tensor([completion.num_tokens for completion in self.completions], dtype=torch.long)

    @property
    def groups_missing(self) -> int:
        """How many of the step's groups are not stored."""
        return max(0, self.facts.groups - len(self.groups))

    def filled(self, other: Known) -> Stored:
        """The same step with another's numbers where none is known."""
        return replace(self, known=self.known.filled(other))


def read_step(run: Path, step: int, config: GRPOConfig) -> Stored:
    """Read a step of a run.

    Args:
        run: the run folder.
        step: the step, from 1.
        config: the run's settings.

    Raises:
        RunFolderError: the step has no file, or the file is damaged.
    """
    path = run / "rollouts" / f"step-{step}.parquet"
    if not path.is_file():
        raise RunFolderError(f"{run} has no rollouts/step-{step}.parquet: {_what_there_is(run)}")
    file = StoredStep.read(path)
    with damage_named(path):
        if missing := [name for name in NEEDED if name not in file]:
            raise ValueError(f"it has no column {', '.join(missing)}")
        if not len(file):
            raise ValueError("it holds no completions")
        return _stored(step, file, config)


def _what_there_is(run: Path) -> str:
    steps = list(Run(run).rollouts)
    if not steps:
        return (
            "no step is stored; set report.log_completions = true for the next run, and see report.store_steps and "
            "report.store_groups for how much of it is stored"
        )
    shown = ", ".join(map(str, steps)) if len(steps) < 8 else f"{steps[0]} to {steps[-1]}, {len(steps)} in all"
    return f"the stored steps are {shown}"


def _stored(step: int, file: StoredStep, config: GRPOConfig) -> Stored:
    facts = Facts.of(file.facts)
    groups, scores = _groups(file), _scores(file, facts)
    lengths_S = np.array([one.num_tokens for group in groups for one in group.completions], np.int64)

    def tokens(name: str) -> Tensor | None:
        return _flat(file.arrays(name), lengths_S) if name in file else None

    unknown_N = torch.full((int(lengths_S.sum()),), torch.nan, dtype=torch.float64)
    known = {f"{name}_N": unknown_N if (values := tokens(name)) is None else values for name in KNOWN}
    is_double = config.model.precision == "float64"
    if "logps" in file:
        is_double = file.table.schema.field("logps").type.value_type == pyarrow.float64()
    minibatch_S = None
    if "minibatch" in file:
        minibatch_S = np.array([-1 if one is None else one for one in file.values("minibatch")], np.int64)
    return Stored(
        path=file.path,
        step=step,
        groups=groups,
        scores=replace(scores, token_rewards_N=tokens("token_rewards")),
        is_used_S=np.array([one is not None for one in file.values("advantage")], np.bool_),
        minibatch_S=minibatch_S,
        known=Known(**known),
        policy_N=tokens("policy_coefficient"),
        kl_N=tokens("kl_coefficient"),
        weight_N=tokens("weight"),
        dtype=torch.float64 if is_double else torch.float32,
        facts=facts,
        has_old_logps=not bool(known["old_logps_N"].isnan().all()),
    )


def _flat(lists: Sequence[NDArray[Any] | None], lengths_S: NDArray[np.int64]) -> Tensor:
    """Lists end to end; NaN for the tokens of a null list."""
    pieces = [np.zeros(0)]
    for values, length in zip(lists, lengths_S.tolist(), strict=True):
        piece = np.full(length, np.nan) if values is None else np.asarray(values, np.float64)
        if len(piece) != length:
            raise ValueError("a list has another length than the completion has drawn tokens")
        if np.isinf(piece).any():
            raise ValueError("a number of a token is infinite")
        pieces.append(piece)
    return torch.from_numpy(np.concatenate(pieces))


# Groups and scores ----------------------------------------------------------------------------------------------------


def _groups(file: StoredStep) -> list[Group]:
    columns = {name: file.values(name) for name in (*PLAIN, "turn_rewards")}
    columns |= {name: file.arrays(name) for name in (*LISTS, *SUPPORT)}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    found = []
    for uid, some in groupby(rows, key=lambda row: row["group"]):
        members = list(some)
        first, text = members[0], members[0]["prompt"] or ""
        ids = () if first["prompt_ids"] is None else tuple(first["prompt_ids"].tolist())
        prompt = Prompt(uid, first["row"] or 0, ids, text, text, {})
        found.append(Group(prompt, tuple(map(_completion, members))))
    return found


def _completion(row: Mapping[str, Any]) -> Completion:
    ids, drawn = row["token_ids"].astype(np.int64), row["drawn"]
    lengths = np.array([len(ids)]) if row["segment_lengths"] is None else row["segment_lengths"]
    if lengths.sum() != len(ids) or (len(lengths) and lengths.min() < 0):
        raise ValueError("the segments of a completion have other lengths than its tokens")
    cuts = lengths.cumsum()[:-1]
    flags = [None] * (len(cuts) + 1) if drawn is None else np.split(drawn.astype(np.bool_), cuts)
    segments = tuple(Segment(*pair) for pair in zip(np.split(ids, cuts), flags, strict=True))
    return Completion(
        segments if len(lengths) else (),
        row["sampler_logps"].astype(np.float64),
        FinishReason(row["finish_reason"]),
        row["completion"] or "",
        row["weights_version"] or 0,
        None if row["full_logps"] is None else row["full_logps"].astype(np.float64),
        _support(row),
        _episode(row),
    )


def _support(row: Mapping[str, Any]) -> Support | None:
    """The tokens that each draw could have given."""
    values = [row[name] for name in SUPPORT]
    if any(value is None for value in values):
        return None
    dtypes = (np.int32, np.int32, np.bool_)
    support = Support(*(value.astype(dtype) for value, dtype in zip(values, dtypes, strict=True)))
    lengths = len(support.counts_N), len(support.excluded_N), int(support.counts_N.sum())
    if lengths != (len(row["sampler_logps"]), len(row["sampler_logps"]), len(support.token_ids_U)):
        raise ValueError("a support has another length than its completion")
    return support


def _episode(row: Mapping[str, Any]) -> Episode | None:
    """The turns, as far as advantages need them."""
    rewards, counts, reason = row["turn_rewards"], row["turn_lengths"], FinishReason(row["finish_reason"])
    if not rewards or counts is None:
        return None
    if reason.usable and counts.sum() != len(row["sampler_logps"]):
        raise ValueError("the turns of a completion have other lengths than its tokens")
    pairs = zip(counts.tolist(), rewards, strict=True)
    return Episode(tuple(Turn(count, reason, (), reward=reward) for count, reward in pairs))


def _scores(file: StoredStep, facts: Facts) -> Scores:
    names = tuple(name.removeprefix("rewards/") for name in file.names if name.startswith("rewards/"))
    rewards_S, *columns = (_numbers(file, name) for name in ("reward", *(f"rewards/{name}" for name in names)))
    return Scores(
        rewards_S=rewards_S,
        by_function_SK=torch.stack(columns, dim=1) if columns else rewards_S[:, None],
        names=names or ("reward",),
        weights=tuple(facts.reward_weights[name] for name in names) or None,
    )


def _numbers(file: StoredStep, name: str) -> Tensor:
    numbers = [math.nan if one is None else one for one in file.values(name)]
    if any(map(math.isinf, numbers)):
        raise ValueError(f"column {name!r} holds an infinite number")
    return torch.tensor(numbers, dtype=torch.float64)
