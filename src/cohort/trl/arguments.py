"""What GRPO scripts import from TRL beside its trainer: dataclasses of arguments, and what is made of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers.hf_argparser import HfArg

from cohort.errors import ConfigError, DataError


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
    parameters = model_args.lora_target_parameters
    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        target_modules=model_args.lora_target_modules,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        bias="none",
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        modules_to_save=model_args.lora_modules_to_save,
        **({} if parameters is None else {"target_parameters": parameters}),
    )


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
