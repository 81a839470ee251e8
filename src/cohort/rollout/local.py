"""The local engine: samples with the trainer's own weights, in the trainer's own process.

A prompt is computed once for its group. A row whose completion ended takes the next one at once; at the end the batch
shrinks. What computes the logits is a ``Backend``: the lean path where the model is Llama-like, else transformers'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cohort.errors import ConfigError, DataError
from cohort.policy import Policy, context_length
from cohort.rollout.backend import Backend, Capacity, order_after_removal
from cohort.rollout.budget import plan
from cohort.rollout.choose import choose_backend
from cohort.rollout.engine import Sampling, TokenEvent, Watch
from cohort.rollout.philox import RNGKey
from cohort.rollout.rows import Row, Rows
from cohort.rollout.sampling import Drawn, draw_tokens
from cohort.rollout.stops import StopStrings
from cohort.types import Completion, FinishReason, Group, Prompt


class LocalEngine:
    """Samples from a ``Policy``.

    Args:
        policy: whose weights are used; looked at in each call, so there is nothing to synchronise.
        tokenizer: decodes completions, for their text and for stop strings.
        end_token_ids: tokens that end a completion.
        max_batch_size: completions decoded at a time, at most.
        cache_tokens: tokens whose keys and values are held at a time, prompts' included. None: as many as half of the
            free memory holds when a call begins.
        native_kernels: see ``LeanBackend``.

    The last three change memory and time, never a draw (``native_kernels`` its rounding).
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any,
        end_token_ids: Sequence[int],
        *,
        max_batch_size: int = 256,
        cache_tokens: int | None = None,
        native_kernels: bool = True,
    ) -> None:
        self.policy = policy
        self.tokenizer = tokenizer
        self.end_token_ids = frozenset(end_token_ids)
        self.max_batch_size = max_batch_size
        self.cache_tokens = cache_tokens
        self.backend: Backend = choose_backend(policy, native_kernels=native_kernels)
        self._sampling = False
        self._stops: dict[tuple[str, ...], StopStrings] = {}

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: Sampling | Sequence[Sampling],
        key: RNGKey,
        watch: Watch | None = None,
    ) -> list[Group]:
        """See ``Engine.generate``.

        Raises:
            DataError: a prompt is empty, or does not fit the model's context with its completion.
            ConfigError: not even one completion fits ``cache_tokens``; a grammar does not compile.
        """
        if num_generations < 1:
            raise ConfigError(f"num_generations must be at least 1, got {num_generations}")
        if not prompts:
            return []
        samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(samplings) != len(prompts):
            raise ConfigError(f"{len(samplings)} sampling settings for {len(prompts)} prompts: give one, or one each")
        self._check(prompts, samplings)
        capacity = plan(
            [len(prompt.token_ids) for prompt in prompts],
            num_generations,
            max(one.max_completion_length for one in samplings),
            max_rows=self.max_batch_size,
            max_tokens=self.cache_tokens,
            token_bytes=self.backend.token_bytes,
            token_multiple=self.backend.token_multiple,
            device=self.policy.device,
        )
        if self._sampling:
            raise ConfigError(
                "this engine is sampling already: do not call it from who watches it, or make a second one"
            )
        work = _Work(self, prompts, num_generations, samplings, key, watch or Watch(), capacity)
        self._sampling = True
        try:
            self.backend.begin(capacity)
            work.run()
            completions = work.completions()
        finally:
            self._sampling = False
            self.backend.end()
        return [Group(prompt, tuple(done)) for prompt, done in zip(prompts, completions, strict=True)]

    def describe_model(self) -> str:
        """Model, numerics and way of sampling, a line each."""
        policy = self.policy
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in policy.model.parameters()]
        count, trained = sum(size for size, _ in sizes), sum(size for size, learns in sizes if learns)
        size = f"{count:,} parameters" + ("" if trained == count else f" ({trained:,} of them trained)")
        return (
            f"model: {type(policy.model).__name__}, {size}, {policy.precision}, on {policy.device}\n"
            f"sampler: {self.backend.description}"
        )

    def describe_ends(self) -> str:
        """The tokens that end a completion, in a line."""
        ends = [f"{self.tokenizer.convert_ids_to_tokens(end)!r} ({end})" for end in sorted(self.end_token_ids)]
        return f"end tokens: {', '.join(ends) or 'none: every completion runs to its limit'}"

    def _check(self, prompts: Sequence[Prompt], samplings: Sequence[Sampling]) -> None:
        context = context_length(self.policy.model.config)
        for prompt, sampling in zip(prompts, samplings, strict=True):
            length, limit = len(prompt.token_ids), sampling.max_completion_length
            if length and not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < self.policy.vocab_size:
                raise DataError(
                    f"prompt {prompt.uid} ({prompt.text[:60]!r}) has token ids from {min(prompt.token_ids)} to "
                    f"{max(prompt.token_ids)}, and the model has {self.policy.vocab_size} tokens: were tokens added to "
                    "the tokenizer without resizing the model's embeddings?"
                )
            if sampling.forced_ids and max(sampling.forced_ids) >= self.policy.vocab_size:
                raise ConfigError(
                    f"forced_ids holds {max(sampling.forced_ids)}, and the model has {self.policy.vocab_size} tokens"
                )
            if not length:
                raise DataError(f"prompt {prompt.uid} has no tokens")
            if context is not None and length + limit > context:
                raise DataError(
                    f"prompt {prompt.uid} ({prompt.text[:60]!r}) has {length} tokens, and a completion may have "
                    f"{limit} more: the model's context holds {context}. Shorten it, or lower max_completion_length"
                )

    def grammar(self, sampling: Sampling) -> Any:
        """The compiled grammar of a sampling setting, which allows its forced tokens; None without one."""
        if not sampling.constrained:
            return None
        from cohort.rollout.grammar import Grammar

        grammar = Grammar.of(self.tokenizer, sampling, sorted(self.end_token_ids), self.policy.vocab_size)
        matcher = grammar.matcher()
        for token in sampling.forced_ids:
            matcher.take(token)
        return grammar

    def stop_strings(self, stops: tuple[str, ...]) -> StopStrings:
        """Who looks for these stop strings. Kept from call to call, with what it has learnt of the vocabulary."""
        if stops not in self._stops:
            self._stops[stops] = StopStrings(self.tokenizer, stops)
        return self._stops[stops]


class _Work:
    """One call of ``generate``: the queue of completions to begin, and the rows that are being written."""

    def __init__(
        self,
        engine: LocalEngine,
        prompts: Sequence[Prompt],
        num_generations: int,
        samplings: Sequence[Sampling],
        key: RNGKey,
        watch: Watch,
        capacity: Capacity,
    ) -> None:
        self._engine, self._backend = engine, engine.backend
        self._prompts, self._samplings, self._watch, self._capacity = prompts, samplings, watch, capacity
        self._grammars = {one: engine.grammar(one) for one in dict.fromkeys(samplings)}
        # Prompts of like length one after another: what is held at the same time is padded little.
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index].token_ids))
        self._queue = deque((index, sample) for index in order for sample in range(num_generations))
        self._left = [num_generations] * len(prompts)  # completions of a prompt that have not ended
        self._held: list[int] = []  # which prompt stands at each place of the backend
        self._first_logits: dict[int, Tensor] = {}
        self._done: list[dict[int, Completion]] = [{} for _ in prompts]
        self._rows = Rows(
            capacity,
            key,
            sorted(engine.end_token_ids),
            engine.policy.vocab_size,
            keeps_seen=any(one.repetition_penalty != 1 for one in samplings),
            like=torch.empty(0, dtype=engine.policy.precision.master, device=engine.policy.device),
        )

    def run(self) -> None:
        """Until every completion has ended."""
        logits_SV: Tensor | None = None
        while (self._queue or len(self._rows)) and not (self._watch.cancelled and self._watch.cancelled()):
            new_SV = self._admit()
            parts = [part for part in (logits_SV, new_SV) if part is not None]
            drawn = self._draw(parts[0] if len(parts) == 1 else torch.cat(parts))
            tokens_S = drawn.tokens_S
            if ended := self._take(drawn):
                staying = order_after_removal(list(ended), len(tokens_S))
                self._end(ended)
                tokens_S = tokens_S[staying]
            logits_SV = self._backend.step(tokens_S) if len(self._rows) else None

    def completions(self) -> list[list[Completion]]:
        """Each prompt's, in the order of their numbers. What was called off is ended as it stands."""
        if len(self._rows):
            self._end(dict.fromkeys(range(len(self._rows)), FinishReason.CANCELLED))
        version = self._engine.policy.version
        for index, sample in self._queue:
            self._done[index][sample] = Completion.of_tokens((), (), FinishReason.CANCELLED, "", version)
        self._queue.clear()
        return [[done[sample] for sample in sorted(done)] for done in self._done]

    def _admit(self) -> Tensor | None:
        """Begin as many completions as there is room for; the logits that their first tokens are drawn from."""
        if len(self._rows) and not self._backend.refills:
            return None
        room = self._capacity.rows - len(self._rows)
        begun: list[tuple[int, int]] = []
        unknown: list[int] = []
        while self._queue and len(begun) < room:
            index, _ = self._queue[0]
            if index not in self._held and index not in unknown:
                if len(self._held) + len(unknown) == self._capacity.prompts or not self._fits_turn(unknown, index):
                    break
                unknown.append(index)
            begun.append(self._queue.popleft())
        if unknown:
            prompts = [self._prompts[index].token_ids for index in unknown]
            logits_PV = self._backend.prefill(prompts)
            self._held += unknown
            self._first_logits.update(zip(unknown, logits_PV, strict=True))
        if not begun:
            return None
        self._backend.add_rows([self._held.index(index) for index, _ in begun])
        self._rows.add([self._row(index, sample) for index, sample in begun])
        logits_SV = torch.stack([self._first_logits[index] for index, _ in begun])
        # A prompt's completions stand together in the queue: only the one at its head can have begun some and not all.
        waiting = self._queue[0][0] if self._queue else None
        self._first_logits = {index: logits for index, logits in self._first_logits.items() if index == waiting}
        return logits_SV

    def _fits_turn(self, others: Sequence[int], index: int) -> bool:
        if self._backend.mixed_lengths or not others:
            return True
        return len(self._prompts[others[0]].token_ids) == len(self._prompts[index].token_ids)

    def _row(self, index: int, sample: int) -> Row:
        sampling = self._samplings[index]
        grammar = self._grammars[sampling]
        matcher = None if grammar is None else grammar.matcher()
        return Row(index, sample, self._prompts[index], sampling, self._engine.stop_strings(sampling.stop), matcher)

    def _draw(self, logits_SV: Tensor) -> Drawn:
        rows = self._rows
        return draw_tokens(
            logits_SV,
            rows.uniforms(),
            rows.settings(),
            forbidden_SV=rows.forbidden(),
            seen_SV=rows.seen(),
            forced_S=rows.forced(),
        )

    def _take(self, drawn: Drawn) -> dict[int, FinishReason]:
        """Give the rows their tokens; which rows end with them, and why."""
        rows = self._rows
        rows.take(drawn)
        # One transfer to the host for all that is asked of a draw; float64 holds a token's number exactly.
        asked = (rows.ends_V[drawn.tokens_S], drawn.valid_S, drawn.tokens_S, drawn.logps_S)
        ends, valid, tokens, logps = torch.stack([column.double() for column in asked]).tolist()
        ended = {}
        for place, row in enumerate(rows.rows):
            if not valid[place]:
                ended[place] = FinishReason.ERROR
            elif ends[place]:
                ended[place] = FinishReason.EOS
            elif row.sampling.stop and self._has_stopped(place, row):
                ended[place] = FinishReason.STOP
            elif row.length == row.sampling.max_completion_length:
                ended[place] = FinishReason.LENGTH
            elif row.matcher is not None:
                row.matcher.take(int(tokens[place]))
        if self._watch.on_token:
            self._tell(tokens, logps, ended)
        return ended

    def _has_stopped(self, place: int, row: Row) -> bool:
        return row.length >= row.sampling.min_completion_length and row.stops.found(
            self._rows.tail(place, row.stops.tail)
        )

    def _tell(self, tokens: Sequence[float], logps: Sequence[float], ended: dict[int, FinishReason]) -> None:
        assert self._watch.on_token is not None
        for place, row in enumerate(self._rows.rows):
            reason = ended.get(place)
            if reason is not FinishReason.ERROR:
                event = TokenEvent(
                    row.prompt_index, row.sample, row.length - 1, int(tokens[place]), logps[place], reason
                )
                self._watch.on_token(event)

    def _end(self, ended: dict[int, FinishReason]) -> None:
        """Take rows out as completions, and prompts that no row needs any more."""
        places = list(ended)
        version = self._engine.policy.version
        completions = self._rows.completions(places, list(ended.values()), self._engine.tokenizer, version)
        for place, completion in zip(places, completions, strict=True):
            row = self._rows.rows[place]
            self._done[row.prompt_index][row.sample] = completion
            self._left[row.prompt_index] -= 1
            if self._watch.on_completion:
                self._watch.on_completion(row.prompt_index, row.sample, completion)
        self._rows.remove(places)
        self._backend.remove_rows(places)
        needed = {row.prompt_index for row in self._rows.rows}
        if self._backend.refills:
            needed |= {index for index in self._held if self._left[index]}
        unused = [place for place, index in enumerate(self._held) if index not in needed]
        if unused:
            self._backend.remove_prompts(unused)
            self._held = [self._held[place] for place in order_after_removal(unused, len(self._held))]
