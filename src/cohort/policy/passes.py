"""Forward passes of the trainer: prompts once, then the completions after them, packed without padding.

A completion's row holds the prompt's last token and all but the last of its own: T tokens in, T distributions out. What
it needs of the rest of the prompt are the keys and values of each layer, which ``read`` computes once, whatever the
number of completions and of microbatches:

    prefixes = passes.read(prompts)                        forward over each prompt but its last token
    for each microbatch:
        hidden = passes.hidden(prefixes, ...)              forward over the rows, attending to the prefixes
        (a loss of hidden).backward()                      gradients of keys and values add up in leaves
    prefixes.backward()                                    backward over the prompts, once

The passes are the model's own: transformers' modules with another attention function. Models whose attention cannot be
exchanged run prompt and completion together, padded. Which it is, is found out by trying.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cohort.policy.attention import Layout, packed_attention
from cohort.policy.head import Head

if TYPE_CHECKING:
    from cohort.policy.policy import Policy

INTERFACE = "cohort_packed"
"""Our attention's name among transformers'."""


LENGTH_ROPES = frozenset({"dynamic", "longrope"})
"""Rotations that look at the longest sequence of a pass: beyond a length that no trial reaches, a prompt read by itself
has other keys than with a completion after it."""


class NotShared(Exception):  # noqa: N818 - not an error: another way is taken
    """A model's attention cannot be exchanged; the message says why."""


class Prefixes:
    """Prompts that have been read, and what completions need of them.

    Args:
        prompt_ids: the prompts.
        keys_values: of each layer, of all prompts but their last tokens end to end, ``[K, M, D]`` each.
        attached: gradients of completions flow into the prompts' graph at once; else they add up until ``backward``.
    """

    def __init__(
        self, prompt_ids: Sequence[Sequence[int]], keys_values: dict[int, tuple[Tensor, Tensor]], *, attached: bool
    ) -> None:
        self.prompt_ids = prompt_ids
        self.numbers = {tuple(prompt): number for number, prompt in enumerate(prompt_ids)}
        """The number of each among them."""
        self._computed = keys_values
        self.keys_values = keys_values
        if not attached:
            self.keys_values = {layer: (_leaf(k), _leaf(v)) for layer, (k, v) in keys_values.items()}

    def backward(self) -> None:
        """Send the gradients that have come together through the prompts. Nothing, if there are none."""
        pairs = [
            (computed, leaf.grad.to(computed.dtype))
            for layer, parts in self._computed.items()
            for computed, leaf in zip(parts, self.keys_values[layer], strict=True)
            if leaf is not computed and leaf.grad is not None
        ]
        if pairs:
            computed, grads = zip(*pairs, strict=True)
            torch.autograd.backward(computed, grads)


def _leaf(computed: Tensor) -> Tensor:
    """Where gradients add up, in float32 or wider."""
    if not computed.requires_grad:
        return computed
    return computed.detach().to(torch.promote_types(computed.dtype, torch.float32)).requires_grad_()


class Hidden(NamedTuple):
    """Of N completion tokens."""

    states_NH: Tensor
    """Last hidden states, or logits; see ``Passes.head``."""
    router_logits: tuple[Tensor, ...] = ()
    """Of each layer with experts, ``[N, E]``, where they are asked for."""


class Passes(Protocol):
    """One way of running a model over prompts and completions."""

    description: str
    shared: bool
    """Whether prompts are read once, and not with every completion."""
    head: Head

    def read(self, prompt_ids: Sequence[Sequence[int]], *, attached: bool = False) -> Prefixes:
        """Read prompts; see ``Prefixes``."""

    def hidden(self, prefixes: Prefixes, prompt_S: Sequence[int], completion_ids: Sequence[Sequence[int]]) -> Hidden:
        """What the model computes where each completion token was drawn.

        Args:
            prefixes: the prompts.
            prompt_S: the number of each completion's prompt among them.
            completion_ids: the completions. None may be empty.
        """


class SharedPasses:
    """See the module.

    Args:
        policy: the model.
        head: from hidden states to logits.

    Raises:
        NotShared: the model is known to be another kind.
    """

    description = "prompts computed once per group, completions packed"
    shared = True

    def __init__(self, policy: Policy, head: Head) -> None:
        self.policy = policy
        self.head = head
        self._model = base_of(policy.model)
        if not getattr(self._model, "_supports_attention_backend", False):
            raise NotShared("its attention cannot be exchanged")
        if changing := LENGTH_ROPES & _rotations(self._model):
            raise NotShared(f"its rotary embedding is {min(changing)!r}, which changes with the sequence's length")
        _register()

    def read(self, prompt_ids: Sequence[Sequence[int]], *, attached: bool = False) -> Prefixes:
        """See ``Passes``."""
        keys_values: dict[int, tuple[Tensor, Tensor]] = {}
        ids = [prompt[:-1] for prompt in prompt_ids if len(prompt) > 1]
        if ids:
            layout = Layout([len(prompt) for prompt in ids], self.policy.device)
            self._run(ids, PackedPass(layout, read=keys_values))
        return Prefixes(prompt_ids, keys_values, attached=attached or not torch.is_grad_enabled())

    def hidden(self, prefixes: Prefixes, prompt_S: Sequence[int], completion_ids: Sequence[Sequence[int]]) -> Hidden:
        """See ``Passes``."""
        prompts = prefixes.prompt_ids
        rows = [(prompts[p][-1], *ids[:-1]) for p, ids in zip(prompt_S, completion_ids, strict=True)]
        layout = Layout(
            [len(row) for row in rows], self.policy.device, prompt_S, [len(prompt) - 1 for prompt in prompts]
        )
        return self._run(rows, PackedPass(layout, prefixes=prefixes.keys_values))

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with self.policy.compute(), _exchanged_attention(self._model.get_decoder()):
            yield

    def _run(self, rows: Sequence[Sequence[int]], packed: PackedPass) -> Hidden:
        ids = torch.tensor([[token for row in rows for token in row]], device=self.policy.device)
        decoder = self._model.get_decoder()
        asked = {"output_router_logits": True} if self.policy.router_aux_loss_coef else {}
        with self._entered(), _same_when_recomputed(decoder, self._entered):
            output = decoder(
                input_ids=ids,
                position_ids=packed.layout.positions_N[None],
                use_cache=False,
                **{INTERFACE: packed},
                **asked,
            )
        return Hidden(output.last_hidden_state[0], tuple(getattr(output, "router_logits", None) or ()))


class PackedPass:
    """What the attention of one forward pass needs to know.

    Args:
        layout: which token belongs to what.
        read: takes up the keys and values of each layer, where they are wanted.
        prefixes: those that the tokens attend to besides their own.
    """

    def __init__(
        self,
        layout: Layout,
        read: dict[int, tuple[Tensor, Tensor]] | None = None,
        prefixes: dict[int, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.layout = layout
        self._read = read
        self._prefixes = prefixes or {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, cap: float | None
    ) -> Tensor:
        """One layer's attention; ``[heads, N, D]`` each."""
        if self._read is not None:
            self._read.setdefault(layer, (k, v))  # once: checkpointing runs a layer again
        prefix = self._prefixes.get(layer)
        return packed_attention(q, k, v, self.layout, scaling=scaling, prefix=prefix, window=window, cap=cap)


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
        raise NotShared("it does not hand arguments on to its attention")
    if dropout:
        raise NotShared("attention has dropout")
    if not getattr(module, "is_causal", True):
        raise NotShared("attention is not causal")
    if any(others.get(name) is not None for name in ("s_aux", "position_bias", "head_mask")):
        raise NotShared("attention has sinks or biases")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = others["sliding_window"] if "sliding_window" in others else _window_of(module)
    out_HND = packed.attend(module.layer_idx, query[0], key[0], value[0], scaling, window, softcap)
    return out_HND.transpose(0, 1)[None].contiguous(), None


def _window_of(module: Any) -> int | None:
    """The window of a layer that is not told it: none, or it is not known which layers have one."""
    config = module.config
    if getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None):
        raise NotShared("which of its layers see only part of the tokens is not known")
    return None


def _rotations(model: nn.Module) -> set[str]:
    """The types of a model's rotary embeddings, as transformers names them; some have one for each type of layer."""
    types = [getattr(module, "rope_type", ()) for module in model.modules()]
    return {name for each in types for name in ([each] if isinstance(each, str) else dict(each).values())}


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(INTERFACE, _attention)


@contextlib.contextmanager
def _exchanged_attention(decoder: Any) -> Iterator[None]:
    """Our attention instead of the model's own, within the block. Without a mask function of its name, transformers
    makes no masks."""
    before = decoder.config._attn_implementation
    decoder.config._attn_implementation = INTERFACE
    try:
        yield
    finally:
        decoder.config._attn_implementation = before


@contextlib.contextmanager
def _same_when_recomputed(model: Any, entered: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Checkpointed layers that run within this block run again, in the backward pass, in the block that ``entered``
    makes. (Inside ``Tensor.backward`` even a block around it would not do: torch function modes are off there.)"""
    before = [(m, m._gradient_checkpointing_func) for m in model.modules() if getattr(m, "gradient_checkpointing", 0)]

    def checkpoint(function: Any, layer: Any, *arguments: Any) -> Any:
        def run(*arguments: Any) -> Any:
            with entered():
                return layer(*arguments)

        if getattr(function, "keywords", {}).get("use_reentrant"):
            # The older kind runs layers without a graph: nothing would flow into the prompts' keys and values.
            function = functools.partial(function, use_reentrant=False)
        return function(run, *arguments)

    for module, function in before:
        module._gradient_checkpointing_func = functools.partial(checkpoint, function)
    try:
        yield
    finally:
        for module, function in before:
            module._gradient_checkpointing_func = function


class PlainPasses:
    """Prompt and completion together, padded on the right, by the model's own forward pass.

    Args:
        policy: the model.
        head: from hidden states to logits; one without a linear layer takes the model's own logits.
    """

    shared = False

    def __init__(self, policy: Policy, head: Head) -> None:
        self.policy = policy
        self.head = head
        self.description = "prompts computed with every completion, padded"
        if head.linear is None:
            self.description += ", all logits at once"

    def read(self, prompt_ids: Sequence[Sequence[int]], *, attached: bool = False) -> Prefixes:
        """See ``Passes``. Nothing is computed yet."""
        return Prefixes(prompt_ids, {}, attached=attached)

    def hidden(self, prefixes: Prefixes, prompt_S: Sequence[int], completion_ids: Sequence[Sequence[int]]) -> Hidden:
        """See ``Passes``."""
        prompt_ids = [prefixes.prompt_ids[p] for p in prompt_S]
        shortest = min(map(len, prompt_ids))
        rows = [torch.tensor([*p, *c]) for p, c in zip(prompt_ids, completion_ids, strict=True)]
        # Padded on the right without an attention mask: under causal attention no real token sees what follows it.
        input_ids = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.policy.device)
        # Position t predicts token t+1, so the first one needed belongs to the shortest prompt's last token.
        keep = input_ids.shape[1] - shortest + 1
        taken = torch.zeros(len(rows), keep, dtype=torch.bool)
        for row, (prompt, completion) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
            start = len(prompt) - shortest
            taken[row, start : start + len(completion)] = True
        compute = self.policy.compute
        with compute(), _same_when_recomputed(self.policy.model, compute):
            if self.head.linear is None:
                hidden = self.policy.logits(input_ids, keep=keep, use_cache=False).logits
            else:
                decoder = base_of(self.policy.model).get_decoder()
                hidden = decoder(input_ids=input_ids, use_cache=False).last_hidden_state[:, -keep:]
        return Hidden(hidden[taken.to(self.policy.device)])


def base_of(model: Any) -> Any:
    """The model inside an adapter's wrapper, where all that the wrapper does is done inside it."""
    if not hasattr(model, "get_base_model"):
        return model
    if getattr(model.active_peft_config, "is_prompt_learning", False):
        return model
    return model.get_base_model()
