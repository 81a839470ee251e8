"""``cohort launch`` with real processes, which run ``stub.py`` instead of Cohort."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cohort.errors import CohortError, ConfigError
from cohort.flags import LaunchFlags
from cohort.launch import Job, launch, processes
from tests import warm

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


def main():
    """Run by ``start`` in a process of its own."""
    what, folder, *more = sys.argv[1:]
    flags = LaunchFlags(**dict(zip(("nnodes", "rdzv_endpoint", "rdzv_id"), (2, *more), strict=False)) if more else {})
    job = Job((what, "$$ ${rank} a b"), Path(folder), 1 if more else 2, flags=flags, device="cpu", module="stub")
    try:
        return launch(job)
    except CohortError as error:
        print(f"cohort: error: {error}", file=sys.stderr)
        return 1


def start(what, folder, *more, **variables):
    """A launcher with two ranks, or one node of two."""
    environment = dict.fromkeys(("OMP_NUM_THREADS", "RANK", "WORLD_SIZE"))
    environment |= {"PYTHONPATH": f"{SOURCE}{os.pathsep}{HERE}", "TORCH_CPP_LOG_LEVEL": "FATAL", **variables}
    return warm.begin(what, str(folder), *more, module="tests.launch.test_processes", **environment)


def finish(process):
    try:
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, output, errors


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


def log_of(folder, rank=1):
    path = folder / "logs" / f"rank-{rank}.log"
    return path.read_text() if path.exists() else ""


def processes_of(folder):
    """Ranks of a run that are alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"COHORT_TEST={folder}".encode() in path.read_bytes() and b"RANK=" in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_a_killed_rank_ends_all_and_is_named(tmp_path):
    process = start("kill", tmp_path)
    wait_for(lambda: "rank 1 of 2" in log_of(tmp_path))
    code, output, errors = finish(process)
    assert code == 1
    cores = len(os.sched_getaffinity(0))
    first = f"{max(1, cores // 2)} threads, ['$$ ${{rank}} a b']"
    assert output == f"rank 0 of 2, {first}\n"  # nothing of rank 1
    assert errors.startswith("cohort: error: rank 1 was ended by SIGKILL, so all ranks were ended; ")
    assert errors.endswith(f"; its log is {tmp_path / 'logs' / 'rank-1.log'}; {tmp_path} has no checkpoint yet\n")
    assert len(errors.splitlines()) == 1
    assert f"rank 1 of 2, {first}\n" in log_of(tmp_path)
    assert "RuntimeError: " in log_of(tmp_path, 0)  # the traceback of what it did to rank 0


@pytest.mark.ranks
def test_success(tmp_path):
    code, output, errors = finish(start("work", tmp_path, OMP_NUM_THREADS="3"))
    assert (code, errors) == (0, "")
    assert output.splitlines() == ["rank 0 of 2, 3 threads, ['$$ ${rank} a b']", "sum 4"]
    lines = log_of(tmp_path).splitlines()
    assert lines[0].startswith("--- ")
    assert lines[-1] == "sum 4"
    assert not log_of(tmp_path, 0)
    assert finish(start("work", tmp_path))[0] == 0
    assert log_of(tmp_path).count("sum 4") == 2  # logs of an earlier start are kept


@pytest.mark.ranks
def test_an_unexpected_error_of_one_rank_is_one_line_on_the_console(tmp_path):
    code, _, errors = finish(start("raise", tmp_path))
    log = tmp_path / "logs" / "rank-1.log"
    assert code == 1
    assert errors == f"cohort: error: rank 1 failed: ValueError: boom; the traceback is in {log}\n"
    assert 'raise ValueError("boom")' in log_of(tmp_path)


@pytest.mark.ranks
def test_an_error_that_all_ranks_report_is_printed_once(tmp_path):
    code, _, errors = finish(start("agree", tmp_path))
    assert (code, errors) == (2, "cohort: error: reward broke\n")


@pytest.mark.ranks
def test_an_error_that_one_rank_reports_is_printed_with_its_number(tmp_path):
    code, _, errors = finish(start("disagree", tmp_path))
    log = tmp_path / "logs" / "rank-1.log"
    assert (code, errors) == (1, f"cohort: error: rank 1: the disk of this machine is full; its log is {log}\n")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("number", "code", "errors"),
    [
        (signal.SIGINT, 130, "cohort: interrupted\n"),
        (signal.SIGTERM, 143, "cohort: ended by SIGTERM, with all ranks of this machine\n"),
        (signal.SIGKILL, -9, ""),
    ],
)
def test_a_signal_to_the_launcher_ends_all_ranks(tmp_path, number, code, errors):
    process = start("wait", tmp_path, COHORT_TEST=str(tmp_path))
    wait_for(lambda: "rank 1 of 2" in log_of(tmp_path) and len(processes_of(tmp_path)) >= 2)
    time.sleep(1)  # rank 0 may be a little behind
    process.send_signal(number)
    started = time.monotonic()
    assert finish(process)[::2] == (code, errors)
    wait_for(lambda: not processes_of(tmp_path), 10)
    assert time.monotonic() - started < 10


@pytest.mark.ranks
def test_two_nodes_meet(tmp_path):
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = [start("work", tmp_path / name, endpoint, "job-1") for name in ("a", "b")]
    results = [finish(node) for node in nodes]
    assert [(code, errors) for code, _, errors in results] == [(0, ""), (0, "")]
    assert sorted(output.count("sum 4") for _, output, _ in results) == [0, 1]  # one console: of the node with rank 0
    assert sorted("sum 4" in log_of(tmp_path / name) for name in ("a", "b")) == [False, True]


@pytest.mark.ranks
def test_a_killed_rank_ends_the_other_node(tmp_path):
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = [start("kill", tmp_path / name, endpoint, "job-2") for name in ("a", "b")]
    results = [finish(node) for node in nodes]
    assert [code for code, _, _ in results] == [1, 1]
    errors = sorted(errors for _, _, errors in results)
    assert errors[0].startswith("cohort: error: rank 0 failed: RuntimeError: ")
    assert errors[1].startswith("cohort: error: rank 1 was ended by SIGKILL")


def test_a_port_in_use_is_refused(monkeypatch):
    monkeypatch.setattr(processes, "SECONDS_TO_ANSWER", 0.1)
    processes._check_endpoint("127.0.0.1", str(free_port()))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is used by another program: choose another"):
            processes._check_endpoint("127.0.0.1", str(port))


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_the_launcher_passes_sigquit_on_to_its_ranks(tmp_path):
    rank = subprocess.Popen(["sh", "-c", "trap 'exit 7' QUIT; echo ready; sleep 20 & wait"], stdout=subprocess.PIPE)
    assert rank.stdout.readline() == b"ready\n"
    (tmp_path / "rank-0.pid").write_text(str(rank.pid))
    with processes._passing_on_signals(tmp_path) as passed_on:
        os.kill(os.getpid(), signal.SIGQUIT)
        assert rank.wait(10) == 7
    rank.stdout.close()
    assert passed_on == []  # it is no reason to end
    assert signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL
