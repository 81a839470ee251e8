"""What differs between a run and the process that resumes it."""

from pathlib import Path

import pytest

from cohort import GRPOConfig
from cohort.errors import ConfigError, RunFolderError
from cohort.runs.changes import check_keys, entries, fact_changes, refuse, setting_changes
from cohort.runs.changes import describe as describe_changes
from tests.conftest import each

FACTS = {
    "prompts": "ab",
    "columns": entries({"answer": "1", "level": "2"}),
    "rewards": "math",
    "code": entries({"reward math": "1"}),
    "values": entries({}),
    "precision": "float32",
    "versions": entries({"torch": "2.8.0", "numpy": "2.0"}),
    "threads": "2",
    "ranks": "1",
    "machine": "a CPU, AVX2",
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rate": 0.5}, "optim.learning_rate: the run has 1e-06, now 0.5"),
        ({"lora": {"rank": 4}}, "model.lora.rank: the run has 0, now 4"),
        ({"seed": 1}, "run.seed: the run has 0, now 1"),
        ({"max_prompt_length": 9}, "data.max_prompt_length: the run has unset, now 9"),
        ({"lag": 1}, "rollout.lag: the run has 0, now 1"),
        ({"epsilon": 0.3}, "objective.epsilon: the run has unset, now 0.3"),
    ],
)
def test_settings_that_change_results_are_refused(tmp_path, changes, words):
    (found,) = setting_changes(GRPOConfig(), GRPOConfig(**changes))
    assert str(found) == words
    with pytest.raises(RunFolderError, match=rf"is different now\n  {words}\nTo go on .*--allow-changed {found.key};"):
        refuse(tmp_path, [found], ())
    refuse(tmp_path, [found], [found.key])
    check_keys([found.key])


@each(
    "changes",
    [
        {"device": "cpu"},
        {"max_steps": 9, "save_steps": 3},
        {"workers": 2},
        {"eval_steps": 4},
        {"trust_region": {"rule": "ppo_clip", "low": 0.8, "high": 1.2}},  # the default, written in another way
        {"path": "elsewhere"},  # what it holds is compared
    ],
)
def test_other_settings_may_change(changes):
    assert not any(
        one.refused for one in setting_changes(GRPOConfig(path="here"), GRPOConfig(**{"path": "here"} | changes))
    )


def test_an_unset_number_of_minibatches_is_the_presets():
    given, unset = GRPOConfig(preset="gspo", minibatches=4), GRPOConfig(preset="gspo")
    assert setting_changes(given, unset) == setting_changes(GRPOConfig(minibatches=1), GRPOConfig()) == []
    (change,) = setting_changes(GRPOConfig(preset="gspo@1", minibatches=1), unset)
    words = "preset gspo is gspo@2 now; the run has gspo@1 (minibatches 1, now 4)"
    assert (str(change), change.refused) == (f"objective.preset: {words}", True)
    with pytest.raises(RunFolderError, match="what the run has: --objective.preset gspo@1\nTo go on all the same: --a"):
        refuse(Path("run"), [change], ())
    kept = GRPOConfig(preset="gspo", minibatches=1)  # the versions differ in nothing else
    assert setting_changes(GRPOConfig(preset="gspo@1"), kept) == []
    (change,) = setting_changes(GRPOConfig(preset="gspo@1"), GRPOConfig(preset="gspo", minibatches=2))
    assert str(change) == "objective.minibatches: the run has 1, now 2"


def test_names_count_where_what_they_name_is_not_known():
    before, now = GRPOConfig(train="a.jsonl", path="m"), GRPOConfig(train="b.jsonl")
    assert [(one.key, one.refused) for one in setting_changes(before, now)] == [("data.train", False)]
    (change,) = setting_changes(before, now, facts_known=False)
    assert change.refused
    streams = {"streaming": True, "max_steps": 1}
    (change,) = setting_changes(GRPOConfig(train="a.jsonl", **streams), GRPOConfig(train="b.jsonl", **streams))
    assert change.refused


@each(
    ("settings", "said"),
    [
        ({"lr_scheduler_type": "cosine"}, True),
        ({"lr_scheduler_type": "linear"}, True),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1}, True),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}, False),
        ({"lr_scheduler_type": "constant"}, False),
    ],
)
@each("ends", [{"max_steps": (3, 4)}, {"max_steps": (4, 3)}, {"num_epochs": (1, 2)}])
def test_another_end_is_allowed_and_what_it_does_to_the_learning_rate_is_said(settings, said, ends):
    ((name, values),) = ends.items()
    (change,) = setting_changes(*(GRPOConfig(**{name: value}, **settings) for value in values))
    assert (change.key, change.refused) == (f"run.{name}", False)
    assert ("goes on as that of a run with the new end" in change.words) == said


@each(
    ("key", "value", "words", "refused"),
    [
        ("prompts", "cd", "other prompts", True),
        ("columns", entries({"answer": "9", "level": "2"}), "answer is not the same", True),
        ("columns", entries({"answer": "1", "hint": "2"}), "level is gone, hint is new", True),
        ("rewards", "math, code", "the run has math, now math, code", True),
        ("code", entries({"reward math": "2"}), "reward math is not the same", False),
        ("values", entries({"reward math": "2"}), "reward math is new", True),
        ("tools", "calculator", "the run has none, now calculator", True),
        ("precision", "bfloat16", "the run has float32, now bfloat16", True),
        ("versions", entries({"torch": "2.9.0", "numpy": "2.0"}), "torch 2.9.0, was 2.8.0", True),
        ("machine", "b CPU, AVX2", "the run has a CPU, AVX2, now b CPU, AVX2", False),
        ("ranks", "2", "the run has 1, now 2", False),
    ],
)
def test_facts(key, value, words, refused):
    (change,) = fact_changes(FACTS, FACTS | {key: value})
    assert (change.key, change.refused) == (key, refused)
    assert words in change.words
    first, _ = describe_changes([change])
    assert ("rounding may differ" in first) is (key in ("machine", "ranks"))
    assert change.reaches_weights or not refused


def test_another_optimizer_is_never_allowed(tmp_path):
    (change,) = setting_changes(GRPOConfig(), GRPOConfig(optimizer="muon"))
    with pytest.raises(RunFolderError, match=r"does not fit another optim\.optimizer: start a new run"):
        refuse(tmp_path, [change], ["optim.optimizer"])


def test_a_key_that_is_neither_a_setting_nor_a_fact():
    with pytest.raises(
        ConfigError, match=r"--allow-changed optim.learning_rates: .*did you mean optim.learning_rate\?"
    ):
        check_keys(["optim.learning_rates"])
    check_keys(["versions", "code"])
