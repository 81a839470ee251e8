"""What GRPO scripts import from TRL beside its trainer: dataclasses of arguments, and what is made of them."""

from __future__ import annotations

import os
import sys
import types
import typing
from argparse import Action
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from transformers import HfArgumentParser
from transformers.hf_argparser import HfArg

from cohort.errors import ConfigError, DataError, did_you_mean


@dataclass
class ModelConfig:
    """The model of a script, its adapters and its quantization; the names and defaults are TRL's."""

    model_name_or_path: str | None = HfArg(default=None, help="Folder or hub id of the model.")
    model_revision: str = HfArg(default="main", help="Branch, tag or commit of the model.")
    dtype: str | None = HfArg(
        default="float32",
        help="Type that the model is loaded in; 'auto': the type it is stored in.",
        metadata={"choices": ["auto", "bfloat16", "float16", "float32"]},
    )
    attn_implementation: str | None = HfArg(default=None, help="Implementation of attention.")
    use_peft: bool = HfArg(default=False, help="Train LoRA adapters.")
    lora_r: int = HfArg(default=16, help="Rank of the adapters.")
    lora_alpha: int = HfArg(default=32, help="Scale of the adapters, times the rank.")
    lora_dropout: float = HfArg(default=0.05, help="Dropout of the adapters.")
    lora_target_modules: list[str] | None = HfArg(default=None, help="Modules that get adapters.")
    lora_target_parameters: list[str] | None = HfArg(default=None, help="Parameters that get adapters.")
    lora_modules_to_save: list[str] | None = HfArg(default=None, help="Modules that are trained whole.")
    lora_task_type: str = HfArg(default="CAUSAL_LM", help="Task type of the adapters.")
    use_rslora: bool = HfArg(default=False, help="Scale adapters by alpha / sqrt(rank).")
    use_dora: bool = HfArg(default=False, help="Weight-decomposed adapters (DoRA).")
    load_in_8bit: bool = HfArg(default=False, help="Quantize the base model to 8 bits.")
    load_in_4bit: bool = HfArg(default=False, help="Quantize the base model to 4 bits.")
    bnb_4bit_quant_type: str = HfArg(default="nf4", help="Type of 4-bit numbers.", metadata={"choices": ["fp4", "nf4"]})
    use_bnb_nested_quant: bool = HfArg(default=False, help="Quantize the 4-bit constants as well.")
    bnb_4bit_quant_storage: str | None = HfArg(default=None, help="Type that 4-bit numbers are stored in.")

    trust_remote_code: ClassVar[bool] = False
    """An old name that scripts still read. The argument belongs to ``GRPOConfig`` now, as in TRL."""

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ConfigError("load_in_8bit and load_in_4bit exclude each other: set one of them")
        if self.lora_target_modules is not None and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]  # type: ignore[assignment]  # "all-linear", a regex


@dataclass
class ScriptArguments:
    """The data of a script; the names and defaults are TRL's."""

    dataset_name: str | None = HfArg(default=None, help="Folder or hub id of the data set.")
    dataset_config: str | None = HfArg(default=None, help="Configuration of the data set.")
    dataset_train_split: str = HfArg(default="train", help="Split for training.")
    dataset_test_split: str = HfArg(default="test", help="Split for evaluation.")
    dataset_streaming: bool = HfArg(default=False, help="Read the data set as it is needed.")
    ignore_bias_buffers: bool = HfArg(default=False, help="No effect; accepted because TRL has it.")


@dataclass
class DatasetConfig:
    """One data set of a mixture: arguments of ``datasets.load_dataset``, its columns and its share.

    Args:
        columns: the columns to keep. None: all.
        fraction: share of the mixture, relative to those of the other data sets.
    """

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclass
class DatasetMixtureConfig:
    """Several data sets that are used as one, as listed under ``datasets:`` in a script's YAML file."""

    datasets: list[DatasetConfig] = HfArg(default_factory=list, help="The data sets, in a YAML file.")
    streaming: bool = HfArg(default=False, help="Read the data sets as they are needed.")
    test_split_size: float | None = HfArg(default=None, help="Share or number of rows to hold out.")

    def __post_init__(self) -> None:
        for number, given in enumerate(self.datasets):
            try:
                self.datasets[number] = given if isinstance(given, DatasetConfig) else DatasetConfig(**given)
            except TypeError:  # not a mapping, an unknown key, or no path
                names = ", ".join(DatasetConfig.__dataclass_fields__)
                raise ConfigError(
                    f"a data set of the mixture needs path, and can have {names}; got {given!r:.80}"
                ) from None


def load_named(path: str, **options: Any) -> Any:
    """``datasets.load_dataset``.

    Raises:
        DataError: there is no such data set, configuration or split, or it cannot be read.
    """
    import datasets

    try:
        return datasets.load_dataset(path, **options)
    except Exception as error:  # datasets raises many kinds
        detail = next(iter(str(error).splitlines()), type(error).__name__)
        shown = "".join(f", {key} {options[key]!r}" for key in ("name", "split") if options.get(key))
        raise DataError(
            f"cannot load the data set {path!r}{shown} (a name that is no file or folder in {Path.cwd()} is looked up "
            f"on the Hugging Face hub): {detail}"
        ) from error


def get_dataset(mixture_config: DatasetMixtureConfig) -> Any:
    """Load the data sets of a mixture and join them.

    With ``fraction``, the first rows of each data set are taken: as many as make the largest mixture of these shares
    that repeats no row.

    Returns:
        A ``datasets.DatasetDict`` with the split "train", and "test" if ``test_split_size`` is set.

    Raises:
        ConfigError: there is no data set; some have a fraction and others none; a fraction is not above 0; or the data
            are streamed, which have no length to take a fraction or a split of.
        DataError: a data set cannot be loaded.
    """
    import datasets

    parts = mixture_config.datasets
    if not parts:
        raise ConfigError("datasets is empty: list data sets under it in the YAML file")
    fractions = [part.fraction for part in parts if part.fraction is not None]
    if fractions and (len(fractions) < len(parts) or min(fractions) <= 0):
        raise ConfigError(f"set fraction, above 0, for all {len(parts)} data sets of the mixture or for none")
    if mixture_config.streaming and (fractions or mixture_config.test_split_size is not None):
        raise ConfigError("streamed data have no length: remove streaming, or fraction and test_split_size")
    loaded = []
    for part in parts:
        of = {key: getattr(part, key) for key in ("path", "name", "data_dir", "data_files", "split")}
        rows = load_named(**of, streaming=mixture_config.streaming)
        loaded.append(rows if part.columns is None else rows.select_columns(part.columns))
    if fractions:
        shares = [fraction / sum(fractions) for fraction in fractions]
        total = min(len(rows) / share for rows, share in zip(loaded, shares, strict=True))
        loaded = [rows.select(range(round(share * total))) for rows, share in zip(loaded, shares, strict=True)]
    joined = datasets.concatenate_datasets(loaded)
    if mixture_config.test_split_size is not None:
        return joined.train_test_split(test_size=mixture_config.test_split_size)
    return datasets.DatasetDict({"train": joined})


def get_peft_config(model_args: ModelConfig) -> Any:
    """The ``peft.LoraConfig`` of a script's arguments; None without ``use_peft``."""
    if not model_args.use_peft:
        return None
    try:
        from peft import LoraConfig
    except ImportError:
        raise ConfigError("use_peft needs peft, which is not installed: pip install 'cohort-rl[lora]'") from None
    options = {name: getattr(model_args, name) for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")}
    for name in ("task_type", "r", "target_modules", "target_parameters", "modules_to_save"):
        if (value := getattr(model_args, f"lora_{name}")) is not None:
            options[name] = value
    return LoraConfig(bias="none", **options)


def get_quantization_config(model_args: ModelConfig) -> Any:
    """The ``transformers.BitsAndBytesConfig`` of a script's arguments; None without quantization."""
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return None
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=model_args.dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


# ----------------------------------------
# ``TrlParser``: arguments of a script from the command line and from a YAML file.


OF_ACCELERATE = ("accelerate_config", "config_file", "main_process_port", "multi_gpu", "num_machines", "num_processes")
"""Arguments that ``trl grpo`` passes on to ``accelerate launch``."""


class TrlParser(HfArgumentParser):  # type: ignore[misc]  # transformers is not typed here
    """Parses arguments into dataclasses, as ``transformers.HfArgumentParser`` does, with defaults from a YAML file.

    The file follows ``--config``. Arguments override it. Its key ``env`` holds environment variables to set. Numbers
    and other values that are not text are set to None by "none" or "null".

    Args:
        dataclass_types: one or several dataclasses. None may have a field ``config``.
        named: arguments of ``argparse.ArgumentParser``.

    Raises:
        ConfigError: a dataclass has a field ``config``.
    """

    def __init__(self, dataclass_types: Any = None, **named: Any) -> None:
        if dataclass_types is None:
            dataclass_types = []
        kinds = list(dataclass_types) if isinstance(dataclass_types, Iterable) else [dataclass_types]
        for kind in kinds:
            if "config" in kind.__dataclass_fields__:
                raise ConfigError(f"{kind.__name__} has a field 'config', the name of the YAML file's flag: rename it")
        super().__init__(dataclass_types=kinds, **named)
        for kind in kinds:
            self._accept_none(kind)

    def _accept_none(self, kind: Any) -> None:
        """Let the flags of a dataclass's optional fields read "none" as None, except for text."""
        hints = typing.get_type_hints(kind)
        for one in fields(kind):
            hint = hints[one.name]
            optional = typing.get_origin(hint) in (typing.Union, types.UnionType) and type(None) in hint.__args__
            action = self._option_string_actions.get(f"--{one.name}")
            if optional and action is not None and str not in hint.__args__ and action.type not in (None, str):
                action.type = _or_none(action.type)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """The dataclasses, in the order of ``dataclass_types``.

        Args:
            args: the command line. None: ``sys.argv``.
            return_remaining_strings: append the list of unknown arguments instead of refusing them.
            fail_with_unknown_args: refuse unknown keys of the YAML file.
            separate_remaining_strings: append two lists: from the file, and from the command line.

        Raises:
            ConfigError: the file cannot be read; or an argument or key is unknown.
        """
        given, path = _without_config(sys.argv[1:] if args is None else list(args))
        from_file = [] if path is None else self._read(path)
        *parsed, rest = self.parse_args_into_dataclasses(args=given, return_remaining_strings=True)
        if return_remaining_strings:
            return (*parsed, from_file, rest) if separate_remaining_strings else (*parsed, from_file + rest)
        if fail_with_unknown_args and from_file:
            raise ConfigError(f"{path}: {self._unknown(from_file)}")
        if rest:
            raise ConfigError(self._unknown(rest))
        return tuple(parsed)

    def _read(self, path: str) -> list[str]:
        """Set variables and defaults from a YAML file; its unknown keys, as arguments."""
        import yaml  # type: ignore[import-untyped]  # transformers requires it

        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read --config {path}: {error}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"--config {path}: expected keys and values, got {type(content).__name__}")
        variables = content.pop("env", {})
        if not isinstance(variables, dict):
            raise ConfigError(f"--config {path}: env must hold names and values, got {variables!r:.60}")
        os.environ.update({str(name): str(value) for name, value in variables.items()})
        return self.set_defaults_with_config(**{str(key): value for key, value in content.items()})

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Replace defaults, those of subparsers included. An argument with a new default is no longer required. One
        value for a list is a list of it.

        Returns:
            The unknown ones, as arguments: ["--name", "value"].
        """
        known = {action.dest: action for action in _actions(self)}
        for action in _actions(self):
            if action.dest in values:
                value = values[action.dest]
                is_one = action.nargs == "+" and value is not None and not isinstance(value, list | tuple)
                action.default, action.required = [value] if is_one else value, False
        return [text for key in values.keys() - known.keys() for text in (f"--{key}", str(values[key]))]

    def _unknown(self, arguments: Sequence[str]) -> str:
        names = [text.lstrip("-").partition("=")[0] for text in arguments if text.startswith("--")]
        if not names:
            return f"unknown argument {arguments[0]!r}: arguments are given as --name value"
        name, known = names[0].replace("-", "_"), {action.dest for action in _actions(self)}
        if name in OF_ACCELERATE:
            return (
                f"{name!r} starts processes: give it to accelerate, as in accelerate launch --num_processes 2 -m MODULE"
            )
        return f"unknown argument {names[0]!r}{did_you_mean(name, sorted(known))}"


def _actions(parser: Any) -> list[Action]:
    """The arguments of a parser and of its subparsers."""
    found: list[Action] = []
    for action in parser._actions:
        subparsers = action.choices.values() if action.nargs == "A..." else ()  # argparse.PARSER
        found += [inner for subparser in subparsers for inner in _actions(subparser)] or [action]
    return found


def _without_config(arguments: list[str]) -> tuple[list[str], str | None]:
    """The arguments without ``--config PATH`` or ``--config=PATH``, and the path."""
    for at, text in enumerate(arguments):
        if text == "--config":
            if at + 1 == len(arguments):
                raise ConfigError("--config needs the path of a YAML file")
            return arguments[:at] + arguments[at + 2 :], arguments[at + 1]
        if text.startswith("--config="):
            return arguments[:at] + arguments[at + 1 :], text.removeprefix("--config=")
    return arguments, None


def _or_none(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return None if text.lower() in ("none", "null") else convert(text)

    read.__name__ = getattr(convert, "__name__", "value")  # named in argparse's messages
    return read
