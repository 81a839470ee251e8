"""Routing replay for mixtures of experts: a pass sends each token to the experts that the sampler sent it to.

A router chooses by rounding: sampler and trainer compute its logits in other ways, and where two experts are nearly
equal they may choose differently, which changes a token's log-prob by far more than rounding does. In a replayed pass
the chosen experts are the recorded ones, and their weights are computed from the present logits as the family does it:

    free       S_t = the K experts of largest score s_te        w_te = f(logits_t, S_t)
    replayed   S_t = the recorded ones                          w_te = f(logits_t, S_t)

So gradients reach the router through the weights, and the choice, which has no gradient, is that of the sampler.

Families of transformers write their routers differently, and all of them choose by one ``torch.topk`` of a score per
expert, ``[T, E]``. Inside a block of experts this one call is answered with the recorded experts and their scores;
whatever the family does before and after it (softmax, sigmoid and bias, renormalising) stays its own. A trial at the
start shows for each layer that the experts get what was recorded.

Source: R3, "rollout routing replay" (arXiv 2510.11370).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cohort.errors import DataError, ModelError

Trial = Callable[[], Any]
"""Runs the model's own forward pass over a few tokens."""
REMEDY = "set rollout.replay_routing to false"


@dataclass(frozen=True, slots=True)
class Routing:
    """The mixtures of a model whose routers can be replayed."""

    layers: int
    """The model's layers, dense ones counted: axis L of routes."""
    experts: int
    """E, of each mixture."""
    each: int
    """K, the experts of a token."""

    def check(self, routes_TLK: Tensor) -> None:
        """Check that routes are of this model.

        Raises:
            DataError: they have other layers or experts.
        """
        shape, known = tuple(routes_TLK.shape[1:]), (self.layers, self.each)
        if shape != known:
            raise DataError(
                f"recorded routes of {known[0]} layers with {known[1]} experts each were expected, got {shape}: "
                f"let the engine serve the model that is trained, or {REMEDY}"
            )
        if routes_TLK.numel() and not -1 <= int(routes_TLK.min()) <= int(routes_TLK.max()) < self.experts:
            raise DataError(
                f"recorded routes have experts {int(routes_TLK.min())} to {int(routes_TLK.max())}, and the model has "
                f"{self.experts}: let the engine serve the model that is trained, or {REMEDY}"
            )


def check_mixture(config: Any) -> None:
    """Check that a model's config is of a mixture of experts.

    Raises:
        ModelError: it names no experts.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not any(value for name, value in config.to_dict().items() if "expert" in name):
        raise ModelError(
            f"rollout.replay_routing needs a mixture of experts, and {config.model_type!r} has no experts: {REMEDY}"
        )


def replayable(model: Any, trial: Trial) -> Routing:
    """Let a model's blocks of experts take their routes from ``replaying``, and try it.

    Args:
        model: its modules get hooks, which do nothing outside of ``replaying``.
        trial: runs it over at least one token.

    Raises:
        ModelError: the model chooses its experts in a way that cannot be replayed; names its family.
    """
    family = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__
    blocks = list(_blocks(model))
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    watches = [
        experts.register_forward_pre_hook(partial(_watch, seen, layer), with_kwargs=True)
        for layer, _, experts in blocks
    ]
    hooks: list[Any] = []
    try:
        with torch.no_grad():
            trial()
        if not seen or len(seen) != len(blocks) or len({index.shape[1] for index, _ in seen.values()}) != 1:
            raise ModelError(_unknown(family, "its experts are not modules of transformers' experts interface"))
        counts = {int(experts.num_experts) for *_, experts in blocks}
        if len(counts) != 1:
            raise ModelError(_unknown(family, "its layers have different numbers of experts"))
        (count,), (tokens, each) = counts, next(iter(seen.values()))[0].shape
        for layer, block, _ in blocks:
            hooks.append(block.register_forward_pre_hook(partial(_enter, layer, count)))
            hooks.append(block.register_forward_hook(_leave, always_call=True))
        layers = int(model.config.get_text_config().num_hidden_layers)
        generator = torch.Generator().manual_seed(0)
        scores_TLE = torch.rand(tokens, layers, count, generator=generator, dtype=torch.float32)
        routes_TLK = scores_TLE.topk(each).indices.to(torch.int16)
        with torch.no_grad(), replaying(routes_TLK):
            trial()
        for layer, (index_TK, weights_TK) in seen.items():
            same = index_TK.shape == (tokens, each) and bool((index_TK.cpu() == routes_TLK[:, layer]).all())
            if not same or not bool((weights_TK != 0).all()):  # experts outside of a group's limit have weight 0
                raise ModelError(_unknown(family, "its router does not choose by one topk of a score per expert"))
    except BaseException:
        for hook in hooks:
            hook.remove()
        raise
    finally:
        for watch in watches:
            watch.remove()
    return Routing(layers, count, each)


def _unknown(family: str, reason: str) -> str:
    return f"rollout.replay_routing does not know how {family} chooses experts ({reason}): {REMEDY}"


def _blocks(model: nn.Module) -> Iterator[tuple[int, nn.Module, Any]]:
    """The mixtures: the number of the layer, the module in which experts are chosen, and the experts."""
    modules = dict(model.named_modules())
    for name, experts in modules.items():
        found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if found and "is_transposed" in vars(experts):
            owner = name.rpartition(".")[0]
            while hasattr(modules[owner], "base_layer"):  # adapters wrap experts
                owner = owner.rpartition(".")[0]
            yield int(found[1]), modules[owner], experts


def _watch(
    seen: dict[int, tuple[Tensor, Tensor]], layer: int, _module: Any, given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """Record what a module of experts is given: hidden states, indices, weights."""
    _, index_TK, weights_TK = (*given, *named.values())
    seen[layer] = index_TK, weights_TK


# What a pass replays -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Replay:
    routes_TLK: Tensor
    modes: list[_Chosen] = field(default_factory=list)


_REPLAY: ContextVar[_Replay | None] = ContextVar("replayed routes", default=None)


@contextlib.contextmanager
def replaying(routes_TLK: Tensor | None) -> Iterator[None]:
    """Inside the block, in this thread, a model that is ``replayable`` routes its tokens by these experts.

    Args:
        routes_TLK: of the tokens of a pass, flat, in each layer; -1: the router's own choice. Tokens after these, such
            as padding, are routed freely. None: all are.
    """
    before = _REPLAY.set(None if routes_TLK is None else _Replay(routes_TLK))
    try:
        yield
    finally:
        _REPLAY.reset(before)


def _enter(layer: int, experts: int, _module: Any, _given: Any) -> None:
    replay = _REPLAY.get()
    if replay is not None:
        replay.modes.append(_Chosen(replay.routes_TLK[:, layer], experts))
        replay.modes[-1].__enter__()  # type: ignore[no-untyped-call]


def _leave(_module: Any, _given: Any, _out: Any) -> None:
    replay = _REPLAY.get()
    if replay is not None:
        replay.modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Chosen(TorchFunctionMode):
    """Answers the ``topk`` by which a router chooses.

    Args:
        routes_TK: the experts.
        experts: how many there are.
    """

    def __init__(self, routes_TK: Tensor, experts: int) -> None:
        super().__init__()
        self._routes_TK, self._experts = routes_TK, experts

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function in (torch.topk, Tensor.topk):
            return self._replaced(args[0] if args else kwargs["input"], found)
        return found

    def _replaced(self, scores_TE: Tensor, free: Any) -> Any:
        """The recorded experts and their scores, differentiable in the scores; ``free`` for a ``topk`` of others."""
        routes_TK, index = self._routes_TK, free[1]
        if scores_TE.ndim != 2 or scores_TE.shape[1] != self._experts or index.shape[1] != routes_TK.shape[1]:
            return free
        routes_TK = routes_TK.to(index)
        assert len(routes_TK) <= len(index), "routes of more tokens than there are"
        routes_TK = functional.pad(routes_TK, (0, 0, 0, len(index) - len(routes_TK)), value=-1)
        index = torch.where(routes_TK < 0, index, routes_TK)
        return torch.return_types.topk((scores_TE.gather(1, index), index))
