"""SGLang: what a turn is called in its requests and answers, and its server over HTTP.

Read in SGLang 0.5.23; nothing here imports it. What its source says, where it differs from vLLM's:

- ``output_token_logprobs`` are of the softmax at the request's temperature *before* top-k, top-p and min-p, or at
  temperature 1 with ``SGLANG_RETURN_ORIGINAL_LOGPROB``. ``return_sampling_mask`` gives the tokens that a draw could
  have given and the log-prob among them. It takes a ``top_k`` of at most ``--sampling-mask-max-tokens``.
- ``top_k`` is -1 for all tokens; 0 is an error. ``sampling_seed`` counts only with
  ``--enable-deterministic-inference``.
- ``ignore_eos`` switches ``stop_token_ids`` off as well. Without it the end tokens of the server's own model end a
  turn, too; one that is not the policy's is an error of that turn.
- The repetition penalty leaves the prompt out, and a stop string ends a turn before ``min_new_tokens``.
- ``routed_experts`` come as bytes without a shape, and are not read here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cohort.errors import ConfigError
from cohort.rollout.served.http import Client
from cohort.rollout.served.protocol import (
    Description,
    Draw,
    Drawn,
    RawTurn,
    Server,
    ServerError,
    Update,
    check_version,
    check_vocabulary,
    checked,
    reading,
)
from cohort.rollout.settings import Sampling

GENERATE = "/generate"
OLDEST = "0.5.23"
"""The version that was read."""
NO_TOKEN = 2**31 - 1
"""A token id that no model has."""
FLAT = 1e6
"""A temperature at which all tokens are equally likely."""
ASLEEP = "cohort: asleep"
"""The label of a server without weights. Waking one that is awake would end its process."""
PART = 2**29
"""Numbers in the weights that one request receives. A server holds them beside its own."""
CONTINUATION = {"temperature": 1.0, "top_k": -1, "ignore_eos": True}
"""A draw whose length is known."""


def sampling_parameters(draw: Draw) -> dict[str, Any]:
    """SGLang's ``SamplingParams`` of a turn."""
    sampling, ends = draw.sampling, list(draw.end_token_ids)
    parameters: dict[str, Any] = {
        "sampling_seed": draw.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or (draw.vocab_size if sampling.selects else -1),
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "max_new_tokens": draw.max_tokens,
        "min_new_tokens": draw.min_tokens if ends else 0,
        "stop_token_ids": ends,
        "ignore_eos": not ends,
        "stop": list(sampling.stop),
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    if sampling.regex is not None:
        parameters["regex"] = sampling.regex
    if sampling.json_schema is not None:
        parameters["json_schema"] = sampling.json_schema
    return parameters


class SGLangServer(Client, Server):
    """An SGLang server."""

    options = {  # noqa: RUF012 - as in ``Server``
        "context": "--context-length",
        "sleep": "start it with --enable-memory-saver",
        "routes": "use vLLM",
    }
    joins_as_torch = True
    group = ""
    """The name of the group that it is in with the trainer."""
    most = 0
    """Tokens that a mask holds at most."""

    @staticmethod
    def command(model: str = "MODEL", *options: str) -> str:
        """See ``Server``."""
        return " ".join([f"python -m sglang.launch_server --model-path {model} --dtype bfloat16", *options])

    @classmethod
    def joining(cls) -> str:
        """See ``Server``."""
        return "start it without data or pipeline parallelism (--dp-size 1 --pp-size 1)"

    def describe(self) -> Description:
        """See ``Server``."""
        weights, info = self.text("/model_info", "weight_version"), self.get("/server_info")
        try:
            self.most, dtype = int(info["sampling_mask_max_tokens"]), info["dtype"]
            found = Description(
                weights,
                dtype={"half": "float16", "float": "float32"}.get(dtype, dtype),
                device=info["device"],
                workers=info["tp_size"],
                context=info["max_req_input_len"],  # it takes prompts of that length, and 4 tokens more in all
                quantization=info["quantization"],
                masks=True,
                can_sleep=info["enable_memory_saver"],
                can_broadcast=info["dp_size"] == info["pp_size"] == 1,
                has_tokenizer=not info["skip_tokenizer_init"],
            )
        except (TypeError, KeyError, ValueError) as error:
            raise ServerError(self.url, "/server_info", f"it describes itself in an unknown way ({error!r})") from None
        if dtype == "auto":
            raise ConfigError(f"{self.url} does not say which dtype it has: start it with --dtype bfloat16")
        return found

    def check(self, vocab_size: int) -> None:
        """See ``Server``."""
        version = self.text("/server_info", "version")
        check_version(self.url, "SGLang", version, OLDEST)
        # A run that was killed may have left it asleep, or paused while it sent weights. Each rank is here, and waking
        # it twice would end its process: the first weights wake it, and the probe follows them.
        if self.text("/model_info", "weight_version") == ASLEEP:
            return
        self.post("/continue_generation", {})
        self._check_vocabulary(vocab_size)
        _, ((logp, _),) = self._continued([vocab_size // 2], 1, temperature=FLAT)
        if abs(logp + math.log(vocab_size)) > 0.01:
            raise ConfigError(
                f"{self.url} reports log-probs of another distribution than the one that it draws from: start it "
                "without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )

    def _check_vocabulary(self, vocab_size: int) -> None:
        answer = "it accepted an unknown token id"
        try:
            self._continued([0], 1, logit_bias={str(NO_TOKEN): 0.0})
        except ServerError as error:
            if error.is_failure:
                raise
            answer = error.reason
        check_vocabulary(self.url, GENERATE, answer, r"keys in \[0, (\d+)\]", vocab_size, above=1)  # it is the last id

    def refusal(self, sampling: Sampling, vocab_size: int) -> str:
        """See ``Server``."""
        if sampling.repetition_penalty != 1:
            return "rollout.repetition_penalty: SGLang does not count the prompt's tokens; use vLLM"
        if sampling.stop and sampling.min_completion_length:
            return "SGLang ends a completion at a stop string before rollout.min_completion_length; use vLLM"
        wanted = sampling.top_k or vocab_size
        if sampling.selects and wanted > self.most:
            return (
                f"it returns at most {self.most} tokens that a draw could have given, and {wanted} are needed: start "
                f"it with --sampling-mask-max-tokens {wanted}, or set rollout.top_k, such as 50"
            )
        return ""

    def generate(self, draw: Draw, version: str, timeout: float) -> Drawn:
        """See ``Server``."""
        if refusal := self.refusal(draw.sampling, draw.vocab_size):
            raise ServerError(self.url, GENERATE, refusal, 400)
        body = {"input_ids": draw.token_ids, "sampling_params": sampling_parameters(draw), "return_logprob": True}
        answer = self.post(GENERATE, body | {"return_sampling_mask": draw.sampling.selects}, timeout=timeout)
        with reading(self.url, GENERATE, answer):
            told = answer["meta_info"]
            pairs, finish = told["output_token_logprobs"], told["finish_reason"]
            masks = told["output_token_sampling_mask"] if draw.sampling.selects else None
            logps = told["output_token_sampling_logprobs"] if draw.sampling.selects else [one[0] for one in pairs]
            if len(logps) != len(pairs):
                raise ValueError(f"{len(logps)} log-probs of {len(pairs)} tokens")
            raw = RawTurn(
                answer["output_ids"],
                [math.nan if one is None else float(one) for one in logps],
                [one[1] for one in pairs],
                finish["type"],
                finish.get("matched"),
                frozenset(span["version"] for span in told["weight_versions"]),
                masks,
            )
        return checked(draw, raw, version, self.url, GENERATE)

    def score(self, token_ids: Sequence[int], count: int) -> tuple[list[float], list[int], list[float]]:
        """See ``Server``."""
        text, _ = self._continued(token_ids, 1, start=0)
        _, drawn = self._continued(token_ids, count)
        if [token for _, token in text] != list(token_ids):
            raise ServerError(self.url, GENERATE, "the log-probs are of another text than the one that was sent")
        return [logp for logp, _ in text[1:]], [token for _, token in drawn], [logp for logp, _ in drawn]

    def load(self, update: Update, version: str) -> None:
        """See ``Server``."""
        self.post("/pause_generation", {"mode": "abort"})
        woken = self._wake("weights")
        if update.folder:
            body = {"model_path": update.folder, "flush_cache": False}
            self.post("/update_weights_from_disk", body, timeout=update.timeout)
        else:
            self._receive(update)
        if woken:  # the cache was not there while weights were sent
            self._wake("kv_cache", "cuda_graph")
        self.post("/update_weight_version", {"new_version": version})
        self.post("/flush_cache", plain=True)  # what it holds belongs to the previous weights
        self.post("/continue_generation", {})
        if (found := self.text("/model_info", "weight_version")) != version:
            raise ServerError(self.url, "/model_info", f"it reports weights {found!r}, not {version!r}")

    def _receive(self, update: Update) -> None:
        try:
            self.post("/begin_weight_update", {}, timeout=update.timeout)
        except ServerError as error:
            if error.status != 400:
                raise
            self.post("/end_weight_update", {}, timeout=update.timeout)  # of one that was interrupted
            self.post("/begin_weight_update", {}, timeout=update.timeout)
        update.begin()
        for part in _parts(update.tensors):
            body = {**part, "group_name": self.group, "flush_cache": False}
            self.post("/update_weights_from_distributed", body, timeout=update.timeout)
        self.post("/end_weight_update", {}, timeout=update.timeout)

    def join(self, meeting: Mapping[str, Any]) -> None:
        """See ``Server``."""
        body = {"master_address": meeting["host"], "master_port": meeting["port"], "rank_offset": 1}
        body |= {"world_size": meeting["size"], "backend": meeting["backend"], "group_name": meeting["name"]}
        self.post("/init_weights_update_group", body, timeout=meeting["timeout"])
        self.group = meeting["name"]

    def leave(self) -> None:
        """See ``Server``."""
        self.post("/destroy_weights_update_group", {"group_name": self.group}, timeout=5.0)

    def sleep(self) -> None:
        """See ``Server``."""
        # With a request under way, its process would end.
        self.post("/pause_generation", {"mode": "abort"})
        if self.text("/model_info", "weight_version") != ASLEEP:
            self.post("/release_memory_occupation", {})
            self.post("/update_weight_version", {"new_version": ASLEEP})

    def _wake(self, *tags: str) -> bool:
        """Bring parts of its memory back; returns whether it was asleep."""
        asleep = self.text("/model_info", "weight_version") == ASLEEP
        if asleep:
            self.post("/resume_memory_occupation", {"tags": tags})
        return asleep

    def _continued(
        self, token_ids: Sequence[int], count: int, *, start: int = -1, **parameters: Any
    ) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
        """The log-probs and tokens of a text from ``start`` on, and of ``count`` tokens after it. The first token of a
        text has the log-prob 0."""
        settings = {**CONTINUATION, "max_new_tokens": count, **parameters}
        body = {"input_ids": token_ids, "sampling_params": settings, "return_logprob": True, "logprob_start_len": start}
        answer = self.post(GENERATE, body)
        with reading(self.url, GENERATE, answer):
            told = answer["meta_info"]
            text, drawn = told.get("input_token_logprobs") or [], told["output_token_logprobs"]
            return [(float(one[0] or 0), one[1]) for one in text], [(float(one[0]), one[1]) for one in drawn]


def _parts(tensors: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, list[Any]]]:
    """The names, dtypes and shapes of weights, for requests of about ``PART`` numbers."""
    part: dict[str, list[Any]] = {name: [] for name in tensors}
    for row in zip(*tensors.values(), strict=True):
        for kept, one in zip(part.values(), row, strict=True):
            kept.append(one)
        if sum(math.prod(shape) for shape in part["shapes"]) >= PART:
            yield part
            part = {name: [] for name in tensors}
    if part["names"]:
        yield part
