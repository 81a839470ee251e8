"""``[vllm]``: the servers that sample with ``rollout.engine = "vllm"``."""

from __future__ import annotations

from typing import Annotated, Literal

from cohort.config.section import OneAsList, PathName, PositiveFloat, Section, Strings


class VLLMConfig(Section):
    """vLLM servers, used with `rollout.engine = "vllm"`. They receive the weights after every update."""

    url: Annotated[Strings, OneAsList] = ()
    """Address of a server, or a list of addresses, as in "http://127.0.0.1:8000": loopback or a private network."""
    request_timeout: PositiveFloat = 600.0
    """Time limit of a completion in seconds. A server that exceeds it is left out; the completion is repeated on
    another."""
    startup_timeout: PositiveFloat = 600.0
    """How long to wait for servers to answer when a run starts, in seconds."""
    start: bool = False
    """Start a server on this machine and end it with the run, instead of `vllm.url`. Its log is logs/vllm.log in the
    run folder."""
    python: PathName = ""
    """With `vllm.start`: the Python interpreter of the environment in which vLLM is installed."""
    arguments: Strings = ()
    """With `vllm.start`: further arguments of the server, as in ["--max-model-len", "4096"]."""
    transport: Literal["files", "group"] = "files"
    """How weights get to servers. "files": as safetensors in shared memory, or in `vllm.folder`. "group": by broadcasts
    in a torch process group for each server, through NCCL between GPUs and gloo elsewhere."""
    folder: PathName = ""
    """With `vllm.transport` "files": a folder that the trainer and all servers see under this name. Unset: shared
    memory, which needs the servers on this machine."""
    update_timeout: PositiveFloat = 600.0
    """Time limit of an update of a server's weights in seconds."""
    probe_threshold: PositiveFloat | None = None
    """Mean difference, in nats, between a server's log-probs of a fixed text and the trainer's, above which a run
    stops. Compared at the start and after every update. Unset: 0.001 in float32, 0.03 in float16, 0.1 in bfloat16."""
    sleep: bool = False
    """For a server on the trainer's own GPU: free its memory during updates (sleep level 2 of vLLM). Servers need
    --enable-sleep-mode; one that `vllm.start` starts gets it."""
