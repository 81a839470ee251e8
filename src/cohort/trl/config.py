"""``GRPOConfig`` with TRL's fields and defaults, as a subclass of transformers' ``TrainingArguments``.

``cohort.trl.translate`` turns it into Cohort's settings.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, fields
from numbers import Real
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from transformers import TrainingArguments

from cohort.errors import ConfigError, did_you_mean
from cohort.trl.batch import Batch
from cohort.trl.fields import FIELDS, RENAMED

TABLES = (
    "model_init_kwargs",
    "generation_kwargs",
    "chat_template_kwargs",
    "transformers_continuous_batching_config",
    "lr_scheduler_kwargs",
)
"""Fields that hold a dict, or its JSON on a command line."""


@dataclass
class GRPOConfig(TrainingArguments):  # type: ignore[misc]  # transformers has no types
    """TRL 1.16.0's ``GRPOConfig``: its fields and defaults, and names that older versions had.

    docs/trl.md says what becomes of each field here.

    Raises:
        ConfigError: a field is unknown (the error names the nearest one), refused, or does not go with the others.
    """

    # Fields of TrainingArguments whose defaults TRL changes.
    learning_rate: float = 1e-6
    logging_steps: float = 10
    gradient_checkpointing: bool = True
    bf16: bool | None = None
    lr_scheduler_kwargs: dict[str, Any] | str | None = None
    remove_unused_columns: bool | None = False

    # The model.
    model_init_kwargs: dict[str, Any] | str | None = None
    trust_remote_code: bool = False
    router_aux_loss_coef: float | None = None
    disable_dropout: bool = False
    cast_lm_head_to_fp32: bool = False

    # Data and batches.
    num_generations: int | None = 8
    num_generations_eval: int | None = None
    max_completion_length: int | None = 512
    ds3_gather_for_generation: bool = True
    shuffle_dataset: bool | None = True
    pad_to_multiple_of: int | str | None = "auto"
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None

    # Sampling.
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = 0
    min_p: float | None = None
    generation_kwargs: dict[str, Any] | str | None = None
    chat_template_kwargs: dict[str, Any] | str | None = None
    repetition_penalty: float = 1.0
    cache_implementation: str | None = None
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    vllm_model_impl: str = "vllm"
    vllm_enable_sleep_mode: bool = False
    vllm_structured_outputs_regex: str | None = None
    vllm_server_base_url: str | None = None
    vllm_server_host: str = "0.0.0.0"  # TRL's default: the host of this machine
    vllm_server_port: int = 8000
    vllm_server_timeout: float = 240.0
    vllm_group_port: int = 51216
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_length: int | None = None
    vllm_tensor_parallel_size: int = 1
    use_transformers_continuous_batching: bool = False
    transformers_continuous_batching_config: dict[str, Any] | str | None = None

    # The objective.
    beta: float = 0.0
    num_iterations: int = 1
    epsilon: float = 0.2
    delta: float | None = None
    epsilon_high: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    importance_sampling_level: str = "token"
    reward_weights: list[float] | None = None
    multi_objective_aggregation: str = "sum_then_normalize"
    scale_rewards: str = "group"
    loss_type: str = "dapo"
    mask_truncated_completions: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2
    max_tool_calling_iterations: int | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    off_policy_mask_threshold: float | None = None
    use_bias_correction_kl: bool = True

    # The log.
    log_completions: bool = False
    log_multimodal: bool = True
    num_completions_to_print: int | None = None
    log_unique_prompts: bool = False
    log_completions_hub_repo: str | None = None

    # Names that TRL has deprecated, and names that it or transformers has removed and scripts still use.
    use_transformers_paged: bool = False
    vllm_importance_sampling_cap: float | None = None
    max_prompt_length: int | None = None
    warmup_ratio: float | None = None
    overwrite_output_dir: bool = False
    logging_dir: str | None = None
    save_safetensors: bool | None = None

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingArguments._VALID_DICT_FIELDS, *TABLES]

    def __post_init__(self) -> None:
        self._given = frozenset(
            name for name, default in defaults(GRPOConfig) if not _is_default(getattr(self, name), default)
        )
        check_refused(self)
        _check_types(self)
        self._rename()
        if self.bf16 is None:  # TRL's is True, which fails on a CPU
            gpu = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
            self.bf16 = gpu and not self.use_cpu
        for name in ("checkpointing", "checkpointing_kwargs"):  # else transformers warns of the older name
            if getattr(self, f"activation_{name}", None) is None:
                setattr(self, f"activation_{name}", getattr(self, f"gradient_{name}"))
        with _hidden(self, "deepspeed", "ddp_backend"):
            try:
                super().__post_init__()
            except ValueError as error:
                raise ConfigError(str(error)) from None
        os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)  # it leaves weights empty on all ranks but the first
        scale: Any = self.scale_rewards
        if isinstance(scale, bool):  # as in older versions
            self.scale_rewards = "group" if scale else "none"
        batch = Batch.of(self, self.world_size)
        self.steps_per_generation, self.generation_batch_size = batch.steps_per_generation, batch.generation_batch_size
        self._made = {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def given(self) -> frozenset[str]:
        """The names of the fields that are not at their defaults: as given, or as changed afterwards."""
        return self._given | {name for name, value in self._made.items() if getattr(self, name) != value}

    def _rename(self) -> None:
        """Give the present names the values of old ones, unless they have values of their own."""
        for old, name in RENAMED.items():
            if old in self._given and name not in self._given:
                setattr(self, name, getattr(self, old))
        if self.warmup_ratio is not None and "warmup_steps" not in self._given:
            self.warmup_steps = self.warmup_ratio


def defaults(schema: type[Any]) -> Iterator[tuple[str, Any]]:
    """The names of a dataclass's fields with their defaults."""
    for field in fields(schema):
        yield field.name, field.default_factory() if field.default_factory is not MISSING else field.default


def _is_default(value: Any, default: Any) -> bool:
    """Whether a value is the default, also as transformers' argument parser reads it: None for "", False for "no"."""
    return bool(value == default or (default in ("", "no") and value in (None, [], False)))


def check_refused(args: Any) -> None:
    """Check that every field that is refused is at its default.

    Raises:
        ConfigError: some are not; one line for each, with what to do instead.
    """
    problems, known = [], {field.name for field in fields(TrainingArguments)}
    for name in sorted(args.given if hasattr(args, "_made") else args._given):
        value, row = getattr(args, name), FIELDS.get(name)
        if row and row.verdict == "refused" and value not in (None, "auto"):
            problems.append(f"{name}={value!r:.80} is not supported here: {row.why}")
        if row is None and name in known:  # of a newer version of transformers
            problems.append(f"{name}={value!r:.80} is not supported here: leave it unset")
    if problems:
        raise ConfigError("\n".join(problems))


def _check_types(args: Any) -> None:
    """Check numbers and tables, which a YAML file or a command line may give as text. Tables in JSON are read.

    Raises:
        ConfigError: one is something else.
    """
    for field in fields(args):
        value = getattr(args, field.name)
        is_table = value is not None and field.name in TABLES
        if is_table and isinstance(value, str) and value.lstrip().startswith("{"):
            with suppress(ValueError):
                value = json.loads(value)
                setattr(args, field.name, value)
        if is_table and not isinstance(value, dict):
            raise ConfigError(f"{field.name} must be a dict or its JSON, got {value!r:.80}")
        number = field.name in NUMBERS
        allowed = isinstance(value, Real) or (value is None and field.name in NULLABLE)
        if number and field.name in FIELDS and (not allowed or isinstance(value, bool)):
            raise ConfigError(f"{field.name} must be a number, got {value!r:.80}")


@contextmanager
def _hidden(args: Any, *names: str) -> Iterator[None]:
    """Hide fields from transformers, which would start DeepSpeed, or process groups of a backend."""
    kept = {name: getattr(args, name) for name in names}
    variable = os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    for name in names:
        setattr(args, name, None)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(args, name, value)
        if variable is not None:
            os.environ["ACCELERATE_USE_DEEPSPEED"] = variable


def _naming_unknown(init: Any) -> Any:
    """The constructor, with an error that names the nearest field to an unknown one."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **settings: Any) -> None:
        names = [field.name for field in fields(type(self))]
        problems = [f"unknown argument {name!r}{did_you_mean(name, names)}" for name in settings if name not in names]
        if problems:
            raise ConfigError(f"GRPOConfig: {'; '.join(problems)}")
        init(self, *args, **settings)

    return checked


NULLABLE = frozenset(field.name for field in fields(GRPOConfig) if "None" in str(field.type))
"""Fields that may be None. transformers' argument parser changes ``field.type``, so this is kept from before."""
NUMBERS = frozenset(
    field.name
    for field in fields(GRPOConfig)
    if {"int", "float"} >= set(re.findall(r"\w+", str(field.type))) - {"None", "class", "typing", "Optional"} > set()
    or (isinstance(field.default, int | float) and not isinstance(field.default, bool))
)
"""Fields that hold a number."""
GRPOConfig.__init__ = _naming_unknown(GRPOConfig.__init__)  # type: ignore[method-assign]
for _field in fields(GRPOConfig):
    if _field.name in GRPOConfig.__annotations__:
        _row = FIELDS[_field.name]
        _words = ": ".join(word for word in (_row.to, _row.why) if word)
        _field.metadata = MappingProxyType({"help": f"{_row.verdict}: {_words}".replace("%", "%%")})
