"""A group of completions as the page embeds it: one deflated block of text, numbers and token arrays.

    uint32       length of the header, little-endian as everything here
    header       JSON: prompt, completions, token texts, and ``arrays`` as [name, kind, count] in order
    arrays       kind u1: bytes; i4, f4: the numbers' lowest bytes, then their second bytes, ... (it deflates better)

Floats keep 16 significant bits: five digits are shown at most.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEPT_BITS = np.uint32(0xFFFFFF00)
MAX_TEXT = 200_000
"""Characters of a text that is embedded."""
MAX_KEY = 200
"""Characters of a name, such as that of a metric. Metrics with longer names are left out."""
NO_CAUSE = 255


def pack(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> str:
    """Base64 of a deflated block.

    Args:
        header: plain values.
        arrays: flat; bool and uint8 become u1, integers i4, floats f4.
    """
    parts, listed = [], []
    for name, array in arrays.items():
        kind = "u1" if array.dtype.itemsize == 1 else "i4" if array.dtype.kind in "iu" else "f4"
        listed.append([name, kind, len(array)])
        parts.append(array.astype(np.uint8).tobytes() if kind == "u1" else _planes(array, kind))
    text = plain_json({**header, "arrays": listed}).encode()
    block = len(text).to_bytes(4, "little") + text + b"".join(parts)
    return base64.b64encode(zlib.compress(block, 6)).decode()


def _planes(array: NDArray[Any], kind: str) -> bytes:
    words = array.astype(f"<{kind}").view(np.uint32)
    if kind == "f4":
        words = words & KEPT_BITS
    return words.view(np.uint8).reshape(-1, 4).T.tobytes()


def plain_json(value: Any) -> str:
    """JSON without lone surrogates, which UTF-8 cannot hold, and without NaN, which JSON cannot."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()


def clipped(text: str, limit: int = MAX_TEXT) -> str:
    """A text of at most ``limit`` characters, whose middle is left out if it is longer."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half:,} characters left out of this page]\n{text[-half:]}"


def short(text: str, limit: int = MAX_KEY) -> str:
    """The beginning of a text of one line, and its length if it is longer than ``limit``."""
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text):,} characters)"
