"""The structure of a Llama-like transformers model, read from its modules: weights and options of each layer.

Llama, Mistral, Qwen2, Qwen3, SmolLM3 and Gemma 1 to 3 are one architecture with options: query-key norms, biases, norms
after each block, norm weights stored as w - 1, soft caps, sliding windows, layers without rotation, a tied head, LoRA
adapters. ``Anatomy.of`` reads them or raises what it does not know. Weights are read from the modules at each access:
FSDP replaces a module's parameters while it gathers them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cohort.parallel.full import class_before_sharding

SHIFTED_NORMS = frozenset({"gemma", "gemma2", "gemma3_text"})
"""Families whose norms multiply by 1 + weight."""
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"}) | SHIFTED_NORMS
"""Values of ``config.model_type``."""
STATIC_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Types of rotary embeddings that depend on the position only, not on the length of the sequence."""


class UnsupportedModel(Exception):  # noqa: N818 - not an error: another implementation is used
    """An implementation cannot run a model; the message says why."""


def need(holds: bool, reason: str) -> None:
    """Raise ``UnsupportedModel`` for a reason, unless it does not hold."""
    if not holds:
        raise UnsupportedModel(reason)


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
    adapters: tuple[Adapter, ...] = ()

    @property
    def weight(self) -> Tensor:
        """W, ``[out, in]``."""
        return self.module.weight

    @property
    def bias(self) -> Tensor | None:
        """Shape ``[out]``; None without one."""
        return self.module.bias

    @classmethod
    def of(cls, module: Any, name: str) -> Linear:
        """Read a linear module, or one that peft has wrapped with LoRA."""
        if type(module) is nn.Linear:
            return cls(module)
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
        return cls(base, tuple(adapters))


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm: ``x / sqrt(mean(x^2) + eps) * weight``, or ``* (1 + weight)`` if shifted."""

    module: Any
    eps: float
    shifted: bool

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
        known = eps is not None and isinstance(getattr(module, "weight", None), nn.Parameter)
        need(known, f"a norm is a {type(module).__name__}")
        return cls(module, float(eps), shifted)  # type: ignore[arg-type]

    def factor(self, dtype: torch.dtype) -> Tensor:
        """What normed values are multiplied by."""
        weight = self.weight.to(dtype)
        return 1 + weight if self.shifted else weight


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    module: Any
    """The module of transformers."""
    before_attention: Norm
    qkv: tuple[Linear, Linear, Linear]
    qk_norms: tuple[Norm, Norm] | None
    output: Linear
    after_attention: Norm | None
    """Applied to the attention's output before it is added (Gemma 2 and 3)."""
    before_mlp: Norm
    gate_up: tuple[Linear, Linear]
    down: Linear
    after_mlp: Norm | None
    window: int | None
    """A token sees this many tokens, itself included. None: all tokens."""
    rope: str | None
    """The kind of rotation, one of ``Anatomy.rotations``. None: this layer does not rotate."""


@dataclass(frozen=True, slots=True)
class Anatomy:
    """A model's layers and head. The parameters are the model's own."""

    embedding: nn.Embedding
    """Used as a module: Gemma's scales its output."""
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    scaling: float
    """Multiplies the attention scores."""
    score_cap: float | None
    """Scores become ``cap * tanh(scores / cap)`` (Gemma 2)."""
    logit_cap: float | None
    """The same for the logits."""
    gelu: bool
    """Whether the MLP's activation is the tanh form of GELU. Otherwise it is SiLU."""
    rotary: Any

    @classmethod
    def of(cls, model: Any) -> Anatomy:
        """Read a model.

        Raises:
            UnsupportedModel: it is of another family, or has a part that is not known here.
        """
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        config = model.config
        family = config.model_type
        need(family in FAMILIES, f"{family!r} is not among {', '.join(sorted(FAMILIES))}")
        shifted, body = family in SHIFTED_NORMS, model.model
        embedding = body.embed_tokens
        need(isinstance(embedding, nn.Embedding), f"its embedding is a {type(embedding).__name__}")
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        need(activation in {"silu", "gelu_pytorch_tanh"}, f"the activation is {activation!r}")
        need(not getattr(config, "use_bidirectional_attention", False), "attention is bidirectional")
        attention = body.layers[0].self_attn
        return cls(
            embedding=embedding,
            layers=tuple(_layer(layer, config, shifted) for layer in body.layers),
            norm=Norm.of(body.norm, shifted=shifted),
            head=Linear.of(model.lm_head, "lm_head"),
            num_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            scaling=float(attention.scaling),
            score_cap=config.attn_logit_softcapping if family == "gemma2" else None,
            logit_cap=getattr(config, "final_logit_softcapping", None),
            gelu=activation != "silu",
            rotary=_static_rotary(body.rotary_emb),
        )

    def parameters(self) -> list[Tensor]:
        """All weights that a forward pass reads."""
        found: list[Tensor] = [self.embedding.weight, self.norm.weight]
        for layer in self.layers:
            norms = (layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp)
            found += [norm.weight for norm in (*norms, *(layer.qk_norms or ())) if norm is not None]
        for linear in self.linears():
            found += [linear.weight, *([] if linear.bias is None else [linear.bias])]
            found += [weight for adapter in linear.adapters for weight in (adapter.a, adapter.b)]
        return found

    def identity(self) -> list[object]:
        """What changes if a forward pass reads other parameters, or adapters with other scales."""
        scales = [adapter.scale for linear in self.linears() for adapter in linear.adapters]
        return [*map(id, self.parameters()), *scales]

    def linears(self) -> list[Linear]:
        """All linear maps, the head last."""
        per_layer = [[*layer.qkv, layer.output, *layer.gate_up, layer.down] for layer in self.layers]
        return [linear for linears in per_layer for linear in linears] + [self.head]

    def rope_tables(self, length: int, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
        """Cosines and sines of positions 0 to ``length - 1``, ``[length, D]`` each, by kind of rotation."""
        like = torch.empty(0, dtype=dtype, device=self.norm.weight.device)
        positions = torch.arange(length, device=like.device)
        return {kind: self.angles(kind, positions, like) for kind in self.rotations}

    @property
    def rotations(self) -> set[str]:
        """The kinds of rotation of the layers."""
        return {layer.rope for layer in self.layers if layer.rope is not None}

    def angles(self, kind: str, positions_T: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions, ``[T, D]`` each, in the dtype of ``like``."""
        cos, sin = self.rotary(like, positions_T[None], kind) if kind else self.rotary(like, positions_T[None])
        return cos[0], sin[0]


def _layer(layer: Any, config: Any, shifted: bool) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    for module in (layer, attention, mlp):
        kind = class_before_sharding(module)
        need(kind.__module__.startswith("transformers."), f"{kind.__name__} is not a class of transformers")
    sandwich = hasattr(layer, "pre_feedforward_layernorm")

    def norm(name: str) -> Norm:
        return Norm.of(getattr(layer, name), shifted=shifted)

    qk_norms = None
    if hasattr(attention, "q_norm"):
        qk_norms = (Norm.of(attention.q_norm, shifted=shifted), Norm.of(attention.k_norm, shifted=shifted))
    of_layer = config.model_type != "mistral"  # Mistral has one window for all layers, and its modules do not store it
    rope = getattr(attention, "layer_type", "") if config.model_type == "gemma3_text" else ""
    return Layer(
        module=layer,
        before_attention=norm("input_layernorm"),
        qkv=tuple(Linear.of(getattr(attention, f"{part}_proj"), f"{part}_proj") for part in "qkv"),  # type: ignore[arg-type]
        qk_norms=qk_norms,
        output=Linear.of(attention.o_proj, "o_proj"),
        after_attention=norm("post_attention_layernorm") if sandwich else None,
        before_mlp=norm("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"),
        gate_up=(Linear.of(mlp.gate_proj, "gate_proj"), Linear.of(mlp.up_proj, "up_proj")),
        down=Linear.of(mlp.down_proj, "down_proj"),
        after_mlp=norm("post_feedforward_layernorm") if sandwich else None,
        window=getattr(attention if of_layer else config, "sliding_window", None),
        rope=rope if getattr(attention, "use_rope", True) else None,
    )


def _static_rotary(rotary: Any) -> Any:
    kinds = rotary.rope_type.values() if isinstance(rotary.rope_type, dict) else [rotary.rope_type]
    for kind in kinds:
        need(kind in STATIC_ROPES, f"its rotary embedding is {kind!r}, which changes with the sequence's length")
    return rotary


def soft_cap(values: Tensor, cap: float | None) -> Tensor:
    """``cap * tanh(values / cap)``, in place; unchanged without a cap."""
    return values if cap is None else values.div_(cap).tanh_().mul_(cap)
