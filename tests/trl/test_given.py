"""What TRL's trainer is given, as Cohort's takes it."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from cohort.train.inputs import name_of
from cohort.trl import GRPOConfig
from cohort.trl.given import TrainerReference, named_model, reward_functions
from cohort.trl.translate import translate


@pytest.mark.parametrize(
    ("model", "loading", "expected"),
    [
        ("owner/name", {"revision": "v1"}, "owner/name@v1"),
        ("owner/name", {"revision": "main"}, "owner/name"),
        ("owner/name", None, "owner/name"),
        (3, {"revision": "v1"}, 3),
        ("owner/name", {"gguf_file": "a.gguf"}, "owner/name:a.gguf@None"),
        ("owner/name", {"gguf_file": "a.gguf", "revision": "v1"}, "owner/name:a.gguf@v1"),
        ("{folder}", {"gguf_file": "a.gguf"}, "{folder}/a.gguf"),
        (3, {"gguf_file": "a.gguf"}, 3),
    ],
)
def test_a_revision_and_a_file_have_paths(model: Any, loading: Any, expected: Any, monkeypatch, tmp_path):
    model, expected = (one.format(folder=tmp_path) if isinstance(one, str) else one for one in (model, expected))
    monkeypatch.setattr("cohort.trl.given.file_of_hub", lambda name, file, revision: f"{name}:{file}@{revision}")
    monkeypatch.setattr("cohort.trl.given.folder_of_revision", lambda name, revision: f"{name}@{revision}")
    assert named_model(model, GRPOConfig("out", model_init_kwargs=loading)) == expected


def takes_all(completions, scale=1, **columns):
    return [scale, columns["trainer_state"], columns["answer"]]


def test_a_reward_function_gets_the_state_of_transformers():
    """Named or among ``**kwargs``, also of a partial, whose bound arguments keep their values."""

    def named(completions, trainer_state):
        return trainer_state

    async def awaited(completions, **columns):
        return columns["trainer_state"]

    def without(completions):
        return None

    trainer = SimpleNamespace(state="transformers'")
    config = translate(GRPOConfig("out", use_cpu=True), num_prompts=100)
    given = [takes_all, partial(takes_all, scale=2), named, awaited, without]
    plain, bound, *found, last = reward_functions(given, None, config, lambda: trainer)
    columns = {"completions": [], "trainer_state": "Cohort's", "answer": "3"}
    assert plain(**columns) == [1, "transformers'", "3"]
    assert bound(**columns) == [2, "transformers'", "3"]
    assert found[0](completions=[], trainer_state="Cohort's") == "transformers'"
    assert asyncio.run(found[1](completions=[], trainer_state="Cohort's")) == "transformers'"
    assert last is without
    assert (name_of(plain), name_of(bound)) == (name_of(takes_all), name_of(given[1])) != (None, None)


class HasState:
    state = "here"


def test_in_a_worker_process_the_state_is_cohorts():
    """A worker has no trainer: the rewards of ``cohort.trl.rewards`` that run there failed on every completion."""
    config, trainer = translate(GRPOConfig("out", use_cpu=True), num_prompts=100), HasState()
    (plain,) = reward_functions([takes_all], None, config, TrainerReference(trainer))
    assert plain(completions=[], trainer_state="Cohort's", answer="3") == [1, "here", "3"]
    plain = cloudpickle.loads(cloudpickle.dumps(plain))
    assert plain(completions=[], trainer_state="Cohort's", answer="3") == [1, "Cohort's", "3"]
