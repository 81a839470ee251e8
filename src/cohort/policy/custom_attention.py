"""Any transformers model whose attention function can be replaced, run for the trainer: its own modules with packed
attention."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from cohort.parallel.full import call_gathered
from cohort.policy.compute import ComputeModel
from cohort.policy.parts import UnsupportedModel, need, need_window_of_type
from cohort.policy.passes import Hidden, Mixing, base_of, recomputed_in
from cohort.policy.recurrent_layers import ARGUMENT, find_mixers, in_passes, register

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
        with self._context(), recomputed_in(self._context, decoder):
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
    def _context(self) -> Iterator[None]:
        """The model's compute dtype and packed attention. Transformers makes no masks for an attention function without
        a mask function."""
        config = self._base.get_decoder().config
        before = config._attn_implementation
        with self.model.compute(), in_passes(self._mixers):
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
