"""Runs whose tools and environments misbehave, through the trainer: they end well, and what fails counts for nothing."""

import functools
import json
from statistics import fmean, pstdev, stdev
from typing import ClassVar

import pytest

from cohort.environments import Step
from cohort.environments.shapes import LIVE
from cohort.errors import EpisodeError
from tests.environments.test_host import balance, processes
from tests.environments.test_training import ROWS, trainer
from tests.environments.worlds import AsyncFaulty, Faulty
from tests.test_workers import alive
from tests.train.harness import metrics_of, rows_of

DIGIT = "[0-9]"
PLACES = {
    "here": (Faulty, ["raise", "nan", "exit"], {"num_generations": 16}),
    "async": (AsyncFaulty, ["raise", "hang", "nan"], {"call_timeout": 0.5, "num_generations": 16}),
    "worker": (Faulty, ["raise", "die", "hang"], {"call_timeout": 2.0, "tool_workers": 4, "num_generations": 8}),
}
ERRORS = {"raise": "no way", "nan": "reward nan", "exit": "SystemExit", "hang": "took more", "die": "killed by SIGKILL"}


def run_of(folder, environment=None, **settings):
    """A run of one step, trained to its end."""
    trainer(folder, environment_factory=environment, **{"max_steps": 1, "regex": DIGIT} | settings).train()
    return rows_of(folder), metrics_of(folder)[-1]


def texts_of(row, role):
    return [message["content"] for message in json.loads(row["messages"]) if message["role"] == role]


@pytest.mark.parametrize("place", PLACES)
def test_statistics_are_those_of_the_episodes_that_do_not_fail(place, tmp_path):
    """A step fails where the policy draws a 7: one in ten."""
    world, faults, settings = PLACES[place]
    log = tmp_path / "log"
    factory = functools.partial(world, log, *faults)
    rows, metrics = run_of(tmp_path / "run", factory, **settings)
    kept = [row for row in rows if row["finish_reason"] == "eos"]
    failed = [row for row in rows if row["finish_reason"] == "environment"]
    assert len(kept) + len(failed) == len(rows) == 2 * settings["num_generations"]
    assert len(kept) > 2
    for row in kept:
        digits = texts_of(row, "assistant")
        assert len(digits) == 3
        assert "7" not in digits
        assert row["reward"] == pytest.approx(sum(map(int, digits)) / 10)
    assert all(row["reward"] is row["advantage"] is None for row in failed)
    wanted = [ERRORS[faults[len(digits) - 1]] for row in failed if "7" in (digits := texts_of(row, "assistant"))]
    assert len(wanted) >= 2
    others = ["another environment in it", "took more"] if place == "worker" else []  # in the process that is killed
    for row in failed:
        digits = texts_of(row, "assistant")
        expected = [ERRORS[faults[len(digits) - 1]]] if digits[-1:] == ["7"] else others
        assert any(words in row["episode_error"] for words in [*expected, *others])
    assert metrics["episodes/failed"] == len(failed)
    groups = [[row for row in kept if row["group"] == uid] for uid in dict.fromkeys(row["group"] for row in rows)]
    for group in filter(None, groups):
        rewards = [row["reward"] for row in group]
        for row in group:
            advantage = (row["reward"] - fmean(rewards)) / (stdev(rewards) + 1e-6) if len(group) > 1 else 0.0
            assert row["advantage"] == pytest.approx(advantage, abs=1e-5)  # float32
    rewards = [row["reward"] for row in kept]
    spreads = [pstdev(row["reward"] for row in group) for group in groups if group]
    assert metrics["reward/mean"] == pytest.approx(fmean(rewards))
    assert metrics["reward/within_group_std"] == pytest.approx(fmean(spreads))
    assert metrics["episodes/environment_reward"] == pytest.approx(fmean(rewards))
    assert metrics["episodes/turns"] == 3
    assert metrics["length/mean"] == pytest.approx(fmean(sum(row["turn_lengths"]) for row in kept))
    assert not LIVE
    assert not any(map(alive, processes(log)))
    if place != "worker":  # a killed one cannot be closed
        assert not balance(log)


class Odd:
    """What it does depends on the row."""

    def reset(self, answer):
        self.answer = answer
        return Step("Begin.", done=answer == 2)  # ends at reset

    def step(self, text):
        return Step("Go on.", 1.0, done=self.answer != 3)  # never ends

    def get_reward(self):
        return float("nan") if self.answer == 4 else 0.5


def test_environments_that_end_at_reset_never_end_or_give_nan(tmp_path):
    rows, metrics = run_of(tmp_path / "run", Odd, prompts_per_step=4, max_turns=3)
    errors = {2: "it ended in reset()", 4: "Odd.get_reward gave the reward nan: expected a finite number or None"}
    reasons = {2: "environment", 3: "turns", 4: "environment", 5: "eos"}
    rewards = {2: None, 3: 3.5, 4: None, 5: 1.5}
    for row in rows:
        answer = ROWS[row["row"]]["answer"]
        assert row["finish_reason"] == reasons[answer]
        assert row["episode_error"] == errors.get(answer)
        assert row["reward"] == rewards[answer]
    assert {ROWS[row["row"]]["answer"] for row in rows} == set(reasons)
    assert (metrics["episodes/failed"], metrics["reward/mean"]) == (6, 2.5)
    assert metrics["groups/dead_share"] == 1


class Leaky(Odd):
    """Its objects share a list."""

    seen: ClassVar = []
    open: ClassVar = set()

    def reset(self, **row):
        self.seen.append(row)
        self.open.add(self)
        return f"This is game {len(self.seen)}."

    def close(self):
        self.open.remove(self)


def test_state_that_leaks_into_the_next_episode_is_found(tmp_path):
    with pytest.raises(EpisodeError, match=r"different things first, 'This is game 1\.' and 'This is game 2\.'"):
        run_of(tmp_path / "run", Leaky)
    assert len(Leaky.seen) >= 3
    assert not Leaky.open
    assert not LIVE


KINDS = ["ab " * 10_000, b"\xff<|im_end|>", None, {3}, [1, {"a": None}], float("nan")]
TEXTS = [None, "\ufffd<|im_end|>", "null", "[3]", '[1, {"a": null}]', "NaN"]


def give(kind: int) -> object:
    """Gives something.

    Args:
        kind: What.
    """
    return KINDS[kind]


def number_of_calls(turns, **_):
    return [float(len(some)) for some in turns]


@pytest.mark.parametrize("limit", [None, 20])
def test_tools_that_return_long_texts_bytes_none_and_other_types(limit, tmp_path):
    call = r'<tool_call>\n\{"name": "give", "arguments": \{"kind": [0-5]\}\}\n</tool_call>'
    settings = {"max_turns": 3, "max_observation_tokens": limit, "max_completion_length": 400}
    rows, _ = run_of(tmp_path / "run", None, reward_funcs=number_of_calls, tools=[give], regex=call, **settings)
    seen = set()
    for row in rows:
        answers, messages = texts_of(row, "tool"), json.loads(row["messages"])
        kinds = [m["tool_calls"][0]["function"]["arguments"]["kind"] for m in messages if m["role"] == "assistant"]
        seen |= set(kinds)
        for kind, answer in zip(kinds, answers, strict=True):
            if kind:
                assert answer == TEXTS[kind]
            elif limit:
                assert len(answer) < 100
                assert " tokens are left out here]" in answer
            else:
                assert answer == KINDS[0]
        cut = not limit and 0 in kinds[:2]  # no room for the answer
        assert row["finish_reason"] == ("length" if cut else "turns")
        assert len(kinds) == (kinds.index(0) + 1 if cut else 3)
        assert len(row["token_ids"]) <= 400
        assert sum(row["drawn"]) == sum(row["turn_lengths"])
        assert row["reward"] == len(kinds)
    assert 0 in seen
    assert len(seen) > 3
