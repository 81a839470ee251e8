"""``cohort resume RUN``, ``--resume``, and what differs from the run so far."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from cohort import GRPOConfig, GRPOTrainer
from cohort.cli import main
from cohort.config import load_config
from cohort.errors import RunFolderError
from cohort.runs import changes
from cohort.runs.folder import RunFolder
from cohort.runs.trust import remember
from tests.conftest import DEMO_MODEL, tiny_llama
from tests.train.harness import digits_reward, untimed_metrics_of

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it

REWARD = "def digits(completions, answer, limit=1, **_):\n    return [float(sum(c.isdigit() for c in t)) for t in completions]\n"
ROWS = [{"prompt": f"{n}+1", "answer": str(n + 1)} for n in range(8)]


CONFIG = (
    f"[model]\npath='{DEMO_MODEL}'\ndevice='cpu'\nprecision='float32'\n[data]\ntrain='rows.jsonl'\n"
    "[reward]\nfunctions=['reward.py:digits']\n[report]\nprogress=false\n[optim]\nlearning_rate=1e-3\n"
    "[rollout]\nprompts_per_step=2\nnum_generations=2\nmax_completion_length=4\ntemperature=0.9\n"
    "[run]\noutput_dir='out'\nmax_steps=3\nsave_steps=1\n"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A complete run of three steps."""
    project = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        write_rows(ROWS)
        Path("reward.py").write_text(REWARD)
        Path("c.toml").write_text(CONFIG)
        assert main(["train", "c.toml"]) == 0
    return project / "out"


@pytest.fixture
def project(whole, tmp_path, monkeypatch):
    """A folder with a config whose names are relative, as working directory. In it, the run as a kill in its second step
    leaves it, as if it had been started here."""
    project = tmp_path / "project"
    shutil.copytree(whole.parent, project)
    monkeypatch.chdir(project)
    config = project / "out" / "config.toml"
    config.write_text(config.read_text().replace(str(whole.parent), str(project)))
    remember(project / "out")
    (project / "out" / "summary.json").unlink()
    for step in (2, 3):
        shutil.rmtree(project / "out" / "checkpoints" / f"step-{step}")
    return project


def write_rows(rows):
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def weights(folder, step):
    return (folder / "checkpoints" / f"step-{step}" / "model.safetensors").read_bytes()


def test_a_run_is_resumed_from_its_folder_alone(whole, project, tmp_path, monkeypatch, capsys):
    """Started with overrides, resumed from another working directory, and again with ``--resume`` without them."""
    Path("c.toml").write_text(CONFIG.replace("temperature=0.9", "temperature=0.5"))
    shutil.rmtree("out")
    assert main(["train", "c.toml", "--rollout.temperature", "0.9", "--run.max_steps=1"]) == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    capsys.readouterr()
    assert main(["resume", "../project/out"]) == 0
    assert capsys.readouterr().out == f"{project}/out is complete\n"
    monkeypatch.chdir(elsewhere)
    Path("rows.jsonl").write_text('{"prompt": "another", "answer": "1"}\n')
    assert main(["resume", "../project/out", "--run.max_steps", "2", "--data.train", "rows.jsonl"]) == 2
    assert "the training data has 1 prompts" in capsys.readouterr().err
    (elsewhere / "rows.jsonl").unlink()
    assert main(["resume", "../project/out", "--run.max_steps", "2", "--report.progress", "true"]) == 0
    shown = capsys.readouterr().out
    assert f"resuming {project}/out after step 1" in shown
    assert "different from the run so far:\n  run.max_steps: the run has 1, now 2\n  report.progress" in shown
    monkeypatch.chdir(project)
    assert main(["train", "c.toml", "--resume", "--run.max_steps", "3"]) == 0
    assert "apply again: rollout.temperature, report.progress\n" in capsys.readouterr().out
    assert untimed_metrics_of(project / "out") == untimed_metrics_of(whole)
    assert weights(project / "out", 3) == weights(whole, 3)
    assert not list(elsewhere.iterdir())


def test_relative_names_of_an_older_run_are_made_absolute(project, tmp_path, monkeypatch, capsys):
    config = project / "out" / "config.toml"
    text = config.read_text()
    config.write_text(text.replace(f"{project}/", ""))
    assert main(["resume", "out"]) == 2
    assert "reward.functions: reward.py:digits\nNothing was run" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main(["resume", "project/out", "--trust", "project/out"]) == 2
    error = capsys.readouterr().err
    assert "name rows.jsonl (data.train), reward.py (reward.functions), which are not there; the run was start" in error
    monkeypatch.chdir(project)
    assert main(["resume", "out", "--trust", "out", "--run.max_steps", "2"]) == 0
    again = load_config(config, of_run=True)
    assert (again.data.train, again.reward.functions) == (f"{project}/rows.jsonl", (f"{project}/reward.py:digits",))
    monkeypatch.chdir(tmp_path)
    assert main(["resume", "project/out", "--run.max_steps", "3"]) == 0  # it is this account's now


@pytest.mark.parametrize("left", ["summary.json", "merged", "best", "step-2.broken"])
def test_a_run_whose_checkpoints_were_removed_is_not_started_again(project, capsys, left):
    """To save disk, say: what it has beside them is not to be lost."""
    shutil.rmtree("out/checkpoints")
    Path("out/checkpoints/step-3.part").mkdir(parents=True)
    if left == "summary.json":
        Path("out", left).write_text("{}")
    elif left == "best":
        Path("out/best").mkdir()
        Path("out/best/best.json").write_text('{"step": 3, "metric": "m", "value": 1, "measured": {}}')
    else:
        Path("out", "checkpoints" if "step" in left else "", left).mkdir()
    before = Path("out/metrics.jsonl").read_bytes()
    for command in (["train", "c.toml", "--resume"], ["resume", "out", "--run.max_steps", "4"]):
        assert main(command) == 2
        assert f"it is not started again over what it has: {'checkpoints/' * ('step' in left)}{left}" in (
            capsys.readouterr().err
        )
    assert Path("out/metrics.jsonl").read_bytes() == before
    if left == "summary.json":
        assert main(["resume", "out"]) == 0  # it is complete


def test_a_run_killed_after_its_last_checkpoint_is_completed(demo_tokenizer, tmp_path):
    """Before the summary, and the model with its adapter merged, are written."""
    base = str(tmp_path / "base")
    tiny_llama(vocab_size=len(demo_tokenizer)).save_pretrained(base)
    demo_tokenizer.save_pretrained(base)
    settings = {
        "max_steps": 2,
        "eval_rows": 2,
        "metric_for_best_model": "eval/reward/mean",
        "output_dir": tmp_path / "run",
    }
    settings |= {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4}
    settings |= {"lora": {"rank": 2, "save_merged": True}}

    def run(resume):
        trainer = GRPOTrainer(base, digits_reward, GRPOConfig(**settings, progress=False, device="cpu"), ROWS, ROWS)
        return trainer.train(resume=resume)

    def files():
        found = [tmp_path / "run" / "summary.json", *(tmp_path / "run" / "merged").glob("*")]
        return {path.name: path.read_bytes() for path in found if path.name != "summary.json"}, json.loads(
            found[0].read_text()
        )

    run(False)
    merged, summary = files()
    (tmp_path / "run" / "summary.json").unlink()
    assert "model.safetensors" in merged
    (tmp_path / "run" / "merged" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "run" / "merged" / "config.json").unlink()
    run(True)
    again, completed = files()
    assert again == merged
    timed = ("seconds", "seconds_to_first_update")
    assert completed == {key: value for key, value in summary.items() if key not in timed} | {
        "seconds": completed["seconds"]
    }
    assert run("auto") == completed  # and nothing is done


def changed_answers(monkeypatch):
    write_rows([row | {"answer": "0"} for row in ROWS])


def changed_value(monkeypatch):
    Path("c.toml").write_text(CONFIG.replace("reward.py:digits", "reward.py:digits(limit=2)"))


def changed_version(monkeypatch):
    monkeypatch.setattr(changes, "version", lambda name: "0.1" if name == "torch" else version(name))


def changed_model(monkeypatch):
    shutil.copytree(DEMO_MODEL, "other")
    config = json.loads(Path("other/config.json").read_text())
    Path("other/config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    Path("c.toml").write_text(Path("c.toml").read_text().replace(str(DEMO_MODEL), "other"))


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        (changed_answers, "columns", "columns: answer is not the same"),
        (changed_value, "values", "values: reward digits is new"),
        (changed_version, "versions", "versions: torch 0.1, was"),
        (changed_model, "model", "model: config is not the same"),
    ],
)
def test_what_changes_results_is_refused(project, monkeypatch, capsys, change, key, message):
    change(monkeypatch)
    command = ["train", "c.toml", "--resume", "--run.max_steps", "2"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert message in error
    assert f"--allow-changed {key};" in error
    if key != "model":
        return
    assert main([*command, "--report.progress", "true", "--allow-changed", key]) == 0
    assert message in capsys.readouterr().out
    assert main([*command[:-1], "3"]) == 0  # the run has it now


def test_a_changed_file_of_a_reward_is_said(project, capsys):
    Path("reward.py").write_text(REWARD.replace("float(", "2 * float("))
    assert main(["train", "c.toml", "--resume", "--run.max_steps", "2", "--report.progress", "true"]) == 0
    assert "\n  code: reward digits is not the same\n" in capsys.readouterr().out


def test_a_resumed_run_takes_the_threads_of_its_start(whole, project, capsys):
    before, command = torch.get_num_threads(), ["train", "c.toml", "--resume", "--report.progress", "true"]
    try:
        torch.set_num_threads(before + 1)
        assert main([*command, "--run.max_steps", "2"]) == 0
        assert f"threads: {before}, as the run had, not {before + 1}" in capsys.readouterr().out
        assert weights(project / "out", 2) == weights(whole, 2)
        torch.set_num_threads(before + 1)
        assert main([*command, "--run.max_steps", "3", "--allow-changed", "threads"]) == 0
        assert "rounding may differ from here on: threads" in capsys.readouterr().out
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_another_model_under_an_adapter_is_noticed(demo_tokenizer, tmp_path):
    def run(scale, **settings):
        model = tiny_llama(vocab_size=len(demo_tokenizer))
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(scale)
        settings |= {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4, "lora": {"rank": 2}}
        config = GRPOConfig(**settings, output_dir=tmp_path / "run", progress=False, device="cpu")
        return GRPOTrainer(model, digits_reward, config, ROWS, processing_class=demo_tokenizer)

    run(1, max_steps=1).train()
    with pytest.raises(RunFolderError, match="model: frozen weights is not the same"):
        run(1.01, max_steps=2).train(resume=True)
    assert run(1, max_steps=2).train(resume=True)["steps"] == 2


def test_settings_alone_are_no_run(project, capsys):
    """A recipe's folder: nothing trains into it, and nothing replaces its settings."""
    shutil.rmtree("out")
    Path("mine").mkdir()
    shutil.copyfile("c.toml", "mine/config.toml")
    commands = [["train", "c.toml", "--resume", "--run.output_dir", "mine"], ["watch", "mine", "--once"]]
    for command in (["resume", "mine"], *commands, ["diagnose", "mine"], ["report", "mine"]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "mine is not a run folder: it has settings, but no run was started here (no starts.jsonl)" in error
        assert "mine/config.toml'?" in error
    for more in ([], ["--resume", "auto"]):
        assert main(["train", "c.toml", "--run.output_dir", "mine", *more]) == 2
    assert [path.name for path in Path("mine").iterdir()] == ["config.toml"]
    assert Path("mine/config.toml").read_text() == Path("c.toml").read_text()
    # One that was killed when it had written its settings has left its lock.
    Path("mine/run.lock").write_text("{}")
    RunFolder("mine").check_is_run()


def test_a_folder_that_is_no_run_is_said_to_be_none(project, capsys):
    shutil.copytree(DEMO_MODEL, "model")
    for command in (["resume", "model"], ["train", "c.toml", "--resume", "--run.output_dir", "model"]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert (
            "model is not a run folder: it has no config.toml. It holds a model: to train it, set model.path" in error
        )
        assert "remove" not in error
    assert main(["resume", "out/checkpoints/step-1"]) == 2
    assert f"Its run is {project}/out." in capsys.readouterr().err
    assert main(["resume", "nowhere"]) == 2
    assert "there is no run folder" in capsys.readouterr().err
    assert main(["train", "c.toml", "--allow-changed", "code"]) == 2
    assert "--allow-changed is for a run that goes on: add --resume" in capsys.readouterr().err


def script_reward(completions, **_):
    return digits_reward(completions)


def python_run(folder, **given):
    names = {"model": str(DEMO_MODEL), "reward_funcs": script_reward, "train_dataset": "rows.jsonl"}
    settings = {
        "prompts_per_step": 2,
        "num_generations": 2,
        "max_completion_length": 4,
        "max_steps": 2,
        "device": "cpu",
    }
    config = GRPOConfig(**settings, output_dir=folder, save_steps=1)
    return GRPOTrainer(**names | given, args=config)


def stop_after_the_first_step(trainer):
    steps = trainer.steps()
    next(steps)
    steps.close()


def test_a_run_begun_in_python_is_resumed_from_its_folder(project, tmp_path, monkeypatch, capsys):
    python_run("straight").train()
    stop_after_the_first_step(python_run("mine"))
    assert "to be given again" not in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert main(["resume", "project/mine"]) == 0
    assert weights(project / "mine", 2) == weights(project / "straight", 2)


def test_what_has_no_name_is_said_at_the_start(project, demo_tokenizer, capsys):
    """A model and a tokenizer in memory are read from the checkpoint; rows and nested functions must be given again."""
    model = {"model": tiny_llama(vocab_size=len(demo_tokenizer)), "processing_class": demo_tokenizer}
    stop_after_the_first_step(python_run("mine", **model))
    assert main(["resume", "mine"]) == 0
    python_run("straight", **model | {"model": tiny_llama(vocab_size=len(demo_tokenizer))}).train()
    assert weights(project / "mine", 2) == weights(project / "straight", 2)

    rows = {"train_dataset": ROWS, "reward_funcs": lambda completions, **_: digits_reward(completions)}
    stop_after_the_first_step(python_run("rows", **rows))
    assert "to be given again to resume: train_dataset (rows in memory), reward_funcs (" in capsys.readouterr().out
    assert main(["resume", "rows"]) == 2
    error = capsys.readouterr().err
    assert "its folder does not name train_dataset (rows in memory), reward_funcs (" in error
    assert "or name them: --data.train NAME --reward.functions NAME" in error
    assert python_run("rows", **rows).train(resume="auto")["steps"] == 2
