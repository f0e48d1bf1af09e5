"""Tools of MCP servers, by the official SDK (the optional package ``mcp``).

All sessions of a process share a connection per server. The connections live in one thread with an event loop of its own, because
the SDK binds a connection to the task that opened it. A server that ends costs the calls that it was working on; the next call
starts it again. Servers that this process starts die with it, also while a tool blocks them and after SIGKILL.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from trainer.agents.arguments import Schema, validator
from trainer.agents.tools import FunctionTool, ToolOutput
from workers.controller import stop

_START = 60.0
"""Seconds in which a server must be ready."""
_PING = 2.0
"""Seconds in which a server must reply, after one of its calls has exceeded its limit; otherwise it is started again."""
_IDLE = 1.0
"""Seconds without a reply after which a server that has no call is asked whether it still lives before it gets one."""
_LEAVE = 10.0
"""Seconds in which a connection that was not opened is closed: only then its error is known."""
_TIMEOUT = 30.0  # as verl's
_LAUNCHER = (
    "import os, runpy, sys; "
    "runpy.run_path(sys.argv[1])['die_with_parent'](int(sys.argv[2])); "
    "os.execvp(sys.argv[3], sys.argv[3:])"
)
"""Program that asks the kernel to end it with its parent, and then becomes the server. The SDK starts no other way."""
_TASKS: dict[asyncio.Task[None], asyncio.Event] = {}
"""Work for a connection, in the thread of connections -> the event that ends the connection."""
_CLASSES = ("verl.tools.mcp_base_tool.MCPBaseTool", "verl.tools.mcp_search_tool.MCPSearchTool")
_STDIO, _HTTP = {"command", "args", "env", "cwd"}, {"url", "headers", "auth_token"}
_KINDS: dict[str, tuple[type, str]] = {
    "command": (str, "text"), "args": (list, "a list of texts"), "env": (Mapping, "a mapping"), "cwd": (str, "text"),
    "url": (str, "text"), "headers": (Mapping, "a mapping"), "auth_token": (str, "text"),
}  # fmt: skip
_NAMES = {"type", "transport", "description", "timeout"}  # other keys of common server files; not needed


class McpError(Exception):
    """A call, or the start of a server, failed. The text is one line."""


class McpTool(FunctionTool):
    """A tool of a server. Arguments are checked by the server's schema."""

    def __init__(self, server: McpServer, schema: Schema) -> None:
        """schema: OpenAI function schema. Raises ValueError, one line, if it is none."""
        self.server, self.schema = server, schema
        self.name = schema["function"]["name"]
        self.check = validator(schema["function"]["parameters"], closed=False)

    def bind(self, arguments: Mapping[str, Any]) -> Callable[[], Awaitable[ToolOutput]]:
        async def call() -> ToolOutput:
            work = asyncio.run_coroutine_threadsafe(self.server.run_tool(self.name, dict(arguments)), _connections())
            return await asyncio.wrap_future(work)

        return call


class McpServer:
    """A connection to a server, in the thread of connections; started by its first use, and again after it was lost."""

    def __init__(self, name: str, config: Mapping[str, Any], *, seconds: float, rate: float | None = None) -> None:
        """config: {command, args, env, cwd}, or {url, headers, auth_token}. seconds: limit of a call. rate: calls per second."""
        self.name, self.config = name, config
        self._seconds, self._rate = seconds, rate
        self._session: asyncio.Future[Any] | None = None
        self._lost = asyncio.Event()
        self._calls, self._replied = 0, 0.0
        """Number of calls that the server has or gets, and time of the loop at its last reply."""
        self._asking = asyncio.Lock()
        """One call at a time asks whether the server lives: another one may block it before it has replied."""
        self._free = 0.0
        """Time of the loop from which on the rate permits a call."""
        self._turn = asyncio.Lock()
        """Of the call that waits for that time: one that is cancelled before its turn takes no time from the others."""

    async def tools(self, selected: Collection[str] = ()) -> tuple[list[str], list[McpTool]]:
        """Names of all tools of the server, and those that are selected (none named: all).

        Raises McpError, or ValueError if one of these has no valid schema.
        """
        names: list[str] = []
        from mcp.types import PaginatedRequestParams

        found: list[McpTool] = []
        cursor = None
        while True:
            session, _ = await self._connected()
            async with asyncio.timeout(_START):
                page = await session.list_tools(params=None if cursor is None else PaginatedRequestParams(cursor=cursor))
            names += [tool.name for tool in page.tools]
            for tool in page.tools:
                if selected and tool.name not in selected:
                    continue
                # By the names of the protocol: those of the SDK differ between its versions.
                schema = _fields(tool)["inputSchema"]
                function = {"name": tool.name, "description": tool.description or "", "parameters": schema}
                try:
                    found.append(McpTool(self, {"type": "function", "function": function}))
                except ValueError as error:
                    raise ValueError(f"tool {tool.name}: {error}") from error
            if (cursor := _fields(page).get("nextCursor")) is None:
                return names, found

    async def run_tool(self, name: str, arguments: dict[str, Any]) -> ToolOutput:
        """Result of a call; an error is a result too."""
        loop = asyncio.get_running_loop()
        try:
            async with self._asking:
                session, lost = await self._connected()
                if not self._calls and loop.time() - self._replied > _IDLE:
                    await _check(session, lost)
                    session, lost = await self._connected()
                self._calls += 1
        except McpError as error:
            return ToolOutput(str(error), failed=True)
        try:
            await self._permitted()
            async with asyncio.timeout(self._seconds):
                result = await session.call_tool(name, arguments)
            self._replied = loop.time()
        except asyncio.CancelledError:  # by the limit of the session
            _start(_check(session, lost), lost)
            raise
        except Exception as error:  # of the SDK, and of the packages that it uses for pipes and HTTP
            await _check(session, lost)
            why = f"no result within {self._seconds:g} s" if isinstance(error, TimeoutError) else _in_words(error)
            again = f"; the server {self.name} is started again for the next call" if lost.is_set() else ""
            return ToolOutput(why + again, failed=True)
        finally:
            self._calls -= 1
        return _output(_fields(result))

    async def _permitted(self) -> None:
        """Wait until the rate permits a call."""
        if self._rate is None:
            return
        loop = asyncio.get_running_loop()
        async with self._turn:
            await asyncio.sleep(self._free - loop.time())
            self._free = loop.time() + 1 / self._rate

    async def _connected(self) -> tuple[Any, asyncio.Event]:
        """Session of the SDK, and whether it was lost. Raises McpError."""
        if self._session is None or self._lost.is_set():
            self._session, self._lost = asyncio.get_running_loop().create_future(), asyncio.Event()
            _start(self._serve(self._session, self._lost), self._lost)
        lost = self._lost
        try:
            async with asyncio.timeout(_START + _LEAVE):
                return await asyncio.shield(self._session), lost
        except TimeoutError as error:
            raise McpError(f"the server {self.name} does not start: not ready after {_START + _LEAVE:g} s") from error

    async def _serve(self, ready: asyncio.Future[Any], lost: asyncio.Event) -> None:
        """Hold the connection until it is lost."""
        from mcp import ClientSession

        late = False
        try:
            async with AsyncExitStack() as stack:
                try:
                    async with asyncio.timeout(_START):
                        streams = await stack.enter_async_context(self._transport())
                        session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
                        await session.initialize()
                except TimeoutError:
                    late = True
                    raise
                ready.set_result(session)
                await lost.wait()
        # The SDK cancels the task whose transport fails; the reason comes when the stack is left.
        except (Exception, asyncio.CancelledError) as error:
            if not ready.done():  # else of a connection that is lost anyway
                why = f"not ready after {_START:g} s" if late else _in_words(error)
                ready.set_exception(McpError(f"the server {self.name} does not start: {why}"))
        finally:
            lost.set()

    def _transport(self) -> Any:
        config = self.config
        if "command" in config:
            from mcp import StdioServerParameters, stdio_client

            program, path = config["command"], (config.get("env") or {}).get("PATH")
            if shutil.which(os.path.join(config.get("cwd") or "", program) if "/" in program else program, path=path) is None:
                raise McpError(f"there is no program {program}")
            args = ["-I", "-S", "-c", _LAUNCHER, stop.__file__, str(os.getpid()), program, *(config.get("args") or ())]
            env = {name: str(value) for name, value in (config.get("env") or {}).items()}
            return stdio_client(StdioServerParameters(command=sys.executable, args=args, env=env or None, cwd=config.get("cwd")))
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        headers = dict(config.get("headers") or {})
        if token := config.get("auth_token"):
            headers["Authorization"] = f"Bearer {token}"
        return streamable_http_client(config["url"], http_client=create_mcp_http_client(headers=headers))


def load_mcp_tools(entry: Mapping[str, Any], where: str) -> list[McpTool]:
    """Tools of an entry of verl's tool file with ``config.type: mcp``; starts its servers. Raises ValueError, one line.

    mcp: {mcp_servers_config_path: JSON file with mcpServers, or servers: the same in place; tool_selected_list}.
    config: {timeout: seconds of a call, rate_limit: calls per second to each server}.
    """
    name = entry.get("class_name")
    if name not in (None, *_CLASSES):
        raise ValueError(f"{where}.class_name={name}: MCP tools have no class of their own; use {_CLASSES[0]}, or none")
    config, mcp = entry.get("config") or {}, entry.get("mcp")
    if not isinstance(mcp, Mapping) or len(mcp.keys() & {"servers", "mcp_servers_config_path"}) != 1:
        raise ValueError(f"{where}.mcp: it must have one of mcp_servers_config_path and servers")
    for key in ("timeout", "rate_limit"):
        if not isinstance(number := config.get(key, _TIMEOUT), int | float) or isinstance(number, bool) or not 0 < number < inf:
            raise ValueError(f"{where}.config.{key}={number}: it must be a number above 0")
    selected = mcp.get("tool_selected_list") or []
    if not isinstance(selected, list) or not all(isinstance(name, str) for name in selected):
        raise ValueError(f"{where}.mcp.tool_selected_list={selected}: it must be a list of names")
    try:
        import mcp as _  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"{where}: MCP tools need the package mcp; run: pip install 'tandem[mcp]'") from error
    found: list[McpTool] = []
    names: list[str] = []
    for name, server in _servers(mcp, where):
        own = McpServer(name, server, seconds=config.get("timeout", _TIMEOUT), rate=config.get("rate_limit"))
        try:
            there, tools = asyncio.run_coroutine_threadsafe(own.tools(selected), _connections()).result()
        except Exception as error:  # of the SDK too
            raise ValueError(f"{where}.mcp: server {name}: {_in_words(error)}") from error
        names, found = names + there, found + tools
    if missing := [name for name in selected if name not in names]:
        raise ValueError(
            f"{where}.mcp.tool_selected_list: no tool {', '.join(missing)}; the servers have {', '.join(names) or 'none'}"
        )
    if not found:
        raise ValueError(f"{where}.mcp: the servers have no tool")
    return found


def close_servers() -> None:
    """End the servers of this process, for a process that continues without them. A later call starts them again."""

    async def close() -> None:
        tasks = {**_TASKS}
        for lost in tasks.values():
            lost.set()
        if tasks:
            await asyncio.wait(tasks)

    asyncio.run_coroutine_threadsafe(close(), _connections()).result()


def _servers(mcp: Mapping[str, Any], where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    servers = mcp.get("servers")
    if servers is None:
        where = f"{where}.mcp.mcp_servers_config_path={mcp['mcp_servers_config_path']}"
        file = Path(str(mcp["mcp_servers_config_path"])).expanduser()
        if not file.is_file():
            raise ValueError(f"{where}: no such file")
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{where}: not JSON: {error}") from error
        servers = content.get("mcpServers") if isinstance(content, dict) else None
    else:
        where = f"{where}.mcp.servers"
    if not isinstance(servers, Mapping) or not servers:
        raise ValueError(f"{where}: it must have servers by name: {{mcpServers: {{name: {{command, args}} or {{url}}}}}}")
    for name, server in servers.items():
        keys = set(server) - _NAMES if isinstance(server, Mapping) else set()
        if not (keys <= _STDIO and "command" in keys) and not (keys <= _HTTP and "url" in keys):
            raise ValueError(f"{where}: server {name} must have command (and args, env, cwd), or url (and headers, auth_token)")
        for key, (kind, words) in _KINDS.items():
            value = server.get(key)
            is_wrong = not isinstance(value, kind) if value is not None else key in ("command", "url") and key in server
            if is_wrong or (key == "args" and not all(isinstance(word, str) for word in value or ())):
                raise ValueError(f"{where}: server {name}: {key}={value} must be {words}")
        if "sse" in (server.get("transport"), server.get("type")):
            raise ValueError(f"{where}: server {name}: SSE is not supported; use stdio or streamable HTTP")
        yield str(name), server


@cache
def _connections() -> asyncio.AbstractEventLoop:
    """The loop of all connections of the process."""
    loop = asyncio.new_event_loop()
    # The kernel ends servers with the thread that started them: this one lasts as long as the process.
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop


def _start(work: Coroutine[Any, Any, None], lost: asyncio.Event) -> None:
    task = asyncio.ensure_future(work)
    _TASKS[task] = lost
    task.add_done_callback(_TASKS.pop)


async def _check(session: Any, lost: asyncio.Event) -> None:
    """Set ``lost`` if the server does not reply: it has ended, or a tool blocks all of it."""
    replied = False
    with suppress(Exception):  # no reply in time, or no connection
        async with asyncio.timeout(_PING):
            await session.send_ping()
        replied = True
    if not replied:
        lost.set()


def _in_words(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split()) or type(error).__name__


def _fields(result: Any) -> dict[str, Any]:
    """Fields of a message, by the names of the protocol."""
    found: dict[str, Any] = result.model_dump(by_alias=True, mode="json")
    return found


def _output(result: Mapping[str, Any]) -> ToolOutput:
    texts: list[str] = []
    for part in result["content"]:
        text = part.get("text", part.get("resource", {}).get("text"))
        if text is None:
            return ToolOutput(f"the tool returned {part['type']}; only text is supported", failed=True)
        texts.append(text)
    if not texts and result.get("structuredContent") is not None:
        texts.append(json.dumps(result["structuredContent"], ensure_ascii=False))
    return ToolOutput("\n".join(texts), failed=bool(result.get("isError")))
