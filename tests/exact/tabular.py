"""A tabular policy small enough to enumerate, so that an expectation is a finite sum and no test needs a sample.

The parameters are one row of logits per prefix. ``Tree(3, 3)`` (three tokens, one of which ends, at most three of them)
has 15 sequences, 7 prefixes and 21 parameters. ``Groups(tree, G)`` lays all G-tuples of sequences one after another as
one flat batch in which every tuple is a group of its own: Cohort's functions see it as a rollout, and each group's
contribution is then weighted with its probability. The other side of every comparison, the true gradient, is autograd
of a sum over the tree that uses nothing of Cohort.

Axes: P prefixes, V tokens of the vocabulary, Q sequences of the tree, L their tokens laid flat; R groups,
S completions (R times G), N their tokens laid flat.
"""

from __future__ import annotations

import itertools
from functools import cache

import torch

from cohort.objective import Outcomes, coefficients, token_advantages, token_weights

END = 0
TOLERANCE = 1e-10  # float64 sums of at most some ten thousand terms of size about 1
PER_GROUP = ("seq_mean_token_mean", "prompt_mean", "constant", "seq_sum")
"""Aggregations whose denominator over R groups is R times that over one group: only these may share a flat batch."""


class Tree:
    """All sequences over a vocabulary: each ends with ``END`` or at the longest length."""

    def __init__(self, vocabulary: int, longest: int):
        self.vocabulary, self.longest = vocabulary, longest
        self.sequences = self._continued(())
        self.prefixes = sorted({sequence[:t] for sequence in self.sequences for t in range(len(sequence))})
        self.lengths_Q = torch.tensor([len(sequence) for sequence in self.sequences])
        self.sequence_L = torch.repeat_interleave(torch.arange(len(self.sequences)), self.lengths_Q)
        places = {prefix: place for place, prefix in enumerate(self.prefixes)}
        self.prefix_L = torch.tensor([places[s[:t]] for s in self.sequences for t in range(len(s))])
        self.token_L = torch.tensor([token for s in self.sequences for token in s])

    def _continued(self, prefix: tuple[int, ...]) -> list[tuple[int, ...]]:
        if prefix and (prefix[-1] == END or len(prefix) == self.longest):
            return [prefix]
        return [s for token in range(self.vocabulary) for s in self._continued((*prefix, token))]

    def logits(self, seed: int, spread: float = 1.0) -> torch.Tensor:
        """Random parameters, shape ``[P, V]``, with a gradient."""
        generator = torch.Generator().manual_seed(seed)
        logits_PV = torch.randn(len(self.prefixes), self.vocabulary, dtype=torch.float64, generator=generator)
        return (spread * logits_PV).requires_grad_()

    def rewards(self, seed: int) -> torch.Tensor:
        """A real reward per sequence, with ties, shape ``[Q]``."""
        generator = torch.Generator().manual_seed(1000 + seed)
        return torch.randn(len(self.sequences), dtype=torch.float64, generator=generator).mul(2).round() / 2

    def right(self, seed: int) -> torch.Tensor:
        """A reward of 0 or 1 per sequence, both of which occur, shape ``[Q]``."""
        generator = torch.Generator().manual_seed(2000 + seed)
        order = torch.randperm(len(self.sequences), generator=generator)
        count = int(torch.randint(1, len(self.sequences), (), generator=generator))
        return torch.zeros(len(self.sequences), dtype=torch.float64).index_fill(0, order[:count], 1.0)

    def token_logps(self, logits_PV: torch.Tensor) -> torch.Tensor:
        """Shape ``[L]``."""
        return torch.log_softmax(logits_PV, -1)[self.prefix_L, self.token_L]

    def logps(self, logits_PV: torch.Tensor) -> torch.Tensor:
        """Log-probs of the sequences, shape ``[Q]``."""
        return self.per_sequence(self.token_logps(logits_PV))

    def per_sequence(self, values_L: torch.Tensor) -> torch.Tensor:
        """Sum over each sequence's tokens, shape ``[Q]``."""
        zeros_Q = torch.zeros(len(self.sequences), dtype=values_L.dtype)
        return zeros_Q.index_add(0, self.sequence_L, values_L)

    def mean(self, logits_PV: torch.Tensor, values_Q: torch.Tensor) -> torch.Tensor:
        """``sum_o pi(o) f(o)``, differentiable in the policy."""
        return (self.logps(logits_PV).exp() * values_Q).sum()

    def visits(self, logits_PV: torch.Tensor) -> torch.Tensor:
        """d_pi: how likely a sequence passes through each prefix (not at its end), detached, shape ``[P]``."""
        probability_L = self.logps(logits_PV.detach()).exp()[self.sequence_L]
        return torch.zeros(len(self.prefixes), dtype=torch.float64).index_add(0, self.prefix_L, probability_L)


def sequence_kl(tree: Tree, first_PV: torch.Tensor, second_PV: torch.Tensor) -> torch.Tensor:
    """KL(first || second) of the distributions over whole sequences."""
    return tree.mean(first_PV, tree.logps(first_PV) - tree.logps(second_PV))


def conditional_kls(first_PV: torch.Tensor, second_PV: torch.Tensor) -> torch.Tensor:
    """KL(first || second) of the next token at each prefix, shape ``[P]``."""
    first_PV, second_PV = first_PV.log_softmax(-1), second_PV.log_softmax(-1)
    return (first_PV.exp() * (first_PV - second_PV)).sum(-1)


class Groups:
    """Every G-tuple of a tree's sequences, as a flat batch with one group per tuple."""

    def __init__(self, tree: Tree, size: int):
        self.tree, self.size = tree, size
        members = list(itertools.product(range(len(tree.sequences)), repeat=size))
        self.members_RG = torch.tensor(members)
        self.count = len(members)
        self.group_S = torch.arange(self.count).repeat_interleave(size)
        lengths_S = tree.lengths_Q[self.members_RG.flatten()]
        self.sequence_N = torch.repeat_interleave(torch.arange(self.count * size), lengths_S)
        starts_Q, starts_S = tree.lengths_Q.cumsum(0) - tree.lengths_Q, lengths_S.cumsum(0) - lengths_S
        offset_S = starts_Q[self.members_RG.flatten()] - starts_S
        self.place_N = torch.arange(len(self.sequence_N)) + offset_S[self.sequence_N]
        """Which of the tree's tokens (axis L) each token is."""

    def probabilities(self, logits_PV: torch.Tensor) -> torch.Tensor:
        """Of each group, its members drawn one by one from the policy, shape ``[R]``; differentiable."""
        return self.tree.logps(logits_PV)[self.members_RG].sum(-1).exp()

    def coefficients(
        self, objective, logits_PV, rewards_Q, *, old=None, sampler=None, ref=None, token_rewards_L=None, turns=None
    ):
        """c of every token as Cohort computes it, each group alone in its minibatch, shape ``[N]``.

        ``old``, ``sampler`` and ``ref`` are other policies' logits.
        """
        assert objective.aggregation in PER_GROUP
        logps_N, old_N, sampler_N, ref_N = (
            None if logits is None else self.tree.token_logps(logits.detach())[self.place_N]
            for logits in (logits_PV, old, sampler, ref)
        )
        outcomes = Outcomes(
            rewards_Q[self.members_RG].flatten(),
            self.group_S,
            self.sequence_N,
            max_length=self.tree.longest,
            token_rewards_N=None if token_rewards_L is None else token_rewards_L[self.place_N],
            kl_N=None if ref_N is None else (logps_N if old_N is None else old_N) - ref_N,
            turns=turns,
        )
        weights_N = self.count * token_weights(
            self.sequence_N,
            self.count * self.size,
            aggregation=objective.aggregation,
            group_S=self.group_S,
            length=objective.aggregation_length,
        )
        advantages_N = token_advantages(objective, outcomes)
        others = {"old_logps_N": old_N, "sampler_logps_N": sampler_N, "ref_logps_N": ref_N}
        return coefficients(objective, logps_N, advantages_N, weights_N, sequence_N=self.sequence_N, **others).total_N

    def ascent(self, probability_R, c_N, logits_PV):
        """``sum over groups of probability * sum_n c_n * grad logps_n``: minus the expected gradient of the loss."""
        c_N = (probability_R.detach()[self.group_S[self.sequence_N]] * c_N).detach()
        return gradient((c_N * self.tree.token_logps(logits_PV)[self.place_N]).sum(), logits_PV)

    def expected_ascent(self, objective, logits_PV, rewards_Q, *, old=None, sampler=None, **others):
        """The expected direction of an update whose groups come from the sampler; without one from the old policy;
        without that from the policy itself."""
        drawn_from = next(logits for logits in (sampler, old, logits_PV) if logits is not None)
        c_N = self.coefficients(objective, logits_PV, rewards_Q, old=old, sampler=sampler, **others)
        return self.ascent(self.probabilities(drawn_from), c_N, logits_PV)


@cache
def tree(vocabulary: int, longest: int) -> Tree:
    return Tree(vocabulary, longest)


@cache
def groups(vocabulary: int, longest: int, size: int) -> Groups:
    return Groups(tree(vocabulary, longest), size)


def gradient(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, logits)[0]


def assert_same(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def assert_apart(actual, expected) -> None:
    """Further apart than a hundredth of the larger: another quantity, not the same one with an error."""
    gap, size = (actual - expected).abs().max(), torch.maximum(actual.abs().max(), expected.abs().max())
    assert gap > 0.01 * size > 1e-6


def cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(first.flatten(), second.flatten(), dim=0).item()
