"""One token of each row in recurrent layers by native kernels: see recurrent.c. They write over the states."""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.native.calls import call, require, threads_for


def delta_step(q_SGK: Tensor, k_SGK: Tensor, v_SAD: Tensor, decay_SA: Tensor, beta_SA: Tensor, state: Tensor) -> Tensor:
    """See ``policy.recurrent.delta_step``."""
    (rows, groups, keys), (_, heads, width), out = k_SGK.shape, v_SAD.shape, v_SAD.new_empty(v_SAD.shape)
    _require_alike(heads % groups == 0, state, (rows, heads, keys, width), q_SGK, k_SGK, v_SAD, decay_SA, beta_SA)
    require(q_SGK.shape == k_SGK.shape and decay_SA.shape == beta_SA.shape == (rows, heads), "inputs alike")
    call(
        "delta_step", q=q_SGK.contiguous(), k=k_SGK.contiguous(), v=v_SAD.contiguous(), decay=decay_SA.contiguous(),
        beta=beta_SA.contiguous(), state=state, out=out, rows=rows, groups=groups, heads=heads, keys=keys, width=width,
        threads=threads_for(state.numel()),
    )  # fmt: skip
    return out


def space_step(x_SAD: Tensor, step_SA: Tensor, decay_A: Tensor, b_SGK: Tensor, c_SGK: Tensor, state: Tensor) -> Tensor:
    """See ``policy.recurrent.space_step``."""
    (rows, groups, keys), (_, heads, width), out = b_SGK.shape, x_SAD.shape, x_SAD.new_empty(x_SAD.shape)
    _require_alike(heads % groups == 0, state, (rows, heads, width, keys), x_SAD, step_SA, decay_A, b_SGK, c_SGK)
    require(b_SGK.shape == c_SGK.shape and step_SA.shape == (rows, heads) and len(decay_A) == heads, "inputs alike")
    call(
        "space_step", x=x_SAD.contiguous(), step=step_SA.contiguous(), decay=decay_A.contiguous(),
        b=b_SGK.contiguous(), c=c_SGK.contiguous(), state=state, out=out, rows=rows, groups=groups, heads=heads,
        keys=keys, width=width, threads=threads_for(state.numel()),
    )  # fmt: skip
    return out


def _require_alike(shapes: bool, state: Tensor, expected: tuple[int, ...], *others: Tensor) -> None:
    require(shapes and state.shape == expected, "states of the shapes of their inputs")
    require(all(part.dtype == torch.float32 for part in (state, *others)), "float32")
