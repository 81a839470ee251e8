"""vLLM's worker on a CPU, for ranks that are one ``LLM``. Imported by vLLM alone."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker


class NamedWorker(CPUWorker):  # type: ignore[misc]
    """A worker whose shared memory has the name of its run.

    vLLM names it by what follows the last colon of the init method, which is ``env://`` for every run: a second run on
    the machine, or the files of an earlier one, would stop the start. The process group is there already, so the method
    has no other use.
    """

    def init_device(self) -> None:
        """See ``CPUWorker``."""
        self.distributed_init_method += f":{self.vllm_config.additional_config['run']}"
        super().init_device()
