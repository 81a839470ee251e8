"""Reading settings: TOML files, ``--section.key value`` overrides, and errors that name the nearest right key."""

from __future__ import annotations

import copy
import difflib
import json
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from cohort.config.schema import GRPOConfig
from cohort.config.section import laid_in
from cohort.errors import ConfigError
from cohort.presets import nested, optional_parts, preset, with_flags
from cohort.presets import setting_names as objective_parts


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
    if not overrides:
        with explain_errors(source=str(path)):
            return GRPOConfig(**table)
    try:
        return apply_overrides(table, overrides)
    except ConfigError as error:
        # A mistake that the file has by itself is the file's; one that the overrides mend is none.
        try:
            GRPOConfig(**table)
            of_file: set[str] = set()
        except ConfigError as alone:
            of_file = set(str(alone).splitlines())
        lines = [line.removeprefix("command line: ") for line in str(error).splitlines()]
        if not of_file.intersection(lines):
            raise
        named = [f"{path if line in of_file else 'command line'}: {line}" for line in lines]
        raise ConfigError("\n".join(named)) from None


def apply_overrides(table: Mapping[str, Any], overrides: Sequence[str]) -> GRPOConfig:
    """Settings from nested tables and ``--section.key value`` pairs."""
    merged = copy.deepcopy({section: dict(values) for section, values in table.items()})
    flags: list[tuple[str, Any]] = []
    for name, text in _pairs(overrides):
        section, _, key = name.partition(".")
        key, _, inner = key.partition(".")
        section_field = GRPOConfig.model_fields.get(section)
        fields = _section_type(section_field.annotation).model_fields if section_field else {}
        inner_fields = _inner_fields(fields[key].annotation) if key in fields else {}
        if inner_fields and inner in inner_fields:
            value = _parse(text, inner_fields[inner].annotation)
            merged[section] = laid_in(merged.get(section), [key, inner], value)
            continue
        if inner and key in fields and _takes_table(fields[key].annotation):
            path = [key, *(inner.split(".") if "Any]" in str(fields[key].annotation) else [inner])]
            merged[section] = laid_in(merged.get(section), path, _parse(text, Any))
            continue
        if key not in fields or inner_fields or (inner and fields[key].annotation is not Any):
            raise ConfigError(f"unknown setting --{name}{_nearest(name, prefix='--')}")
        value = _parse(text, fields[key].annotation)
        if fields[key].annotation is Any:  # a part of the objective, or one number of it
            flags.append((name.removeprefix("objective."), value))
        else:
            merged.setdefault(section, {})[key] = value
    if flags:
        merged["objective"] = _with_part_flags(merged.get("objective", {}), nested(flags))
    with explain_errors(source="command line" if overrides else ""):
        return GRPOConfig(**merged)


def _with_part_flags(objective: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """A file's objective with the parts that flags name laid over its own."""
    try:
        named = preset(str(objective.get("preset", "default")))
    except ConfigError:
        named = preset("default")  # refused later, by name
    return {**objective, **{key: with_flags(key, objective.get(key), value, named) for key, value in flags.items()}}


def parse_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """Parts of an objective from ``["trust_region.high=1.4", "scale=none"]``.

    Raises:
        ConfigError: one is not NAME=VALUE.

    >>> parse_settings(["trust_region.high=1.4", "scale=none"])
    {'trust_region': {'high': 1.4}, 'scale': 'none'}
    """
    settings: list[tuple[str, Any]] = []
    for assignment in assignments:
        name, given, text = assignment.partition("=")
        if not given or not name.strip():
            raise ConfigError(f"expected PART=VALUE, as in trust_region.high=1.4, got {assignment!r}")
        name = name.strip().removeprefix("objective.")
        part = name.partition(".")[0]
        if part in _KNOWN_ELSEWHERE:
            raise ConfigError(f"unknown part {part!r}: {_KNOWN_ELSEWHERE[part].replace('objective.', '')}")
        if part in (names := setting_names()) and part not in objective_parts():
            raise ConfigError(f"{part} is no part of an objective but a setting of a run: {names[part]}.{part}")
        settings.append((name, _parse(text.strip(), Any)))
    return nested(settings)


def nest_settings(schema: type[BaseModel], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Sort settings given by their own names into their sections; sections given whole stay as they are."""
    names = setting_names(schema)
    sections: dict[str, Any] = {key: value for key, value in settings.items() if key in schema.model_fields}
    for key, value in settings.items():
        if key in schema.model_fields:
            continue
        if key not in names:
            raise ConfigError(f"unknown setting {key!r}{_nearest(key)}")
        section = sections.get(names[key], {})
        given = dict(section) if isinstance(section, Mapping) else section.model_dump(exclude_unset=True)
        if key in given:
            raise ConfigError(f"{key!r} is given twice: by its name and in section {names[key]!r}")
        # None said by name means the part's absence, not that the setting is unset.
        absent = value is None and names[key] == "objective" and key in optional_parts()
        sections[names[key]] = {**given, key: "none" if absent else value}
    return sections


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
        lines += _annotated_table(section, section_type)
    return "\n".join(lines)


def _annotated_table(name: str, section: type[BaseModel]) -> list[str]:
    lines = [f"[{name}]  # {' '.join((section.__doc__ or '').split())}"]
    tables = []
    for key, field in section.model_fields.items():
        if _inner_fields(field.annotation):
            tables += _annotated_table(f"{name}.{key}", _section_type(field.annotation))
            continue
        lines += [f"# {line.strip()}" for line in (field.description or "").splitlines()]
        unset = field.default is None
        lines += [f"# {key} =" if unset else f"{key} = {_toml_value(field.default)}", ""]
    return lines + tables


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


def _inner_fields(annotation: Any) -> Mapping[str, Any]:
    """The settings of a table within a section; none where it is a setting itself."""
    is_table = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation.model_fields if is_table else {}


def _takes_table(annotation: Any) -> bool:
    """Whether a setting's value may be a table with keys of the user's own."""
    return "dict[" in str(annotation)


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
            return tomllib.loads(f"value = {text.lower() if text in ('True', 'False') else text}")["value"]
        except tomllib.TOMLDecodeError:
            with suppress(ValueError):
                return float(text)
            return text
    choices = typing.get_args(annotation) or (annotation,)
    choices = tuple(typing.get_args(each)[0] if hasattr(each, "__metadata__") else each for each in choices)
    if type(None) in choices and text.lower() == "none":
        return None
    if float in choices:
        with suppress(ValueError):
            return float(text)  # as people write them, which TOML does not take: .04, 1.
    is_list = "tuple" in str(annotation)
    path_or_list = is_list and str in choices and typing.get_origin(annotation) is not tuple
    if path_or_list or _takes_table(annotation):
        if not text.startswith(("[", "{")):
            return text
        with suppress(tomllib.TOMLDecodeError):
            return tomllib.loads(f"value = {text}")["value"]
        return text
    if is_list and not text.startswith("["):
        if "tuple[float" not in str(annotation) and "[int," not in str(annotation):
            return _parted(text) if text else []  # as it stands: a stop string may be a line break
        if "tuple[float" in str(annotation):
            with suppress(ValueError):
                return [float(number) for number in text.split(",")]
        text = f"[{text}]"
    elif not is_list and (str in choices or all(isinstance(choice, str) for choice in choices)):
        return text
    try:
        return tomllib.loads(f"value = {text.lower() if bool in choices else text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _parted(text: str) -> list[str]:
    """A list's parts: those between commas that stand in no brackets, as in "f(a=1, b=(2, 3)),g"."""
    shielded = re.sub(r"\((?:[^()]|\([^()]*\))*\)", lambda found: found[0].replace(",", "\0"), text)
    return [part.replace("\0", ",") for part in shielded.split(",")]


_KNOWN_ELSEWHERE = {
    **dict.fromkeys(("min_new_tokens", "min_tokens"), "set rollout.min_completion_length"),
    **dict.fromkeys(("guided_decoding_regex", "vllm_guided_decoding_regex"), "set rollout.regex"),
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
    "loss_type": "set objective.preset; 'cohort objective' lists them (docs/objective.md: how they differ from TRL's)",
    "importance_sampling_level": "set objective.ratio_level: 'token', or 'sequence_mean' for TRL's 'sequence'",
    "delta": "set objective.trust_region.dual to the same number",
    "scale_rewards": "set objective.scale: 'group_std', 'batch_std' for TRL's 'batch', or 'none'",
    **dict.fromkeys(("std_ddof", "std_epsilon"), "set objective.scale.ddof and objective.scale.epsilon"),
    "kl_gradient": "set objective.kl.direction",
    "use_bias_correction_kl": "set objective.kl.correction: 'token_ratio' for true; kl = 'k3_legacy' for false",
    "top_entropy_quantile": "set objective.top_entropy to the same number",
    "off_policy_mask_threshold": "set objective.mismatch = [{ rule = 'off_policy_mask', threshold = ... }]",
    "mask_truncated_completions": "set objective.truncated to 'mask'",
    "multi_objective_aggregation": "set objective.reward_aggregation; TRL's normalize_then_sum is "
    "'normalize_sum_normalize' here",
    **dict.fromkeys(("entropy_coef", "use_adaptive_entropy"), "set objective.entropy = { coefficient = ... }"),
    **dict.fromkeys(
        ("entropy_target", "entropy_coef_delta"), "set objective.entropy.target and objective.entropy.step"
    ),
    **dict.fromkeys(
        ("sapo_temperature_pos", "sapo_temperature_neg"),
        "set objective.trust_region.tau_positive and objective.trust_region.tau_negative",
    ),
    **dict.fromkeys(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        "set objective.trust_region.k_positive, lambda_positive, k_negative, lambda_negative",
    ),
    **dict.fromkeys(
        (
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_cap",
            "vllm_importance_sampling_min",
            "vllm_importance_sampling_max",
        ),
        "set objective.mismatch = [{ rule = 'weight', level = 'token', mode = 'truncate', high = 2.0 }]; modes are "
        "'truncate', 'mask' and 'reject'",
    ),
    "load_best_model_at_end": "the best model is kept in best/ in the run folder: set eval.metric_for_best_model",
    **dict.fromkeys(("eval_strategy", "do_eval"), "set eval.eval_steps; data.eval names the data"),
    "per_device_eval_batch_size": "set rollout.max_batch_size, which changes no result",
    "disable_dropout": "dropout is off; model.dropout = true keeps the model's own",
    "warmup_ratio": "set optim.warmup_steps",
    **dict.fromkeys(("report_to", "run_name"), "metrics are written to the run folder's metrics.jsonl"),
    **dict.fromkeys(("use_liger_kernel", "use_liger_loss"), "the head is computed in chunks already"),
    **dict.fromkeys(("shuffle", "shuffle_dataset"), "set data.order: 'shuffled' for true, 'sequential' for false"),
    **dict.fromkeys(("use_vllm", "vllm_mode", "deepspeed", "fsdp"), "Cohort runs in one process with its own sampler"),
    **dict.fromkeys(("peft_config", "use_peft"), "set model.lora.rank, model.lora.alpha, model.lora.target_modules"),
    "lora_r": "set model.lora.rank",
    **dict.fromkeys(
        ("lora_alpha", "lora_dropout", "lora_target_modules"), "set model.lora.alpha, .dropout, .target_modules"
    ),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "set model.quantization to '4bit' or '8bit'"),
    **dict.fromkeys(("optim",), "set optim.optimizer"),
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
            setting = f"; did you mean {names[path]}.{path}?" if path in (names := setting_names()) else ""
            return f"{path} is a section: expected a table of settings, got {item['input']!r}{setting}"
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
        items = [f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items() if item is not None]
        return "{ " + ", ".join(items) + " }" if items else "{}"
    return repr(value)


def _toml_key(key: str) -> str:
    """Bare where TOML takes it so."""
    return key if key and key.isascii() and key.replace("_", "").replace("-", "").isalnum() else _toml_value(key)
