"""vLLM in the trainer's own process: ``vllm.LLM`` on the trainer's device, with the trainer's weights from memory.

Nothing is sent anywhere. The ``LLM`` starts with the first weights, when everything that the trainer keeps is on the
device, so that what is free can be measured. While the policy is updated it sleeps: its weights and its cache are
freed, and the allocator of torch gives back what it keeps before they are mapped again.

Several ranks have an ``LLM`` each. With tensor parallelism, ranks that follow each other form one (``tensor_group``):
they exchange the requests that are new before each step, so all step through the same ones.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cohort.config import VLLMConfig
from cohort.errors import ConfigError, EngineError
from cohort.parallel import World
from cohort.policy import Policy, has_adapters, named_weights
from cohort.policy.device import preserved, release_memory
from cohort.rollout.local.backend import free_bytes
from cohort.rollout.served.adapters import Adapter
from cohort.rollout.served.protocol import Description, Draw, Drawn, Outcome, RawTurn, Turns, checked, too_old
from cohort.rollout.served.tensor_group import TensorGroup
from cohort.rollout.served.vllm import CONTINUATION, OLDEST, sampling_parameters

NAME = "vLLM in this process"
INSTALL = "pip install 'cohort-rl[vllm]'"
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads stay where they are
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
SHARE_ASLEEP, SHARE_AWAKE = 0.9, 0.45
"""The part of the free memory that vLLM gets if it sleeps during the updates, and if it does not."""
WORKER = "cohort.rollout.served.cpu_worker.NamedWorker"
CPU_GIB = 4
"""Most memory of the cache of keys and values on a CPU, which is a quarter of what is free."""


def missing() -> str:
    """Why vLLM cannot be used in this environment; empty if it can."""
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        return f"vLLM {found} is older than {OLDEST}" if too_old(found, OLDEST) else ""
    return ""


class Colocated(Turns):
    """Turns that vLLM draws in this process.

    Args:
        policy: the trainer's.
        tokenizer: looks for stop strings. None: there are none.
        settings: of vLLM.
        context: maximum number of tokens of prompt and completion together.
        max_batch_size: turns drawn at the same time.
        masks: whether what each draw could have given has to come back.
        routes: whether the experts of each token have to come back.
        sleeps: whether its memory is freed between rollouts.
        trust_remote_code: as in the settings of the model.
        probe: compares it with the policy after each load. None: nothing is compared.
        world: the ranks.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any,
        settings: VLLMConfig,
        *,
        context: int,
        max_batch_size: int = 256,
        masks: bool = False,
        routes: bool = False,
        sleeps: bool = False,
        trust_remote_code: bool = False,
        probe: Callable[[Any], dict[str, float]] | None = None,
        world: World | None = None,
    ) -> None:
        self.policy, self.tokenizer, self.settings, self.probe = policy, tokenizer, settings, probe
        self.context, self.max_batch_size = context, max_batch_size
        self.routes, self.sleeps = routes, sleeps
        self.trust_remote_code = trust_remote_code
        self.world = world or World()
        self.on_gpu = policy.device.type == "cuda"
        self.masks = masks and self.on_gpu  # vLLM has no masks on a CPU, and sends log-probs of all candidates
        self.adapter = Adapter.of(policy.model)
        self._llm: Any = None
        self._lora: Any = None
        self._asleep = False
        self._group = TensorGroup.of(self.world, settings.tensor_parallel_size)
        self.together = self._group is not None
        self._draws: dict[str, tuple[int, Draw]] = {}
        self._new: list[tuple[str, Draw]] = []
        self._aborted: list[str] = []
        self._running: set[str] = set()
        self._agreed = False
        self._outcomes: deque[Outcome] = deque()
        self._measured: dict[str, float] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="cohort-vllm-"))

    @property
    def dtype(self) -> torch.dtype:
        """Of vLLM's weights. It computes in no more than float32."""
        compute = self.policy.precision.compute
        return torch.float32 if compute == torch.float64 else compute

    @property
    def found(self) -> Description:
        """What it is, as a server says it."""
        dtype = str(self.dtype).removeprefix("torch.")
        return Description("", dtype=dtype, context=self.context, masks=self.masks, candidates=-1, routes=self.routes)

    # ----------------------------------------
    # Turns.

    @property
    def busy(self) -> bool:
        """See ``Turns``. With tensor parallelism, every rank of a group has to ask as often as the others."""
        if self._group is None:
            return False
        self._agree()
        if not self._running:
            self._agreed, self._group.over = False, True
        return bool(self._running)

    def session(self) -> AbstractContextManager[None]:
        """See ``Turns``."""
        return nullcontext() if self._group is None else self._group.session()

    def _inside(self) -> AbstractContextManager[None]:
        """A block in which vLLM may wait for other ranks."""
        return nullcontext() if self._group is None else self._group.inside()

    def begin(self, number: int, draw: Draw, prompt: int) -> None:  # noqa: ARG002 - there is one prefix cache
        """See ``Turns``."""
        name = f"{self.world.rank}:{number}"
        self._draws[name] = number, draw
        self._new.append((name, draw))

    def next(self, wait: float | None) -> Outcome | None:  # noqa: ARG002 - a step is short
        """See ``Turns``. Decodes one token of all turns that are under way."""
        if not self._outcomes:
            self._agree()
            self._agreed = False
            if self._running:
                for output in self._step():
                    self._take(output)
        return self._outcomes.popleft() if self._outcomes else None

    def abort(self) -> None:
        """See ``Turns``."""
        self._aborted += self._draws
        self._draws.clear()
        self._new.clear()
        self._outcomes.clear()

    def _agree(self) -> None:
        """Begin and abort what is new, here or on another rank of the group."""
        if self._agreed:
            return
        new, aborted, self._new, self._aborted, self._agreed = self._new, self._aborted, [], [], True
        if self._group is not None:
            each = self._group.gather((new, aborted))
            new, aborted = [one for found, _ in each for one in found], [one for _, found in each for one in found]
        if gone := [name for name in aborted if name in self._running]:
            self._llm.llm_engine.abort_request(gone)
            self._running.difference_update(gone)
        for name, draw in new:
            self._add(name, draw.token_ids, sampling_parameters(draw, masks=self.masks))
            self._running.add(name)

    def _add(self, name: str, token_ids: Sequence[int], parameters: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        if form := parameters.pop("structured_outputs", None):
            parameters["structured_outputs"] = StructuredOutputsParams(**form)
        prompt = {"prompt_token_ids": list(token_ids)}
        try:
            settings = SamplingParams(**parameters, output_kind=RequestOutputKind.FINAL_ONLY)
            self._llm.llm_engine.add_request(name, prompt, settings, lora_request=self._lora)
        except Exception as error:
            raise EngineError(f"{NAME} refuses a request ({type(error).__name__}: {str(error)[:300]})") from error

    def _step(self) -> list[Any]:
        """Decode one token of each request; returns those that have ended."""
        try:
            with self._inside():
                outputs = self._llm.llm_engine.step()
        except Exception as error:
            raise EngineError(f"{NAME} failed ({type(error).__name__}: {str(error)[:300]})") from error
        return [output for output in outputs if output.finished]

    def _take(self, output: Any) -> None:
        """Put a turn that has ended among the outcomes, if it is this rank's."""
        self._running.discard(output.request_id)
        if output.request_id not in self._draws:
            return
        number, draw = self._draws.pop(output.request_id)
        (one,) = output.outputs
        tokens = [int(token) for token in one.token_ids]
        each = [{int(token): entry.logprob for token, entry in found.items()} for found in one.logprobs]
        raw = RawTurn(
            tokens,
            [found.get(token, -np.inf) for token, found in zip(tokens, each, strict=True)],
            tokens,
            str(one.finish_reason),
            one.stop_reason,
            frozenset([""]),
            None if one.sampling_mask is None else one.sampling_mask.token_ids,
            each,
            one.routed_experts,
        )
        try:
            drawn: Drawn | Exception = checked(draw, raw, "", NAME)
        except EngineError as error:
            drawn = error
        self._outcomes.append((number, drawn))

    def score(self, token_ids: Sequence[int], count: int) -> tuple[list[float], list[int], list[float]]:
        """See ``Server``. Every rank of a group calls."""
        any_token = self.policy.vocab_size if self.masks else -1
        settings = {**CONTINUATION, "top_k": any_token}
        scored = self._whole(token_ids, {**settings, "max_tokens": 1, "prompt_logprobs": 0})
        drawn = self._whole(token_ids, {**settings, "max_tokens": count, "logprobs": 0}).outputs[0]
        entries = zip(token_ids[1:], scored.prompt_logprobs[1:], strict=True)
        tokens = [int(token) for token in drawn.token_ids]
        logps = [found[token].logprob for token, found in zip(tokens, drawn.logprobs, strict=True)]
        return [entry[token].logprob for token, entry in entries], tokens, logps

    def _whole(self, token_ids: Sequence[int], parameters: dict[str, Any]) -> Any:
        """What comes back for one request, while no other is under way."""
        self._add("probe", token_ids, parameters)
        while not (ended := self._step()):
            pass
        return ended[0]

    # ----------------------------------------
    # Weights and memory.

    def load(self, version: int) -> None:
        """See ``Turns``. Every rank calls.

        Raises:
            ConfigError: vLLM does not start with the model or the settings.
            PolicyMismatchError: the probe found that it computes something else.
        """
        with self.session():
            with self._inside():
                self._load(version)
            if self._group is not None:
                self._group.gather(None)

    def _load(self, version: int) -> None:
        release_memory()  # what this process's allocator keeps, vLLM could not map
        first = self._llm is None
        if first:
            self._start()
        start = time.perf_counter()
        if self._asleep:
            self._llm.wake_up(tags=["weights"])
        if self.adapter is None:
            self._reload(named_weights(self.policy))
        else:
            if first:
                self._reload(named_weights(self.policy, base=True))
            self._adapt(self.adapter, version)
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
        self._asleep = False
        self._llm.reset_prefix_cache()  # what it holds belongs to the previous weights
        self._measured = {"seconds/weights": time.perf_counter() - start}
        if self.probe:
            self._measured |= self.probe(self)

    def _reload(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Put weights in place of vLLM's, tensor by tensor."""
        dtype, device = self.dtype, self.policy.device
        converted = (
            (name, tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)) for name, tensor in weights
        )
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": converted})
        self._llm.apply_model(pack_tied_head)

    def _adapt(self, adapter: Adapter, version: int) -> None:
        """Load the adapter in place of the previous one."""
        from vllm.lora.request import LoRARequest

        if self._lora is not None:
            self._llm.llm_engine.remove_lora(self._lora.lora_int_id)
            shutil.rmtree(self._lora.lora_path)
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        adapter.save(folder)
        # Its number is part of the key of cached prefixes, so it is a new one for new weights.
        self._lora = LoRARequest(f"policy-{version}", 1 + version, str(folder))
        self._llm.llm_engine.add_lora(self._lora)

    def sleep(self) -> None:
        """See ``Turns``."""
        if self.sleeps and self._llm is not None and not self._asleep:
            # With an adapter, the base weights wait in the memory of the host; else all weights come again.
            self._llm.sleep(level=2 if self.adapter is None else 1)
            self._asleep = True

    def close(self) -> None:
        """See ``Turns``."""
        llm, self._llm = self._llm, None
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._group is not None:
            self._group.closed = True
        if llm is None:
            return
        from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

        llm.llm_engine.engine_core.shutdown()
        del llm
        destroy_model_parallel()
        if self.world.size == 1:  # else the group of all ranks is the trainer's
            destroy_distributed_environment()
        release_memory()

    def metrics(self) -> dict[str, float]:
        """See ``Turns``: what taking the weights took, and the probe's."""
        measured, self._measured = self._measured, {}
        return measured

    def describe(self) -> str:
        """See ``Turns``."""
        parts = [NAME, f"at most {self.max_batch_size} completions at a time"]
        if self._group is not None:
            parts.append(f"tensor parallel over {self.settings.tensor_parallel_size} ranks")
        if self.adapter is not None:
            parts.append("the adapter is loaded beside the base weights")
        return ", ".join([*parts, "asleep during updates"] if self.sleeps else parts)

    def _start(self) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is in this process, and takes tensors of it
        if not self.on_gpu:
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(self._cache_gib())
        try:
            with preserved():  # vLLM seeds the generators
                from vllm import LLM

                self._llm = LLM(**self._arguments())
            if self._group is not None:
                self._group.free_names()
        except ImportError as error:
            raise ConfigError(f"rollout.engine 'vllm' needs vLLM ({error}): {INSTALL}") from None
        except Exception as error:
            raise ConfigError(
                f"vLLM does not start ({type(error).__name__}: {' '.join(str(error).split())[:600]}). Its settings are "
                "in [vllm]; with rollout.engine = 'local' the policy samples without it"
            ) from error

    def _arguments(self) -> dict[str, Any]:
        """The arguments of ``vllm.LLM``."""
        settings, model = self.settings, self._model()
        arguments: dict[str, Any] = {
            "model": model,
            "tokenizer": model,
            "skip_tokenizer_init": self.tokenizer is None,
            "load_format": "dummy",
            "dtype": self.found.dtype,
            "max_model_len": self.context,
            "max_num_seqs": self.max_batch_size,
            "tensor_parallel_size": settings.tensor_parallel_size,
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": -1,
            "generation_config": "vllm",
            "seed": 0,  # that of vLLM's own generator: each request brings its own seed
            "trust_remote_code": self.trust_remote_code,
            "enforce_eager": not self.on_gpu,  # compiling takes a minute on a CPU, and gains little
            "enable_sleep_mode": self.sleeps,
            "return_sampling_mask": self.masks,
            "enable_return_routed_experts": self.routes,
            "disable_log_stats": True,
        }
        if self.on_gpu:
            arguments["gpu_memory_utilization"] = self._memory_share()
        if self.world.size > 1:
            arguments["distributed_executor_backend"] = "external_launcher"
        if self._group is not None and not self.on_gpu:
            arguments |= {"worker_cls": WORKER, "additional_config": {"run": self._group.name}}
        if self.adapter is not None:
            arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": self.adapter.reserved}
        return arguments | settings.arguments

    @property
    def reserved(self) -> int:
        """See ``Turns``."""
        if self._llm is not None or self.sleeps:
            return 0
        if not self.on_gpu:
            return self._cache_gib() * 2**30
        return int(self._memory_share() * torch.cuda.mem_get_info(self.policy.device)[1])

    def _cache_gib(self) -> int:
        """The memory of the cache of keys and values on a CPU."""
        given = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        return int(given) if given else max(1, min(CPU_GIB, (free_bytes(self.policy.device) or 0) // 2**32))

    def _memory_share(self) -> float:
        """The part of the device's memory that vLLM gets."""
        if self.settings.gpu_memory_utilization is not None:
            return self.settings.gpu_memory_utilization
        free, total = torch.cuda.mem_get_info(self.policy.device)
        return (SHARE_ASLEEP if self.sleeps else SHARE_AWAKE) * free / total

    def _model(self) -> str:
        """The folder of the model's config and tokenizer. No weights are read from it."""
        model: Any = self.policy.model
        base = model.get_base_model() if has_adapters(model) else model
        folder = self._folder / "model"
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        config = type(base.config).from_dict(base.config.to_dict())
        if hasattr(config, "quantization_config"):  # of a quantized base, vLLM gets the values
            del config.quantization_config
        config.architectures = [type(base).__name__]
        config.save_pretrained(folder)
        return str(folder)


def pack_tied_head(model: torch.nn.Module) -> None:
    """Let vLLM's CPU build compute the head from the present weights. It does so from a packed copy of the matrix, and
    packs a layer for which weights came; a head that is the embedding gets none. A GPU has no copies."""
    module: Any
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
