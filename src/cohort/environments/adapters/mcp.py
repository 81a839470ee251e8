"""Tools of servers that speak the Model Context Protocol: a client of the package ``mcp`` (extra "mcp").

A run has one connection to a server. It lives on the event loop on which async tools run, in a task of its own, because
the task that opens a connection must close it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from cohort.calls import run_on_loop
from cohort.config import hide_secrets
from cohort.environments.contract import EpisodeFailed, ToolError
from cohort.environments.tools import Tool, text_of
from cohort.errors import ConfigError

PREFIX = "mcp:"
START_SECONDS = 60.0
"""Time for a server to start and to list its tools."""
CLOSE_SECONDS = 10.0
"""Time for a server to end. The package kills a command after 4 s."""


def is_server(given: Any) -> bool:
    """Whether an element of ``tools`` is an MCP server: text that begins with "mcp:", or an object of ``mcp``."""
    if isinstance(given, str):
        return given.startswith(PREFIX)
    return any(base.__module__.split(".")[0] == "mcp" for base in type(given).__mro__)


class Server:
    """A connection to an MCP server.

    Args:
        given: "mcp:" and a URL; "mcp:" and a command that speaks the protocol over standard input and output, such as
            "mcp:npx -y @modelcontextprotocol/server-everything", which inherits the environment variables; or what
            ``mcp.Client`` takes, such as an ``MCPServer`` in this process.

    Raises:
        ConfigError: the package is not installed, or the server does not start, or it has no tools.
    """

    def __init__(self, given: Any) -> None:
        self.name = hide_secrets(given.removeprefix(PREFIX)) if isinstance(given, str) else type(given).__name__
        self.tools: tuple[Tool, ...] = ()
        self._client: Any = None
        self._closing = asyncio.Event()
        listed: Future[list[Any]] = Future()
        self._serving = run_on_loop(self._serve(_client_of(given), listed))
        self._serving.add_done_callback(partial(_fail, listed))
        try:
            self.tools = tuple(_tool(tool, partial(self._call, tool.name)) for tool in listed.result(START_SECONDS))
            if not self.tools:
                raise ValueError("it has no tools")
        except Exception as error:
            self.close()
            reason = f"no answer in {START_SECONDS:g} s" if isinstance(error, TimeoutError) else _reason(error)
            raise ConfigError(f"the MCP server {self.name!r} cannot be used: {reason}") from error

    def close(self) -> None:
        """End the connection; a command is stopped. Idempotent."""
        if self._client is None:
            self._serving.cancel()
        else:
            run_on_loop(self._stop()).result()
        with contextlib.suppress(BaseException):  # it ends, whatever the server does
            self._serving.result(CLOSE_SECONDS)

    async def _stop(self) -> None:
        self._closing.set()

    async def _serve(self, client: Any, listed: Future[list[Any]]) -> None:
        async with client:
            page = await client.list_tools()
            tools = list(page.tools)
            while page.next_cursor is not None:
                page = await client.list_tools(cursor=page.next_cursor)
                tools += page.tools
            self._client = client
            listed.set_result(tools)
            await self._closing.wait()

    async def _call(self, tool: str, /, **arguments: Any) -> str:
        """Call a tool.

        Raises:
            ToolError: the server answered with an error.
            EpisodeFailed: the connection has ended.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            result = await self._client.call_tool(tool, arguments)
        except Exception as error:
            if self._serving.done() or (isinstance(error, MCPError) and error.code == CONNECTION_CLOSED):
                raise EpisodeFailed(f"the MCP server {self.name!r} ended the connection") from error
            raise ToolError(_reason(error)) from error
        text = "\n".join(map(_text, result.content))
        if result.is_error:
            raise ToolError(text or "the tool failed")
        return text if result.content else text_of(result.structured_content)


def _client_of(given: Any) -> Any:
    try:
        from mcp import Client, StdioServerParameters
    except ImportError as error:
        raise ConfigError(
            f"tools of MCP servers need the package mcp ({error}): pip install 'cohort-rl[mcp]'"
        ) from error
    if not isinstance(given, str):
        return Client(given)
    address = given.removeprefix(PREFIX).strip()
    if address.startswith(("http://", "https://")):
        return Client(address)
    try:
        command, *arguments = shlex.split(address)
    except ValueError as error:
        raise ConfigError(f"expected 'mcp:' and a URL or a command, got {given!r}: {error}") from None
    return Client(StdioServerParameters(command=command, args=arguments, env=dict(os.environ)))


def _tool(listed: Any, call: Any) -> Tool:
    parameters: Mapping[str, Any] = {"type": "object", "properties": {}, **listed.input_schema}
    function = {"name": listed.name, "description": listed.description or "", "parameters": parameters}
    return Tool(listed.name, {"type": "function", "function": function}, call, is_async=True)


def _text(content: Any) -> str:
    """What the policy reads of a part of a result."""
    if content.type == "text":
        return str(content.text)
    if content.type == "resource" and getattr(content.resource, "text", None) is not None:
        return str(content.resource.text)
    if content.type == "resource_link":
        return str(content.uri)
    return f"({content.type} content, which is not text)"


def _fail(listed: Future[list[Any]], serving: Future[None]) -> None:
    """Pass on why a connection ended before the tools were listed."""
    if not listed.done():
        error = None if serving.cancelled() else serving.exception()
        listed.set_exception(error or ConnectionError("the connection ended"))


def _reason(error: BaseException) -> str:
    """The first cause within groups of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{error}" or type(error).__name__
