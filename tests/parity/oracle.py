"""TRL's own loss and advantage code, driven without a model, and Cohort's for the same batch.

``GRPOTrainer`` is made without its ``__init__``: its methods are TRL's, its attributes those that ``__init__`` would
copy from the configuration (whose defaults are TRL's too), and the model's forward pass is replaced by log-probs that
are leaves of autograd. So ``-d loss / d logps`` is TRL's coefficient of every token.

Everything runs in float64, so that what differs is the mathematics and not the rounding.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cohort.objective import Objective, coefficients, k3, kl_correction, token_weights, top_entropy_tokens

TRL_VERSION = "1.16.0"
REASON = f"parity is checked against trl=={TRL_VERSION}, which the extra 'bench' installs"

trl = pytest.importorskip("trl", reason=REASON)
if trl.__version__ != TRL_VERSION:
    pytest.skip(f"{REASON}; found {trl.__version__}", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of other people's imports
    from trl import GRPOConfig, GRPOTrainer
    from trl.rewards import get_soft_overlong_punishment

__all__ = ["Batch", "GRPOTrainer", "assert_same", "get_soft_overlong_punishment"]

TRL_DEFAULTS = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}

# Both sides are float64. They add in different orders, and TRL's exp(D) - D - 1 loses what expm1 keeps: some 1e-16 of
# the largest term. 1e-10 leaves room for that and for no difference of formula.
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


def assert_same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64), **TOLERANCE
    )


# Batches ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Batch:
    """A padded batch. ``mask_ST`` is 1 at loss tokens: not at padding, and not at what a tool said."""

    mask_ST: Tensor
    logps_ST: Tensor
    old_ST: Tensor
    sampler_ST: Tensor
    ref_ST: Tensor
    entropy_ST: Tensor
    advantages_S: Tensor

    @property
    def sequence_N(self) -> Tensor:
        return self.mask_ST.nonzero()[:, 0]

    def flat(self, values_ST: Tensor) -> Tensor:
        return values_ST[self.mask_ST.bool()]

    def replace(self, **changes: Tensor) -> Batch:
        return dataclasses.replace(self, **changes)

    def to(self, dtype: torch.dtype) -> Batch:
        values = {field.name: getattr(self, field.name).to(dtype) for field in dataclasses.fields(self)}
        return Batch(**{**values, "mask_ST": self.mask_ST})

    def rows(self, start: int, stop: int) -> Batch:
        return Batch(*(getattr(self, field.name)[start:stop] for field in dataclasses.fields(self)))


def random_batch(
    seed: int, lengths: tuple[int, ...] = (3, 1, 7, 4, 6, 2, 5, 7), *, spread: float = 0.3, gaps: bool = True
) -> Batch:
    """Off-policy, with unequal lengths: ratios are about exp(+-spread). Two groups of four unless said otherwise.

    Args:
        seed: of everything.
        lengths: of the completions.
        spread: standard deviation of a token's log-ratio.
        gaps: whether some inner tokens are a tool's and not the policy's.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))

    def normal(size: Any) -> Tensor:
        return torch.randn(size, dtype=torch.float64, generator=generator)

    mask_ST = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()
    if gaps:
        mask_ST[:, 3] = 0
    logps_ST = -3 * torch.rand(shape, dtype=torch.float64, generator=generator) - 0.01
    old_ST = logps_ST + spread * normal(shape)
    return Batch(
        mask_ST=mask_ST,
        logps_ST=logps_ST,
        old_ST=old_ST,
        sampler_ST=old_ST + 0.5 * spread * normal(shape),
        ref_ST=logps_ST + 0.5 * normal(shape),
        # float32 values: TRL takes the threshold in float32, and compares it with entropies as they are
        entropy_ST=(2 * torch.rand(shape, generator=generator)).double(),
        advantages_S=normal(shape[0]),
    )


def single_token(log_ratio: float, advantage: float, *, logp: float = -1.0, ref_gap: float = 0.0) -> Batch:
    """One completion of one token, for what can be followed by hand."""
    logps_ST = torch.tensor([[logp]], dtype=torch.float64)
    return Batch(
        mask_ST=torch.ones(1, 1, dtype=torch.long),
        logps_ST=logps_ST,
        old_ST=logps_ST - log_ratio,
        sampler_ST=logps_ST - log_ratio,
        ref_ST=logps_ST + ref_gap,
        entropy_ST=torch.ones(1, 1, dtype=torch.float64),
        advantages_S=torch.tensor([advantage], dtype=torch.float64),
    )


# TRL ----------------------------------------------------------------------------------------------------------------


def trl_trainer(**settings: Any) -> GRPOTrainer:
    """A ``GRPOTrainer`` of one process with these settings of ``GRPOConfig``; the others have TRL's defaults."""
    assert settings.keys() <= TRL_DEFAULTS.keys(), settings.keys() - TRL_DEFAULTS.keys()
    args = SimpleNamespace(**{**TRL_DEFAULTS, "steps_per_generation": 1, **settings})
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    for name in (
        *("beta", "loss_type", "importance_sampling_level", "top_entropy_quantile", "off_policy_mask_threshold"),
        *("max_completion_length", "num_iterations", "num_generations", "mask_truncated_completions"),
        *("multi_objective_aggregation", "scale_rewards", "use_vllm", "vllm_importance_sampling_correction"),
        *("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
        *("entropy_coef", "use_adaptive_entropy", "log_multimodal"),
    ):
        setattr(trainer, name, getattr(args, name))
    trainer.args = args
    trainer.pad_to_multiple_of = None
    trainer.epsilon_low = args.epsilon
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    trainer.aux_loss_enabled = False
    trainer._entropy_bonus_enabled = args.entropy_coef != 0 or args.use_adaptive_entropy
    trainer._last_world_entropy = float("inf")
    trainer._entropy_window_stats = None
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer.model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    trainer.ref_model = SimpleNamespace()
    trainer.accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        sync_gradients=True,
        gather=lambda values: values,
        reduce=lambda values, reduction: values,
        pad_across_processes=lambda values, dim, pad_index: values,
    )
    return trainer


def trl_inputs(batch: Batch, *, sampler: bool = False, items: int | None = None, old: bool = True) -> dict[str, Tensor]:
    """What ``_generate_and_score_completions`` would hand to the loss.

    Args:
        batch: the batch.
        sampler: whether the engine's log-probs are known, which in TRL is whether vLLM generated.
        items: loss tokens of the generation batch, where that is larger than this batch.
        old: False where the policy has not changed since it generated: TRL then leaves the old log-probs out.
    """
    ids_ST = torch.zeros_like(batch.mask_ST)
    inputs = {
        "prompt_ids": ids_ST[:, :1],
        "prompt_mask": torch.ones_like(ids_ST[:, :1]),
        "completion_ids": ids_ST,
        "completion_mask": batch.mask_ST,
        "advantages": batch.advantages_S,
        "num_items_in_batch": torch.tensor(items) if items else batch.mask_ST.sum(),
        "ref_per_token_logps": batch.ref_ST,
    }
    if old:
        inputs["old_per_token_logps"] = batch.old_ST
    if sampler:
        inputs["sampling_per_token_logps"] = batch.sampler_ST
    return inputs


def run_trl(trainer: GRPOTrainer, batch: Batch, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """``_compute_loss``: its value, and -d loss / d logps of the loss tokens."""
    leaf_ST = batch.logps_ST.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (leaf_ST, batch.entropy_ST, None)
    loss = trainer._compute_loss(trainer.model, inputs)
    (gradient_ST,) = torch.autograd.grad(loss, leaf_ST)
    assert not gradient_ST[batch.mask_ST == 0].nan_to_num(nan=0.0).any()
    return loss.detach(), -batch.flat(gradient_ST)


def trl_loss(
    batch: Batch, *, sampler: bool = False, items: int | None = None, old: bool = True, **settings: Any
) -> tuple[Tensor, Tensor]:
    """``run_trl`` with a new trainer. See ``trl_inputs`` for the other arguments."""
    return run_trl(trl_trainer(**settings), batch, trl_inputs(batch, sampler=sampler, items=items, old=old))


@contextmanager
def _float64_by_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def trl_rollout(
    rewards_SK: Tensor, *, weights: list[float] | None = None, batch: Batch | None = None, **settings: Any
) -> dict[str, Tensor]:
    """``_generate_and_score_completions`` in full, with generation, rewards and forward passes given: advantages, and
    with ``use_vllm`` the importance sampling weights.

    Args:
        rewards_SK: what each reward function gave each completion, NaN where it gave None; groups are consecutive.
        weights: of the reward functions.
        batch: for its old, sampler and reference log-probs; must have no gaps.
    """
    count, functions = rewards_SK.shape
    lengths = [2] * count if batch is None else batch.mask_ST.sum(1).tolist()
    sampled = None
    if batch is not None:
        rows = zip(batch.sampler_ST.tolist(), lengths, strict=True)
        sampled = [[None if value != value else value for value in row[:length]] for row, length in rows]
    trainer = trl_trainer(**settings)
    trainer.environment_factories, trainer.environments, trainer.tools = None, None, None
    trainer._tokenizer = SimpleNamespace(pad_token_id=0)
    trainer._generate = lambda prompts: (
        *([[1]] * count, [[1] * length for length in lengths], None, ["text"] * count, sampled, {}, None, None),
    )
    trainer._calculate_rewards = lambda *args: rewards_SK
    names = [f"reward_{index}" for index in range(functions)]
    trainer.reward_funcs, trainer.reward_func_names = names, names
    trainer.reward_weights = torch.tensor(weights or [1.0] * functions, dtype=rewards_SK.dtype)
    trainer._logs = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
    trainer._pending_extra_logs, trainer._pending_metrics = {}, {}
    trainer._get_per_token_logps_and_entropies = lambda model, *args, **kwargs: (
        batch.ref_ST if model is trainer.ref_model else batch.old_ST,
        None,
        None,
    )
    with _float64_by_default():
        return trainer._generate_and_score_completions([{"prompt": "text"} for _ in range(count)])


# Cohort -------------------------------------------------------------------------------------------------------------


def cohort_loss(objective: Objective, batch: Batch, *, old: bool = True) -> tuple[Tensor, Tensor]:
    """The loss's value, ``-sum(policy value / Z) + beta sum(KL / Z')``, and c_N. A constant length is TRL's default."""
    sequence_N, sequences = batch.sequence_N, len(batch.mask_ST)
    base_N = token_weights(
        sequence_N,
        sequences,
        aggregation=objective.aggregation,
        length=TRL_DEFAULTS["max_completion_length"],
        count_empty=objective.count_empty,
    )
    weights_N = base_N * top_entropy_tokens(batch.flat(batch.entropy_ST), objective.top_entropy)
    logps_N, ref_N = batch.flat(batch.logps_ST), batch.flat(batch.ref_ST)
    found = coefficients(
        objective,
        logps_N,
        batch.advantages_S[sequence_N],
        weights_N,
        sequence_N=sequence_N,
        old_logps_N=batch.flat(batch.old_ST) if old else None,
        sampler_logps_N=batch.flat(batch.sampler_ST),
        ref_logps_N=ref_N if objective.beta else None,
        base_weights_N=base_N,
    )
    value = -(weights_N * found.value_N).sum()
    if objective.beta:
        anchor_ST = batch.sampler_ST if objective.kl.anchor == "sampler" else batch.old_ST
        log_ratio_N = logps_N - batch.flat(anchor_ST) if old else torch.zeros_like(logps_N)
        correction = kl_correction(objective.kl, log_ratio_N, sequence_N)
        value = value + objective.beta * (base_N * k3(logps_N, ref_N) * (1 if correction is None else correction)).sum()
    return value, found.total_N


def assert_same_loss(from_trl: tuple[Tensor, Tensor], from_cohort: tuple[Tensor, Tensor]) -> None:
    assert_same(from_cohort[1], from_trl[1])
    assert_same(from_cohort[0], from_trl[0])
