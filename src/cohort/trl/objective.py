"""The objective that TRL's arguments describe, as settings of ``[objective]``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from cohort.errors import ConfigError, did_you_mean
from cohort.trl.fields import FIELDS

Settings = dict[str, Any]
STD_EPSILON = 1e-4
"""What TRL adds to a standard deviation."""
AGGREGATIONS = {
    "grpo": "seq_mean_token_mean",
    "bnpo": "token_mean",
    "dr_grpo": "constant",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "sapo": "seq_mean_token_mean",
    "luspo": "seq_sum",
    "vespo": "token_mean",
}
"""TRL's ``loss_type`` with the mean over tokens and completions."""
SCALES: Settings = {
    "group": {"rule": "group_std", "ddof": 1, "epsilon": STD_EPSILON},
    "batch": {"rule": "batch_std", "of": "raw", "unit": "sample", "ddof": 1, "epsilon": STD_EPSILON},
    "none": "none",
}
"""TRL's ``scale_rewards``."""
LEVELS = {"token": "token", "sequence": "sequence_mean"}
REWARDS = {"sum_then_normalize": "sum_then_normalize", "normalize_then_sum": "normalize_sum_normalize"}


def one_of(name: str, value: Any, words: Iterable[str]) -> Any:
    """A field's value.

    Raises:
        ConfigError: it is none of ``words``.
    """
    words = tuple(words)
    if value not in words:
        raise ConfigError(f"{name} must be one of {', '.join(words)}, got {value!r}{did_you_mean(value, words)}")
    return value


def objective_settings(args: Any) -> Settings:
    """The settings of ``[objective]``, except the numbers of updates and those that take a field's value unchanged.

    Raises:
        ConfigError: a word is unknown, or a number is out of its range.
    """
    loss = one_of("loss_type", args.loss_type, AGGREGATIONS)
    level = one_of("importance_sampling_level", args.importance_sampling_level, LEVELS)
    gdpo = one_of("multi_objective_aggregation", args.multi_objective_aggregation, REWARDS) == "normalize_then_sum"
    scale = one_of("scale_rewards", args.scale_rewards, SCALES)
    by_sampler = loss == "vespo" and args.use_vllm and args.vllm_importance_sampling_correction
    settings: Settings = {
        "preset": "default",
        "reward_aggregation": REWARDS[args.multi_objective_aggregation],
        "scale": SCALES["group" if gdpo else scale],  # TRL's normalize_then_sum ignores scale_rewards
        "truncated": "mask" if args.mask_truncated_completions else "keep",
        "ratio_anchor": "sampler" if by_sampler else "old",
        "ratio_level": "sequence_product" if loss == "vespo" else LEVELS[level],
        "trust_region": _trust_region(args, loss),
        "mismatch": _mismatch_weight(args, by_sampler),
        "top_entropy": _top_entropy(args),
        "entropy": _entropy(args),
        "aggregation": AGGREGATIONS[loss],
    }
    if args.off_policy_mask_threshold is not None:
        settings["mismatch"] += [{"rule": "off_policy_mask", "threshold": float(args.off_policy_mask_threshold)}]
    _check_level(level, loss, settings)
    if not args.use_bias_correction_kl:
        settings["kl"] = "k3_legacy"
    return settings


def _check_level(level: str, loss: str, settings: Settings) -> None:
    """Check that nothing treats the tokens of a completion differently where their ratio is that of the completion."""
    if level == "token" or loss in ("cispo", "vespo"):  # whose ratio is a constant weight
        return
    for uneven, remedy in (
        (settings["top_entropy"] < 1, "top_entropy_quantile=1.0"),
        (
            any(rule.get("level") == "token" for rule in settings["mismatch"]),
            "vllm_importance_sampling_mode='sequence_mask'",
        ),
    ):
        if uneven:
            raise ConfigError(
                "importance_sampling_level 'sequence' moves a completion as one, and "
                f"{remedy.partition('=')[0]} treats its tokens differently: set {remedy}, or "
                "importance_sampling_level='token'"
            )


def level_warning(args: Any) -> str:
    """What TRL warns of in ``importance_sampling_level``; empty without."""
    loss, level = args.loss_type, args.importance_sampling_level
    if level == "sequence" and loss in ("bnpo", "dr_grpo", "dapo", "cispo"):
        return (
            f"importance_sampling_level 'sequence' with loss_type {loss!r}, which sums over tokens, weights each "
            "sequence by its completion length: set loss_type='grpo' for GSPO's objective"
        )
    if loss == "luspo" and level != "sequence":
        return "loss_type 'luspo' is meant for importance_sampling_level 'sequence', as in its paper"
    return ""


def _trust_region(args: Any, loss: str) -> Settings:
    if loss == "sapo":
        return {"rule": "sapo", **_numbers(args, "sapo_")}
    if loss == "vespo":
        return {"rule": "gamma", **_numbers(args, "vespo_")}
    low, high = float(args.epsilon), float(args.epsilon if args.epsilon_high is None else args.epsilon_high)
    if loss == "cispo":
        if high < 1:
            raise ConfigError(
                "loss_type 'cispo' takes epsilon_high as the cap of the ratio itself, which must be at least 1: set "
                f"epsilon_high=5.0, the ScaleRL paper's, got {high:g}, which would multiply every gradient by it"
            )
        return {"rule": "cap", "low": 0.0, "high": high}
    if low < 0 or high < 0:
        raise ConfigError(f"epsilon and epsilon_high must be at least 0, got {low:g} and {high:g}")
    if args.delta is not None and args.delta <= 1 + high:
        raise ConfigError(
            f"delta ({args.delta:g}) must be above 1 + epsilon_high ({1 + high:g}): below it, it would cut A > 0 and "
            "do nothing where A < 0"
        )
    dual = "none" if args.delta is None else float(args.delta)
    return {"rule": "ppo_clip", "low": max(0.0, 1 - low), "high": 1 + high, "dual": dual}


def _numbers(args: Any, prefix: str) -> Settings:
    """The numbers of a part: the fields whose names begin so, by the numbers that ``fields.toml`` says they are."""
    return {field.why: float(getattr(args, name)) for name, field in FIELDS.items() if name.startswith(prefix)}


def _mismatch_weight(args: Any, by_sampler: bool) -> list[Settings]:
    """The weight by old / sampler; vespo's ratio holds it already."""
    if not args.use_vllm or not args.vllm_importance_sampling_correction or by_sampler:
        return []
    modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    level, mode = one_of("vllm_importance_sampling_mode", args.vllm_importance_sampling_mode, modes).split("_")
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    low, high = 0.0 if low is None else float(low), math.inf if high is None else float(high)
    if not low <= 1 <= high:
        raise ConfigError(
            "vllm_importance_sampling_clip_min and _max must contain 1, the ratio of a policy to itself, got "
            f"{low:g} and {high:g}"
        )
    return [{"rule": "weight", "level": level, "mode": mode, "low": low, "high": high}]


def _top_entropy(args: Any) -> float:
    share = float(args.top_entropy_quantile)
    if not 0 < share <= 1:
        raise ConfigError(f"top_entropy_quantile must be above 0 and at most 1, got {share:g}")
    return share


def _entropy(args: Any) -> Settings | str:
    """The entropy bonus; TRL's target counts only with ``use_adaptive_entropy``."""
    if args.use_adaptive_entropy:
        return {"rule": "entropy", **_numbers(args, "entropy_")}
    return {"rule": "entropy", "coefficient": float(args.entropy_coef)} if args.entropy_coef else "none"
