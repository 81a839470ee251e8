"""A causal language model as a policy: what it is, and the log-probabilities it gives to completions."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from cohort.policy.load import Precision
from cohort.types import Support


class Policy:
    """A model with the dtype it computes in and the number of updates it has seen.

    Args:
        model: a transformers causal language model. Used as it is, not copied: training it changes it.
        precision: what it computes in.
        dropout: False sets every dropout of the model to 0, the attention's too.

    The model stands in evaluation mode except inside ``training()``.
    """

    def __init__(self, model: Any, precision: Precision, *, dropout: bool = False) -> None:
        self.model = model.eval()
        self.precision = precision
        self.version = 0
        """Optimizer updates these weights have seen. Completions carry it."""
        if not dropout:
            disable_dropout(model)
        # An adapter's wrapper passes on what it does not name itself.
        wrapped = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.forward_arguments = frozenset(inspect.signature(wrapped.forward).parameters)
        """Names that the model's forward takes."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return torch.device(next(self.model.parameters()).device)

    @property
    def vocab_size(self) -> int:
        """V: how many logits the model gives."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @contextlib.contextmanager
    def compute(self) -> Iterator[None]:
        """Run the model in its compute dtype. Weights are cast once per block, not once per call inside it."""
        if self.precision.compute == self.precision.master:
            yield
        else:
            with torch.autocast(self.device.type, self.precision.compute):
                yield

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Training mode for the update (gradient checkpointing and dropout need it); evaluation mode again after."""
        self.model.train()
        try:
            yield
        finally:
            self.model.eval()

    def logits(self, input_ids: Tensor, *, keep: int, **arguments: Any) -> Any:
        """The model's output with logits of the last ``keep`` positions only, where the model can leave out the
        rest."""
        if "logits_to_keep" in self.forward_arguments:
            arguments["logits_to_keep"] = keep
        output = self.model(input_ids=input_ids, **arguments)
        if output.logits.shape[1] != keep:
            output.logits = output.logits[:, -keep:]
        return output

    def completion_logits(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        supports: Sequence[Support | None] = (),
        repetition_penalty: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """``(logits_NV, targets_N)``: the logits that each completion token was drawn from, before the temperature, and
        the tokens, flat in sequence order.

        Args:
            prompt_ids, completion_ids: the token ids of S completions and of their prompts. No completion may be empty.
            supports: what their tokens were drawn from. The logits of all other tokens are -inf, so that whatever is
                computed from them is of the distribution drawn from. Empty: the whole vocabulary.
            repetition_penalty: as it was in sampling; see ``penalized``. 1: none.
        """
        shortest = min(map(len, prompt_ids))
        rows = [torch.tensor([*p, *c]) for p, c in zip(prompt_ids, completion_ids, strict=True)]
        # Padded on the right without an attention mask: under causal attention no real token sees what follows it.
        input_ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        # Logit t predicts token t+1, so the first one needed belongs to the shortest prompt's last token.
        keep = input_ids.shape[1] - shortest + 1
        taken = torch.zeros(len(rows), keep, dtype=torch.bool)
        for row, (prompt, completion) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
            start = len(prompt) - shortest
            taken[row, start : start + len(completion)] = True
        targets_N = torch.cat([torch.tensor(c) for c in completion_ids]).to(self.device)
        with self.compute():
            logits = self.logits(input_ids.to(self.device), keep=keep, use_cache=False).logits
        logits_NV = logits[taken.to(self.device)]
        if repetition_penalty != 1:
            logits_NV = penalized(logits_NV, prompt_ids, completion_ids, repetition_penalty)
        if any(support is not None for support in supports):
            outside_NV = outside(supports, completion_ids, logits_NV.shape[-1], logits_NV.device)
            logits_NV.masked_fill_(outside_NV, -torch.inf)
        return logits_NV, targets_N

    def logps(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        temperature: float,
        supports: Sequence[Support | None] = (),
        repetition_penalty: float = 1.0,
    ) -> TokenLogps:
        """Log-probs of completions' tokens, and statistics of the distributions they were drawn from.

        Args:
            prompt_ids, completion_ids: the token ids of S completions and of their prompts. No completion may be empty.
            temperature: divides the logits, as it did in sampling.
            supports, repetition_penalty: as ``completion_logits`` takes them.

        Returns:
            Flat in sequence order, float32 (float64 for a float64 policy). Gradients flow through the log-probs when
            they are enabled.
        """
        logits_NV, targets_N = self.completion_logits(prompt_ids, completion_ids, supports, repetition_penalty)
        return chunked_logps(logits_NV, targets_N, temperature)

    def copy_frozen(self) -> Policy:
        """A copy of the policy as it is now, in memory, that needs no gradients: the reference."""
        model = copy.deepcopy(self.model)
        model.requires_grad_(False)
        frozen = Policy(model, self.precision, dropout=True)  # as the copied model has it
        frozen.version = self.version
        return frozen

    @torch.no_grad()
    def move_toward(self, other: Policy, alpha: float) -> None:
        """Move weight by weight: self <- alpha * other + (1 - alpha) * self (TR-DPO, arXiv 2404.09656, soft update)."""
        for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
            mine.lerp_(theirs.to(mine.dtype), alpha)
        self.version = other.version


def outside(
    supports: Sequence[Support | None], completion_ids: Sequence[Sequence[int]], vocabulary: int, device: torch.device
) -> Tensor:
    """Which tokens each completion token could not have been, boolean, shape ``[N, V]``.

    >>> support = Support(np.array([1, 0], np.int32), np.array([1, 1], np.int32), np.array([False, True]))
    >>> outside([support], [(1, 2)], vocabulary=3, device=torch.device("cpu"))
    tensor([[ True, False,  True],
            [ True, False, False]])
    """
    nothing = np.zeros(0, np.int32)
    pairs = list(zip(supports, completion_ids, strict=True))
    assert all(support is None or len(support.counts_N) == len(ids) for support, ids in pairs)
    ragged = [
        (nothing, np.zeros(len(ids), np.int32), np.ones(len(ids), np.bool_))  # nothing is excluded
        if support is None
        else (support.token_ids_K, support.counts_N, support.excluded_N)
        for support, ids in pairs
    ]
    token_ids_K, counts_N, excluded_N = (
        torch.from_numpy(np.concatenate(parts)).to(device) for parts in zip(*ragged, strict=True)
    )
    row_K = torch.arange(len(counts_N), device=device).repeat_interleave(counts_N)
    outside_NV = excluded_N.logical_not()[:, None].repeat(1, vocabulary)
    outside_NV[row_K, token_ids_K.long()] = excluded_N[row_K]
    return outside_NV


def penalized(
    logits_NV: Tensor, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]], penalty: float
) -> Tensor:
    """Logits with those of tokens that stand in the prompt or earlier in the completion divided by ``penalty`` where
    positive and multiplied where negative; in float32 or better, as the sampler does it. Differentiable.

    Source: CTRL (arXiv 1909.05858) 4.1; transformers' ``RepetitionPenaltyLogitsProcessor``.
    """
    vocabulary, device = logits_NV.shape[-1], logits_NV.device
    pieces = []
    for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
        # From which token of the completion on each token of the vocabulary has been seen. An id that the head has no
        # logit for falls off the end.
        places = torch.arange(1 - len(prompt), len(completion) + 1, device=device).clamp(min=0)
        ids = torch.tensor([*prompt, *completion], device=device).clamp(max=vocabulary)
        since_V = places.new_full((vocabulary + 1,), len(completion)).scatter_reduce_(0, ids, places, "amin")[:-1]
        pieces.append(since_V <= torch.arange(len(completion), device=device)[:, None])
    wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    return penalized_where(torch.cat(pieces), wide_NV, penalty)


def penalized_where(seen_NV: Tensor, logits_NV: Tensor, penalty: Tensor | float) -> Tensor:
    """The repetition penalty, in sampling and in the update alike: seen tokens' logits divided by it where they are
    positive and multiplied where negative."""
    return torch.where(seen_NV, torch.where(logits_NV < 0, logits_NV * penalty, logits_NV / penalty), logits_NV)


HEAD_CHUNK = 1024
"""Tokens whose vocabulary-wide float32 tensors exist at one time. Memory only."""


class TokenLogps(NamedTuple):
    """Shape ``[N]`` each; only the first has a gradient."""

    logps_N: Tensor
    """``log softmax(logits / temperature)`` at the sampled token."""
    entropy_N: Tensor
    """``-sum_v p_v log p_v`` over what was drawn from, in nats."""
    collision_N: Tensor
    """``sum_v p_v^2``: the chance that two draws agree."""


def chunked_logps(logits_NV: Tensor, targets_N: Tensor, temperature: float) -> TokenLogps:
    """``sampled_logps`` in chunks of tokens, each computed again in the backward pass: of the vocabulary-wide tensors
    only the logits, as the model gave them, live for all tokens.
    """
    pieces = [
        torch.utils.checkpoint.checkpoint(
            sampled_logps, logits, targets, temperature, use_reentrant=False, preserve_rng_state=False
        )
        for logits, targets in zip(logits_NV.split(HEAD_CHUNK), targets_N.split(HEAD_CHUNK), strict=True)
    ]
    return TokenLogps(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


def chunked_terms(
    term: Callable[..., Tensor], temperature: float, logits_NV: Sequence[Tensor], others_N: Sequence[Tensor]
) -> Tensor:
    """The sum of a differentiable term over the vocabulary, in chunks like ``chunked_logps``.

    Args:
        term: takes the log-probs of a chunk under each model, then the chunk of each of ``others_N``; gives a number.
        temperature: divides the logits.
        logits_NV: of one or more models, for the same tokens.
        others_N: more tensors per token.
    """

    def piece(*parts: Tensor) -> Tensor:
        log_probs = [scaled_log_probs(logits, temperature) for logits in parts[: len(logits_NV)]]
        return term(*log_probs, *parts[len(logits_NV) :])

    total = logits_NV[0].new_zeros((), dtype=torch.promote_types(logits_NV[0].dtype, torch.float32))
    for parts in zip(*(values.split(HEAD_CHUNK) for values in (*logits_NV, *others_N)), strict=True):
        total = total + torch.utils.checkpoint.checkpoint(piece, *parts, use_reentrant=False, preserve_rng_state=False)
    return total


def scaled_log_probs(logits_NV: Tensor, temperature: float) -> Tensor:
    """``log softmax(logits / temperature)`` in float32 or better, shape ``[N, V]``."""
    wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    return torch.log_softmax(wide_NV / temperature, dim=-1)


def sampled_logps(logits_NV: Tensor, targets_N: Tensor, temperature: float) -> TokenLogps:
    """Log-probs, entropies and collision probabilities of logits of shape ``[N, V]``; see ``TokenLogps``.

    >>> sampled_logps(torch.zeros(1, 4), torch.tensor([2]), temperature=1.0)
    TokenLogps(logps_N=tensor([-1.3863]), entropy_N=tensor([1.3863]), collision_N=tensor([0.2500]))
    """
    if logits_NV.dtype != torch.float64:
        logits_NV = logits_NV.float()
    scaled_NV = logits_NV / temperature
    logps_N = scaled_NV.gather(-1, targets_N[:, None]).squeeze(-1) - torch.logsumexp(scaled_NV, dim=-1)
    with torch.no_grad():
        log_probs_NV = torch.log_softmax(scaled_NV, dim=-1)
        probs_NV = log_probs_NV.exp()
        collision_N = (probs_NV * probs_NV).sum(-1)
        # clamp: a token that cannot occur has log-prob -inf, and 0 * -inf is not 0.
        entropy_N = -(probs_NV * log_probs_NV.clamp(min=torch.finfo(log_probs_NV.dtype).min)).sum(-1)
    return TokenLogps(logps_N, entropy_N, collision_N)


def enable_checkpointing(model: Any) -> None:
    """Recompute activations in the backward pass. Sampling keeps its cache: it runs in evaluation mode, where
    transformers does not checkpoint.
    """
    if hasattr(model, "activation_checkpointing_enable"):  # transformers' new name for it
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability of a model to 0: ``nn.Dropout`` modules, and the floats that attention modules read
    (``attention_dropout`` and the like), which are not modules at all.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
