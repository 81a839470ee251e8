"""Recurrent layers as the lean path reads them: what computes the input of a layer's output projection from the output
of its input projections, in place of attention.

Axis letters: T tokens, A heads, D head dimension, G groups of heads that share keys, K width of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from cohort.policy.fused import Fused
from cohort.policy.parts import Joint, Linear, Norm, need
from cohort.policy.recurrent import DELTA_RULE, STATE_SPACE, Recurring, StateKey, steps_of, unit


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A convolution between two gates (LFM2)."""

    module: Any
    name = "conv"
    output = "out_proj"

    @property
    def parameters(self) -> list[Tensor]:
        """Its weights, but those of projections."""
        return _weights(self.module.conv)

    @property
    def state_numbers(self) -> int:
        """Numbers that a row keeps."""
        return _tail(self.module.conv)

    def inputs(self) -> Joint:
        """The input projection, with both gates and what is convolved side by side."""
        return _joint(self.module, "in_proj")

    def __call__(self, parts_T: Sequence[Tensor], recurring: Recurring, fused: Fused) -> Tensor:  # noqa: ARG002
        """``[T, H]``."""
        return _convolved(self.module, self.module.conv, parts_T[0], recurring, gated=True)


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """The gated delta rule with a gated norm of each head (Qwen 3.5)."""

    module: Any
    name = "linear_attn"
    output = "out_proj"

    @property
    def parameters(self) -> list[Tensor]:
        """Its weights, but those of projections."""
        module = self.module
        return [*_weights(module.conv1d), module.A_log, module.dt_bias, module.norm.weight]

    @property
    def state_numbers(self) -> int:
        """Numbers that a row keeps."""
        module = self.module
        return _tail(module.conv1d) + int(module.num_v_heads * module.head_k_dim * module.head_v_dim)

    def inputs(self) -> Joint:
        """The input projections: queries, keys and values side by side; gate; how much is written; decay."""
        return _joint(self.module, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

    def __call__(self, parts_T: Sequence[Tensor], recurring: Recurring, fused: Fused) -> Tensor:
        """``[T, A D]``."""
        module, wide = self.module, fused.wide
        mixed, gate, written, decay = parts_T
        mixed = _convolved(module, module.conv1d, mixed, recurring, silu=True).to(wide)
        q, k, v = mixed.split([module.key_dim, module.key_dim, module.value_dim], -1)
        q, k = (unit(part.unflatten(-1, (-1, module.head_k_dim))) for part in (q, k))
        decay = -module.A_log.to(wide).exp() * functional.softplus(decay.to(wide) + module.dt_bias.to(wide))
        values = (
            q * module.head_k_dim**-0.5,
            k,
            v.unflatten(-1, (-1, module.head_v_dim)),
            decay,
            written.to(wide).sigmoid(),
        )
        zeros = v.new_zeros(module.num_v_heads, module.head_k_dim, module.head_v_dim)
        out_TAD = recurring.recur(_key(module), DELTA_RULE, values, zeros)
        out_TAD = fused.norm(out_TAD, module.norm.weight.to(wide), module.norm.variance_epsilon)
        return fused.gate(gate, out_TAD.flatten(1), gelu=False)


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Mamba 2 with a gate before its norm (Granite 4)."""

    module: Any
    name = "mamba"
    output = "out_proj"

    @property
    def parameters(self) -> list[Tensor]:
        """Its weights, but those of projections."""
        module = self.module
        return [*_weights(module.conv1d), module.A_log, module.dt_bias, module.D, module.norm.weight]

    @property
    def state_numbers(self) -> int:
        """Numbers that a row keeps."""
        module = self.module
        return _tail(module.conv1d) + int(module.intermediate_size * module.ssm_state_size)

    def inputs(self) -> Joint:
        """The input projection: gate; values, keys and queries side by side; time steps."""
        module = self.module
        return _joint(module, "in_proj", widths=(module.intermediate_size, module.conv_dim, module.num_heads))

    def __call__(self, parts_T: Sequence[Tensor], recurring: Recurring, fused: Fused) -> Tensor:
        """``[T, A D]``."""
        module, wide = self.module, fused.wide
        gate, mixed, steps = parts_T
        mixed = _convolved(module, module.conv1d, mixed, recurring, silu=True).to(wide)
        keys = module.n_groups * module.ssm_state_size
        x, b, c = mixed.split([module.intermediate_size, keys, keys], -1)
        x = x.unflatten(-1, (-1, module.head_dim))
        b, c = (part.unflatten(-1, (module.n_groups, -1)) for part in (b, c))
        steps = steps_of(steps.to(wide), module.dt_bias, True, module.time_step_limit)
        zeros = x.new_zeros(module.num_heads, module.head_dim, module.ssm_state_size)
        values = x, steps, -module.A_log.to(wide).exp(), b, c
        out = recurring.recur(_key(module), STATE_SPACE, values, zeros) + x * module.D.to(wide)[:, None]
        out = fused.gate(gate, out.flatten(1), gelu=False, wide=True)
        factor, eps = module.norm.weight.to(wide), module.norm.variance_epsilon
        if module.n_groups == 1:
            return fused.norm(out, factor, eps)
        by_group = functional.rms_norm(out.unflatten(-1, (module.n_groups, -1)), [module.norm.group_size], eps=eps)
        scaled: Tensor = by_group.flatten(1) * factor
        return scaled.to(fused.narrow)


Mixer = ShortConvolution | GatedDelta | StateSpace
FAMILIES: dict[str, type[Mixer]] = {
    "lfm2": ShortConvolution,
    "qwen3_5_text": GatedDelta,
    "granitemoehybrid": StateSpace,
}
"""The kind of recurrent layers of a family."""


def mixer_of(layer: Any, family: str) -> Mixer | None:
    """The recurrent part of a layer. None: it has attention."""
    kind = FAMILIES.get(family)
    module = None if kind is None else getattr(layer, kind.name, None)
    if kind is None or module is None:
        return None
    convolution = module.conv if kind is ShortConvolution else module.conv1d
    need(type(convolution) is nn.Conv1d, f"a convolution is a {type(convolution).__name__}")
    need(getattr(module, "activation", "silu") == "silu", "the activation of its recurrent layers is not SiLU")
    if kind is not ShortConvolution:
        Norm.of(module.norm, shifted=False)  # raises what it does not know
    return kind(module)


def _joint(module: Any, *names: str, widths: Sequence[int] = ()) -> Joint:
    linears = tuple(Linear.of(module, name) for name in names)
    return Joint(linears, tuple(widths or (linear.module.out_features for linear in linears)))


def _weights(convolution: Any) -> list[Tensor]:
    return [convolution.weight, *([] if convolution.bias is None else [convolution.bias])]


def _tail(convolution: Any) -> int:
    return int(convolution.in_channels * (convolution.kernel_size[0] - 1))


def _key(module: Any) -> StateKey:
    return module.layer_idx, "recurrence"


def _convolved(module: Any, convolution: Any, x_TH: Tensor, recurring: Recurring, **flags: bool) -> Tensor:
    key = (module.layer_idx, "convolution")
    return recurring.convolve(key, x_TH, convolution.weight[:, 0], convolution.bias, **flags)
