"""The structure of a Llama-like transformers model, read from its modules: weights and options of each layer.

Most dense models are one architecture with options: which norms a layer has and where; norms of queries and keys, by
head or whole, before or after the rotation; rotation of halves or of neighbours, of all dimensions or the first ones,
in all layers or some; multipliers, biases, soft caps, windows; matrices that are joined; an MLP beside the attention
instead of after it; a tied head, LoRA adapters. ``Anatomy.of`` reads them or raises what it does not know.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cohort.parallel.full import class_before_sharding
from cohort.policy.fused import Fused
from cohort.policy.narrow import changed_call
from cohort.policy.parts import Experts, Gated, Joint, Linear, Norm, UnsupportedModel, need, need_window_of_type
from cohort.policy.recurrent import DELTA_RULE, STATE_SPACE, Recurring, StateKey, steps_of, unit

# ----------------------------------------
# Recurrent layers as the lean path reads them: what computes the input of a layer's output projection from the output
# of its input projections, in place of attention.
#
# Axis letters: T tokens, A heads, D head dimension, G groups of heads that share keys, K width of keys.


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
MIXERS: dict[str, type[Mixer]] = {
    "lfm2": ShortConvolution,
    "qwen3_5_text": GatedDelta,
    "granitemoehybrid": StateSpace,
}
"""The kind of recurrent layers of a family."""


def mixer_of(layer: Any, family: str) -> Mixer | None:
    """The recurrent part of a layer. None: it has attention."""
    kind = MIXERS.get(family)
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


SHIFTED_NORMS = frozenset({"gemma", "gemma2", "gemma3_text", "qwen3_5_text", "vaultgemma"})
"""Families whose norms multiply by 1 + weight."""
WINDOWS_OF_CONFIG = frozenset({"mistral", "mixtral", "phi3", "qwen3_moe"})
"""Families with one window for all layers, which their modules do not store."""
ROTATED_WITHIN_WINDOWS = frozenset({"cohere2", "exaone4", "exaone_moe"})
"""Families that rotate only in layers with a window; Exaone in all layers if none has one."""
NORMED_AFTER_ROTATION = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe"})
"""Families that normalise queries and keys after the rotation."""
RETURNED_ANGLES = {"cohere": "each twice", "cohere2": "each twice", "gpt_oss": "once"}
"""How a family's rotary embedding returns the R/2 angles of a position, if not all of them, twice."""
FAMILIES = (
    frozenset({"cohere", "cwm", "dots1", "ernie4_5", "ernie4_5_moe", "flex_olmo", "glm", "glm4", "glm4_moe", "gpt_oss"})
    | frozenset({"granite", "helium", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "llama"})
    | frozenset({"mellum", "minimax_m2", "ministral", "olmo2", "olmo3", "olmoe", "qwen2", "qwen2_moe", "qwen3"})
    | frozenset({"seed_oss", "smollm3", "solar_open"})
    | frozenset(MIXERS) | SHIFTED_NORMS | WINDOWS_OF_CONFIG | ROTATED_WITHIN_WINDOWS | NORMED_AFTER_ROTATION
)  # fmt: skip
"""Values of ``config.model_type`` whose code has been read: what a trial of a few tokens does not show, such as factors
that change beyond a length, is known of them."""
LOGIT_FACTORS = ("lm_head_multiplier", "logit_scale", "output_multiplier")
LOGIT_DIVISORS = ("logits_mup_width_multiplier", "logits_scaling")
"""Settings that logits are multiplied by (Falcon-H1, Cohere, Muse) and divided by (Inkling, Granite; HyperCLOVA X
multiplies)."""
STATIC_ROPES = frozenset({"default", "linear", "llama3", "yarn", "ntk_alpha"})
"""Types of rotary embeddings that depend on the position only, not on the length of the sequence."""
MLPS = ("mlp", "feed_forward", "shared_mlp")
"""Names of a layer's MLP."""
Names = tuple[str | None, str | None, str | None, str | None]
ARRANGEMENTS: tuple[Names, ...] = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", None, "pre_feedforward_layernorm", None),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    ("operator_norm", None, "ffn_norm", None),
    ("input_layernorm", None, None, None),
)
"""The names of a layer's norms: before and after the attention, before and after the MLP. In the last, attention and
MLP read the same numbers."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    module: Any
    """The module of transformers."""
    before_attention: Norm | None
    mixer: Mixer | None
    """What is there in place of attention. None: attention."""
    qkv: Joint
    """Queries, keys and values, or what the mixer reads."""
    gated: bool
    """Whether each query has a gate beside it, of whose sigmoid the attention's output is multiplied (Qwen 3.5)."""
    qk_norms: tuple[Norm, Norm] | None
    """Over a head, or over all heads at once."""
    normed_after_rotation: bool
    output: Linear
    after_attention: Norm | None
    """Applied to the attention's output before it is added (Gemma 2 and 3)."""
    before_mlp: Norm | None
    mlp: Gated | Experts
    parallel: bool
    """Whether the MLP reads what the attention reads, and both are added at once."""
    after_mlp: Norm | None
    window: int | None
    """A token sees this many tokens, itself included. None: all tokens."""
    rope: str | None
    """The kind of rotation, one of ``Anatomy.rotations``. None: this layer does not rotate."""

    @property
    def norms(self) -> tuple[Norm, ...]:
        """All norms."""
        norms = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp, *(self.qk_norms or ()))
        return tuple(norm for norm in norms if norm is not None)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All linear maps."""
        return (*self.qkv.linears, self.output, *(self.mlp.linears if isinstance(self.mlp, Gated) else ()))

    @property
    def sinks(self) -> Tensor | None:
        """A score of each query head that takes part in the softmax and has no value, ``[A]`` (gpt-oss)."""
        sinks: Tensor | None = getattr(getattr(self.module, "self_attn", None), "sinks", None)
        return sinks

    def norms_whole(self, head_dim: int) -> bool:
        """Whether the norms of queries and keys are over all heads at once."""
        return self.qk_norms is not None and self.qk_norms[0].weight.shape[0] != head_dim


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
    embedding_multiplier: float
    residual_multiplier: float
    """Multiplies what is added to the residual stream (Granite)."""
    logit_multiplier: float
    gelu: bool
    """Whether the MLP's activation is the tanh form of GELU. Otherwise it is SiLU."""
    rotary: Any
    neighbours: bool
    """Whether dimensions 2i and 2i + 1 are rotated together. Otherwise i and i + R/2 of the R that are rotated."""
    returned_angles: str
    """One of the values of ``RETURNED_ANGLES``, or "all twice"."""

    @classmethod
    def of(cls, model: Any) -> Anatomy:
        """Read a model.

        Raises:
            UnsupportedModel: it is of another family, or has a part that is not known here.
        """
        hooked = changed_call(model.modules())
        need(not hooked, f"a {hooked} has a hook, or a forward function that was replaced")
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        config, body = model.config.get_text_config(), model.get_decoder()  # of a model that reads images, too
        family = config.model_type
        need(family in FAMILIES, f"the code of {family!r} has not been read")
        shifted = family in SHIFTED_NORMS
        embedding = body.embed_tokens
        need(isinstance(embedding, nn.Embedding), f"its embedding is a {type(embedding).__name__}")
        activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu")
        need(activation in {"silu", "gelu_pytorch_tanh"}, f"the activation is {activation!r}")
        need(not getattr(config, "use_bidirectional_attention", False), "attention is bidirectional")
        need(getattr(config, "clip_qkv", None) is None, "queries, keys and values are clipped")
        attentions = [found for layer in body.layers if (found := getattr(layer, "self_attn", None)) is not None]
        need(bool(attentions), "it has no attention")
        attention, rotary = attentions[0], _static_rotary(body.rotary_emb)
        return cls(
            embedding=embedding,
            layers=tuple(_layer(layer, number, config, rotary) for number, layer in enumerate(body.layers)),
            norm=Norm.of(body.embedding_norm if family == "lfm2" else body.norm, shifted=shifted),
            head=Linear.of(model, "lm_head"),
            num_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            scaling=float(attention.scaling),
            score_cap=config.attn_logit_softcapping if family in {"gemma2", "vaultgemma"} else None,
            logit_cap=getattr(config, "final_logit_softcapping", None),
            embedding_multiplier=float(getattr(config, "embedding_multiplier", 1.0)),
            residual_multiplier=float(getattr(config, "residual_multiplier", 1.0)),
            logit_multiplier=logit_multiplier(config),
            gelu=activation != "silu",
            rotary=rotary,
            neighbours=_rotates_neighbours(attention),
            returned_angles=RETURNED_ANGLES.get(family, "all twice"),
        )

    def parameters(self) -> list[Tensor]:
        """All weights that a forward pass reads."""
        found: list[Tensor] = [self.embedding.weight, self.norm.weight]
        found += [norm.weight for layer in self.layers for norm in layer.norms]
        found += [layer.sinks for layer in self.layers if layer.sinks is not None]
        found += [weight for mixer in self.mixers for weight in mixer.parameters]
        for linear in self.linears():
            found += [linear.weight, *([] if linear.bias is None else [linear.bias])]
            found += [weight for adapter in linear.adapters for weight in (adapter.a, adapter.b)]
        for layer in self.layers:
            if isinstance(layer.mlp, Experts):
                found += layer.mlp.owner.mlp.parameters()
        return found

    def identity(self) -> list[object]:
        """What changes if a forward pass reads other parameters, or adapters with other scales."""
        scales = [adapter.scale for linear in self.linears() for adapter in linear.adapters]
        return [*map(id, self.parameters()), *scales]

    def linears(self) -> list[Linear]:
        """All linear maps, the head last."""
        return [linear for layer in self.layers for linear in layer.linears] + [self.head]

    @property
    def rotations(self) -> set[str]:
        """The kinds of rotation of the layers."""
        return {layer.rope for layer in self.layers if layer.rope is not None}

    def angles(self, kind: str, positions_T: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions, ``[T, R]`` each, in the dtype of ``like``: the R/2 angles, twice."""
        cos, sin = self.rotary(like, positions_T[None], kind) if kind else self.rotary(like, positions_T[None])
        if self.returned_angles != "all twice":
            step = 1 if self.returned_angles == "once" else 2
            cos, sin = (part[..., ::step].repeat(1, 1, 2) for part in (cos, sin))
        return cos[0], sin[0]

    @property
    def attention_layers(self) -> list[int]:
        """The numbers of the layers that have attention."""
        return [number for number, layer in enumerate(self.layers) if layer.mixer is None]

    @property
    def mixers(self) -> list[Mixer]:
        """Those of the layers that have no attention."""
        return [layer.mixer for layer in self.layers if layer.mixer is not None]

    @property
    def has_experts(self) -> bool:
        """Whether some layers have experts, which the model's own modules compute."""
        return any(isinstance(layer.mlp, Experts) for layer in self.layers)


def logit_multiplier(config: Any) -> float:
    """What multiplies logits, by the settings of a model's family. A trial finds out if another has one of its own."""
    divisors = LOGIT_DIVISORS[:1] if config.model_type == "hyperclovax" else LOGIT_DIVISORS
    multiplier = 1.0
    for name in LOGIT_FACTORS + LOGIT_DIVISORS:
        factor = getattr(config, name, None)
        if factor and config.model_type != "mpt":  # nothing in transformers reads its factor, which may be a word
            multiplier = multiplier / float(factor) if name in divisors else multiplier * float(factor)
    return multiplier


def soft_cap(values: Tensor, cap: float | None) -> Tensor:
    """``cap * tanh(values / cap)``, in place; unchanged without a cap."""
    return values if cap is None else values.div_(cap).tanh_().mul_(cap)


def _layer(layer: Any, number: int, config: Any, rotary: Any) -> Layer:
    mlp, family = getattr(layer, str(_found(layer, *MLPS))), config.model_type
    mixer = mixer_of(layer, family)
    for module in (layer, layer.self_attn if mixer is None else mixer.module, mlp):
        kind = class_before_sharding(module)
        need(kind.__module__.startswith("transformers."), f"{kind.__name__} is not a class of transformers")

    def norm(name: str | None) -> Norm | None:
        return None if name is None else Norm.of(getattr(layer, name), shifted=family in SHIFTED_NORMS)

    before_attention, after_attention, before_mlp, after_mlp = map(norm, _arrangement(layer))
    if mixer is None:
        parts = _attention(layer.self_attn, number, config, rotary)
    else:
        output = Linear.of(mixer.module, mixer.output)
        parts = dict.fromkeys(("qk_norms", "window", "rope"), None)
        parts |= {"qkv": mixer.inputs(), "output": output, "gated": False}
    return Layer(
        module=layer,
        mixer=mixer,
        before_attention=before_attention,
        normed_after_rotation=family in NORMED_AFTER_ROTATION,
        after_attention=after_attention,
        before_mlp=before_mlp,
        mlp=Gated.of(mlp) if Gated.names(mlp) else Experts(layer),
        parallel=before_attention is not None and before_mlp is None,
        after_mlp=after_mlp,
        **parts,
    )


def _attention(attention: Any, number: int, config: Any, rotary: Any) -> dict[str, Any]:
    """What a layer has of attention."""
    family, shifted = config.model_type, config.model_type in SHIFTED_NORMS
    of_q, of_k = (
        None if (name := _found(attention, *names)) is None else Norm.of(getattr(attention, name), shifted=shifted)
        for names in (("q_norm", "query_layernorm", "q_layernorm"), ("k_norm", "key_layernorm", "k_layernorm"))
    )
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    gated = hasattr(attention, "q_proj") and _width(attention.q_proj) == 2 * heads * attention.head_dim
    widths = [count * attention.head_dim for count in (heads * (2 if gated else 1), kv_heads, kv_heads)]
    window = _window(attention, config)
    need_window_of_type(config, number, window)
    rope: str | None = None
    only_windows = family in ROTATED_WITHIN_WINDOWS and (family == "cohere2" or config.sliding_window is not None)
    if rotary is not None and getattr(attention, "use_rope", True) and not (only_windows and window is None):
        rope = config.layer_types[number] if isinstance(rotary.rope_type, dict) else ""
    return {
        "qkv": Joint.of(attention, ["q_proj", "k_proj", "v_proj"], "qkv_proj", widths),
        "gated": gated,
        "qk_norms": None if of_q is None or of_k is None else (of_q, of_k),
        "output": Linear.of(attention, "o_proj" if hasattr(attention, "o_proj") else "out_proj"),
        "window": window,
        "rope": rope,
    }


def _width(linear: Any) -> int:
    """Numbers that a linear map returns, with adapters or without."""
    return int(getattr(linear, "base_layer", linear).out_features)


def _found(module: Any, *names: str) -> str | None:
    """The first of the names that the module has."""
    return next((name for name in names if hasattr(module, name)), None)


def _arrangement(layer: Any) -> Names:
    """Which norms a layer has, by their names."""
    plain = (nn.Dropout, nn.Identity)
    names = {name for name, module in layer.named_children() if not isinstance(module, plain)}
    names -= {"self_attn", *MLPS, *(kind.name for kind in MIXERS.values())}
    for arrangement in ARRANGEMENTS:
        if names == set(arrangement) - {None}:
            return arrangement
    raise UnsupportedModel(f"its layers have {', '.join(sorted(names))}")


def _window(attention: Any, config: Any) -> int | None:
    if not getattr(attention, "is_sliding", True):  # Exaone 4 stores the window in all layers
        return None
    return getattr(config if config.model_type in WINDOWS_OF_CONFIG else attention, "sliding_window", None)


def _rotates_neighbours(attention: Any) -> bool:
    """See ``Anatomy.neighbours``; by what the function of the model's file does."""
    rotate_half = getattr(sys.modules[class_before_sharding(attention).__module__], "rotate_half", None)
    return rotate_half is not None and rotate_half(torch.arange(4)).tolist() == [-1, 0, -3, 2]


def _static_rotary(rotary: Any) -> Any:
    if rotary is None:  # Granite 4 without positions
        return None
    kinds = rotary.rope_type.values() if isinstance(rotary.rope_type, dict) else [rotary.rope_type]
    for kind in kinds:
        need(kind in STATIC_ROPES, f"its rotary embedding is {kind!r}, which changes with the sequence's length")
    return rotary
