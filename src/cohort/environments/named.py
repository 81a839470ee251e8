"""The tools of a run, from the settings or from Python."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from cohort.environments.adapters import mcp
from cohort.environments.tools import Toolbox


class OpenToolbox(Toolbox):
    """The tools of a run, with the connections to servers that some of them need. Close it at the end.

    Args:
        given: what ``as_tool`` takes, and MCP servers: "mcp:" with a command or a URL, or objects of ``mcp``.

    Raises:
        ConfigError: see ``as_tool`` and ``adapters.mcp.Server``; or two tools have the same name.
    """

    def __init__(self, given: Iterable[Any] = ()) -> None:
        self._servers: list[mcp.Server] = []
        tools: list[Any] = []
        try:
            for one in given:
                if mcp.is_server(one):
                    self._servers.append(mcp.Server(one))
                    tools += self._servers[-1].tools
                else:
                    tools.append(one)
            super().__init__(tools)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all connections. Idempotent."""
        for server in self._servers:
            server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
