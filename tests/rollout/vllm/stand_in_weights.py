"""A stand-in for a vLLM server with the plugin: describes itself, takes weights in both ways, scores prompts, sleeps."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import distributed

from .stand_in import GENERATE, RefusedError, StandIn


class WeightStandIn(StandIn):
    """One server."""

    def __init__(self, model, **more):
        super().__init__(model, **more)
        self.description = {
            "sizes": {name: value for name, value in model.config.to_dict().items() if type(value) is int},
            "dtype": "float32",
            "device": "cpu",
            "transfer": "cohort",
            "can_sleep": True,
            "has_tokenizer": True,
            "quantization": None,
        }
        self.received = {}
        """The tensors of the last update, by name."""
        self.group = None
        self.update_fault = lambda: None
        """Called when an update begins to be received; may raise ``RefusedError`` or wait."""
        self.awake = {"weights", "kv_cache"}

    def answer(self, method, path, query, body):
        if path == "/get_world_size":
            return {"world_size": 1}
        answer = super().answer(method, path, query, body)
        if path == "/collective_rpc":
            return {"results": [self.called(body["method"], **body.get("kwargs", {}))]}
        if path == "/init_weight_transfer_engine":
            self.join(body["init_info"])
        if path == "/start_weight_update" and self.group is None:
            raise RefusedError(500, "this worker is in no group")
        if path == "/update_weights":
            try:
                self.update_fault()
                self.receive(body["update_info"])
            except RuntimeError as error:  # of the group
                raise RefusedError(500, f"Worker failed with error {error}") from None
        if path == "/sleep":
            self.awake.clear()
        if path == "/wake_up":
            self.awake.add(query["tags"])
        return answer

    def called(self, method, **arguments):
        if self.description is None:
            raise RefusedError(500, f"no method {method}")
        if method == "cohort_describe":
            return self.description
        assert method == "cohort_load"
        self.update_fault()
        parts = [load_file(path) for path in sorted(Path(arguments["folder"]).glob("*.safetensors"))]
        self.parts = len(parts)
        self.take({name: tensor for part in parts for name, tensor in part.items()})
        return None

    def join(self, meeting):
        timeout = timedelta(seconds=meeting["timeout"])
        store = distributed.TCPStore(meeting["host"], meeting["port"], meeting["size"], timeout=timeout)
        store.set("ready1", "")
        self.group = distributed.ProcessGroupGloo(store, 1, meeting["size"], timeout)

    def receive(self, info):
        received = {}
        for name, dtype, shape in zip(info["names"], info["dtypes"], info["shapes"], strict=True):
            received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast(received[name], 0).wait()
        self.take(received)

    def take(self, weights):
        assert self.paused
        assert "weights" in self.awake
        self.received = weights
        self.load({name: tensor.float() for name, tensor in weights.items()})

    @torch.no_grad()
    def generated(self, body):
        answer = super().generated(body)
        if body["sampling_params"].get("prompt_logprobs") is not None:
            ids = torch.tensor([body["token_ids"]])
            logps = self.model(ids).logits[0].float().log_softmax(-1)
            rest = [
                {str(token): {"logprob": float(row[token])}}
                for token, row in zip(ids[0, 1:].tolist(), logps, strict=False)
            ]
            answer["prompt_logprobs"] = [None, *rest]
        return answer


__all__ = ["GENERATE", "RefusedError", "WeightStandIn"]
