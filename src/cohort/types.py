"""The glossary: the data types that the rooms exchange, as frozen dataclasses. Importing it imports no torch.

Axis letters are suffixes of tensor names everywhere:

    P  prompts of a rollout; one prompt has one group      G  completions of one prompt (``num_generations``)
    S  sequences: the completions in the object that holds the tensor, in group order; at most P * G
    B  segments: the rows that the model reads. A sequence has one or more of them
    T  tokens of the segments, end to end: drawn by the policy, or given to it
    N  drawn tokens, flat, sequence by sequence: the axis of the objective
    Y  turns of the sequences, end to end; a completion without an episode is one turn
    V  vocabulary          K  reward functions          M  mismatch rules          U  entries of supports (ragged)

A worked example: two prompts and two completions each. The second completion of the first prompt called a tool: the
policy drew 7 and 8, the tool answered 40 and 41, and the policy drew 9. The last completion has two segments, because
its history was rewritten after the first turn: it drew 5 and 6; its second segment begins with the rewritten history
50, which the policy did not draw, and goes on with the drawn 4.

    completion      token ids            drawn              group_S      lengths_S
    0               [3, 1, 2]            all                0            3
    1               [7, 8, 40, 41, 9]    [1, 1, 0, 0, 1]    0            3
    2               [2]                  all                1            1
    3               [5, 6] and [50, 4]   all and [0, 1]     1            3

    sequence_B = [0, 1, 2, 3, 3]                    which completion a segment belongs to
    lengths_B  = [3, 5, 1, 2, 2]                    tokens per segment
    ids_T      = [3, 1, 2, 7, 8, 40, 41, 9, 2, 5, 6, 50, 4]
    drawn_T    = [1, 1, 1, 1, 1,  0,  0, 1, 1, 1, 1,  0, 1]
    sequence_N = [0, 0, 0, 1, 1, 1, 2, 3, 3, 3]     which completion a drawn token belongs to
    sequence_Y = [0, 1, 1, 2, 3, 3]                 which completion a turn belongs to
    turn_N     = [0, 0, 0, 1, 1, 2, 3, 4, 4, 5]     which of these turns a drawn token belongs to

Log-probs, entropies, advantages, coefficients and lengths are of drawn tokens, so they have axis N: no formula sees a
token that the policy did not draw, and no logits are computed for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Message = Mapping[str, Any]
"""One chat message: ``{"role": ..., "content": ...}``."""

RESERVED_COLUMNS = frozenset(
    {
        *("prompts", "completions", "completion", "completion_ids", "finish_reasons", "finish_reason"),
        *("prefills", "prefill", "trainer_state", "log_extra", "log_metric", "transcripts", "transcript"),
        *("environments", "environment_state", "environment_rewards", "environment_reward"),
    }
)
"""Names of what Cohort passes to reward functions. No column of the data may have one of them."""


class FinishReason(StrEnum):
    """Why a completion ended, as the engine saw it. It is never guessed from token ids afterwards."""

    EOS = "eos"
    """The policy drew an end token, which is the completion's last token and part of the loss."""
    STOP = "stop"
    """The text contains a stop string. The tokens that spell it are part of the completion."""
    LENGTH = "length"
    """The completion reached ``max_completion_length``, or a turn its own limit, and is truncated."""
    TURNS = "turns"
    """The episode reached ``environment.max_turns``."""
    ENVIRONMENT = "environment"
    """A tool or environment could not go on: it raised, exceeded its time limit, or died. The completion is neither
    scored nor trained on."""
    TIMEOUT = "timeout"
    """The episode exceeded ``environment.episode_timeout``. The completion is neither scored nor trained on."""
    ERROR = "error"
    """The logits were not finite, so no token could be drawn. The completion keeps the tokens before; it is neither
    scored nor trained on."""
    CANCELLED = "cancelled"
    """Sampling was cancelled before the completion ended."""

    @property
    def usable(self) -> bool:
        """Whether the completion is scored and trained on."""
        return self not in UNUSABLE


UNUSABLE = frozenset({FinishReason.ERROR, FinishReason.CANCELLED, FinishReason.ENVIRONMENT, FinishReason.TIMEOUT})


class ArrayEquality:
    """Compares dataclasses whose fields may be arrays: equal when every field is equal."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))  # type: ignore[arg-type]
        return all(
            np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs for mine, theirs in pairs
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data set, rendered to token ids."""

    uid: int
    """Identity of the prompt's group within the run: its index in the sequence of all prompts of the run."""
    row_index: int
    """Row of the data set."""
    token_ids: tuple[int, ...]
    text: str
    """``token_ids`` decoded, special tokens shown."""
    prompt: str | list[Message]
    """The prompt as reward functions receive it: a string, or a list of messages for a conversation."""
    columns: Mapping[str, Any]
    """All columns of the data set; None where this row lacks the column."""
    prefill: str = ""
    """The part of the assistant turn that is already in the prompt, such as ``<think>`` in some chat templates or a
    last message to be continued. Completions do not contain it."""
    source: str = ""
    """Name of the mixture's source that the row came from. Empty when the data is not a mixture."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template rendered the messages with: its variables, and ``tools``. Empty for text."""
    escaped: bool = False
    """Whether control tokens that its messages spell are plain text, with ``data.escape_control_tokens``."""

    @property
    def is_conversation(self) -> bool:
        """Whether the prompt is a list of messages; if so, completions reach reward functions as messages too."""
        return not isinstance(self.prompt, str)


Routes = NDArray[np.integer[Any]]
"""The experts of a mixture that tokens were routed to, ``[T, L, K]``: L layers of the model, dense ones counted, whose
entries mean nothing; K experts of a token, in any order. -1: not known. int8 up to 128 experts, else int16."""


def joined_routes(parts: Sequence[tuple[Routes | None, int]]) -> Routes | None:
    """Concatenate routes of so many tokens each. Where there are none they are -1; None if there are none at all.

    Raises:
        ValueError: they are of different models.
    """
    known = [routes for routes, _ in parts if routes is not None]
    if not known:
        return None
    shape = known[0].shape[1:]
    return np.concatenate([np.full((count, *shape), -1, np.int8) if one is None else one for one, count in parts])


def compact_routes(experts: NDArray[np.integer[Any]]) -> Routes:
    """Numbers of experts in the smallest signed dtype that holds those of any model of this size.

    >>> compact_routes(np.array([[[127, 3]]], np.uint8)).dtype, compact_routes(np.array([[[255, 3]]], np.uint8)).dtype
    (dtype('int8'), dtype('int16'))
    """
    return experts.astype(np.int8 if experts.max(initial=0) < 128 else np.int16)


@dataclass(frozen=True, slots=True, eq=False)
class Support(ArrayEquality):
    """The tokens that each draw of a completion could have given, when top-k, top-p, min-p, a grammar or a minimum
    length left some out. Ragged: draw n has the next ``counts_N[n]`` of ``token_ids_U``.

    Example: with V = 5, ``token_ids_U = [1, 3, 0]``, ``counts_N = [2, 1]`` and ``excluded_N = [False, True]`` mean that
    the first token was drawn from {1, 3} and the second from {1, 2, 3, 4}.
    """

    token_ids_U: NDArray[np.int32]
    counts_N: NDArray[np.int32]
    excluded_N: NDArray[np.bool_]
    """True where the listed tokens are those that could *not* be drawn. The shorter of the two lists is kept."""

    @classmethod
    def join(cls, supports: Sequence[Support | None], counts: Sequence[int]) -> Support | None:
        """Concatenate supports; None stands for ``counts`` draws from the whole vocabulary. None if all are None."""
        if not any(support is not None for support in supports):
            return None
        parts = [
            cls(np.zeros(0, np.int32), np.zeros(count, np.int32), np.ones(count, np.bool_)) if one is None else one
            for one, count in zip(supports, counts, strict=True)
        ]
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)))

    def select(self, draws_N: NDArray[np.int64]) -> Support:
        """The support of some draws, in the given order."""
        starts_N, counts_N = self.counts_N.cumsum() - self.counts_N, self.counts_N[draws_N]
        shifts_N = starts_N[draws_N] - (counts_N.cumsum() - counts_N)
        listed_U = np.repeat(shifts_N, counts_N) + np.arange(counts_N.sum())
        return Support(self.token_ids_U[listed_U], counts_N, self.excluded_N[draws_N])


@dataclass(frozen=True, slots=True, eq=False)
class Segment(ArrayEquality):
    """Token ids that the model reads after the group's prompt, and which of them the policy drew.

    Example: ``token_ids = [7, 8, 40, 41, 9]`` with ``drawn = [1, 1, 0, 0, 1]``: the policy drew 7 and 8, read the
    answer 40, 41 of a tool, and drew 9.
    """

    token_ids: NDArray[np.int64]
    drawn: NDArray[np.bool_] | None = None
    """One flag per token. None: the policy drew all of them."""
    routes: Routes | None = None
    """How the input that each token comes after was routed: entry 0 is of the prompt's last token, entry t of token
    t - 1. The last token is no input yet and has none. None: not recorded."""

    def __post_init__(self) -> None:
        assert self.routes is None or len(self.routes) == len(self.token_ids), "one entry of routes for each token"

    @property
    def is_drawn(self) -> NDArray[np.bool_]:
        """One flag per token, also where ``drawn`` is None."""
        return np.ones(len(self.token_ids), np.bool_) if self.drawn is None else self.drawn

    @property
    def drawn_ids(self) -> NDArray[np.int64]:
        """The drawn tokens."""
        return self.token_ids if self.drawn is None else self.token_ids[self.drawn]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode: what the policy wrote, and what tools and the environment answered."""

    num_drawn: int
    """Tokens that the policy drew in this turn."""
    finish_reason: FinishReason
    """Why the turn ended; the completion's own is that of the episode."""
    messages: tuple[Message, ...]
    """The assistant's message, then the answers: of tools, or of the user whom the environment plays."""
    calls: int = 0
    """Calls of tools."""
    failed_calls: int = 0
    """Calls that were answered with an error: unknown names, invalid arguments, exceptions, timeouts."""
    reward: float | None = None
    """The environment's reward for this turn."""
    seconds: float = 0.0
    """Time from the end of the turn until its answer was there."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What happened during a completion of several turns, besides its tokens."""

    turns: tuple[Turn, ...]
    reward: float | None = None
    """The environment's rewards of all turns, plus its reward at the end. None: it gave none."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """The public attributes of the environment at the end."""
    error: str = ""
    """Why the episode is unusable."""
    prompt: Sequence[Message] | None = None
    """The prompt with what the environment showed first, where that may differ within a group. None: the group's."""

    @property
    def messages(self) -> list[Message]:
        """All messages after the prompt."""
        return [message for turn in self.turns for message in turn.messages]


@dataclass(frozen=True, slots=True, eq=False)
class Completion(ArrayEquality):
    """A trajectory: what the policy wrote after a prompt, in one or more segments.

    A completion of one turn is one segment whose tokens are all drawn. The answer of a tool is tokens of a segment that
    are not drawn. When a chat template rewrites the history, the completion continues in another segment, which follows
    the same prompt.

    Example: token ids ``[5, 9, 2]`` with 2 the end token, finish reason EOS, and three ``sampler_logps``. The end token
    is part of ``token_ids``.
    """

    segments: tuple[Segment, ...]
    sampler_logps: NDArray[np.float64]
    """Log-probability of each drawn token under the distribution that it was drawn from."""
    finish_reason: FinishReason
    text: str
    """All segments' tokens decoded, special tokens left out."""
    weights_version: int
    """Number of optimizer updates that the sampling weights had seen."""
    full_logps: NDArray[np.float64] | None = None
    """Log-probability of each drawn token under the full softmax at the same temperature. None: equal to
    ``sampler_logps``, because nothing was left out or reweighted."""
    support: Support | None = None
    """The tokens that each draw could have given. None: the whole vocabulary, or not recorded."""
    episode: Episode | None = None
    """The turns of a completion with tools or an environment. None: one turn, with neither."""
    prompt_routes: Routes | None = None
    """How the tokens of the group's prompt but the last were routed. An update reads a prompt once: it takes those of
    the first completion of the prompt that has some. None: not recorded."""

    @classmethod
    def of_tokens(
        cls,
        token_ids: Sequence[int] | NDArray[np.int64],
        sampler_logps: Sequence[float] | NDArray[np.float64],
        finish_reason: FinishReason,
        text: str = "",
        weights_version: int = 0,
        *,
        drawn: Sequence[bool] | NDArray[np.bool_] | None = None,
        full_logps: Sequence[float] | NDArray[np.float64] | None = None,
        support: Support | None = None,
    ) -> Self:
        """A completion of one segment; sequences become arrays."""
        segment = Segment(
            np.asarray(token_ids, dtype=np.int64), None if drawn is None else np.asarray(drawn, dtype=np.bool_)
        )
        return cls(
            (segment,),
            np.asarray(sampler_logps, dtype=np.float64),
            finish_reason,
            text,
            weights_version,
            None if full_logps is None else np.asarray(full_logps, dtype=np.float64),
            support,
        )

    def __post_init__(self) -> None:
        assert len(self.sampler_logps) == self.num_tokens, "one log-prob for each drawn token"

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The drawn tokens of all segments."""
        if len(self.segments) == 1:
            return self.segments[0].drawn_ids
        return np.concatenate([np.zeros(0, np.int64), *(segment.drawn_ids for segment in self.segments)])

    def _after(self, prompt: Prompt, num_ids: int, length: int) -> Self:
        """The completion when a prompt has only so many tokens and characters: the others are given tokens of it."""
        rest = np.array(prompt.token_ids[num_ids:], np.int64)
        if not len(rest):
            return self
        start, end = None, None
        if self.prompt_routes is not None:
            cut = max(num_ids - 1, 0)
            start, end = self.prompt_routes[:cut], self.prompt_routes[cut:]
        segments = (
            Segment(
                np.concatenate([rest, one.token_ids]),
                np.concatenate([np.zeros(len(rest), np.bool_), one.is_drawn]),
                joined_routes([(end, len(rest)), (one.routes, len(one.token_ids))]),
            )
            for one in self.segments
        )
        text = prompt.text[length:] + self.text
        return replace(self, segments=tuple(segments), text=text, prompt_routes=start)

    @property
    def num_tokens(self) -> int:
        """How many tokens the policy drew."""
        return sum(
            len(segment.token_ids) if segment.drawn is None else int(segment.drawn.sum()) for segment in self.segments
        )


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt. Their rewards are compared with each other and with nothing else."""

    prompt: Prompt
    completions: tuple[Completion, ...]

    @classmethod
    def of_starts(cls, row: Prompt, pairs: Sequence[tuple[Prompt | None, Completion]]) -> Self:
        """A group of completions whose prompts may go on differently after a common beginning.

        The beginning is the group's prompt. What follows it begins each segment of a completion, as tokens that the
        policy did not draw: every token is read after exactly the tokens that it was drawn after.

        Args:
            row: the prompt of the data's row.
            pairs: the prompt of each completion, and the completion. A prompt is None if nothing was drawn.

        Example: after the prompts [1, 2, 7] and [1, 2, 8, 9], the policy drew [5] and [6]. The group's prompt is
        [1, 2], and its completions are [7, 5] and [8, 9, 6], of which the last tokens are drawn.
        """
        prompts = [prompt for prompt, _ in pairs if prompt] or [row]
        count, length = _common([prompt.token_ids for prompt in prompts]), _common([prompt.text for prompt in prompts])
        completions = (one._after(prompt, count, length) if prompt else one for prompt, one in pairs)
        start = replace(row, token_ids=prompts[0].token_ids[:count], text=prompts[0].text[:length])
        return cls(start, tuple(completions))

    @property
    def usable(self) -> Group:
        """The group without the completions that are neither scored nor trained on. May be empty."""
        return replace(self, completions=tuple(c for c in self.completions if c.finish_reason.usable))


def _common(sequences: Sequence[Any]) -> int:
    """How many items sequences have in common at their start.

    >>> _common(["abcd", "abx", "abcx"]), _common([(1, 2)])
    (2, 2)
    """
    least, most = min(sequences), max(sequences)
    return next((n for n, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), len(least))


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of sequences, end to end, on the CPU: axis Y."""

    sequence_Y: Tensor
    """Sequence of each turn, in order."""
    turn_N: Tensor
    """Turn (0..Y-1) of each drawn token."""
    rewards_Y: Tensor
    """The environment's reward for each turn, float64; 0 where it gave none."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A rollout's completions as flat tensors, laid out once; ``train.layout`` makes it and cuts index sets from it.

    The four policies have separate names. ``old_logps_N`` is None when a single update uses the rollout and no KL is
    part of the reward: the old policy is then the current one and the ratio is 1 by identity. ``ref_logps_N`` is None
    when no formula needs it. The current policy's log-probs are not stored here: the update computes them with their
    graph.

    Tensors on axis N are on the policy's device, the others on the CPU, where the batch is cut.
    """

    prompt_ids: tuple[tuple[int, ...], ...]
    """Token ids of each group's prompt."""
    group_S: Tensor
    """Group of each sequence, 0..P-1, in order."""
    lengths_S: Tensor
    """Drawn tokens of each sequence."""
    truncated_S: Tensor
    """Whether the length limit cut the completion, boolean."""
    sequence_B: Tensor
    """Sequence of each segment, in order."""
    lengths_B: Tensor
    """Tokens of each segment, drawn or given."""
    ids_T: Tensor
    """Token ids of all segments."""
    drawn_T: Tensor | None
    """Which of them the policy drew, boolean. None: all."""
    sequence_N: Tensor
    """Sequence of each drawn token, in order."""
    sampler_logps_N: Tensor
    advantages_N: Tensor
    """0 until ``assign_advantages``."""
    loss_N: Tensor
    """Which tokens are in the loss, boolean: all, unless the objective masks truncated completions."""
    old_logps_N: Tensor | None = None
    ref_logps_N: Tensor | None = None
    support: Support | None = None
    """The support of all tokens, for every policy's log-probs. None: the whole vocabulary."""
    full_logps_N: Tensor | None = None
    """The sampler's log-probs over the whole vocabulary, when it drew from another distribution and the log-probs here
    do not replay that. None: ``sampler_logps_N`` and the log-probs here are over the same tokens."""
    turns: Turns | None = None
    """None: every completion is one turn."""
    routes_T: Tensor | None = None
    """How the inputs that the tokens come after were routed, ``[T, L, K]``; see ``Segment``. None: freely."""
    prompt_routes: Mapping[tuple[int, ...], Tensor] = field(default_factory=dict)
    """Of prompts, by their token ids, all tokens but the last."""

    @property
    def num_sequences(self) -> int:
        """S, the number of completions."""
        return len(self.lengths_S)

    @property
    def num_tokens(self) -> int:
        """N, the number of drawn tokens."""
        return len(self.sequence_N)
