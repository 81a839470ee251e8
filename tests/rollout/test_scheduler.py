"""The scheduler of the local engine, without torch: a runner of twenty lines stands for the model."""

import itertools
import subprocess
import sys

import pytest

from cohort.errors import DataError
from cohort.rollout import Request, RNGKey, Sampling
from cohort.rollout.local.capacity import Capacity
from cohort.rollout.local.scheduler import Draw, Scheduler
from cohort.rollout.trajectory import StopStrings, Trajectory
from cohort.types import FinishReason, Prompt
from tests.conftest import each

END, VOCABULARY = 1, 30
PROMPTS = [Prompt(n, n, ids, "", "", {}) for n, ids in enumerate([(5, 9, 20), (7,), (8, 2, 2, 6, 3), (2, 3), (4,)])]


class Letters:
    """Token i is the i-th letter."""

    def decode(self, ids, skip_special_tokens=True, clean_up_tokenization_spaces=False):
        return "".join(chr(95 + i) for i in ids)


class Runner:
    """A model whose next token is a function of all tokens before it. Notes what it is asked for."""

    def __init__(self, capacity, refills=True, mixed_lengths=True, keeps_rows=True, fails=lambda text: False):
        self.refills, self.mixed_lengths, self.keeps_rows, self.fails = refills, mixed_lengths, keeps_rows, fails
        self.capacity, self.prefixes, self.rows = capacity, {}, {}
        self.read, self.busiest = [], 0

    def prefill(self, prefixes):
        assert self.mixed_lengths or len({len(prefix.token_ids) for prefix in prefixes}) == 1
        self.read += [list(prefix.token_ids) for prefix in prefixes]
        self.prefixes |= {prefix.slot: list(prefix.token_ids) for prefix in prefixes}
        assert max(self.prefixes) < self.capacity.prompts

    def add(self, begun, continued, waiting):
        assert self.refills or not self.rows
        for t in begun:
            assert self.prefixes[t.prefix.slot] == list(t.prefix.token_ids)
            self.rows[t.slot] = list(t.prefix.token_ids)
        for t in (*begun, *continued):
            self.rows[t.slot] += t.unread
            self.read += [t.unread] if t.unread else []
            t.unread = []
        self.busiest = max(self.busiest, len(self.rows))
        assert max(self.rows) < self.capacity.rows

    def draw(self, trajectories):
        texts = [self.rows[t.slot] for t in trajectories]
        drawn = [(sum((n + 3) * token for n, token in enumerate(text)) % 977) % VOCABULARY for text in texts]
        logps = [-float(token) for token in drawn]
        return Draw(drawn, logps, logps, [not self.fails(text) for text in texts])

    def step(self, trajectories):
        for t in trajectories:
            self.rows[t.slot].append(t.tokens[-1])

    def release(self, slots):
        for slot in slots:
            del self.rows[slot]

    def drop(self, prefixes):
        for prefix in prefixes:
            del self.prefixes[prefix.slot]


def trajectories(sampling, samples=3, prompts=PROMPTS, continues=False):
    pairs = itertools.product(prompts, range(samples))
    stops = StopStrings(Letters(), sampling.stop)
    requests = (Request(prompt, sample, sampling, RNGKey(0, 0), 0, continues) for prompt, sample in pairs)
    return [Trajectory(number, request, stops) for number, request in enumerate(requests)]


def scheduler_of(rows=4, prompts=3, ends=(), **settings):
    runner = Runner(Capacity(rows, prompts, 0, 0), **settings)
    return Scheduler(runner, runner.capacity, frozenset(ends)), runner


def run(scheduler, extend=lambda trajectory: None, on_token=None):
    """Decode everything. ``extend`` gives the tokens after a parked trajectory's turn, or None to release it."""
    ended = {}
    while (turns := scheduler.advance(on_token)) is not None or scheduler.parked:
        for trajectory, reason in (turns or {}).items():
            ended[trajectory.number] = (list(trajectory.tokens), reason)
        for number, trajectory in list(scheduler.parked.items()):
            given = extend(trajectory)
            if given is None:
                scheduler.release(number)
            else:
                trajectory.extend(given, rewrite=False, vocab_size=VOCABULARY)
                scheduler.resume(number)
    assert scheduler.unfinished == 0
    return ended


def alone(trajectory, ends=()):
    """What a trajectory draws when nothing else is decoded."""
    scheduler, _ = scheduler_of(ends=ends)
    scheduler.submit([Trajectory(0, trajectory.request, trajectory.stops)])
    return run(scheduler)[0]


KINDS = {
    "keeps rows": {},
    "reads again": {"keeps_rows": False},
    "static": {"refills": False, "keeps_rows": False},
    "equal lengths": {"refills": False, "mixed_lengths": False, "keeps_rows": False},
}


@each("kind", KINDS)
@each(("rows", "prompts"), [(1, 1), (4, 1), (4, 3), (100, 100)])
def test_every_trajectory_is_the_one_that_it_would_be_alone(kind, rows, prompts):
    ends = (END, 3)
    scheduler, runner = scheduler_of(rows, prompts, ends, **KINDS[kind])
    submitted = trajectories(Sampling(9, stop=("e", "p")))
    scheduler.submit(submitted)
    ended = run(scheduler)
    assert ended == {t.number: alone(t, ends) for t in submitted}
    assert {reason for _, reason in ended.values()} == {FinishReason.LENGTH, FinishReason.STOP, FinishReason.EOS}
    assert not runner.rows
    assert not runner.prefixes
    if runner.refills:
        assert len(runner.read) == len(PROMPTS)  # each prompt once
        assert runner.busiest == min(rows, 3 * prompts, len(submitted))


def test_parked_rows_count_and_others_decode_on():
    scheduler, runner = scheduler_of(rows=4, prompts=5)
    waits, others = trajectories(Sampling(3), 2, PROMPTS[:1], continues=True), trajectories(Sampling(7), 2, PROMPTS[1:])
    waits = [Trajectory(100 + n, t.request, t.stops) for n, t in enumerate(waits)]
    for t in waits:
        t.limit = 2  # its turn is short, and room is left
    scheduler.submit(waits)
    scheduler.submit(others)
    ended = {}
    while turns := scheduler.advance():
        ended.update({t.number: t for t in turns})
    while (turns := scheduler.advance()) is not None:
        ended.update({t.number: t for t in turns})
    assert set(scheduler.parked) == {100, 101}
    assert scheduler.unfinished == 2
    assert runner.busiest == 4
    assert list(runner.rows) == [t.slot for t in waits] == [0, 1]
    assert len(runner.prefixes) == 1  # the prompt of the parked rows
    assert all((ended[t.number].tokens, FinishReason.LENGTH) == alone(t) for t in others)
    scheduler.release(100)
    scheduler.parked[101].extend([], rewrite=False, vocab_size=VOCABULARY)
    scheduler.resume(101)
    assert list(scheduler.advance()) == [waits[1]]
    assert (waits[1].tokens, FinishReason.LENGTH) == alone(waits[1])
    assert not runner.prefixes


@each("row_tokens", [96, 200, 400])
def test_rows_that_grow_stay_within_their_tokens(monkeypatch, row_tokens):
    """Parked rows count, and rows that go on again make room for themselves."""
    monkeypatch.setattr("cohort.rollout.local.capacity.FIRST_TOKENS", 32)
    capacity = Capacity(12, 5, 0, 90, row_tokens)
    scheduler = Scheduler(Runner(capacity), capacity, frozenset((END,)))
    submitted = trajectories(Sampling(90, max_turn_length=9), continues=True)
    scheduler.submit(submitted)
    for step in itertools.count():
        ended = scheduler.advance()
        held = len(scheduler.active) + sum(t.slot is not None for t in scheduler.parked.values())
        longest = max((len(t.tokens) for t in scheduler.active), default=0)
        assert held <= capacity.rows_of(longest) or len(scheduler.active) <= 1
        if ended is None and not scheduler.parked:
            break
        for number, t in list(scheduler.parked.items()) if ended is None or step % 7 == 0 else ():
            if t.room > 20:
                t.extend([9] * 11, rewrite=False, vocab_size=VOCABULARY)
                scheduler.resume(number)
            else:
                scheduler.release(number)
    assert scheduler.unfinished == 0
    assert max(len(t.tokens) for t in submitted) > 60


def test_when_all_rows_are_parked_there_is_nothing_to_decode():
    scheduler, _ = scheduler_of(rows=2)
    submitted = trajectories(Sampling(8, max_turn_length=2), 2, PROMPTS[:2], continues=True)
    scheduler.submit(submitted)
    while scheduler.advance() is not None:
        pass
    assert list(scheduler.parked) == [0, 1]
    scheduler.release(0)
    assert scheduler.advance() == {}  # the third trajectory has its row
    assert scheduler.active == [submitted[2]]


def test_a_row_that_fails_ends_alone_and_is_never_parked():
    scheduler, _ = scheduler_of(fails=lambda text: text[0] == 7 and len(text) == 4)
    submitted = trajectories(Sampling(6), continues=True)
    scheduler.submit(submitted)
    ended = run(scheduler)
    for t in submitted:
        tokens, reason = alone(t)
        failed = t.request.prompt.token_ids == (7,)
        assert ended[t.number] == ((tokens[:3], FinishReason.ERROR) if failed else (tokens, reason))


def test_cancelled_trajectories_that_were_extended_leave_no_row():
    scheduler, runner = scheduler_of()
    submitted = trajectories(Sampling(6, max_turn_length=2), 2, PROMPTS[:1], continues=True)
    scheduler.submit(submitted)
    while scheduler.advance() is not None:
        pass
    submitted[0].extend([5], rewrite=False, vocab_size=VOCABULARY)
    scheduler.resume(0)
    assert scheduler.cancel() == [submitted[0]]
    assert list(runner.rows) == [submitted[1].slot]


def test_after_cancelling_a_batch_parked_trajectories_go_on():
    scheduler, runner = scheduler_of(rows=2, prompts=2, refills=False, keeps_rows=False)
    submitted = trajectories(Sampling(6, max_turn_length=2), 1, PROMPTS[:4], continues=True)
    scheduler.submit(submitted)
    while len(scheduler.parked) < 2:
        scheduler.advance()
    scheduler.advance()
    assert scheduler.cancel() == submitted[2:]
    assert not runner.prefixes
    submitted[0].extend([5], rewrite=False, vocab_size=VOCABULARY)
    scheduler.resume(0)
    assert scheduler.advance() is not None


@each(
    ("given", "rewrite", "words"),
    [
        ([VOCABULARY], False, "from 30 to 30 given; the model has 30 tokens"),
        ([4] * 5, False, "5 tokens given to trajectory 0, which has room for 5"),
        ([4] * 8, True, "8 tokens given to trajectory 0, which has room for 8"),
        ([], True, "at least one token"),
    ],
)
def test_what_cannot_follow_is_refused(given, rewrite, words):
    scheduler, _ = scheduler_of()
    (trajectory,) = trajectories(Sampling(8, max_turn_length=3), 1, PROMPTS[:1], continues=True)
    scheduler.submit([trajectory])
    while scheduler.advance() is not None:
        pass
    with pytest.raises(DataError, match=words):
        trajectory.extend(given, rewrite=rewrite, vocab_size=VOCABULARY)


def test_the_protocol_and_the_scheduler_import_no_torch():
    code = "import sys, cohort.rollout, cohort.rollout.local.scheduler; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
