"""Tools of MCP servers: in this process, and as a command. No network."""

import asyncio
import contextlib
import sys
import textwrap
from importlib.util import find_spec

import pytest

from cohort.calls import run_on_loop
from cohort.config import EnvironmentConfig
from cohort.environments import Acting
from cohort.environments.adapters.mcp import Server, is_server
from cohort.environments.calls import ParsedTurn
from cohort.environments.contract import EpisodeFailed, ToolCall, ToolError
from cohort.errors import ConfigError
from cohort.types import Prompt

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="needs mcp")


def server(*, tools=True):
    from mcp.server.mcpserver import MCPServer  # the import takes a second
    from mcp.server.mcpserver.exceptions import ToolError as ServerError

    made = MCPServer("numbers", log_level="CRITICAL")
    if not tools:
        return made

    @made.tool()
    def add(a: int, b: int = 2) -> int:
        """Adds two integers."""
        return a + b

    @made.tool()
    async def wait(seconds: float) -> str:
        """Waits."""
        await asyncio.sleep(seconds)
        return "waited"

    @made.tool()
    def fail(reason: str) -> str:
        """Fails."""
        raise ServerError(reason)

    return made


def call(toolbox, name, /, **arguments):
    return run_on_loop(toolbox[name].function(**arguments)).result(30)


@contextlib.contextmanager
def opened(*given):
    with contextlib.closing(Acting.of(EnvironmentConfig(), given)) as acting:
        yield acting.toolbox


@pytest.fixture(scope="module")
def toolbox():
    with opened(server(), "calculator") as tools:
        yield tools


class TestInProcess:
    def test_its_tools_are_tools(self, toolbox):
        assert list(toolbox) == ["add", "wait", "fail", "calculator"]
        assert toolbox["add"].is_async
        function = toolbox["add"].schema["function"]
        assert (function["name"], function["description"]) == ("add", "Adds two integers.")
        assert function["parameters"]["required"] == ["a"]
        assert toolbox.problem(ToolCall("add", {"a": 1})) == ""
        assert toolbox.problem(ToolCall("add", {"a": "1"})) == "add: the argument 'a' must be an integer, got '1'"

    def test_calls_wait_for_each_other_s_connection_only(self, toolbox):
        """One connection serves calls at the same time: three of 0.3 s take less than 0.9 s."""
        import time

        start = time.perf_counter()
        waiting = [run_on_loop(toolbox["wait"].function(seconds=0.3)) for _ in range(3)]
        assert [one.result(30) for one in waiting] == ["waited"] * 3
        assert time.perf_counter() - start < 0.8

    def test_an_error_of_the_tool_is_for_the_policy(self, toolbox):
        with pytest.raises(ToolError, match="no such number$"):
            call(toolbox, "fail", reason="no such number")

    def test_a_call_can_be_cancelled(self, toolbox):
        waiting = run_on_loop(toolbox["wait"].function(seconds=30))
        waiting.cancel()
        assert call(toolbox, "add", a=1) == "3"

    def test_a_closed_connection_fails_the_episode(self):
        acting = Acting.of(EnvironmentConfig(), [server()])
        acting.close()
        acting.close()
        with pytest.raises(EpisodeFailed, match="the MCP server 'MCPServer' ended the connection"):
            call(acting.toolbox, "add", a=1)

    def test_a_server_without_tools_is_refused(self):
        with pytest.raises(ConfigError, match="'MCPServer' cannot be used: it has no tools"):
            Acting.of(EnvironmentConfig(), [server(tools=False)])

    def test_names_that_clash_close_the_connections(self):
        with pytest.raises(ConfigError, match="two tools have the name 'add'"):
            Acting.of(EnvironmentConfig(), [server(), server()])


def test_the_tools_of_a_run_come_from_servers_too():
    acting = Acting.of(EnvironmentConfig(tools=("calculator",)), [server()])
    try:
        assert list(acting.toolbox) == ["calculator", "add", "wait", "fail"]
        acting.host.begin(0, Prompt(0, 0, (), "", "?", {}), 0).result(30)
        turn = ParsedTurn(
            "", (ToolCall("add", {"a": 40}), ToolCall("fail", {"reason": "no"})), {"tool_calls": [{}, {}]}
        )
        answer = acting.host.answer(0, turn).result(30)
        assert answer.messages[0]["content"] == "42"
        assert answer.messages[1]["content"].startswith("Error: ")
        assert (answer.calls, answer.failed_calls) == (2, 1)
    finally:
        acting.close()
    with pytest.raises(EpisodeFailed):
        call(acting.toolbox, "add", a=1)


COMMAND = """
    import os
    from mcp.server.mcpserver import MCPServer

    made = MCPServer("process", log_level="CRITICAL")

    @made.tool()
    def double(number: int) -> list[int]:
        '''Doubles.'''
        return [number, 2 * number]

    @made.tool()
    def variable(name: str) -> str:
        '''Reads an environment variable.'''
        return os.environ[name]

    @made.tool()
    def die() -> str:
        '''Ends the server.'''
        os._exit(1)

    made.run("stdio")
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    path = tmp_path_factory.mktemp("mcp") / "a server.py"
    path.write_text(textwrap.dedent(COMMAND))
    return f"mcp:{sys.executable} '{path}'"


class TestCommand:
    def test_calls_until_it_dies(self, command, monkeypatch):
        monkeypatch.setenv("COHORT_TEST", "inherited")
        with opened(command) as tools:
            assert list(tools) == ["double", "variable", "die"]
            assert call(tools, "double", number=21) == "21\n42"
            assert call(tools, "variable", name="COHORT_TEST") == "inherited"
            for _ in range(2):
                with pytest.raises(EpisodeFailed, match="ended the connection"):
                    call(tools, "die")

    def test_the_end_stops_the_process(self, command):
        import psutil

        with opened(command):
            children = [one for one in psutil.Process().children() if "a server.py" in " ".join(one.cmdline())]
            assert len(children) == 1
        assert not children[0].is_running()

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ("mcp:no-such-command-of-cohort", "'no-such-command-of-cohort' cannot be used: .*[Nn]o such file"),
            (f"mcp:{sys.executable} -c 'raise SystemExit(3)'", "cannot be used: Connection closed"),
            ("mcp:python 'open", "expected 'mcp:' and a URL or a command.*No closing quotation"),
        ],
    )
    def test_what_does_not_start_is_refused(self, given, message):
        with pytest.raises(ConfigError, match=message):
            Server(given)

    def test_one_that_does_not_answer_is_refused(self, monkeypatch):
        monkeypatch.setattr("cohort.environments.adapters.mcp.START_SECONDS", 0.2)
        with pytest.raises(ConfigError, match="cannot be used: no answer in 0.2 s"):
            Server(f"mcp:{sys.executable} -c 'import time; time.sleep(60)'")


def test_what_is_a_server():
    assert [is_server(one) for one in ("mcp:x", "calculator", server(), print)] == [True, False, True, False]


def test_the_extra_is_named_when_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"pip install 'cohort-rl\[mcp\]'"):
        Server("mcp:python server.py")
