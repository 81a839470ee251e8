"""Tools and environments where they run: in this process, on the event loop, and in worker processes."""

import asyncio
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import wait
from pathlib import Path

import pytest

from cohort.config import EnvironmentConfig
from cohort.environments.calls import ParsedTurn
from cohort.environments.contract import Ended, EpisodeFailed, ToolCall, ToolError
from cohort.environments.host import Host
from cohort.environments.shapes import LIVE, find_environments
from cohort.environments.tools import Toolbox
from cohort.errors import ConfigError, DataError, EpisodeError
from cohort.types import Prompt
from tests.environments.worlds import AsyncDesk, AsyncWorld, Desk, World
from tests.test_workers import alive

PLACES = {"here": (World, {}), "async": (AsyncWorld, {}), "worker": (World, {"tool_workers": 1})}


def prompt(**columns):
    return Prompt(0, 0, (), "", [{"role": "user", "content": "?"}], columns)


def turn(text="", *calls):
    called = [{"id": f"id{number}"} for number, call in enumerate(calls) if not call.error]
    return ParsedTurn(text, calls, {"role": "assistant", "content": text, "tool_calls": called})


@pytest.fixture
def host():
    """Makes hosts, which are closed at the end."""
    made = []

    def make(factory="", tools=(), **settings):
        made.append(Host(Toolbox(tools), find_environments(factory), EnvironmentConfig(**settings)))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert not LIVE


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def balance(log):
    """How often each environment was made, less how often it was closed."""
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    made = Counter(name for what, name in lines if what == "made")
    closed = Counter(name for what, name in lines if what == "closed")
    assert set(made.values()) <= {1}
    assert set(closed.values()) <= {1}
    return made - closed


def processes(log):
    """The processes in which environments have lived, other than this one."""
    return {int(line.split()[1].split("-")[0]) for line in log.read_text().splitlines()} - {os.getpid()}


def wait_until_it_runs(host, episode):
    """Wait until a worker has begun with what an episode asked for."""
    end = time.monotonic() + 30
    while not any(call.running() for call in list(host._live[episode].running)):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("place", PLACES)
def test_an_episode(place, host, log):
    world, settings = PLACES[place]
    here = host(functools.partial(world, log), **settings)
    plans = {"a": ["ok", "ok", "done", "ok"], "b": ["ok", "done"]}
    begun = {name: here.begin(name, prompt(plan=plan, other=1), seed=5) for name, plan in plans.items()}
    assert {future.result(30).messages[0]["content"] for future in begun.values()} == {"heard start"}
    assert here.answer("a", turn("one")).result(30).messages == ({"role": "user", "content": "heard one"},)
    last = here.answer("b", turn("two")).result(30)
    assert (last.reward, last.done, last.messages[0]["content"]) == (1.0, True, "bye two")
    assert here.answer("a", turn("three")).result(30).done
    ended = {name: here.end(name).result(30) for name in plans}
    assert [one.state["turns"] for one in ended.values()] == [2, 1]  # each episode has its own object
    assert ended["a"].reward == 0.25
    assert ended["a"].state.keys() == {"name", "turns", "seed"}  # no open file
    assert ended["a"].state["seed"] == 5
    assert not balance(log)
    assert (processes(log) == set()) == (place != "worker")


FAILURES = {
    ("raise",): r"World.reset raised ValueError: no way \(worlds.py, line \d+\)",
    ("ok", "raise"): r"World.step raised ValueError: no way",
    ("ok", "exit"): r"World.step raised SystemExit: 3",
    ("ok", "nan"): r"World.step gave the reward nan: expected a finite number",
    ("ok", "text"): r"World.step returned 'just text': expected Step",
}


@pytest.mark.parametrize("place", PLACES)
def test_environments_that_fail(place, host, log):
    world, settings = PLACES[place]
    here = host(functools.partial(world, log), **settings)
    for plan, message in FAILURES.items():
        future = here.begin(plan, prompt(plan=plan), 0)
        if plan[0] == "ok":
            assert future.result(30).messages
            future = here.answer(plan, turn("x"))
        with pytest.raises(EpisodeFailed, match=message) as raised:
            future.result(30)
        assert ("Traceback" in raised.value.details) == ("raised" in message)
        assert here.end(plan).result(30) == Ended()
    here.begin(0, prompt(plan=["ok", "nan"]), 0).result(30)
    with pytest.raises(EpisodeFailed, match="World.get_reward gave the reward nan|World.get_reward returned"):
        here.end(0).result(30)
    assert not balance(log)
    assert len(log.read_text().splitlines()) == 2 * (len(FAILURES) + 1)


@pytest.mark.parametrize(
    ("place", "plan"),
    [("async", ["ok", "hang"]), ("worker", ["hang"]), ("worker", ["ok", "die"])],
)
def test_environments_that_hang_or_die(place, plan, host, log):
    here = host(functools.partial(PLACES[place][0], log), call_timeout=1.0, tool_workers=1)
    failing, other = here.begin(0, prompt(plan=plan), 0), here.begin(1, prompt(plan=["ok"] * 9), 0)
    if plan[0] == "ok":
        assert other.result(30).messages  # both live in the one worker
        failing = here.answer(0, turn("x"))
    message = (
        "World.* lost its worker process .killed by SIGKILL" if plan[-1] == "die" else "World.* took more than 1 s"
    )
    with pytest.raises(EpisodeFailed, match=message):
        failing.result(30)
    assert here.end(0).result(30) == Ended()
    if place == "worker" and plan[0] == "ok":
        with pytest.raises(
            EpisodeFailed, match="worker process of the environment has ended: another environment in it"
        ):
            here.answer(1, turn("x")).result(30)
        assert here.end(1).result(30) == Ended()
    else:
        other.result(30)
        assert here.answer(1, turn("x")).result(30).messages
        assert here.end(1).result(30).state["turns"] == 1


@pytest.mark.parametrize(
    ("desk", "settings"), [(Desk, {}), (Desk, {"tool_workers": 1}), (AsyncDesk, {"call_timeout": 60.0})]
)
def test_methods_as_tools(desk, settings, host):
    def upper(text: str) -> str:
        """Makes capitals.

        Args:
            text: The text.
        """
        return text.upper()

    here = host(desk, [upper], **settings)
    assert here.begin(0, prompt(text="more"), 0).result(30).messages[0]["content"] == "more"
    assert list(here.tools({})) == ["upper", "add", "fail", "hang"]
    calls = [
        ToolCall("add", {"number": 2}),
        ToolCall("upper", {"text": "a"}),
        ToolCall("fail"),
        ToolCall("add", {"number": "3"}),
        ToolCall("subtract"),
        ToolCall("add", error="invalid JSON"),
        ToolCall("add", {"number": 40}),
    ]
    answer = here.answer(0, turn("", *calls)).result(30)
    assert [message["name"] for message in answer.messages] == [call.name for call in calls]
    assert [message.get("tool_call_id") for message in answer.messages] == [*(f"id{n}" for n in range(5)), None, "id6"]
    texts = [message["content"] for message in answer.messages]
    assert texts[:3] == ["2", "A", "Error: LookupError: nothing there"]
    assert texts[3].startswith("Error: add: the argument 'number' must be an integer")
    assert texts[4].startswith("Error: unknown tool 'subtract'; the tools are: upper, add")
    assert texts[5:] == ["Error: invalid JSON", "42"]
    assert (answer.calls, answer.failed_calls, answer.done) == (7, 4, False)
    assert not here.answer(0, turn("no call")).result(30).messages
    ended = here.end(0).result(30)
    assert (ended.reward, ended.state["order"]) == (42.0, [2, 40])


def test_a_method_that_hangs(host):
    async_desk, desk = host(AsyncDesk, call_timeout=0.3), host(Desk, call_timeout=1.0)
    for one in (async_desk, desk):
        one.begin(0, prompt(), 0).result(30)
    calls = turn("", ToolCall("hang"), ToolCall("add", {"number": 1}))
    answer = async_desk.answer(0, calls).result(30)  # cancelled: the environment lives on
    assert [message["content"] for message in answer.messages] == ["Error: AsyncDesk.hang took more than 0.3 s", "1"]
    with pytest.raises(EpisodeFailed, match=r"Desk.hang took more than 1 s"):
        desk.answer(0, calls).result(30)


def test_tools_that_hang_or_die_are_repeated_and_then_an_observation(host, tmp_path):
    def unsteady(path: str, times: int, how: str) -> str:
        """Dies or hangs some times.

        Args:
            path: Where the times are counted.
            times: How often.
            how: What it does.
        """
        import os
        import time

        count = len(Path(path).read_text()) if Path(path).exists() else 0
        Path(path).write_text("x" * (count + 1))
        if count < times:
            os._exit(3) if how == "die" else time.sleep(60)
        return f"after {count}"

    here = host("", [unsteady], call_timeout=1.0, call_retries=1, tool_workers=1)
    here.begin(0, prompt(), 0).result(0)

    def outcome(name, times, how):
        call = ToolCall("unsteady", {"path": str(tmp_path / name), "times": times, "how": how})
        answer = here.answer(0, turn("", call)).result(60)
        return answer.messages[0]["content"], answer.failed_calls

    assert outcome("a", 1, "hang") == ("after 1", 0)
    assert outcome("b", 9, "die") == ("Error: lost its worker process (exit code 3)", 1)
    assert (tmp_path / "b").read_text() == "xx"


def test_a_call_of_an_ended_episode_is_not_repeated(host):
    begun = threading.Semaphore(0)

    async def patient() -> None:
        """Waits."""
        begun.release()
        await asyncio.sleep(60)

    here = host("", [patient], call_retries=1)
    here.begin(0, prompt(), 0).result(0)
    answer = here.answer(0, turn("", ToolCall("patient", {})))
    assert begun.acquire(timeout=10)
    here.end(0)
    assert answer.result(10).failed_calls == 1
    assert not begun.acquire(blocking=False)


def lookup(word: str) -> str:
    """Looks up a word.

    Args:
        word: The word.
    """
    if word == "server":
        raise EpisodeFailed("the server is gone")
    raise ToolError(f"no entry for {word}")


async def lookup_async(word: str) -> str:
    """Looks up a word.

    Args:
        word: The word.
    """
    return lookup(word)


class Dictionary:
    """Its method is a tool."""

    def reset(self):
        """Nothing to reset."""

    def lookup(self, word: str) -> str:
        """Looks up a word.

        Args:
            word: The word.
        """
        return lookup(word)


@pytest.mark.parametrize(
    ("tool", "settings"), [(lookup, {"tool_workers": 1}), (lookup_async, {}), (Dictionary, {"tool_workers": 1})]
)
def test_what_a_tool_raises_for_the_policy_or_to_end_the_episode(tool, settings, host):
    made = host(Dictionary, **settings) if tool is Dictionary else host(tools=[tool], **settings)
    name = "lookup" if tool is Dictionary else tool.__name__
    made.begin(0, prompt(), 0).result(60)
    answer = made.answer(0, turn("", ToolCall(name, {"word": "cat"}))).result(60)
    assert answer.messages[0]["content"] == "Error: no entry for cat"
    assert (answer.calls, answer.failed_calls) == (1, 1)
    with pytest.raises(EpisodeFailed, match="^the server is gone$"):
        made.answer(0, turn("", ToolCall(name, {"word": "server"}))).result(60)
    made.end(0).result(60)


def test_async_tools_of_a_turn_run_together(host):
    inside = []

    async def meet(who: str) -> str:
        """Returns when two are there.

        Args:
            who: A name.
        """
        inside.append(who)
        while len(inside) < 2:
            await asyncio.sleep(0.001)
        return f"{who} of {len(inside)}"

    here = host("", [meet])
    here.begin(0, prompt(), 0).result(0)
    answer = here.answer(0, turn("", ToolCall("meet", {"who": "a"}), ToolCall("meet", {"who": "b"}))).result(30)
    assert [message["content"] for message in answer.messages] == ["a of 2", "b of 2"]


@pytest.mark.parametrize("settings", [{}, {"tool_workers": 1}])
def test_results_of_all_kinds(settings, host):
    def give(kind: str) -> object:
        """Returns something.

        Args:
            kind: What.
        """
        made = {"megabytes": "é" * 2_000_000, "bytes": b"\xff\x00", "none": None, "list": [1, {"a": None}], "set": {3}}
        return made[kind] if kind != "broken" else type("Broken", (), {"__str__": lambda self: 1 / 0})()

    here = host("", [give], **settings)
    here.begin(0, prompt(), 0).result(0)
    kinds = ["megabytes", "bytes", "none", "list", "set", "broken", "lost"]
    answer = here.answer(0, turn("", *(ToolCall("give", {"kind": kind}) for kind in kinds))).result(60)
    texts = [message["content"] for message in answer.messages]
    assert texts[0] == "é" * 2_000_000
    assert texts[1:5] == ["\ufffd\x00", "null", '[1, {"a": null}]', "[3]"]
    assert texts[5:] == ["Error: ZeroDivisionError: division by zero", "Error: KeyError: 'lost'"]
    assert answer.failed_calls == 2


@pytest.mark.parametrize("place", PLACES)
def test_no_more_environments_exist_than_allowed(place, host, log):
    world, settings = PLACES[place]
    here = host(functools.partial(world, log), max_environments=2, **settings)
    futures = {name: here.begin(name, prompt(plan=["ok"] * 9), 0) for name in range(6)}
    for first in range(0, 6, 2):
        wait([futures[first], futures[first + 1]], 30)
        assert [future.done() for future in futures.values()] == [True] * (first + 2) + [False] * (4 - first)
        assert len(balance(log)) == 2
        for name in (first, first + 1):
            here.end(name).result(30)
    assert not balance(log)


def test_an_environment_counts_until_it_is_closed(host):
    closes = threading.Event()

    class Slow:
        async def reset(self): ...

        async def step(self, text): ...

        async def close(self):
            while not closes.is_set():
                await asyncio.sleep(0.001)

    here = host(Slow, max_environments=1)
    here.begin(0, prompt(), 0).result(30)
    ended, following = here.end(0), here.begin(1, prompt(), 0)
    assert not wait([ended, following], 0.2).done
    closes.set()
    following.result(30)
    here.end(1).result(30)


@pytest.mark.parametrize("place", ["async", "worker"])
def test_episodes_that_are_given_up(place, host, log):
    world = PLACES[place][0]
    settings = {"tool_workers": 1, "call_timeout": 1.0} if place == "worker" else {}
    here = host(functools.partial(world, log), max_environments=1, **settings)
    here.begin("acting", prompt(plan=["ok", "hang"]), 0).result(30)
    waiting = here.begin("waiting", prompt(plan=["ok"]), 0)
    acting = here.answer("acting", turn("x"))
    if place == "worker":
        wait_until_it_runs(here, "acting")
    ends = [here.end("waiting"), here.end("acting")]
    assert [end.result(30).state for end in ends] == [{}, {}]
    for future in (acting, waiting):
        with pytest.raises(EpisodeFailed):
            future.result(30)
    assert len(log.read_text().splitlines()) == (2 if place == "async" else 1)  # a killed one cannot be closed


@pytest.mark.parametrize("place", PLACES)
def test_closing_ends_everything(place, host, log):
    world, settings = PLACES[place]
    here = host(functools.partial(world, log), max_environments=3, **settings)
    futures = [here.begin(name, prompt(plan=["ok"]), 0) for name in range(5)]
    wait(futures[:3], 30)
    here.close()
    assert not balance(log)
    assert len(log.read_text().splitlines()) == 6
    assert not any(map(alive, processes(log)))


SCRIPT = """
import functools, sys, time
from cohort.config import EnvironmentConfig
from cohort.environments.host import Host
from cohort.environments.shapes import find_environments
from cohort.environments.tools import Toolbox
from cohort.types import Prompt
from tests.environments.worlds import AsyncWorld, World

hosts = []
for world, workers in ((World, 0), (AsyncWorld, 0), (World, 2)):
    shapes = find_environments(functools.partial(world, sys.argv[1]))
    hosts.append(Host(Toolbox(), shapes, EnvironmentConfig(tool_workers=workers)))
    for episode in range(3):
        hosts[-1].begin(episode, Prompt(0, 0, (), "", "?", {"plan": ["ok"]}), 0).result()
print("begun", flush=True)
time.sleep(60 if sys.argv[2] == "interrupted" else 0)
"""


@pytest.mark.parametrize("how", ["ended", "interrupted"])
def test_environments_are_closed_when_the_interpreter_ends(how, log):
    command = [sys.executable, "-c", SCRIPT, str(log), how]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert parent.stdout.readline() == "begun\n"
    if how == "interrupted":
        parent.send_signal(signal.SIGINT)
    parent.wait(120)
    parent.stdout.close()
    assert not balance(log)
    assert len(log.read_text().splitlines()) == 18
    assert len(processes(log)) == 3
    assert not any(map(alive, processes(log)))


def test_a_function_that_blocks_the_event_loop_is_found(host):
    began, free = threading.Event(), threading.Event()

    async def block() -> str:
        """Blocks."""
        began.set()
        free.wait(30)
        return "free"

    here = host("", [block], call_timeout=0.3)
    here.begin(0, prompt(), 0).result(0)
    here.check()
    blocked = here.answer(0, turn("", ToolCall("block")))
    assert began.wait(30)
    with pytest.raises(EpisodeError, match=r"the async tools and environments \(block\) did nothing for 0.3 s"):
        here.check()
    free.set()
    assert blocked.result(30).messages[0]["content"] == "free"


def test_environments_by_name_and_tools_of_a_row(host):
    def look() -> str:
        """Looks."""
        return "seen"

    def wait_here() -> str:
        """Waits."""
        return "waited"

    class Quiet:
        def reset(self, **row):
            self.row = row

        def step(self, text):
            raise AssertionError

    here = host({"desk": Desk, "quiet": Quiet}, [look, wait_here])
    assert list(here.tools({"environment": "desk", "tools": ["look"]})) == ["look", "add", "fail", "hang"]
    assert list(here.tools({"environment": "quiet"})) == ["look", "wait_here"]
    here.begin(0, prompt(environment="quiet", tools=["look"], text=1), 0).result(0)
    answer = here.answer(0, turn("", ToolCall("look"), ToolCall("wait_here"))).result(0)
    assert [message["content"] for message in answer.messages] == [
        "seen",
        "Error: unknown tool 'wait_here'; the tools are: look",
    ]
    assert here.end(0).result(0).state == {"row": {"tools": ["look"], "text": 1}}  # without the column that chooses
    with pytest.raises(DataError, match="must name one of desk, quiet; a row has 'chess'"):
        here.begin(1, prompt(environment="chess"), 0)
    assert here.describe().splitlines() == [
        "environment Desk (desk): in this process",
        "environment Quiet (quiet): in this process",
        "tool look: in this process",
        "tool wait_here: in this process",
    ]


def test_what_is_refused_before_the_run(host):
    def add(number: int) -> int:
        """Adds.

        Args:
            number: What.
        """
        return number

    with pytest.raises(ConfigError, match="two tools have the name 'add'"):
        host(Desk, [add])
    generator = (n for n in "ab")

    def next_one() -> str:
        """Gives the next."""
        return next(generator)

    with pytest.raises(ConfigError, match="next_one cannot run in a worker process: .*environment.tool_workers to 0"):
        host("", [next_one], tool_workers=1)


def test_a_close_that_fails_is_reported(host, caplog):
    class Stuck:
        def reset(self): ...

        def step(self, text): ...

        def close(self):
            raise OSError("still in use")

    here = host(Stuck)
    here.begin(0, prompt(), 0).result(0)
    assert here.end(0).result(0) == Ended(0.0)
    assert "Stuck.close raised OSError: still in use" in caplog.text


def test_closing_does_not_wait_for_what_hangs(host, log, monkeypatch):
    monkeypatch.setattr("cohort.environments.host.CLOSE_SECONDS", 0.3)
    here = host(functools.partial(World, log), tool_workers=1)
    for attempt in range(2):  # and a closed host can be used again
        here.begin(attempt, prompt(plan=["ok", "hang"]), 0).result(30)
        hanging = here.answer(attempt, turn("x"))
        wait_until_it_runs(here, attempt)
        ended = here.end(attempt)
        here.close()
        for future in (hanging, ended):
            assert isinstance(future.exception(10), EpisodeFailed)
    assert len(processes(log)) == 2
    assert not any(map(alive, processes(log)))
    assert here._homes[0]._pool is None  # nothing was started for the calls that failed


def test_workers_import_no_torch(host):
    class Nosy:
        def reset(self):
            import sys

            self.torch = "torch" in sys.modules

        def step(self, text): ...

    here = host(Nosy, tool_workers=1)
    here.begin(0, prompt(), 0).result(30)
    assert here.end(0).result(30).state == {"torch": False}
