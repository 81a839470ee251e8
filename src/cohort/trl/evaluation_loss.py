"""``eval_loss``: the loss that TRL computes of an evaluation.

The policy that sampled is the one that is evaluated, so every ratio is 1, and the policy term follows from rewards,
lengths and the sampler's log-probs. The other terms need a pass of a model over the completions, which an evaluation
does not make: there is no ``eval_loss`` with a KL, an entropy bonus, ``top_entropy_quantile``, a load-balancing loss,
or weights by a server's log-probs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cohort.config import GRPOConfig
from cohort.evaluation import Evaluation
from cohort.objective.credit import Outcomes, completion_advantages
from cohort.presets.trust_regions import SAPO
from cohort.types import FinishReason


def evaluation_loss(evaluation: Evaluation, config: GRPOConfig, batch_size: int) -> float | None:
    """TRL's loss of an evaluated set: the mean over its batches, in the order of the rows. None where it needs a pass.

    With A the advantage of a completion in its batch, a token's loss is -A under PPO's clip; -A logp where the ratio is
    a constant weight (cispo, vespo); and -2 A / tau under SAPO's gate.

    Args:
        evaluation: the evaluation.
        config: the settings of the run.
        batch_size: completions of a batch, over all processes.
    """
    objective, size = config.resolved_objective, config.eval.num_generations_eval
    served = config.rollout.engine == "vllm" and bool(objective.mismatch)
    needs_pass = objective.beta or objective.entropy or objective.top_entropy < 1 or config.model.router_aux_loss_coef
    if needs_pass or served:
        return None
    step, table = max(1, batch_size // size) * size, evaluation.table
    losses = [
        _batch_loss(table.slice(first, step), config) * min(step, len(table) - first)
        for first in range(0, len(table), step)
    ]
    return sum(losses) / len(table)


def _batch_loss(table: Any, config: GRPOConfig) -> float:
    objective, size, weights = config.resolved_objective, config.eval.num_generations_eval, config.reward.weights
    logps = [row or [] for row in table["sampler_logps"].to_pylist()]
    lengths_S = torch.tensor([len(row) for row in logps])
    names = [name for name in table.column_names if name.startswith("rewards/")]
    outcomes = Outcomes(
        _numbers(table, "reward"),
        torch.arange(len(logps)) // size,
        torch.repeat_interleave(lengths_S),
        config.rollout.max_completion_length,
        torch.stack([_numbers(table, name) for name in names], dim=1),
        None if weights is None else torch.tensor(weights, dtype=torch.float64),
    )
    advantages_S, region = completion_advantages(objective, outcomes), objective.trust_region
    sums_S = lengths_S.double()  # of the tokens' losses, but for the factor -A
    if isinstance(region, SAPO):
        sums_S = sums_S * torch.where(advantages_S > 0, 2 / region.tau_positive, 2 / region.tau_negative)
    elif region is not None and region.constant_weight:
        sums_S = torch.tensor([sum(map(float, row)) for row in logps], dtype=torch.float64)
    kept_S = torch.ones(len(logps), dtype=torch.float64)
    if objective.truncated == "mask":
        cut = [reason == FinishReason.LENGTH for reason in table["finish_reason"].to_pylist()]
        kept_S = 1 - torch.tensor(cut, dtype=torch.float64)
    sums_S = -advantages_S * sums_S * kept_S
    match objective.aggregation:
        case "token_mean":
            loss = sums_S.sum() / (lengths_S * kept_S).sum().clamp(min=1)
        case "constant":
            loss = sums_S.mean() / config.rollout.max_completion_length
        case "seq_sum":
            loss = sums_S.mean()
        case _:
            loss = (sums_S / lengths_S.clamp(min=1)).mean()
    return float(loss)


def _numbers(table: Any, name: str) -> Tensor:
    values = [torch.nan if value is None else value for value in table[name].to_pylist()]
    return torch.tensor(values, dtype=torch.float64)
