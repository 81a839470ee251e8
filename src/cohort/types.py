"""The glossary: what flows between the rooms, as frozen dataclasses. Importing this module imports no torch.

Axis letters, used as suffixes of tensor names everywhere:

    P  prompts of a rollout             G  completions of one prompt (``num_generations``)
    S  completions ("sequences") of a rollout, S = P * G, in group order
    N  completion tokens of a batch, flat: the tokens of sequence 0, then those of sequence 1, ...
    V  vocabulary                       K  reward functions

A worked example. Two prompts, two completions each, of 3, 2, 1 and 2 tokens:

    group_S    = [0, 0, 1, 1]                   which group a completion belongs to
    lengths_S  = [3, 2, 1, 2]                   tokens per completion, end token included
    sequence_N = [0, 0, 0, 1, 1, 2, 3, 3]       which completion a token belongs to
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Message = Mapping[str, Any]
"""One chat message: ``{"role": ..., "content": ...}``."""

RESERVED_COLUMNS = frozenset(
    {
        *("prompts", "completions", "completion", "completion_ids", "finish_reasons", "finish_reason"),
        *("prefills", "prefill", "trainer_state", "log_extra", "log_metric"),
    }
)
"""What reward functions receive from Cohort itself: no column of the data may be called so."""


class FinishReason(StrEnum):
    """Why a completion ended, as the sampler saw it. Never guessed from token ids afterwards."""

    EOS = "eos"
    """The policy drew an end token. The end token is the completion's last token and part of the loss."""
    STOP = "stop"
    """The text came to contain a stop string. The tokens that spell it are part of the completion."""
    LENGTH = "length"
    """``max_completion_length`` tokens were drawn and none of them ended the completion: it is cut."""
    ERROR = "error"
    """The model gave logits that are not numbers: nothing could be drawn. The tokens before are kept, if there are any;
    the completion is neither scored nor trained on."""
    CANCELLED = "cancelled"
    """Sampling was called off before the completion ended."""

    @property
    def usable(self) -> bool:
        """Whether such a completion is scored and trained on."""
        return self not in (FinishReason.ERROR, FinishReason.CANCELLED)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data set, rendered to token ids."""

    uid: int
    """Identity of the prompt's group within the run: its place in the stream of prompts. Two groups never share it."""
    row_index: int
    """Which row of the data set."""
    token_ids: tuple[int, ...]
    text: str
    """What ``token_ids`` decode to, special tokens shown."""
    prompt: str | list[Message]
    """The row's prompt as reward functions receive it: a string, or a list of messages for a conversation."""
    columns: Mapping[str, Any]
    """All columns of the data; None where this row has no such column."""
    prefill: str = ""
    """What of the assistant's turn stands in the prompt already, as ``<think>`` does in some chat templates, or a last
    message that is to be continued. Completions do not hold it."""
    source: str = ""
    """Which source of a mixture the row is of. Empty: the data is no mixture."""

    @property
    def is_conversation(self) -> bool:
        """Whether the prompt is a list of messages; then completions reach the rewards as messages too."""
        return not isinstance(self.prompt, str)


@dataclass(frozen=True, slots=True)
class Support:
    """Which tokens each draw of a completion could have given, where that was not the whole vocabulary: what top-k,
    top-p, min-p, a grammar or a minimum length left. Ragged: position n has ``counts_N[n]`` of ``token_ids_K``.

    Example: with V = 5, ``token_ids_K = [1, 3, 0]``, ``counts_N = [2, 1]``, ``excluded_N = [False, True]`` say that the
    first token was drawn from {1, 3} and the second from {1, 2, 3, 4}.
    """

    token_ids_K: NDArray[np.int32]
    counts_N: NDArray[np.int32]
    excluded_N: NDArray[np.bool_]
    """Where True, the listed tokens are those that could *not* be drawn: the shorter of the two lists is kept."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Support) and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("token_ids_K", "counts_N", "excluded_N")
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Completion:
    """What the policy wrote after a prompt.

    ``token_ids`` includes the end token when there is one, so ``len(token_ids)`` is the number of loss tokens.
    Example: ids ``(5, 9, 2)`` with 2 the end token, ``finish_reason`` EOS, three ``sampler_logps``.
    """

    token_ids: tuple[int, ...]
    sampler_logps: tuple[float, ...]
    """log-probability of each token under the distribution it was drawn from; same length as ``token_ids``."""
    finish_reason: FinishReason
    text: str
    """``token_ids`` decoded, special tokens left out."""
    weights_version: int
    """How many optimizer updates the weights that sampled it had seen."""
    full_logps: tuple[float, ...] | None = None
    """log-probability of each token under the full softmax at the same temperature. None: the same as
    ``sampler_logps``, as nothing was left out and nothing was reweighted."""
    support: Support | None = None
    """What each token was drawn from. None: the whole vocabulary, or it was not asked for."""
    num_forced: int = 0
    """The first so many tokens were put there, not drawn: their ``sampler_logps`` are 0 and they are not trained on."""


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt; their rewards are compared with each other and with nothing else."""

    prompt: Prompt
    completions: tuple[Completion, ...]

    @property
    def usable(self) -> Group:
        """The group without completions that are neither scored nor trained on. May have none left."""
        return replace(self, completions=tuple(c for c in self.completions if c.finish_reason.usable))


@dataclass(frozen=True, slots=True)
class Scores:
    """Rewards of a rollout. A completion that a function cannot score has NaN there; see ``rewards.runner``."""

    rewards_S: Tensor
    """Weighted sum over functions, float64; NaN where no function gave a score."""
    by_function_SK: Tensor
    """Each function's own rewards, unweighted, float64; NaN where it returned ``None``."""
    names: tuple[str, ...]
    """The K functions' names, made unique."""
    weights: tuple[float, ...] | None = None
    """The K functions' weights; None: 1 each."""
    token_rewards_N: Tensor | None = None
    """Weighted sum of rewards per token, NaN where there is none; only from functions that reward tokens."""
    extras: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Columns that functions logged: S values each, None where nothing was logged."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """Why scoring a completion failed, by its place among the S; most have no entry."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Of each function, by the name of the metric: seconds in calls, completions it failed on, timeouts among them."""
    logged: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Numbers that functions logged, by name: one for every time."""

    def of(self, sequences: Sequence[int]) -> Scores:
        """Those of some completions. Rewards per token are not taken apart: filters do not go with them."""
        chosen = list(sequences)
        return replace(
            self,
            rewards_S=self.rewards_S[chosen],
            by_function_SK=self.by_function_SK[chosen],
            extras={name: [column[s] for s in chosen] for name, column in self.extras.items()},
            errors={place: self.errors[s] for place, s in enumerate(chosen) if s in self.errors},
        )

    def __add__(self, other: Scores) -> Scores:
        """Those of the completions of two rounds, one after the other; counts add up. Not for rewards per token."""
        import torch

        mine, theirs = len(self.rewards_S), len(other.rewards_S)
        return Scores(
            torch.cat([self.rewards_S, other.rewards_S]),
            torch.cat([self.by_function_SK, other.by_function_SK]),
            self.names,
            self.weights,
            extras={
                name: [*self.extras.get(name, [None] * mine), *other.extras.get(name, [None] * theirs)]
                for name in dict.fromkeys([*self.extras, *other.extras])
            },
            errors={**self.errors, **{mine + place: text for place, text in other.errors.items()}},
            counts={
                name: self.counts.get(name, 0) + other.counts.get(name, 0)
                for name in dict.fromkeys([*self.counts, *other.counts])
            },
            logged={
                name: [*self.logged.get(name, ()), *other.logged.get(name, ())]
                for name in dict.fromkeys([*self.logged, *other.logged])
            },
        )


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Scored completions as flat tensors: a whole rollout, one minibatch of it, or one microbatch.

    The four policies are kept apart by name. ``old_logps_N`` is None when one update uses the rollout: the old policy
    then IS the current one and the ratio is 1 by identity. ``ref_logps_N`` is None when ``beta`` is 0.
    The current policy's ``logps_N`` is not stored here: the update computes it with its graph.
    """

    prompt_ids: tuple[tuple[int, ...], ...]
    completion_ids: tuple[tuple[int, ...], ...]
    group_S: Tensor
    sequence_N: Tensor
    sampler_logps_N: Tensor
    truncated_S: Tensor
    """Which completions the length limit cut, boolean."""
    advantages_N: Tensor
    """0 until ``assign_advantages``."""
    loss_N: Tensor
    """Which tokens are in the loss, boolean. All but forced ones, unless truncated completions are masked."""
    old_logps_N: Tensor | None = None
    ref_logps_N: Tensor | None = None
    supports: tuple[Support | None, ...] = ()
    """What each completion's tokens were drawn from, for every policy's log-probs of them. Empty: the whole
    vocabulary."""
    repetition_penalty: float = 1.0
    """The sampler's, for the same log-probs. 1: none."""
    full_logps_N: Tensor | None = None
    """The sampler's log-probs over the whole vocabulary, where what was drawn from is another distribution and the
    log-probs here are not over that. None: ``sampler_logps_N`` are over what ours are over."""

    @property
    def num_sequences(self) -> int:
        """S, the number of completions."""
        return len(self.completion_ids)

    @property
    def num_tokens(self) -> int:
        """N, the number of completion tokens."""
        return int(self.sequence_N.numel())
