"""An OpenEnv server as an environment of Cohort.

    pip install openenv
    uvicorn server.app:app --port 8000     # in the folder of an environment, or `docker run -p 8000:8000 IMAGE`

    [environment]
    factory = "examples/openenv_environment.py:CodingEnv"
    max_environments = 16
    call_timeout = 60
    max_turns = 6

Each episode has a session of its own, a WebSocket. A server accepts one session at a time unless it is told otherwise,
and refuses the others: give its ``create_app(...)`` a ``max_concurrent_envs`` of at least ``max_environments``.

The methods are ``async``, so episodes wait for their answers at the same time, without worker processes. Actions and
observations go over the wire as JSON, so the package of the environment need not be installed here. For another
environment, set ``action`` and ``shown``, or override the two methods that use them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from cohort.environments import Step


class CodingEnv:
    """Runs the Python programs that the policy writes, and shows what they print."""

    url: ClassVar[str] = os.environ.get("OPENENV_URL", "http://localhost:8000")
    action: ClassVar[str] = "code"
    """The field of the action that has the policy's text."""
    shown: ClassVar[tuple[str, ...]] = ("stdout", "stderr")
    """The fields of the observation that the policy reads."""

    def __init__(self) -> None:
        self._client: Any = None  # connects in `reset`: a factory cannot wait

    async def reset(self, seed: int) -> str:
        """Open a session. The server leaves out the arguments that its environment does not accept."""
        from openenv.core import GenericEnvClient

        self._client = GenericEnvClient(base_url=self.url)
        await self._client.connect()
        result = await self._client.reset(seed=seed)
        return self._observation(result.observation)

    async def step(self, text: str) -> Step:
        """Send the policy's text as an action."""
        result = await self._client.step(self._action(text))
        return Step(self._observation(result.observation), result.reward, result.done)

    async def close(self) -> None:
        """End the session, so that the server has room for the next one."""
        if self._client is not None:
            await self._client.close()

    def _action(self, text: str) -> dict[str, Any]:
        program = text.rpartition("```python")[2].partition("```")[0]  # of the last block, or all of the text
        return {self.action: program}

    def _observation(self, observation: Mapping[str, Any]) -> str:
        return "\n".join(str(observation[field]) for field in self.shown if observation.get(field))
