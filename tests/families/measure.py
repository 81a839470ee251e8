"""What a model type is held to, on a small random model: sampled log-probs, and float64 gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cohort.config import LoraConfig, ModelConfig
from cohort.errors import ModelError
from cohort.policy import PackedRows, Policy, load_policy
from cohort.policy.compute import enable_checkpointing
from cohort.rollout import LocalEngine, RNGKey, Sampling
from tests.families.configs import small_model
from tests.policy.plain import COMPLETIONS, DOUBLE, PROMPTS, SINGLE, TEMPERATURE, WEIGHTS, gradients, plain_logps
from tests.rollout.test_local_engine import LetterTokenizer, prompts

SAMPLED = prompts((5, 9, 20), (7,), tuple(range(3, 30)))
"""Prompts of different length, which a batch pads or divides."""
LIMITS = {"sampled": 1e-4, "gradient": 1e-9, "checkpointed": 1e-9, "cut": 1e-9, "lora": 1e-9}
"""Largest accepted errors: of float32 log-probs in nats, after 16 tokens of a recurrence; of float64 gradients,
relative. Sums are in another order; a wrong mask, position or mode gives 1e-3 or more."""


@dataclass
class Measured:
    """One model type. Errors are None where they were not measured; a text says why."""

    model_type: str
    update: str = ""
    sampler: str = ""
    sampled: float | str | None = None
    gradient: float | str | None = None
    checkpointed: float | str | None = None
    cut: float | str | None = None
    lora: float | str | None = None
    refused: list[str] = field(default_factory=list)
    """Messages of what is refused."""
    failures: list[str] = field(default_factory=list)
    """What is wrong."""

    def hold(self, name: str, measure: Callable[[], float]) -> None:
        """Measure one of the errors and compare it with its limit."""
        try:
            error = measure()
        except ModelError as reason:
            setattr(self, name, "refused")
            self.refused.append(str(reason))
            return
        except Exception as reason:
            setattr(self, name, "fails")
            self.failures.append(f"{name}: {type(reason).__name__}: {(str(reason).splitlines() or [''])[0]}")
            return
        setattr(self, name, error)
        if not error <= LIMITS[name]:
            self.failures.append(f"{name}: {error:.2g} is more than {LIMITS[name]:.0e}")


def measure(model_type: str, *, whole: bool = True) -> Measured:
    """Measure a model type. Unless ``whole``, only sampled log-probs and the gradient."""
    found = Measured(model_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers and peft about models of all kinds
        single = Policy(small_model(model_type), SINGLE)
        try:
            found.update = single.passes.description
        except ModelError as reason:
            found.update = "refused"
            found.refused.append(str(reason))
            return found
        found.hold("sampled", lambda: sampled_gap(single, found))
        policy = Policy(small_model(model_type).double(), DOUBLE)
        try:
            expected = gradients(policy, (plain_logps(policy) * WEIGHTS).sum())
        except RuntimeError as reason:
            found.gradient = "not in float64"
            found.refused.append(f"transformers: {reason}")
            return found
        found.hold("gradient", lambda: error_of(gradients(policy, weighted_logps(policy)), expected))
        if whole:
            found.hold("cut", lambda: error_of(cut_gradients(policy), expected))
            update = policy.passes.description
            found.hold("checkpointed", lambda: error_of(checkpointed_gradients(model_type, update), expected))
            found.hold("lora", lambda: lora_error(model_type, update))
    return found


def sampled_gap(policy: Policy, found: Measured) -> float:
    """Largest difference, in nats, of the sampler's log-probs and the trainer's. Layers that choose their keys are
    allowed a tenth of the tokens: the padding token, whose embedding is 0, likes all keys equally."""
    engine = LocalEngine(policy, LetterTokenizer(), (1,))
    found.sampler = engine.backend.description
    groups = engine.generate(SAMPLED, 2, Sampling(16), RNGKey(0, 0))
    pairs = [(group.prompt.token_ids, completion) for group in groups for completion in group.completions]
    with torch.no_grad():
        logps_N = policy.logps([ids for ids, _ in pairs], [one.token_ids for _, one in pairs], 1.0).logps_N
    sampled_N = torch.tensor([logp for _, completion in pairs for logp in completion.sampler_logps])
    gap_N = (sampled_N - logps_N).abs().sort().values
    return float(gap_N[: round(0.9 * len(gap_N))].max() if hasattr(policy.model.config, "index_topk") else gap_N.max())


def weighted_logps(policy: Policy) -> Tensor:
    """A loss of the log-probs, with a weight for each token."""
    return (policy.logps(PROMPTS, COMPLETIONS, TEMPERATURE).logps_N * WEIGHTS).sum()


def error_of(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of the difference of two gradients, relative to that of the expected one."""
    flat, wanted = (torch.cat([grads[name].flatten() for name in expected]) for grads in (got, expected))
    assert float(wanted.norm()) > 1e-3
    return float((flat - wanted).norm() / wanted.norm())


def cut_gradients(policy: Policy) -> dict[str, Tensor]:
    """The gradient with every completion in a microbatch of its own."""
    policy.model.zero_grad()
    index = list(dict.fromkeys(PROMPTS))
    with policy.training(), policy.compute():
        prefixes = policy.passes.read(index)
        start = 0
        for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
            rows = PackedRows.of([index.index(prompt)], [completion])
            logps_N = policy.states(prefixes, rows, TEMPERATURE).logps().logps_N
            (logps_N * WEIGHTS[start : start + len(completion)]).sum().backward()
            start += len(completion)
        prefixes.backward()
    trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained.items()}


def check_update(policy: Policy, description: str) -> None:
    """Check that a policy runs with the implementation that has a description, but for the reasons in it."""
    assert policy.passes.description.partition(" (")[0] == description.partition(" (")[0], policy.passes.description


def checkpointed_gradients(model_type: str, update: str) -> dict[str, Tensor]:
    """The gradient of a model whose activations are recomputed. ``update`` describes how it runs without."""
    model = small_model(model_type).double()
    enable_checkpointing(model)
    policy = Policy(model, DOUBLE)
    with policy.training():
        check_update(policy, update)
        return gradients(policy, weighted_logps(policy))


def lora_error(model_type: str, update: str) -> float:
    """The error of the gradient of adapters on all linear layers. ``update`` describes how the model runs without."""
    settings = ModelConfig(precision="float64", lora=LoraConfig(rank=2, target_modules=("all-linear",)))
    model = small_model(model_type)
    policy = load_policy(model, settings, model.config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    check_update(policy, update)
    expected = gradients(policy, (plain_logps(policy) * WEIGHTS).sum())
    return error_of(gradients(policy, weighted_logps(policy)), expected)
