"""Checks of a model's or an adapter's folder: what is in it, and that loading it ran no code and left nothing out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cohort.errors import ModelError

ADAPTER_FILE = "adapter_config.json"
"""The file that marks a folder as an adapter's."""
PICKLED = ("*.bin", "*.pt", "*.pth")
"""Files of pickled weights."""
IN_CACHE = ("config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json")
"""A hub id with one of these in the cache may need no network."""
MAX_LISTED = 3
"""Maximum number of tensors that an error names."""


def is_adapter(path: str) -> bool:
    """Whether a path is an adapter's folder."""
    return (Path(path).expanduser() / ADAPTER_FILE).exists()


def check_folder(path: str, *, allow_pickled_weights: bool) -> None:
    """Check that a folder has a model's configuration and its weights as safetensors. A hub id passes.

    Args:
        path: a folder or hub id.
        allow_pickled_weights: accept pickled weights instead.

    Raises:
        ModelError: a file is missing, or there are pickled weights only.
    """
    folder = Path(path)
    if not folder.is_dir():
        return
    check_config(folder)
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(file.name for pattern in PICKLED for file in folder.glob(pattern))
        if not pickled:
            raise ModelError(f"model folder {path} holds no weights: expected model.safetensors")
        if not allow_pickled_weights:
            raise ModelError(pickled_only(path, pickled[0]))


def check_hub(path: str) -> None:
    """Ask for one file of a hub id that is not in the cache: without a network, transformers asks for one file after
    the other, with all attempts for each.

    Raises:
        OSError: the hub cannot be reached.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    with contextlib.suppress(HFValidationError):
        if Path(path).is_dir() or any(isinstance(try_to_load_from_cache(path, name), str) for name in IN_CACHE):
            return
    try:
        hf_hub_download(path, "config.json")
    except LocalEntryNotFoundError as error:
        raise OSError("the hub cannot be reached, and its cache here has no copy of the model") from error
    except Exception:  # no such model or file, or no right to it, which transformers says better
        return


def check_config(folder: Path) -> None:
    """Check that a model's folder has a configuration that can be read. Without one, transformers may guess the
    architecture from the folder's name.

    Raises:
        ModelError: there is none, or it is not a JSON object.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"model folder {folder} holds no config.json, which says what the model is{file_in(folder)}")
    read_json_object(folder / "config.json")


def file_in(folder: Path) -> str:
    """What to do with a GGUF file in a folder that lacks the files of a model; empty without one."""
    found = next(iter(sorted(folder.glob("*.gguf"))), None)
    return f"; to use {found.name} in it, give the path of that file" if found else ""


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ModelError: the file cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def pickled_only(path: str, file: str) -> str:
    """The refusal of pickled weights."""
    return (
        f"{path} holds its weights as a pickle ({file}), which can contain a program, and not as safetensors. If you "
        "trust where it comes from, set model.allow_pickled_weights = true (cohort generate: --allow-pickled-weights; "
        "a reward model: NAME(allow_pickled_weights=True))"
    )


def check_attention(path: str, config: Any, remedy: str = "set model.trust_remote_code = true") -> None:
    """Check that a model's configuration, or that of one of its parts, does not name attention code on the hub, which
    loading it would run.

    Args:
        path: folder or hub id, for the message.
        config: the configuration.
        remedy: what to do to run it, for the message.

    Raises:
        ModelError: it does.
    """
    name = getattr(config, "_attn_implementation", None)
    if isinstance(name, str) and "/" in name:
        raise ModelError(f"the configuration of {path} names attention code on the hub, {name}: to run it, {remedy}")
    for part in getattr(config, "sub_configs", {}):
        if (one := getattr(config, part, None)) is not None:
            check_attention(path, one, remedy)


def check_complete(path: str, report: Mapping[str, Any]) -> None:
    """Check that every tensor of a model was in its files, in its shape. Transformers initialises others at random.

    Args:
        path: folder or hub id, for messages.
        report: what ``from_pretrained`` returns with ``output_loading_info``.

    Raises:
        ModelError: a tensor is missing or has another shape.
    """
    if wrong := sorted(report["mismatched_keys"]):
        name, saved, expected = wrong[0]
        raise ModelError(
            f"{path}: {name} has the shape {list(saved)} in the file, and config.json asks for {list(expected)}"
            f"{_more(len(wrong) - 1)}"
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{path} lacks {_listed(missing)}, which its config.json asks for: they would be random. Is the folder "
            "complete, and is it a causal language model?"
        )


def check_adapter(folder: Path, *, allow_pickled_weights: bool) -> dict[str, Any]:
    """Check an adapter's folder before it is loaded.

    Returns:
        The adapter's configuration.

    Raises:
        ModelError: it is not a low-rank adapter, names other code to run, or has no weights but pickled ones.
    """
    config = read_json_object(folder / ADAPTER_FILE)
    if (kind := config.get("peft_type")) != "LORA":
        raise ModelError(f"{folder}: expected a low-rank adapter (peft_type LORA), got {kind!r:.40}")
    if config.get("megatron_config"):
        raise ModelError(f"{folder}: {ADAPTER_FILE} sets megatron_config, which names a module to import: remove it")
    if not (folder / "adapter_model.safetensors").is_file():
        if not (folder / "adapter_model.bin").is_file():
            raise ModelError(f"adapter folder {folder} holds no weights: expected adapter_model.safetensors")
        if not allow_pickled_weights:
            raise ModelError(pickled_only(str(folder), "adapter_model.bin"))
    return config


def check_adapter_complete(folder: Path, expected: Iterable[str]) -> None:
    """Check that an adapter's file has all of its tensors.

    Args:
        folder: the adapter's folder. Pickled weights are not checked.
        expected: the names of the tensors of the loaded adapter.

    Raises:
        ModelError: a tensor is missing.
    """
    from safetensors import safe_open

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        return
    with safe_open(file, "pt") as opened:
        found = set(opened.keys())
    if missing := sorted(set(expected) - found):
        raise ModelError(f"{folder} lacks {_listed(missing)}, which its {ADAPTER_FILE} asks for")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:MAX_LISTED]) + _more(len(names) - MAX_LISTED)


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
