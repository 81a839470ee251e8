"""TRL's arguments as Cohort's settings. Loads no model, and reads no file but DeepSpeed's.

What follows from one field alone stands in ``fields.toml``, and ``_by_table`` reads it; the functions here do what
depends on several fields, or on the model and the data.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cohort.config
from cohort.config import GRPOConfig
from cohort.errors import CohortError, ConfigError, did_you_mean
from cohort.trl.config import FIELDS, TABLE, Batch, check_refused, setting_fields, why_off
from cohort.trl.config import GRPOConfig as Arguments

# ----------------------------------------
# The objective that TRL's arguments describe, as settings of ``[objective]``.


Settings = dict[str, Any]


def one_of(name: str, value: Any, words: Iterable[str]) -> Any:
    """A field's value.

    Raises:
        ConfigError: it is none of ``words``.
    """
    words = tuple(words)
    if value not in words:
        raise ConfigError(f"{name} must be one of {', '.join(words)}, got {value!r}{did_you_mean(value, words)}")
    return value


def in_words(args: Any, name: str) -> Any:
    """The setting's value for the value of a field, by ``fields.toml``.

    Raises:
        ConfigError: the table does not list the field's value.
    """
    value, words = getattr(args, name), FIELDS[name].value
    value = getattr(value, "value", value)  # of transformers' enumerations
    if words == "same":
        return value
    return words[str(bool(value)).lower() if "true" in words else one_of(name, value, words)]


def objective_settings(args: Any) -> Settings:
    """The settings of ``[objective]`` that depend on several fields, and those that are more than one setting.

    Raises:
        ConfigError: a word is unknown, or a number is out of its range.
    """
    loss, aggregation = args.loss_type, in_words(args, "loss_type")
    by_sampler = loss == "vespo" and args.use_vllm and args.vllm_importance_sampling_correction
    settings: Settings = {
        "preset": "default",
        "ratio_anchor": "sampler" if by_sampler else "old",
        "trust_region": _trust_region(args, loss),
        "mismatch": _mismatch_weight(args, by_sampler),
        "top_entropy": _top_entropy(args),
        "entropy": _entropy(args),
        "aggregation": aggregation,
    }
    if loss == "vespo":
        settings["ratio_level"] = "sequence_product"
    if args.multi_objective_aggregation == "normalize_then_sum":  # which ignores scale_rewards
        settings["scale"] = FIELDS["scale_rewards"].value["group"]
    if args.off_policy_mask_threshold is not None:
        settings["mismatch"] += [{"rule": "off_policy_mask", "threshold": float(args.off_policy_mask_threshold)}]
    _check_level(args.importance_sampling_level, loss, settings)
    if not args.use_bias_correction_kl:
        settings["kl"] = "k3_legacy"
    return settings


def _check_level(level: str, loss: str, settings: Settings) -> None:
    """Check that nothing treats the tokens of a completion differently where their ratio is that of the completion."""
    if level != "sequence" or loss in ("cispo", "vespo"):  # whose ratio is a constant weight
        return
    if settings["top_entropy"] < 1:
        remedy = "top_entropy_quantile=1.0"
    elif any(rule.get("level") == "token" for rule in settings["mismatch"]):
        remedy = "vllm_importance_sampling_mode='sequence_mask'"
    else:
        return
    raise ConfigError(
        f"importance_sampling_level 'sequence' moves a completion as one, and {remedy.partition('=')[0]} treats its "
        f"tokens differently: set {remedy}, or importance_sampling_level='token'"
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


# ----------------------------------------
# How the ranks hold what is trained, from the settings of DeepSpeed and FSDP, neither of which is used itself.


STAGES = ("replicate", "optimizer", "optimizer", "full")
"""ZeRO stages 0 to 3."""
STRATEGIES = {
    **dict.fromkeys(("true", "full_shard", "1", "hybrid_shard", "4"), "full"),
    **dict.fromkeys(("false", "shard_grad_op", "2", "hybrid_shard_zero2", "5"), "optimizer"),
    **dict.fromkeys(("no_shard", "3"), "replicate"),
}
"""FSDP's strategies, by name and by accelerate's number, and ``reshard_after_forward`` of FSDP2."""


def layout_of(args: Any, variables: Mapping[str, str] = os.environ) -> str:
    """``parallel.layout`` for ``args.deepspeed`` or ``args.fsdp``, or for what ``accelerate launch`` has put into the
    environment.

    Raises:
        ConfigError: a configuration cannot be read, or offloads to the CPU or a disk.
    """
    if args.deepspeed:
        return _of_deepspeed(args.deepspeed)
    if args.fsdp:
        options = args.fsdp_config or {}
        return _of_fsdp(options.get("reshard_after_forward", True), options.get("cpu_offload", False))
    if variables.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        if file := variables.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
            return _of_deepspeed(file)
        prefix = "ACCELERATE_DEEPSPEED_"
        zero: Settings = {"stage": variables.get(f"{prefix}ZERO_STAGE", "2")}
        for name in ("optimizer", "param"):
            zero[f"offload_{name}"] = {"device": variables.get(f"{prefix}OFFLOAD_{name.upper()}_DEVICE", "none")}
        return _of_deepspeed({"zero_optimization": zero})
    if variables.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        second = variables.get("FSDP_VERSION") == "2"
        strategy = variables.get("FSDP_RESHARD_AFTER_FORWARD" if second else "FSDP_SHARDING_STRATEGY", "true")
        return _of_fsdp(strategy, variables.get("FSDP_OFFLOAD_PARAMS"))
    return "replicate"


def _of_deepspeed(given: Any) -> str:
    try:
        text = given if isinstance(given, str) else json.dumps(given)
        config = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
        zero = config.get("zero_optimization", {})
        layout = STAGES[int(zero.get("stage", 0))]
        devices = {zero.get(f"offload_{part}", {}).get("device", "none") for part in ("optimizer", "param")}
    except (OSError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"deepspeed: expected a configuration, its JSON or its file, got {given!r:.80} ({error})"
        ) from None
    if devices - {"none", None}:
        raise ConfigError("deepspeed offloads weights or the optimizer, which is not supported here: use stage 3 alone")
    return layout


def _of_fsdp(strategy: Any, offload: Any) -> str:
    if str(offload).lower() == "true":
        raise ConfigError("fsdp offloads weights to the CPU, which is not supported here: use full_shard alone")
    if (found := STRATEGIES.get(str(strategy).lower())) is None:
        raise ConfigError(f"fsdp: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
    return found


SETTING = re.compile(rf"\b(?:{'|'.join(GRPOConfig.model_fields)}|trust_region|mismatch\[\d+\]|entropy)(?:\.\w+)+")
"""A setting of Cohort in a text."""
TWICE = re.compile(r"(?:set|pass) (\w+), or (?:set|pass) \1\b")
"""An argument of the trainer and the setting in its place, which a script has under one name."""
ALLOWING = re.compile(r"--allow-changed [^;]*; in Python, train\(resume=True, allow_changed")
"""How to resume a changed run, in errors of Cohort."""
COHORT_RESUME = re.compile(r"'cohort resume [^']*' or (?=train\()")
"""How to resume a run of Cohort alone."""
BEST = re.compile(r"(?:eval_)?(?:(.+?)_)?(reward|rewards/.+/mean|completions/mean_length)")
"""A metric of an evaluation, with the name of the set."""

EVALUATED_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""Schedules that follow an evaluation."""
UNUSED_KEYS = ("attn_implementation", "device_map", "use_cache", "low_cpu_mem_usage", "use_kernels")
"""Keys of ``model_init_kwargs`` without effect."""
DTYPES = {"bfloat16": "bfloat16", "float32": None, "auto": None}


def translate(
    args: Any,
    *,
    world_size: int = 1,
    num_prompts: int | None = None,
    model_config: Any = None,
) -> GRPOConfig:
    """Cohort's settings for TRL's arguments.

    Evaluations and checkpoints follow transformers' callbacks (``TrainerControl``), so Cohort's own ``eval_steps`` and
    ``save_steps`` are 0.

    Args:
        args: a ``cohort.trl.GRPOConfig`` that ``check_args`` has accepted.
        world_size: processes that train together.
        num_prompts: prompts of the training data; None: streamed.
        model_config: transformers' config of the model, which has the default of ``router_aux_loss_coef``.

    Raises:
        ConfigError: fields do not go together, or one is out of its range.
        DataError: the data has fewer prompts than one generation.
    """
    batch = Batch.of(args, world_size)
    _check_counts(args)
    updates, calls = batch.max_steps(args, num_prompts), args.max_tool_calling_iterations
    group = args.num_generations_eval or args.num_generations
    batches = {"num_iterations": batch.num_iterations, "minibatches": batch.minibatches}
    translated: Settings = {
        "model": _model(args, model_config),
        "data": {} if args.max_prompt_length is None else {"overlong_prompts": "truncate_left"},
        "rollout": {**_rollout(args), "prompts_per_step": batch.prompts_per_step},
        # One turn more than calls; each has at least one token.
        "environment": {"max_turns": args.max_completion_length if calls is None else calls + 1, "starts": "any"},
        "objective": {**objective_settings(args), **batches},
        "optim": _optim(args, updates),
        "eval": {"eval_steps": 0, "num_generations_eval": group, **_best(args)},
        "parallel": {"layout": layout_of(args)},
        "run": _run(args, batch.rollouts(updates)),
    }
    of_one, sampler = _by_table(args), _sampler(args)
    names = of_one | translated | sampler
    settings = {name: of_one.get(name, {}) | translated.get(name, {}) | sampler.get(name, {}) for name in names}
    with errors_in_trl_terms():
        return GRPOConfig(**settings)


def _by_table(args: Any) -> Settings:
    """The settings that one field tells, by section. Where the field is None or off, Cohort's default stays."""
    found: Settings = {}
    for name, field in FIELDS.items():
        section, _, key = field.to.partition(".")
        if field.value is None or section not in GRPOConfig.model_fields:
            continue
        if (value := in_words(args, name)) is not None and why_off(args, name) is None:
            found.setdefault(section, {})[key] = value
    return found


def _check_counts(args: Any) -> None:
    """Check the numbers that the settings are computed from."""
    length, calls = args.max_completion_length, args.max_tool_calling_iterations
    if not isinstance(length, int) or length < 1:
        raise ConfigError(f"max_completion_length must be an integer of at least 1, got {length!r}")
    if calls is not None and (not isinstance(calls, int) or calls < 0):
        raise ConfigError(f"max_tool_calling_iterations must be an integer of at least 0, or None, got {calls!r}")


def check_args(args: Any) -> None:
    """Check that ``args`` are arguments of this face, and that none is refused.

    Raises:
        ConfigError: they are not, or a field is refused.
    """
    if isinstance(args, cohort.config.GRPOConfig):
        raise ConfigError("args is Cohort's own GRPOConfig: use cohort.GRPOTrainer, or cohort.trl.GRPOConfig")
    if not isinstance(args, Arguments):
        kind = f"{type(args).__module__.partition('.')[0]}'s {type(args).__name__}"
        raise ConfigError(f"args is {kind}: expected cohort.trl.GRPOConfig (from cohort.trl import GRPOConfig)")
    check_refused(args)


def trusts_code(args: Any) -> bool:
    """Whether code that comes with the model may run: by its field, or by ``model_init_kwargs``."""
    return bool(args.trust_remote_code or (args.model_init_kwargs or {}).get("trust_remote_code"))


@contextmanager
def errors_in_trl_terms() -> Iterator[None]:
    """Errors name TRL's fields in place of Cohort's settings."""
    try:
        yield
    except CohortError as error:
        error.args = (in_trl_terms(str(error)),)
        raise


def in_trl_terms(text: str) -> str:
    """A text with TRL's fields in place of Cohort's settings.

    >>> in_trl_terms("rollout.max_completion_length must be positive; see optim.microbatch_tokens")
    'max_completion_length must be positive; see optim.microbatch_tokens'
    """
    text = ALLOWING.sub("train(resume_from_checkpoint=True, allow_changed", text)
    text = TWICE.sub(r"pass \1", SETTING.sub(_in_place_of, text))
    text = COHORT_RESUME.sub("", text)
    return text.replace("train(resume=True)", "train(resume_from_checkpoint=True)")


def _in_place_of(found: re.Match[str]) -> str:
    name = re.sub(r"\[\d+\]|\.\d+$", "", found[0])  # of an entry of a list
    return " or ".join(setting_fields(name)) or TABLE["instead"].get(name, found[0])


def key_of_setting(name: str) -> str:
    """The setting, or the fact, that an error about a changed run names in TRL's terms.

    >>> key_of_setting("learning_rate"), key_of_setting("max_steps"), key_of_setting("code")
    ('optim.learning_rate', 'run.max_steps', 'code')
    """
    field = FIELDS.get(name.partition(" or ")[0])
    of_setting = {words: setting for setting, words in TABLE["instead"].items()}
    return field.to if field and "." in field.to else of_setting.get(name, name)


def _model(args: Any, model_config: Any) -> Settings:
    loading = dict(args.model_init_kwargs or {})
    dtype = str(loading.pop("dtype", None) or loading.pop("torch_dtype", None) or "auto").removeprefix("torch.")
    loading.pop("torch_dtype", None)
    compute = DTYPES[one_of("model_init_kwargs['dtype']", dtype, DTYPES)]
    loading.pop("trust_remote_code", None)
    if unknown := sorted(set(loading) - {"revision", "gguf_file", *UNUSED_KEYS}):
        raise ConfigError(
            f"model_init_kwargs has {', '.join(map(repr, unknown))}, which is not supported here: load the model in "
            "the script and pass it to GRPOTrainer"
        )
    settings: Settings = {
        "precision": compute or ("bfloat16" if args.bf16 or args.mixed_precision == "bf16" else "float32"),
        "trust_remote_code": trusts_code(args),
        "gradient_checkpointing": bool(args.gradient_checkpointing) and args.device.type != "cpu",
    }
    text = model_config.get_text_config() if model_config is not None else None
    own = getattr(text, "router_aux_loss_coef", 0.0) if hasattr(text, "output_router_logits") else 0.0
    settings["router_aux_loss_coef"] = float(own if args.router_aux_loss_coef is None else args.router_aux_loss_coef)
    return settings


def _rollout(args: Any) -> Settings:
    settings: Settings = {"top_k": max(args.top_k or 0, 0)}
    known = FIELDS["generation_kwargs"].value
    for name, value in (args.generation_kwargs or {}).items():
        if name == "do_sample" and value:
            continue
        if (key := known.get(name)) is None:
            raise ConfigError(
                f"generation_kwargs has {name!r}, which is not supported here{did_you_mean(name, known)}; "
                f"supported: {', '.join(known)}"
            )
        if key == "max_completion_length" and value != args.max_completion_length:
            raise ConfigError(
                f"generation_kwargs[{name!r}] is {value!r}, and max_completion_length {args.max_completion_length}, "
                "which the loss may divide by: set the length as max_completion_length alone"
            )
        settings[key] = _texts(name, value) if key == "stop" else value
    return settings


def _texts(name: str, given: Any) -> tuple[str, ...]:
    found = (given,) if isinstance(given, str) else given
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise ConfigError(f"generation_kwargs[{name!r}] must be a text or a list of texts, got {given!r:.80}")
    return tuple(found)


def _sampler(args: Any) -> Settings:
    """The sections of what samples, with ``use_vllm``."""
    if not args.use_vllm:
        return {}
    if one_of("vllm_mode", args.vllm_mode, ("server", "colocate")) == "server":
        host = "127.0.0.1" if args.vllm_server_host == "0.0.0.0" else args.vllm_server_host
        url = args.vllm_server_base_url or f"http://{host}:{args.vllm_server_port}"
        return {"rollout": {"engine": "server"}, "server": {"url": (url,)}}
    arguments = {} if args.vllm_model_impl == "vllm" else {"model_impl": args.vllm_model_impl}
    return {"vllm": {"arguments": arguments}}


def _optim(args: Any, updates: int) -> Settings:
    schedule, rule = str(args.lr_scheduler_type.value), str(args.optim.value)
    if schedule in EVALUATED_SCHEDULES:
        raise ConfigError(
            f"lr_scheduler_type {schedule!r} follows evaluations, which is not supported here: use another"
        )
    if rule not in (known := FIELDS["optim"].value):
        raise ConfigError(
            f"optim {rule!r} is not supported here: set one of {', '.join(known)}, or pass an optimizer as "
            "optimizers=(optimizer, None) to GRPOTrainer"
        )
    return {
        "lr_scheduler_type": schedule,
        "warmup_steps": 0 if schedule == "constant" else int(args.get_warmup_steps(updates)),
        "max_grad_norm": float(args.max_grad_norm or 0.0),
    }


def _best(args: Any) -> Settings:
    """Which model is the best; without evaluations, none is."""
    metric = args.metric_for_best_model
    if metric is None or args.eval_strategy == "no":
        return {}
    found = BEST.fullmatch(metric)
    if found is None:
        raise ConfigError(
            f"metric_for_best_model {metric!r} is not supported here (the loss of an evaluation, whose ratios "
            "are 1, ranks no models): set it to "
            "'eval_reward', 'eval_rewards/NAME/mean' or 'eval_completions/mean_length' (of a named set, 'eval_SET_...')"
        )
    name = {"reward": "reward/mean", "completions/mean_length": "length/mean"}.get(found[2], found[2])
    return {
        "metric_for_best_model": f"eval/{found[1]}/{name}" if found[1] else f"eval/{name}",
        "greater_is_better": bool(args.greater_is_better),
    }


def _run(args: Any, rollouts: int) -> Settings:
    limit = args.save_total_limit
    if args.save_strategy == "best" and args.metric_for_best_model is None:
        raise ConfigError("save_strategy 'best' needs metric_for_best_model, such as 'eval_reward'")
    return {
        "max_steps": max(rollouts, 1),
        "save_steps": 0,
        "save_total_limit": limit if limit and limit > 0 else None,
    }
