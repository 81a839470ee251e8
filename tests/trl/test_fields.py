"""Every field has a verdict, and every verdict says the truth."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any

import pytest
from transformers import TrainingArguments, trainer_callback
from transformers.integrations import integration_utils

from cohort.config import GRPOConfig as Settings
from cohort.errors import ConfigError
from cohort.trl import GRPOConfig, callbacks, checkpoints, config, logs, trainer
from cohort.trl.config import FIELDS, RENAMED, defaults
from cohort.trl.translate import translate
from tests.conftest import each

DEFAULTS = dict(defaults(GRPOConfig))


def of_verdict(verdict: str) -> tuple[str, ...]:
    return tuple(name for name, field in FIELDS.items() if field.verdict == verdict)


VALUES: dict[str, Any] = {
    "accelerator_config": {"dispatch_batches": False},
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "ddp_backend": "gloo",
    "epsilon": 0.1,
    "per_device_train_batch_size": 16,
    "chat_template_kwargs": {"enable_thinking": False},
    "dataloader_multiprocessing_context": "fork",
    "debug": "underflow_overflow",
    "deepspeed": {"zero_optimization": {"stage": 3}},
    "delta": 4.0,
    "epsilon_high": 0.28,
    "eval_strategy": "epoch",
    "fsdp": "full_shard",
    "generation_kwargs": {"min_new_tokens": 2},
    "gradient_accumulation_steps": 2,
    "hub_strategy": "end",
    "importance_sampling_level": "sequence",
    "include_for_metrics": ["inputs"],
    "label_names": ["labels"],
    "liger_kernel_config": {"rope": True},
    "log_level": "info",
    "log_level_replica": "info",
    "logging_strategy": "no",
    "loss_type": "grpo",
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 0.4},
    "model_init_kwargs": {"dtype": "bfloat16"},
    "multi_objective_aggregation": "normalize_then_sum",
    "num_generations": 4,
    "optim": "adamw_8bit",
    "output_dir": "other",
    "reward_weights": [0.5, 2.0],
    "save_strategy": "no",
    "scale_rewards": "none",
    "steps_per_generation": 4,
    "generation_batch_size": 32,
    "top_entropy_quantile": 0.2,
    "vllm_mode": "server",
    "vllm_importance_sampling_mode": "token_mask",
    "train_sampling_strategy": "sequential",
    "vllm_model_impl": "transformers",
    "vllm_structured_outputs_regex": "[0-9]+",
    "warmup_steps": 10,
    "warmup_ratio": 0.1,
    "ref_model_mixup_alpha": 0.5,
    "top_p": 0.5,
    "min_p": 0.1,
    "metric_for_best_model": "eval_reward",
    "greater_is_better": False,
    "transformers_continuous_batching_config": {"max_batch_tokens": 64},
    "activation_checkpointing_kwargs": {"use_reentrant": False},
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "tf32": False,
    "vllm_gpu_memory_utilization": 0.5,
}
"""A value for each field that is not its default; for the others it follows from the default's type."""
ENTROPY = ("entropy_coef_delta", "entropy_target", "entropy_coef_min", "entropy_coef_max")
CONTEXT: dict[str, dict[str, Any]] = {
    **{key: {"loss_type": "vespo"} for key in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")},
    **{key: {"loss_type": "sapo"} for key in ("sapo_temperature_neg", "sapo_temperature_pos")},
    **{key: {"vllm_mode": "server"} for key in ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")},
    **{key: {"use_adaptive_entropy": True} for key in ENTROPY},
    **{key: {"sync_ref_model": True, "beta": 0.1} for key in ("ref_model_mixup_alpha", "ref_model_sync_steps")},
    "sync_ref_model": {"beta": 0.1},
    "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine"},
    "use_bias_correction_kl": {"beta": 0.1},
    "num_iterations": {"epsilon": 0.1},
    "dataloader_prefetch_factor": {"dataloader_num_workers": 1},
    "gradient_accumulation_steps": {"steps_per_generation": 2},
    "bf16": {"use_cpu": True},
    "bf16_full_eval": {"use_cpu": True},
    "eval_steps": {"eval_strategy": "steps"},
    "metric_for_best_model": {"eval_strategy": "steps", "eval_steps": 5},
    "greater_is_better": {"eval_strategy": "steps", "eval_steps": 5, "metric_for_best_model": "eval_reward"},
}
"""What else must be set for a field to mean something. Fields of vLLM have ``use_vllm``."""
NEWER = {"activation_checkpointing", "activation_checkpointing_kwargs"} - {
    field.name for field in fields(TrainingArguments)
}
"""Fields that the installed transformers does not have yet."""
NOT_HERE = {
    "gradient_checkpointing": "on a GPU",
    "activation_checkpointing": "on a GPU",
    "fsdp_config": "with fsdp",
}
"""Fields whose effect cannot be seen in a translation on a CPU."""


def is_setting(to: str) -> bool:
    return to.partition(".")[0] in Settings.model_fields and "." in to


def value_of(name: str) -> Any:
    """A value that is not the field's default."""
    if name in RENAMED and name not in VALUES:
        return value_of(RENAMED[name])
    default = DEFAULTS[name]
    if name in VALUES:
        return VALUES[name]
    match default:
        case bool():
            return not default
        case int() | float():
            return default + 1
        case _:
            kind = next(field.type for field in fields(GRPOConfig) if field.name == name)
            kinds = str(kind)
            return True if "bool" in kinds else 5 if "int" in kinds else 0.5 if "float" in kinds else "word"


def arguments(name: str) -> dict[str, Any]:
    vllm = {"use_vllm": True} if "vllm" in name and name != "use_vllm" else {}
    return {"output_dir": "out", **vllm, **CONTEXT.get(name, {})}


@cache
def without(name: str) -> Settings:
    return translate(GRPOConfig(**arguments(name)), num_prompts=320)


def with_field(name: str) -> Settings:
    return translate(GRPOConfig(**{**arguments(name), name: value_of(name)}), num_prompts=320)


def test_every_field_of_the_class_and_of_transformers_has_a_verdict():
    assert set(FIELDS) - NEWER == {field.name for field in fields(GRPOConfig)}
    assert {field.name for field in fields(TrainingArguments)} <= set(FIELDS)


def test_every_setting_that_a_verdict_names_exists():
    settings = {field.to for field in FIELDS.values() if is_setting(field.to)}
    assert settings <= {f"{section}.{key}" for section, table in Settings() for key in type(table).model_fields}


@each("name", [name for name in of_verdict("same") if is_setting(FIELDS[name].to)])
def test_a_field_with_the_same_meaning_gives_its_value_to_the_setting(name: str):
    value = attrgetter(FIELDS[name].to)(with_field(name))
    given = value_of(name)
    assert value == (tuple(given) if isinstance(given, list) else given)


def test_a_field_that_is_no_setting_is_read_by_the_trainer_or_by_transformers_callbacks():
    modules = [trainer, callbacks, checkpoints, config, logs, trainer_callback, integration_utils]
    read = set(re.findall(r"\bargs\.(\w+)", "".join(map(inspect.getsource, modules))))
    others = {name for name in of_verdict("same") if not is_setting(FIELDS[name].to)}
    by_others = {"tf32", "do_train", "do_eval", "do_predict", "resume_from_checkpoint"}
    assert others - by_others <= read | {"logging_steps", "eval_steps"}  # which TrainerState.compute_steps reads
    assert not read & set(of_verdict("no effect"))


@each("name", [*of_verdict("translated")])
def test_a_translated_field_changes_the_setting_that_it_names(name: str):
    to = FIELDS[RENAMED.get(name, name)].to
    if FIELDS[RENAMED.get(name, name)].verdict != "translated" or name in NOT_HERE:
        return
    place = to.strip("[]")
    assert attrgetter(place)(with_field(name)) != attrgetter(place)(without(name))


@each("name", sorted(set(of_verdict("no effect")) - NEWER))
def test_a_field_without_effect_changes_nothing(name: str):
    assert with_field(name) == without(name)


@each("name", of_verdict("refused"))
def test_a_refused_field_is_refused_with_what_to_do_instead(name: str):
    with pytest.raises(ConfigError, match=name) as caught:
        GRPOConfig(**{**arguments(name), name: value_of(name)})
    assert FIELDS[name].why in str(caught.value)
