"""Whole runs with tools and environments, through the trainer, the command line and evaluation."""

import json
import os
import random
import signal
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cohort import GRPOConfig, GRPOTrainer
from cohort.cli import main
from cohort.config import EnvironmentConfig
from cohort.environments import Acting, Step
from cohort.errors import ConfigError, DataError, EpisodeError, RewardError, RunFolderError, Stopped
from cohort.report.rollouts import StoredStep
from tests.conftest import each, telling
from tests.environments.templates import FAMILIES
from tests.train.harness import metrics_of, rows_of
from tests.train.test_stop import assert_stops_change_nothing

FAMILY = FAMILIES["qwen2_5"]
ROWS = [{"prompt": [{"role": "user", "content": f"What is {n} plus 2?"}], "answer": n + 2} for n in range(4)]
CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [0-9], "b": [0-9]\}\}\n</tool_call>|0'
"""What the tests' random models are made to write: a call, or a digit."""


def add(a: int, b: int) -> int:
    """Adds two integers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


class Count:
    """Counts turns; rewards each digit that is even."""

    def reset(self, answer, **row):
        self.turns = 0
        return f" Count to {answer}."

    def step(self, text):
        self.turns += 1
        digit = text.strip()[-1:]
        return Step("Go on.", float(digit.isdigit() and int(digit) % 2 == 0), done=self.turns == 3)


def few_calls(completion, transcript, turns, **_):
    assert transcript[0]["role"] == "assistant"
    assert completion == transcript[-1]["content"] or transcript[-1]["role"] == "tool"
    return -float(sum(turn.calls for turn in turns))


class Shop:
    """Methods are tools; the reward comes at the end."""

    def reset(self, answer):
        self.left = answer

    def add(self, a: int, b: int) -> str:
        """Spends a and earns b.

        Args:
            a: Spent.
            b: Earned.
        """
        self.left += b - a
        return f"{self.left} left"

    def get_reward(self):
        return float(self.left)


def model(family=FAMILY, hidden_size=32):
    torch.manual_seed(0)
    size = len(family.tokenizer)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=hidden_size,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            eos_token_id=family.end_token_ids,
            pad_token_id=family.tokenizer.pad_token_id,
        )
    )


def trainer(
    folder, reward_funcs=None, tools=(), environment_factory=None, family=FAMILY, eval_rows=None, hidden=32, **settings
):
    defaults = {"prompts_per_step": 2, "num_generations": 3, "max_steps": 2, "max_completion_length": 256}
    config = GRPOConfig(**defaults | {"output_dir": str(folder), "progress": False, "learning_rate": 1e-3} | settings)
    return GRPOTrainer(
        model(family, hidden),
        reward_funcs,
        config,
        ROWS,
        eval_rows,
        family.tokenizer,
        tools=tools,
        environment_factory=environment_factory,
    )


@pytest.mark.parametrize("where", telling(["tool", "get_reward"], "tool"))
def test_a_function_that_hangs_does_not_hold_up_a_stop(tmp_path, monkeypatch, where):
    """It is interrupted after half of the time to stop."""
    monkeypatch.setattr("cohort.train.signals._end", lambda *_: None)  # a slow machine does not end the tests
    called, hangs = [], [True]

    def hang():
        called.append(1)
        if hangs[0] and len(called) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(300)

    class Asks:
        def reset(self, **row):
            return " Go."

        def add(self, a: int, b: int) -> int:
            """Add.

            Args:
                a: a number.
                b: a number.
            """
            hang() if where == "tool" else None
            return a + b

        def get_reward(self):
            hang() if where == "get_reward" else None
            return float(len(called) % 2)

    def make(folder):
        settings = {"regex": CALL, "max_turns": 3, "max_steps": 1, "stop_seconds": 0.6}
        return trainer(folder, few_calls, environment_factory=Asks, **settings)

    began = time.monotonic()
    with pytest.raises(Stopped, match="stopped by SIGTERM after step 0"):
        make(tmp_path / "run").train()
    assert time.monotonic() - began < 150
    hangs[0] = False
    resumed = make(tmp_path / "run")
    assert resumed.train(resume=True)["steps"] == 1
    straight = make(tmp_path / "straight")
    straight.train()
    assert [row["token_ids"] for row in rows_of(tmp_path / "run")] == [
        row["token_ids"] for row in rows_of(tmp_path / "straight")
    ]


def test_a_run_with_a_tool(tmp_path):
    run = trainer(tmp_path / "run", few_calls, [add], regex=CALL, max_turns=3)
    before = [parameter.detach().clone() for parameter in run.policy.model.parameters()]
    run.train()
    assert any(not torch.equal(one, other) for one, other in zip(before, run.policy.model.parameters(), strict=True))
    (first, *_) = [line for line in metrics_of(tmp_path / "run") if line["step"]]
    rows = rows_of(tmp_path / "run")
    calls = sum(message["role"] == "tool" for row in rows for message in json.loads(row["messages"]))
    assert calls > 0
    assert first["episodes/calls"] == pytest.approx(calls / 6)
    assert first["episodes/failed_call_share"] == 0
    assert first["rewards/few_calls"] == pytest.approx(-calls / 6)
    for row in rows:
        assert len(row["sampler_logps"]) == sum(row["drawn"]) == sum(row["turn_lengths"])
        for message in json.loads(row["messages"]):
            if message["role"] == "tool":
                assert int(message["content"]) in range(19)


@each(("tools", "count"), [(None, 0), ((), 0), (add, 1), ("calculator", 1), ([add, "calculator"], 2)])
def test_tools_are_one_or_several(tools, count):
    acting = Acting.of(EnvironmentConfig(), tools)
    assert len(acting.schemas if acting else ()) == count


def test_a_run_with_an_environment_needs_no_reward_function(tmp_path):
    run = trainer(tmp_path / "run", environment_factory=Count, regex="[0-9]")
    assert run.rewards.names == ("environment_reward",)
    run.train()
    for row in rows_of(tmp_path / "run"):
        digits = [m["content"] for m in json.loads(row["messages"]) if m["role"] == "assistant"]
        assert len(digits) == 3
        assert row["reward"] == sum(int(digit) % 2 == 0 for digit in digits)
        assert row["prompt"].rstrip().endswith("assistant")
        assert f"Count to {ROWS[row['row']]['answer']}." in row["prompt"]
    metrics = metrics_of(tmp_path / "run")[-1]
    assert metrics["episodes/turns"] == 3
    assert metrics["seconds/episodes_blocked"] <= metrics["seconds/episodes_waiting"] < 1


def test_an_environment_whose_methods_are_tools(tmp_path):
    trainer(tmp_path / "run", environment_factory=Shop, regex=CALL, max_turns=3).train()
    rows = rows_of(tmp_path / "run")
    for row in rows:
        left = ROWS[row["row"]]["answer"]
        for message in json.loads(row["messages"]):
            for call in message.get("tool_calls", ()):
                left += call["function"]["arguments"]["b"] - call["function"]["arguments"]["a"]
        assert row["reward"] == row["environment_reward"] == left
    assert any(len(row["turn_lengths"]) > 1 for row in rows)


def test_a_rewritten_history_begins_a_segment(tmp_path):
    """The template of Qwen3's style drops thoughts when the next message of the user follows."""
    thoughts = r"<think>\n[0-9]\n</think>\n\n[0-9]"
    folders = {history: tmp_path / history for history in ("append", "template")}
    family = FAMILIES["qwen3"]
    for history, folder in folders.items():
        run = trainer(folder, environment_factory=Count, family=family, regex=thoughts, history=history)
        run.train()  # its first step compares the log-probs of sampler and trainer
    step = StoredStep.read(folders["template"] / "rollouts" / "step-1.parquet")  # all lists of a row fit each other
    assert any(len(logps or ()) for logps in step.values("logps"))
    assert all(len(seconds) == 3 for seconds in step.values("seconds/turns"))
    for row in rows_of(folders["append"]):
        assert "segment_lengths" not in row
        assert family.tokenizer.decode(row["token_ids"]).count("<think>") == 3
    for row in rows_of(folders["template"]):
        assert len(row["segment_lengths"]) == 3
        assert sum(row["drawn"]) == sum(row["turn_lengths"]) == len(row["sampler_logps"])
        last = row["token_ids"][-row["segment_lengths"][-1] :]
        text = family.tokenizer.decode(last)
        assert text.count("<think>") == 1  # what it thought in this turn
        assert text.count("Go on.") == 2


def test_a_resumed_run_is_the_run(tmp_path):
    settings = {"environment_factory": Count, "regex": "[0-9]", "save_steps": 1}
    straight, resumed = trainer(tmp_path / "a", **settings), trainer(tmp_path / "b", **settings | {"max_steps": 1})
    straight.train()
    resumed.train()
    again = trainer(tmp_path / "b", **settings)
    again.train(resume=True)
    others = {"environment_factory": Shop, "regex": "[0-9]", "save_steps": 1, "max_steps": 3}
    with pytest.raises(RunFolderError, match="tools: the run has Count, now Shop"):
        trainer(tmp_path / "b", **others).train(resume=True)
    for one, other in zip(straight.policy.model.parameters(), again.policy.model.parameters(), strict=True):
        assert torch.equal(one, other)


class Board(Count):
    """Shows what it draws."""

    def reset(self, answer, **row):
        return f"{super().reset(answer)} Board {random.randint(0, 999)}."


def test_stops_change_nothing_where_each_completion_has_a_board_of_its_own(tmp_path):
    """What a stopped rollout has drawn and what is drawn later may have another beginning in common."""

    def make(folder):
        settings = {"regex": "[0-9]", "hidden": 64, "max_steps": 1, "starts": "own"}
        return trainer(folder, environment_factory=Board, **settings)

    assert_stops_change_nothing(make, tmp_path, lambda total: (total // 2,))


def test_evaluation_plays_episodes(tmp_path):
    run = trainer(tmp_path / "run", environment_factory=Count, regex="[0-9]", num_generations_eval=4, eval_rows=ROWS)
    found = run.evaluate()
    assert 0 < found["eval/reward/mean"] < 3


class Broken(Count):
    def step(self, text):
        raise ValueError("no connection")


def test_environments_that_all_fail_stop_the_run_with_their_error(tmp_path):
    run = trainer(tmp_path / "run", environment_factory=Broken, regex="[0-9]")
    expected = r"6 of 6 episodes failed, the first: .*no connection \(test_training.py, line \d+\); in step 1; a checkpoint of step 0"
    with pytest.raises(EpisodeError, match=expected):
        run.train()


def untyped(a, b):
    """Adds."""


class Nothing:
    def reset(self):
        pass


class Absent(Count):
    def reset(self, budget):
        return ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": [untyped]}, "'untyped' cannot be shown to the policy: the argument 'a' has no type hint"),
        ({"tools": [add, add]}, "two tools have the name 'add'"),
        ({"environment_factory": Nothing}, "has neither a method step nor other public methods"),
        ({"tools": [add], "max_turns": 0}, "max_turns"),
        ({"environment_factory": Count, "max_environments": 2}, "must be at least the 3 completions of a prompt"),
        ({"factory": f"{__name__}:Count", "credit": "process"}, "'process' is biased"),
        ({"environment_factory": Count, "credit": "process"}, "'process' is biased"),
        (
            {"environment_factory": Absent},
            r"row 0: Absent.reset needs the column 'budget'; the data has prompt, answer\.",
        ),
        ({"environment_factory": {"one": Count}}, "row 0: the column 'environment' must name one of one"),
        ({"reward_funcs": "environment_reward", "tools": [add]}, "needs an environment that gives rewards"),
        ({"reward_funcs": "environment_reward"}, "needs an environment that gives rewards"),
        ({"environment_factory": Count, "history": "full"}, "expected 'append', 'template', .* got 'full'"),
    ],
    ids=[
        *(
            "hints",
            "names",
            "no step",
            "no turns",
            "few environments",
            "process",
            "process in Python",
            "column",
            "environment",
        ),
        *("no rewards of tools", "no rewards", "history"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr("cohort.trainer.load_policy", None)
    with pytest.raises((ConfigError, DataError), match=message):
        trainer(tmp_path / "run", **{"reward_funcs": few_calls} | arguments)


def test_a_template_without_tools_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("cohort.trainer.load_policy", None)
    monkeypatch.setattr(FAMILY.tokenizer, "chat_template", FAMILY.tokenizer.chat_template)  # the trainer replaces it
    with pytest.raises(ConfigError, match="template"):
        trainer(tmp_path / "run", few_calls, [add], chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")


def test_eval_of_a_run_scores_with_the_environment(tmp_path, capsys):
    trainer(tmp_path / "run", factory=f"{__name__}:Count", regex="[0-9]").train()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    arguments = ["--data", f"{tmp_path}/rows.jsonl", "--n", "2", "--json", f"{tmp_path}/found.json"]
    assert main(["eval", str(tmp_path / "run"), *arguments]) == 0, capsys.readouterr().err
    assert "environment_reward" in (tmp_path / "found.json").read_text()


def test_cohort_eval_asks_for_an_environment_that_was_passed_in_python(tmp_path, capsys):
    nameless = lambda: Count()  # a class would be recorded by its name
    trainer(tmp_path / "run", environment_factory=nameless, regex="[0-9]", max_steps=1).train()
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    command = ["eval", str(tmp_path / "run"), "--data", str(tmp_path / "rows.jsonl"), "--quiet"]
    assert main([*command, "--reward", "environment_reward"]) == 2
    assert "passed in Python (Count): name them, as in --environment.tools" in capsys.readouterr().err.replace(
        "\n", " "
    )
    assert main([*command, "--environment.factory", f"{__name__}:Count"]) == 0
    assert "environment_reward" in capsys.readouterr().out
    (tmp_path / "run" / "checkpoints" / "step-1" / "state" / "loop.pt").write_bytes(b"pickled")
    assert main([*command, "--reward", "environment_reward"]) == 2
    assert "give --config to evaluate without them" in capsys.readouterr().err.replace("\n", " ")


class Dice:
    """Another board for each completion, from outside: nothing seeds it."""

    boards = iter(range(10**6))

    def reset(self, answer):
        self.board = next(self.boards)
        return f" Board {self.board * 7919 % 1000}: count to {answer}."

    def step(self, text):
        return Step("Go on.", float(text.strip()[-1:].isdigit()), done=True)


@pytest.mark.parametrize("history", ["append", "template"])
@pytest.mark.parametrize("starts", ["any", "own"])
def test_episodes_of_a_group_may_begin_differently(tmp_path, caplog, starts, history):
    """Each is trained on after what it read: the update's own log-probs before its step are the sampler's."""
    seen = []

    def judge(prompts, completions, environments, **_):
        seen.extend((prompt[-1]["content"], one.board) for prompt, one in zip(prompts, environments, strict=True))
        return [float(sum(map(ord, str(one))) % 97) for one in completions]

    settings = {"starts": starts, "history": history, "minibatches": 1, "max_turns": 2, "regex": "[0-9]{9}"}
    made = trainer(tmp_path / "run", judge, environment_factory=Dice, **settings)
    made.train()
    assert len(seen) >= 12
    assert all(f" Board {board * 7919 % 1000}: " in content for content, board in seen)
    rows = rows_of(tmp_path / "run")
    for row in rows:
        assert row["prompt"].endswith("Board ") or " Board" not in row["prompt"]
    assert max(line["sampler/gap"] for line in metrics_of(tmp_path / "run")) < 1e-4
    told = [record.getMessage() for record in caplog.records if "showed different things first" in record.getMessage()]
    assert len(told) == (starts == "any")


class Lottery:
    """Draws its number from Python's own generator; what it shows does not tell."""

    def reset(self, answer):
        self.number = random.randint(0, 10**9)
        return " Guess."

    def step(self, text):
        return Step("No.", float(self.number % 97), done=True)


@pytest.mark.parametrize("starts", ["same", "own"])
def test_what_reset_draws_is_the_same_for_a_group(tmp_path, starts):
    drawn = {}
    for number in range(2):
        numbers = []

        def judge(environments, numbers=numbers, **_):
            numbers.extend(one.number for one in environments)
            return [1.0 * n for n in range(len(environments))]

        random.seed(number)
        trainer(tmp_path / str(number), judge, environment_factory=Lottery, regex="[0-9]", starts=starts).train()
        drawn[number] = numbers[-12:]  # without the trial of the function
    assert drawn[0] == drawn[1]
    groups = [set(drawn[0][n : n + 3]) for n in range(0, 12, 3)]
    assert [len(group) for group in groups] == [1 if starts == "same" else 3] * 4
    assert len(set.union(*groups)) == (4 if starts == "same" else 12)


class Position:
    """An object that no file can hold."""


class Plays:
    def reset(self, **_):
        self.position = Position()
        return " Go."

    def step(self, text):
        return Step("Done.", float(len(text)), done=True)


def test_a_state_that_no_file_holds_is_made_again(tmp_path):
    """A reward fails after everything is drawn. The repaired one is given positions, not their text."""
    broken, seen = [True], []

    def judge(environments, trainer_state, **_):
        seen.extend(type(one.position) for one in environments)
        if broken[0] and trainer_state.max_steps:
            raise ValueError("no")
        return [1.0 * n for n in range(len(environments))]

    def make():
        return trainer(tmp_path / "run", judge, environment_factory=Plays, regex="[0-9]", on_error="stop", max_steps=1)

    with pytest.raises(RewardError, match="no"):
        make().train()
    broken[0] = False
    assert make().train(resume=True)["steps"] == 1
    assert set(seen) == {Position}


class Throws:
    """Throws with a global generator, as a run that goes on does from where it was."""

    def reset(self, **_):
        return " Throw."

    def step(self, text):
        return Step("Done.", random.random(), done=True)


def test_what_an_environment_draws_is_drawn_once(tmp_path):
    """Everything is drawn when a reward fails, and the repaired one draws on."""
    broken = [True]

    def judge(environments, trainer_state, **_):
        if broken[0] and trainer_state.max_steps:
            raise ValueError("no")
        return [random.random() for _ in environments]

    def make(name):
        settings = {"regex": "[0-9]", "on_error": "stop", "max_steps": 2, "tool_workers": 0}
        return trainer(tmp_path / name, judge, environment_factory=Throws, **settings)

    with pytest.raises(RewardError, match="no"):
        make("failed").train()
    broken[0] = False
    random.seed(7)
    make("failed").train(resume=True)
    make("straight").train()
    for step in (1, 2):
        names = ("environment_reward", "rewards/judge", "token_ids")
        one, other = (
            [[row[name] for name in names] for row in rows_of(tmp_path / folder, step)]
            for folder in ("failed", "straight")
        )
        assert one == other
