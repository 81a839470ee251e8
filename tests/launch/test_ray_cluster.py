"""``cohort launch --ray`` on two simulated nodes of one core each. Needs the extra ``ray``."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cohort.errors import ConfigError
from cohort.launch import Job, ray_cluster

HERE = Path(__file__).parent
SCRIPT = """
    import sys
    from pathlib import Path
    from ray.cluster_utils import Cluster
    from cohort.errors import ConfigError
    from cohort.flags import LaunchFlags
    from cohort.launch import Job, launch
    import os

    RAY = LaunchFlags(ray=True)

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = cluster.address
    folder = Path(sys.argv[1])
    for what in ("work", "agree", "raise", "kill"):
        code = launch(Job((what, "$$ a b"), folder / what, ranks=2, flags=RAY, device="cpu", module="stub"))
        print(what, code, flush=True)
    try:
        launch(Job(("work",), folder / "many", ranks=3, flags=RAY, device="cpu", module="stub"))
    except ConfigError as error:
        print(error)
    cluster.shutdown()
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_two_simulated_nodes(tmp_path):
    pytest.importorskip("ray")
    unset = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | {
        "PYTHONPATH": f"{HERE.parents[1] / 'src'}{os.pathsep}{HERE}",
        "TORCH_CPP_LOG_LEVEL": "FATAL",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    printed = done.stdout.splitlines()
    codes = [line for line in printed if line.split(" ")[0] in ("work", "agree", "raise", "kill")]
    assert codes == ["work 0", "agree 2", "raise 1", "kill 1"], done.stderr
    assert "3 ranks of 1 CPU do not fit the Ray cluster, which has 2: start fewer --ranks" in done.stdout
    assert sum("rank 0 of 2, 1 threads, ['$$ a b']" in line for line in printed) == 4
    assert not any("rank 1 of 2" in line for line in printed)
    assert "rank 1 of 2, 1 threads, ['$$ a b']" in (tmp_path / "work" / "logs" / "rank-1.log").read_text()
    assert sum("sum 4" in line for line in printed) == 1
    log = tmp_path / "raise" / "logs" / "rank-1.log"
    assert f"cohort: error: rank 1 failed: ValueError: boom; the traceback is in {log}\n" in done.stderr
    assert "cohort: error: rank 1 was ended by SIGKILL, so all ranks were ended" in done.stderr
    assert done.stderr.count("cohort: error: ") - done.stderr.count("cohort: error: reward broke") == 2


def test_ranks_of_a_node_are_neighbours(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    addresses = [("a", "10.0.0.1", 7001), ("b", "10.0.0.2", 7002), ("a", "10.0.0.1", 7003)]
    found = ray_cluster._variables(Job(("train",), tmp_path, ranks=3, device="cpu"), addresses)
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HF_HOME")
    assert [" ".join(one[name] for name in names) for one in found] == [
        "0 0 2 3 10.0.0.1 7001 /models",
        "2 0 1 3 10.0.0.1 7001 /models",
        "1 1 2 3 10.0.0.1 7001 /models",
    ]
    gpus = ray_cluster._variables(Job(("train",), tmp_path, ranks=3, device="cuda"), addresses)
    assert [one["LOCAL_RANK"] for one in gpus] == ["0", "0", "0"]  # Ray shows each its own GPU only


def test_ray_is_an_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"--ray needs Ray: pip install 'cohort-rl\[ray\]'"):
        ray_cluster.start_in_ray(Job(("train",), tmp_path, ranks=2))
