"""Trajectories of several turns: a continued one equals one whose history is prefilled; parked ones disturb no other."""

from dataclasses import dataclass

import pytest
import torch

from cohort.policy import Policy, Precision
from cohort.rollout import LocalEngine, Request, RNGKey, Sampling
from cohort.rollout.generic import RecomputeBackend
from cohort.types import Prompt
from tests.conftest import tiny_llama
from tests.rollout import test_generic, test_lean
from tests.rollout.test_local_engine import LetterTokenizer, prompts

PROMPTS = prompts((5, 9, 20), (7,), (30, 31, 32, 33, 34, 35, 36))
KEY = RNGKey(0, 3)
GIVEN = [1, 9, 14, 1, 6]  # with end tokens, which end nothing here
FAMILIES = {"refill": "gpt2", "static": "phi3 window", "equal lengths": "lfm2", "recompute": "gpt2"}
BACKENDS = ["lean", "native", "windows", "bfloat16", *FAMILIES]


def engine_of(backend, **settings):
    dtype, compute = {"native": (torch.float32,) * 2, "bfloat16": (torch.float32, torch.bfloat16)}.get(
        backend, (torch.float64,) * 2
    )
    if backend in FAMILIES:
        model = test_generic.made(FAMILIES[backend])
    else:
        model = test_lean.made("gemma3") if backend == "windows" else tiny_llama()
    engine = LocalEngine(Policy(model.to(dtype), Precision(dtype, compute)), LetterTokenizer(), (1,), **settings)
    if backend == "recompute":
        engine.backend = RecomputeBackend(engine.policy)
    return engine


def requests(sampling, samples=3, continues=True):
    return [Request(p, n, sampling, KEY, i, continues) for i, p in enumerate(PROMPTS) for n in range(samples)]


def play(engine, sampling, replies, rewrite=False):
    """After turn n of each trajectory comes ``replies[n]``, if there is room. Returns the turns of each trajectory."""
    turns = {number: [] for number in engine.submit(requests(sampling))}
    going = True
    while going:
        going = False
        for turn in engine.stream():
            mine = turns[turn.trajectory]
            mine.append(turn)
            if len(mine) <= len(replies) and (rewrite or turn.room > len(replies[len(mine) - 1])):
                engine.extend(turn.trajectory, replies[len(mine) - 1], rewrite=rewrite)
                going = True
            else:
                engine.release(turn.trajectory)
    assert engine.unfinished == 0
    return list(turns.values())


def ids_of(turn):
    return list(turn.completion.token_ids)


def last(turn):
    """Tokens and log-probs that were drawn in a turn."""
    start = len(turn.completion.token_ids) - turn.num_drawn
    return list(turn.completion.token_ids[start:]), list(turn.completion.sampler_logps[start:])


@dataclass(frozen=True, slots=True)
class Shifted(RNGKey):
    """The random numbers of later positions."""

    offset: int = 0

    def uniforms(self, prompts_S, samples_S, start, count):
        return KEY.uniforms(prompts_S, samples_S, start + self.offset, count)


def with_history_as_prompt(engine, turn, history, position, sampling):
    """The turn's tokens and log-probs by an engine for which all that came before is the prompt."""
    prompt = Prompt(turn.request.prompt.uid, 0, (*turn.request.prompt.token_ids, *history), "", "", {})
    key = Shifted(KEY.seed, KEY.step, offset=position)
    engine.submit([Request(prompt, turn.request.sample, Sampling(turn.num_drawn, sampling.temperature), key)])
    return last(*engine.stream())


@pytest.mark.parametrize("rewrite", [False, True], ids=["append", "rewrite"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_continued_trajectory_equals_one_whose_history_is_prefilled(backend, rewrite):
    sampling = Sampling(45, temperature=0.9, max_turn_length=6)
    replies = [GIVEN, GIVEN[:2], GIVEN * 3]
    played = play(engine_of(backend, max_batch_size=5), sampling, replies, rewrite)
    # float64, the same sums in another order. transformers normalises in float32. The native kernels are float32, and
    # bfloat16 rounds keys and values once more.
    bound = {"lean": 1e-9, "windows": 1e-9, "native": 2e-5, "bfloat16": 0.1}.get(backend, 1e-6)
    fresh = engine_of(backend)
    for turns in played:
        assert len(turns) == 4
        history, position = [], 0
        for turn, given in zip(turns, [*replies, []], strict=True):
            ids, logps = last(turn)
            expected_ids, expected_logps = with_history_as_prompt(fresh, turn, history, position, sampling)
            if backend != "bfloat16":
                assert ids == expected_ids
            if ids == expected_ids:
                assert logps == pytest.approx(expected_logps, abs=bound)
            history = given if rewrite else [*history, *ids, *given]
            position += len(ids) + len(given)
