"""Forward passes of the trainer: prompts once, then the rows after them, packed without padding.

The inputs of a row are the prompt's last token and all tokens of the row but the last. What the row needs of the rest
of the prompt are the keys and values of each layer, which ``read`` computes once for all rows and microbatches:

    prefixes = passes.read(prompts)                        forward over each prompt without its last token
    for each microbatch:
        hidden = passes.hidden(prefixes, rows)             forward over the rows, attending to the prefixes
        (a loss of hidden).backward()                      gradients of keys and values add up in leaves
    prefixes.backward()                                    backward over the prompts, once

Llama-like models run with ``lean.py``; most others with their own modules and ``custom_attention.py``. Models that
support neither compute prompt and row together, padded. ``choose.py`` finds out which by trying.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from cohort.errors import ModelError
from cohort.native import DTYPES
from cohort.parallel.full import call_gathered, is_gathered
from cohort.policy.attention import packed_attention
from cohort.policy.compute import ComputeModel, modes_restored
from cohort.policy.device import kind_of
from cohort.policy.head import Head, in_like_shapes
from cohort.policy.layout import Layout
from cohort.policy.load import longrope_length
from cohort.policy.recurrent import Recurrence, Recurring, StateKey, convolve
from cohort.policy.routing import replaying
from cohort.policy.rows import PackedRows
from cohort.types import joined_routes

KeysValues = dict[Any, tuple[Tensor, ...]]
"""What layers keep of prompts without their last tokens: by layer, the keys and values, ``[A, X, D]`` each, end to end;
of a recurrent layer, by layer and name, its state after each prompt that has such tokens, ``[P, ...]``."""


PromptRoutes = Sequence[Tensor | None] | None
"""For each prompt how its tokens but the last are routed, ``[P - 1, L, K]``; None: freely. See ``routing``."""


class Prefixes:
    """Prompts that have been read, and what rows need of them.

    Args:
        prompt_ids: the prompts.
        keys_values: theirs.
        attached: whether gradients of rows flow into the prompts' graph at once. Otherwise they add up in leaves until
            ``backward``.
        result: the last hidden states of the prompts, if ``backward`` is to begin there: with weights that are gathered
            per layer, the backward pass of a layer's output gathers them. Its gradient is 0.
        routes: of prompts that are computed with each row.
    """

    def __init__(
        self,
        prompt_ids: Sequence[Sequence[int]],
        keys_values: KeysValues,
        *,
        attached: bool,
        result: Tensor | None = None,
        routes: PromptRoutes = None,
    ) -> None:
        self.prompt_ids, self._result, self.routes = prompt_ids, result, routes
        self._computed, self.attached = keys_values, attached
        self.keys_values = {key: parts if attached else tuple(map(_leaf, parts)) for key, parts in keys_values.items()}

    def backward(self) -> None:
        """Send the gradients that have added up through the prompts. Does nothing if there are none."""
        pairs = [
            (computed, leaf.grad.to(computed.dtype))
            for layer, parts in self._computed.items()
            for computed, leaf in zip(parts, self.keys_values[layer], strict=True)
            if leaf is not computed and leaf.grad is not None
        ]
        if pairs:
            pairs += [] if self._result is None else [(self._result, torch.zeros_like(self._result))]
            computed, grads = zip(*pairs, strict=True)
            torch.autograd.backward(computed, grads)


def _leaf(computed: Tensor) -> Tensor:
    """A leaf in which gradients add up, float32 or wider."""
    if not computed.requires_grad:
        return computed
    return computed.detach().to(torch.promote_types(computed.dtype, torch.float32)).requires_grad_()


class Hidden(NamedTuple):
    """What a pass returns, per token."""

    states: Tensor
    """Last hidden states, or logits; see ``Passes.head``. ``[N, H]``."""
    router_logits: tuple[Tensor, ...] = ()
    """Of each layer with experts, ``[N, E]``, if the load-balancing loss needs them."""

    def select(self, index: slice | Tensor) -> Hidden:
        """The values of some tokens."""
        states, *router_logits = (
            values[index] if isinstance(index, slice) else values.index_select(0, index.to(values.device))
            for values in (self.states, *self.router_logits)
        )
        return Hidden(states, tuple(router_logits))


class Passes(Protocol):
    """One way of running a model over prompts and rows."""

    description: str
    shared: bool
    """Whether prompts are computed once, and not with every row."""
    head: Head

    def read(
        self, prompt_ids: Sequence[Sequence[int]], *, attached: bool = False, routes: PromptRoutes = None
    ) -> Prefixes:
        """Compute what rows need of prompts; see ``Prefixes``."""

    def hidden(self, prefixes: Prefixes, rows: PackedRows) -> Hidden:
        """The last hidden states that predict the drawn tokens of rows."""


class Mixing(Recurring, Protocol):
    """What mixes the tokens of one forward pass: its attention, convolutions and recurrences."""

    tokens: int
    """T. Tokens after them are padding."""
    routes_T: Tensor | None
    """How they are routed in a mixture of experts, ``[T, L, K]``; None: freely."""
    read: KeysValues | None
    """Receives keys, values and states. None: they are not kept."""
    drawn_N: Tensor | None
    """The tokens whose hidden states are needed. None: of a pass that reads, none; of another, all."""
    only_keys_of: int | None
    """The layer of whose results only keys and values are needed. None: of no layer."""

    def select(self, found: Hidden) -> Hidden:
        """The hidden states that are needed, from those of all tokens."""

    def record(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store a layer's keys and values, if they are kept."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        window: int | None,
        cap: float | None,
        drawn_N: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """One layer's attention; ``[A, T, D]`` each, padding included. The rest: see ``packed_attention``."""


class Body(Protocol):
    """Runs a model's layers over packed tokens."""

    returns_keys: bool
    """Whether each layer returns the keys and values that a pass reads, as ``call_gathered`` wants it."""

    def __call__(self, ids_T: Tensor, positions_T: Tensor, packed: Mixing) -> Hidden:
        """The last hidden states of the tokens that ``packed.select`` selects. They have no meaning in a pass that only
        reads keys and values. Tokens after those that ``packed`` knows are padding."""


class SharedPasses:
    """Prompts once, rows packed; see the module.

    Args:
        model: the model.
        head: from hidden states to logits.
        body: runs the layers.
    """

    shared = True

    def __init__(self, model: ComputeModel, head: Head, body: Body) -> None:
        self.model = model
        self.head = head
        self.body = body
        reason = model.why_no_kernels()
        self.native = not reason
        self.description = "prompts computed once per group, completions packed"
        if kind_of(model.device) == "cpu":
            self.description += ", native kernels" if self.native else f", no native kernels: {reason}"

    def read(
        self, prompt_ids: Sequence[Sequence[int]], *, attached: bool = False, routes: PromptRoutes = None
    ) -> Prefixes:
        """See ``Passes``."""
        keys_values: KeysValues = {}
        ids = [torch.as_tensor(prompt[:-1]) for prompt in prompt_ids if len(prompt) > 1]
        result = None
        if ids:
            layout = Layout(list(map(len, ids)), self.model.device)
            packed = PackedPass(layout, self.native, read=keys_values)
            packed.take_routes(routes_of(prompt_ids, routes))
            hidden = self._run(torch.cat(ids), packed)
            # Checkpointed layers hold the pass until their backward pass. It must not hold what they have computed:
            # without a backward pass, both would stay in memory.
            packed.read = dict.fromkeys(keys_values, ())
            if is_gathered(self.model.model) and not self.body.returns_keys:
                result = hidden.states
        return Prefixes(prompt_ids, keys_values, attached=attached or not torch.is_grad_enabled(), result=result)

    def hidden(self, prefixes: Prefixes, rows: PackedRows) -> Hidden:
        """See ``Passes``."""
        before = [len(prompt) - 1 for prompt in prefixes.prompt_ids]
        layout = Layout(rows.lengths_B.tolist(), self.model.device, rows.prompt_B.tolist(), before)
        packed = PackedPass(layout, self.native, prefixes=prefixes.keys_values, drawn_N=rows.drawn_N)
        packed.take_routes(rows.routes_T)
        return self._run(rows.inputs_T(prefixes.prompt_ids), packed)

    def _run(self, ids_T: Tensor, packed: PackedPass) -> Hidden:
        return self.body(self.padded(ids_T), in_like_shapes(packed.layout.positions_T), packed)

    def padded(self, ids_T: Tensor) -> Tensor:
        """Token ids as ``body`` takes them."""
        padded_T = in_like_shapes(ids_T.to(self.model.device))
        padded_T[len(ids_T) :] = ids_T[0] if needs_states(self.model.model) else 0
        return padded_T


class PackedPass:
    """The attention of one forward pass. (Not a dataclass: FSDP2 would copy it on the way into a layer.)

    Args:
        layout: which token belongs to which row and prompt.
        native: whether to use native kernels.
        read: receives the keys and values of each layer, if this pass reads texts. Without ``drawn_N`` nothing else is
            needed of it.
        prefixes: keys and values that the rows attend to besides their own.
        drawn_N: indices of the tokens whose hidden states are needed. None: all.
    """

    only_keys_of: int | None = None
    """The layer of whose results only keys and values are needed. None: of no layer."""
    routes_T: Tensor | None = None

    def __init__(
        self,
        layout: Layout,
        native: bool,
        *,
        read: KeysValues | None = None,
        prefixes: KeysValues | None = None,
        drawn_N: Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.tokens = layout.tokens
        self.native = native
        self.read = read
        self.prefixes = prefixes or {}
        self.drawn_N = drawn_N

    def take_routes(self, routes_T: Tensor | None) -> None:
        """Route the tokens so; see ``Mixing``."""
        self.routes_T = None if routes_T is None else routes_T.to(self.layout.positions_T.device)

    def select(self, found: Hidden) -> Hidden:
        """The hidden states that are needed, from those of all tokens."""
        return found.select(slice(self.layout.tokens) if self.drawn_N is None else self.drawn_N)

    def record(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store a layer's keys and values if this pass reads prompts."""
        if self.read is not None:
            tokens = self.layout.tokens
            self.read.setdefault(layer, (k[:, :tokens], v[:, :tokens]))  # once: checkpointing runs a layer again

    def convolve(
        self, key: StateKey, x_TH: Tensor, weight: Tensor, bias: Tensor | None = None, **flags: bool
    ) -> Tensor:
        """See ``Recurring``."""
        (channels, width), native = weight.shape, self.native and x_TH.dtype in DTYPES
        tails = self.layout.tails(width - 1)
        zeros = x_TH.new_zeros(tails.count, channels, dtype=torch.float32 if native else None)
        before = self._before(key, zeros)
        out, after = convolve(x_TH, before, weight, bias, tails, native=native, **flags)
        self._record_state(key, after)
        return out

    def recur(self, key: StateKey, recurrence: Recurrence, values: Sequence[Tensor], zeros: Tensor) -> Tensor:
        """See ``Recurring``."""
        native = self.native and zeros.dtype == torch.float32
        out, after = recurrence.over(*values, self.layout.chunks, self._before(key, zeros), native=native)
        self._record_state(key, after)
        padding = len(values[0]) - len(out)
        return functional.pad(out, (0, 0) * (out.ndim - 1) + (0, padding)) if padding else out

    def _record_state(self, key: StateKey, states: Tensor) -> None:
        if self.read is not None:
            self.read.setdefault(key, (states,))

    def _before(self, key: StateKey, zeros: Tensor) -> Tensor:
        """A layer's state before each sequence, ``[S, ...]``; zeros where there is no prefix."""
        zeros = zeros[None]
        if key not in self.prefixes:
            return zeros.expand(len(self.layout.lengths), *zeros.shape[1:])
        return torch.cat([zeros, self.prefixes[key][0].to(zeros.dtype)]).index_select(0, self.layout.continued_S)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        window: int | None,
        cap: float | None,
        drawn_N: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """One layer's attention; ``[A, T, D]`` each. ``drawn_N``, ``sinks``: see ``packed_attention``."""
        self.record(layer, k, v)
        prefix = None if layer not in self.prefixes else (self.prefixes[layer][0], self.prefixes[layer][1])
        return packed_attention(
            q, k, v, self.layout, scaling=scaling, prefix=prefix, window=window, cap=cap, sinks=sinks,
            native=self.native, drawn_N=drawn_N,
        )  # fmt: skip


@contextlib.contextmanager
def recomputed_in(context: Callable[[], AbstractContextManager[None]], model: Any) -> Iterator[None]:
    """Let checkpointed layers that run in this block be recomputed, in the backward pass, inside ``context()`` and in
    the mode of the model, not in that of the layer (``ComputeModel.training``). (A block around ``Tensor.backward``
    would not do: torch function modes are off there.)"""
    before = [(m, m._gradient_checkpointing_func) for m in model.modules() if getattr(m, "gradient_checkpointing", 0)]
    mode = model.training

    def checkpoint(module: nn.Module, function: Any, layer: Any, *arguments: Any) -> Any:
        def run(*arguments: Any) -> Any:
            with context(), modes_restored([module]):
                module.training = mode
                return layer(*arguments)

        if getattr(function, "keywords", {}).get("use_reentrant"):
            # Reentrant checkpoints run layers without a graph: no gradient would reach the prompts' keys and values.
            function = functools.partial(function, use_reentrant=False)
        return function(run, *arguments)

    for module, function in before:
        module._gradient_checkpointing_func = functools.partial(checkpoint, module, function)
    try:
        yield
    finally:
        for module, function in before:
            module._gradient_checkpointing_func = function


class PlainPasses:
    """Prompt and row together, padded on the right, by the model's own forward pass.

    Args:
        model: the model.
        head: from hidden states to logits. Without a linear layer, the logits are the model's own.
    """

    shared = False

    def __init__(self, model: ComputeModel, head: Head) -> None:
        self.model = model
        self.head = head
        self.description = "prompts computed with every completion, padded"
        if head.linear is None:
            self.description += ", all logits at once"
        config = getattr(model.model, "config", None)  # a module of the user's own may have none
        self._longest = None if config is None else longrope_length(config.get_text_config())
        if self._longest is not None:
            self.description += f", texts of at most {self._longest:,} tokens because of its longrope"

    def read(
        self, prompt_ids: Sequence[Sequence[int]], *, attached: bool = False, routes: PromptRoutes = None
    ) -> Prefixes:
        """See ``Passes``. Nothing is computed yet."""
        return Prefixes(prompt_ids, {}, attached=attached, routes=routes)

    def hidden(self, prefixes: Prefixes, rows: PackedRows) -> Hidden:
        """See ``Passes``.

        Raises:
            ModelError: a text is longer than ``longrope_length``.
        """
        prompts = [torch.as_tensor(prefixes.prompt_ids[p]) for p in rows.prompt_B.tolist()]
        texts = map(torch.cat, zip(prompts, rows.ids_T.split(rows.lengths_B.tolist()), strict=True))
        # Padded on the right without an attention mask: under causal attention no real token sees what follows it.
        padding = int(prompts[0][0]) if needs_states(self.model.model) else 0
        input_ids = nn.utils.rnn.pad_sequence(list(texts), batch_first=True, padding_value=padding)
        input_ids = input_ids.to(self.model.device)
        if self._longest is not None and input_ids.shape[1] > self._longest:
            raise ModelError(
                f"a prompt and its completion have {input_ids.shape[1]:,} tokens, and beyond {self._longest:,} the "
                "model's longrope has other factors, for all tokens of a pass: use shorter prompts, or lower "
                "rollout.max_completion_length"
            )
        prompt_lengths_B = torch.tensor(list(map(len, prompts)))
        shortest = int(prompt_lengths_B.min())
        # Position t predicts token t + 1, so the first position needed is the last token of the shortest prompt.
        keep = input_ids.shape[1] - shortest + 1
        row_T, position_T = rows.rows_and_positions
        index_T = row_T * keep + prompt_lengths_B[row_T] - shortest + position_T
        routes = self._routes(prefixes, rows, input_ids.shape[1])

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            with self.model.compute(), replaying(routes):
                yield

        with context(), recomputed_in(context, self.model.model):
            if self.head.linear is None:
                hidden = self.model.logits(input_ids, keep=keep, use_cache=False).logits
            else:
                decoder = base_of(self.model.model).get_decoder()
                run = functools.partial(decoder, input_ids=input_ids, use_cache=False)
                hidden = call_gathered(self.model.model, run).last_hidden_state[:, -keep:]
        return Hidden(hidden.flatten(0, 1)).select(index_T if rows.drawn_N is None else index_T[rows.drawn_N])

    def _routes(self, prefixes: Prefixes, rows: PackedRows, width: int) -> Tensor | None:
        """How prompts, rows and padding are routed, flat. None: all freely."""
        of_rows = [None] * len(rows.prompt_B) if rows.routes_T is None else rows.routes_T.split(rows.lengths_B.tolist())
        parts: list[tuple[Tensor | None, int]] = []
        for prompt, length, routes in zip(rows.prompt_B.tolist(), rows.lengths_B.tolist(), of_rows, strict=True):
            before = len(prefixes.prompt_ids[prompt]) - 1
            parts += [(prefixes.routes[prompt] if prefixes.routes else None, before), (routes, length)]
            parts.append((None, width - before - length))
        found = filled_routes(parts)
        return None if found is None else found.to(self.model.device)


def routes_of(prompt_ids: Sequence[Sequence[int]], routes: PromptRoutes) -> Tensor | None:
    """The routes of prompts without their last tokens, end to end."""
    pairs = zip(routes or [None] * len(prompt_ids), prompt_ids, strict=True)
    return filled_routes([(one, len(ids) - 1) for one, ids in pairs])


def filled_routes(parts: Sequence[tuple[Tensor | None, int]]) -> Tensor | None:
    """``types.joined_routes`` of tensors."""
    found = joined_routes([(None if one is None else one.numpy(), count) for one, count in parts])
    return None if found is None else torch.from_numpy(found)


def needs_states(model: Any) -> bool:
    """Whether padding must have an embedding that is not 0: Gemma 3n divides by norms of states without an epsilon, so
    the gradient would be NaN."""
    if not hasattr(model, "config"):  # a module that is no model of transformers
        return False
    return str(model.config.get_text_config().model_type).startswith("gemma3n")


def base_of(model: Any) -> Any:
    """The model inside a peft wrapper, unless the wrapper itself takes part in the forward pass (prompt learning)."""
    if not hasattr(model, "get_base_model") or getattr(model.active_peft_config, "is_prompt_learning", False):
        return model
    return model.get_base_model()
