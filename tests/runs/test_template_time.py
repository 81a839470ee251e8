"""Chat templates that print the time: a run has one, and whatever goes on with it has the same."""

import itertools
import json
import tomllib

import pytest

from cohort.cli import main
from cohort.config import DataConfig
from cohort.data import PromptSet, render
from cohort.errors import ConfigError
from cohort.evaluation import command
from cohort.generate.request import Request
from cohort.generate.run import Job
from cohort.policy import load_tokenizer
from tests.conftest import DEMO_MODEL, each
from tests.data.templates import CHATML, byte_tokenizer
from tests.train import harness
from tests.train.harness import ROWS, make_trainer, same_parameters

NOW = "{{ strftime_now('%H:%M:%S') }}"


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A second passes whenever somebody looks."""
    seconds = itertools.count(1)
    for module in ("cohort.data.render", "cohort.trainer", "cohort.evaluation.command"):
        monkeypatch.setattr(f"{module}.time_now", lambda: f"2026-01-02T03:04:{next(seconds):02}")


def dated():
    tokenizer = load_tokenizer(str(DEMO_MODEL))
    tokenizer.chat_template = NOW + tokenizer.chat_template
    return tokenizer


def trainer_of(folder, model=None, **settings):
    return make_trainer(dated(), folder, model=model, **{"format": "chat", "save_steps": 1, "max_steps": 1, **settings})


def test_a_run_a_resume_and_what_is_sampled_from_it_have_one_time(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first = trainer_of(tmp_path / "run", model=str(DEMO_MODEL), eval_rows=ROWS[:2])
    first.train()
    (of_evaluation,) = first.evaluator.sets.values()
    texts = [one.text for one in (*first.prompts.prompts[:], *of_evaluation[:])]
    assert {text[:8] for text in texts} == {"03:04:01"}
    assert tomllib.loads((tmp_path / "run/config.toml").read_text())["data"]["template_time"] == "2026-01-02T03:04:01"

    resumed = trainer_of(tmp_path / "run", model=str(DEMO_MODEL), max_steps=2)
    resumed.train(resume=True)
    assert "prints the time: 2026-01-02T03:04:01 in the whole run" in resumed.describe()
    straight = trainer_of(tmp_path / "other", model=str(DEMO_MODEL), max_steps=2, template_time="2026-01-02 03:04:01")
    straight.train()
    assert same_parameters(resumed, straight)

    (prompt,) = Job(Request("run", ["1+1"])).prompts
    assert prompt.text[:8] == "03:04:01"
    seen = []
    monkeypatch.setattr(command, "_with_one_length", lambda subjects, settings: seen.append(subjects) or 1 / 0)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]))
    given = ["--data", "rows.jsonl", "--data.format", "chat", "--reward", f"{harness.__file__}:digits_reward"]
    template = ["--data.chat_template", resumed.tokenizer.chat_template]
    for model, more in (("run", []), (str(DEMO_MODEL), template)):
        with pytest.raises(ZeroDivisionError):
            main(["eval", model, "--against", str(DEMO_MODEL), *given, *more])
    of_run, one, other = (one.evaluator.sets[""][:][0].text[:8] for one in (seen[0][0], *seen[1]))
    assert of_run == "03:04:01"
    assert one == other > of_run


def test_trainers_that_share_a_tokenizer_share_its_time(tmp_path):
    tokenizer = dated()
    times = [make_trainer(tokenizer, tmp_path / name, format="chat").recorded.data.template_time for name in "ab"]
    assert times == ["2026-01-02T03:04:01"] * 2


def test_a_template_without_the_time_has_none(demo_tokenizer, tmp_path):
    trainer = make_trainer(demo_tokenizer, tmp_path, format="chat")
    assert trainer.recorded.data.template_time is None
    assert "prints the time" not in trainer.describe()


@each(
    "template",
    [
        "{% set form = '%d' %}{{ strftime_now(form + '/%B') }}",
        "{% if strftime_now is defined %}{{ strftime_now('%d/%B') }}{% endif %}",
    ],
)
def test_any_way_to_ask_for_the_time(template):
    tokenizer = byte_tokenizer(template + CHATML)
    assert render.use_template(tokenizer, None, "2031-12-24T00:00:00") == "2031-12-24T00:00:00"
    (prompt,) = PromptSet([{"prompt": "x"}], tokenizer, DataConfig(format="chat"))[:]
    assert prompt.text.startswith("24/December<|im_start|>user")


@each("given", ["yesterday", "2026-13-01", 5, ""])
def test_what_is_no_time(given):
    with pytest.raises(ConfigError, match=r"data.template_time: expected a date and time, as in '2026-11-27T09:30:00'"):
        make_trainer(None, None, template_time=given)
