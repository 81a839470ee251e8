"""The ranks' shares of an update: whole prompts with their completions, so that each prompt is computed on one rank.

Every rank holds the whole batch and computes the same shares. What comes back is exchanged: gradients are added up by
the layout, results of tokens return to the batch's axis N. Denominators and thresholds are of the whole minibatch
before it is shared, so that sums over ranks are the same as without ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cohort.objective import segment_sum
from cohort.parallel import shares
from cohort.parallel.shares import imbalance
from cohort.train.context import StepContext
from cohort.train.layout import Part
from cohort.types import TokenBatch


@dataclass(frozen=True, slots=True)
class Shared:
    """A part of a batch, divided over the ranks."""

    parts: tuple[Part, ...]
    """Each rank's sequences; some may have none. ``positions_N`` are those among the tokens of the whole."""
    own: Part
    """This rank's."""
    load: float
    """The cost of the largest share over the mean."""


def share(context: StepContext, batch: TokenBatch, part: Part) -> Shared:
    """Divide a part over the ranks, the same on each. One rank has all of it, in order."""
    world = context.world
    if world.size == 1:
        whole = part.select(torch.arange(part.num_sequences))
        return Shared((whole,), whole, 1.0)
    lengths = segment_sum(batch.lengths_B, batch.sequence_B, batch.num_sequences)[part.sequences_S].tolist()
    drawn = part.lengths_S.tolist()
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, group in enumerate(batch.group_S[part.sequences_S].tolist()):
        by_prompt.setdefault(batch.prompt_ids[group], []).append(index)
    attention, head = relative_costs(context.policy.model.config)
    costs = [
        cost(len(prompt), [lengths[s] for s in some], attention) + head * sum(drawn[s] for s in some)
        for prompt, some in by_prompt.items()
    ]
    divided, sequences = shares(costs, world.size), list(by_prompt.values())
    parts = tuple(
        part.select(torch.tensor(sorted(s for prompt in prompts for s in sequences[prompt]), dtype=torch.long))
        for prompts in divided
    )
    return Shared(parts, parts[world.rank], imbalance(costs, divided))


def cost(prompt: int, completions: list[int], attention: float) -> float:
    """The work of a prompt and its completions, in tokens of the layers' matrices.

    Args:
        prompt: its length; it is computed once.
        completions: lengths.
        attention: cost of attending to one token.
    """
    read = prompt * (1 + attention * prompt / 2)
    return read + sum(length * (1 + attention * (prompt + length / 2)) for length in completions)


def relative_costs(config: Any) -> tuple[float, float]:
    """The cost of attending to one token, and of the head for a drawn token, relative to a token's matrix products in
    the layers: 12 H^2 products per layer, against 2 H and V H / layers."""
    hidden, layers = getattr(config, "hidden_size", 0) or 1024, getattr(config, "num_hidden_layers", 0) or 1
    return 1 / (6 * hidden), getattr(config, "vocab_size", 0) / (12 * hidden * layers)
