"""TRL's arguments as Cohort's settings. Loads no model, and reads no file but DeepSpeed's.

``fields.toml`` says in words what this module does.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import cohort.config
from cohort.config import GRPOConfig
from cohort.errors import CohortError, ConfigError, did_you_mean
from cohort.trl.batch import Batch
from cohort.trl.config import GRPOConfig as Arguments
from cohort.trl.config import check_refused
from cohort.trl.fields import FIELDS, setting_fields
from cohort.trl.layout import layout_of
from cohort.trl.objective import objective_settings, one_of

Settings = dict[str, Any]
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
INSTEAD = {
    "data.chat_template": "processing_class.chat_template",
    "data.train": "train_dataset",
    "data.eval": "eval_dataset",
    "model.path": "model",
    "model.revision": "model_init_kwargs['revision']",
    "reward.functions": "reward_funcs",
    "environment.tools": "tools",
    "environment.factory": "environment_factory",
    "run.num_epochs": "num_train_epochs",
    "run.max_steps": "max_steps",
    "mismatch.threshold": "off_policy_mask_threshold",
}
"""What a TRL script has in place of settings of Cohort that no field names alone."""

OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    "paged_adamw_32bit": "adamw",
}
"""transformers' names of optimizers with Cohort's."""
EVALUATED_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""Schedules that follow an evaluation."""
SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    **dict.fromkeys(("min_new_tokens", "min_tokens"), "min_completion_length"),
    **dict.fromkeys(("stop_strings", "stop"), "stop"),
    **dict.fromkeys(("max_new_tokens", "max_tokens"), "max_completion_length"),
}
"""Keys of ``generation_kwargs`` with Cohort's settings."""
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
        "data": _data(args),
        "rollout": {**_rollout(args), "prompts_per_step": batch.prompts_per_step},
        "vllm": _vllm(args, world_size) if args.use_vllm else {},
        # One turn more than calls; each has at least one token.
        "environment": {"max_turns": args.max_completion_length if calls is None else calls + 1, "starts": "any"},
        "objective": {**objective_settings(args), **batches},
        "optim": _optim(args, updates),
        "eval": {"eval_steps": 0, "num_generations_eval": group, **_best(args)},
        "parallel": {"layout": layout_of(args)},
        "run": _run(args, batch.rollouts(updates)),
    }
    same = _same(args)
    settings: Settings = {name: same.get(name, {}) | translated.get(name, {}) for name in same | translated}
    with errors_in_trl_terms():
        return GRPOConfig(**settings)


def _same(args: Any) -> Settings:
    """The settings that take a field's value unchanged (``[same]`` in ``fields.toml``), by section. Where the field is
    None, or another field switches it off, Cohort's default stays."""
    switches = {"vllm_": args.use_vllm, "ref_model_": args.sync_ref_model}
    off = tuple(prefix for prefix, is_on in switches.items() if not is_on)
    found: Settings = {}
    for name, field in FIELDS.items():
        section, _, key = field.to.partition(".")
        is_setting = field.verdict == "same" and section in GRPOConfig.model_fields
        if is_setting and not name.startswith(off) and (value := getattr(args, name)) is not None:
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
    return " or ".join(setting_fields(name)) or INSTEAD.get(name, found[0])


def key_of_setting(name: str) -> str:
    """The setting, or the fact, that an error about a changed run names in TRL's terms.

    >>> key_of_setting("learning_rate"), key_of_setting("max_steps"), key_of_setting("code")
    ('optim.learning_rate', 'run.max_steps', 'code')
    """
    field = FIELDS.get(name.partition(" or ")[0])
    of_setting = {words: setting for setting, words in INSTEAD.items()}
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
        "device": "cpu" if args.use_cpu else "auto",
        "trust_remote_code": trusts_code(args),
        "gradient_checkpointing": bool(args.gradient_checkpointing) and args.device.type != "cpu",
    }
    if args.cast_lm_head_to_fp32:
        settings["float32_head"] = True
    text = model_config.get_text_config() if model_config is not None else None
    own = getattr(text, "router_aux_loss_coef", 0.0) if hasattr(text, "output_router_logits") else 0.0
    settings["router_aux_loss_coef"] = float(own if args.router_aux_loss_coef is None else args.router_aux_loss_coef)
    return settings


def _data(args: Any) -> Settings:
    settings: Settings = {"order": "shuffled" if args.shuffle_dataset else "sequential"}
    if args.max_prompt_length is not None:
        settings |= {"max_prompt_length": args.max_prompt_length, "overlong_prompts": "truncate_left"}
    return settings


def _rollout(args: Any) -> Settings:
    settings = {"engine": "vllm" if args.use_vllm else "local", "top_k": max(args.top_k or 0, 0)}
    if args.use_vllm:
        settings["regex"] = args.vllm_structured_outputs_regex
    for name, value in (args.generation_kwargs or {}).items():
        if name == "do_sample" and value:
            continue
        if name not in SAMPLING:
            raise ConfigError(
                f"generation_kwargs has {name!r}, which is not supported here{did_you_mean(name, SAMPLING)}; "
                f"supported: {', '.join(SAMPLING)}"
            )
        key = SAMPLING[name]
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


def _vllm(args: Any, world_size: int) -> Settings:
    mode = one_of("vllm_mode", args.vllm_mode, ("server", "colocate"))
    settings: Settings = {"sleep": args.vllm_enable_sleep_mode}
    if mode == "server":
        host = "127.0.0.1" if args.vllm_server_host == "0.0.0.0" else args.vllm_server_host
        return {**settings, "url": (args.vllm_server_base_url or f"http://{host}:{args.vllm_server_port}",)}
    instead = "start a server and set vllm_mode='server', or set use_vllm=False: Cohort's own sampler needs no vLLM"
    if world_size > 1:
        raise ConfigError(f"vllm_mode 'colocate' is for one process here, and there are {world_size}: {instead}")
    if find_spec("vllm") is None:
        raise ConfigError(f"vllm_mode 'colocate' needs vLLM, which is not installed in this environment: {instead}")
    options = {
        "--gpu-memory-utilization": args.vllm_gpu_memory_utilization,
        "--tensor-parallel-size": args.vllm_tensor_parallel_size,
        "--max-model-len": args.vllm_max_model_length,
        "--model-impl": None if args.vllm_model_impl == "vllm" else args.vllm_model_impl,
    }
    arguments = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    return {**settings, "start": True, "python": sys.executable, "arguments": tuple(arguments)}


def _optim(args: Any, updates: int) -> Settings:
    schedule, rule = str(args.lr_scheduler_type.value), str(args.optim.value)
    if schedule in EVALUATED_SCHEDULES:
        raise ConfigError(
            f"lr_scheduler_type {schedule!r} follows evaluations, which is not supported here: use another"
        )
    if rule not in OPTIMIZERS:
        raise ConfigError(
            f"optim {rule!r} is not supported here: set one of {', '.join(OPTIMIZERS)}, or pass an optimizer as "
            "optimizers=(optimizer, None) to GRPOTrainer"
        )
    return {
        "optimizer": OPTIMIZERS[rule],
        "lr_scheduler_kwargs": args.lr_scheduler_kwargs or {},
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
