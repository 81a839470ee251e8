"""A run's models and settings as `cohort eval` and `cohort generate` take them, from any folder."""

import contextlib
import importlib.util
import json
import shutil
import sys
from dataclasses import replace

import pytest

from cohort.cli import main
from cohort.config import load_config
from cohort.errors import ConfigError, ModelError, RunFolderError
from cohort.evaluation.command import Request as Evaluation
from cohort.evaluation.evaluate import eval_sampling
from cohort.generate.request import Request as Generation
from cohort.generate.request import note_on_template, read_rows, render
from cohort.rewards.names import resolve_reward
from cohort.runs.chosen import model_of, run_of
from cohort.runs.trust import remember
from tests.train.harness import ROWS, make_trainer

DIGITS = "def digits(completions, **_):\n    return [sum(c.isdigit() for c in text) / 9 for text in completions]\n"


@pytest.fixture(scope="module")
def project(demo_tokenizer, tmp_path_factory):
    """A folder with data, a reward function and a run that was started in it."""
    path = tmp_path_factory.mktemp("project")
    (path / "held").mkdir()
    (path / "held" / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:4]))
    (path / "mine.py").write_text(DIGITS)
    settings = {"data": {"train": "held/data.jsonl", "eval": "held/data.jsonl"}, "functions": ["mine.py:digits"]}
    settings |= {"max_steps": 2, "save_steps": 1, "num_generations_eval": 2, "temperature_eval": 0.8, "seed": 7}
    with contextlib.chdir(path):
        make_trainer(demo_tokenizer, "run", rewards=None, rows=None, **settings).train()
    return path


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "elsewhere"


@pytest.fixture
def copied(project, tmp_path):
    """A copy of the run, whose settings may be changed."""
    shutil.copytree(project / "run", tmp_path / "run")
    remember(tmp_path / "run")
    return tmp_path / "run"


def change(run, *changes):
    text = (run / "config.toml").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    (run / "config.toml").write_text(text)
    remember(run)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_eval_and_generate_draw_the_same_from_any_folder(project, elsewhere, capsys):
    """Data, reward and sampling of the run; and the same random numbers, so the same completions."""
    run = str(project / "run")
    assert main(["eval", run, "--output", "eval.jsonl", "--json", "all.json", "--quiet"]) == 0
    (metrics,) = json.loads((elsewhere / "all.json").read_text())["metrics"]
    of_run = {key: value for key, value in lines(project / "run" / "metrics.jsonl")[-1].items() if key[:5] == "eval/"}
    assert metrics == pytest.approx(of_run, abs=1e-9, nan_ok=True)
    sources = ["--prompts", str(project / "held" / "data.jsonl"), "--n", "2", "--output", "out.jsonl"]
    assert main(["generate", run, *sources]) == 0
    said = capsys.readouterr().err
    assert f"the newest checkpoint of the run, after step 2, with the settings of the run {run}" in said
    assert "temperature 0.8, " in said
    assert "seed 7" in said
    drawn = [sample["completion"] for row in lines(elsewhere / "eval.jsonl") for sample in row["samples"]]
    assert [line["text"] for line in lines(elsewhere / "out.jsonl")] == drawn
    # Names that are given belong to this folder.
    (elsewhere / "mine.py").write_text(DIGITS.replace("/ 9", "* 0 + 3"))
    assert main(["eval", run, "--reward", "mine.py:digits", "--json", "3.json", "--quiet"]) == 0
    assert json.loads((elsewhere / "3.json").read_text())["metrics"][0]["eval/reward/mean"] == 3


def test_only_a_module_that_a_setting_names_opens_its_folder(project, copied, elsewhere, tmp_path, monkeypatch):
    """Libraries look for optional modules: the folder in which the run was started is searched for no other."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "numexpr.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    (home / "helper_of_home.py").write_text("one = 1\n")
    text = DIGITS.replace("sum(", "helper_of_home.one * sum(")
    (home / "scores_of_home.py").write_text(f"import helper_of_home\n{text}")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(home)
    change(copied, (f"{project}/mine.py:digits", "scores_of_home:digits"))
    monkeypatch.chdir(elsewhere)
    (elsewhere / "scores_of_home.py").write_text("raise RuntimeError('of another folder')")
    settings = Evaluation(str(copied)).settings()
    assert str(home) not in sys.path
    assert importlib.util.find_spec("numexpr") is None or "home" not in importlib.util.find_spec("numexpr").origin
    assert resolve_reward(*settings.reward.functions)(completions=["1234567890"]) == [10 / 9]
    assert sys.modules["scores_of_home"].__file__ == f"{home}/scores_of_home.py"


def test_which_model(project, copied):
    run = str(copied)
    assert model_of(run, "1") == (f"{run}/checkpoints/step-1", "the checkpoint of the run after step 1")
    assert model_of(run, "newest") == model_of(run)
    (copied / "checkpoint-4").symlink_to("checkpoints/step-1")  # as in a run of TRL's scripts
    assert run_of(copied / "checkpoint-4") == copied
    request = Evaluation(str(copied / "checkpoint-4"))
    assert request.settings().reward.functions == (f"{project}/mine.py:digits",)


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ("best", "has no best model: it was not evaluated .* It has: step 1, step 2"),
        ("3", "has no checkpoint of step 3. It has: step 1, step 2"),
        ("last", "expected a step, 'best' or 'newest', got 'last'"),
    ],
)
def test_models_that_a_run_has_not(project, checkpoint, message):
    with pytest.raises((ConfigError, RunFolderError), match=message):
        model_of(str(project / "run"), checkpoint)


def test_folders_that_are_no_models_of_a_run(project, copied, tmp_path):
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        model_of(str(project), "1")
    for name in ("checkpoint-9", "checkpoints/step-9"):
        with pytest.raises(RunFolderError, match=r"It has: step 1, step 2: give .*run and --checkpoint"):
            Evaluation(str(project / "run" / name)).settings()
    (copied / "checkpoints" / "step-2" / "model.safetensors").unlink()
    with pytest.raises(RunFolderError, match=r"step-2 lacks model.safetensors"):
        model_of(str(copied))


def test_folders_that_hold_no_model(project, copied, tmp_path, capsys):
    with pytest.raises(ModelError, match="held is neither a run nor a model folder"):
        model_of(str(project / "held"))
    with pytest.raises(ModelError, match=r"give .*run and --checkpoint STEP. It has: step 1, step 2"):
        model_of(str(copied / "checkpoints"))
    assert main(["export", str(copied), str(copied / "exp")]) == 2
    assert f"is inside the run {copied}" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["new", "code", str(tmp_path / "file" / "x")]) == 2
    assert f"cannot write {tmp_path}/file/x: Not a directory" in capsys.readouterr().err


def test_a_misspelt_run_beside_others(copied):
    with pytest.raises(RunFolderError, match=r"there is no .*typo. .* holds the runs run$"):
        model_of(str(copied.parent / "typo"))


def test_files_that_have_moved(project, copied, elsewhere):
    """All are named, before --trust is asked for, which would not bring them back."""
    change(copied, (f"{project}/mine.py:digits", "/nowhere/gone.py:digits"))
    with pytest.raises(RunFolderError, match=r"name /nowhere/gone.py \(reward.functions\), which is not there. If it"):
        Evaluation(str(copied)).settings()
    Evaluation(str(copied), reward=("math",)).settings()
    assert Generation(model=str(copied)).settings.run.seed == 7  # which needs no reward
    change(copied, (f'eval = "{project}/held/', 'filter = "/gone/keep.py:keep"\neval = "/gone/'))
    (copied / "config.toml").write_text((copied / "config.toml").read_text() + "\n")  # no longer known
    named = r"/gone/keep.py \(data.filter\), /nowhere/gone.py \(reward.functions\), which are not there"
    with pytest.raises(RunFolderError, match=rf"name /gone/data.jsonl \(data.eval\), {named}.*--data.eval FILE"):
        Evaluation(str(copied)).settings()
    change(copied, ("/nowhere/gone.py", "x" * 300 + ".py"))
    with pytest.raises(RunFolderError, match="x.py .reward.functions., which are not there"):
        Evaluation(str(copied)).settings()


def test_what_was_passed_in_python_is_named(project, copied):
    change(copied, (f'eval = "{project}/held/data.jsonl"', 'eval = ""'), (f'    "{project}/mine.py:digits",\n', ""))
    start = lines(copied / "starts.jsonl")[-1]
    assert start["missing"] == {"model": "an object in memory", "processing_class": "an object in memory"}
    assert "commit" in start
    start["missing"] = {"eval_dataset": "rows in memory", "reward_funcs": "<lambda> of __main__"}
    (copied / "starts.jsonl").write_text(json.dumps(start) + "\n")
    with pytest.raises(ConfigError, match=r"give --data FILE \(.*from Python, with rows in memory as eval_dataset\)"):
        Evaluation(str(copied)).settings()
    with pytest.raises(ConfigError, match=r"give --reward NAME \(.*with <lambda> of __main__ as reward_funcs\)"):
        Evaluation(str(copied), data=("rows.jsonl",)).settings()


def test_generate_takes_the_settings_of_the_run(copied, demo_tokenizer):
    plain = Generation(model=str(copied), prompt=("1+1",))
    assert [prompt.text for prompt in render(plain, read_rows(plain), demo_tokenizer)] == ["1+1"]
    change(
        copied,
        ('format = "auto"', 'format = "chat"\nsystem_prompt = "7+7"\nprompt_template = "{question} = ?"'),
        ("top_k = 0", "top_k = 5"),
        ("stop = []", 'stop = ["x"]'),
        ("max_batch_size = 256", "max_batch_size = 3"),
        ("max_turns = 16", 'max_turns = 2\ntools = ["calculator"]'),
        ("tools = []\n", ""),
    )
    request = Generation(model=str(copied), prompt=("1+1",))
    settings = request.settings
    sampling = eval_sampling(settings)
    assert (sampling.temperature, sampling.top_k, sampling.stop) == (0.8, 5, ("x",))
    assert sampling.max_completion_length == load_config(copied / "config.toml").rollout.max_completion_length
    assert (settings.rollout.max_batch_size, settings.run.seed) == (3, 7)
    settings = replace(
        request, temperature=0.0, stop=("y",), max_tokens=9, regex="[0-9]+", batch_size=4, seed=1
    ).settings
    sampling = eval_sampling(settings)
    assert (sampling.temperature, sampling.top_k, sampling.stop, sampling.regex) == (0.0, 5, ("y",), "[0-9]+")
    assert (sampling.max_completion_length, settings.rollout.max_batch_size, settings.run.seed) == (9, 4, 1)
    (prompt,) = render(request, read_rows(request), demo_tokenizer)
    assert "7+7" in prompt.text
    assert "1+1 = ?" in prompt.text
    (prompt,) = render(replace(request, system="8+8"), read_rows(request), demo_tokenizer)
    assert ("8+8" in prompt.text, "7+7" in prompt.text) == (True, False)
    acting = request.acting()
    assert acting is not None
    assert (acting.names, acting.settings.max_turns) == (["calculator"], 2)
    acting.close()
    change(copied, ("{question} = ?", "{a}+{b}"))
    whole = Generation(model=str(copied), prompt=("1+1",))
    assert read_rows(whole) == [{"prompt": "1+1"}]
    assert "is the whole prompt: the run's data.prompt_template is made of the columns a, b," in note_on_template(whole)
    assert note_on_template(replace(whole, prompt_column="prompt")) == note_on_template(request) == ""
