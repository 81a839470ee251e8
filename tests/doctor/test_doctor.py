"""``cohort doctor`` on the demo's task: healthy as it is, and with exactly one illness at a time."""

import fcntl
import json
import shutil

import datasets
import pytest
import torch

from cohort.cli import main
from cohort.config import load_config, to_toml
from cohort.demo.run import SETTINGS
from cohort.demo.task import problems
from cohort.doctor import checks, examine
from cohort.doctor.examine import OF_ROLLOUT
from cohort.errors import ConfigError
from cohort.trainer import GRPOTrainer
from tests.conftest import DEMO_MODEL, tiny_llama
from tests.train.harness import make_trainer, metrics_of, shift_sampler_logps

REWARDS = """
from cohort.demo.task import accuracy

def read(text):
    return text if isinstance(text, str) else text[0]["content"]

def digits(completions, answer):
    # the share of the last line's digits that are right
    lines = [read(text).splitlines()[-1:] or [""] for text in completions]
    pairs = zip((line.removeprefix("#### ").rjust(5)[-5:] for line, in lines), answer)
    return [sum(a == b for a, b in zip(line, gold.rjust(5))) / 5 for line, gold in pairs]

def constant(completions, **_):
    return [0.5] * len(completions)

def inverted(completions, answer):
    return [1 - score for score in accuracy(completions, answer)]

def blind(completions, answer):
    return [len(read(text)) % 2 + 0.0 for text in completions]

def near(completions, answers=None):
    return [len(read(text)) % 2 + 0.0 for text in completions]

def shy(completions, answer):
    return [None if index % 4 == 0 else score for index, score in enumerate(digits(completions, answer))]

def greedy(completions, gold):
    return accuracy(completions, gold)
"""
SMALL = ["--data.train_rows", "8"]
"""Trials are of 8 prompts."""
STATIC = ["--skip", "answers", "sampler", "reference", "signal", "rewards", "duplicates", "cut", "time"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A config of the demo's task with small rollouts, its rows, and reward functions."""
    path = tmp_path_factory.mktemp("doctor")
    rows = problems(60, held_out=False, seed=0)
    files = {
        "rows": rows,
        "held_out": problems(20, held_out=True, seed=0),
        "repeated": rows[:20] * 3,
        "empty": [{**row, "answer": row["answer"] if index % 3 else ""} for index, row in enumerate(rows)],
    }
    for name, some in files.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    (path / "rewards.py").write_text(REWARDS)
    settings = load_config(
        SETTINGS,
        [
            *("--model.path", str(DEMO_MODEL), "--data.train", str(path / "rows.jsonl")),
            *("--data.eval", str(path / "held_out.jsonl"), "--reward.functions", f"{path}/rewards.py:digits"),
            *("--rollout.prompts_per_step", "4", "--rollout.num_generations", "4", "--optim.warmup_steps", "1"),
            *("--run.max_steps", "4", "--run.output_dir", str(path / "run")),
        ],
    )
    (path / "run.toml").write_text(to_toml(settings))
    return path


def findings_of(folder, capsys, *arguments):
    """The exit code, and what the checks that do not pass say."""
    code = main(["doctor", str(folder / "run.toml"), "--json", *arguments])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (code == 0)
    assert not any((folder / name).exists() for name in ("run", "runs"))
    return code, found["findings"]


def problems_of(found):
    return {(one["check"], one["status"]) for one in found if one["status"] not in ("pass", "skip")}


def test_a_healthy_run_raises_nothing(folder, capsys):
    code, found = findings_of(folder, capsys, *SMALL)
    assert (code, problems_of(found)) == (0, set())
    names = [one["check"] for one in found]
    assert names == [
        *("folder", "columns", "prompts", "lengths", "text", "ends", "sampling", "optimizer", "memory"),
        *("answers", "sampler", "reference", "signal", "rewards", "duplicates", "cut", "time"),
    ]
    by_name = {one["check"]: one for one in found}
    assert "digits gives right answers 1.00 and wrong ones 0." in by_name["answers"]["found"]
    assert 0.6 < by_name["signal"]["numbers"]["mean_reward"] < 1  # a forgotten carry leaves other digits right
    assert by_name["reference"]["numbers"]["largest_gap"] < 1e-4  # rounding of float32
    assert by_name["time"]["numbers"]["step"] > 0


ILLNESSES = {
    "columns": (["--reward.functions", "{}/rewards.py:near"], {("columns", "warn")}),
    "empty column": (["--data.train", "{}/empty.jsonl"], {("columns", "warn")}),
    "prompts": (["--data.train", "{}/repeated.jsonl"], {("prompts", "warn")}),
    "held out": (["--data.eval", "{}/rows.jsonl"], {("prompts", "warn")}),
    "lengths": (["--data.max_prompt_length=8", "--data.overlong_prompts=truncate_left"], {("lengths", "warn")}),
    "text": (["--data.format", "auto"], {("text", "warn")}),
    "ends": (["--model.path", "{}/no_end"], {("ends", "warn")}),
    "sampling": (["--rollout.top_k", "1"], {("sampling", "fail")}),
    "optimizer": (["--optim.learning_rate", "0"], {("optimizer", "fail")}),
    "warm-up": (["--optim.warmup_steps", "4"], {("optimizer", "warn")}),
    "data": (["--data.train", "{}/none.jsonl"], {("data", "fail")}),
    "settings": (["--rollout.num_generation", "3"], {("settings", "fail")}),
    "rewards": (["--reward.functions", "{}/rewards.py:greedy"], {("rewards", "fail")}),
    "model": (["--model.path", "{}/none"], {("model", "fail")}),
    "inverted answers": (["--reward.functions", "{}/rewards.py:inverted"], {("answers", "fail")}),
    "blind to answers": (["--reward.functions", "{}/rewards.py:blind"], {("answers", "warn")}),
    "skipped": (["--rollout.top_k", "1", "--report.skip_checks", "sampling"], set()),
}


QUICK = ("settings", "data", "rewards", "model")
"""These run in every suite, beside all others at once."""


@pytest.mark.parametrize(
    "name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in ILLNESSES]
)
def test_an_illness_that_is_known_without_sampling(folder, capsys, name):
    if name == "ends" and not (folder / "no_end").exists():
        shutil.copytree(DEMO_MODEL, folder / "no_end")
        for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
            kept = json.loads((folder / "no_end" / file).read_text())
            kept = {key: value for key, value in kept.items() if not key.startswith("eos_token")}
            (folder / "no_end" / file).write_text(json.dumps(kept))
    arguments, expected = ILLNESSES[name]
    skip = [one for one in STATIC if one != "answers" or "answers" not in name]
    code, found = findings_of(folder, capsys, *skip, *(one.format(folder) for one in arguments))
    assert problems_of(found) == expected
    assert code == any(status == "fail" for _, status in expected)


def test_many_illnesses_at_once(folder, capsys):
    together = ("columns", "held out", "lengths", "sampling", "optimizer", "blind to answers")
    arguments = [argument for name in together for argument in ILLNESSES[name][0]]
    while "--reward.functions" in arguments:  # a list setting is given once
        at = arguments.index("--reward.functions")
        del arguments[at : at + 2]
    functions = '["{0}/rewards.py:near", "{0}/rewards.py:blind"]'
    skip = [one for one in STATIC if one != "answers"]
    more = ["--reward.functions", functions, "--optim.learning_rate", "1e-6", "--optim.warmup_steps", "4"]
    code, found = findings_of(folder, capsys, *skip, *(one.format(folder) for one in [*arguments, *more]))
    expected = {problem for name in together for problem in ILLNESSES[name][1]} - {("optimizer", "fail")}
    assert (code, problems_of(found)) == (1, expected | {("optimizer", "warn")})


SAMPLED = {
    "signal": (["--reward.functions", "{}/rewards.py:constant"], {("signal", "fail")}),
    "rewards": (["--reward.functions", '["{0}/rewards.py:shy", "{0}/rewards.py:constant"]'], {("rewards", "warn")}),
    "duplicates": (["--rollout.regex", "#### 1"], {("duplicates", "fail"), ("signal", "fail")}),
    "cut": (
        ["--rollout.max_completion_length", "16", "--objective.truncated", "mask", "--skip", "duplicates"],
        {("cut", "fail"), ("signal", "fail")},
    ),
}


@pytest.mark.parametrize(
    "name", [one if one == "cut" else pytest.param(one, marks=pytest.mark.slow) for one in SAMPLED]
)
def test_an_illness_that_a_rollout_shows(folder, capsys, name):
    arguments, expected = SAMPLED[name]
    skip = ("--skip", "answers", "time")
    code, found = findings_of(folder, capsys, *SMALL, *skip, *(one.format(folder) for one in arguments))
    assert problems_of(found) == expected
    assert code == any(status == "fail" for _, status in expected)


def small_trainer(folder, *arguments):
    return GRPOTrainer(args=load_config(folder / "run.toml", [*SMALL, "--report.progress", "false", *arguments]))


def failed(trainer, skip=("signal", "cut", "answers")):
    return {one.check for one in examine(trainer, skip) if one.status == "fail"}


def test_a_sampler_and_a_reference_that_compute_something_else(folder, monkeypatch):
    shift_sampler_logps(monkeypatch, lambda: 0.5)
    trainer = small_trainer(folder, "--rollout.max_completion_length", "24")
    with torch.no_grad():
        trainer.reference.model.lm_head.weight.mul_(1.1)
    assert failed(trainer) == {"sampler", "reference"}


def test_a_model_of_nan(folder):
    trainer = small_trainer(folder)
    with torch.no_grad():
        trainer.policy.model.lm_head.weight.fill_(torch.nan)
    assert failed(trainer) == {"rollout"}


def test_tokens_of_no_text_that_a_new_model_draws(demo_tokenizer, tmp_path):
    known_ones = len(demo_tokenizer)
    trainer = make_trainer(demo_tokenizer, tmp_path, model=tiny_llama(vocab_size=known_ones + 9))
    run = checks.Run.of(trainer)
    number, share = checks.textless(run)
    with torch.no_grad():
        logits_V = trainer.policy.model(torch.tensor([run.first_prompts[0].token_ids])).logits[0, -1]
    assert number == 9
    assert share == pytest.approx(float(logits_V.softmax(-1)[known_ones:].sum()), rel=1e-5)
    assert [str(one.status) for one in checks.ends(run)] == ["warn"]


def test_no_rollout_is_sampled_if_it_cannot_fit_into_memory(folder, monkeypatch):
    monkeypatch.setattr("cohort.doctor.checks.free_bytes", lambda device: 2**20)
    trainer = small_trainer(folder)
    found = {one.check: str(one.status) for one in examine(trainer)}
    assert (found["memory"], found["signal"], found["time"]) == ("fail", "skip", "skip")


def test_a_folder_in_use(folder, tmp_path):
    (tmp_path / "notes.txt").write_text("")
    trainer = small_trainer(folder, "--run.output_dir", str(tmp_path))
    assert failed(trainer, ("memory", *OF_ROLLOUT, "answers")) == {"folder"}


def test_a_folder_with_the_lock_of_a_run_that_never_began_is_free(folder, tmp_path):
    trainer = small_trainer(folder)
    for name in ("run.lock", "config.toml.part"):
        (tmp_path / name).write_text("")
    run = checks.Run.of(trainer, tmp_path)
    assert [str(one.status) for one in checks.folder(run)] == ["pass"]
    (tmp_path / "notes.txt").write_text("")
    (finding,) = checks.folder(run)
    assert (str(finding.status), "is not empty" in finding.found) == ("fail", True)
    (tmp_path / "config.toml").write_text("")
    (finding,) = checks.folder(run)  # 'cohort doctor CONFIG && cohort train CONFIG --resume auto' goes on
    assert (str(finding.status), "holds a run already" in finding.found) == ("warn", True)
    with (tmp_path / "run.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert [str(one.status) for one in checks.folder(run)] == ["fail"]


def test_an_unknown_check_is_an_error(folder, capsys):
    assert main(["doctor", str(folder / "run.toml"), "--skip", "signals"]) == 2
    assert "no check 'signals'; there are: folder, " in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"no check 'signals'.*; did you mean signal\?"):
        small_trainer(folder, "--report.skip_checks", "signals")


def test_text_for_people(folder, capsys):
    assert main(["doctor", str(folder / "run.toml"), *STATIC, "--rollout.top_k", "1"]) == 1
    output = capsys.readouterr().out
    assert "  FAIL  sampling    rollout.top_k is 1: all 4 completions of a prompt are the same" in output
    assert "-> set rollout.top_k to 0 and rollout.temperature to 1" in output
    assert "first prompt (row 0, " in output
    assert output.endswith("8 pass, 1 fail, 8 skip\n")


def test_the_short_form_is_silent_when_all_is_well(folder, capsys):
    assert "warnings (" not in small_trainer(folder).describe()
    described = small_trainer(folder, "--data.format", "auto").describe()
    assert "  warn  text        the prompts are plain text, and the model has a chat template" in described
    assert "warnings (" not in small_trainer(folder, "--data.format", "auto", "--report.skip_checks", "text").describe()


@pytest.mark.slow
def test_predictions_against_a_run(folder, tmp_path):
    """Time within a factor of 3, on a machine that does other work."""
    changes = (
        "--run.output_dir",
        str(tmp_path / "run"),
        "--run.save_steps",
        "1",
        "--run.max_steps",
        "2",
        "--data.eval",
        "",
    )
    numbers = {one.check: one.numbers for one in examine(small_trainer(folder, *changes), ["answers"])}
    small_trainer(folder, *changes).train()
    steps = [metrics["seconds/step"] for metrics in metrics_of(tmp_path / "run")]
    assert sorted(steps)[len(steps) // 2] / 3 < numbers["time"]["step"] < 3 * sorted(steps)[len(steps) // 2]


def test_the_rest_is_checked_without_the_data(folder, capsys, monkeypatch):
    """A hub that cannot be reached is asked once, and ``datasets`` looks into its cache alone."""

    class ConnectError(Exception):
        pass

    ConnectError.__name__ = "TransportError"

    def unreachable(*_, **__):
        raise ConnectError("Name or service not known")

    offline = []

    def load(*_, **__):
        offline.append(datasets.config.HF_HUB_OFFLINE)
        raise ConnectionError("Couldn't reach 'owner/rows' on the Hub")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unreachable)
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    code, found = findings_of(folder, capsys, "--data.train", "owner/rows", "--optim.learning_rate", "0")
    statuses = [(one["check"], one["status"]) for one in found]
    expected = [("data", "fail"), ("rewards", "pass"), ("model", "pass"), ("sampling", "pass"), ("optimizer", "fail")]
    assert (code, statuses) == (1, expected)
    assert "447,616 trained parameters" in found[2]["found"]
    assert offline == [True]
    assert datasets.config.HF_HUB_OFFLINE is False
    _, found = findings_of(folder, capsys, "--data.train", "owner/rows", "--model.path", str(folder / "nothing"))
    assert [(one["check"], one["status"]) for one in found] == [*expected[:2], ("model", "fail")]
