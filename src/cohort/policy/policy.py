"""A causal language model as a policy: the log-probs of drawn tokens, and references to compare with."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from cohort.config import ModelConfig
from cohort.errors import ModelError, NonFiniteError
from cohort.parallel.full import call_gathered
from cohort.policy.adapters import (
    add_adapters,
    adds_nothing,
    check_given,
    check_targets,
    has_adapters,
    keep_in_compute_dtype,
    lora_of,
    merged,
)
from cohort.policy.choose import MAX_GAP, choose_passes, own_logits, relative_gaps, token_source
from cohort.policy.compute import ComputeModel, enable_checkpointing
from cohort.policy.device import keep_freed_memory, kind_of
from cohort.policy.experts import experts_per_token
from cohort.policy.head import CompletionStates, TokenLogps, use_float32_head
from cohort.policy.load import (
    DeferredModel,
    base_path,
    freeze_the_rest,
    hidden_size,
    load_model,
    reads_images,
    resolve_device,
    resolve_precision,
)
from cohort.policy.narrow import use_exact_products
from cohort.policy.passes import Passes, Prefixes, base_of
from cohort.policy.pieces import hidden_in_pieces
from cohort.policy.routing import Routing, replayable
from cohort.policy.rows import Distribution, PackedRows
from cohort.types import Support

# ----------------------------------------
# Weights that are NaN or infinite are found before anything is computed with them or written.


@torch.no_grad()
def check_finite_weights(weights: Mapping[str, Tensor], where: str) -> None:
    """Check this rank's part of some tensors. Reads each once, and allocates nothing of their size.

    Args:
        weights: by name; sharded or not. Those whose numbers take one byte, as quantized ones, are skipped.
        where: what the weights belong to, for the error.

    Raises:
        NonFiniteError: names the first tensor that holds a NaN or an infinity.
    """
    held = {name: own(t) for name, t in weights.items() if t.is_floating_point() and t.element_size() > 1}
    held = {name: t for name, t in held.items() if t.numel()}
    if not held or bool(_some_norm(list(held.values())).isfinite()):
        return
    for name, tensor in held.items():
        if count := int((~tensor.isfinite()).sum()):
            raise NonFiniteError(f"{name} of {where} has {count:,} NaN or infinite values of {tensor.numel():,}")


def _some_norm(tensors: Sequence[Tensor]) -> Tensor:
    """A number that is finite only if all numbers in the tensors are; it may overflow otherwise."""
    if kind_of(tensors[0].device) == "cuda":
        return nn.utils.get_total_norm(tensors, math.inf)  # one kernel for many tensors
    return torch.stack([tensor.sum().double() for tensor in tensors]).sum()  # ten times as fast on a CPU


def own(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory."""
    local: Tensor = tensor.detach()
    return local.to_local() if hasattr(local, "to_local") else local


REFERENCE_TOKENS = 8
"""Length of the text on which a new reference is compared with the policy."""


class Policy(ComputeModel):
    """A model with the number of updates it has seen, and the log-probs that it gives to completions. See
    ``ComputeModel`` for its arguments."""

    routing: Routing | None = None
    """The mixtures of experts whose recorded routes its passes replay; None: all routers choose freely, those of
    references and snapshots too."""
    version = 0
    """Optimizer updates that these weights have seen. Completions carry it."""

    @functools.cached_property
    def passes(self) -> Passes:
        """How the trainer runs the model, chosen by a trial on a few tokens at the first access."""
        return choose_passes(self)

    def replay_routes(self) -> None:
        """Let passes route tokens by the experts of rows and prompts that have recorded some.

        Raises:
            ModelError: the model chooses its experts in a way that cannot be replayed.
        """
        self.routing = replayable(self.model, functools.partial(trial_logits, self))

    @contextlib.contextmanager
    def gradients_in_place(self) -> Iterator[None]:
        """See ``ComputeModel``. The passes are chosen before: their trial would end the block."""
        self.passes  # noqa: B018
        with super().gradients_in_place():
            yield

    def text_logits(self, input_ids: Tensor, *, keep: int, **arguments: Any) -> Any:
        """As ``logits``, computed as in an update: a model that also reads images runs its language model alone. The
        whole model may replace the embeddings of image tokens (Gemma 4)."""
        if not reads_images(getattr(self.model, "config", None)) or self.passes.head.linear is None:
            return self.logits(input_ids, keep=keep, **arguments)
        run = functools.partial(base_of(self.model).get_decoder(), input_ids=input_ids, **arguments)
        output: Any = call_gathered(self.model, run)
        hidden = output.last_hidden_state[:, -keep:]
        output.logits = self.passes.head.logits(hidden.flatten(0, 1), multiple=1).unflatten(0, hidden.shape[:2])
        return output

    def states(
        self,
        prefixes: Prefixes,
        rows: PackedRows,
        temperature: float,
        repetition_penalty: float = 1.0,
        most_tokens: int | None = None,
    ) -> CompletionStates:
        """The hidden states from which the log-probs of the drawn tokens of rows are computed.

        Args:
            prefixes: the prompts, from ``passes.read``.
            rows: what follows the prompts. Tokens outside a support count as impossible, so that everything computed is
                of the distribution that was drawn from.
            temperature: divides the logits, as in sampling.
            repetition_penalty: as in sampling; see ``Distribution``. 1: no penalty.
            most_tokens: longer rows are computed in pieces of at most as many tokens, if they can be. None: no row is.
        """
        if self.routing and rows.routes_T is not None:
            self.routing.check(rows.routes_T)
        hidden = hidden_in_pieces(self.passes, prefixes, rows, most_tokens)
        return CompletionStates(
            hidden.states,
            self.passes.head,
            Distribution(rows, prefixes.prompt_ids, temperature, repetition_penalty, self.device),
            hidden.router_logits,
            adds_gradient=self.adds_gradients,
        )

    def logps(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        temperature: float,
        supports: Sequence[Support | None] = (),
        repetition_penalty: float = 1.0,
        drawn: Sequence[Sequence[bool]] | None = None,
    ) -> TokenLogps:
        """Log-probs of the drawn tokens of completions, and statistics of the distributions they were drawn from.

        Args:
            prompt_ids, completion_ids: token ids of completions and of the prompt of each. Every completion has a drawn
                token. Equal prompts are computed once.
            temperature, repetition_penalty: as for ``states``.
            supports, drawn: as for ``PackedRows.of``.

        Returns:
            Flat in the order of the completions, float32 (float64 for a float64 policy). Gradients flow through the
            log-probs where gradients are enabled.
        """
        prompts = [tuple(ids) for ids in prompt_ids]
        index = {ids: number for number, ids in enumerate(dict.fromkeys(prompts))}
        rows = PackedRows.of([index[ids] for ids in prompts], completion_ids, supports, drawn)
        prefixes = self.passes.read(list(index), attached=True)
        return self.states(prefixes, rows, temperature, repetition_penalty).logps()

    def reference(self, *, moves: bool = False) -> Policy:
        """The present policy, to compare later policies with. With adapters that add nothing yet it is the same model
        without them; with others, a copy of what is trained beside the same frozen weights; otherwise a frozen copy.

        Args:
            moves: whether it will be moved toward the policy. Its weights then stay in the master dtype.

        Raises:
            ModelError: it computes something else than the policy does, or reads weights that will be trained.
        """
        if not has_adapters(self.model):
            found = self.copy_frozen()
            if not moves:
                keep_in_compute_dtype(found.model, self.precision)
        else:
            found = self._like(self.model, adapters=False) if adds_nothing(self.model) else self.snapshot()
        check_reference(found, self)
        return found

    def copy_frozen(self) -> Policy:
        """A copy of the present policy, in memory, that needs no gradients."""
        return self._like(copy.deepcopy(self.model).requires_grad_(requires_grad=False))

    def snapshot(self) -> Policy:
        """A copy of the present policy to sample from while this one is trained; ``take_weights`` renews it. Weights
        that are not trained are shared, not copied."""
        shared = {id(weight): weight for weight in self.model.parameters() if not weight.requires_grad}
        return self._like(copy.deepcopy(self.model, shared).requires_grad_(requires_grad=False))

    @torch.no_grad()
    def take_weights(self, other: Policy) -> None:
        """Copy the weights of the policy that this is a ``snapshot`` of."""
        for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
            if mine is not theirs:
                mine.copy_(theirs)
        self.version = other.version

    def weights_beside(self, other: Policy) -> dict[str, Tensor]:
        """The weights that this ``snapshot`` of a policy does not share with it, by name."""
        theirs = set(map(id, other.model.parameters()))
        return {name: weight for name, weight in self.model.named_parameters() if id(weight) not in theirs}

    def share_nothing(self, other: Policy) -> None:
        """Give this ``snapshot`` of a policy copies of the weights that it shares with it."""
        if len(self.weights_beside(other)) < len(list(self.model.named_parameters())):
            self.model = copy.deepcopy(self.model)
            vars(self).pop("passes", None)  # of the model before

    def _like(self, model: Any, *, adapters: bool = True) -> Policy:
        other = Policy(model, self.precision, dropout=self.dropout, adapters=adapters)
        for name in ("version", "native_kernels", "torch_compile"):
            setattr(other, name, getattr(self, name))
        return other

    @torch.no_grad()
    def move_toward(self, other: Policy, alpha: float) -> None:
        """Update each weight: self <- alpha * other + (1 - alpha) * self (TR-DPO, arXiv 2404.09656, soft update)."""
        for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):  # or shards of them
            mine.lerp_(theirs.to(mine.dtype), alpha)
        self.version = other.version


def trial_logits(policy: Policy) -> Tensor:
    """Of a few tokens, by the model's own forward pass in the update's mode."""
    with torch.random.fork_rng(), policy.training(), policy.compute():
        ids = torch.arange(3, device=policy.device)[None]
        return policy.model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


def check_reference(reference: Policy, policy: Policy) -> None:
    """Check on a few tokens that a new reference is the policy, and stays so while the policy is trained.

    Raises:
        ModelError: it is not, or does not.
    """
    if not hasattr(policy.model, "config"):  # a module that is no model of transformers cannot be tried
        return
    kind, tokens = type(policy.model).__name__, token_source(policy)(REFERENCE_TOKENS)
    with torch.enable_grad():
        found = own_logits(reference, tokens, len(tokens))
    trained = [weight for weight in policy.model.parameters() if weight.requires_grad]
    grads = torch.autograd.grad(found.sum(), trained, allow_unused=True) if found.requires_grad and trained else ()
    if any(grad is not None for grad in grads):
        raise ModelError(
            f"objective.beta needs a reference that stays as it is, and the copy of {kind} computes with weights that "
            "are trained: something in the model, such as a forward function that was replaced, holds the model itself"
        )
    with torch.no_grad():
        gap = float(relative_gaps(found, own_logits(policy, tokens, len(tokens))).median())
    if not gap <= MAX_GAP[policy.precision.compute]:
        raise ModelError(
            f"objective.beta needs a reference that computes what {kind} computes at the start, and the logits of "
            f"a few tokens are off by {gap:.2g}"
        )


def load_policy(model: Any, config: ModelConfig, model_config: Any, *, seed: int = 0) -> Policy:
    """Load the policy from a folder, a hub id, a loaded or a deferred model, with the settings' precision and options.

    Raises:
        ModelError: it cannot be loaded, or its adapters cannot train what they are on.
        NonFiniteError: a weight is NaN or infinite.
    """
    device = resolve_device(config.device)
    keep_freed_memory(device)
    precision = resolve_precision(config.precision, device, hidden_size(model_config))
    given, model = model, model.load() if isinstance(model, DeferredModel) else model
    quantized = config.quantization != "none" or getattr(model, "is_quantized", False)
    lora = lora_of(model, config.lora) if isinstance(model, str) else config.lora
    # With adapters, the weights move to the device afterwards: there the frozen ones are in the compute dtype only.
    place = torch.device("cpu") if lora.wanted and not quantized else device
    if isinstance(model, str):
        allowed = {name: getattr(config, name) for name in ("trust_remote_code", "allow_pickled_weights")}
        frozen = lora.wanted and not quantized
        model = load_model(
            base_path(model), precision, place, **allowed, quantization=config.quantization, frozen=frozen
        )
    else:
        check_given(model)
        if not getattr(model, "is_quantized", False):
            model.to(device=place, dtype=precision.master)
            if has_adapters(model):
                keep_in_compute_dtype(model, precision)
    freeze_the_rest(model)
    named = f"the model in {given!r}" if isinstance(given, str) else "the given model"
    check_finite_weights(dict(model.named_parameters()), named)
    if lora.wanted:
        if has_adapters(model):
            raise ModelError("the given model has adapters, and model.lora asks for others: unset model.lora")
        model = add_adapters(model, lora, precision, seed=seed, allow_pickled_weights=config.allow_pickled_weights)
        model = model if quantized else model.to(device)
    use_exact_products(model)
    if config.float32_head and precision.compute not in (torch.float32, torch.float64):
        use_float32_head(model)
    if config.gradient_checkpointing:
        enable_checkpointing(model)
    policy = Policy(model, precision, dropout=config.dropout)
    policy.native_kernels, policy.torch_compile = config.native_kernels, config.torch_compile
    if has_adapters(model):
        check_targets(model, functools.partial(trial_logits, policy))
    if config.router_aux_loss_coef:
        experts_per_token(model_config)
        policy.router_aux_loss_coef = config.router_aux_loss_coef
        if not policy.passes.shared:
            raise ModelError(
                f"model.router_aux_loss_coef needs packed completions, and here: {policy.passes.description}"
            )
    return policy


# ----------------------------------------
# A policy's weights as checkpoints name them, for engines in other processes.


def named_weights(policy: Policy, *, base: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, as ``save_pretrained`` writes them: adapters are merged, or left out with ``base``; a tied
    weight comes once, under the name of the embedding. Of a quantized base come the values that it stands for. The
    tensors are the policy's own where nothing was converted: read them before the next update. Weights that are divided
    over ranks have to be whole; see ``Layout.whole``."""
    model: Any = policy.model
    if base and has_adapters(model):
        model = model.get_base_model()
    elif has_adapters(model):
        model = merged(model)
    # Not state_dict(), before which FSDP2 divides the weights again.
    state = {
        name.replace(".base_layer.", "."): dequantized(parameter).detach()
        for name, parameter in model.named_parameters()
        if not (base and ".lora_" in name)
    }
    for prefix, module in model.named_modules():
        saved = module._buffers.keys() - module._non_persistent_buffers_set
        state |= {f"{prefix}.{name}".lstrip("."): module.get_buffer(name) for name in saved}
    yield from revert_weight_conversion(model, state).items()


def dequantized(weight: Tensor) -> Tensor:
    """The matrix that a weight of bitsandbytes stands for; any other weight as it is."""
    found: Any = weight
    match type(weight).__name__:
        case "Params4bit":
            from bitsandbytes.functional import dequantize_4bit

            found = dequantize_4bit(found.data, found.quant_state)
        case "Int8Params":
            from bitsandbytes.functional import int8_vectorwise_dequant

            found = int8_vectorwise_dequant(found.CB, found.SCB)
    return cast("Tensor", found)
