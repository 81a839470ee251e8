"""Updates on several ranks, to compare with the same updates on one."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from cohort.config import LoraConfig, OptimConfig
from cohort.objective import PRESETS
from cohort.parallel import World, layout_of
from cohort.policy import Policy, Precision, add_adapters
from cohort.train import Optimizer, part_of, split_minibatches, update
from cohort.train.metrics import term_norms
from tests.conftest import tiny_llama
from tests.train.updates import DOUBLE, all_sequences, batch_for, context_for, shifted_policy


def _with_length(objective):
    return objective.replace(aggregation_length=8) if objective.aggregation == "constant" else objective


BASE = PRESETS["grpo"]
CASES = {
    **{name: (_with_length(objective), 0.0) for name, objective in PRESETS.items()},
    "full_kl": (PRESETS["default"].replace(beta=0.1, kl={"estimator": "full"}), 0.01),
    "top_entropy": (BASE.replace(top_entropy=0.4, denominator="after_masks", aggregation="token_mean"), 0.0),
    "masked": (BASE.replace(truncated="mask", count_empty=False), 0.01),
}
"""Objectives, and the weight of the entropy bonus."""


def numbers(values):
    """Tensors end to end."""
    return torch.cat([tensor.detach().double().flatten() for tensor in values]).numpy()


def gradients(layout_name="replicate", names=tuple(CASES)):
    """The gradient, the statistics and the log-probs of an update with each objective."""
    layout, found = layout_of(layout_name, World.of_environment()), {}
    policy = Policy(tiny_llama().double(), DOUBLE)
    for name in names:
        objective, bonus = CASES[name]
        batch = batch_for(policy, objective, truncated=(4,))
        reference = shifted_policy() if objective.beta and objective.kl.estimator == "full" else None
        context = dataclasses.replace(context_for(policy, objective, 17, reference=reference), layout=layout)
        policy.model.zero_grad()
        result = update(context, batch, all_sequences(batch), bonus)
        found[name] = {
            "gradient": numbers(p.grad for p in policy.model.parameters()),
            "grad_norm": result.grad_norm,
            "logps": numbers([result.logps_N]),
            "statistics": np.array(list(result.statistics.sums.values())),
            "maxima": np.array(list(result.statistics.maxima.values())),
            **{key: numbers([values.sort().values]) for key, values in result.statistics.values.items()},
        }
    return found


def training(layout_name="replicate", kind="plain", updates=3):
    """The weights after some updates with clipping, and the norms: of all weights, adapters, or with few groups."""
    layout = layout_of(layout_name, World.of_environment())
    model = tiny_llama().double()
    if kind == "lora":
        model = add_adapters(model, LoraConfig(rank=2), Precision(torch.float64, torch.float64))
    policy = Policy(model, DOUBLE)
    objective = PRESETS["default"].replace(beta=0.0)
    batch = batch_for(Policy(tiny_llama().double(), DOUBLE), objective)
    context = context_for(policy, objective, 23)
    config = OptimConfig(learning_rate=1e-2, max_grad_norm=0.5)
    context = dataclasses.replace(context, layout=layout, optimizer=Optimizer(model, config, updates))
    minibatch = all_sequences(batch) if kind != "few" else part_of(batch, [0, 1, 2])  # the completions of one prompt
    minibatches = [minibatch] if kind != "minibatches" else split_minibatches(batch, 2)
    results = [update(context, batch, one) for one in minibatches * updates]
    norms = term_norms(context, batch, minibatches[0], 0.01)
    return {
        "weights": numbers(p for p in model.parameters()),
        "norms": np.array([result.grad_norm for result in results]),
        "terms": np.array(list(norms.values())),
        "load": [result.load for result in results],
        "version": policy.version,
    }
