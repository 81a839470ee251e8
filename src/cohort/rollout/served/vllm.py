"""vLLM: what a turn is called in its requests and answers, and its server over HTTP.

Read in vLLM 0.32. A server needs ``VLLM_SERVER_DEV_MODE=1``, which switches on its routes for weights, and
``--enable-scale-out``, for tokens in and tokens out. Weights in a folder need nothing else on a GPU. Broadcasts, and
models with a tied head on the CPU build, need the plugin in ``vllm_plugin``. Nothing here imports vLLM.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

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
    candidates_of,
    check_version,
    check_vocabulary,
    checked,
    reading,
    wants_support,
)

GENERATE = "/inference/v1/generate"
OLDEST = "0.32"
"""The first version whose answers name the weights that they come from."""
NO_TOKEN = 2**31 - 1
"""A token id that no model has."""
PLUGIN = Path(__file__).parent / "vllm_plugin"
PLUGIN_ARGUMENTS = (
    "--worker-extension-cls",
    "cohort_vllm.CohortWorker",
    "--weight-transfer-config",
    '{"backend": "cohort"}',
)
CONTINUATION = {"temperature": 1.0, "seed": 0, "ignore_eos": True, "detokenize": False}
"""A draw whose length is known."""


def sampling_parameters(draw: Draw, *, masks: bool) -> dict[str, Any]:
    """The ``SamplingParams`` of a turn.

    The end tokens are sent as stop tokens, and those of the server's own model are ignored: what ends a turn does not
    depend on the files that the server was started with. No default of the server applies to what is sent here.

    Args:
        draw: the turn.
        masks: whether what each draw could have given comes back by itself. vLLM then wants a ``top_k``, for which all
            tokens will do, and a temperature above 0.
    """
    sampling = draw.sampling
    parameters: dict[str, Any] = {
        "seed": draw.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "max_tokens": draw.max_tokens,
        "min_tokens": draw.min_tokens,
        "stop_token_ids": list(draw.end_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": bool(sampling.stop),
    }
    if masks:
        greedy = {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}
        parameters |= greedy if sampling.temperature == 0 else {"top_k": sampling.top_k or draw.vocab_size}
    elif wants_support(sampling):
        parameters["logprobs"] = candidates_of(sampling, draw.vocab_size)
    if sampling.stop:
        parameters |= {"stop": list(sampling.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
    if sampling.constrained:
        form = {"regex": sampling.regex} if sampling.regex is not None else {"json": sampling.json_schema}
        parameters["structured_outputs"] = form
    if draw.routes:
        parameters["routed_experts_prompt_start"] = 0
    return parameters


class VLLMServer(Client, Server):
    """A vLLM server."""

    masks = has_plugin = False
    any_token = -1
    """The ``top_k`` of a draw from all tokens."""

    @staticmethod
    def command(model: str = "MODEL", *options: str) -> str:
        """See ``Server``."""
        arguments = "--enable-scale-out --logprobs-mode processed_logprobs"
        return f"VLLM_SERVER_DEV_MODE=1 vllm serve {' '.join([model, arguments, *options])}"

    @classmethod
    def joining(cls) -> str:
        """See ``Server``: with the plugin."""
        plugin = [f"'{one}'" if " " in one else one for one in PLUGIN_ARGUMENTS]
        where = "on another machine, with a copy of the folder in PYTHONPATH"
        return f"start it with PYTHONPATH={PLUGIN} {cls.command('MODEL', *plugin)}; {where}"

    def describe(self) -> Description:
        """See ``Server``."""
        try:
            weights = self.text("/weight_info", "weight_version")
            config = self.get("/server_info?config_format=json")["vllm_config"]
            model, lora, transfer = config["model_config"], config["lora_config"], config["weight_transfer_config"]
            parallel = config["parallel_config"]
            sizes = [parallel[f"{name}_parallel_size"] for name in ("tensor", "pipeline", "data")]
            found = Description(
                weights,
                dtype=model["dtype"].removeprefix("torch."),
                device=config["device_config"]["device"],
                workers=int(np.prod(sizes)),
                context=model["max_model_len"],
                quantization=model["quantization"],
                masks=model["return_sampling_mask"],
                candidates=model["max_logprobs"],
                routes=config["aux_output_config"]["enable_return_routed_experts"],
                adapters=lora["max_lora_rank"] if lora else 0,
                can_sleep=model["enable_sleep_mode"],
                can_broadcast=bool(transfer) and transfer["backend"] == "cohort",
                has_tokenizer=not model["skip_tokenizer_init"],
            )
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ServerError(self.url, "/server_info", f"it describes itself in an unknown way ({error!r})") from None
        except ServerError as error:
            if error.status != 404:
                raise
            raise ConfigError(
                f"{self.url} has no routes for weights: set VLLM_SERVER_DEV_MODE=1 in its environment. Whoever "
                "reaches these routes controls the server, so let it listen on a private address"
            ) from None
        self.masks, self.has_plugin = found.masks, "Cohort" in str(parallel.get("worker_extension_cls"))
        return found

    def check(self, vocab_size: int) -> None:
        """See ``Server``."""
        self.any_token = vocab_size if self.masks else -1
        version = self.text("/version", "version")
        check_version(self.url, "vLLM", version, OLDEST)
        paused = self.get("/is_paused")
        if isinstance(paused, dict) and paused.get("is_paused"):  # by a run that was killed while it sent weights
            self.post("/resume")
        self._check_vocabulary(vocab_size)
        self._check_logps(vocab_size)

    def _check_vocabulary(self, vocab_size: int) -> None:
        answer = "it accepted an unknown token id"
        try:
            self._continued([0], 1, logprobs=0, logit_bias={str(NO_TOKEN): 0.0})
        except ServerError as error:
            if error.status == 404:
                raise ConfigError(f"{self.url} has no route {GENERATE}: start it with --enable-scale-out") from None
            if error.is_failure:
                raise
            answer = error.reason
        check_vocabulary(self.url, GENERATE, answer, r"[Vv]ocabulary size: (\d+)", vocab_size)

    def _check_logps(self, vocab_size: int) -> None:
        """Draw one token from the likeliest one: its log-prob is 0 under the distribution that it was drawn from.

        After some texts the two likeliest tokens can be equally likely, so a few are tried.
        """
        for divisor in (2, 3, 5, 7):
            _, (logp, *_) = self._content(self._continued([vocab_size // divisor], 1, logprobs=0, top_k=1))
            if abs(logp) < 1e-3:
                return
        raise ConfigError(
            f"{self.url} reports log-probs of another distribution than the one that it draws from: start it with "
            "--logprobs-mode processed_logprobs"
        )

    def generate(self, draw: Draw, version: str, timeout: float) -> Drawn:
        """See ``Server``."""
        body = {"token_ids": draw.token_ids, "sampling_params": sampling_parameters(draw, masks=self.masks)}
        answer = self.post(GENERATE, body | self._model(), timeout=timeout)
        with reading(self.url, GENERATE, answer):
            (choice,) = answer["choices"]
            content, spans = choice["logprobs"]["content"], choice["weight_versions"]
            routes = choice.get("routed_experts")
            raw = RawTurn(
                choice["token_ids"],
                [float(one["logprob"]) for one in content],
                [one["token_id"] for one in content],
                choice["finish_reason"],
                choice["stop_reason"],
                frozenset(span["version"] for span in spans or ()),
                choice.get("sampling_mask"),
                [{one["token_id"]: one["logprob"] for one in each.get("top_logprobs") or ()} for each in content],
                np.load(io.BytesIO(base64.b64decode(routes)), allow_pickle=False) if routes else None,
            )
            return checked(draw, raw, version, self.url, GENERATE)

    def score(self, token_ids: Sequence[int], count: int) -> tuple[list[float], list[int], list[float]]:
        """See ``Server``."""
        scored = self._continued(token_ids, 1, prompt_logprobs=0)
        drawn, logps = self._content(self._continued(token_ids, count, logprobs=0))
        with reading(self.url, GENERATE, scored):
            entries = zip(token_ids[1:], scored["prompt_logprobs"][1:], strict=True)
            return [float(entry[str(token)]["logprob"]) for token, entry in entries], drawn, logps

    def load(self, update: Update, version: str) -> None:
        """See ``Server``."""
        # Nobody waits for requests that may be left over; the answers to aborted ones are dropped.
        self.post("/pause", mode="abort")
        if self.asleep:
            self.post("/wake_up", tags="weights")
        if update.adapter:
            self._adapt(update)
        elif update.folder:
            self._reload(update)
        else:
            self.post("/start_weight_update", timeout=update.timeout)
            update.begin()
            self.post("/update_weights", {"update_info": update.tensors}, timeout=update.timeout)
            self.post("/finish_weight_update", {"weight_version": version}, timeout=update.timeout)
        if self.asleep:  # the cache was not there while weights were sent
            self.post("/wake_up", tags="kv_cache")
            self.asleep = False
        self.post("/update_weight_version", {"new_version": version})
        self.post("/reset_prefix_cache")  # what it holds belongs to the previous weights
        self.post("/resume")
        if (found := self.text("/weight_info", "weight_version")) != version:
            raise ServerError(self.url, "/weight_info", f"it reports weights {found!r}, not {version!r}")

    def _reload(self, update: Update) -> None:
        """Load a folder's weights: by the plugin if the server has it, else by vLLM's own method."""
        self.adapter = ""
        method, argument = ("cohort_load", "folder") if self.has_plugin else ("reload_weights", "weights_path")
        body = {"method": method, "kwargs": {argument: update.folder}}
        self.post("/collective_rpc", body, timeout=update.timeout)

    def _adapt(self, update: Update) -> None:
        """Load an adapter in place of the previous one."""
        # Under a new name: one that is loaded in place is read from its folder again by each request.
        body = {"lora_name": update.adapter, "lora_path": update.folder}
        if self.adapter:
            old, self.adapter = {"lora_name": self.adapter}, ""
            with suppress(ServerError):  # it was started again
                self.post("/v1/unload_lora_adapter", old, plain=True)
        try:
            self.post("/v1/load_lora_adapter", body, timeout=update.timeout, plain=True)
        except ServerError as error:
            if error.status != 404:
                raise
            needed = "set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, or leave out --enable-lora"
            raise ServerError(self.url, "/v1/load_lora_adapter", f"it loads no adapters: {needed}", 404) from None
        self.adapter = update.adapter

    def join(self, meeting: Mapping[str, Any]) -> None:
        """See ``Server``."""
        self.post("/init_weight_transfer_engine", {"init_info": meeting}, timeout=meeting["timeout"])

    def leave(self) -> None:
        """See ``Server``."""
        self.post("/shutdown_weight_transfer_engine", timeout=5.0)

    def sleep(self) -> None:
        """See ``Server``."""
        self.post("/sleep", level="2")
        self.asleep = True

    def _model(self) -> dict[str, str]:
        return {"model": self.adapter} if self.adapter else {}

    def _continued(self, token_ids: Sequence[int], max_tokens: int, **parameters: Any) -> Any:
        """The answer to a request to continue a text."""
        settings = {**CONTINUATION, "max_tokens": max_tokens, "top_k": self.any_token, **parameters}
        return self.post(GENERATE, {"token_ids": token_ids, "sampling_params": settings} | self._model())

    def _content(self, answer: Any) -> tuple[list[int], list[float]]:
        """The tokens and log-probs of an answer."""
        with reading(self.url, GENERATE, answer):
            content = answer["choices"][0]["logprobs"]["content"]
            return [int(one["token_id"]) for one in content], [float(one["logprob"]) for one in content]
