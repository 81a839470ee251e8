"""Loading: a Hugging Face causal language model and its tokenizer, and what they compute in."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cohort.errors import ModelError

ADAPTER_FILE = "adapter_config.json"
"""The file that marks a folder as an adapter's."""


@dataclass(frozen=True, slots=True)
class Precision:
    """What is stored and what is computed in."""

    master: torch.dtype
    """Dtype of the trained weights and of the optimizer's state."""
    compute: torch.dtype
    """Dtype of the model's matrix products; log-probs and everything after them are float32 (float64 for float64)."""

    def __str__(self) -> str:
        name = str(self.compute).removeprefix("torch.")
        return name if self.compute == self.master else f"{name} over {str(self.master).removeprefix('torch.')} weights"


def peft_library() -> Any:
    """The peft package.

    Raises:
        ModelError: peft is not installed.
    """
    try:
        import peft
    except ImportError:
        raise ModelError("adapters need peft, which is not installed: pip install 'cohort-rl[lora]'") from None
    return peft


def resolve_device(name: str) -> torch.device:
    """A device by name: "auto" is CUDA where there is one, else the CPU; anything else is torch's own name.

    Raises:
        ModelError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"model.device {name!r} cannot be used here: {str(error).splitlines()[0]}") from None
    if device.type == "mps":
        raise ModelError("model.device 'mps' is not supported: it has no float64, which sampling needs; set 'cpu'")
    return device


def resolve_precision(name: str, device: torch.device, hidden_size: int = 0) -> Precision:
    """A precision by name: "auto" is bfloat16 where the hardware is faster with it, float32 elsewhere.

    The rule reads the hardware and the model, never a clock, so that a run is the same twice. CPUs with AVX512-BF16 but
    without AMX gain in sampling and in the update from a hidden size of 256 on; below, sampling loses
    (``benchmarks/precision.py``).
    """
    if name == "auto":
        if device.type == "cuda":
            faster = torch.cuda.is_bf16_supported(including_emulation=False)
        elif device.type == "cpu":
            wide = torch.cpu._is_avx512_bf16_supported() and hidden_size >= 256
            faster = torch.cpu._is_amx_tile_supported() or wide
        else:
            faster = False
        name = "bfloat16" if faster else "float32"
    compute: torch.dtype = getattr(torch, name)
    return Precision(torch.float64 if compute == torch.float64 else torch.float32, compute)


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or hub id.

    Raises:
        ModelError: no folder, or no tokenizer in it.
    """
    from transformers import AutoTokenizer

    path = _check_folder(path)
    if Path(path).is_dir() and not any((Path(path) / name).exists() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"model folder {path} holds no tokenizer: expected {' or '.join(_TOKENIZER_FILES[:2])}; "
            f"save it there with tokenizer.save_pretrained({path!r})"
        )
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"cannot load a tokenizer from {path!r}{_not_here(path)}: {_first_line(error)}") from error


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


def load_model(
    path: str,
    precision: Precision,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    quantization: str = "none",
) -> nn.Module:
    """The causal language model of a folder or hub id, in the master dtype. Of a folder that holds an adapter, the
    model that it belongs to with the adapter merged into it.

    Args:
        path: where it is.
        precision, device: what it is kept in, and where.
        trust_remote_code: run code that comes with it.
        quantization: "8bit" or "4bit" (NF4): the linear layers' weights are kept in so many bits.

    Raises:
        ModelError: no folder, or not a causal language model.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    path = _check_folder(path)
    # Reading a folder takes moments; a download shows its progress.
    bars = without_progress_bars() if Path(path).is_dir() else contextlib.nullcontext()
    try:
        with bars:
            model = AutoModelForCausalLM.from_pretrained(
                _base_of(path),
                dtype=precision.master,
                trust_remote_code=trust_remote_code,
                **_quantized(quantization, precision, device),
            )
            if (Path(path) / ADAPTER_FILE).exists():
                model = peft_library().PeftModel.from_pretrained(model, path).merge_and_unload()
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise ModelError(
            f"cannot load a causal language model from {path!r}{_not_here(path)}: {_first_line(error)}"
        ) from error
    loaded: nn.Module = model if quantization != "none" else model.to(device)
    return loaded


def _quantized(bits: str, precision: Precision, device: torch.device) -> dict[str, Any]:
    if bits == "none":
        return {}
    if device.type != "cuda":
        raise ModelError(
            f"model.quantization {bits!r} needs CUDA, and model.device is {device}: bitsandbytes has no backward pass "
            "for quantized weights elsewhere. Set model.quantization to 'none'"
        )
    from importlib.util import find_spec

    from transformers import BitsAndBytesConfig

    if find_spec("bitsandbytes") is None:
        raise ModelError(
            "model.quantization needs bitsandbytes, which is not installed: pip install 'cohort-rl[quantized]'"
        )
    settings: dict[str, Any] = {"load_in_8bit": True}
    if bits == "4bit":
        settings = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": precision.compute,
        }
    return {"quantization_config": BitsAndBytesConfig(**settings), "device_map": {"": device}}


def _base_of(path: str) -> str:
    """Where the model lies that an adapter's folder belongs to; the path itself, where it is no adapter's.

    Raises:
        ModelError: the adapter does not say.
    """
    file = Path(path) / ADAPTER_FILE
    if not file.exists():
        return path
    base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise ModelError(f"{file} does not say which model it belongs to: set base_model_name_or_path in it")
    return _check_folder(base)


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers' progress bars off the terminal, where a run shows its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def end_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """All tokens that end a completion: the generation config's, the model config's and the tokenizer's, together."""
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return tuple(sorted(found))


def read_config(model: Any, *, trust_remote_code: bool = False) -> Any:
    """The config of a model's text part: of a loaded model, or of a folder or hub id, of which nothing else is read.

    Raises:
        ModelError: there is no config to read.
    """
    from transformers import AutoConfig

    if not isinstance(model, str):
        return model.config.get_text_config()
    path = _base_of(_check_folder(model))
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot read a model's config in {model!r}{_not_here(path)}: {_first_line(error)}") from error


def context_length(config: Any) -> int | None:
    """The most tokens a model takes, prompt and completion together; None when its config does not say."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if isinstance(length := getattr(config, name, None), int) and length > 0:
            return length
    return None


def _check_folder(path: str) -> str:
    """The path with its ``~`` spelled out; a hub id as it is."""
    if not path:
        raise ModelError("no model given: set model.path to a model folder or a hub id")
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not Path(path).expanduser().is_dir():
        raise ModelError(f"no model folder {path}")
    return str(Path(path).expanduser()) if looks_local else path


def _not_here(path: str) -> str:
    return "" if Path(path).is_dir() else " (no folder of that name here, so taken for a hub id)"


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
