"""What ``cohort launch`` refuses before anything starts, and which failure it names."""

import signal
from pathlib import Path

import pytest

from cohort.cli import main
from cohort.errors import ConfigError
from cohort.launch import Job, rank
from cohort.launch import job as job_module
from cohort.launch.ends import LOG_HEADER, End, explain_failure, first_end, report
from cohort.launch.job import check_gpus
from tests.conftest import each

TRAIN = ("train", "c.toml")
SERVER = "launch --ranks 2 --dry-run train c.toml --rollout.engine server"


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(job_module, "usable_cores", lambda: 8)
    (tmp_path / "c.toml").write_text(
        "[model]\npath='m'\ndevice='cpu'\n[data]\ntrain='d.jsonl'\n[rollout]\nprompts_per_step=4\n"
    )
    return tmp_path


def test_dry_run_says_what_would_start(config, capsys):
    command = "launch --ranks 2 --layout full --dry-run train c.toml --run.output_dir out --rollout.prompts_per_step 6"
    assert main(command.split()) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ranks: 2 on this machine, threads of each: 4",
        f"run folder: {config / 'out'}",
        f"logs of ranks other than 0: {config / 'out' / 'logs' / 'rank-N.log'}",
        "each rank runs: cohort train c.toml --run.output_dir out --rollout.prompts_per_step 6 --parallel.layout full",
    ]
    assert not (config / "out").exists()


def test_ranks_write_no_logs_through_links(config, capsys, monkeypatch):
    (config / "out" / "logs").mkdir(parents=True)
    log = config / "out" / "logs" / "rank-1.log"
    log.symlink_to(config / "mine")
    assert main(["launch", "--ranks", "2", "--dry-run", "train", "c.toml", "--run.output_dir", "out"]) == 2
    assert "rank-1.log is a symbolic link" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(rank.os, "dup2", lambda *_: None)
        with pytest.raises(OSError, match="symbolic links"):
            rank._print_to(log)
    assert not (config / "mine").exists()


def test_all_ranks_get_the_same_free_folder(config, capsys):
    (config / "runs" / "run-001").mkdir(parents=True)
    assert main(["launch", "--ranks", "2", "--dry-run", "train", "c.toml"]) == 0
    assert "each rank runs: cohort train c.toml --run.output_dir runs/run-002" in capsys.readouterr().out
    assert main(["launch", "--ranks", "2", "--dry-run", "demo", "tool", "--seed", "3"]) == 0
    assert "each rank runs: cohort demo tool --seed 3 --output-dir runs/demo-001" in capsys.readouterr().out


def test_ranks_without_prompts_are_for_memory(config):
    for layout in ("--layout full train c.toml", "train c.toml --parallel.layout full"):
        assert main(f"launch --ranks 5 --dry-run {layout}".split()) == 0


def test_a_run_is_resumed_on_ranks(config, capsys):
    (config / "out").mkdir()
    (config / "c.toml").rename(config / "out" / "config.toml")
    assert (
        main(["launch", "--ranks", "2", "--max-restarts", "1", "--dry-run", "resume", "out", "--run.max_steps", "9"])
        == 0
    )
    shown = capsys.readouterr().out
    assert f"run folder: {config / 'out'}\n" in shown
    assert "each rank runs: cohort resume out --run.max_steps 9\n" in shown


def test_several_machines(config, capsys):
    command = (
        "launch --ranks 2 --nnodes 2 --rdzv-endpoint a:29400 --rdzv-id 7 --max-restarts 3 --dry-run "
        "train c.toml --resume auto --run.output_dir out"
    )
    assert main(command.split()) == 0
    output = capsys.readouterr().out
    assert "machines: 2, 4 ranks in all; they meet at a:29400 as '7'" in output
    assert "restarts after a failure: 3" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("launch", "cohort launch starts 'train', 'resume' or 'demo'"),
        ("launch --ranks 2 eval model", "or 'demo', got 'eval'; others run in one process"),
        ("launch --ranks 2 launch --ranks 2 train c.toml", "or 'demo', got 'launch'"),
        ("launch --ranks 2 train c.toml --rollout.nonsense 3", "unknown setting --rollout.nonsense"),
        ("launch --ranks 2 train nope.toml", "no config file nope.toml"),
        ("launch --ranks 2 train --help", "cannot start 'cohort train --help'"),
        ("launch --ranks 0 train c.toml", "Must be >= 1"),
        ("launch --ranks 5 train c.toml", "5 ranks would share the 4 prompts of a step"),
        ("launch --ranks 5 train c.toml --parallel.layout optimizer", "start fewer ranks, or take the layout 'full'"),
        ("launch --ranks 2 --layout full demo", "leave it out"),
        ("launch --ranks 2 --nnodes 2 train c.toml", "--nnodes 2 needs a place where the machines meet"),
        ("launch --ranks 2 --nnodes 2 --rdzv-endpoint a train c.toml", "must be HOST:PORT"),
        ("launch --ranks 2 --nnodes 2 --rdzv-endpoint a:1 train c.toml", "set run.output_dir"),
        ("launch --ranks 2 --max-restarts 1 train c.toml", "add --resume auto"),
        ("launch --ranks 2 --max-restarts 1 train c.toml --resume", "add --resume auto"),
        ("launch --ranks 2 train c.toml --resume", "to resume a run, set run.output_dir to its folder"),
        ("launch --ranks 2 --dry-run train c.toml --resume auto", "to resume a run, set run.output_dir"),
        ("launch train c.toml --ranks 2", "--ranks is an option of cohort launch: put it before 'train'"),
        ("launch train c.toml --rdzv-id=7", "--rdzv-id is an option of cohort launch: put it before 'train'"),
        (
            "launch --layout full train c.toml --parallel.layout optimizer",
            "--layout is 'full' and --parallel.layout 'optimizer': leave one of them out",
        ),
        (
            "launch --ranks 2 --layout full --dry-run train c.toml --rollout.lag 1",
            "rollout.lag, with rollout.engine 'l",
        ),
        ("launch --ranks 2 --dry-run train c.toml --rollout.engine server", "set server.url to the address of one"),
        (f"{SERVER} --server.url http://8.8.8.8:8000", "is a public address (8.8.8.8)"),
        (f"{SERVER} --vllm.start true", "unknown setting --vllm.start: set rollout.engine = 'vllm'"),
        ("launch --ray --ranks 2 --max-restarts 1 train c.toml --resume auto", "--ray chooses the machines itself"),
        ("launch --ranks 2 train c.toml --model.device cuda:1", "is one GPU, and there are 2 ranks"),
    ],
)
def test_refused_with_what_to_do(config, capsys, arguments, message):
    assert main(arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_a_rank_does_not_launch_ranks(config, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["launch", "--ranks", "2", "--dry-run", "train", "c.toml"]) == 2
    assert "this process is a rank already (RANK and WORLD_SIZE are set)" in capsys.readouterr().err


def test_every_rank_needs_a_gpu(config, capsys, monkeypatch):
    monkeypatch.setattr(job_module, "_gpus", lambda device: 0 if device == "cpu" else 2)
    for device, ranks in (("auto", 2), ("cpu", 1)):
        assert main(["launch", "--dry-run", "train", "c.toml", "--model.device", device]) == 0
        assert f"ranks: {ranks} on this machine" in capsys.readouterr().out
    check_gpus(Job(TRAIN, Path("out"), ranks=2))
    check_gpus(Job(TRAIN, Path("out"), ranks=3, device="cpu"))
    with pytest.raises(ConfigError, match="--ranks 3 needs 3 GPUs on this machine, 2 are visible: start --ranks 2, or"):
        check_gpus(Job(TRAIN, Path("out"), ranks=3))
    monkeypatch.setattr(job_module, "_gpus", lambda device: 0)
    with pytest.raises(ConfigError, match="no GPU is visible: set model.device to 'cpu'"):
        check_gpus(Job(TRAIN, Path("out"), ranks=1, device="cuda"))


@pytest.mark.parametrize(("given", "threads"), [("3", 3), ("", 4), (None, 4)])
def test_threads_are_the_cores_divided_by_the_ranks_unless_set(config, monkeypatch, given, threads):
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert Job(TRAIN, Path("out"), ranks=2).threads == threads
    if given != "3":
        assert Job(TRAIN, Path("out"), ranks=9).threads == 1


KILLED, TERMINATED = -signal.SIGKILL, -signal.SIGTERM


@each(
    ("ends", "first"),
    [
        ([End(0, 1, 10.9, "lost"), End(1, KILLED, 11.0)], 1),  # killed first, though noticed later
        ([End(0, KILLED, 18.1), End(1, 1, 10.0, "boom")], 1),  # the launcher killed rank 0, which did not end
        ([End(0, TERMINATED, 10.0), End(1, 1, 10.5, "boom")], 0),  # ended by somebody else
        ([End(1, 1, 10.5, "boom"), End(0, TERMINATED, 10.0)], 1),  # ended by the launcher
        ([End(0, 1, 10.6, "lost"), End(1, 1, 10.5, "boom")], 1),
        ([End(0, 1, 10.0, ""), End(1, 7, 10.2)], 1),  # os._exit
    ],
)
def test_the_first_failure_is_the_cause(ends, first):
    assert first_end(ends).rank == first


def test_a_failure_is_explained(tmp_path):
    job = Job(TRAIN, tmp_path, ranks=2)
    code, text = explain_failure(job, [End(1, KILLED, 1.0), End(0, TERMINATED, 2.0)])
    assert (code, text) == (
        1,
        "rank 1 was ended by SIGKILL, so all ranks were ended; without a known sender, SIGKILL usually means that the "
        f"machine ran out of memory; {tmp_path} has no checkpoint yet",
    )
    (tmp_path / "checkpoints" / "step-7").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-9.part").mkdir()
    job.log(1).parent.mkdir()
    job.log(1).write_text("one\ncohort: error: no disk\n\n")
    _, text = explain_failure(job, [End(1, -signal.SIGSEGV, 1.0), End(0, TERMINATED, 2.0)])
    assert text.endswith(
        f"log is {job.log(1)}; {tmp_path} has a checkpoint of step 7: continue with 'resume {tmp_path}'"
    )
    assert explain_failure(job, [End(1, 2, 1.0, ""), End(0, 2, 1.1, "")]) == (2, None)  # rank 0 has said it
    assert explain_failure(job, [End(1, 2, 1.0, ""), End(0, 1, 1.1, "")]) == (
        2,
        f"rank 1: no disk; its log is {job.log(1)}",
    )


def test_a_rank_that_ends_without_a_message(tmp_path):
    job = Job(TRAIN, tmp_path, ranks=2)
    log = job.log(1)
    log.parent.mkdir()
    log.write_text(f"cohort: error: of an earlier start\n{LOG_HEADER}1 of 2, 2026-01-01 00:00:00, process 5 on node\n")
    message = f"rank 1 ended with exit code 7, without a message; its log is {log}; {tmp_path} has no checkpoint yet"
    assert explain_failure(job, [End(1, 7, 1.0, ""), End(0, TERMINATED, 2.0)]) == (7, message)
    with log.open("a") as file:
        file.write("a line of the run\n")
    assert explain_failure(job, [End(1, 7, 1.0), End(0, 7, 2.0, "")]) == (7, message)


@pytest.mark.parametrize(
    ("numbered", "code", "file", "stays"),
    [(True, 2, None, False), (False, 2, None, True), (True, 1, None, True), (True, 2, "config.toml", True)],
)
def test_a_refused_start_leaves_no_numbered_folder(tmp_path, numbered, code, file, stays):
    job = Job(TRAIN, tmp_path / "run-001", ranks=2, numbered=numbered)
    job.log(1).parent.mkdir(parents=True)
    job.log(1).touch()
    if file:
        (job.folder / file).touch()
    assert report(job, [End(1, code, 1.0, ""), End(0, code, 1.1, "")]) == code
    assert job.folder.exists() == stays
