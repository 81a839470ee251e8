"""A stand-in for vLLM: the routes that the engine uses, over a tiny transformers model in float32, with faults on demand.

It draws with one forward pass per token and a generator seeded by the request, so an answer depends on the request and
the weights alone, as vLLM's does. It takes weights from a folder, by broadcasts, and adapters by name, and sleeps.
"""

from __future__ import annotations

import copy
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors.torch import load_file
from torch import distributed

GENERATE = "/inference/v1/generate"


class RefusedError(Exception):
    """An answer with an error's status."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class ManyConnections(ThreadingHTTPServer):
    """Does not refuse connections that come all at once."""

    request_queue_size = 256
    daemon_threads = True


class StandIn:
    """One server.

    Args:
        model: is copied; tests load weights into the copy.
        tokenizer: looks for stop strings.
    """

    def __init__(self, model, tokenizer=None, port=0):
        self.model, self.tokenizer = copy.deepcopy(model).eval(), tokenizer
        self.version, self.label = "0.32.0", "default"
        self.config = {
            "model_config": {
                "dtype": "torch.float32",
                "max_model_len": 128,
                "quantization": None,
                "return_sampling_mask": False,
                "max_logprobs": 20,
                "enable_sleep_mode": True,
                "skip_tokenizer_init": False,
            },
            "lora_config": None,
            "weight_transfer_config": {"backend": "cohort"},
            "parallel_config": {
                **{f"{name}_parallel_size": 1 for name in ("tensor", "pipeline", "data")},
                "worker_extension_cls": "cohort_vllm.CohortWorker",
            },
            "device_config": {"device": "cpu"},
            "aux_output_config": {"enable_return_routed_experts": False},
        }
        """What it says of itself."""
        self.raw_logprobs = self.paused = False
        self.base = self.model
        self.adapters: dict[str, torch.nn.Module] = {}
        self.received = {}
        """The tensors of the last update, by name."""
        self.parts = 0
        """The files in which they came."""
        self.group = None
        self.update_fault = lambda: None
        """Called when an update begins to be received; may raise ``RefusedError`` or wait."""
        self.awake = {"weights", "kv_cache"}
        self.missing: set[str] = set()
        """Routes that it does not have."""
        self.fault = lambda number, body, answer: answer
        """Called with the number of each generate request, its body and the answer; returns the answer, bytes, or
        raises ``RefusedError``."""
        self.calls: list[tuple[str, dict]] = []
        """Every POST: path and body."""
        self._lock, self._sockets = threading.Lock(), set()
        self._device = ThreadPoolExecutor(1)  # the model computes in one thread
        self._http = ManyConnections(("127.0.0.1", port), self._handler())
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    @property
    def described(self):
        """The part of its config that a test changes most."""
        return self.config["model_config"]

    @described.setter
    def described(self, values):
        self.config["model_config"] = values

    def take(self, weights):
        """Replace the weights, as a server does that the trainer has paused."""
        assert self.paused
        assert "weights" in self.awake
        self.received = weights
        self.load({name: tensor.float() for name, tensor in weights.items()})

    def load(self, weights):
        """Replace the weights."""
        missing, unexpected = self.model.load_state_dict(dict(weights), strict=False)
        self.model.tie_weights()
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}

    def die(self):
        """Drop the connections and answer no more."""
        self._http.shutdown()
        self._http.server_close()
        for one in list(self._sockets):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self._device.shutdown(cancel_futures=True)

    def requests(self):
        """Bodies of the generate requests."""
        return [body for path, body in self.calls if path == GENERATE]

    def answer(self, method, path, query, body):
        """The answer to a request."""
        if path in self.missing:
            raise RefusedError(404, "Not Found")
        if method == "GET":
            return {
                "/health": None,
                "/version": {"version": self.version},
                "/weight_info": {"weight_version": self.label},
                "/is_paused": {"is_paused": self.paused},
                "/server_info": {"vllm_config": self.config},
            }[path]
        with self._lock:
            self.calls.append((path, body))
            number = len(self.requests())
        if path == GENERATE:
            if not body:
                raise RefusedError(400, "token_ids: Field required")
            assert not self.paused
            assert self.awake == {"weights", "kv_cache"}
            return self.fault(number, body, self._device.submit(self.generated, body).result())
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path == "/collective_rpc":
            self.reload(body["method"], **body["kwargs"])
        elif path == "/v1/load_lora_adapter":
            return self.adapt(**body)
        elif path == "/v1/unload_lora_adapter":
            if self.adapters.pop(body["lora_name"], None) is None:
                raise RefusedError(404, "The lora adapter cannot be found.")
            return b"Success"
        elif path == "/init_weight_transfer_engine":
            self.join(body["init_info"])
        elif path == "/start_weight_update" and self.group is None:
            raise RefusedError(500, "this worker is in no group")
        elif path == "/update_weights":
            try:
                self.update_fault()
                self.receive(body["update_info"])
            except RuntimeError as error:  # of the group
                raise RefusedError(500, f"Worker failed with error {error}") from None
        elif path == "/sleep":
            self.awake.clear()
        elif path == "/wake_up":
            self.awake.add(query["tags"])
        return {"success": True}

    def reload(self, method, folder="", weights_path=""):
        """What the plugin does, or vLLM's own method."""
        has_plugin = self.config["parallel_config"]["worker_extension_cls"] != ""
        assert (method, bool(folder), bool(weights_path)) == (
            ("cohort_load", True, False) if has_plugin else ("reload_weights", False, True)
        )
        self.update_fault()
        parts = [load_file(path) for path in sorted(Path(folder or weights_path).glob("*.safetensors"))]
        self.parts = len(parts)
        self.take({name: tensor for part in parts for name, tensor in part.items()})

    def adapt(self, lora_name, lora_path):
        """Load an adapter under a name: the model with its product added to the weights."""
        lora = self.config["lora_config"]
        if lora is None:
            raise RefusedError(404, "Not Found")
        config = json.loads((Path(lora_path) / "adapter_config.json").read_text())
        assert config["r"] <= lora["max_lora_rank"]
        assert lora_name not in self.adapters
        weights = load_file(Path(lora_path) / "adapter_model.safetensors")
        self.adapters[lora_name] = adapted_model(self.model, weights, config)
        return b"Success: LoRA adapter added."

    def join(self, meeting):
        """Join the trainer's group, as the plugin does."""
        timeout = timedelta(seconds=meeting["timeout"])
        store = distributed.TCPStore(meeting["host"], meeting["port"], meeting["size"], timeout=timeout)
        store.set("ready1", "")
        self.group = distributed.ProcessGroupGloo(store, 1, meeting["size"], timeout)

    def receive(self, info):
        """Receive weights by broadcasts."""
        received = {}
        for name, dtype, shape in zip(info["names"], info["dtypes"], info["shapes"], strict=True):
            received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast(received[name], 0).wait()
        self.take(received)

    @torch.no_grad()
    def generated(self, body):
        """What vLLM answers to a generate request."""
        parameters, vocabulary = body["sampling_params"], self.model.config.vocab_size
        ids = torch.tensor([body["token_ids"]])
        assert 0 <= int(ids.min()) <= int(ids.max()) < vocabulary, "this kills vLLM 0.32"
        if unknown := [int(token) for token in parameters.get("logit_bias", {}) if int(token) >= vocabulary]:
            raise RefusedError(
                400,
                f"token_id(s) {unknown} in logit_bias contain out-of-vocab token ids. Vocabulary size: {vocabulary}",
            )
        masks = self.described["return_sampling_mask"]
        if masks and (parameters["temperature"] <= 0 or parameters["top_k"] <= 0):
            raise RefusedError(400, "sampling distribution replay requires temperature > 0 and top_k > 0")
        if parameters.get("logprobs", 0) > self.described["max_logprobs"] > -1:
            raise RefusedError(400, f"more log-probs than max allowed: {self.described['max_logprobs']}")
        model = self.adapters[body["model"]] if body.get("model") else self.model
        scored = None
        if "prompt_logprobs" in parameters:
            logps = model(ids).logits[0, :-1].float().log_softmax(-1)
            read = zip(body["token_ids"][1:], logps, strict=True)
            scored = [None, *({str(token): {"logprob": float(own[token])}} for token, own in read)]
        tokens, content, supports, reason, stop, label = [], [], [], "length", None, self.label
        for one, support, ended in draw(model, body["token_ids"], parameters, self.tokenizer, raw=self.raw_logprobs):
            tokens.append(one["token_id"])
            content.append(one)
            supports.append(support)
            if ended is not None:
                reason, stop = "stop", ended
        return {
            "prompt_logprobs": scored,
            "choices": [
                {
                    "index": 0,
                    "finish_reason": reason,
                    "stop_reason": stop,
                    "token_ids": tokens,
                    "routed_experts": None,
                    "sampling_mask": supports if masks else None,
                    "weight_versions": [{"version": label, "start": 0, "end": len(tokens)}],
                    "logprobs": {"content": content},
                }
            ],
        }

    def _handler(self):
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def setup(self):
                super().setup()
                stand_in._sockets.add(self.connection)

            def finish(self):
                stand_in._sockets.discard(self.connection)
                try:
                    super().finish()
                except OSError:
                    self.connection.close()

            def do_GET(self):
                parts = urlsplit(self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                query = {key: values[0] for key, values in parse_qs(parts.query).items()}
                try:
                    answer = stand_in.answer(self.command, parts.path, query, json.loads(body) if body else {})
                    status, content = 200, answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                    if answer is None:
                        content = b""
                except RefusedError as refused:
                    status, content = refused.status, json.dumps({"error": {"message": str(refused)}}).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:  # the client has gone
                    return

            do_POST = do_GET

            def log_message(self, *arguments):
                pass

        return Handler


def draw(model, ids, parameters, tokenizer, *, raw=False):
    """Draw a turn: yields each token with its log-prob and candidates, what it could have been, and the token or string
    that ended the turn or None. ``raw``: log-probs are of the model's own distribution."""
    generator, ids = torch.Generator().manual_seed(parameters["seed"]), torch.tensor([ids])
    tokens, ends = [], parameters.get("stop_token_ids", ())
    while len(tokens) < parameters["max_tokens"]:
        logits = model(ids).logits[0, -1].float()
        if len(tokens) < parameters.get("min_tokens", 0):
            logits[list(ends)] = -torch.inf
        processed, greedy = truncated(logits, ids[0], parameters), parameters["temperature"] == 0
        logps = (logits if raw or greedy else processed).log_softmax(-1)
        drawn = torch.multinomial(processed.softmax(-1), 1, generator=generator)
        token = int(logits.argmax()) if greedy else int(drawn)
        tokens.append(token)
        one = {"token_id": token, "logprob": float(logps[token]), "top_logprobs": likeliest(logps, parameters)}
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
        ended = token if token in ends else stop_string(tokenizer, tokens, parameters)
        yield one, processed.isfinite().nonzero()[:, 0].tolist(), ended
        if ended is not None:
            return


def stop_string(tokenizer, tokens, parameters):
    """The stop string in a text; None without one."""
    if not parameters.get("stop"):
        return None
    assert parameters["detokenize"]
    text = tokenizer.decode(tokens)
    return next((one for one in parameters["stop"] if one in text), None)


def adapted_model(model, weights, config):
    """A copy of a model with the products of a LoRA adapter added to its weights."""
    adapted = copy.deepcopy(model)
    parameters = dict(adapted.named_parameters())
    for name, a in weights.items():
        if ".lora_A." in name:
            target = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            product = weights[name.replace(".lora_A.", ".lora_B.")] @ a
            parameters[target].data += product * config["lora_alpha"] / config["r"]
    return adapted


def truncated(logits, ids, parameters):
    """The logits that are drawn from: minus infinity for tokens that are left out, in vLLM's order."""
    logits = logits.clone()
    if (penalty := parameters.get("repetition_penalty", 1.0)) != 1:
        seen = ids.unique()
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    if parameters["temperature"]:
        logits /= parameters["temperature"]
    if (share := parameters.get("min_p", 0.0)) > 0:
        probabilities = logits.softmax(-1)
        logits[probabilities < share * probabilities.max()] = -torch.inf
    if 0 < (k := parameters.get("top_k", -1)) < len(logits):
        logits[logits < logits.topk(k).values[-1]] = -torch.inf
    if (p := parameters.get("top_p", 1.0)) < 1:
        values, order = logits.sort(descending=True)
        before = values.softmax(-1).cumsum(-1) - values.softmax(-1)
        logits[order[before >= p]] = -torch.inf
    return logits


def likeliest(logps, parameters):
    """The candidates of a draw: as many as are asked for, and -9999 for minus infinity."""
    count = parameters.get("logprobs", 0)
    values, tokens = logps.topk(len(logps) if count == -1 else min(count, len(logps)))
    found = zip(tokens.tolist(), values.tolist(), strict=True)
    return [{"token_id": token, "logprob": max(value, -9999.0)} for token, value in found]


def slow(seconds, number=1):
    """A fault: the answer to one request takes this long."""

    def fault(n, body, answer):
        if n == number:
            time.sleep(seconds)
        return answer

    return fault
