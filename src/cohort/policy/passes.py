"""Forward passes of the trainer: prompts once, then the completions after them, packed without padding.

A completion's row holds the prompt's last token and all but the last of its own: T tokens in, T distributions out. What
it needs of the rest of the prompt are the keys and values of each layer, which ``read`` computes once, whatever the
number of completions and of microbatches:

    prefixes = passes.read(prompts)                        forward over each prompt but its last token
    for each microbatch:
        hidden = passes.hidden(prefixes, ...)              forward over the rows, attending to the prefixes
        (a loss of hidden).backward()                      gradients of keys and values add up in leaves
    prefixes.backward()                                    backward over the prompts, once

What runs the layers is ``lean.py`` for Llama-like models; for others transformers' own modules with another attention
function. Models that can take neither run prompt and completion together, padded. Which it is, is found out by trying.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cohort.policy.attention import packed_attention
from cohort.policy.compute import ComputeModel
from cohort.policy.head import Head, in_like_shapes
from cohort.policy.kernels import UpdateKernels, kernels_for
from cohort.policy.layout import Layout
from cohort.policy.rows import PackedRows

SHARED = "prompts computed once per group, completions packed"


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

    def hidden(self, prefixes: Prefixes, rows: PackedRows) -> Hidden:
        """What the model computes where each drawn token of the rows was drawn. Rows refer to the prompts that were
        read."""


class Body(Protocol):
    """What runs a model's layers over packed tokens."""

    def __call__(self, ids_N: Tensor, positions_N: Tensor, packed: PackedPass) -> Hidden:
        """The last hidden states; of no use where only keys and values are asked for. After the tokens that ``packed``
        knows there may be some of no meaning."""


class SharedPasses:
    """See the module.

    Args:
        model: the model.
        head: from hidden states to logits.
        body: what runs its layers.
    """

    shared = True

    def __init__(self, model: ComputeModel, head: Head, body: Body) -> None:
        self.model = model
        self.head = head
        self.body = body
        self.kernels, without = kernels_for(model)
        self.description = SHARED
        if model.device.type == "cpu":
            self.description += ", native kernels" if self.kernels else f", no native kernels: {without}"

    def read(self, prompt_ids: Sequence[Sequence[int]], *, attached: bool = False) -> Prefixes:
        """See ``Passes``."""
        keys_values: dict[int, tuple[Tensor, Tensor]] = {}
        ids = [torch.as_tensor(prompt[:-1]) for prompt in prompt_ids if len(prompt) > 1]
        if ids:
            layout = Layout([len(prompt) for prompt in ids], self.model.device)
            self._run(torch.cat(ids), PackedPass(layout, self.kernels, read=keys_values))
        return Prefixes(prompt_ids, keys_values, attached=attached or not torch.is_grad_enabled())

    def hidden(self, prefixes: Prefixes, rows: PackedRows) -> Hidden:
        """See ``Passes``."""
        prompts = prefixes.prompt_ids
        layout = Layout(
            rows.lengths_B.tolist(), self.model.device, rows.prompt_B.tolist(), [len(prompt) - 1 for prompt in prompts]
        )
        packed = PackedPass(layout, self.kernels, prefixes=prefixes.keys_values)
        found = self._run(rows.inputs_T(prompts), packed)
        if (drawn_N := rows.drawn_N) is None:
            return found
        states, *router_logits = (
            each.index_select(0, drawn_N.to(each.device)) for each in (found.states_NH, *found.router_logits)
        )
        return Hidden(states, tuple(router_logits))

    def _run(self, ids_T: Tensor, packed: PackedPass) -> Hidden:
        count, positions_T = len(ids_T), packed.layout.positions_N
        found = self.body(in_like_shapes(ids_T.to(self.model.device)), in_like_shapes(positions_T), packed)
        return Hidden(found.states_NH[:count], tuple(logits[:count] for logits in found.router_logits))


class PackedPass:
    """What the attention of one forward pass needs to know.

    Args:
        layout: which token belongs to what.
        kernels: what attends, where there are such.
        read: takes up the keys and values of each layer, where they are wanted.
        prefixes: those that the tokens attend to besides their own.
    """

    def __init__(
        self,
        layout: Layout,
        kernels: UpdateKernels | None,
        read: dict[int, tuple[Tensor, Tensor]] | None = None,
        prefixes: dict[int, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.layout = layout
        self._kernels = kernels
        self._read = read
        self._prefixes = prefixes or {}

    @property
    def reads(self) -> bool:
        """Whether keys and values are all that is wanted."""
        return self._read is not None

    def take(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep a layer's keys and values."""
        assert self._read is not None
        tokens = self.layout.tokens
        self._read.setdefault(layer, (k[:, :tokens], v[:, :tokens]))  # once: checkpointing runs a layer again

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, cap: float | None
    ) -> Tensor:
        """One layer's attention; ``[heads, N, D]`` each."""
        if self.reads:
            self.take(layer, k, v)
        prefix = self._prefixes.get(layer)
        return packed_attention(
            q, k, v, self.layout, scaling=scaling, prefix=prefix, window=window, cap=cap, kernels=self._kernels
        )


@contextlib.contextmanager
def same_when_recomputed(model: Any, entered: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
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
        model: the model.
        head: from hidden states to logits; one without a linear layer takes the model's own logits.
    """

    shared = False

    def __init__(self, model: ComputeModel, head: Head) -> None:
        self.model = model
        self.head = head
        self.description = "prompts computed with every completion, padded"
        if head.linear is None:
            self.description += ", all logits at once"

    def read(self, prompt_ids: Sequence[Sequence[int]], *, attached: bool = False) -> Prefixes:
        """See ``Passes``. Nothing is computed yet."""
        return Prefixes(prompt_ids, {}, attached=attached)

    def hidden(self, prefixes: Prefixes, rows: PackedRows) -> Hidden:
        """See ``Passes``."""
        prompts = [torch.as_tensor(prefixes.prompt_ids[p]) for p in rows.prompt_B.tolist()]
        texts = map(torch.cat, zip(prompts, rows.ids_T.split(rows.lengths_B.tolist()), strict=True))
        # Padded on the right without an attention mask: under causal attention no real token sees what follows it.
        input_ids = nn.utils.rnn.pad_sequence(list(texts), batch_first=True).to(self.model.device)
        before_B = torch.tensor([len(prompt) for prompt in prompts])
        before_B -= before_B.min()
        # Position t predicts token t+1, so the first position needed is the last token of the shortest prompt.
        keep = input_ids.shape[1] - min(map(len, prompts)) + 1
        row_T, position_T = rows.rows_and_positions
        index_T = row_T * keep + before_B[row_T] + position_T
        index_N = index_T if rows.drawn_N is None else index_T[rows.drawn_N]
        compute = self.model.compute
        with compute(), same_when_recomputed(self.model.model, compute):
            if self.head.linear is None:
                hidden = self.model.logits(input_ids, keep=keep, use_cache=False).logits
            else:
                decoder = base_of(self.model.model).get_decoder()
                hidden = decoder(input_ids=input_ids, use_cache=False).last_hidden_state[:, -keep:]
        return Hidden(hidden.flatten(0, 1).index_select(0, index_N.to(self.model.device)))


def base_of(model: Any) -> Any:
    """The model inside an adapter's wrapper, where all that the wrapper does is done inside it."""
    if not hasattr(model, "get_base_model"):
        return model
    if getattr(model.active_peft_config, "is_prompt_learning", False):
        return model
    return model.get_base_model()
