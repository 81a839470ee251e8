"""``cohort eval`` through the command line: metrics, the comparison of two models, models of a run, and errors."""

import contextlib
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cohort.cli import main
from cohort.config import DataConfig
from cohort.data import PromptSet, load_rows
from cohort.demo.task import accuracy, problems
from cohort.errors import RunFolderError
from cohort.evaluation import model as chosen_model
from cohort.evaluation.command import Request
from cohort.policy import load_tokenizer
from cohort.runs.chosen import model_of, run_of
from cohort.runs.trust import remember
from tests.conftest import DEMO_MODEL
from tests.train.harness import ROWS, make_trainer

MODEL = str(DEMO_MODEL)
REWARD = "cohort.demo.task:accuracy"
SETTINGS = ("--data.prompt_column", "question", "--data.format", "chat", "--precision", "float32", "--device", "cpu")


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = problems(12, held_out=True, seed=0)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return made


@pytest.fixture(scope="module")
def worse(tmp_path_factory):
    """The demo's model with noise in its weights, so that its rewards are lower."""
    path = tmp_path_factory.mktemp("worse") / "model"
    shutil.copytree(DEMO_MODEL, path)
    model = AutoModelForCausalLM.from_pretrained(path)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += parameter.std() * torch.randn_like(parameter)
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def finished_run(demo_tokenizer, tmp_path_factory):
    """The folder of a run of two steps, with its data, its reward function, a best model and checkpoints."""
    path = tmp_path_factory.mktemp("finished")
    (path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (path / "mine.py").write_text(
        "def digits(completions, **_):\n    return [sum(c.isdigit() for c in text) / (len(text) + 1) for text in completions]\n"
    )
    settings = {
        "data": {"train": "data.jsonl", "eval": "data.jsonl", "eval_rows": 6},
        "functions": ["mine.py:digits"],
        "max_steps": 2,
        "save_steps": 1,
        "num_generations_eval": 2,
        "metric_for_best_model": "eval/reward/mean",
    }
    with contextlib.chdir(path):
        make_trainer(demo_tokenizer, "run", rewards=None, rows=None, **settings).train()
    return path


@pytest.fixture
def run_folder(finished_run, tmp_path, monkeypatch):
    """A copy of the run, in the current folder, as if it had been started here."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace(str(finished_run), str(tmp_path)))
    remember(tmp_path / "run")
    return tmp_path / "run"


def evaluate(*arguments, model=MODEL):
    return main(["eval", model, *arguments])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_table_the_rows_and_the_summary(rows, tmp_path, capsys):
    arguments = ("--data", "rows.jsonl", "--reward", REWARD, "--n", "2", "--k", "1", "2", "--max-tokens", "96")
    files = ("--output", "out.jsonl", "--pass-rates", "rates.jsonl", "--json", "all.json")
    assert evaluate(*arguments, *SETTINGS, *files) == 0
    printed = capsys.readouterr()
    assert "12 prompts, 95% intervals over them" in printed.out
    assert "12 prompts x 2 = 24 completions, seed 0" in printed.err
    assert "sampling: temperature 1, " in printed.err
    summary = json.loads((tmp_path / "all.json").read_text())
    (metrics,) = summary["metrics"]
    written = lines(tmp_path / "out.jsonl")
    rewards = [[one["reward"] for one in row["samples"]] for row in written]
    assert metrics["eval/reward/mean"] == pytest.approx(sum(map(sum, rewards)) / 24)
    assert f"{metrics['eval/pass@2/mean']:.3f} [" in printed.out
    assert metrics["eval/pass@2/mean"] == pytest.approx(sum(map(max, rewards)) / 12)
    for row, given in zip(written, rows, strict=True):
        assert given.items() <= row.items()
        texts = [one["completion"] for one in row["samples"]]
        assert [one["rewards/accuracy"] for one in row["samples"]] == accuracy(texts, [row["answer"]] * 2)
        assert row["pass_rate"] == sum(accuracy(texts, [row["answer"]] * 2)) / 2
    rated = [row | {"pass_rate": one["pass_rate"]} for row, one in zip(rows, written, strict=True)]
    assert lines(tmp_path / "rates.jsonl") == rated  # the rows, and nothing else
    assert summary["sampling"].startswith("temperature 1,")
    assert summary["comparison"] == {}


def test_the_rows_can_be_trained_on_and_evaluated_again(rows, tmp_path, capsys):
    arguments = ("--reward", REWARD, "--max-tokens", "8", *SETTINGS, "--quiet")
    assert evaluate("--data", "rows.jsonl", *arguments, "--output", "out.jsonl") == 0
    config = DataConfig(prompt_column="question", format="chat")
    prompts = PromptSet(load_rows("out.jsonl"), load_tokenizer(MODEL), config)
    assert prompts.prompt(0, uid=0).columns["pass_rate"] in (0.0, 1.0)
    assert evaluate("--data", "out.jsonl", *arguments, "--output", "again.jsonl") == 0
    again = lines(tmp_path / "again.jsonl")
    assert again[0]["row.samples"] == lines(tmp_path / "out.jsonl")[0]["samples"]
    assert capsys.readouterr().err == ""


def test_two_models_with_the_same_random_numbers(rows, tmp_path, capsys, worse):
    shared = ("--data", "rows.jsonl", "--reward", REWARD, *SETTINGS)
    arguments = (*shared, "--n", "4", "--max-tokens", "96")
    assert evaluate(*arguments, "--against", worse, "--json", "both.json", "--temperature", "0.5") == 0
    printed = capsys.readouterr()
    assert "reward: better by " in printed.out
    assert printed.err.index(f"evaluating {MODEL}") < printed.err.index(f"evaluating {worse}")
    both = json.loads((tmp_path / "both.json").read_text())
    first, second = both["metrics"]
    found = both["comparison"]["eval/reward"]
    assert found["difference"]["mean"] == pytest.approx(first["eval/reward/mean"] - second["eval/reward/mean"])
    assert found["wins"] + found["ties"] + found["losses"] == 12
    assert found["shown"] is True
    assert evaluate(*shared, "--against", MODEL, "--quiet", "--n", "2", "--max-tokens", "96") == 0
    assert "reward: no difference shown: all equal on 12 prompts" in capsys.readouterr().out


def test_one_model_is_in_memory_at_a_time(rows, monkeypatch, worse, capsys):
    alive, counts, real = weakref.WeakSet(), [], chosen_model.load_policy

    def watched(*arguments):
        counts.append(len(alive))
        policy = real(*arguments)
        alive.add(policy.model)
        return policy

    monkeypatch.setattr(chosen_model, "load_policy", watched)
    arguments = ("--data", "rows.jsonl", "--reward", REWARD, "--max-tokens", "4", *SETTINGS)
    assert evaluate(*arguments, "--against", worse) == 0
    assert counts == [0, 0]


def test_several_sets(rows, tmp_path, capsys):
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    arguments = ("--reward", REWARD, "--max-tokens", "4", *SETTINGS, "--rows", "5", "--output", "out.jsonl")
    assert evaluate("--data", "a=rows.jsonl", "b=b.jsonl", *arguments) == 0
    printed = capsys.readouterr().out
    assert "a: 5 prompts" in printed
    assert "b: 3 prompts" in printed
    assert [line["set"] for line in lines(tmp_path / "out.jsonl")] == ["a"] * 5 + ["b"] * 3


def test_settings_default_to_those_of_the_run(run_folder, tmp_path, capsys):
    best = json.loads((run_folder / "best" / "best.json").read_text())
    assert evaluate("--json", "run.json", model=str(run_folder)) == 0
    assert f"evaluating {run_folder}: the best model of the run, after step {best['step']}" in capsys.readouterr().err
    (metrics,) = json.loads((tmp_path / "run.json").read_text())["metrics"]
    of_run = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    # The prompts, random numbers, rewards and settings are those of the run.
    assert metrics["eval/reward/mean"] == pytest.approx(best["value"], abs=1e-9)
    step_2 = {key: value for key, value in of_run[2].items() if key.startswith("eval/")}
    assert evaluate("--json", "step.json", model=str(run_folder / "checkpoints" / "step-2")) == 0
    (metrics,) = json.loads((tmp_path / "step.json").read_text())["metrics"]
    assert metrics == pytest.approx(step_2, abs=1e-9, nan_ok=True)
    assert evaluate("--json", "more.json", "--n", "3", "--rows", "2", "--quiet", model=str(run_folder / "best")) == 0
    assert json.loads((tmp_path / "more.json").read_text())["settings"]["num_generations_eval"] == 3


def test_input_files_of_a_run_are_not_overwritten(run_folder, tmp_path, capsys):
    for file in ("run/config.toml", "data.jsonl", "mine.py"):
        before = (tmp_path / file).read_bytes()
        assert evaluate("--output", file, "--overwrite", model=str(run_folder)) == 2
        assert "is an input file" in capsys.readouterr().err
        assert (tmp_path / file).read_bytes() == before


def test_reward_weights_of_the_run_are_dropped_with_its_rewards(run_folder):
    config = run_folder / "config.toml"
    config.write_text(config.read_text().replace("[reward]", "[reward]\nweights = [0.5]"))
    remember(run_folder)
    assert Request(str(run_folder)).settings().reward.weights == (0.5,)
    assert Request(str(run_folder), reward=("math", "mine.py:digits")).settings().reward.weights is None
    weighted = Request(str(run_folder), ("--reward.weights", "[2]"), reward=("mine.py:digits",))
    assert weighted.settings().reward.weights == (2,)


def test_which_model_of_a_run(run_folder):
    assert model_of(str(run_folder))[0] == str(run_folder / "best")
    shutil.rmtree(run_folder / "best")
    newest = str(run_folder / "checkpoints" / "step-2")
    assert model_of(str(run_folder)) == (newest, "the newest checkpoint of the run, after step 2")
    assert (model_of(newest), model_of("some/hub-id")) == ((newest, ""), ("some/hub-id", ""))
    assert run_of(run_folder / "checkpoints" / "step-1") == run_folder
    weights = run_folder / "checkpoints" / "step-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    for name in (str(run_folder), newest):
        with pytest.raises(RunFolderError, match=r"model.safetensors is not what was written"):
            model_of(name)
    shutil.rmtree(run_folder / "checkpoints")
    assert main(["eval", str(run_folder)]) == 2


RUN = f"--data rows.jsonl --reward {REWARD}"
MODEL_RUN = " ".join([RUN, *SETTINGS])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "no data to evaluate on: give --data FILE"),
        ("--data rows.jsonl", "no reward function: give --reward NAME"),
        (f"--data nope.jsonl --reward {REWARD}", "/nope.jsonl"),
        ("--data rows.jsonl --reward nope", "unknown reward 'nope'"),
        (RUN, "row 0: no column 'prompt'"),
        (f"{RUN} --data a=rows.jsonl", "NAME=FILE: rows.jsonl has none"),
        (f"--data a=rows.jsonl a=b.jsonl --reward {REWARD}", "two files the same name"),
        (f"--data a/b=rows.jsonl --reward {REWARD}", "expected letters, digits"),
        (f"{RUN} --k 2", "pass_at_k needs 2 completions per prompt"),
        (f"{RUN} --temperature -1", "eval.temperature_eval"),
        (f"{RUN} --eval.what 1", "unknown setting --eval.what"),
        (f"{RUN} --config nope.toml", "no config file nope.toml"),
        (f"{MODEL_RUN} --max-tokens 5000", "context of 256 tokens: set --max-tokens to at most 245;"),
        (f"{MODEL_RUN} --max-tokens 9 --against ./nowhere", "no model folder ./nowhere"),
        (f"{MODEL_RUN} --device abacus", "'abacus' cannot be used here"),
        (f"{RUN} --output rows.jsonl", "rows.jsonl exists: give another file"),
        (f"--data *.jsonl --reward {REWARD} --output rows.jsonl --overwrite", "is an input file"),
        (f"--data.eval=[{{path='rows.jsonl'}}] --reward {REWARD} --json ./rows.jsonl --overwrite", "is an input file"),
        (f"--data . --reward {REWARD} --output rows.jsonl --overwrite", "is an input file"),
        ("--data a.jsonl --reward rows.jsonl.py:f(x=1) --output rows.jsonl.py --overwrite", "is an input file"),
        (f"{RUN} --json a --output ./a", "are the same file"),
        (f"{RUN} --output a --pass-rates ./a", "are the same file"),
        (f"{RUN} --pass-rates rows.jsonl --n 4", "rows.jsonl exists"),
        (f"{MODEL_RUN} --max-tokens 9 --pass-rates a.jsonl", "give --n 4 or more"),
        (f"{MODEL_RUN} --reward {REWARD} gsm8k --max-tokens 9 --n 4 --pass-rates a.jsonl", "give --success"),
        (f"{RUN} --json no/where.json", "there is no folder no"),
    ],
)
def test_errors_are_reported_before_a_model_is_loaded(rows, tmp_path, monkeypatch, capsys, arguments, message):
    def load(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(chosen_model, "load_policy", load)
    (tmp_path / "rows.jsonl.py").write_text("")
    assert evaluate(*arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_ctrl_c_leaves_no_partial_file(rows, monkeypatch, capsys, tmp_path, worse):
    arguments = ("--data", "rows.jsonl", "--reward", REWARD, "--max-tokens", "4", *SETTINGS, "--output", "out.jsonl")
    real, calls = chosen_model.load_policy, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == at:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(chosen_model, "load_policy", interrupted)
    for at, message in ((1, "interrupted; nothing was written"), (2, "interrupted; out.jsonl is written")):
        calls.clear()
        assert evaluate(*arguments, "--against", worse) == 130
        assert message in capsys.readouterr().err
        assert (tmp_path / "out.jsonl").exists() is (at == 2)


def test_flags_are_short_forms_of_settings():
    request = Request(
        "m", data=("rows.jsonl",), reward=("math", "soft(a=1, b=2)"), n=8, k=(1, 8), temperature=0.0, top_k=0
    )
    config = request.settings()
    assert config.reward.functions == ("math", "soft(a=1, b=2)")
    assert (config.data.eval, config.eval.pass_at_k, config.eval.temperature_eval) == (
        str(Path.cwd() / "rows.jsonl"),
        (1, 8),
        0.0,
    )
    assert (config.eval.top_k_eval, config.eval.top_p_eval) == (0, None)


def test_models_that_drop_different_prompts_are_not_compared(rows, tmp_path, capsys, worse, monkeypatch):
    (tmp_path / "mixed.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows[:3], {"question": "1" * 90}])
    )
    arguments = ("--data", "mixed.jsonl", "--reward", "mine.py:none", "--max-tokens", "4", *SETTINGS)
    arguments += ("--output", "out.jsonl")
    (tmp_path / "mine.py").write_text("def none(completions):\n    return [1.0] * len(completions)\n")
    drops = ("--data.overlong_prompts", "drop", "--data.max_prompt_length", "40", "--overwrite")
    assert evaluate(*arguments, *drops, "--against", worse) == 0
    assert [row["question"] for row in lines(tmp_path / "out.jsonl")] == [row["question"] for row in rows[:3]]
    real = chosen_model.load_tokenizer

    def coarser(path, **settings):
        tokenizer = real(path, **settings)
        if path == worse:
            tokenizer.chat_template = "{{ messages[0]['content'][:20] }}"
        return tokenizer

    monkeypatch.setattr(chosen_model, "load_tokenizer", coarser)
    assert evaluate(*arguments, *drops, "--against", worse) == 2
    assert "drops 1 prompts of one model and 0 of the other" in capsys.readouterr().err


def test_a_path_without_a_model_is_an_error(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["eval", str(tmp_path / "absent")]) == 2
    assert "is not a folder here, so it is taken for a hub id" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "empty"), "--data", "rows.jsonl"]) == 2
    assert "no reward function: give --reward NAME" in (printed := capsys.readouterr().err)
    assert "holds neither a model nor a run" in printed


def test_without_a_length_completions_fill_what_the_context_leaves(rows, tmp_path, capsys):
    arguments = ("--data", "rows.jsonl", "--reward", REWARD, "--rows", "2", *SETTINGS, "--json", "out.json")
    assert evaluate(*arguments) == 0
    room = 256 - 11  # the model's context less the longest prompt
    assert f"0 to {room} tokens" in capsys.readouterr().err
    assert f"0 to {room} tokens" in json.loads((tmp_path / "out.json").read_text())["sampling"]


def test_rows_with_pass_rates_are_read_with_the_settings_that_they_were_written_with(rows, tmp_path):
    renamed = [{"q": row["question"], "gold": row["answer"], "rate": 0.5} for row in rows[:2]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in renamed))
    columns = ("--data.columns", "{answer = 'gold', question = 'q', pass_rate = 'rate'}")
    arguments = ("--reward", REWARD, "--n", "2", "--max-tokens", "4", *SETTINGS, *columns, "--quiet")
    assert evaluate("--data", "rows.jsonl", *arguments, "--pass-rates", "rated.jsonl") == 0
    rated = lines(tmp_path / "rated.jsonl")
    assert rated == [row | {"rate": new["rate"]} for row, new in zip(renamed, rated, strict=True)]
    assert {row["rate"] for row in rated} <= {0.0, 1.0}
    assert evaluate("--data", "rated.jsonl", *arguments, "--pass-rates", "again.jsonl") == 0
    assert lines(tmp_path / "again.jsonl") == rated
