"""Trajectories of several turns: a continued one equals one whose history is prefilled; parked ones disturb no other."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cohort.errors import ConfigError, DataError
from cohort.policy import Policy, Precision
from cohort.rollout import LocalEngine, Request, RNGKey, Sampling, Watch
from cohort.rollout.local.fallback import RecomputeBackend, StaticBackend
from cohort.types import FinishReason, Prompt
from tests.conftest import telling, tiny_llama
from tests.rollout import test_generic, test_lean
from tests.rollout.conftest import drawn_ids
from tests.rollout.test_grammar import words
from tests.rollout.test_local_engine import LetterTokenizer, prompts

PROMPTS = prompts((5, 9, 20), (7,), (30, 31, 32, 33, 34, 35, 36))
KEY = RNGKey(0, 3)
GIVEN = [1, 9, 14, 1, 6]  # with end tokens, which end nothing here
FAMILIES = {"modules": "gpt2", "states": "mamba2", "static": "bloom", "equal lengths": "lfm2_moe", "recompute": "gpt2"}
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
    if backend == "equal lengths":
        engine.backend = StaticBackend(engine.policy, mixed_lengths=False)
    if backend == "recompute":
        engine.backend = RecomputeBackend(engine.policy)
    return engine


def requests(sampling, samples=3, continues=True):
    return [Request(p, n, sampling, KEY, i, continues) for i, p in enumerate(PROMPTS) for n in range(samples)]


def play(engine, sampling, replies, rewrite=False, watch=None):
    """After turn n of each trajectory comes ``replies[n]``, if there is room; "mixed": in place of every second one's
    history. Returns the turns of each trajectory."""
    turns = {number: [] for number in engine.submit(requests(sampling))}
    going = True
    while going:
        going = False
        for turn in engine.stream(watch):
            mine = turns[turn.trajectory]
            mine.append(turn)
            if len(mine) <= len(replies) and (rewrite or turn.room > len(replies[len(mine) - 1])):
                engine.extend(turn.trajectory, replies[len(mine) - 1], rewrite=rewrites(rewrite, turn.request))
                going = True
            else:
                engine.release(turn.trajectory)
    assert engine.unfinished == 0
    return list(turns.values())


def rewrites(rewrite, request):
    return rewrite is True or (rewrite == "mixed" and request.sample % 2 == 0)


def last(turn):
    """Tokens and log-probs that were drawn in a turn."""
    start = len(drawn_ids(turn.completion)) - turn.num_drawn
    return list(drawn_ids(turn.completion)[start:]), list(turn.completion.sampler_logps[start:])


@dataclass(frozen=True, slots=True)
class Shifted(RNGKey):
    """The random numbers of later positions."""

    offset: int = 0

    def uniforms(self, prompts_S, samples_S, start, count):
        return KEY.uniforms(prompts_S, samples_S, start + self.offset, count)


def with_histories_as_prompts(engine, turns, histories, positions, sampling):
    """The turns' tokens and log-probs by an engine for which all that came before each is its prompt."""
    requests = []
    for turn, history, position in zip(turns, histories, positions, strict=True):
        prompt = Prompt(turn.request.prompt.uid, 0, (*turn.request.prompt.token_ids, *history), "", "", {})
        key = Shifted(KEY.seed, KEY.step, offset=position)
        requests.append(Request(prompt, turn.request.sample, Sampling(turn.num_drawn, sampling.temperature), key))
    numbers = engine.submit(requests)
    found = {turn.trajectory: last(turn) for turn in engine.stream()}
    return [found[number] for number in numbers]


# Where rows are kept, where they are read again, and each way of computing; rewriting differs only in what is kept.
CASES = [(backend, False) for backend in BACKENDS] + [("lean", True), ("native", True), ("static", True)]
CASES += [("lean", "mixed"), ("native", "mixed")]


TELLING = [
    ("native", False),
    ("windows", False),
    ("modules", False),
    ("states", False),
    ("static", False),
    ("lean", True),
    ("native", "mixed"),
]


@pytest.mark.parametrize(("backend", "rewrite"), telling(CASES, *TELLING))
def test_a_continued_trajectory_equals_one_whose_history_is_prefilled(backend, rewrite):
    sampling = Sampling(45, temperature=0.9, max_turn_length=6)
    replies = [GIVEN, GIVEN[:2], GIVEN * 3]
    played = play(engine_of(backend, max_batch_size=5), sampling, replies, rewrite)
    # float64, the same sums in another order. transformers normalises in float32. The native kernels are float32, and
    # bfloat16 rounds keys and values once more.
    bound = {"lean": 1e-9, "windows": 1e-9, "native": 2e-5, "bfloat16": 0.1}.get(backend, 1e-6)
    fresh = engine_of(backend)
    histories, positions = [[] for _ in played], [0] * len(played)
    for number, given in enumerate([*replies, []]):
        turns = [turns[number] for turns in played]
        expected = with_histories_as_prompts(fresh, turns, histories, positions, sampling)
        for n, (turn, (wanted, logps)) in enumerate(zip(turns, expected, strict=True)):
            mine, my_logps = last(turn)
            if backend != "bfloat16":
                assert mine == wanted
            if mine == wanted:
                assert my_logps == pytest.approx(logps, abs=bound)
            histories[n] = given if rewrites(rewrite, turn.request) else [*histories[n], *mine, *given]
            positions[n] += len(mine) + len(given)
    assert all(len(turns) == 4 for turns in played)


@pytest.mark.parametrize("rewrite", [False, True])
@pytest.mark.parametrize("backend", ["native", "static"])
def test_events_have_the_positions_of_drawn_tokens_in_the_whole_trajectory(backend, rewrite):
    events = []
    sampling, watch = Sampling(30, max_turn_length=4), Watch(on_token=events.append)
    for turns in play(engine_of(backend, max_batch_size=5), sampling, [GIVEN, GIVEN[:2]], rewrite, watch):
        request, completion = turns[-1].request, turns[-1].completion
        mine = [one for one in events if (one.prompt_index, one.sample) == (request.prompt_index, request.sample)]
        drawn = np.concatenate([segment.is_drawn for segment in completion.segments])
        assert [event.position for event in mine] == np.flatnonzero(drawn).tolist()
        assert [event.token_id for event in mine] == completion.token_ids.tolist()
        assert [event.finish_reason for event in mine if event.finish_reason] == [
            turn.completion.finish_reason for turn in turns
        ]


@pytest.mark.parametrize("waiting", range(3))
@pytest.mark.parametrize("backend", ["lean", "native"])
def test_a_parked_trajectory_follows_its_prompt_when_those_of_others_are_gone(backend, waiting):
    def turns(others):
        engine = engine_of(backend)
        alone = [Request(PROMPTS[p], 0, Sampling(9), KEY, p) for p in others]
        waits = Request(PROMPTS[waiting], 0, Sampling(24, max_turn_length=3), KEY, waiting, continues=True)
        *_, number = engine.submit([*alone, waits])
        found = [turn for turn in engine.stream() if turn.trajectory == number]
        engine.extend(number, GIVEN)
        return [last(turn) for turn in [*found, *engine.stream()]]

    for mine, theirs in zip(turns({0, 1, 2} - {waiting}), turns([]), strict=True):
        assert mine[0] == theirs[0]
        assert mine[1] == pytest.approx(theirs[1], abs=2e-5 if backend == "native" else 1e-9)


@pytest.mark.parametrize("backend", telling(["lean", "native", "refill"], "native", "refill"))
def test_parked_trajectories_change_no_draw_of_the_others(backend):
    def others(engine):
        numbers = engine.submit(requests(Sampling(24), continues=False))
        found = {turn.trajectory: turn.completion for turn in engine.stream() if turn.trajectory in numbers}
        return [found[number] for number in numbers]

    engine = engine_of(backend, max_batch_size=7)
    expected = others(engine)
    parked = engine.submit(requests(Sampling(24, max_turn_length=3), samples=2)[:2])
    runs = [others(engine)]  # while the turns of those that are parked later go on
    assert engine.unfinished == len(parked)
    runs.append(others(engine))
    for number in parked:
        engine.extend(number, GIVEN)
    runs.append(others(engine))
    for number in parked:
        engine.release(number)
    assert engine.unfinished == 0
    for run in runs:
        for one, other in zip(run, expected, strict=True):
            assert drawn_ids(one) == drawn_ids(other)
            # As for any other batch: float32, and GPT-2's norms.
            assert list(one.sampler_logps) == pytest.approx(list(other.sampler_logps), abs=2e-5)


def test_stop_strings_and_ends_in_given_tokens_have_no_effect():
    engine = engine_of("lean")
    letters = LetterTokenizer()
    stop = letters.decode(GIVEN[1:3])
    (number,) = engine.submit(
        [Request(PROMPTS[0], 0, Sampling(20, stop=(stop,), max_turn_length=4), KEY, continues=True)]
    )
    turns = list(engine.stream())
    while turns[-1].room > len(GIVEN):
        engine.extend(number, GIVEN)
        turns += engine.stream()
    assert len(turns) >= 3
    for turn in turns[:-1]:
        drawn_end = last(turn)[0][-1] == 1
        assert turn.completion.finish_reason is (FinishReason.EOS if drawn_end else FinishReason.LENGTH)
        assert drawn_end or turn.num_drawn == 4


def test_a_grammar_holds_in_each_turn():
    pytest.importorskip("llguidance")
    policy = Policy(tiny_llama(7).double(), Precision(torch.float64, torch.float64))
    engine = LocalEngine(policy, words("a", "b", "c", "d"), (1, 2))
    prompt = Prompt(0, 0, (3,), "", "", {})
    (number,) = engine.submit([Request(prompt, 0, Sampling(9, regex="a|bc"), KEY, continues=True)])
    (first,) = engine.stream()
    engine.extend(number, [6, 6])
    (second,) = engine.stream()
    for turn in (first, second):
        assert last(turn)[0][:-1] in ([3], [4, 5])
        assert turn.completion.finish_reason is FinishReason.EOS


def test_requests_that_come_while_it_streams_are_served():
    engine = engine_of("lean")
    first = engine.submit(requests(Sampling(5), continues=False))
    later, ended = [], []
    for turn in engine.stream():
        ended.append(turn.trajectory)
        if not later:
            later += engine.submit(requests(Sampling(5), samples=1, continues=False))
            later += engine.submit(
                requests(Sampling(60), samples=1, continues=False)
            )  # more than there is room for now
    assert sorted(ended) == [*first, *later]


def test_what_a_parked_trajectory_forbids():
    engine = engine_of("lean")
    (number, *_) = engine.submit(requests(Sampling(9, max_turn_length=2), samples=1)[:1])
    with pytest.raises(ConfigError, match="trajectory 0 is not parked"):
        engine.extend(number, [4])
    list(engine.stream())
    for call in (
        lambda: engine.update_weights(1),
        engine.sleep,
        lambda: engine.generate(PROMPTS, 1, Sampling(4), KEY),
    ):
        with pytest.raises(ConfigError, match="unfinished"):
            call()
    with pytest.raises(DataError, match="7 tokens given to trajectory 0, which has room for 7"):
        engine.extend(number, [4] * 7)
    engine.release(number)
    engine.release(number)
    engine.update_weights(1)
    engine.sleep()
    assert len(engine.generate(PROMPTS, 1, Sampling(4), KEY)) == len(PROMPTS)
    engine.close()


def test_cancelled_while_others_are_parked():
    engine = engine_of("lean", max_batch_size=4)
    engine.submit(requests(Sampling(9, max_turn_length=2), samples=1))
    list(engine.stream())
    engine.extend(0, [4, 4])
    turns = list(engine.stream(Watch(cancelled=lambda: True)))
    assert [(turn.trajectory, turn.completion.finish_reason) for turn in turns] == [(0, FinishReason.CANCELLED)]
    assert engine.unfinished == 2
    engine.reset()
    assert engine.unfinished == 0
