"""What an update's passes give for its tokens, and the record of it that a step keeps for the store.

passes      ``Forward`` of each microbatch and rank
update      ``update_tokens``: those of a minibatch in one order, for its statistics
step        ``Seen``: each token as the first update saw it that made a pass of it; part of a checkpoint
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cohort.objective import Coefficients, UpdateTokens
from cohort.policy import TokenLogps
from cohort.train.layout import Part
from cohort.train.term_weights import TermWeights
from cohort.types import TokenBatch


@dataclass(frozen=True, slots=True)
class Forward:
    """A microbatch's forward pass, detached."""

    positions_N: Tensor
    """Where its tokens lie among those of the part."""
    current: TokenLogps
    terms: Coefficients
    ref_logps_N: Tensor | None
    router_loss: Tensor | None = None
    """Its part of the weighted load-balancing loss, if there is one."""


def update_tokens(batch: TokenBatch, part: Part, weights: TermWeights, forwards: Sequence[Forward]) -> UpdateTokens:
    """The part's tokens with what the forward passes gave, in the part's order."""
    positions_N = torch.cat([forward.positions_N for forward in forwards])

    def in_order(pieces: Sequence[Tensor]) -> Tensor:
        joined = torch.cat(list(pieces)).to(positions_N.device)
        ordered = torch.empty_like(joined)
        ordered[positions_N] = joined
        return ordered

    logps_N, entropy_N, collision_N = map(in_order, zip(*(forward.current for forward in forwards), strict=True))
    ref_logps = [forward.ref_logps_N for forward in forwards if forward.ref_logps_N is not None]
    tokens_N = part.tokens_N
    return UpdateTokens(
        logps_N=logps_N,
        entropy_N=entropy_N,
        collision_N=collision_N,
        advantages_N=batch.advantages_N[tokens_N],
        weights_N=weights.policy_N,
        base_weights_N=weights.base_N,
        sequence_N=part.sequence_N,
        coefficients=Coefficients(*map(in_order, zip(*(forward.terms for forward in forwards), strict=True))),
        sampler_logps_N=batch.sampler_logps_N[tokens_N],
        old_logps_N=at_tokens(batch.old_logps_N, tokens_N),
        ref_logps_N=in_order(ref_logps) if ref_logps else None,
        full_logps_N=at_tokens(batch.full_logps_N, tokens_N),
    )


def at_tokens(values_N: Tensor | None, tokens_N: Tensor) -> Tensor | None:
    """The values of some tokens; None for None."""
    return None if values_N is None else values_N[tokens_N]


@dataclass(frozen=True, slots=True)
class Used:
    """What one update used."""

    minibatch: Part
    active: Part
    """The sequences of the minibatch that a pass was made of."""
    tokens: UpdateTokens | None
    """On the axis N of ``active``; None: no pass was made."""

    def values(self) -> dict[str, Tensor]:
        """What ``Seen.values`` keeps of the tokens."""
        if self.tokens is None:
            return {}
        tokens, terms = self.tokens, self.tokens.coefficients
        values = {
            "logps": tokens.logps_N,
            "entropy": tokens.entropy_N,
            "collision": tokens.collision_N,
            "log_ratio": terms.log_ratio_N,
            "policy_coefficient": terms.policy_N,
            "kl_coefficient": terms.kl_N,
            "cause": terms.cause_N,
            "weight": tokens.weights_N,
            "kl_weight": tokens.base_weights_N,
        }
        return values if tokens.ref_logps_N is None else values | {"ref_logps": tokens.ref_logps_N}


@dataclass(frozen=True, slots=True)
class Seen:
    """What a step's updates saw of each token of the batch: the values of the first update that made a pass of it."""

    update_S: Tensor
    """Number of the first update that made a pass of the sequence; if none did, of the first whose minibatch had it;
    -1: no minibatch had it. Numbers count from 0 and include skipped updates. On the CPU."""
    passed_S: Tensor
    """Whether a pass was made of the sequence, boolean. On the CPU."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """By name, each of shape ``[N]`` in the dtype of the update; 0 where no pass was made."""

    @classmethod
    def nothing(cls, batch: TokenBatch) -> Seen:
        """Before the first update."""
        none_S = torch.full((batch.num_sequences,), -1, dtype=torch.long)
        return cls(none_S, torch.zeros_like(none_S, dtype=torch.bool))

    def add(self, number: int, used: Used, num_tokens: int) -> None:
        """Record an update.

        Args:
            number: its number.
            used: what it used.
            num_tokens: N of the batch.
        """
        of_minibatch_S, of_active_S = used.minibatch.sequences_S, used.active.sequences_S
        first_S = self.update_S[of_minibatch_S] < 0
        self.update_S[of_minibatch_S[first_S]] = number
        new_S = ~self.passed_S[of_active_S]
        if used.tokens is None or not bool(new_S.any()):
            return
        self.update_S[of_active_S[new_S]], self.passed_S[of_active_S] = number, True
        where_N = new_S.to(used.active.sequence_N.device)[used.active.sequence_N]
        tokens_N = used.active.tokens_N[where_N]
        for name, values_N in used.values().items():
            if name not in self.values:
                self.values[name] = values_N.new_zeros(num_tokens)
            self.values[name][tokens_N] = values_N[where_N].to(self.values[name])

    def to_store(self) -> dict[str, Any]:
        """Everything, in types that files hold."""
        values = {name: bits_of(values_N) for name, values_N in self.values.items()}
        return {"update_S": self.update_S, "passed_S": self.passed_S, "values": values}

    @classmethod
    def stored(cls, stored: Mapping[str, Any], device: torch.device) -> Seen:
        """The inverse of ``to_store``."""
        values = {name: of_bits(bits, device) for name, bits in stored["values"].items()}
        return cls(stored["update_S"], stored["passed_S"], values)


def bits_of(values_N: Tensor) -> tuple[str, Tensor]:
    """Name of the dtype and the bytes: files do not hold every dtype."""
    return str(values_N.dtype).removeprefix("torch."), values_N.detach().cpu().contiguous().view(torch.uint8)


def of_bits(bits: tuple[str, Tensor], device: torch.device) -> Tensor:
    """The inverse of ``bits_of``."""
    return bits[1].view(getattr(torch, bits[0])).to(device)
