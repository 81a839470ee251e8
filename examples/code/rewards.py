"""The tests of a row in two parts: the first is in the prompt, and the others decide the reward.

A policy that is rewarded for a test that it can read learns to answer that test. Both parts run in the sandbox of the
built-in reward ``code``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from cohort.rewards import resolve_reward


async def hidden(
    completion: str,
    tests: Sequence[str],
    prefill: str,
    log_extra: Callable[[str, Any], None],
    *,
    partial: bool = False,
    test_timeout: float = 4.0,
) -> float | None:
    """1 if a program passes all tests but the first, else 0; with ``partial``, the share that it passes.

    None, unscored, for a row with one test: all that it has is shown.
    """
    if len(tests) < 2:
        return None
    return float(
        await run(partial, test_timeout)(
            completion=completion, tests=list(tests[1:]), prefill=prefill, log_extra=log_extra
        )
    )


async def shown(completion: str, tests: Sequence[str], prefill: str, *, test_timeout: float = 4.0) -> float:
    """1 if a program passes the first test, which the prompt shows, else 0."""
    return float(await run(False, test_timeout)(completion=completion, tests=list(tests[:1]), prefill=prefill))


@cache
def run(partial: bool, test_timeout: float) -> Any:
    """The built-in reward, which takes the last block of Python code of a completion."""
    return resolve_reward(f"code(partial={partial}, test_timeout={test_timeout}, unfenced=False)")
