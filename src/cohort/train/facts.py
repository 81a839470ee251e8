"""The facts about a run that are not settings, which its checkpoints store and a resumed run compares."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cohort.calls import partial_layers
from cohort.config import GRPOConfig
from cohort.data import PromptLoader
from cohort.environments import Acting
from cohort.parallel import World
from cohort.policy import Policy
from cohort.presets.trust_regions import Custom
from cohort.rewards import RewardRunner
from cohort.rewards.model import RewardModel
from cohort.rewards.names import BUILTIN_REWARDS
from cohort.runs.code import code_hash, named_code_hash
from cohort.runs.facts import entries, machine, versions

NOT_COMPUTED = {"architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "id2label", "label2id"}
"""Entries of a model's config that its numbers do not depend on, or that saving changes."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def data_facts(
    prompts: PromptLoader, rewards: RewardRunner, acting: Acting | None, config: GRPOConfig
) -> dict[str, str]:
    """What can be known without a model: prompts, columns, names, code, versions."""
    builtin = _builtin_names(rewards)
    packages = {row.package for row in BUILTIN_REWARDS.values() if row.package and row.name in builtin}
    facts = {
        "prompts": prompts.fingerprint,
        "columns": entries(prompts.prompts.contents),
        "rewards": ", ".join(rewards.names),
        "code": entries(dict(_code(rewards, acting, config))),
        "versions": versions([*sorted(packages), *(["peft"] if config.model.lora.wanted else [])]),
    }
    return facts | ({"tools": ", ".join(acting.names)} if acting else {})


def model_facts(policy: Policy, model_config: Any, end_token_ids: tuple[int, ...], world: World) -> dict[str, str]:
    """What the model computes beside the weights of a checkpoint: its config, frozen weights, precision and machine."""
    config = {key: value for key, value in model_config.to_dict().items() if key not in NOT_COMPUTED and key[0] != "_"}
    model = {"config": _hash(config), "end tokens": " ".join(map(str, end_token_ids))}
    frozen = {name: weight for name, weight in policy.model.named_parameters() if not weight.requires_grad}
    if frozen:
        model["frozen weights"] = fingerprint(frozen)
    return {
        "model": entries(model),
        "precision": str(policy.precision),
        "threads": str(torch.get_num_threads()),
        "ranks": str(world.size),
        "machine": machine(policy.device) + ("" if policy.why_no_kernels() else ", native kernels"),
    }


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """A hash of a model's weights, from the sum of each tensor's bits as integers: it tells one model from another."""
    sums = []
    for name, weight in weights.items():
        bits = weight.detach().contiguous().flatten().view(_INTEGERS[weight.element_size()])
        sums.append((name, list(weight.shape), int(bits.sum(dtype=torch.int64))))
    return _hash(sums)


def _code(rewards: RewardRunner, acting: Acting | None, config: GRPOConfig) -> Iterator[tuple[str, str]]:
    """The hash of each piece of the user's code, by what it is."""
    for name, function in zip(rewards.names, rewards.functions, strict=True):
        model = partial_layers(function.call)[-1]
        weights = fingerprint(model.model.state_dict()) if isinstance(model, RewardModel) else ""
        yield f"reward {name}", code_hash(function.call) + weights
    if acting:
        for name, tool in acting.toolbox.items():
            yield f"tool {name}", code_hash(tool.function)
        for shape in acting.shapes.values():
            yield f"environment {shape.name}", code_hash(shape.factory)
    objective, environment = config.resolved_objective, config.environment
    named: dict[str, Any] = {"history": environment.history, "parser": environment.parser}
    named |= {"baseline": objective.baseline, "filter": config.data.filter}
    if isinstance(objective.trust_region, Custom):
        named["trust region"] = objective.trust_region.function
    for name, spec in named.items():
        if isinstance(spec, str) and ":" in spec:
            yield name, named_code_hash(spec)


def _builtin_names(rewards: RewardRunner) -> set[str]:
    inner = (partial_layers(function.call)[-1] for function in rewards.functions)
    return {one.__name__ for one in inner if getattr(one, "__module__", "").startswith("cohort.rewards.")}


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]
