"""1/Z of every token of a minibatch, in each term of the objective."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cohort.objective import Objective, token_weights
from cohort.train.layout import Part
from cohort.types import TokenBatch


@dataclass(frozen=True, slots=True)
class TermWeights:
    """1/Z of every token in each term, shape ``[N]``."""

    policy_N: Tensor
    base_N: Tensor
    """Of the KL term: without ``top_entropy`` the policy term's too. 0 outside of the loss."""
    entropy_N: Tensor
    """The entropy bonus is a mean over all loss tokens, whatever the policy term's denominator."""

    def at(self, positions_N: Tensor) -> TermWeights:
        """The weights of some tokens."""
        return TermWeights(self.policy_N[positions_N], self.base_N[positions_N], self.entropy_N[positions_N])


def term_weights(objective: Objective, batch: TokenBatch, minibatch: Part, chosen_N: Tensor | None) -> TermWeights:
    """1/Z of every token of a minibatch. ``chosen_N``: the tokens that ``top_entropy`` chooses; None: it is 1."""
    loss_N = batch.loss_N[minibatch.tokens_N]

    def weights_of(counted_N: Tensor, aggregation: str) -> Tensor:
        return token_weights(
            minibatch.sequence_N,
            minibatch.num_sequences,
            aggregation=aggregation,
            group_S=batch.group_S[minibatch.sequences_S].to(loss_N.device),
            length=objective.aggregation_length,
            counted_N=counted_N,
            count_empty=objective.count_empty,
        )

    base_N = policy_N = weights_of(loss_N, objective.aggregation)
    if chosen_N is not None:
        after_masks = objective.denominator == "after_masks"
        policy_N = weights_of(chosen_N, objective.aggregation) if after_masks else base_N * chosen_N
    return TermWeights(policy_N, base_N, weights_of(loss_N, "token_mean"))
