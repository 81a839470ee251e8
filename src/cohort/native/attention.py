"""Attention of packed sequences by the kernel of attention.c."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cohort.native.build import load
from cohort.native.calls import call, require


class Work(NamedTuple):
    """How threads share the sequences of a pass; see attention.c."""

    sequences: Tensor
    """``[S, 4]``: first token, tokens, first token of its prefix, tokens of its prefix."""
    items: Tensor
    """``[items, 3]``: first sequence, the sequence after the last, slot."""
    tokens: int
    prefix_tokens: int
    slots: int
    longest: int
    """Tokens of the longest sequence with its prefix."""
    drawn_before: Tensor | None = None
    """``[T + 1]``: tokens before each that need an output. None: all of them need one."""


def attend(settings: tuple[Work, float, int | None], tensors: Sequence[Any], block: int, **others: Tensor) -> None:
    """Forward, or backward if there is a ``grad_out``.

    Args:
        settings: how threads share the work; scaling and window of ``policy.attention.packed_attention``.
        tensors: queries, keys and values, ``[T, heads, D]``; those of the prefixes, ``[X, heads, D]``, or None.
        block: keys that are copied at a time.
        others: what is written, and what a backward pass reads.
    """
    (work, scaling, window), (q, k, v, prefix_k, prefix_v) = settings, tensors
    (tokens, heads, width), kv_heads, threads = q.shape, k.shape[1], torch.get_num_threads()
    require(q.dtype == k.dtype == v.dtype, "queries, keys and values of one dtype")
    require(k.shape == v.shape == (tokens, kv_heads, width), "keys and values of one width and number of tokens")
    require(heads % kv_heads == 0 and tokens >= work.tokens, "the heads and tokens of the layout")
    prefix = [part for part in (prefix_k, prefix_v) if part is not None]
    require(bool(prefix) or not work.prefix_tokens, "the keys and values of the prefixes")
    shape = (work.prefix_tokens, kv_heads, width)
    require(all(part.shape == shape and part.dtype == prefix[0].dtype for part in prefix), "prefixes alike")
    library = load()
    library.cohort_attention_scratch.argtypes, library.cohort_attention_scratch.restype = [c_int64] * 3, c_int64
    padded = -(-width // library.cohort_lanes()) * library.cohort_lanes()
    capacity = min(work.longest, block)
    wide = capacity < work.longest
    require(others["out"].dtype == (torch.float32 if wide else q.dtype), "float32 where outputs of blocks add up")
    size = library.cohort_attention_scratch(capacity, padded, "grad_out" in others)
    call(
        "packed_attention", q=q, k=k, v=v, prefix_k=prefix_k, prefix_v=prefix_v, sequences=work.sequences,
        items=work.items, drawn_before=work.drawn_before,
        scratch=q.new_empty(threads, size, dtype=torch.float32), item_count=len(work.items), kv_heads=kv_heads,
        group=heads // kv_heads, width=width, padded=padded, capacity=capacity,
        prefix_tokens=len(prefix[0]) if prefix else 0, window=window or 0, scratch_size=size, threads=threads,
        scaling=scaling, **others,
    )  # fmt: skip
