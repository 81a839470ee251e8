"""The experts of a mixture, as implementations for transformers' modules.

On CUDA, transformers' grouped products compute them, which know no autocast: they get weights in the compute dtype
(``NarrowExperts``). On a CPU ``experts`` does, with its own backward pass. A token t with the experts e of its router
and their weights w_te becomes

    out_t = sum_e w_te (D_e a_te + d_e)        a_te = act(g) (u + shift)        [g, u] = U_e x_t + b_e

Tokens are sorted by expert once; each expert multiplies its own rows in place. The backward pass keeps [g, u] alone and
computes the rest again. The model's own modules choose the experts, and add what all tokens share.

Axis letters: T tokens, K experts of a token, M rows (a token and one of its experts, sorted by expert), E experts, I
width of an expert, H hidden size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from ctypes import byref, c_int64
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized

from cohort.errors import ModelError
from cohort.native import DTYPES, call, load, require, room, structure, threads_for
from cohort.policy.device import kind_of

NAME = "cohort"
"""The name of ``experts`` among the implementations of transformers."""
NARROW = "cohort_narrow"
"""The name of ``narrow_experts``."""
PLAIN = "grouped_mm"
"""The name of transformers' own, its default."""
LIKE_ROWS = 32
"""In bfloat16, the number of rows of an expert is a multiple of this; see ``head.LIKE_SHAPES``."""
FEW = {torch.float32: 128, torch.bfloat16: 64}
"""In sampling, the native kernel multiplies the tokens of an expert up to this mean number."""
FEW_WIDENED = 16
"""The same in bfloat16 where the kernel does not use the processor's units for it, and the library's products may."""
PRODUCTS_OF_ONE_THREAD = 1 << 19
"""Up to this many multiplications, one thread is faster than several."""
PROBE = 1e3
"""Numbers up to this size, most of them small, show what a module's activation computes; with a limit, up to its
double."""


@dataclass(frozen=True, slots=True)
class Activation:
    """``act(g) (u + shift)`` with ``g = min(gate, limit)``, u = up between -limit and limit, and ``act(g) = g
    sigmoid(alpha g)``, or the tanh form of GELU."""

    gelu: bool = False
    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0
    interleaved: bool = False
    """Whether numbers of gate and up alternate. Otherwise the gate's come first."""

    def __call__(self, both: Tensor) -> Tensor:
        """``[M, 2 I]`` to ``[M, I]``, by torch."""
        gate, up = (both[..., ::2], both[..., 1::2]) if self.interleaved else both.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        active = functional.gelu(gate, approximate="tanh") if self.gelu else gate * torch.sigmoid(self.alpha * gate)
        return active * (up + self.shift)

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the kernels of experts.c."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, module: Any) -> Activation | None:
        """The activation of a module of experts, found by trying it; None: it is none of these."""
        if module not in _ACTIVATIONS:
            _ACTIVATIONS[module] = cls._find(module)
        return _ACTIVATIONS[module]

    @classmethod
    def _find(cls, module: Any) -> Activation | None:
        alpha, limit = (
            float(getattr(module, name, getattr(module, f"swiglu_{name}", None)) or default)
            for name, default in (("alpha", 1.0), ("limit", math.inf))
        )
        curve = torch.linspace(-1, 1, 128, dtype=torch.float32)
        probe = 2 * limit * curve if math.isfinite(limit) else (math.asinh(PROBE) * curve).sinh()
        probe = probe.view(16, 8).T.flip(0).reshape(4, 32)
        try:
            expected = module._apply_gate(probe)
        except Exception:  # models bring their own code
            return None
        kinds = [cls(), cls(gelu=True), cls(limit=limit), cls(False, alpha, limit, 1.0)]
        kinds += [cls(kind.gelu, kind.alpha, kind.limit, kind.shift, True) for kind in kinds]
        alike = (kind for kind in kinds if expected.shape == (4, 16) and torch.allclose(kind(probe), expected, 1e-4))
        return next(alike, None)


_ACTIVATIONS: weakref.WeakKeyDictionary[Any, Activation | None] = weakref.WeakKeyDictionary()


def use_own_experts(model: Any, *, native: bool) -> None:
    """Let a model's modules compute their experts by ``experts`` if native kernels can be used, else by
    ``narrow_experts``, if it has some that transformers computes."""
    if getattr(getattr(model, "config", None), "_experts_implementation", None) == PLAIN:
        from transformers.integrations.moe import ExpertsInterface

        name, function = (NAME, experts) if native else (NARROW, narrow_experts)
        ExpertsInterface.register(name, function)
        model.set_experts_implementation(name)


@contextlib.contextmanager
def own_experts(model: Any) -> Iterator[None]:
    """Let transformers compute them inside the block."""
    if getattr(getattr(model, "config", None), "_experts_implementation", None) != NAME:
        yield
        return
    model.set_experts_implementation(PLAIN)
    try:
        yield
    finally:
        model.set_experts_implementation(NAME)


def experts(module: Any, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The output of a module of experts, ``[T, H]``, in the dtype of x. Differentiable in x and the weights.

    Args:
        module: one with transformers' ``use_experts_implementation``.
        x_TH: the tokens.
        index_TK: the experts of each token.
        weights_TK: of these experts.
    """
    activation = activation_of(module)
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x_TH.dtype
    if activation is None or kind_of(x_TH.device) != "cpu" or dtype not in DTYPES:
        from transformers.integrations.moe import grouped_mm_experts_forward

        found: Tensor = grouped_mm_experts_forward(module, x_TH, index_TK, weights_TK)
        return found
    # Adapters are parametrizations of the module while it runs: prepared weights lack them.
    prepared = None if torch.is_grad_enabled() or is_parametrized(module) else _PREPARED.get()
    if prepared is not None and prepared.module is module and index_TK.numel() <= prepared.most * module.num_experts:
        few: Tensor = prepared(x_TH, index_TK, weights_TK)
        return few
    matrices = [module.gate_up_proj, module.down_proj]
    biases = [module.gate_up_proj_bias, module.down_proj_bias] if module.has_bias else [None, None]
    matrices = [matrix if module.is_transposed else matrix.mT for matrix in matrices]
    route = Route.of(index_TK, len(matrices[0]), 1 if dtype == torch.float32 else LIKE_ROWS)
    out: Tensor = _Experts.apply(x_TH, weights_TK, *matrices, *biases, route, activation, dtype)  # type: ignore[no-untyped-call]
    return out


def narrow_experts(module: Any, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """As ``experts``, by transformers' grouped products in the dtype of autocast. Gradients arrive in the weights'."""
    device = x_TH.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_TH.dtype
    narrow = None if torch.is_grad_enabled() or is_parametrized(module) else _PREPARED.get()
    if not isinstance(narrow, NarrowExperts) or narrow.module is not module:
        narrow = NarrowExperts(module, dtype)
        narrow.refresh()
    return narrow(x_TH, index_TK, weights_TK)


class NarrowExperts:
    """A module of experts with weights in another dtype, which are read by ``refresh`` and otherwise those of the
    module.

    Args:
        module: one that transformers computes.
        dtype: of the products. In bfloat16, CUDA's kernel wants rows of a multiple of 16 bytes: where the module's are
            none, the weights stay as they are, and the products are slow.
    """

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self.module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def refresh(self) -> None:
        """Read the present weights, with their graph where gradients are on."""
        names = [f"{name}{kind}" for name in ("gate_up_proj", "up_proj", "down_proj") for kind in ("", "_bias")]
        found = {name: weight for name in names if isinstance(weight := getattr(self.module, name, None), Tensor)}
        fits = all(size * self._dtype.itemsize % 16 == 0 for size in self.module.down_proj.shape[1:])
        self.__dict__ |= {name: weight.to(self._dtype) if fits else weight for name, weight in found.items()}

    def __call__(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """See ``experts``."""
        from transformers.integrations.moe import grouped_mm_experts_forward

        out: Tensor = grouped_mm_experts_forward(self, x_TH, index_TK, weights_TK)
        return out


def activation_of(module: Any) -> Activation | None:
    """The activation of a module of experts. None: the module does more, and transformers computes it."""
    plain = not (getattr(module, "_is_expert_parallel", False) or getattr(module, "has_post_expert_norm", False))
    return Activation.of(module) if plain and module.has_gate else None


class PreparedExperts:
    """The weights of a module of experts for decode steps: of few tokens, without a gradient. A token's numbers do not
    depend on the others.

    Args:
        module: one that ``experts`` computes.
        activation: of the module.
        dtype: of the products: float32 or bfloat16.
    """

    @classmethod
    def of(cls, module: Any, dtype: torch.dtype) -> PreparedExperts | None:
        """None: ``experts`` leaves the module to transformers, or does not know it."""
        activation = activation_of(module) if hasattr(module, "is_transposed") else None
        return None if activation is None else cls(module, activation, dtype)

    def __init__(self, module: Any, activation: Activation, dtype: torch.dtype) -> None:
        self.module, self._dtype = module, dtype
        self._library, self._call = load(), structure("few")(**activation.arguments)
        self._library.cohort_few_tokens.restype = None
        widened = dtype == torch.bfloat16 and not self._library.cohort_has_pairs()
        self.most = FEW_WIDENED if widened else FEW[dtype]
        """Up to this mean number of tokens of an expert it is faster than the products of an update."""
        numbers = self._library.cohort_few_room
        numbers.argtypes, numbers.restype = [c_int64] * 4, c_int64

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the present weights. They are the trainer's own if they lie as the kernel reads them."""
        module, call = self.module, self._call
        matrices = [matrix.detach().to(self._dtype) for matrix in (module.gate_up_proj, module.down_proj)]
        up, down = ((matrix.mT if module.is_transposed else matrix).contiguous() for matrix in matrices)
        call.experts, call.hidden, call.inner = down.shape
        require(up.shape == (call.experts, 2 * call.inner, call.hidden), "matrices of one shape")
        call.up, call.down, call.up_half = up.data_ptr(), down.data_ptr(), self._dtype == torch.bfloat16
        self._referenced = [up, down]
        if module.has_bias:
            biases = [bias.detach().to(self._dtype) for bias in (module.gate_up_proj_bias, module.down_proj_bias)]
            self._referenced += biases
            call.up_bias, call.down_bias = (bias.data_ptr() for bias in biases)

    def __call__(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """See ``experts``."""
        call, (tokens, each) = self._call, index_TK.shape
        threads = torch.get_num_threads() if tokens * each * call.hidden * call.inner > PRODUCTS_OF_ONE_THREAD else 1
        rows = tokens * each + call.experts * (self._library.cohort_lanes() - 1)
        x, index, weights = x_TH.to(self._dtype).contiguous(), index_TK.contiguous(), weights_TK.float().contiguous()
        whole, out = index.new_empty(tokens * each + rows), x.new_zeros(x.shape, dtype=torch.float32)
        own = room(self._library.cohort_few_room(rows, call.hidden, call.inner, threads))
        require(
            index.dtype == torch.int64 and len(x) == tokens and weights.shape == index.shape, "a row for each token"
        )
        call.x, call.index, call.weights, call.out = x.data_ptr(), index.data_ptr(), weights.data_ptr(), out.data_ptr()
        call.whole, call.room, call.tokens, call.each = whole.data_ptr(), own.data_ptr(), tokens, each
        call.x_half, call.threads = self._dtype == torch.bfloat16, threads
        self._library.cohort_few_tokens(byref(call))
        return out.to(x_TH.dtype)


@contextlib.contextmanager
def used(prepared: PreparedExperts | NarrowExperts | None) -> Iterator[None]:
    """Inside the block, the module of ``prepared`` computes few tokens with it in this thread. None: no module does."""
    before = _PREPARED.set(prepared)
    try:
        yield
    finally:
        _PREPARED.reset(before)


_PREPARED: ContextVar[Any] = ContextVar("prepared experts", default=None)


@dataclass(frozen=True, slots=True)
class Route:
    """Tokens sorted by expert."""

    position_TK: Tensor
    """The row of each token and each of its experts."""
    token_M: Tensor
    """The token of each row; -1: none, its numbers are 0."""
    spans: tuple[tuple[int, int, int], ...]
    """Of each expert that has rows: its number, its first row, the end of its rows."""

    @classmethod
    def of(cls, index_TK: Tensor, count: int, multiple: int) -> Route:
        """Sort the experts of tokens, of which there are ``count``; each has a multiple of ``multiple`` rows."""
        (tokens, each), index_TK = index_TK.shape, index_TK.contiguous()
        require(index_TK.dtype == torch.int64, "indices of experts are int64")
        token_M = index_TK.new_empty(index_TK.numel() + count * (multiple - 1))
        position_TK, starts = torch.empty_like(index_TK), index_TK.new_empty(count + 1)
        call(
            "sort_experts", index=index_TK, position=position_TK, token=token_M, starts=starts, tokens=tokens,
            each=each, experts=count, multiple=multiple,
        )  # fmt: skip
        bounds = starts.tolist()
        if bounds[-1] < 0:
            raise IndexError(f"a router chose an expert that is not one of {count}")
        pairs = itertools.pairwise(bounds)
        spans = tuple((expert, start, end) for expert, (start, end) in enumerate(pairs) if end > start)
        return cls(position_TK, token_M[: bounds[-1]], spans)

    def rows(self, x_TH: Tensor) -> Tensor:
        """The rows of tokens, ``[M, H]``."""
        out = x_TH.new_empty(len(self.token_M), x_TH.shape[1])
        call("gather_rows", x=x_TH.contiguous(), token=self.token_M, out=out, rows=len(out), width=out.shape[1])
        return out

    def tokens(self, x_MH: Tensor) -> Tensor:
        """The sum of the rows of each token, ``[T, H]``."""
        (tokens, each), width = self.position_TK.shape, x_MH.shape[1]
        out = x_MH.new_empty(tokens, width)
        call("sum_rows", x=x_MH, position=self.position_TK, out=out, tokens=tokens, each=each, width=width)
        return out

    def weights(self, weights_TK: Tensor) -> Tensor:
        """The weight of each row, ``[M]``, float32."""
        weights_M = weights_TK.new_zeros(len(self.token_M), dtype=torch.float32)
        return weights_M.index_copy_(0, self.position_TK.flatten(), weights_TK.float().flatten())


class _Experts(torch.autograd.Function):
    """``experts``, with matrices ``[E, H, 2 I]`` and ``[E, I, H]`` however they lie in memory."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weights_TK: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
        down_bias: Tensor | None, route: Route, activation: Activation, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        rows, weights_M = route.rows(x_TH.to(dtype)), route.weights(weights_TK)
        narrow_up, narrow_down = up.to(dtype), down.to(dtype)
        both = rows.new_empty(len(rows), up.shape[2])
        for expert, start, end in route.spans:
            _product(rows[start:end], narrow_up[expert], both[start:end], up_bias, expert)
        active = rows.new_empty(len(rows), down.shape[1])
        _mix(activation, both=both, weight=weights_M, out=active)
        for expert, start, end in route.spans:
            torch.mm(active[start:end], narrow_down[expert], out=rows[start:end])
            if down_bias is not None:
                rows[start:end].addr_(weights_M[start:end].to(dtype), down_bias[expert].to(dtype))
        ctx.save_for_backward(x_TH, weights_TK, up, down, up_bias, down_bias, both)
        ctx.rest = route, activation
        return route.tokens(rows).to(x_TH.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, weights_TK, up, down, up_bias, down_bias, both = ctx.saved_tensors
        (route, activation), dtype = ctx.rest, both.dtype
        weights_M, grads = route.weights(weights_TK), route.rows(grad_TH.to(dtype))
        grad_active, narrow = both.new_empty(len(both), down.shape[1]), down.to(dtype)
        for expert, start, end in route.spans:
            torch.mm(grads[start:end], narrow[expert].T, out=grad_active[start:end])
        active, grad_both, of_weights = map(torch.empty_like, (grad_active, both, weights_M))
        given = {"both": both, "weight": weights_M, "grad_out": grad_active}
        _mix(activation, **given, out=active, grad_both=grad_both, grad_weight=of_weights)
        del grad_active, given
        of_down, of_down_bias = None, None
        if ctx.needs_input_grad[3] or ctx.needs_input_grad[5]:
            of_down, of_down_bias = _gradients(route, active, grads, down, down_bias, weights_M)
        del active
        if down_bias is not None:
            for expert, start, end in route.spans:
                of_weights[start:end] += grads[start:end].float() @ down_bias[expert].float()
        of_up, of_up_bias = None, None
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[4]:
            of_up, of_up_bias = _gradients(route, route.rows(x_TH.to(dtype)), grad_both, up, up_bias)
        narrow = up.to(dtype)
        for expert, start, end in route.spans:
            torch.mm(grad_both[start:end], narrow[expert].T, out=grads[start:end])
        of_weights_TK, of_x = of_weights[route.position_TK].to(weights_TK.dtype), route.tokens(grads).to(x_TH.dtype)
        return of_x, of_weights_TK, of_up, of_down, of_up_bias, of_down_bias, None, None, None


def _product(rows: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None, expert: int) -> None:
    if bias is None:
        torch.mm(rows, matrix, out=out)
    else:
        torch.addmm(bias[expert].to(rows.dtype), rows, matrix, out=out)


def _gradients(
    route: Route, given: Tensor, grads: Tensor, matrix: Tensor, bias: Tensor | None, weights_M: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Of the matrices and biases of one product of each expert: of ``given matrix + weight bias``."""
    of_matrix = torch.empty_like(matrix)
    of_bias = None if bias is None else torch.zeros_like(bias)
    narrow = given.dtype != matrix.dtype
    for expert, start, end in route.spans:
        left, right = given[start:end], grads[start:end]
        if narrow and of_matrix.stride(1) == 1:  # a copy across the order of its memory takes as long as the product
            of_matrix[expert].T.copy_(right.T @ left)
        elif narrow:
            of_matrix[expert] = left.T @ right
        else:
            torch.mm(left.T, right, out=of_matrix[expert])
        if of_bias is not None:
            of_bias[expert] = right.float().sum(0) if weights_M is None else weights_M[start:end] @ right.float()
    for expert in set(range(len(matrix))) - {expert for expert, *_ in route.spans}:
        of_matrix[expert] = 0
    return of_matrix, of_bias


def _mix(activation: Activation, *, both: Tensor, **others: Tensor) -> None:
    """The kernel of experts.c: forward, or backward if there is a ``grad_out``."""
    rows, width = both.shape
    call(
        "mix_gates", both=both, rows=rows, width=width // 2, threads=threads_for(both.numel()), **others,
        **activation.arguments,
    )  # fmt: skip


# ----------------------------------------
# The load-balancing loss of mixture-of-experts models, over a minibatch however it is cut.
#
# With rows n = 1..M (each drawn token in each layer), router probabilities p_ne, and E experts of which each row uses
# k:
#
#     L = E sum_e f_e P_e      f_e = fraction of the rows that use expert e      P_e = sum_n p_ne / M
#
# f has no gradient and is counted over the whole minibatch first. L is then a sum over tokens, of which each
# microbatch computes its part. Source: Switch Transformer (arXiv 2101.03961) eq. 4 to 6, as in transformers; over
# drawn tokens only, because prompts are computed once for many completions.


def experts_per_token(config: Any) -> int:
    """k, from a model's config.

    Raises:
        ModelError: the model has no experts.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(config, "num_experts_per_tok", None)
    if not isinstance(found, int):
        raise ModelError(
            f"model.router_aux_loss_coef needs a mixture-of-experts model, and {config.model_type!r} has no experts: "
            "set it to 0"
        )
    return found


def expert_counts(router_logits: Sequence[Tensor], per_token: int) -> Tensor:
    """How many rows use each expert, float64, shape ``[E]``.

    Args:
        router_logits: of each layer, ``[N, E]``.
        per_token: k.

    >>> expert_counts([torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])], per_token=2)
    tensor([1., 2., 1.], dtype=torch.float64)
    """
    experts = router_logits[0].shape[-1]
    used = [logits.topk(per_token, dim=-1).indices.flatten() for logits in router_logits]
    return torch.bincount(torch.cat(used), minlength=experts).double()


@dataclass(frozen=True, slots=True)
class ExpertBalance:
    """What a microbatch needs to know about the whole minibatch."""

    counts_E: Tensor
    """How many rows use each expert."""
    rows: int
    """M."""
    coefficient: float

    def loss(self, router_logits: Sequence[Tensor]) -> Tensor:
        """A microbatch's part of the coefficient times L.

        Args:
            router_logits: of each layer, ``[N, E]``; differentiable.

        >>> balance = ExpertBalance(torch.tensor([4.0, 0.0]), rows=4, coefficient=1.0)
        >>> balance.loss([torch.zeros(4, 2)])  # E = 2, P = 1/2: 1 for any counts
        tensor(1.)
        """
        wide = [logits.to(torch.promote_types(logits.dtype, torch.float32)) for logits in router_logits]
        probs_E = torch.stack([torch.softmax(logits, dim=-1).sum(0) for logits in wide]).sum(0)
        fractions_E = (self.counts_E / self.rows).to(probs_E)
        return self.coefficient * len(fractions_E) * torch.sum(fractions_E * probs_E) / self.rows
