"""Parts of a transformers model as the lean path reads them: linear maps, norms and MLPs.

Weights are read from the modules at each access: FSDP replaces a module's parameters while it gathers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cohort.parallel.full import class_before_sharding
from cohort.policy.experts import used
from cohort.policy.narrow import outputs_beside


class UnsupportedModel(Exception):  # noqa: N818 - not an error: another implementation is used
    """An implementation cannot run a model; the message says why."""


def need(holds: bool, reason: str) -> None:
    """Raise ``UnsupportedModel`` for a reason, unless it does not hold."""
    if not holds:
        raise UnsupportedModel(reason)


def need_window_of_type(config: Any, layer: int, window: int | None) -> None:
    """Raise ``UnsupportedModel`` if a layer's window contradicts its type in the config, by which transformers masks. A
    trial, which is shorter than most windows, would not show it."""
    kinds = getattr(config, "layer_types", None) or ()
    kind = kinds[layer] if layer < len(kinds) else None
    wrong = "sliding_attention" if window is None else "full_attention"
    need(kind != wrong, f"layer {layer} is of type {kind!r}, and its window is {window}")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: ``y += scale * (x A^T) B^T``."""

    down: nn.Linear
    up: nn.Linear
    scale: float

    @property
    def a(self) -> Tensor:
        """``[rank, in]``."""
        return self.down.weight

    @property
    def b(self) -> Tensor:
        """``[out, rank]``."""
        return self.up.weight


@dataclass(frozen=True, slots=True)
class Linear:
    """``y = x W^T + bias``, plus adapters."""

    module: nn.Linear
    owner: Any
    name: str
    """Of the attribute of ``owner``: the module itself, or peft's module around it."""
    adapters: tuple[Adapter, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """The output, by the model's own module."""
        out: Tensor = getattr(self.owner, self.name)(x)
        return out

    @property
    def weight(self) -> Tensor:
        """W, ``[out, in]``."""
        return self.module.weight

    @property
    def bias(self) -> Tensor | None:
        """Shape ``[out]``; None without one."""
        return self.module.bias

    @classmethod
    def of(cls, owner: Any, name: str) -> Linear:
        """Read a linear module, or one that peft has wrapped with LoRA, from the module that has it."""
        module = getattr(owner, name)
        if type(module) is nn.Linear:
            return cls(module, owner, name)
        base: Any = getattr(module, "base_layer", None)
        need(type(base) is nn.Linear and hasattr(module, "lora_A"), f"{name} is a {type(module).__name__}")
        need(not getattr(module, "merged", False), f"{name} has its adapter merged")
        adapters = []
        for active in () if module.disable_adapters else module.active_adapters:
            if active not in module.lora_A:
                continue
            a, b = module.lora_A[active], module.lora_B[active]
            special = bool(getattr(module, "use_dora", {}).get(active)) or active in getattr(module, "lora_variant", {})
            plain = type(a) is nn.Linear and type(b) is nn.Linear and getattr(b, "bias", None) is None
            need(plain and not special, f"{name} has an adapter that is not plain LoRA")
            adapters.append(Adapter(a, b, float(module.scaling[active])))
        return cls(base, owner, name, tuple(adapters))


@dataclass(frozen=True, slots=True)
class Joint:
    """Linears over one input, whose outputs, side by side, are parts of given widths: one linear for each part, or one
    for all of them (``qkv_proj``, ``gate_up_proj``)."""

    linears: tuple[Linear, ...]
    widths: tuple[int, ...]

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """The parts, by the model's own modules."""
        return self.apart([linear(x) for linear in self.linears])

    def beside(self, x: Tensor) -> Sequence[Tensor]:
        """The same, as one tensor with all parts if one product computes them."""
        if len(self.linears) < len(self.widths):
            return [self.linears[0](x)]
        out = outputs_beside([getattr(linear.owner, linear.name) for linear in self.linears], x)
        return self(x) if out is None else [out]

    def apart(self, outs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The parts, of themselves or of one tensor that holds them side by side."""
        return outs if len(outs) == len(self.widths) else outs[0].split(self.widths, dim=-1)

    @classmethod
    def of(cls, module: Any, names: Sequence[str], fused: str, widths: Sequence[int]) -> Joint:
        """Read the linears of a module: those named, or the fused one."""
        found = [fused] if hasattr(module, fused) else names
        return cls(tuple(Linear.of(module, name) for name in found), tuple(widths))


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm: ``x / sqrt(mean(x^2) + eps) * weight``, or ``* (1 + weight)`` if shifted; of x without its
    mean if centred."""

    module: Any
    eps: float
    shifted: bool
    centred: bool

    @property
    def weight(self) -> Tensor:
        """One number per entry of the last axis."""
        weight: Tensor = self.module.weight
        return weight

    @classmethod
    def of(cls, module: Any, *, shifted: bool) -> Norm:
        """Read a norm of transformers, which has two names for eps."""
        need(not hasattr(module, "modules_to_save"), "a norm is trained by an adapter")
        eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
        name = class_before_sharding(module).__name__
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        known = eps is not None and isinstance(weight, nn.Parameter) and weight.ndim == 1 and bias is None
        need(known, f"a norm is a {name}")
        return cls(module, float(eps), shifted, not name.endswith("RMSNorm"))  # type: ignore[arg-type]

    def factor(self, dtype: torch.dtype) -> Tensor:
        """What normed values are multiplied by."""
        weight = self.weight.to(dtype)
        return 1 + weight if self.shifted else weight


GATED = (
    ("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
    ("w1", "w3", "", "w2"),
    ("", "", "input_linear", "output_linear"),
)
"""Names of the linear maps of MLPs: gate, up, both in one, down."""


@dataclass(frozen=True, slots=True)
class Gated:
    """An MLP with a gate: ``down(act(gate x) * up x)``."""

    gate_up: Joint
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All of its linear maps."""
        return (*self.gate_up.linears, self.down)

    @staticmethod
    def names(module: Any) -> tuple[str, str, str, str] | None:
        """Those of its linear maps: gate, up, both in one, down. None: it is something else."""
        return next((names for names in GATED if hasattr(module, names[-1])), None)

    @classmethod
    def of(cls, module: Any) -> Gated:
        """Read an MLP."""
        gate, up, both, last = cls.names(module) or GATED[0]
        down = Linear.of(module, last)
        widths = [down.module.in_features] * 2
        return cls(Joint.of(module, [gate, up], both, widths), down)


@dataclass(frozen=True, slots=True)
class Experts:
    """An MLP that the model's own module computes: experts, and the router that chooses among them."""

    owner: Any
    """The layer, which has it as ``mlp``."""
    prepared: Any = None
    """What computes the experts of few tokens; see ``experts.used``. None: their module."""

    @property
    def module(self) -> Any:
        """The experts themselves; None: they are not a module that ``policy.experts`` knows."""
        return next((module for module in self.owner.mlp.modules() if hasattr(module, "is_transposed")), None)

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, H]`` to ``[T, H]``."""
        with used(self.prepared):
            out: Any = self.owner.mlp(x[None])
        found: Tensor = out[0] if isinstance(out, tuple) else out  # some return what the router said, too
        return found[0]
