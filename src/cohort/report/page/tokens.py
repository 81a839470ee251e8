"""The texts of tokens, from ``tokenizer.json``. The file is read as data: no tokenizer is made, no code is run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from cohort.report.history import RunHistory

MAX_TOKENIZER = 1 << 27
"""Bytes of a tokenizer.json that is read."""
Piece: TypeAlias = str | list[int]
"""The text of a token, or its bytes if they are not UTF-8 by themselves."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token texts by id."""

    pieces: Mapping[int, bytes]
    special: frozenset[int]
    """End tokens, markers of turns and the like, which the decoded text leaves out."""

    def of(self, ids: Iterable[int]) -> dict[str, list[Any]]:
        """What the page needs to spell these ids."""
        known = [one for one in sorted(set(ids)) if one in self.pieces]
        return {
            "ids": known,
            "pieces": [_piece(self.pieces[one]) for one in known],
            "special": [one for one in known if one in self.special],
        }


def find_vocabulary(history: RunHistory) -> Vocabulary | None:
    """The tokenizer beside the run's newest model; None if no saved model has a ``tokenizer.json`` that can be read."""
    folders = [*reversed(history.checkpoints.values()), history.path / "best", history.path]
    root = history.path.resolve()
    for path in (folder / "tokenizer.json" for folder in folders):
        try:
            if path.resolve().is_relative_to(root) and path.is_file() and path.stat().st_size <= MAX_TOKENIZER:
                return read_vocabulary(json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
            continue
    return None


def read_vocabulary(tokenizer: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of a parsed ``tokenizer.json``.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: it has another form.
    """
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    entries = model["vocab"]
    texts = {int(number): str(text) for text, number in entries.items()} if isinstance(entries, dict) else {}
    if isinstance(entries, list):  # Unigram: texts with their scores, in the order of the ids
        texts = {number: str(entry[0]) for number, entry in enumerate(entries)}
    decode = _decoder(tokenizer.get("decoder") or {})
    pieces = {number: decode(text) for number, text in texts.items()}
    pieces |= {int(token["id"]): _utf8(str(token["content"])) for token in added}
    return Vocabulary(pieces, frozenset(int(token["id"]) for token in added if token.get("special")))


def _decoder(decoder: Mapping[str, Any]) -> Callable[[str], bytes]:
    """What makes bytes of a token as the vocabulary has it."""
    parts = [decoder, *(decoder.get("decoders") or [])]
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return _from_byte_level
    if "WordPiece" in kinds:
        prefix = next((str(part.get("prefix")) for part in parts if part.get("prefix")), "##")
        return lambda text: _utf8(text.removeprefix(prefix) if text.startswith(prefix) else f" {text}")
    space = "▁" if kinds & {"Metaspace", "Replace", "ByteFallback"} else ""
    suffix = next((str(part.get("suffix")) for part in parts if part.get("type") == "BPEDecoder"), "")

    def decode(text: str) -> bytes:
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        text = text.replace(space, " ") if space else text
        return _utf8(f"{text.removesuffix(suffix)} " if suffix and text.endswith(suffix) else text)

    return decode


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that stand for bytes in byte-level vocabularies (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTES = _byte_alphabet()


def _from_byte_level(text: str) -> bytes:
    return b"".join(bytes([BYTES[letter]]) if letter in BYTES else _utf8(letter) for letter in text)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _piece(text: bytes) -> Piece:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return list(text)
