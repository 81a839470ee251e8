"""Rows that are longer than a pass, computed in pieces: exact, with the activations of one piece at a time.

A piece continues its prompt and the pieces before it as a row continues its prompt: its tokens attend to their keys and
values, and its recurrent layers begin with their states. The layers are computed in stages, which are neighbouring
layers:

    forward     each stage over the pieces in order, without a graph
    backward    the last stage first, over the pieces in reverse order: each runs forward once more, with a graph, and
                backward; gradients of keys and values add up, and go back with the piece that they belong to

What grows with the row are the residual stream before each stage but the first, the keys and values of one stage with
their gradients, and one gradient of the residual stream. If all layers are one stage, its keys and values stay from the
forward pass; otherwise the backward pass of a stage begins with computing them again, for which its last layer is not
computed in full. ``stage_sizes`` chooses.

Axis letters: T tokens of the row, X tokens of the prompt without its last one, N drawn tokens, H hidden size, K
key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohort.parallel.full import is_gathered
from cohort.policy.head import LIKE_SHAPES, gradient_of, in_like_shapes
from cohort.policy.layout import Layout
from cohort.policy.lean import LeanLayers
from cohort.policy.passes import Hidden, KeysValues, PackedPass, Passes, Prefixes, SharedPasses
from cohort.policy.recurrent import StateKey
from cohort.policy.rows import PackedRows

Stage = Callable[[Tensor, Tensor, PackedPass], Tensor]
"""Layers: from the token ids of a pass, or the residual stream, and their positions, to the residual stream; the last
stage to the hidden states of the tokens that are needed."""


def hidden_in_pieces(passes: Passes, prefixes: Prefixes, rows: PackedRows, most: int | None) -> Hidden:
    """``passes.hidden``, with rows of more than ``most`` tokens in pieces of at most as many. Their backward pass adds
    to ``.grad`` directly; see ``ComputeModel.gradients_in_place``."""
    keep = torch.is_grad_enabled()
    if most is None or int(rows.lengths_B.max()) <= most or not can_cut(passes):
        return passes.hidden(prefixes, rows)
    if keep and (prefixes.attached or not passes.model.adds_gradients):
        return passes.hidden(prefixes, rows)
    found = []
    for row in _each(rows):
        if int(row.lengths_B[0]) <= most:
            found.append(passes.hidden(prefixes, row).states)
            continue
        pieces = Pieces(passes, prefixes, row, most, keep=keep)
        anchor = torch.zeros((), dtype=torch.float32, device=passes.model.device, requires_grad=pieces.keep)
        found.append(_InPieces.apply(anchor, pieces))  # type: ignore[no-untyped-call]
    return Hidden(found[0] if len(found) == 1 else torch.cat(found))


def can_cut(passes: Passes) -> TypeGuard[SharedPasses]:
    """Whether rows can be computed in pieces: on shared passes whose weights are all here. The load-balancing loss
    needs what routers say of all tokens."""
    if not isinstance(passes, SharedPasses):
        return False
    return not is_gathered(passes.model.model) and not passes.model.router_aux_loss_coef


class _InPieces(torch.autograd.Function):
    """The hidden states of a row's drawn tokens, ``[N, H]``."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, pieces: Pieces) -> Tensor:
        ctx.pieces = pieces
        return pieces.forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[None, None]:
        ctx.pieces.backward(grad_NH)
        return None, None


class Piece(PackedPass):
    """The pass of a piece, which also records what later pieces need of it."""

    def __init__(self, layout: Layout, native: bool, prefixes: KeysValues, drawn_N: Tensor | None) -> None:
        super().__init__(layout, native, prefixes=prefixes, drawn_N=drawn_N)
        self.kept: KeysValues = {}

    def record(self, layer: int, k: Tensor, v: Tensor) -> None:
        """See ``PackedPass``."""
        self.kept.setdefault(layer, (k[:, : self.tokens], v[:, : self.tokens]))

    def _record_state(self, key: StateKey, states: Tensor) -> None:
        self.kept.setdefault(key, (states,))


@dataclass(frozen=True, slots=True)
class Span:
    """Where a piece lies."""

    number: int
    tokens: slice
    """On axis T."""
    drawn_N: Tensor | None
    """Its drawn tokens, counted from its first token. None: all."""
    outputs: slice
    """On axis N."""


class Pieces:
    """One row, cut.

    Args:
        passes: compute it.
        prefixes: its prompt's and others.
        row: one row.
        most: tokens of a piece.
        keep: whether a backward pass follows.
    """

    def __init__(self, passes: SharedPasses, prefixes: Prefixes, row: PackedRows, most: int, *, keep: bool) -> None:
        self.passes, self.prefixes, self.keep = passes, prefixes, keep
        prompt, lengths = int(row.prompt_B[0]), [len(ids) - 1 for ids in prefixes.prompt_ids]
        self.before = lengths[prompt]
        start = sum(lengths[:prompt])
        self.in_prefixes = slice(start, start + self.before), sum(map(bool, lengths[:prompt]))
        """Where the prompt lies on axis X of the prefixes, and its number among those that have states."""
        self.ids_T = row.inputs_T(prefixes.prompt_ids).to(passes.model.device)
        self.routes_T = row.routes_T
        self.spans, self.outputs = _spans(row, most)
        self.stages, self.ends = _stages(passes)
        self._inputs: list[Tensor | None] = []  # the residual stream before each stage but the first
        self._kept: Kept | None = None

    def forward(self) -> Tensor:
        """The hidden states, ``[N, H]``."""
        found = None
        for number in range(len(self.stages)):
            kept, given, found = Kept(self), found, None
            for span in self.spans:
                out, packed = self._run(number, None if given is None else given[span.tokens], span, kept)
                kept.add(span, packed.kept)
                last = number + 1 == len(self.stages)
                if found is None:
                    found = out.new_empty(self.outputs if last else len(self.ids_T), out.shape[-1])
                where = span.outputs if last else span.tokens
                found[where] = out[: where.stop - where.start]
            if self.keep and len(self.stages) == 1:
                self._kept = kept
            self._inputs.append(given if self.keep else None)
        if self.keep:  # copies of weights that autocast has made without a graph would have no gradient
            torch.clear_autocast_cache()
        assert found is not None
        return found

    def _run(
        self, number: int, given: Tensor | None, span: Span, kept: Kept, only_keys_of: int | None = None
    ) -> tuple[Tensor, Piece]:
        """A stage over a piece."""
        start, stop = span.tokens.start, span.tokens.stop
        layout = Layout([stop - start], self.passes.model.device, [0], [self.before + start])
        nothing = span.outputs.start == span.outputs.stop  # a pass has at least one output
        drawn_N = torch.zeros(1, dtype=torch.int64) if nothing else span.drawn_N
        packed = Piece(layout, self.passes.native, kept.before(span), drawn_N)
        packed.only_keys_of = only_keys_of
        packed.take_routes(None if self.routes_T is None else self.routes_T[span.tokens])
        inputs = self.passes.padded(self.ids_T[span.tokens]) if given is None else in_like_shapes(given)
        return self.stages[number](inputs, in_like_shapes(layout.positions_T), packed), packed

    def backward(self, grad: Tensor) -> None:
        """Add the gradient to the parameters' and the prompt's."""
        assert self._inputs, "a row in pieces has one backward pass"
        for number in reversed(range(len(self.stages))):
            grad = self._stage_backward(number, grad)

    def _stage_backward(self, number: int, grad: Tensor) -> Tensor:
        """From the gradient of what a stage returns to that of what it reads, which is written over it if possible."""
        kept, self._kept = self._kept or self._again(number), None
        x, grad_x = self._inputs.pop(), grad
        if x is not None and not (grad.shape == x.shape and grad.dtype == x.dtype and grad.is_contiguous()):
            grad_x = torch.empty_like(x)
        kept.begin_backward()
        for span in reversed(self.spans):
            self._piece_backward(number, span, kept, x, grad, grad_x)
        kept.end_backward()
        return grad_x

    def _again(self, number: int) -> Kept:
        """What the layers of a stage keep of the row."""
        kept = Kept(self)
        with torch.no_grad():
            for span in self.spans:
                x = self._inputs[number]
                given = None if x is None else x[span.tokens]
                packed = self._run(number, given, span, kept, self.ends[number])[1]
                kept.add(span, packed.kept)
        torch.clear_autocast_cache()
        return kept

    def _piece_backward(
        self, number: int, span: Span, kept: Kept, x: Tensor | None, grad: Tensor, grad_x: Tensor
    ) -> None:
        last = number + 1 == len(self.stages)
        leaf = None if x is None else x[span.tokens].detach().requires_grad_()
        with torch.enable_grad():
            out, packed = self._run(number, leaf, span, kept)
            where = span.outputs if last else span.tokens
            count = where.stop - where.start
            pairs = [*kept.gradients(span, packed.kept), (out[:count], grad[where])]
        pairs = [(value, of_value) for value, of_value in pairs if value.requires_grad and len(value)]
        if pairs:
            values, grads = zip(*pairs, strict=True)
            torch.autograd.backward(values, grads)
        kept.collect()
        if leaf is not None:
            grad_x[span.tokens] = 0 if leaf.grad is None else leaf.grad


class Kept:
    """What the layers of a stage keep of a row: keys and values of the prompt and of the tokens so far, end to end, and
    states before each piece. In the backward pass also their gradients, as far as they have come."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._keys: dict[int, list[Tensor]] = {}
        """By layer, ``[X + T, K, D]`` each."""
        self._states: dict[StateKey, list[Tensor | None]] = {}
        """By layer and name, before each piece. None: there is nothing before it."""
        self._grads: dict[int, list[Tensor]] | None = None
        """As ``_keys``, in the backward pass."""
        self._state_grads: dict[StateKey, Tensor | None] = {}
        """Of the states before the piece that came last."""
        self._leaves: dict[StateKey, Tensor] = {}

    def of_prompt(self) -> KeysValues:
        """The part of the prefixes that belongs to the prompt."""
        span, number = self._pieces.in_prefixes
        if not self._pieces.before:
            return {}
        return {
            key: tuple(part[:, span] if isinstance(key, int) else part[number : number + 1] for part in parts)
            for key, parts in self._pieces.prefixes.keys_values.items()
        }

    def add(self, span: Span, kept: KeysValues) -> None:
        """Add what a piece has recorded."""
        before, of_prompt = self._pieces.before, self.of_prompt() if not span.number else {}
        for key, parts in kept.items():
            if not isinstance(key, int):
                self._states.setdefault(key, [*of_prompt.get(key, (None,))]).append(parts[0])
                continue
            if key not in self._keys:
                self._keys[key] = [self._buffer(part) for part in parts]
                for buffer, part in zip(self._keys[key], of_prompt.get(key, ()), strict=False):
                    buffer[:before] = part.transpose(0, 1)
            for buffer, part in zip(self._keys[key], parts, strict=True):
                buffer[before + span.tokens.start : before + span.tokens.stop] = part.transpose(0, 1)

    def _buffer(self, like_KTD: Tensor) -> Tensor:
        heads, _, width = like_KTD.shape
        dtype = torch.promote_types(like_KTD.dtype, torch.float32) if self._pieces.keep else like_KTD.dtype
        return like_KTD.new_empty(self._pieces.before + len(self._pieces.ids_T), heads, width, dtype=dtype)

    def before(self, span: Span) -> KeysValues:
        """What a piece continues; in the backward pass leaves."""
        if not span.number and self._grads is None:
            return self.of_prompt()
        end = self._pieces.before + span.tokens.start
        found: KeysValues = {}
        for layer, buffers in self._keys.items() if end else ():
            parts = [buffer[:end].transpose(0, 1) for buffer in buffers]
            if self._grads is not None:
                parts = [part.detach().requires_grad_() for part in parts]
                for part, total in zip(parts, self._grads[layer], strict=True):
                    part.grad = total[:end].transpose(0, 1)
            found[layer] = tuple(parts)
        for key, states in self._states.items():
            state = states[span.number]
            if state is not None:
                self._leaves[key] = state.detach().requires_grad_(self._grads is not None)
                found[key] = (self._leaves[key],)
        return found

    def begin_backward(self) -> None:
        """From here on, ``before`` returns leaves."""
        self._grads = {layer: list(map(torch.zeros_like, buffers)) for layer, buffers in self._keys.items()}

    def gradients(self, span: Span, kept: KeysValues) -> list[tuple[Tensor, Tensor]]:
        """What a piece has recorded, with the gradients that later pieces have sent back."""
        assert self._grads is not None
        start, stop = (self._pieces.before + index for index in (span.tokens.start, span.tokens.stop))
        pairs = []
        for key, parts in kept.items():
            if isinstance(key, int):
                totals = [total[start:stop].transpose(0, 1) for total in self._grads[key]]
                pairs += [(part, total.to(part.dtype)) for part, total in zip(parts, totals, strict=True)]
            elif (total := self._state_grads.get(key)) is not None:
                pairs.append((parts[0], total.to(parts[0].dtype)))
        return pairs

    def collect(self) -> None:
        """Take the gradients of the states that the piece began with; those of keys and values are in their place."""
        self._state_grads = {key: leaf.grad for key, leaf in self._leaves.items()}
        self._leaves = {}

    def end_backward(self) -> None:
        """Send the prompt's gradients back."""
        assert self._grads is not None
        before = self._pieces.before
        span, number = self._pieces.in_prefixes
        for key, leaves in self._pieces.prefixes.keys_values.items() if before else ():
            for index, leaf in enumerate(leaves):
                if not leaf.requires_grad:
                    continue
                if key in self._grads:
                    gradient_of(leaf)[:, span] += self._grads[key][index][:before].transpose(0, 1)
                elif (total := self._state_grads.get(key)) is not None:
                    gradient_of(leaf)[number : number + 1] += total


def _stages(passes: SharedPasses) -> tuple[list[Stage], list[int]]:
    """The layers in stages, and the last layer of each. Only lean layers can be computed by themselves."""
    body = passes.body
    if not isinstance(body, LeanLayers):
        return [lambda given, positions_T, packed: body(given, positions_T, packed).states], [-1]
    anatomy = body.anatomy
    width = anatomy.num_key_value_heads * anatomy.head_dim
    ends = list(accumulate(stage_sizes(len(anatomy.layers), len(anatomy.norm.weight), width)))
    ranges = [range(first, end) for first, end in pairwise([0, *ends])]
    return [partial(body.run, each) for each in ranges], [end - 1 for end in ends]


def memory_of_token(passes: SharedPasses) -> tuple[int, float] | None:
    """The bytes that a token of a long row takes at most, and the largest share of the layers in one stage. While a
    stage runs backward, that is the residual stream before it and before each stage below it but the first, a
    gradient of that stream, and keys and values of the stage with gradients (at least float32), all in the weights'
    dtype; one hidden state in the products' dtype if it differs; 28 bytes of ids and log-probs. None: the layers are
    not known."""
    if not isinstance(passes.body, LeanLayers):
        return None
    anatomy, precision = passes.body.anatomy, passes.model.precision
    size, hidden = precision.master.itemsize, len(anatomy.norm.weight)
    width = anatomy.num_key_value_heads * anatomy.head_dim
    sizes = stage_sizes(len(anatomy.layers), hidden, width)
    keys = 2 * width * (size + max(size, 4))
    most = max((below + 1) * hidden * size + count * keys for below, count in enumerate(sizes))
    converted = (precision.compute != precision.master) * hidden * precision.compute.itemsize
    return most + converted + 28, max(sizes) / sum(sizes)


def stage_sizes(layers: int, hidden: int, width: int) -> list[int]:
    """The number of layers of each stage. A token takes no more memory than its hidden states after all layers, if that
    is possible, and else as little more as possible; within that, as few layers as possible are computed again.

    Args:
        layers: of the model.
        hidden: H, numbers of a hidden state.
        width: K times D, numbers of a layer's keys.

    >>> stage_sizes(24, 896, 128), stage_sizes(6, 256, 128)  # Qwen2.5-0.5B; half as many key-value heads as heads
    ([24], [2, 2, 1, 1])
    """
    most = layers * hidden
    while hidden + 4 * width * layers > most:
        for count in range(layers, 1, -1):
            # Below a stage lie the residual streams before it and before those under it, but not before the first.
            room = [(most - (below + 1) * hidden) // (4 * width) for below in range(count)]
            if room[-1] >= 1 and sum(room) >= layers:
                sizes = [1] * count
                for stage, most_layers in enumerate(room):
                    sizes[stage] += min(layers - sum(sizes), most_layers - 1)
                return sizes
        most += hidden
    return [layers]


def _each(rows: PackedRows) -> list[PackedRows]:
    """Each row by itself, for the layers alone."""
    lengths = rows.lengths_B.tolist()
    drawn = [None] * len(lengths) if rows.drawn_T is None else rows.drawn_T.split(lengths)
    routes = [None] * len(lengths) if rows.routes_T is None else rows.routes_T.split(lengths)
    nothing = [None] * len(lengths)
    parts = zip(
        rows.prompt_B.split(1), rows.ids_T.split(lengths), rows.lengths_B.split(1), drawn, nothing, routes, strict=True
    )
    return [PackedRows(*part) for part in parts]


def _spans(row: PackedRows, most: int) -> tuple[list[Span], int]:
    """About equal pieces of a row, and its number of drawn tokens."""
    total = len(row.ids_T)
    even = -(-total // -(-total // most))
    size = min(most, even + -even % LIKE_SHAPES)
    spans, outputs = [], 0
    for number, start in enumerate(range(0, total, size)):
        tokens = slice(start, min(start + size, total))
        drawn_N = None if row.drawn_T is None else row.drawn_T[tokens].nonzero().squeeze(-1)
        count = tokens.stop - start if drawn_N is None else len(drawn_N)
        spans.append(Span(number, tokens, drawn_N, slice(outputs, outputs + count)))
        outputs += count
    return spans, outputs
