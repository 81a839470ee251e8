"""A stand-in for SGLang 0.5.23: its routes, requests and answers, over a tiny transformers model in float32.

It draws as the stand-in for vLLM does, and joins the trainer's group with the calls of SGLang's
``init_custom_process_group``.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import distributed
from torch.distributed import distributed_c10d as c10d

from .stand_in import RefusedError, StandIn, draw

GENERATE = "/generate"
ALL = {"weights", "kv_cache", "cuda_graph"}
ADMIN = {
    *("/pause_generation", "/continue_generation", "/update_weights_from_disk", "/begin_weight_update"),
    *("/end_weight_update", "/update_weights_from_distributed", "/init_weights_update_group"),
    *("/destroy_weights_update_group", "/update_weight_version", "/flush_cache", "/release_memory_occupation"),
    "/resume_memory_occupation",
}
PARAMETERS = {
    *("sampling_seed", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "max_new_tokens", "min_new_tokens", "stop_token_ids", "ignore_eos", "stop", "no_stop_trim"),
    *("skip_special_tokens", "regex", "json_schema", "logit_bias"),
}


class SGLangStandIn(StandIn):
    """One server."""

    def __init__(self, model, tokenizer=None, port=0):
        self.original_logprobs = self.session = False
        self.eos: set[int] = set()
        """The end tokens of its own model."""
        self.groups = {}
        self.flushed = 0
        self.receives: list[list[str]] = []
        """The names of the weights that each request received."""
        self.info = {
            "version": "0.5.23",
            "dtype": "float32",
            "device": "cpu",
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "max_req_input_len": 122,
            "quantization": None,
            "enable_memory_saver": True,
            "skip_tokenizer_init": tokenizer is None,
            "sampling_mask_max_tokens": 4096,
        }
        super().__init__(model, tokenizer, port)
        self.awake = set(ALL)

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
                "/model_info": {"weight_version": self.label, "model_path": "model"},
                "/server_info": self.info,
            }[path]
        with self._lock:
            self.calls.append((path, body))
            number = len(self.requests())
        if path == GENERATE:
            assert not self.paused, "this waits in SGLang"
            assert self.awake == ALL, "this ends SGLang's process"
            return self.fault(number, body, self._device.submit(self.generated, body).result())
        assert path in ADMIN
        getattr(self, path[1:])(**body)
        return b"Cache flushed." if path == "/flush_cache" else {"success": True, "message": ""}

    def pause_generation(self, mode):
        assert mode == "abort"
        self.paused = True

    def continue_generation(self):
        self.paused = False

    def update_weight_version(self, new_version):
        self.label = new_version

    def flush_cache(self):
        assert "kv_cache" in self.awake
        self.flushed += 1

    def release_memory_occupation(self):
        assert self.paused
        assert self.awake == ALL, "this ends SGLang's process"
        self.awake.clear()
        self.load({name: torch.full_like(tensor, torch.nan) for name, tensor in self.model.state_dict().items()})

    def resume_memory_occupation(self, tags):
        assert not self.awake & set(tags), "this ends SGLang's process"
        assert set(tags) <= ALL
        self.awake |= set(tags)

    def update_weights_from_disk(self, model_path, flush_cache):
        assert not flush_cache
        self.update_fault()
        self.take({k: v for path in sorted(Path(model_path).glob("*.safetensors")) for k, v in load_file(path).items()})

    def begin_weight_update(self):
        if self.session:
            raise RefusedError(400, "a weight-update session is already open; call end_weight_update() first")
        self.session, self.received = True, {}

    def end_weight_update(self):
        if not self.session:
            raise RefusedError(400, "no weight-update session is open; call begin_weight_update() first")
        self.session = False

    def init_weights_update_group(self, master_address, master_port, rank_offset, world_size, backend, group_name):
        self.update_fault_on_join()
        timeout = timedelta(seconds=20)
        address = f"tcp://{master_address}:{master_port}"
        store, rank, size = next(c10d.rendezvous(address, rank_offset, world_size, timeout=timeout))
        store.set_timeout(timeout)
        store = c10d.PrefixStore(group_name, store)
        made, _ = c10d._new_process_group_helper(
            *(size, rank, [], c10d.Backend(backend), store), group_name=group_name, timeout=timeout
        )
        c10d._world.pg_group_ranks[made] = {one: one for one in range(size)}
        self.groups[group_name] = made

    def update_fault_on_join(self):
        """Called when it is asked to join."""

    def destroy_weights_update_group(self, group_name):
        if self.groups.pop(group_name, None) is None:
            raise RefusedError(400, "The group to be destroyed does not exist.")

    def update_weights_from_distributed(self, names, dtypes, shapes, group_name, flush_cache):
        assert not flush_cache
        if not self.session:
            raise RefusedError(400, "must run between begin_weight_update() and end_weight_update()")
        if group_name not in self.groups:
            raise RefusedError(400, f"Failed to receive weights: Group {group_name} not in {list(self.groups)}.")
        self.receives.append(names)
        received, works = {}, []
        try:
            self.update_fault()
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
                received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                group = self.groups[group_name]
                works.append(distributed.broadcast(received[name], src=0, group=group, async_op=True))
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise RefusedError(400, f"Failed to receive weights: {error}") from None
        assert self.paused
        assert "weights" in self.awake
        self.received = self.received | received
        unexpected = self.model.load_state_dict({k: v.float() for k, v in received.items()}, strict=False)[1]
        assert not unexpected

    @torch.no_grad()
    def generated(self, body):
        """What SGLang answers to a generate request."""
        parameters, vocabulary, ids = body["sampling_params"], self.model.config.vocab_size, body["input_ids"]
        assert set(parameters) <= PARAMETERS
        assert set(body) <= {
            *("input_ids", "sampling_params", "return_logprob", "return_sampling_mask", "logprob_start_len"),
        }
        if unknown := [token for token in parameters.get("logit_bias", {}) if int(token) >= vocabulary]:
            raise RefusedError(400, f"logit_bias must has keys in [0, {vocabulary - 1}], got {unknown[0]}.")
        masks, temperature = body.get("return_sampling_mask", False), parameters["temperature"]
        top_k, most = parameters["top_k"], self.info["sampling_mask_max_tokens"]
        if top_k == 0:
            raise RefusedError(400, "top_k must be -1 (disable) or at least 1, got 0.")
        if masks and not 1 <= top_k <= most:
            raise RefusedError(400, f"return_sampling_mask requires finite 1 < top_k <= {most}; got top_k={top_k}.")
        ends = set() if parameters["ignore_eos"] else {*parameters.get("stop_token_ids", ()), *self.eos}
        wanted = {
            **parameters,
            "seed": parameters.get("sampling_seed", 42),
            "max_tokens": parameters["max_new_tokens"],
            "min_tokens": parameters.get("min_new_tokens", 0),
            "stop_token_ids": sorted(ends),
            "detokenize": True,
        }
        if parameters.get("stop"):
            assert parameters["no_stop_trim"]
            assert not parameters["skip_special_tokens"]
        label = self.label
        drawn = list(draw(self.model, ids, wanted, self.tokenizer))
        tokens = [one["token_id"] for one, _, _ in drawn]
        logits = self.model(torch.tensor([ids + tokens])).logits[0].float()
        scaled = logits[len(ids) - 1 : -1].clone()
        scaled[: wanted["min_tokens"], sorted(ends)] = -torch.inf
        if temperature and not self.original_logprobs:
            scaled = scaled / temperature  # before tokens are left out
        rows = zip(tokens, scaled.log_softmax(-1), strict=True)
        stop = drawn[-1][2]
        told = {
            "id": "1",
            "finish_reason": {"type": "length", "length": len(tokens)},
            "weight_version": self.label,
            "weight_versions": [{"version": label, "start": 0, "end": len(tokens)}],
            "output_token_logprobs": [[float(logps[token]), token, None] for token, logps in rows],
            "completion_tokens": len(tokens),
        }
        if stop is not None:
            told["finish_reason"] = {"type": "stop", "matched": stop}
        if masks:
            told["output_token_sampling_mask"] = [support for _, support, _ in drawn]
            told["output_token_sampling_logprobs"] = [one["logprob"] for one, _, _ in drawn]
        if (start := body.get("logprob_start_len", -1)) >= 0:
            own = logits[: len(ids) - 1].log_softmax(-1)
            read = [[None, ids[0], None], *([float(own[n, one]), one, None] for n, one in enumerate(ids[1:]))]
            told["input_token_logprobs"] = read[start:]
        return {"text": "", "output_ids": tokens, "meta_info": told}
