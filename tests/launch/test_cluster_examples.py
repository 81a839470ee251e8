"""``examples/cluster``: the commands in the files are right.

The scripts really run, under bash, with stand-ins for Slurm's commands and for ``cohort``, which prints its arguments:
they are those of a dry run in this process.
"""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from cohort.cli import main

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
STAND_INS = {
    "cohort": 'printf "%s\\0" "$@"',
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": 'if [[ "$*" == "show hostnames node[7-8]" ]]; then echo node7; echo node8; else exit 1; fi',
}


@pytest.fixture
def run_script(tmp_path, monkeypatch, capsys):
    """Run a script with bash, among stand-ins; returns what the launcher would start."""

    def run(script, **variables):
        for name, text in STAND_INS.items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
            (tmp_path / name).chmod(0o755)
        unset = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "CONFIG", "RUN")
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        environment = kept | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"), **variables}
        command = ["bash", "-c", script]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        command, *arguments = done.stdout.split("\0")[:-1]
        assert command == "launch"
        monkeypatch.chdir(ROOT)
        for name in unset:
            monkeypatch.delenv(name, raising=False)
        assert main(["launch", "--dry-run", *arguments]) == 0
        return capsys.readouterr().out

    return run


def expected(endpoint, name, ranks, folder):
    """The launcher's description: on a machine without GPUs, one rank each unless the command says how many."""
    total = 2 * ranks
    return [
        f"machines: 2, {total} ranks in all; they meet at {endpoint} as '{name}'",
        f"run folder: {folder}",
        f"each rank runs: cohort train examples/gsm8k/config.toml --resume auto --run.output_dir {folder} "
        "--parallel.layout full",
    ]


def test_slurm(run_script):
    script = (CLUSTER / "slurm.sbatch").read_text()
    options = [line.split()[1].partition("=")[::2] for line in script.splitlines() if line.startswith("#SBATCH")]
    assert dict(options) | {"--nodes": "2", "--ntasks-per-node": "1", "--requeue": ""} == dict(options)
    assert script.index("#SBATCH") < script.index("set -euo")  # Slurm reads no options after the first command
    output = run_script(
        script, SLURM_JOB_ID="123456", SLURM_NNODES="2", SLURM_JOB_NODELIST="node[7-8]", RUN="/runs/gsm8k"
    )
    lines = expected("node7:23456", "123456", 1, "/runs/gsm8k")
    assert [line for line in output.splitlines() if line in lines] == lines


def test_skypilot(run_script):
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    assert task["envs"]["RUN"].startswith(tuple(task["volumes"]))
    gpus = task["resources"]["accelerators"].split(":")[1]
    variables = {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_NUM_NODES": str(task["num_nodes"])}
    more = {"SKYPILOT_NUM_GPUS_PER_NODE": gpus, "SKYPILOT_TASK_ID": "sky-1"}
    output = run_script(task["run"], **task["envs"], **variables, **more)
    lines = expected("10.0.0.7:29400", "sky-1", 8, "/runs/gsm8k")
    assert [line for line in output.splitlines() if line in lines] == lines


def test_jobset(run_script):
    jobset = yaml.safe_load((CLUSTER / "jobset.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert int(variables["NODES"]) == spec["completions"] == spec["parallelism"]
    assert int(variables["GPUS"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["command"] == ["bash", "-euo", "pipefail", "-c"]
    host = f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"  # of the first pod
    output = run_script(container["args"][0], **variables)
    lines = expected(f"{host}:29400", "cohort", 8, "/runs/gsm8k")
    assert [line for line in output.splitlines() if line in lines] == lines
