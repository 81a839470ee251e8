"""A baseline behind an OpenAI-compatible server: messages or text go out, texts come back.

Nothing here sees a token: prompts are the rows' messages or texts, lengths are those of the server's ``usage``, and
what needs token ids or log-probs is refused. The key of the server is read from ``OPENAI_API_KEY``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cohort.config import GRPOConfig, setting_names
from cohort.errors import ConfigError, EngineError
from cohort.evaluation.evaluate import eval_sampling
from cohort.flags import SamplingFlags
from cohort.rewards import RewardRunner
from cohort.rewards.functions import parameters_of
from cohort.rollout import RNGKey, Sampler, Sampling, Watch
from cohort.rollout.engine import samplings_of
from cohort.rollout.served.http import Client
from cohort.rollout.served.protocol import ServerError, reading
from cohort.types import Completion, FinishReason, Group, Prompt, Segment

ATTEMPTS = 6
"""How often a request is sent while the server is busy or fails."""
WAIT_SECONDS = 1.0
"""Between the first two; twice as long before each further one. A server may ask for another time (Retry-After)."""
BUSY = 429
NEWER_LIMIT = "max_completion_tokens"
"""What some models want in place of ``max_tokens``: they refuse it with a message that names this."""
MOST = 32
"""Requests at the same time at most: public servers count them."""
SECONDS = 600.0
"""Time limit of a request, and of a wait that a server asks for."""
POLL_SECONDS = 0.1
NO_TOKEN = -1
"""What stands for a token of a completion whose token ids are unknown."""
FINISHED = {"stop": FinishReason.EOS, "length": FinishReason.LENGTH}
"""OpenAI's "stop" is an end token or a stop string."""
MATCHED = ("stop_reason", "matched_stop")
"""Where vLLM and SGLang say which stop string they found."""
LOADING = ("engine", "precision", "device", "cache_tokens", "trust_remote_code", "allow_pickled_weights", "prefix")
"""Flags for models that are loaded here."""
EXTRA = {"top_k", "min_p", "repetition_penalty", "min_tokens", "structured_outputs"}
"""Fields that are not OpenAI's."""


def byte_tokenizer() -> Any:
    """A tokenizer for prompts that are not read by a model here: a token for each byte, and a template that writes the
    messages one below the other."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


def check_request(request: SamplingFlags, settings: GRPOConfig, *, acts: bool) -> None:
    """Refuse what would have no effect on a model behind an endpoint, or needs token ids.

    Args:
        request: the flags.
        settings: the settings.
        acts: there are tools or an environment.

    Raises:
        ConfigError: the request has such a flag or setting, or does not say how long completions are.
    """
    if acts:
        raise ConfigError("--endpoint samples texts of one turn: leave out tools and environments")
    if settings.eval.max_completion_length_eval is None:
        raise ConfigError("--endpoint needs --max-tokens: nobody here knows the model's context")
    loads = bool(getattr(request, "against", None))
    flags = ("checkpoint",) if loads else ("checkpoint", *LOADING)
    given = [f"--{name.replace('_', '-')}" for name in flags if getattr(request, name, None)]
    for name in () if loads else setting_names(getattr(request, "overrides", ())):
        given += [f"--{name}"] * (name == "rollout.engine" or name.startswith(("model.", "vllm.")))
    for name in ("chat_template", "max_prompt_length"):
        given += [f"data.{name}"] * (getattr(settings.data, name) is not None)
    if given:
        raise ConfigError(
            f"{', '.join(given)} would have no effect with --endpoint: the server loads the model, writes its prompts "
            "and counts their tokens. Leave them out, or set them to none"
        )


def check_rewards(rewards: RewardRunner) -> None:
    """Refuse reward functions that read token ids. Raises ``ConfigError``."""
    for function in rewards.functions:
        if function.per_token or "completion_ids" in {one.name for one in parameters_of(function.call)}:
            raise ConfigError(
                f"reward function {function.name} reads token ids, and an endpoint returns texts: evaluate a model "
                "that is loaded here"
            )


@dataclass
class EndpointModel:
    """What ``cohort eval`` and ``generate`` ask of a model, for one behind an endpoint.

    Args:
        url: of the API, as in "https://api.openai.com/v1".
        name: of the model there.
    """

    url: str
    name: str
    note: str = ""

    def __post_init__(self) -> None:
        self.tokenizer = byte_tokenizer()
        key = os.environ.get("OPENAI_API_KEY", "")
        self.client = Client(self.url, setting="--endpoint", public=True, key=key)

    def engine(self, settings: GRPOConfig, longest: int) -> EndpointSampler:  # noqa: ARG002 - the server knows its context
        """The sampler, which says what servers may not do as the settings ask."""
        fields, notes = fields_of(eval_sampling(settings)), []
        if extra := sorted(EXTRA & fields.keys()):
            notes.append(f"fields that are not OpenAI's, which some servers ignore: {', '.join(extra)}")
        if "stop" in fields:
            notes.append("texts lack the stop string that ended them, unless the server names it: vLLM and SGLang do")
        return EndpointSampler(self.client, self.name, min(MOST, settings.rollout.max_batch_size), notes)

    def sampler(self, engine: EndpointSampler) -> Sampler:
        """The engine, which knows nothing of episodes."""
        return engine


class EndpointSampler(Sampler):
    """Samples texts from an OpenAI-compatible server: ``/chat/completions`` for messages, ``/completions`` for text.

    Args:
        client: of the server.
        name: of the model.
        max_batch_size: requests under way at the same time.
        notes: for people, below the line that describes the model.

    A request is sent again while the server is busy or fails; see ``ATTEMPTS`` and ``WAIT_SECONDS``. ``generate``
    raises ``ConfigError`` when the server refuses a request, and ``EngineError`` when it keeps failing.
    """

    def __init__(self, client: Client, name: str, max_batch_size: int, notes: Sequence[str] = ()) -> None:
        self.client, self.name, self.max_batch_size, self.notes = client, name, max_batch_size, notes
        self._limit = "max_tokens"

    def describe_model(self) -> str:
        """Model and server, and the notes, each in a line."""
        line = f"model: {self.name} at {self.client.url}, at most {self.max_batch_size} requests at a time"
        return "\n".join([line, *self.notes])

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: Sampling | Sequence[Sampling],
        key: RNGKey,
        watch: Watch | None = None,
    ) -> list[Group]:
        """See ``Sampler``."""
        samplings, watch = samplings_of(prompts, num_generations, sampling), watch or Watch()
        done: list[dict[int, Completion]] = [{} for _ in prompts]
        stopped = Event()
        with ThreadPoolExecutor(self.max_batch_size) as threads:
            under_way: dict[Future[Completion], tuple[int, int]] = {
                threads.submit(self._draw, prompt, sample, one, key, stopped): (index, sample)
                for index, (prompt, one) in enumerate(zip(prompts, samplings, strict=True))
                for sample in range(num_generations)
            }
            try:
                while under_way:
                    for future in wait(under_way, POLL_SECONDS, FIRST_COMPLETED).done:
                        index, sample = under_way.pop(future)
                        done[index][sample] = future.result()
                        if watch.on_completion:
                            watch.on_completion(index, sample, done[index][sample])
                    if watch.cancelled and watch.cancelled():
                        break
            finally:
                stopped.set()
                for future in under_way:
                    future.cancel()
                while wait(under_way, POLL_SECONDS).not_done:  # again, for requests that were just connecting
                    self.client.disconnect()
        cancelled = _completion("", 0, FinishReason.CANCELLED)
        return [
            Group(prompt, tuple(found.get(sample, cancelled) for sample in range(num_generations)))
            for prompt, found in zip(prompts, done, strict=True)
        ]

    def close(self) -> None:
        """End the requests under way."""
        self.client.disconnect()

    def _draw(self, prompt: Prompt, sample: int, sampling: Sampling, key: RNGKey, stopped: Event) -> Completion:
        """One completion. Once ``stopped`` is set, no request is sent again."""
        path, body = request_of(prompt, sampling, key.request_seed(prompt.uid, sample, 0))
        attempt, pause = 0, 0.0
        while not stopped.wait(pause):
            sent = {self._limit if name == "max_tokens" else name: value for name, value in body.items()}
            try:
                answer = self.client.post(path, {"model": self.name, **sent}, timeout=SECONDS)
                return read_answer(self.client.url, path, answer, sampling.stop)
            except ServerError as error:
                if error.status == 400 and "max_tokens" in sent and NEWER_LIMIT in error.reason:
                    self._limit, pause = NEWER_LIMIT, 0.0
                    continue
                if not error.is_failure and error.status != BUSY:
                    raise ConfigError(f"{error}. The endpoint refuses what the settings ask for") from None
                attempt, pause = attempt + 1, WAIT_SECONDS * 2**attempt
                if error.retry_after is not None:
                    pause = max(0.0, error.retry_after)
                if attempt == ATTEMPTS:
                    raise EngineError(f"{error}, after {ATTEMPTS} attempts") from None
                if pause > SECONDS:
                    raise EngineError(f"{error}. It asks to wait for {pause:,.0f} s: try again then") from None
        raise EngineError("it was cancelled")


def fields_of(sampling: Sampling) -> dict[str, Any]:
    """The fields of a request that settings ask for. What is off is not sent: not every server knows fields beyond
    OpenAI's.

    >>> fields_of(Sampling(16, temperature=0.7, top_k=5))
    {'temperature': 0.7, 'max_tokens': 16, 'top_k': 5}
    """
    others: dict[str, tuple[Any, Any]] = {
        "top_p": (sampling.top_p, 1.0),
        "top_k": (sampling.top_k, 0),
        "min_p": (sampling.min_p, 0.0),
        "repetition_penalty": (sampling.repetition_penalty, 1.0),
        "min_tokens": (sampling.min_completion_length, 0),
        "stop": (list(sampling.stop), []),
    }
    fields: dict[str, Any] = {"temperature": sampling.temperature, "max_tokens": sampling.max_completion_length}
    fields |= {name: value for name, (value, off) in others.items() if value != off}
    if sampling.regex is not None:
        fields["structured_outputs"] = {"regex": sampling.regex}  # of vLLM; OpenAI has none
    if sampling.json_schema is not None:
        schema = {"name": "completion", "schema": json.loads(sampling.json_schema)}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def request_of(prompt: Prompt, sampling: Sampling, seed: int) -> tuple[str, dict[str, Any]]:
    """The route and the body of a request for a completion of a prompt.

    Raises:
        ConfigError: the row begins the answer, or has tools.
    """
    if prompt.prefill or prompt.template_arguments.get("tools"):
        raise ConfigError("an endpoint gets messages: rows whose answers are begun, or with tools, are not supported")
    body = {**fields_of(sampling), "seed": seed % 2**31}
    if prompt.is_conversation:
        return "/chat/completions", {"messages": list(prompt.prompt), **body}
    return "/completions", {"prompt": prompt.prompt, **body}


def read_answer(server: str, path: str, answer: Any, stop: Sequence[str] = ()) -> Completion:
    """The completion of an answer. One that ended for a reason that is neither "stop" nor "length", as by a filter of
    the server, is not scored.

    Args:
        server: its address, for errors.
        path: the route, for errors.
        answer: of the server.
        stop: the stop strings. Texts come back without the one that ended them; it is put back if the server says
            which it was.

    Raises:
        ServerError: the answer is malformed.
    """
    with reading(server, path, answer):
        (choice,) = answer["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        reason, count = FINISHED.get(choice["finish_reason"], FinishReason.ERROR), answer["usage"]["completion_tokens"]
        text, count = text or "", int(count)
        if not isinstance(text, str) or count < 0:
            raise ValueError("text and completion_tokens")
        matched = next((choice[name] for name in MATCHED if choice.get(name) in stop), None)
    return _completion(text + matched, count, FinishReason.STOP) if matched else _completion(text, count, reason)


def _completion(text: str, count: int, reason: FinishReason) -> Completion:
    """A completion whose tokens are unknown but for their number."""
    segment = Segment(np.full(count, NO_TOKEN, np.int64), None)
    return Completion((segment,), np.full(count, np.nan), reason, text, 0)
