"""A stand-in for the module ``vllm``: an ``LLM`` over a tiny transformers model in float32, which draws as ``StandIn`` does
and insists on what vLLM needs. ``installed`` puts it in the place of the module."""

from __future__ import annotations

import copy
import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from .stand_in import adapted_model, draw

DEFAULTS = {
    **{"seed": None, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"max_tokens": 16, "min_tokens": 0, "stop_token_ids": (), "stop": (), "ignore_eos": False, "detokenize": True},
    **{"include_stop_str_in_output": False, "skip_special_tokens": True, "structured_outputs": None},
    **{"logprobs": None, "prompt_logprobs": None, "output_kind": None, "skip_reading_prefix_cache": None},
    "routed_experts_prompt_start": 0,
}
"""Of vLLM's SamplingParams: those that are used here."""


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


class SamplingParams(SimpleNamespace):
    """Keeps what it is given, if vLLM would take it."""

    def __init__(self, **given):
        super().__init__(**{**DEFAULTS, **given})
        assert not given.keys() - DEFAULTS.keys()
        assert 0 <= self.temperature <= 2
        assert 0 < self.top_p <= 1
        assert type(self.top_k) is int
        assert self.top_k >= -1
        assert 0 <= self.min_p <= 1
        assert self.repetition_penalty > 0
        assert self.max_tokens >= max(1, self.min_tokens)
        assert self.min_tokens >= 0
        assert all(type(token) is int for token in self.stop_token_ids)
        assert self.detokenize or not self.stop
        assert all(self.stop)
        assert self.logprobs is None or self.logprobs >= -1


class LLM:
    """One engine. ``made`` are those of a test, ``events`` what was asked of them, in order."""

    made: ClassVar[list[LLM]] = []
    events: ClassVar[list[str]] = []
    fault = staticmethod(lambda: None)
    """Called in each step; may raise."""

    def __init__(self, **arguments):
        self.arguments = arguments
        self.events.append("start")
        config = AutoConfig.from_pretrained(arguments["model"])
        torch.manual_seed(arguments["seed"])  # as vLLM does, and more
        assert arguments["load_format"] in ("dummy", "bitsandbytes")
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.tokenizer = None
        if not arguments["skip_tokenizer_init"]:
            self.tokenizer = AutoTokenizer.from_pretrained(arguments["tokenizer"])
        self.adapters, self.requests, self.awake, self.stale = {}, {}, {"weights", "kv_cache"}, True
        self.llm_engine, self.asked, self.steps = self, [], 0
        self.engine_core = SimpleNamespace(shutdown=lambda: self.events.append("shutdown"))
        self.made.append(self)

    def add_request(self, name, prompt, params, lora_request=None):
        assert name not in self.requests
        self.asked.append(name)
        parameters = {key: value for key, value in vars(params).items() if value is not None}
        assert parameters["output_kind"] == 2  # a choice comes with its last token
        masks = self.arguments["return_sampling_mask"]
        assert not masks or (parameters["temperature"] > 0 and parameters["top_k"] > 0), "vLLM refuses it"
        assert len(prompt["prompt_token_ids"]) + parameters["max_tokens"] <= self.arguments["max_model_len"]
        assert bool(lora_request) == self.arguments.get("enable_lora", False)
        model = self.adapters[lora_request.lora_int_id] if lora_request else self.model
        self.requests[name] = iter(self._drawn(name, model, prompt["prompt_token_ids"], parameters))

    @torch.no_grad()
    def _drawn(self, name, model, ids, parameters):
        """Yields None for each token, and the output with the last one."""
        scored = None
        if "prompt_logprobs" in parameters:
            logps = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
            read = zip(ids[1:], logps, strict=True)
            scored = [None, *({token: SimpleNamespace(logprob=float(own[token]))} for token, own in read)]
        drawn, supports, reason, stop = [], [], "length", None
        for one, support, ended in draw(model, ids, parameters, self.tokenizer):
            drawn.append(one)
            supports.append(support)
            if ended is not None:
                reason, stop = "stop", ended
            if ended is None and len(drawn) < parameters["max_tokens"]:
                yield None
        choice = SimpleNamespace(
            token_ids=[one["token_id"] for one in drawn],
            logprobs=[
                {each["token_id"]: SimpleNamespace(logprob=each["logprob"]) for each in (one, *one["top_logprobs"])}
                for one in drawn
            ],
            finish_reason=reason,
            stop_reason=stop,
            sampling_mask=SimpleNamespace(token_ids=supports) if self.arguments["return_sampling_mask"] else None,
            routed_experts=None,
        )
        yield SimpleNamespace(request_id=name, outputs=[choice], prompt_logprobs=scored, finished=True)

    def step(self):
        assert self.awake == {"weights", "kv_cache"}
        assert not self.stale, "prefixes of earlier weights are in the cache"
        type(self).fault()
        self.steps += 1
        ended = []
        for name in list(self.requests):
            if (output := next(self.requests[name])) is not None:
                del self.requests[name]
                ended.append(output)
        return ended

    def abort_request(self, names):
        self.events.append("abort")
        for name in names:
            del self.requests[name]

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        assert "weights" in self.awake
        self.events.append("weights")
        missing, unexpected = self.model.load_state_dict(dict(kwargs["weights_iterator"]), strict=False)
        self.model.tie_weights()
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}
        self.stale = True

    def apply_model(self, function):
        return [function(self.model)]

    def add_lora(self, request):
        self.events.append("adapter")
        assert not self.adapters, "one adapter at a time"
        config = json.loads((Path(request.lora_path) / "adapter_config.json").read_text())
        assert config["r"] <= self.arguments["max_lora_rank"]
        weights = load_file(Path(request.lora_path) / "adapter_model.safetensors")
        self.adapters[request.lora_int_id] = adapted_model(self.model, weights, config)

    def remove_lora(self, number):
        del self.adapters[number]

    def reset_prefix_cache(self):
        self.stale = False

    def sleep(self, level):
        assert self.arguments["enable_sleep_mode"]
        self.events.append(f"sleep {level}")
        self.awake.clear()
        self.stale = True
        if level == 2:
            self.model = copy.deepcopy(self.model)
            for parameter in self.model.parameters():
                parameter.data.fill_(float("nan"))

    def wake_up(self, tags):
        self.events.append(f"wake {' '.join(tags)}")
        self.awake.update(tags)


@contextmanager
def installed(patch):
    """While the block runs, ``import vllm`` finds this."""
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.sampling_params", "vllm.lora", "vllm.lora.request")}
    modules["vllm.distributed"] = ModuleType("vllm.distributed")
    modules["vllm"].LLM, modules["vllm"].SamplingParams = LLM, SamplingParams
    modules["vllm.sampling_params"].RequestOutputKind = SimpleNamespace(FINAL_ONLY=2)
    modules["vllm.sampling_params"].StructuredOutputsParams = SimpleNamespace
    modules["vllm.lora.request"].LoRARequest = LoRARequest
    modules["vllm.distributed"].destroy_model_parallel = lambda: LLM.events.append("left the groups")
    modules["vllm.distributed"].destroy_distributed_environment = lambda: LLM.events.append("left the process group")
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)
    patch.setattr("cohort.rollout.setup.missing", lambda: "")
    LLM.made, LLM.events, LLM.fault = [], [], staticmethod(lambda: None)
    yield LLM
