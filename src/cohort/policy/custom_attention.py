"""Any transformers model whose attention can be exchanged, run for the trainer: its own modules, our attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from cohort.policy.anatomy import UnsupportedModel
from cohort.policy.compute import ComputeModel
from cohort.policy.passes import Hidden, PackedPass, base_of, same_when_recomputed

INTERFACE = "cohort_packed"
"""Our attention's name among transformers'."""
LENGTH_ROPES = frozenset({"dynamic", "longrope"})
"""Rotations that look at the longest sequence of a pass: beyond a length that no trial reaches, a prompt read by itself
has other keys than with a completion after it."""


class CustomAttention:
    """See the module.

    Args:
        model: the model.

    Raises:
        UnsupportedModel: the model is known to be another kind.
    """

    def __init__(self, model: ComputeModel) -> None:
        self.model = model
        self._model = base_of(model.model)
        if not getattr(self._model, "_supports_attention_backend", False):
            raise UnsupportedModel("its attention cannot be replaced")
        if changing := LENGTH_ROPES & _rotations(self._model):
            raise UnsupportedModel(
                f"its rotary embedding is {min(changing)!r}, which changes with the sequence's length"
            )
        _register()

    def __call__(self, ids_N: Tensor, positions_N: Tensor, packed: PackedPass) -> Hidden:
        """See ``Body``."""
        decoder = self._model.get_decoder()
        asked = {"output_router_logits": True} if self.model.router_aux_loss_coef else {}
        with self._entered(), same_when_recomputed(decoder, self._entered):
            output = decoder(
                input_ids=ids_N[None],
                position_ids=positions_N[None],
                use_cache=False,
                **{INTERFACE: packed},
                **asked,
            )
        return Hidden(output.last_hidden_state[0], tuple(getattr(output, "router_logits", None) or ()))

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with self.model.compute(), _custom_attention(self._model.get_decoder()):
            yield


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' interface of attention functions."""
    packed: PackedPass | None = others.get(INTERFACE)
    if packed is None:
        raise UnsupportedModel("it does not hand arguments on to its attention")
    if dropout:
        raise UnsupportedModel("attention has dropout")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModel("attention is not causal")
    if any(others.get(name) is not None for name in ("s_aux", "position_bias", "head_mask")):
        raise UnsupportedModel("attention has sinks or biases")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = others["sliding_window"] if "sliding_window" in others else _window_of(module)
    out_HND = packed.attend(module.layer_idx, query[0], key[0], value[0], scaling, window, softcap)
    return out_HND.transpose(0, 1)[None].contiguous(), None


def _window_of(module: Any) -> int | None:
    """The window of a layer that is not told it: none, or it is not known which layers have one."""
    config = module.config
    if getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None):
        raise UnsupportedModel("which of its layers see only part of the tokens is not known")
    return None


def _rotations(model: nn.Module) -> set[str]:
    """The types of a model's rotary embeddings, as transformers names them; some have one for each type of layer."""
    types = [getattr(module, "rope_type", ()) for module in model.modules()]
    return {name for each in types for name in ([each] if isinstance(each, str) else dict(each).values())}


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(INTERFACE, _attention)


@contextlib.contextmanager
def _custom_attention(decoder: Any) -> Iterator[None]:
    """Our attention instead of the model's own, within the block. Without a mask function of its name, transformers
    makes no masks."""
    before = decoder.config._attn_implementation
    decoder.config._attn_implementation = INTERFACE
    try:
        yield
    finally:
        decoder.config._attn_implementation = before
