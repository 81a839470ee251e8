"""Load a Hugging Face causal language model and its tokenizer, checked first, and choose its device and dtypes."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from cohort.errors import ModelError, did_you_mean
from cohort.policy import gguf
from cohort.policy.files import (
    ADAPTER_FILE,
    check_adapter,
    check_adapter_complete,
    check_attention,
    check_complete,
    check_config,
    check_folder,
    check_hub,
    file_in,
    is_adapter,
    read_json_object,
)
from cohort.shipped import PREFIX, shipped

# ----------------------------------------
# Sizes that a config tells: how many tokens a model can read, and how wide it is.


def context_length(config: Any) -> int | None:
    """The maximum number of tokens of a model, prompt and completion together. None if its config has no limit. With
    longrope it is ``longrope_length``."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if isinstance(length := getattr(config, name, None), int) and length > 0:
            return min(length, longrope_length(config) or length)
    return longrope_length(config)


def longrope_length(config: Any) -> int | None:
    """The number of tokens from which on longrope has other factors (Phi-3, Phi-4); None for other models. A text that
    grows beyond it is drawn with two sets of factors, and a pass over the whole text would use one."""
    given = getattr(config, "rope_parameters", None)
    found = given if isinstance(given, dict) else {}
    ropes = [rope for rope in (found, *found.values()) if isinstance(rope, dict)]  # or one for each type of layer
    lengths = [rope.get("original_max_position_embeddings") for rope in ropes if rope.get("rope_type") == "longrope"]
    return min((length for length in lengths if isinstance(length, int) and length > 0), default=None)


def hidden_size(config: Any) -> int:
    """H; 0 if the config has none. A config that reads images has it in that of its language model."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(config, "hidden_size", 0) or 0)


def known_tokens(model: Any, config: Any) -> tuple[int | None, frozenset[int]]:
    """The number of tokens that a model has embeddings for, and the ids among them that stand for what is not text; see
    ``PromptSet.check_tokens``.

    Args:
        model: a loaded model, which is asked itself, or anything else.
        config: the config of the whole model.
    """
    size = getattr(config.get_text_config(), "vocab_size", None)
    if hasattr(model, "get_input_embeddings"):
        found = (model.get_input_embeddings(), model.get_output_embeddings())
        size = min((len(one.weight) for one in found if hasattr(one, "weight")), default=size)
    return size if isinstance(size, int) and size > 0 else None, placeholder_ids(config)


# ----------------------------------------
# Models that read images or sound beside text: they are trained on text alone, and what else they have is kept.


def reads_images(config: Any) -> bool:
    """Whether a config is that of a whole model of transformers for text and images, not of its language model."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return (
        config is not None and hasattr(config, "vision_config") and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    )


PLACEHOLDERS = tuple(f"{kind}_token_{what}" for kind in ("image", "video", "audio") for what in ("id", "index"))
"""Names in a config of the ids of tokens that stand for an image, a video or sound."""


def placeholder_ids(config: Any) -> frozenset[int]:
    """The ids of tokens that stand for what is not text, in whose place some models put something else than the token's
    embedding even without an image (Gemma 4). None for models of text alone."""
    if not reads_images(config):
        return frozenset()
    found = (getattr(config, name, None) for name in PLACEHOLDERS)
    return frozenset(one for one in found if isinstance(one, int) and one >= 0)


PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def processor_files(model: Any, *, download: bool = False) -> list[Path]:
    """The files, beside those of its tokenizer, that tell how a model's images and sound are prepared, from where the
    model was loaded. Training needs none of them: what it saves is to be used with them again."""
    from transformers.utils import cached_file

    if not reads_images(getattr(model, "config", None)):
        return []
    found: list[str | None] = []
    with suppress(Exception):  # the name of no folder or hub id, as of a model built in memory, or there is no network
        for name in PROCESSOR_FILES:
            options = {"local_files_only": not download, "_raise_exceptions_for_missing_entries": False}
            found.append(cached_file(model.config._name_or_path, name, **options))
    return [Path(one) for one in found if one]


def auto_class(config: Any) -> Any:
    """The class of transformers that loads all of a model, so that what is saved loads wherever the model came from.
    ``AutoModelForCausalLM`` knows few of the models that read images, and loads the language model alone of some."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def untrained_modules(model: Any) -> dict[str, nn.Module]:
    """The modules with weights of their own that are no part of the language model, by name; none in other models."""
    if not reads_images(getattr(model, "config", None)):
        return {}
    used = {id(module) for part in (model.get_decoder(), model.get_output_embeddings()) for module in part.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if id(module) not in used and next(module.parameters(recurse=False), None) is not None
    }


def freeze_the_rest(model: Any) -> None:
    """Freeze what no text reaches: ``untrained_modules``."""
    for module in untrained_modules(model).values():
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = False


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")
"""A folder with a tokenizer has one of these."""
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
"""Files of a hub model that are downloaded for a revision."""

PEFT_ASKS = ".*is_gradient_checkpointing.*deprecated"
"""A warning of transformers about a property that peft reads of every model."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of storage and of computation."""

    master: torch.dtype
    """Dtype of the trained weights and of the optimizer's state."""
    compute: torch.dtype
    """Dtype of matrix products. Log-probs and everything after them are float32 (float64 for float64)."""

    def __str__(self) -> str:
        name = str(self.compute).removeprefix("torch.")
        return name if self.compute == self.master else f"{name} over {str(self.master).removeprefix('torch.')} weights"


def peft_library() -> Any:
    """The peft package.

    Raises:
        ModelError: peft is not installed, or not of a version that goes with the installed transformers.
    """
    try:
        import peft
    except ImportError as error:
        why = "is not installed" if error.name == "peft" else f"cannot be imported ({error})"
        raise ModelError(f"adapters need peft, which {why}: pip install -U 'cohort-rl[lora]'") from None
    return peft


def resolve_device(name: str) -> torch.device:
    """The device of a name. "auto" is CUDA if it is available, else the CPU; other names are torch's.

    Raises:
        ModelError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, dtype=torch.float32, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"model.device {name!r} cannot be used here: {_first_line(error)}") from None
    if device.type == "mps":
        raise ModelError("model.device 'mps' is not supported: it has no float64, which sampling needs; set 'cpu'")
    return device


CPU_INFO = Path("/proc/cpuinfo")


def resolve_precision(name: str, device: torch.device, hidden_size: int = 0) -> Precision:
    """The precision of a name. "auto" is bfloat16 if the hardware is faster with it, else float32.

    The rule depends on the hardware and the model and measures no time, so that a run is repeatable. AMD's CPUs with
    AVX512-BF16 are faster in sampling and in the update from a hidden size of 256 on, and slower in sampling below it
    (``benchmarks/precision.py``); Intel's without AMX are slower in both (``benchmarks/real.py``).
    """
    if name == "auto":
        amd = CPU_INFO.exists() and "AuthenticAMD" in CPU_INFO.read_text(encoding="utf-8")
        pairs = amd and torch.cpu._is_avx512_bf16_supported() and hidden_size >= 256
        faster = device.type == "cpu" and (pairs or torch.cpu._is_amx_tile_supported())
        faster |= device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        name = "bfloat16" if faster else "float32"
    compute: torch.dtype = getattr(torch, name)
    return Precision(torch.float64 if compute == torch.float64 else torch.float32, compute)


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or hub id.

    Raises:
        ModelError: there is no such folder, or no tokenizer in it.
    """
    from transformers import AutoTokenizer

    path = _check_folder(path)
    if Path(path).is_dir() and not any((Path(path) / name).exists() for name in TOKENIZER_FILES):
        save = f"; save it there with tokenizer.save_pretrained({path!r})"
        raise ModelError(
            f"model folder {path} holds no tokenizer: expected {' or '.join(TOKENIZER_FILES[:2])}"
            f"{file_in(Path(path)) or save}"
        )
    with _errors(f"cannot load a tokenizer from {path!r}", path):
        check_hub(path)
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def load_model(
    path: str,
    precision: Precision,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    allow_pickled_weights: bool = False,
    quantization: str = "none",
    frozen: bool = False,
) -> nn.Module:
    """The causal language model of a folder or hub id, in the master dtype; a model that reads images as a whole. A
    folder with an adapter gives its base model with the adapter merged into it.

    Args:
        path: folder or hub id.
        precision, device: dtypes and device.
        trust_remote_code: run code that comes with the model.
        allow_pickled_weights: read pickled weights where there are no others.
        quantization: "8bit" or "4bit" (NF4) store the weights of linear layers in so many bits.
        frozen: no weight will be trained. ``matrices`` then have the dtype of the file, for ``keep_in_compute_dtype``.

    Raises:
        ModelError: there is no such folder, it has no causal language model, or a tensor of the model is missing.
    """
    from transformers import AutoConfig, PreTrainedModel

    path = _check_folder(path)
    # Reading a folder is fast; a download shows its progress.
    bars = without_progress_bars() if Path(path).is_dir() else contextlib.nullcontext()
    with _errors(f"cannot load a causal language model from {path!r}", path), bars:
        base = check_loading(path, trust_remote_code=trust_remote_code, allow_pickled_weights=allow_pickled_weights)
        config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
        model: Any
        plan: Any = mock.patch.object(PreTrainedModel, "_get_dtype_plan", _as_stored)
        as_stored = frozen and base == path and not hasattr(config, "quantization_config")
        with plan if as_stored and precision.compute != precision.master else contextlib.nullcontext():
            model, report = auto_class(config).from_pretrained(
                base,
                dtype=precision.master,
                trust_remote_code=trust_remote_code,
                use_safetensors=None if allow_pickled_weights else True,
                ignore_mismatched_sizes=True,  # check_complete refuses them, and names one
                output_loading_info=True,
                # Before 5.21 transformers chooses SDPA for models with soft caps, and drops the caps.
                **({"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}),
                **_quantization(quantization, precision, device),
            )
        check_complete(base, report)
        if is_adapter(path):
            merged = load_adapter(model, Path(path), allow_pickled_weights=allow_pickled_weights).merge_and_unload()
            model = merged.requires_grad_(requires_grad=True)
    loaded: nn.Module = model if quantization != "none" else model.to(device)
    return loaded


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of linear layers and embeddings, and the matrices of experts, by all of their names."""

    def is_one(name: str, weight: nn.Parameter) -> bool:
        module = model.get_submodule(name.rpartition(".")[0])
        plain = type(module) is nn.Linear or isinstance(module, nn.Embedding)
        return weight.ndim == 3 if hasattr(module, "is_transposed") else plain and weight.ndim == 2

    return {name: one for name, one in model.named_parameters(remove_duplicate=False) if is_one(name, one)}


def _as_stored(model: Any, _dtype: torch.dtype) -> dict[str, None]:
    """A plan for ``from_pretrained``: ``matrices`` keep the dtype of the file. Everything else, such as tables that are
    computed and not stored, is as in a model that is read in the master dtype."""
    return {f"^{re.escape(name)}$": None for name in matrices(model)}


def check_loading(
    path: str,
    *,
    trust_remote_code: bool = False,
    allow_pickled_weights: bool = False,
    remedy: str = "set model.trust_remote_code = true",
) -> str:
    """Check a model before ``from_pretrained`` reads its weights.

    Args:
        path: a folder or hub id of a model or an adapter.
        trust_remote_code, allow_pickled_weights: what may be loaded.
        remedy: what to do to run code on the hub, for the message.

    Returns:
        The model's path: of an adapter, that of its base model.

    Raises:
        ModelError: it lacks a file, or needs something that may not be loaded.
    """
    from transformers import AutoConfig

    path = _check_folder(path)
    if is_adapter(path):
        check_adapter(Path(path), allow_pickled_weights=allow_pickled_weights)
    base = base_path(path)
    check_folder(base, allow_pickled_weights=allow_pickled_weights)
    if not trust_remote_code:
        check_attention(base, AutoConfig.from_pretrained(base, trust_remote_code=False), remedy)
    return base


def load_adapter(
    model: nn.Module, folder: Path, *, allow_pickled_weights: bool = False, is_trainable: bool = False
) -> Any:
    """The model with the low-rank adapter of a folder.

    Raises:
        ModelError: the folder has no such adapter, or a tensor of it is missing.
    """
    peft = peft_library()
    check_adapter(folder, allow_pickled_weights=allow_pickled_weights)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found missing adapter keys")  # refused below
        warnings.filterwarnings("ignore", PEFT_ASKS, FutureWarning)
        wrapped = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=is_trainable)
    check_adapter_complete(folder, peft.get_peft_model_state_dict(wrapped))
    return wrapped


def _quantization(bits: str, precision: Precision, device: torch.device) -> dict[str, Any]:
    """Arguments of ``from_pretrained``."""
    if bits == "none":
        return {}
    if device.type != "cuda" and (bits, device.type) != ("4bit", "cpu"):
        raise ModelError(
            f"model.quantization {bits!r} needs CUDA, and model.device is {device}: set model.quantization to '4bit', "
            "which a CPU can compute too, or to 'none'"
        )
    if find_spec("bitsandbytes") is None:
        raise ModelError(
            "model.quantization needs bitsandbytes, which is not installed: pip install 'cohort-rl[quantized]'"
        )
    from transformers import BitsAndBytesConfig

    settings: dict[str, Any] = {"load_in_8bit": True}
    if bits == "4bit":
        settings = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": precision.compute,
        }
    return {"quantization_config": BitsAndBytesConfig(**settings), "device_map": {"": device}}


def base_path(path: str) -> str:
    """The path of the base model of an adapter's folder. Other paths are returned unchanged.

    Raises:
        ModelError: the adapter does not name its base model.
    """
    file = Path(path).expanduser() / ADAPTER_FILE
    if not file.exists():
        return path
    base = read_json_object(file).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(f"{file} does not say which model it belongs to: set base_model_name_or_path in it")
    base = _check_folder(base)
    if is_adapter(base):
        raise ModelError(f"{file} names {base} as its model, which is an adapter itself")
    return base


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars inside the block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def end_token_ids(model: Any, tokenizer: Any, *, trust_remote_code: bool = False) -> tuple[int, ...]:
    """All tokens that end a completion: those of the generation config, the model config and the tokenizer.

    Args:
        model: a loaded model, or a folder or hub id, whose configs are read.
        tokenizer: its tokenizer.
        trust_remote_code: run code that comes with the model.

    Raises:
        ModelError: a config cannot be read, or names something else than tokens.
    """
    found: set[int] = set()
    is_name = isinstance(model, str)
    configs = read_configs(model, trust_remote_code=trust_remote_code) if is_name else _configs_of(model)
    for holder in (*configs, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        listed = [ids] if isinstance(ids, int) else ids or []
        if not isinstance(listed, list | tuple) or not all(isinstance(one, int) for one in listed):
            raise ModelError(f"eos_token_id of {type(holder).__name__}: expected token ids, got {ids!r:.80}")
        found.update(listed)
    return tuple(sorted(found))


def _configs_of(model: Any) -> tuple[Any, Any]:
    return getattr(model, "generation_config", None), getattr(model, "config", None)


def read_configs(name: str, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """The generation config of a folder or hub id, None if there is none, and the config; see ``read_config``."""
    from transformers import GenerationConfig

    path = base_path(_check_folder(name))
    is_folder, found = Path(path).is_dir(), None
    if not is_folder:
        with contextlib.suppress(OSError):  # a model need not have one
            found = GenerationConfig.from_pretrained(path)
    elif (Path(path) / "generation_config.json").is_file():
        with _errors(f"cannot read the generation config of {name!r}", path):
            found = GenerationConfig.from_pretrained(path)
    return found, read_config(name, trust_remote_code=trust_remote_code)


def read_config(model: Any, *, trust_remote_code: bool = False, whole: bool = False) -> Any:
    """The config of a model's text part, or of the ``whole`` model, from a loaded model, or from a folder or hub id
    without loading the model.

    Raises:
        ModelError: there is no config to read.
    """
    from transformers import AutoConfig

    if not isinstance(model, str):
        return model.config if whole else model.config.get_text_config()
    path = base_path(_check_folder(model))
    if Path(path).is_dir():
        check_config(Path(path))
    with _errors(f"cannot read a model's config in {model!r}", path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        return config if whole else config.get_text_config()


def _check_folder(path: str) -> str:
    """The path with its ``~`` expanded, or the folder of a shipped model or of a GGUF file; a hub id unchanged. No
    network is asked for a name whose first part is a folder here."""
    if not path:
        raise ModelError("no model given: set model.path to a model folder or a hub id")
    if path.startswith(PREFIX):
        return shipped(path, "model", ModelError)
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    expanded = os.path.expanduser(path)  # noqa: PTH111 - Path raises for an unknown user
    if Path(expanded).is_file() or path.endswith(gguf.SUFFIX):
        with _errors(f"cannot read {path}", path):
            return str(gguf.folder_of(Path(expanded)))
    parent = Path(expanded).parent
    if not Path(expanded).is_dir() and (looks_local or ("/" in path and parent.is_dir())):
        there = sorted(one.name for one in parent.iterdir() if one.is_dir()) if parent.is_dir() else []
        hint = did_you_mean(Path(expanded).name, there, form=f"{parent}/{{}}")
        raise ModelError(f"no model folder {path}{hint}")
    return expanded if looks_local else path


def folder_of_revision(model: str, revision: str, *, allow_pickled_weights: bool = False) -> str:
    """The folder of a hub model's snapshot, which is downloaded if it is not there.

    Args:
        model: hub id.
        revision: branch, tag or commit.
        allow_pickled_weights: download pickled weights too.

    Raises:
        ModelError: ``model`` is a folder, or there is no such revision.
    """
    from huggingface_hub import snapshot_download

    if Path(_check_folder(model)).is_dir():
        raise ModelError(f"model.revision chooses a revision of a hub id, and {model} is a folder: unset it")
    patterns = [*MODEL_FILES, "*.bin"] if allow_pickled_weights else [*MODEL_FILES]
    with _errors(f"cannot load revision {revision!r} of {model!r}", model):
        return str(snapshot_download(model, revision=revision, allow_patterns=patterns))


def file_of_hub(model: str, name: str, revision: str | None = None) -> str:
    """The path of one file of a hub model, which is downloaded if it is not there.

    Raises:
        ModelError: there is no such model, revision or file.
    """
    from huggingface_hub import hf_hub_download

    with _errors(f"cannot load {name} of {model!r}", model):
        return str(hf_hub_download(_check_folder(model), name, revision=revision))


@contextlib.contextmanager
def _errors(what: str, path: str) -> Iterator[None]:
    """Raise the errors of transformers as ``ModelError``."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:  # of a broken file, of any type, and a PanicException from libraries in Rust
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        hub = "" if Path(path).exists() else " (no folder of that name here, so it was taken for a hub id)"
        raise ModelError(f"{what}{hub}: {_first_line(error)}{_flag_for(error)}") from error


def _flag_for(error: BaseException) -> str:
    """What to set for a model that transformers refuses for safety."""
    if "trust_remote_code" in str(error):
        return " To run it, set model.trust_remote_code = true (cohort generate: --trust-remote-code)"
    return " For pickled weights, set model.allow_pickled_weights = true" if "use_safetensors" in str(error) else ""


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# ----------------------------------------
# A model that a run loads when everything that is cheaper has been checked.


@dataclass(frozen=True, slots=True)
class DeferredModel:
    """Stands for a loaded model until ``load_policy``. For models that are loaded in another way than the settings
    say."""

    generation_config: Any
    config: Any
    load: Callable[[], Any]
    """Returns the model of transformers or peft."""

    @classmethod
    def of(cls, path: str, load: Callable[[], Any], *, trust_remote_code: bool = False) -> DeferredModel:
        """A model in a folder or of a hub id, whose configs are read now.

        Raises:
            ModelError: there is no such model.
        """
        return cls(*read_configs(path, trust_remote_code=trust_remote_code), load)
