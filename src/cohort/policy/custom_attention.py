"""Any transformers model whose attention function can be replaced, as the update and the sampler run it: its own
modules, with attention that a ``Mixing`` computes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cohort.parallel.full import call_gathered, class_before_sharding
from cohort.policy.compute import ComputeModel
from cohort.policy.parts import UnsupportedModel, need, need_window_of_type
from cohort.policy.passes import Hidden, Mixing, base_of, recomputed_in
from cohort.policy.recurrent import DELTA_RULE, STATE_SPACE, Recurrence, steps_of, unit
from cohort.policy.routing import replaying

# ----------------------------------------
# The recurrent layers of a transformers model over packed sequences that continue shared prefixes.
#
# Layers of transformers call three functions by name: a short convolution by channel and, for the recurrence itself,
# the gated delta rule or Mamba 2's scan. Where a layer is given a pass, these names stand for functions over packed
# tokens, which begin each sequence with the convolution's tail and the state that its prefix left, and keep them when
# a prefix is read. All else of a layer (projections, adapters, gates, norms) is the model's own.


ARGUMENT = "cohort_packed"
"""The name under which a model hands a pass on to its layers."""


class LayerPass:
    """One recurrent layer in one pass.

    Args:
        mixing: the pass.
        layer: the layer's number.
    """

    def __init__(self, mixing: Mixing, layer: int) -> None:
        self._mixing = mixing
        self._layer = layer
        self._convolutions = 0
        self.recurs = False
        """Whether its recurrence was computed."""

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return self._mixing.tokens

    def convolve(self, x_TH: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
        """See ``Mixing``. A layer may have several convolutions."""
        self._convolutions += 1
        return self._mixing.convolve((self._layer, f"convolution {self._convolutions}"), x_TH, weight, bias, silu=silu)

    def recur(self, recurrence: Recurrence, *values: Tensor, zeros: Tensor) -> Tensor:
        """See ``Mixing``."""
        self.recurs = True
        return self._mixing.recur((self._layer, "recurrence"), recurrence, values, zeros)


def find_mixers(model: nn.Module) -> list[Any]:
    """The recurrent layers: modules with a number, of a file of code that has a short convolution."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx")
        and any(isinstance(child, nn.Conv1d) for child in module.children())
        and hasattr(_code_of(module), "causal_conv1d_fn")
    ]


def _code_of(module: nn.Module) -> Any:
    return sys.modules[class_before_sharding(module).__module__]


def register(mixers: list[Any]) -> None:
    """Let the functions that recurrent layers call mix the tokens of a pass where they are given one. Idempotent."""
    for code in map(_code_of, mixers):
        for name, function in FUNCTIONS.items():
            original = getattr(code, name, None)
            if original is not None and not hasattr(original, ARGUMENT):
                setattr(code, name, _either(function, original))


def _either(packed: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*given: Any, **named: Any) -> Any:
        return (packed if isinstance(named.get(ARGUMENT), LayerPass) else original)(*given, **named)

    setattr(function, ARGUMENT, True)
    return function


@contextlib.contextmanager
def in_passes(mixers: list[Any]) -> Iterator[None]:
    """Hand recurrent layers the pass that their model is given, inside the block."""
    hooks = [mixer.register_forward_pre_hook(_begin, with_kwargs=True) for mixer in mixers]
    hooks += [mixer.register_forward_hook(_end, with_kwargs=True) for mixer in mixers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _begin(mixer: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    need(ARGUMENT in named, "it does not hand arguments on to its recurrent layers")
    if isinstance(named[ARGUMENT], LayerPass):  # in the forward pass of a checkpointed layer, blocks are nested
        return given, named
    return given, named | {ARGUMENT: LayerPass(named[ARGUMENT], mixer.layer_idx)}


def _has_decay(mixer: Any) -> bool:
    """Whether a layer has a recurrence, and not a convolution alone: its decay has this name in every architecture."""
    return any(name.endswith("A_log") for name, _ in mixer.named_parameters())


def _end(mixer: Any, _given: tuple[Any, ...], named: dict[str, Any], _output: Any) -> None:
    need(named[ARGUMENT].recurs or not _has_decay(mixer), "its recurrent layers have a recurrence of their own")


def _wide(*parts: Tensor) -> list[Tensor]:
    """In float32 or wider: recurrences multiply thousands of decays."""
    return [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]


def _convolution(
    x_1HT: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
) -> Tensor:
    """``causal_conv1d_fn`` of transformers."""
    layer: LayerPass = others[ARGUMENT]
    x_TH = x_1HT[0].T
    tokens = layer.tokens
    need(activation in {None, "silu", "swish"}, f"a convolution has the activation {activation!r}")
    out = layer.convolve(x_TH[:tokens], weight, bias, silu=activation is not None)
    return functional.pad(out.to(x_1HT.dtype), (0, 0, 0, len(x_TH) - tokens)).T[None]


def _gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """``torch_chunk_gated_delta_rule`` of transformers."""
    layer: LayerPass = others[ARGUMENT]
    need(others.get("scale") is None, "its delta rule has a scale of its own")
    tokens = layer.tokens
    with torch.autocast(query.device.type, enabled=False):
        q, k, v, decay, written = _wide(*(part[0, :tokens] for part in (query, key, value, g, beta)))
        if use_qk_l2norm_in_kernel:
            q, k = unit(q), unit(k)
        zeros = v.new_zeros(v.shape[1], k.shape[-1], v.shape[-1])
        out = layer.recur(DELTA_RULE, q * q.shape[-1] ** -0.5, k, v, decay, written, zeros=zeros)
    return functional.pad(out, (0, 0, 0, 0, 0, value.shape[1] - tokens)).to(query.dtype)[None], None


def _scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **others: Any,
) -> Tensor:
    """``mamba2_chunk_scan`` of transformers."""
    layer: LayerPass = others[ARGUMENT]
    need(z is None, "its scan has a gate")
    tokens = layer.tokens
    steps = steps_of(dt[0, :tokens], dt_bias, dt_softplus, dt_limit)
    with torch.autocast(dt.device.type, enabled=False):
        x, steps, decay, b, c = _wide(hidden_states[0, :tokens], steps, A, B[0, :tokens], C[0, :tokens])
        zeros = x.new_zeros(*x.shape[1:], b.shape[-1])
        out = layer.recur(STATE_SPACE, x, steps, decay, b, c, zeros=zeros)
        if D is not None:
            out = out + x * D[:, None]
    return functional.pad(out, (0, 0, 0, 0, 0, dt.shape[1] - tokens))[None]


def _fused(*_given: Any, **_others: Any) -> None:
    """``mamba2_split_conv1d_scan_combined`` of transformers: None, so that the layer calls its parts one by one."""


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "mamba2_chunk_scan": _scan,
    "mamba2_split_conv1d_scan_combined": _fused,
}
"""What stands for the functions of transformers."""


INTERFACE = ARGUMENT
"""The name of packed attention among the attention functions of transformers."""
LENGTH_ROPES = frozenset({"dynamic", "longrope"})
"""Rotary embeddings that depend on the longest sequence of a pass. Beyond a length that no trial reaches, a prompt read
by itself has other keys than with a completion after it."""

CHOOSING = ("indexed", "compressed")
"""Words in the types of layers that leave out or summarise tokens, of texts that are longer than a trial's."""
WINDOWS = ("sliding_window", "attention_chunk_size")
"""Settings of a config that hide tokens from some layers."""
BIASES = frozenset({"position_bias", "head_mask"})
"""Arguments of transformers' attention functions that change scores."""
SINKS = "s_aux"
"""The argument that has a score of each head without a value."""
UNUSED = frozenset({"position_ids", "cache_position"})
"""Arguments that reach attention functions and change nothing: queries and keys are rotated already. Any other tensor
changes what is computed, perhaps only beyond the lengths of a trial."""


class CustomAttention:
    """See the module.

    Args:
        model: the model.

    Raises:
        UnsupportedModel: its attention function cannot be replaced.
    """

    returns_keys = False

    def __init__(self, model: ComputeModel) -> None:
        self.model = model
        self._base = base_of(model.model)
        self._mixers = find_mixers(self._base)
        # Hybrid models do not say that they support it, and do.
        supported = getattr(self._base, "_supports_attention_backend", False) or self._mixers
        need(bool(supported), "its attention cannot be replaced")
        kinds = getattr(self._base.config.get_text_config(), "layer_types", None) or ()
        need(not any(word in kind for kind in kinds for word in CHOOSING), "its layers choose the keys of each token")
        for name in sorted(LENGTH_ROPES & _rotary_types(self._base)):
            raise UnsupportedModel(f"its rotary embedding is {name!r}, which changes with the sequence's length")
        from transformers import AttentionInterface

        AttentionInterface.register(INTERFACE, _attention)
        register(self._mixers)

    def __call__(self, ids_T: Tensor, positions_T: Tensor, packed: Mixing) -> Hidden:
        """See ``Body``."""
        decoder = self._base.get_decoder()
        arguments: dict[str, Any] = {"output_router_logits": True} if self.model.router_aux_loss_coef else {}
        context = functools.partial(self._context, packed.routes_T)
        with context(), recomputed_in(context, decoder):
            run = functools.partial(
                decoder,
                input_ids=ids_T[None],
                position_ids=positions_T[None],
                use_cache=False,
                **{INTERFACE: packed},
                **arguments,
            )
            output = call_gathered(self.model.model, run)
        routers = tuple(getattr(output, "router_logits", None) or ())
        return packed.select(Hidden(output.last_hidden_state[0], routers))

    @contextlib.contextmanager
    def _context(self, routes_T: Tensor | None) -> Iterator[None]:
        """The model's compute dtype, packed attention and routes. Transformers makes no masks for an attention function
        without a mask function."""
        config = self._base.get_decoder().config
        before = config._attn_implementation
        with self.model.compute(), in_passes(self._mixers), replaying(routes_T):
            config._attn_implementation = INTERFACE
            try:
                yield
            finally:
                config._attn_implementation = before


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Any = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Packed attention with the signature of transformers' attention functions."""
    packed: Mixing | None = others.get(INTERFACE)
    if packed is None:
        raise UnsupportedModel("it does not hand arguments on to its attention")
    need(not dropout, "attention has dropout")
    need(getattr(module, "is_causal", True), "attention is not causal")
    need(_mask is None, "its layers hide tokens with masks of their own")
    need("attention_mask" not in others, "it calls its attention in a way of its own")
    tensors = {name for name, value in others.items() if isinstance(value, Tensor)} - UNUSED - {SINKS}
    need(not tensors & BIASES, "attention has biases")
    need(query.shape[2] == key.shape[2] == value.shape[2], "its attention reads keys of its own")
    need(not tensors, f"its attention takes {', '.join(sorted(tensors))}, which packed attention does not know")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = others.get("sliding_window")
    known = "sliding_window" in others or not any(getattr(module.config, name, None) for name in WINDOWS)
    need(known, "which of its layers see only part of the tokens is not known")
    need_window_of_type(module.config, module.layer_idx, window)
    out_ATD = packed.attend(
        module.layer_idx, query[0], key[0], value[0], scaling, window, softcap, None, others.get(SINKS)
    )
    return out_ATD.transpose(0, 1)[None].contiguous(), None


def _rotary_types(model: nn.Module) -> set[str]:
    """The types of a model's rotary embeddings, as transformers names them. Some modules have one per layer type."""
    types = [getattr(module, "rope_type", ()) for module in model.modules()]
    return {name for each in types for name in ([each] if isinstance(each, str) else dict(each).values())}
