"""What a vLLM server loads to receive weights by broadcasts, and on the CPU build for models with a tied head. Imports
nothing of Cohort: the server may have an environment of its own.

A server loads it with this folder in ``PYTHONPATH``, ``--worker-extension-cls cohort_vllm.CohortWorker`` and
``--weight-transfer-config '{"backend": "cohort"}'``. Written for vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import distributed
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


class CohortWorker:
    """Methods that every worker of the server gets, for ``/collective_rpc``."""

    def cohort_load(self, folder: str) -> None:
        """Load the weights in a folder's safetensors files."""
        model = self.model_runner.model
        config = self.vllm_config
        with set_current_vllm_config(config):
            names = names_of(model)
            initialize_layerwise_reload(model)
            loaded = model.load_weights(_stored(Path(folder)))
            finish(model, config.model_config, names, loaded)
        self.model_runner.reset_lora_state()


def names_of(model: torch.nn.Module) -> set[str]:
    """The names of a model's parameters. A layer that can take adapters holds the one with the weights."""
    return {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}


def finish(model: torch.nn.Module, config: Any, names: set[str], loaded: set[str] | None) -> None:
    """Put loaded layers in use.

    Raises:
        RuntimeError: parameters got no weights. vLLM would keep the previous ones and report success.
    """
    finalize_layerwise_reload(model, config)
    for module in model.modules():
        # The CPU build computes the head from a packed copy of its matrix. vLLM packs a layer for which weights came; a
        # head that is the embedding gets none, and would keep the copy of the previous weights. A GPU has no copies.
        if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
    if loaded is not None and (missing := sorted(names - loaded)):
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise RuntimeError(f"no weights came for {', '.join(missing[:5])}{more}")


def _stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)


@dataclass
class Meeting(WeightTransferInitInfo):
    """Where the trainer waits for this server's workers."""

    host: str
    port: int
    size: int
    """Members: the trainer, which is rank 0, and the server's workers."""
    backend: str
    timeout: float


@dataclass
class Announcement(WeightTransferUpdateInfo):
    """The tensors that the trainer broadcasts, in order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class CohortTransfer(WeightTransferEngine[Meeting, Announcement]):
    """Receives weights by broadcasts from the trainer in a process group of its own."""

    init_info_cls = Meeting
    update_info_cls = Announcement

    group: Any = None

    def init_transfer_engine(self, init_info: Meeting) -> None:
        """Join the trainer's group."""
        config = self.parallel_config
        self.group = join(init_info, 1 + config.data_parallel_index * config.world_size + config.rank, self.device)

    def start_weight_update(self) -> None:
        """Prepare layers to be loaded one by one."""
        if self.group is None:
            raise RuntimeError("this worker is in no group: call /init_weight_transfer_engine first")
        self.names = names_of(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load. The base class's method synchronizes an accelerator, which a CPU is not."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Announcement) -> None:
        """Receive and load."""
        try:
            self.loaded = self.model.load_weights(self._received(update_info))
        except BaseException:
            self.group = None  # so that the trainer's end fails too, instead of waiting
            raise

    def _received(self, update_info: Announcement) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in zip(update_info.names, update_info.dtypes, update_info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            self.group.broadcast(tensor, 0).wait()
            yield name, tensor

    def finish_weight_update(self) -> None:
        """Put the loaded layers in use."""
        finish(self.model, self.model_config, self.names, self.loaded)

    def shutdown(self) -> None:
        """Leave the group."""
        self.group = None


def join(meeting: Meeting, rank: int, device: torch.device) -> Any:
    """A process group beside the default one, which is vLLM's."""
    timeout = timedelta(seconds=meeting.timeout)
    store = distributed.TCPStore(meeting.host, meeting.port, meeting.size, is_master=False, timeout=timeout)
    store.set(f"ready{rank}", "")  # from here on, the trainer can wait without checking
    if meeting.backend == "gloo":
        return distributed.ProcessGroupGloo(store, rank, meeting.size, timeout)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = distributed.ProcessGroupNCCL(store, rank, meeting.size, options)
    # The connection is made at the first collective.
    group.broadcast(torch.zeros(1, dtype=torch.float32, device=device), 0).wait()
    torch.accelerator.synchronize()
    return group


WeightTransferEngineFactory.register_engine("cohort", CohortTransfer)
