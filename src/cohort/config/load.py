"""Reading settings: TOML files, ``--section.key value`` overrides, and errors that name the nearest right key."""

from __future__ import annotations

import difflib
import json
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from cohort.config.schema import GRPOConfig
from cohort.errors import ConfigError
from cohort.presets import nested


def setting_names(schema: type[BaseModel] = GRPOConfig) -> dict[str, str]:
    """Every setting's own name with its section: ``{"learning_rate": "optim", ...}``. Names are unique."""
    sections = schema.model_fields.items()
    return {key: section for section, field in sections for key in _section_type(field.annotation).model_fields}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> GRPOConfig:
    """The settings of a TOML file with command-line overrides laid over it.

    Args:
        path: a TOML file with one table per section.
        overrides: ``["--rollout.num_generations", "4", "--run.seed=1"]``. A value is read as its setting's type says;
            ``none`` unsets a setting that may be unset.

    Raises:
        ConfigError: no such file, not TOML, an unknown key (with the nearest one), a wrong type or range.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no config file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read config file {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    _check_sections(table, source=str(path))
    with explain_errors(source=str(path)):
        GRPOConfig(**table)  # the file alone first: its errors name the file, not the command line
    return apply_overrides(table, overrides)


def apply_overrides(table: Mapping[str, Any], overrides: Sequence[str]) -> GRPOConfig:
    """Settings from nested tables and ``--section.key value`` pairs."""
    merged = {section: dict(values) for section, values in table.items()}
    for name, text in _pairs(overrides):
        section, _, key = name.partition(".")
        key, _, inner = key.partition(".")
        section_field = GRPOConfig.model_fields.get(section)
        fields = _section_type(section_field.annotation).model_fields if section_field else {}
        if key not in fields or (inner and fields[key].annotation is not Any):
            raise ConfigError(f"unknown setting --{name}{_nearest(name, prefix='--')}")
        value = _parse(text, fields[key].annotation)
        values = merged.setdefault(section, {})
        if inner:  # --objective.trust_region.high: one number of a part
            value = nested({key: values.get(key) or {}, f"{key}.{inner}": value})[key]
        values[key] = value
    with explain_errors(source="command line" if overrides else ""):
        return GRPOConfig(**merged)


def parse_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """Parts of an objective from ``["trust_region.high=1.4", "scale=none"]``.

    Raises:
        ConfigError: one is not NAME=VALUE.

    >>> parse_settings(["trust_region.high=1.4", "scale=none"])
    {'trust_region': {'high': 1.4}, 'scale': 'none'}
    """
    settings: dict[str, Any] = {}
    for assignment in assignments:
        name, given, text = assignment.partition("=")
        if not given or not name:
            raise ConfigError(f"expected PART=VALUE, as in trust_region.high=1.4, got {assignment!r}")
        settings[name.removeprefix("objective.")] = _parse(text, Any)
    return nested(settings)


def nest_settings(schema: type[BaseModel], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Sort settings given by their own names into their sections; sections given whole stay as they are."""
    names = setting_names(schema)
    nested: dict[str, Any] = {key: value for key, value in settings.items() if key in schema.model_fields}
    for key, value in settings.items():
        if key in schema.model_fields:
            continue
        if key not in names:
            raise ConfigError(f"unknown setting {key!r}{_nearest(key)}")
        section = nested.get(names[key], {})
        given = dict(section) if isinstance(section, Mapping) else section.model_dump(exclude_unset=True)
        if key in given:
            raise ConfigError(f"{key!r} is given twice: by its name and in section {names[key]!r}")
        nested[names[key]] = {**given, key: value}
    return nested


@contextmanager
def explain_errors(source: str = "") -> Iterator[None]:
    """Turn pydantic's errors into one ConfigError in Cohort's words, naming where the settings came from."""
    prefix = f"{source}: " if source else ""
    try:
        yield
    except ValidationError as error:
        raise ConfigError("\n".join(prefix + _sentence(item) for item in error.errors())) from None
    except ConfigError as error:
        raise ConfigError("\n".join(prefix + line for line in str(error).splitlines())) from None


def to_toml(config: GRPOConfig) -> str:
    """The settings as a TOML file that gives them back. Unset ones are left out: TOML has no null."""
    lines = []
    for section in GRPOConfig.SECTIONS:
        lines.append(f"[{section}]")
        for key, value in getattr(config, section).model_dump().items():
            if value is not None:
                lines.append(f"{key} = {_toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


def annotated_toml() -> str:
    """Every setting with its default and its documentation, as a TOML file to start from."""
    lines = []
    for section in GRPOConfig.SECTIONS:
        section_type = _section_type(GRPOConfig.model_fields[section].annotation)
        lines += [f"[{section}]  # {section_type.__doc__}"]
        for key, field in section_type.model_fields.items():
            lines += [f"# {line.strip()}" for line in (field.description or "").splitlines()]
            unset = field.default is None
            lines += [f"# {key} =" if unset else f"{key} = {_toml_value(field.default)}", ""]
    return "\n".join(lines)


def _check_sections(table: Mapping[str, Any], source: str) -> None:
    for name, value in table.items():
        if name not in GRPOConfig.SECTIONS:
            if isinstance(value, Mapping):
                close = difflib.get_close_matches(name, GRPOConfig.SECTIONS, n=1)
                hint = f"did you mean [{close[0]}]?" if close else f"sections are {', '.join(GRPOConfig.SECTIONS)}"
                raise ConfigError(f"{source}: unknown section [{name}]; {hint}")
            raise ConfigError(f"{source}: setting {name} stands outside a section{_nearest(name)}")
        if not isinstance(value, Mapping):
            raise ConfigError(f"{source}: {name} is a section: expected a table [{name}], got {name} = {value!r}")


def _section_type(annotation: Any) -> type[BaseModel]:
    return typing.cast("type[BaseModel]", annotation)


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    rest = list(overrides)
    while rest:
        name = rest.pop(0)
        if not name.startswith("--") or len(name) < 3:
            raise ConfigError(f"expected --section.key value, got {name!r}")
        name, has_value, text = name[2:].partition("=")
        if not has_value:
            if not rest:
                raise ConfigError(f"--{name} needs a value")
            text = rest.pop(0)
        yield name, text


def _parse(text: str, annotation: Any) -> Any:
    """Read a command-line value. Text settings take it as it is; the others read it as TOML."""
    if annotation is Any:  # a word, a number or a table
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            return text
    choices = typing.get_args(annotation) or (annotation,)
    if type(None) in choices and text.lower() == "none":
        return None
    is_list = "tuple" in str(annotation)
    if is_list and not text.startswith("["):
        if "tuple[float" not in str(annotation):
            return text.split(",") if text else []  # as it stands: a stop string may be a line break
        text = f"[{text}]"
    elif not is_list and (str in choices or all(isinstance(choice, str) for choice in choices)):
        return text
    try:
        return tomllib.loads(f"value = {text.lower() if bool in choices else text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


_KNOWN_ELSEWHERE = {
    **dict.fromkeys(("top_p", "top_k", "min_p", "repetition_penalty"), "Cohort samples from the whole distribution"),
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation"),
        "batches follow from rollout.prompts_per_step, rollout.num_generations and objective.minibatches; "
        "optim.microbatch_tokens sets the memory of one backward pass",
    ),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "dtype"), "set model.precision"),
    **dict.fromkeys(("num_train_epochs",), "set run.num_epochs"),
    **dict.fromkeys(("reward_weights",), "set reward.weights"),
    **dict.fromkeys(("reward_funcs",), "set reward.functions"),
    **dict.fromkeys(("logging_steps",), "every step is logged"),
    **dict.fromkeys(("loss_type",), "set objective.preset; 'cohort objective' lists them"),
    **dict.fromkeys(("importance_sampling_level",), "set objective.ratio_level"),
    **dict.fromkeys(("delta",), "set objective.trust_region.dual"),
    **dict.fromkeys(("scale_rewards", "std_ddof", "std_epsilon"), "set objective.scale"),
    **dict.fromkeys(("kl_gradient",), "set objective.kl.direction"),
    **dict.fromkeys(("use_bias_correction_kl",), "set objective.kl.correction"),
    **dict.fromkeys(("top_entropy_quantile",), "set objective.top_entropy"),
    **dict.fromkeys(("off_policy_mask_threshold",), "set objective.mismatch, rule off_policy_mask"),
    **dict.fromkeys(("mask_truncated_completions",), "set objective.truncated to 'mask'"),
    **dict.fromkeys(("multi_objective_aggregation",), "set objective.reward_aggregation"),
    **dict.fromkeys(("entropy_coef",), "set objective.entropy.coefficient"),
    **dict.fromkeys(("max_prompt_length",), "prompts are never cut; one that leaves no room is an error"),
    **dict.fromkeys(("use_vllm", "vllm_mode", "deepspeed", "fsdp"), "Cohort runs in one process with its own sampler"),
    **dict.fromkeys(("peft_config", "lora"), "adapters are not supported yet"),
}
"""What to say of settings that users bring along from other trainers."""


def _nearest(name: str, prefix: str = "") -> str:
    full = [f"{section}.{key}" for key, section in setting_names().items()]
    key = name.rpartition(".")[2]
    if key in _KNOWN_ELSEWHERE:
        return f": {_KNOWN_ELSEWHERE[key]}"
    names = setting_names()
    close = difflib.get_close_matches(name, full, n=1, cutoff=0.75)
    if key in names:  # right name, wrong or missing section
        close = [f"{names[key]}.{key}"]
    elif not close and (keys := difflib.get_close_matches(key, names, n=1, cutoff=0.6)):
        close = [f"{names[keys[0]]}.{keys[0]}"]
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    return "; 'cohort config' lists all settings"


def _sentence(item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"])
    match item["type"]:
        case "extra_forbidden":
            return f"unknown setting {path}{_nearest(path)}"
        case "value_error":
            return f"{path}: {item['ctx']['error']}" if path else str(item["ctx"]["error"])
        case "model_type" | "dict_type":
            return f"{path} is a section: expected a table of settings, got {item['input']!r}"
        case _:
            message = item["msg"][0].lower() + item["msg"][1:]
            return f"{path}: {message}, got {item['input']!r}"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        items = [f"{key} = {_toml_value(item)}" for key, item in value.items() if item is not None]
        return "{ " + ", ".join(items) + " }" if items else "{}"
    return repr(value)
