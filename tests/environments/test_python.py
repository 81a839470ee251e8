"""The tool "python", over an executor that is asked, and over the sandbox where there is one."""

import asyncio
import shutil

import pytest

from cohort.environments.contract import EpisodeFailed
from cohort.environments.tools import LIMITS, as_tool, python_tool
from cohort.errors import ConfigError, SandboxError
from cohort.sandbox import Limits, Outcome, Result


class FakeExecutor:
    """Returns one result, and keeps the programs."""

    def __init__(self, result=None, problem=None):
        self.result, self.problem, self.programs = result, problem, []

    def check(self):
        if isinstance(self.problem, str):
            raise SandboxError(self.problem)

    async def run(self, program, limits):
        self.programs.append((program.source, limits))
        if self.problem:
            raise self.problem
        return self.result


def answer(outcome, stdout="", stderr="", exit_code=0):
    executor = FakeExecutor(Result(outcome, exit_code, stdout, stderr, 0.1))
    text = asyncio.run(python_tool(executor)(code="print(1)"))
    assert executor.programs == [("print(1)", LIMITS)]
    return text


def test_what_the_policy_reads():
    assert answer(Outcome.FINISHED, "42\n") == "42\n"
    assert answer(Outcome.FINISHED) == "(the program printed nothing)"
    assert answer(Outcome.FAILED, "a\n", "Traceback\nValueError: no\n", 1) == "a\nTraceback\nValueError: no"
    assert answer(Outcome.FAILED, stderr="\n".join(map(str, range(20))), exit_code=1) == "\n".join(
        map(str, range(12, 20))
    )
    assert answer(Outcome.FAILED, exit_code=3) == "error: exit code 3"
    assert answer(Outcome.TIMEOUT, "a\n", exit_code=None) == "a\nerror: stopped after 10 seconds"
    assert answer(Outcome.MEMORY, exit_code=None) == "error: the program needs more than 512 MB of memory"
    assert answer(Outcome.OUTPUT, "aa", exit_code=None) == "aa\nerror: stopped after 65536 bytes of output"


def test_its_schema():
    tool = as_tool(python_tool(FakeExecutor()))
    assert (tool.name, tool.is_async, tool.parameters["required"]) == ("python", True, ["code"])


def test_without_a_sandbox_it_is_refused_before_the_run():
    with pytest.raises(ConfigError, match="the tool 'python' cannot run programs: install bubblewrap"):
        python_tool(FakeExecutor(problem="install bubblewrap"))


def test_a_sandbox_that_fails_is_no_observation():
    tool = python_tool(FakeExecutor(problem=SandboxError("killed")))
    with pytest.raises(EpisodeFailed, match="the sandbox failed: killed"):
        asyncio.run(tool(code="print(1)"))


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_over_the_sandbox():
    try:
        tool = python_tool(limits=Limits(seconds=5.0, memory=512))
    except ConfigError:
        pytest.skip("bubblewrap does not work here")
    assert asyncio.run(tool(code="x = 6\nprint(x * 7)")) == "42\n"
    assert asyncio.run(tool(code="print(x)")).endswith("NameError: name 'x' is not defined")
