"""The code reward: run the program in a completion against the row's tests.

    reward = share of tests passed             partial=True
             1 if all passed, 0 otherwise      partial=False

The program runs in a sandbox and is judged from outside. Tests by input and output compare its output in this process.
Python tests run in a second sandbox, and call the program over a pipe that carries only plain data. A program therefore
sees the inputs of its tests and never the expected results, and nothing that it prints, raises or patches decides
whether a test passes. ``docs/sandbox.md`` describes what remains possible.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cohort.errors import ConfigError, DataError, RewardError, SandboxError
from cohort.rewards.contract import reward
from cohort.rewards.judging.plan import helpers_of, plan
from cohort.rewards.messages import completion_text
from cohort.sandbox import Executor, Limits, Outcome, Program, Result, Sandbox

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "py", "python3")
_JUDGING = Path(__file__).with_name("judging")
_JUDGE_OUTPUT = 1 << 26
"""Limit of the judge's output in bytes: a line per test."""


@reward(per="sample", timeout=3600.0)  # includes the time in the queue for a processor; the timeouts below do not
async def code(
    completion: Any,
    tests: Any,
    prefill: str = "",
    prompt: Any = None,
    entry_point: str | None = None,
    log_extra: Callable[[str, Any], None] | None = None,
    *,
    partial: bool = False,
    unfenced: bool = True,
    continues: bool = False,
    timeout: float = 30.0,
    test_timeout: float = 6.0,
    memory: int = 1024,
    files: int = 0,
    packages: bool = False,
    allow_unsandboxed: bool = False,
) -> float:
    """The share of the row's ``tests`` that the program in a completion passes; or 1 for all and 0 for fewer.

    The program is the last code block marked as Python, or without a language. A completion without a program gets 0.

    Args:
        completion, prefill, prompt, log_extra: as for every reward.
        tests: the column of that name, in one of the forms that ``docs/sandbox.md`` lists.
        entry_point: the column of that name: what ``check(candidate)`` gets, for example ``Solution().name``.
        partial: return the share.
        unfenced: a completion without any code block is a program as a whole.
        continues: the completion continues the prompt, which must be a string: both together are the program.
        timeout, test_timeout: seconds for all tests of a completion, and for each.
        memory, files: memory of the program, and size of the files that it may write, in MB. 0 files: it writes none.
        packages: whether the program may import installed packages.
        allow_unsandboxed: without bubblewrap, run programs without a sandbox. See ``Sandbox``.

    Raises:
        RewardError: there is no sandbox, a limit is out of range, or a prompt to continue is not a string.
        DataError: the row's tests cannot be run.
        SandboxError: a sandbox failed, and the completion has no score. Never because of what the program did.
    """
    try:
        limits = Limits(timeout, memory, files)
        sandbox = Sandbox(packages=packages, allow_unsandboxed=allow_unsandboxed)
        sandbox.check()
    except (ConfigError, SandboxError) as error:
        raise RewardError(f"the reward code cannot run programs: {error}") from None
    if continues and not isinstance(prompt, str):
        raise RewardError(f"code(continues=True) needs prompts that are strings, got {type(prompt).__name__}")
    task = parse_tests(tests, entry_point)
    if continues and task.python is not None:  # the tests may use the functions that the prompt defines completely
        task = replace(task, python={**task.python, "helpers": helpers_of(prompt, dict(task.python))})
    program = extract_program(prefill + completion_text(completion), unfenced=unfenced)
    errors: list[str | None] = []
    failure = "no program in the completion"
    if program is not None:
        text = prompt + program if continues else program
        errors = await judge(sandbox, text, task, limits, test_timeout=test_timeout, stop_early=not partial)
        failure = next((f"test {number}: {error}" for number, error in enumerate(errors, 1) if error is not None), "")
    passed = errors.count(None)
    if log_extra is not None:
        log_extra("passed", f"{passed}/{task.count}")
        log_extra("failure", failure)
    return passed / task.count if partial else float(passed == task.count)


def extract_program(text: str, *, unfenced: bool = True) -> str | None:
    """The last code block marked as Python; else the last without a language; else a text without any code block.

    A block without an end extends to the end of the text: a stop string or the length limit may have cut its fence.

    Args:
        text: the completion.
        unfenced: a text without any code block is a program. If not set, None is returned for it.

    >>> extract_program("So:\\n```python\\nx = 1\\n```\\nor\\n```sh\\nls\\n```")
    'x = 1\\n'
    >>> extract_program("x = 1"), extract_program("x = 1", unfenced=False)
    ('x = 1', None)
    """
    blocks = [(language.lower(), body) for language, body in _FENCE.findall(text)]
    for languages in (_PYTHON, ("",)):
        if found := [body for language, body in blocks if language in languages]:
            return str(found[-1])
    return text if unfenced and not blocks and text.strip() else None


# -- tests -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """The tests of a row."""

    count: int
    pairs: tuple[tuple[str, str], ...] = ()
    """Standard input and expected output."""
    python: Mapping[str, Any] | None = None
    """Python tests, as ``judging.plan`` takes them."""


def parse_tests(tests: Any, entry_point: str | None = None) -> Task:
    """Parse the ``tests`` of a row, in any of the forms that ``code`` accepts.

    Raises:
        DataError: they have another form, are empty, or cannot be run.

    >>> parse_tests({"inputs": ["1 2"], "outputs": [["3"]]}).pairs
    (('1 2', '3'),)
    >>> parse_tests('["assert f(1) == 2"]').python["tests"]
    ['assert f(1) == 2']
    """
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError, RecursionError):  # a test program may start with a bracket as well
            tests = json.loads(tests)
    if isinstance(tests, str) and tests.strip():
        return _python_task(tests=tests, entry_point=entry_point)
    if isinstance(tests, Mapping):
        if {"inputs", "outputs"} <= set(tests):
            return _pairs_task(tests["inputs"], tests["outputs"], tests.get("fn_name"))
        tests = [tests]
    if isinstance(tests, list | tuple) and tests:
        if all(isinstance(test, str) for test in tests):
            return _python_task(tests=list(tests), entry_point=entry_point)
        if all(isinstance(test, Mapping) and {"input", "output"} <= set(test) for test in tests):
            functions = {test.get("fn_name") or None for test in tests}
            if len(functions) > 1:
                raise DataError(f"a row's tests must all be of one function, got {functions}")
            return _pairs_task([test["input"] for test in tests], [test["output"] for test in tests], *functions)
    raise DataError(
        "the code reward's column tests must be assert statements, a test program, or inputs with outputs; "
        f"got {tests!r:.80}"
    )


def _pairs_task(inputs: Any, outputs: Any, function: str | None) -> Task:
    if not (isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple) and len(inputs) == len(outputs) > 0):
        raise DataError("a row's tests must have as many inputs as outputs, and at least one")
    pairs = list(zip(inputs, outputs, strict=True))
    if function:
        calls = [[given if isinstance(given, list) else [given], expected] for given, expected in pairs]
        return _python_task(calls=calls, entry_point=function)
    return Task(len(pairs), pairs=tuple((_as_text(given), _as_text(expected)) for given, expected in pairs))


def _python_task(**task: Any) -> Task:
    """Plan the tests in this process, without running them: a broken row is found before any sampling."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the style of the tests
            return Task(sum(step.counts for step in plan(task)), python=task)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"the row's tests cannot be run: {type(error).__name__}: {error}") from None


def _as_text(value: Any) -> str:
    """Inputs and outputs are texts or lists of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def same_output(output: str, expected: str) -> bool:
    """Whether two outputs have the same words on the same lines. Empty lines at the end are ignored.

    >>> same_output("1  2 \\n3\\n\\n", "1 2\\n3"), same_output("1 2 3", "1 2\\n3")
    (True, False)
    """
    first, second = ([line.split() for line in text.rstrip().splitlines()] for text in (output, expected))
    return first == second


# -- running tests -----------------------------------------------------------------------------------------------------

_empty_passes: dict[bytes, bool] = {}
"""Whether an empty program passes all tests of a row, by hash of the tests."""


async def judge(
    executor: Executor, program: str, task: Task, limits: Limits, *, test_timeout: float, stop_early: bool
) -> list[str | None]:
    """Run the tests of a program.

    Args:
        executor: runs the program, and Python tests.
        program: the text of the program.
        task: the tests.
        limits: for the program. The seconds are for all tests together.
        test_timeout: seconds per test.
        stop_early: stop after the first test that fails.

    Returns:
        The error of each test that ran; None: it passed.

    Raises:
        DataError, SandboxError: see ``code``.
    """
    if task.python is None:
        return await _run_pairs(executor, program, task, limits, test_timeout, stop_early)
    tests = {**task.python, "seconds": test_timeout}
    errors = await _run_tests(executor, program, {**tests, "stop": stop_early}, limits)
    all_passed = [None] * task.count
    if errors == all_passed:
        row = hashlib.sha256(json.dumps(tests).encode()).digest()
        if row not in _empty_passes:
            _empty_passes[row] = await _run_tests(executor, "", {**tests, "stop": True}, limits) == all_passed
        if _empty_passes[row]:
            raise DataError("the row's tests test nothing: an empty program passes them")
    return errors


async def _run_pairs(
    executor: Executor, program: str, task: Task, limits: Limits, test_timeout: float, stop_early: bool
) -> list[str | None]:
    """The error of each test by input and output that ran; None: it passed."""
    errors: list[str | None] = []
    left = limits.seconds
    for given, expected in task.pairs:
        if left <= 0:
            return [*errors, "no time left"]
        result = await executor.run(Program(program, given), replace(limits, seconds=min(test_timeout, left)))
        left -= result.seconds
        if result.outcome is not Outcome.FINISHED:
            errors.append(_describe(result))
        elif same_output(result.stdout, expected):
            errors.append(None)
        else:
            errors.append(f"expected {expected.strip()!r:.100}, got {result.stdout.strip()!r:.100}")
        if stop_early and errors[-1] is not None:
            break
    return errors


async def _run_tests(executor: Executor, program: str, task: Mapping[str, Any], limits: Limits) -> list[str | None]:
    """The error of each Python test that ran; None: it passed."""
    result, served = await executor.run_pair(
        Program(json.dumps(task), harness=_JUDGING / "judge.py"),
        Program(program, harness=_JUDGING / "serve.py"),
        replace(limits, output=_JUDGE_OUTPUT),
        limits,
    )
    messages = [json.loads(line) for line in result.stdout.splitlines()]
    for message in messages:
        if "unusable" in message:
            raise DataError(f"the row's tests cannot be run: {message['unusable']}")
    if not messages:
        raise SandboxError(f"the tests ended before they began: {result.outcome} {result.stderr[-300:]}")
    errors = [message["error"] for message in messages[1:]]
    if len(errors) < messages[0]["tests"]:
        errors.append(result.outcome.value)
    lost = f"; the program: {_describe(served)}"
    return [f"{error}{lost}" if error and "ConnectionError" in error else error for error in errors]


def _describe(result: Result) -> str:
    """The outcome, and the last line of the standard error."""
    return f"{result.outcome}: {result.stderr.strip().rpartition(chr(10))[2]:.200}".rstrip(": ")
