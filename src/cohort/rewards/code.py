"""The reward of programs: run what the completion wrote against the row's tests.

    reward = share of tests passed             partial=True
             1 if all passed, 0 otherwise      partial=False

The program runs in a sandbox (``rewards.sandbox``) and what it does is judged outside of it: tests by input and output
compare its output here; tests that are Python run in a second sandbox and only call into the first, over a pipe that
carries plain data. So a program sees the inputs of its tests and never what is expected, and can print, exit, patch or
raise what it likes: it is not asked whether it passed. ``docs/sandbox.md`` says what remains possible.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cohort.errors import DataError, RewardError, SandboxError
from cohort.rewards.contract import reward
from cohort.rewards.inside.plan import plan
from cohort.rewards.launch import pipe, started
from cohort.rewards.messages import completion_text
from cohort.rewards.sandbox import Sandbox, bubblewrap, slot

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "py", "python3")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a program's tests."""

    passed: int
    """How many. Those not run are not passed."""
    why: str
    """What the first test that failed said; empty without one."""


@reward(per="sample", timeout=3600.0)  # its own times count from when a processor is free; this one does not
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

    The program is the last block fenced as Python, or as nothing. Without one the reward is 0.

    Args:
        completion, prefill, prompt, log_extra: as every reward has them.
        tests: the row's column. Inputs and outputs: ``[{"input": ..., "output": ...}]`` or ``{"inputs": [...],
            "outputs": [...]}``, compared line by line and word by word; with a ``"fn_name"`` they are arguments and
            results of that function. Or Python: a list of ``assert`` statements, each a test; or a program, where a
            test is each statement that asserts, each function or method named ``test...``, and ``check(candidate)``.
            All may be JSON in a string.
        entry_point: the row's column, if it has one: the name of what ``check`` gets; ``Solution().name`` will do.
        partial: give the share.
        unfenced: a completion without any fence is a program as a whole.
        continues: the completion goes on where the prompt, a string, ends: both together are the program.
        timeout: seconds for all tests of a completion.
        test_timeout: seconds for each.
        memory: MB that the program may use.
        files: MB that it may write into its working folder. 0: it can write none.
        packages: whether it may import installed packages.
        allow_unsandboxed: without bubblewrap, run programs all the same. See ``Sandbox``.

    Raises:
        RewardError: there is no sandbox (``Sandbox.check``), or ``continues`` and the prompt is no string.
        DataError: the row's tests cannot be run.
        SandboxError: a sandbox failed. The completion is then unscored. Never because of what the program did.
    """
    sandbox = Sandbox(timeout, memory, files, packages=packages, allow_unsandboxed=allow_unsandboxed)
    sandbox.check()
    if continues and not isinstance(prompt, str):
        raise RewardError(f"code(continues=True) needs prompts that are strings, got {type(prompt).__name__}")
    task = parse_tests(tests, entry_point)
    program = extract_program(prefill + completion_text(completion), unfenced=unfenced)
    if program is None:
        verdict = Verdict(0, "no program in the completion")
    else:
        program = prompt + program if continues else program
        verdict = await judge(sandbox, program, task, test_timeout=test_timeout, stop_early=not partial)
    if log_extra is not None:
        log_extra("passed", f"{verdict.passed}/{task.count}")
        log_extra("failure", verdict.why)
    return verdict.passed / task.count if partial else float(verdict.passed == task.count)


def extract_program(text: str, *, unfenced: bool = True) -> str | None:
    """The last block fenced as Python; else the last fenced as nothing; else, ``unfenced``, a text without fences.

    A block that is not closed ends with the text: a stop string or the length limit may have taken its fence.

    >>> extract_program("So:\\n```python\\nx = 1\\n```\\nor\\n```sh\\nls\\n```")
    'x = 1\\n'
    >>> extract_program("x = 1"), extract_program("x = 1", unfenced=False)
    ('x = 1', None)
    """
    blocks = [(language.lower(), body) for language, body in _FENCE.findall(text)]
    for languages in (_PYTHON, ("",)):
        found = [body for language, body in blocks if language in languages]
        if found:
            return str(found[-1])
    return text if unfenced and not blocks and text.strip() else None


# -- tests -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """A row's tests."""

    count: int
    pairs: tuple[tuple[str, str], ...] = ()
    """Standard input and the output expected."""
    python: Mapping[str, Any] | None = None
    """Tests in Python, for ``inside/plan.py``."""


def parse_tests(tests: Any, entry_point: str | None = None) -> Task:
    """A row's tests, in whichever form they come; see ``code``.

    Raises:
        DataError: in none of them, or there is no test.

    >>> parse_tests({"inputs": ["1 2"], "outputs": [["3"]]}).pairs
    (('1 2', '3'),)
    >>> parse_tests('["assert f(1) == 2"]').python["tests"]
    ['assert f(1) == 2']
    """
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):  # a program may begin so as well
            tests = json.loads(tests)
    if isinstance(tests, str) and tests.strip():
        return _python({"tests": tests, "entry_point": entry_point})
    if isinstance(tests, Mapping):
        if "inputs" in tests and "outputs" in tests:
            return _pairs(tests["inputs"], tests["outputs"], tests.get("fn_name") or None)
        tests = [tests]
    if isinstance(tests, list | tuple) and tests:
        if all(isinstance(test, str) for test in tests):
            return _python({"tests": list(tests), "entry_point": entry_point})
        if all(isinstance(test, Mapping) and {"input", "output"} <= set(test) for test in tests):
            functions = {test.get("fn_name") or None for test in tests}
            if len(functions) > 1:
                raise DataError(f"a row's tests must all be of one function, got {functions}")
            return _pairs([test["input"] for test in tests], [test["output"] for test in tests], functions.pop())
    raise DataError(
        "the code reward's column tests must be assert statements, a test program, or inputs with outputs; "
        f"got {tests!r:.80}"
    )


def _pairs(inputs: Any, outputs: Any, function: str | None) -> Task:
    if not (isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple) and len(inputs) == len(outputs) > 0):
        raise DataError("a row's tests must have as many inputs as outputs, and one at least")
    if function:
        calls = [
            [value if isinstance(value, list) else [value], output]
            for value, output in zip(inputs, outputs, strict=True)
        ]
        return _python({"calls": calls, "entry_point": function})
    return Task(len(inputs), pairs=tuple((_text(a), _text(b)) for a, b in zip(inputs, outputs, strict=True)))


def _python(task: dict[str, Any]) -> Task:
    """Plan the tests here as the sandbox will, which runs none of them: a broken row is known before any sampling."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the tests' style
            return Task(sum(step.counts for step in plan(task)), python=task)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"the row's tests cannot be run: {type(error).__name__}: {error}") from None


def _text(value: Any) -> str:
    """Input and output are a text, or a list of its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def same_output(got: str, expected: str) -> bool:
    """Whether two outputs have the same words on the same lines; spaces around them and empty lines at the end aside.

    >>> same_output("1  2 \\n3\\n\\n", "1 2\\n3"), same_output("1 2 3", "1 2\\n3")
    (True, False)
    """
    first, second = ([line.split() for line in text.rstrip().splitlines()] for text in (got, expected))
    return first == second


# -- verdicts ----------------------------------------------------------------------------------------------------------


async def judge(sandbox: Sandbox, program: str, task: Task, *, test_timeout: float, stop_early: bool) -> Verdict:
    """Run a program's tests.

    Args:
        sandbox: its seconds are for all tests together.
        program: its text.
        task: the tests.
        test_timeout: seconds for each.
        stop_early: run none after the first that fails.

    Raises:
        DataError, SandboxError: see ``code``.
    """
    if task.python is None:
        return await _by_output(sandbox, program, task.pairs, test_timeout, stop_early)
    asked = {**task.python, "seconds": test_timeout}
    verdict = await _by_python(sandbox, program, {**asked, "stop": stop_early})
    if verdict.passed == task.count:
        await _see_that_they_test(sandbox, asked, task.count)
    return verdict


_fail_nothing: dict[bytes, bool] = {}
"""Whether the empty program passes all of a row's tests: asked once, when a program has passed them."""


async def _see_that_they_test(sandbox: Sandbox, asked: Mapping[str, Any], count: int) -> None:
    """See that the tests test something.

    Raises:
        DataError: a program of nothing passes them.
    """
    row = hashlib.sha256(json.dumps(asked).encode()).digest()
    if row not in _fail_nothing:
        _fail_nothing[row] = (await _by_python(sandbox, "", {**asked, "stop": True})).passed == count
    if _fail_nothing[row]:
        raise DataError("the row's tests test nothing: an empty program passes them")


async def _by_output(
    sandbox: Sandbox, program: str, pairs: tuple[tuple[str, str], ...], test_timeout: float, stop_early: bool
) -> Verdict:
    passed, why, left = 0, "", sandbox.seconds
    for number, (given, expected) in enumerate(pairs, 1):
        if left <= 0:
            why = why or f"test {number}: no time left"
            break
        result = await replace(sandbox, seconds=min(test_timeout, left)).run(program, given)
        left -= result.seconds
        if result.status == "ok" and same_output(result.stdout, expected):
            passed += 1
            continue
        wrong = f"expected {expected.strip()!r:.100}, got {result.stdout.strip()!r:.100}"
        last = result.stderr.strip().rpartition("\n")[2]
        said = wrong if result.status == "ok" else f"{result.status}: {last:.200}".rstrip(": ")
        why = why or f"test {number}: {said}"
        if stop_early:
            break
    return Verdict(passed, why)


async def _by_python(sandbox: Sandbox, program: str, task: Mapping[str, Any]) -> Verdict:
    bwrap = bubblewrap(sandbox)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(slot())  # one for the two: they work in turns
        hears, asks = pipe(stack)
        learns, answers = pipe(stack)
        serving = started(sandbox, bwrap, "serve", program, pipes=(hears, answers))
        judging = started(replace(sandbox, output=1 << 26), bwrap, "judge", json.dumps(task), pipes=(learns, asks))
        served = await stack.enter_async_context(serving)
        result = await (await stack.enter_async_context(judging)).end(sandbox.seconds)
        said = [json.loads(line) for line in result.stdout.splitlines()]
        unusable = next((message["unusable"] for message in said if "unusable" in message), None)
        if unusable:
            raise DataError(f"the row's tests cannot be run: {unusable}")
        if not said:
            raise SandboxError(f"the tests ended before they began: {result.status} {result.stderr[-300:]}")
        results = said[1:]
        passed = sum(message["passed"] for message in results)
        why = next((f"test {number}: {m['error']}" for number, m in enumerate(results, 1) if not m["passed"]), "")
        if not why and len(results) < said[0]["tests"]:
            why = f"test {len(results) + 1}: {result.status}"
        if "ConnectionError" in why:
            why += f"; its last line: {(await served.failure()).rpartition(chr(10))[2]:.200}"
        return Verdict(passed, why)
