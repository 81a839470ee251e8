"""The tool "python": run a program in the sandbox and read what it prints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cohort.environments.contract import EpisodeFailed
from cohort.errors import ConfigError, SandboxError
from cohort.sandbox import Executor, Limits, Outcome, Program, Result, Sandbox

LIMITS = Limits(seconds=10.0, memory=512, disk=16, output=1 << 16)
"""Limits of a program of the tool "python"."""
MAX_ERROR_LINES = 8
"""Lines of a traceback that the policy reads, from its end."""


def python_tool(executor: Executor | None = None, limits: Limits = LIMITS) -> Callable[[str], Awaitable[str]]:
    """The tool "python", which keeps nothing from one call to the next.

    Args:
        executor: what runs the programs. None: a ``Sandbox`` with the standard library only.
        limits: the limits of a program.

    Raises:
        ConfigError: programs cannot be run here.
    """
    runner = executor or Sandbox()
    try:
        runner.check()
    except SandboxError as error:
        raise ConfigError(f"the tool 'python' cannot run programs: {error}") from None

    async def python(code: str) -> str:
        """Runs a Python program and returns what it prints. Nothing is kept between calls.

        Args:
            code: The program. It must print its results.

        Returns:
            Standard output, then the error if there is one.
        """
        try:
            return output_of(await runner.run(Program(code), limits), limits)
        except SandboxError as error:  # never because of the program
            raise EpisodeFailed(f"the sandbox failed: {error}") from error

    return python


def output_of(result: Result, limits: Limits) -> str:
    """What the policy reads of a program's result."""
    if result.outcome is Outcome.FINISHED:
        return result.stdout or "(the program printed nothing)"
    reasons = {
        Outcome.TIMEOUT: f"error: stopped after {limits.seconds:g} seconds",
        Outcome.MEMORY: f"error: the program needs more than {limits.memory} MB of memory",
        Outcome.OUTPUT: f"error: stopped after {limits.output} bytes of output",
    }
    error = "\n".join(result.stderr.strip().splitlines()[-MAX_ERROR_LINES:])
    reason = reasons.get(result.outcome) or error or f"error: exit code {result.exit_code}"
    return "\n".join(filter(None, [result.stdout.rstrip("\n"), reason]))
