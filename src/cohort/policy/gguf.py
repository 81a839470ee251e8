"""Models in GGUF files: read once by transformers, widened to float32, and kept as ordinary folders.

Transformers leaves out without a word what it does not know: a rule for splitting text, factors of positions, whole
tensors. The header tells, so such files are refused before a weight is read.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
import tempfile
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cohort.errors import ModelError
from cohort.lock import alone_in
from cohort.native.build import cache_folder
from cohort.policy.files import check_complete

SUFFIX = ".gguf"
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Rules for splitting text (``tokenizer.ggml.pre``) that are GPT-2's after each digit is split off."""
GPT2 = ("gpt-2", "phi-2", "olmo", "mpt")
"""Rules that are GPT-2's, which transformers takes for all that it does not know."""
SAME = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Keys of an architecture that transformers may leave out, with the names in its configuration."""
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of the tokens that end a completion, of which transformers reads the first."""
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of values in a header, for ``struct``. 8 is a string, 9 an array."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says before its weights."""

    values: dict[str, Any]
    """Its keys. An array is its length."""
    tensors: dict[str, tuple[tuple[int, ...], int]]
    """Name to shape and type."""
    ends: dict[str, int]
    """Name to the byte of the file at which the tensor begins."""

    @property
    def architecture(self) -> str:
        """The name of the architecture in llama.cpp."""
        return str(self.values.get("general.architecture", ""))

    def own(self, key: str) -> Any:
        """The value of a key of the architecture; None if the file lacks it."""
        return self.values.get(f"{self.architecture}.{key}")


def folder_of(file: Path) -> Path:
    """The folder of a file's model and tokenizer, which is made at the first use and then kept in the cache.

    It belongs to the file's path, size and time, and to the version of transformers. The weights are float32, since the
    values of most blocks have no exact form in 16 bits.

    Raises:
        ModelError: there is no such file, packages are missing, or something in it cannot be read.
    """
    if not file.is_file():
        raise ModelError(f"no file {file}: model.path takes a GGUF file that is here, a model folder or a hub id")
    status, version = file.stat(), metadata.version("transformers")
    identity = f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {version}"
    folder = cache_folder() / "models" / f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    header = read_header(file)
    check_packages(file)
    check_header(file, header)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone_in(folder.parent), tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            if not folder.is_dir():  # another process may have made it meanwhile
                convert(file, header, made := Path(temporary) / "model")
                made.rename(folder)
    except OSError as error:
        raise ModelError(
            f"{file} cannot be kept as a folder in {folder.parent}: {error}; set COHORT_CACHE to another place"
        ) from error
    return folder


def check_packages(file: Path) -> None:
    """Check that what reads such files is installed.

    Raises:
        ModelError: a package is missing, or transformers is too old.
    """
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise ModelError(f"{file} needs {' and '.join(missing)} to be read: pip install 'cohort-rl[gguf]'")
    if find_spec("transformers.integrations.gguf") is None:
        raise ModelError(
            f"{file} needs a newer transformers than {metadata.version('transformers')}, which splits text of such "
            "files by other rules: pip install -U transformers"
        )


def read_header(file: Path) -> Header:
    """The header of a file. Reads no weights.

    Raises:
        ModelError: it is no GGUF file of version 2 or 3, or is cut off.
    """
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ModelError(f"{file} is no GGUF file: expected a model folder, a hub id or a GGUF file")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            reader = _Reader(mapped)
            try:
                version, tensors, keys = reader.take("IQQ")
                if version not in {2, 3}:
                    raise ModelError(f"{file} is of GGUF version {version}: expected 2 or 3, little-endian")
                values = {reader.text(): reader.value(reader.take("I")[0]) for _ in range(keys)}
                listed = [reader.tensor() for _ in range(tensors)]
            except (struct.error, UnicodeDecodeError, OverflowError, KeyError):
                raise ModelError(f"{file} is cut off or damaged: its header cannot be read") from None
            step = values.get("general.alignment", 32)
    start = -(-reader.position // step) * step
    shapes = {name: (shape, kind) for name, shape, kind, _ in listed}
    return Header(values, shapes, {name: start + offset for name, _, _, offset in listed})


class _Reader:
    """Reads the values of a header one after the other."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self.mapped, self.position = mapped, 4

    def take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self.mapped, self.position)
        self.position += struct.calcsize(f"<{form}")
        return found

    def text(self) -> str:
        (length,) = self.take("Q")
        return bytes(self.take(f"{length}s")[0]).decode()

    def value(self, kind: int) -> Any:
        """A value; of an array its length."""
        if kind == 8:
            return self.text()
        if kind != 9:
            return self.take(_NUMBERS[kind])[0]
        of, count = self.take("IQ")
        if of in _NUMBERS:
            self.take(f"{count}{_NUMBERS[of]}")
        else:
            for _ in range(count):
                self.value(of)
        return count

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset."""
        name, (axes,) = self.text(), self.take("I")
        shape = self.take(f"{axes}Q")
        return name, shape, *self.take("IQ")


def check_header(file: Path, header: Header) -> None:
    """Check that a file is one whole model with its tokenizer, in types and by rules that can be read.

    Raises:
        ModelError: it is not.
    """
    values = header.values
    if (kind := values.get("general.type", "model")) != "model":
        raise ModelError(f"{file} holds no model but {kind!r} (general.type)")
    if (parts := values.get("split.count", 1)) > 1:
        raise ModelError(
            f"{file} is part {values.get('split.no', 0) + 1} of {parts}: join them with llama-gguf-split --merge"
        )
    _check_tensors(file, header)
    splits = values.get("tokenizer.ggml.pre")
    if not values.get("tokenizer.ggml.tokens"):
        raise ModelError(f"{file} holds no tokenizer (tokenizer.ggml.tokens): take a file with one, or a model folder")
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    known = {*GGUF_PRE_TOKENIZER_SPLITS, *DIGITS, *GPT2}
    if values.get("tokenizer.ggml.model") == "gpt2" and splits not in known:
        raise ModelError(
            f"{file} splits text by the rule {splits!r} (tokenizer.ggml.pre), which transformers does not know: it "
            "would make other tokens than the model was trained on. Take the model's folder"
        )
    scaling = header.own("rope.scaling.type") or ("factor" if header.own("rope.scaling.factor") else "none")
    if scaling != "none" and header.architecture != "gpt-oss":
        raise ModelError(
            f"{file} scales positions ({header.architecture}.rope.scaling.*: {scaling}), which transformers leaves "
            "out of such files: take the model's folder"
        )


def _check_tensors(file: Path, header: Header) -> None:
    import gguf

    for name, (shape, kind) in header.tensors.items():
        try:
            of = gguf.GGMLQuantizationType(kind)
            values, size = gguf.GGML_QUANT_SIZES[of]
            gguf.dequantize(np.zeros((1, size), np.uint8), of)
        except (ValueError, KeyError, NotImplementedError):
            names = {one.value: one.name for one in gguf.GGMLQuantizationType}
            raise ModelError(
                f"{file} holds {name} as {names.get(kind, kind)}, which cannot be widened here: take a file of another "
                "quantization, such as Q4_K_M, Q8_0 or F16"
            ) from None
        end, there = header.ends[name] + math.prod(shape) // values * size, file.stat().st_size
        if end > there:
            raise ModelError(
                f"{file} is cut off: it has {there:,} bytes, and {name} ends at {end:,}. Load it again, or join the "
                "parts that it is one of"
            )


def convert(file: Path, header: Header, folder: Path) -> None:
    """Write the model and the tokenizer of a file as a folder.

    Raises:
        ModelError: a part of the model would be left out, or a tensor is missing.
        Exception: what transformers raises for an architecture or tokenizer that it does not know.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source: Any = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    config = AutoConfig.from_pretrained(**source)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _check_config(file, header, config)
    _check_whole(file, header, model)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if header.values.get("tokenizer.ggml.pre") in DIGITS:
        from tokenizers import pre_tokenizers

        digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    read, report = AutoModelForCausalLM.from_pretrained(
        **source,
        config=config,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,  # check_complete refuses them, and names one
        output_loading_info=True,
        quantization_config=GgufConfig(dequantize=True),  # otherwise a package of kernels would keep the blocks
    )
    check_complete(str(file), report)
    model.load_state_dict(read.state_dict(), assign=True)  # `read` itself counts as quantized, and cannot be saved
    model.tie_weights()
    ends = {header.values.get(f"tokenizer.ggml.{name}") for name in ENDS} - {None}
    if len(ends) > 1:
        model.generation_config.eos_token_id = sorted(ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _check_config(file: Path, header: Header, config: Any) -> None:
    """Check what transformers made of the keys that it may leave out."""
    for key, name in SAME.items():
        given, found = header.own(key), getattr(config, name, None)
        if given is not None and found != given and (given or found):
            raise ModelError(
                f"{file} sets {header.architecture}.{key} to {given}, and transformers reads such files with {name} "
                f"{found}: take the model's folder"
            )


def _check_whole(file: Path, header: Header, model: Any) -> None:
    """Check that the model has a place for all weights of the file."""
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

    if header.architecture in GGUF_CONFIG_ARCHS:  # read in another way, which leaves out blocks on purpose
        return
    twice = {"output.weight"} if model.config.tie_word_embeddings else set()
    sizes = {name: math.prod(shape) for name, (shape, _) in header.tensors.items() if name not in twice}
    there, wanted = sum(sizes.values()), sum(one.numel() for one in model.parameters())
    if there > wanted:
        odd = [name for name in sizes if not name.startswith(("blk.", "token_embd.", "output"))]
        raise ModelError(
            f"{file} holds {there:,} weights, and transformers' {type(model).__name__} has {wanted:,}: "
            f"{', '.join(odd) or 'some'} would be left out. Take the model's folder"
        )
