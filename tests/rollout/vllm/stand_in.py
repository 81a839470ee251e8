"""A stand-in for vLLM: the routes that the engine uses, over a tiny transformers model in float32, with faults on demand.

It draws with one forward pass per token and a generator seeded by the request, so an answer depends on the request and
the weights alone, as vLLM's does.
"""

from __future__ import annotations

import copy
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import torch

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
        self.version, self.label, self.max_model_len = "0.32.0", "default", 128
        self.raw_logprobs = self.paused = False
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
                "/v1/models": {"data": [{"id": "policy", "max_model_len": self.max_model_len}]},
            }[path]
        with self._lock:
            self.calls.append((path, body))
            number = len(self.requests())
        if path == GENERATE:
            if not body:
                raise RefusedError(400, "token_ids: Field required")
            assert not self.paused
            return self.fault(number, body, self._device.submit(self.generated, body).result())
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        return {"success": True}

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
        scored = None
        if "prompt_logprobs" in parameters:
            logps = self.model(ids).logits[0, :-1].float().log_softmax(-1)
            read = zip(body["token_ids"][1:], logps, strict=True)
            scored = [None, *({str(token): {"logprob": float(own[token])}} for token, own in read)]
        generator = torch.Generator().manual_seed(parameters["seed"])
        tokens, logps, reason, stop = [], [], "length", None
        label = self.label
        while len(tokens) < parameters["max_tokens"] and reason == "length":
            logits = self.model(ids).logits[0, -1].float()
            if len(tokens) < parameters.get("min_tokens", 0):
                logits[parameters["stop_token_ids"]] = -torch.inf
            greedy = parameters["temperature"] == 0
            processed = logits if greedy else logits / parameters["temperature"]
            if k := parameters.get("top_k"):
                processed = processed.masked_fill(processed < processed.topk(k).values[-1], -torch.inf)
            probabilities = processed.softmax(-1)
            token = int(logits.argmax()) if greedy else int(torch.multinomial(probabilities, 1, generator=generator))
            tokens.append(token)
            logps.append(float((logits if self.raw_logprobs else processed).log_softmax(-1)[token]))
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
            if token in parameters.get("stop_token_ids", ()):
                reason, stop = "stop", token
            elif found := self.stop_string(tokens, parameters):
                reason, stop = "stop", found
        return {
            "prompt_logprobs": scored,
            "choices": [
                {
                    "index": 0,
                    "finish_reason": reason,
                    "stop_reason": stop,
                    "token_ids": tokens,
                    "weight_versions": [{"version": label, "start": 0, "end": len(tokens)}],
                    "logprobs": {
                        "content": [{"token_id": t, "logprob": p} for t, p in zip(tokens, logps, strict=True)]
                    },
                }
            ],
        }

    def stop_string(self, tokens, parameters):
        if not parameters.get("stop"):
            return None
        assert parameters["detokenize"]
        text = self.tokenizer.decode(tokens)
        return next((one for one in parameters["stop"] if one in text), None)

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


class DirectTransport:
    """Loads weights into stand-ins of this process."""

    def __init__(self, *stand_ins):
        self.stand_ins = {one.url: one for one in stand_ins}
        self.sent: list[tuple[str, list[str]]] = []
        """Labels, and the servers that got the weights."""
        self.failing: dict[str, Exception] = {}

    def check(self, servers):
        found = {"dtype": torch.float32, "device": "cpu", "workers": 1, "transfer": "cohort", "sizes": {}}
        return {server: SimpleNamespace(can_sleep=True, has_tokenizer=True, **found) for server in servers}

    def send(self, servers, weights, version):
        weights = [(name, tensor.clone()) for name, tensor in weights]
        self.sent.append((version, [server.url for server in servers]))
        for server in servers:
            assert self.stand_ins[server.url].paused
            if server.url not in self.failing:
                self.stand_ins[server.url].load(weights)
        return {server: self.failing[server.url] for server in servers if server.url in self.failing}

    def close(self):
        pass


def slow(seconds, number=1):
    """A fault: the answer to one request takes this long."""

    def fault(n, body, answer):
        if n == number:
            time.sleep(seconds)
        return answer

    return fault
