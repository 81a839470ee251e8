"""A step of the demo's task with each engine in one run: local, vLLM in this process, a vLLM server on this machine.

    python benchmarks/engines.py                        needs vLLM beside Cohort (extra "vllm"; `make vllm` on a CPU)
    python benchmarks/engines.py --steps 8 --engines local vllm

The three runs are trained step by step in turns, each time another one first, so that what else the machine does falls
on all of them. The first step of each is left out: engines start and compile in it. The last line is JSON with the
medians of sampling, sending weights and the whole step, in seconds, and their ratios to the local engine's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cohort import GRPOTrainer
from cohort.config import load_config
from cohort.demo.run import MODEL, SETTINGS, accuracy, problems
from cohort.errors import EngineError
from cohort.rollout.served.vllm import PLUGIN, PLUGIN_ARGUMENTS, VLLMServer
from rollout import hardware

ENGINES = ("local", "vllm", "server")
MEASURED = {"sampling": "seconds/generate", "weights": "seconds/weights", "step": "seconds/step"}


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The address of a server of the demo's model, while the block runs."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--port", port]
    command += ["--dtype", "float32", "--max-model-len", 256, "--enable-scale-out", "--generation-config", "vllm"]
    command += ["--logprobs-mode", "processed_logprobs", "--enforce-eager", *PLUGIN_ARGUMENTS]
    switches = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": str(PLUGIN),
    }
    process = subprocess.Popen(
        list(map(str, command)), env=os.environ | switches, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        until, client = time.monotonic() + 300, VLLMServer(f"http://127.0.0.1:{port}")
        while process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(EngineError):
                client.describe()
                break
            time.sleep(0.5)
        yield client.url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def trainer(engine: str, url: str, folder: str, steps: int) -> GRPOTrainer:
    overrides = [f"--rollout.engine={engine}", f"--run.output_dir={folder}/{engine}", f"--run.max_steps={steps}"]
    overrides += [f"--server.url={url}"] if engine == "server" else []
    config = load_config(SETTINGS, [*overrides, "--report.progress=false", "--run.save_steps=0"])
    return GRPOTrainer(str(MODEL), accuracy, config, problems(2000, held_out=False, seed=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each engine")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url = stack.enter_context(server()) if "server" in options.engines else ""
        runs = {engine: trainer(engine, url, folder, options.steps + 1) for engine in options.engines}
        steps = {engine: stack.enter_context(contextlib.closing(run.steps())) for engine, run in runs.items()}
        for number in range(options.steps + 1):
            shift = number % len(runs)
            for engine in [*list(runs)[shift:], *list(runs)[:shift]]:
                metrics = next(steps[engine])
                for name, key in MEASURED.items() if number else ():
                    found.setdefault(engine, {}).setdefault(name, []).append(metrics.get(key, 0.0))
        for run in runs.values():
            run.engine.close()
    medians = {
        engine: {name: statistics.median(values) for name, values in each.items()} for engine, each in found.items()
    }
    print(hardware("cpu"))
    for engine, each in medians.items():
        line = "  ".join(f"{name} {seconds:.3f} s" for name, seconds in each.items())
        ratio = f"  {each['step'] / medians['local']['step']:.2f} x local" if "local" in medians else ""
        print(f"{engine:7} {line}{ratio}")
    print(json.dumps({"seconds": medians, "steps": options.steps}))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
