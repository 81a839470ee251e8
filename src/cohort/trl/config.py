"""``GRPOConfig`` with TRL's fields and defaults, as a subclass of transformers' ``TrainingArguments``.

``cohort.trl.translate`` turns it into Cohort's settings.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, fields, replace
from fnmatch import fnmatch
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from transformers import TrainingArguments

from cohort.errors import ConfigError, DataError, did_you_mean

# ----------------------------------------
# What becomes of each field of TRL's ``GRPOConfig``: the table ``fields.toml``.
#
# The table names every field of TRL 1.16.0, those of transformers' ``TrainingArguments`` included, and names that
# scripts know from older versions. docs/trl.md prints it, and ``translate`` does what it says.


Verdict = Literal["same", "translated", "no effect", "refused"]


@dataclass(frozen=True, slots=True)
class Field:
    """One row of the table."""

    verdict: Verdict
    """"same": the same meaning here; "translated": another name or unit; "no effect": accepted, changes nothing;
    "refused": an error, unless at its default."""
    to: str = ""
    """Cohort's setting, dotted; or what else reads the field. Of an old name, the present one."""
    why: str = ""
    """How it is translated; why it has no effect; or what to do instead."""
    value: Any = None
    """The setting's value by the field's; "same": the field's own; None: it depends on more than the field."""
    old: bool = False
    """Whether the name is one that TRL or transformers has removed or deprecated."""


TABLE: dict[str, Any] = tomllib.loads((Path(__file__).parent / "fields.toml").read_text(encoding="utf-8"))


def _rows() -> Iterator[tuple[str, Field]]:
    yield from ((name, Field("same", to, value="same")) for name, to in TABLE["same"].items())
    yield from ((name, Field("translated", *row)) for name, row in TABLE["translated"].items())
    for verdict in ("no effect", "refused"):
        yield from ((name, Field(verdict, why=why)) for name, why in TABLE[verdict].items())
    yield from ((name, replace(Field(*row), old=True)) for name, row in TABLE["old"].items())


FIELDS: dict[str, Field] = dict(_rows())
"""Every field by its name."""
RENAMED = {name: field.to for name, field in FIELDS.items() if field.old and field.to in FIELDS}
"""Old names with the present ones."""


def setting_fields(setting: str) -> tuple[str, ...]:
    """The fields that become one of Cohort's settings, or a number of a part, for errors about it.

    >>> setting_fields("optim.warmup_steps"), setting_fields("trust_region.tau_positive")
    (('warmup_steps', 'warmup_ratio'), ('sapo_temperature_pos',))
    """
    part = f"objective.{setting}"
    return tuple(name for name, field in FIELDS.items() if field.to == setting or f"{field.to}.{field.why}" == part)


def why_off(args: Any, name: str) -> str | None:
    """Why a field does not count in this run; None where it counts."""
    for off in TABLE["off"]:
        if any(fnmatch(name, pattern) for pattern in off["fields"]) and any(
            getattr(args, other) in values for other, values in off["where"].items()
        ):
            return str(off["why"])
    return None


# ----------------------------------------
# TRL's arithmetic of batches: how its numbers become prompts, minibatches and iterations of a rollout.
#
# TRL cuts one *generation batch* into ``steps_per_generation`` (S) pieces of ``per_device_train_batch_size`` x
# processes completions, goes through them ``num_iterations`` (mu) times, and makes an optimizer step every
# ``gradient_accumulation_steps`` (GA) pieces. Cohort's rollout is what the updates share:
#
# | | prompts of a rollout | minibatches | iterations |
# |---|---|---|---|
# | S a multiple of GA | of one generation batch | S / GA | mu |
# | GA = k S, k divides mu | of one | 1 | mu / k: k passes within one step have equal gradients |
# | GA = k S, mu divides k | of k / mu | 1 | 1: the weights do not change between them |


FOLLOWING = ("steps_per_generation", "generation_batch_size")
"""Fields that follow from the others where they are unset."""
COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations", *FOLLOWING)
"""Fields that hold positive integers."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The batches of a run, in TRL's terms and in Cohort's."""

    steps_per_generation: int
    generation_batch_size: int
    """Completions of one generation, over all processes."""
    accumulation: int
    """``gradient_accumulation_steps``."""
    trl_iterations: int
    """TRL's ``num_iterations``."""
    num_generations: int
    prompts_per_step: int
    """Prompts of a rollout."""
    minibatches: int
    num_iterations: int

    @classmethod
    def of(cls, args: Any, world_size: int) -> Batch:
        """The batches of TRL's arguments.

        Raises:
            ConfigError: a number does not divide another, or an optimizer step would share a generation or a group
                with another one.
        """
        per_device, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
        group, iterations = args.num_generations, args.num_iterations
        for name in COUNTS:
            count = getattr(args, name)
            if (count or name not in FOLLOWING) and (not isinstance(count, int) or count < 1):
                raise ConfigError(f"{name} must be a positive integer, got {count!r}")
        if group < 2:
            raise ConfigError(f"num_generations must be at least 2 to compare the completions of a prompt, got {group}")
        steps, size = _generation(args, per_device * world_size)
        if size % group:
            raise ConfigError(
                f"generation_batch_size ({size}) must be divisible by num_generations ({group}): it is "
                f"per_device_train_batch_size ({per_device}) x processes ({world_size}) x steps_per_generation "
                f"({steps})"
            )
        prompts = size // group
        rollout = _rollout(prompts, steps, accumulation, iterations)
        batch = cls(steps, size, accumulation, iterations, group, *rollout)
        if batch.prompts_per_step % batch.minibatches:
            raise ConfigError(
                f"a generation of {prompts} prompts makes {batch.minibatches} optimizer steps (steps_per_generation "
                f"{steps} / gradient_accumulation_steps {accumulation}), and groups are not parted between them here: "
                f"raise gradient_accumulation_steps, or lower num_generations ({group})"
            )
        return batch

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps that use one rollout."""
        return self.minibatches * self.num_iterations

    def max_steps(self, args: Any, num_prompts: int | None) -> int:
        """Optimizer steps of the run as TRL counts them, ``state.max_steps``.

        An epoch of n prompts has floor(n / u) generations of u prompts, and the optimizer steps of those, rounded up.

        Args:
            args: ``max_steps``, or else ``num_train_epochs``, counts.
            num_prompts: prompts of the training data; None: streamed.

        Raises:
            ConfigError: the data is streamed, and ``max_steps`` is not set.
            DataError: the data has fewer prompts than one generation.
        """
        prompts = self.generation_batch_size // self.num_generations
        if num_prompts is None and args.max_steps <= 0:
            raise ConfigError("the training data is streamed, so its length is unknown: set max_steps")
        if num_prompts is not None and num_prompts < self.prompts_per_step:
            times = self.prompts_per_step // prompts
            unit = f"one update ({times} generations of " if times > 1 else "one generation ("
            raise DataError(
                f"the training data has {num_prompts} prompts, fewer than the {self.prompts_per_step} of {unit}"
                f"generation_batch_size {self.generation_batch_size} / num_generations {self.num_generations}): lower "
                "per_device_train_batch_size or gradient_accumulation_steps"
            )
        if args.max_steps > 0:
            return int(args.max_steps)
        return math.ceil(float(args.num_train_epochs) * self.updates_per_epoch(num_prompts or prompts))

    def blank_rows(self, args: Any, environments: Any) -> list[dict[str, Any]]:
        """Rows with blank prompts (Cohort refuses empty ones) for ``train_dataset=None``: the environment's ``reset``
        gives the prompts. One for each prompt of a generation, as in TRL, or of a rollout where that is more.

        Args:
            args: whose ``max_steps`` ends the run.
            environments: ``environment_factory``.

        Raises:
            ConfigError: there is no environment, there are several, or ``max_steps`` is not set.
        """
        if environments is None:
            raise ConfigError(
                "`train_dataset` is required unless an `environment_factory` gives the prompts: pass rows"
            )
        if isinstance(environments, Mapping):
            raise ConfigError(
                "train_dataset is None, and environment_factory is a dict: pass rows with a column 'environment', or "
                "a single environment"
            )
        if args.max_steps <= 0:
            raise ConfigError("train_dataset is None, so nothing says how long an epoch is: set max_steps")
        count = max(self.prompts_per_step, self.generation_batch_size // self.num_generations)
        return [{"prompt": [{"role": "user", "content": " "}]} for _ in range(count)]

    def updates_per_epoch(self, num_prompts: int) -> int:
        """Optimizer steps of an epoch as TRL counts them."""
        generations = num_prompts // (self.generation_batch_size // self.num_generations)
        return math.ceil(generations * self.steps_per_generation * self.trl_iterations / self.accumulation)

    def rollouts(self, updates: int) -> int:
        """Rollouts that so many optimizer steps need. The last one is used in full."""
        return math.ceil(updates / self.updates_per_rollout)


def _generation(args: Any, piece: int) -> tuple[int, int]:
    """``steps_per_generation`` and ``generation_batch_size``, by TRL's rules; both may be given if they agree."""
    steps, size = args.steps_per_generation, args.generation_batch_size
    if size is None:
        steps = steps or args.gradient_accumulation_steps
        return steps, piece * steps
    if size % piece:
        raise ConfigError(
            f"generation_batch_size ({size}) must be divisible by per_device_train_batch_size x processes ({piece})"
        )
    if steps not in (None, size // piece):
        raise ConfigError(
            f"generation_batch_size ({size}) and steps_per_generation ({steps}) contradict each other: set one of them"
        )
    return size // piece, size


def _rollout(prompts: int, steps: int, accumulation: int, iterations: int) -> tuple[int, int, int]:
    """Prompts, minibatches and iterations of a rollout; see the table of this module."""
    if steps % accumulation == 0:
        return prompts, steps // accumulation, iterations
    if accumulation % steps == 0:
        passes = accumulation // steps
        if iterations % passes == 0:
            return prompts, 1, iterations // passes
        if passes % iterations == 0:
            return prompts * passes // iterations, 1, 1
    raise ConfigError(
        f"gradient_accumulation_steps ({accumulation}) and steps_per_generation ({steps}) with num_iterations "
        f"({iterations}) make optimizer steps that begin in one pass over a generation and end in another: set one to "
        "a multiple of the other"
    )


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
    for name in TABLES:
        if isinstance(value := getattr(args, name), str) and value.lstrip().startswith("{"):
            with suppress(ValueError):
                setattr(args, name, json.loads(value))
        if not isinstance(getattr(args, name), dict | None):
            raise ConfigError(f"{name} must be a dict or its JSON, got {value!r:.80}")
    for name, is_nullable in NUMBERS.items():
        value = getattr(args, name)
        allowed = isinstance(value, Real) or (value is None and is_nullable)
        if not allowed or isinstance(value, bool):
            raise ConfigError(f"{name} must be a number, got {value!r:.80}")


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


NUMBERS = {
    field.name: "None" in str(field.type)
    for field in fields(GRPOConfig)
    if field.name in FIELDS
    and (
        {"int", "float"} >= set(re.findall(r"\w+", str(field.type))) - {"None", "class", "typing", "Optional"} > set()
        or (isinstance(field.default, int | float) and not isinstance(field.default, bool))
    )
}
"""Fields that hold a number, and whether they may be None. transformers' argument parser changes ``field.type``, so
this is kept from before."""
GRPOConfig.__init__ = _naming_unknown(GRPOConfig.__init__)  # type: ignore[method-assign]
for _field in fields(GRPOConfig):
    if _field.name in GRPOConfig.__annotations__:
        _row = FIELDS[_field.name]
        _words = ": ".join(word for word in (_row.to, _row.why) if word)
        _field.metadata = MappingProxyType({"help": f"{_row.verdict}: {_words}".replace("%", "%%")})
