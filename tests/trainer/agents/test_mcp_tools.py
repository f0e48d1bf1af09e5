"""Tools of MCP servers: a real server over pipes and HTTP, which fails, hangs, exits and dies with its parent."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.trainer.agents.tool_sessions import use
from trainer.agents import mcp_tools
from trainer.agents.formats import ToolCall
from trainer.agents.isolation import SessionLoop
from trainer.agents.toolbox import ToolBox, ToolLimits
from trainer.agents.tools import AnyTool
from trainer.agents.verl_modules import load_tools
from workers.controller.ports import free_port

needs_mcp = pytest.mark.skipif(find_spec("mcp") is None, reason="mcp is not installed: pip install 'tandem[mcp]'")
SERVER = '''
import asyncio, os, sys, time

try:
    from mcp.server import MCPServer as Server
except ImportError:  # 1.x
    from mcp.server.fastmcp import FastMCP as Server

server = Server("arithmetic")

@server.tool()
async def add(a: int, b: int = 1) -> str:
    """Add two numbers."""
    return str(a + b)

@server.tool()
async def fail() -> str:
    raise ValueError("no such file")

@server.tool()
async def pid() -> str:
    return f"{os.getpid()} {os.getppid()}"

@server.tool()
async def leave() -> str:
    os._exit(3)

@server.tool()
async def nap() -> str:
    time.sleep(0.3)
    return "rested"

@server.tool()
async def wait() -> str:
    await asyncio.Event().wait()

@server.tool()
async def block(file: str = "") -> str:
    if file:
        with open(file, "w") as out:
            out.write(str(os.getpid()))
    time.sleep(600)

if len(sys.argv) > 1:
    import uvicorn
    uvicorn.run(server.streamable_http_app(), port=int(sys.argv[1]), log_level="error")
else:
    server.run("stdio")
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("mcp") / "server.py"
    file.write_text(SERVER)
    path = ":".join(part for part in sys.path if part)
    return {"command": sys.executable, "args": [str(file)], "env": {"PYTHONPATH": path}}


def load(tmp_path: Path, mcp: Any, **entry: Any) -> dict[str, AnyTool]:
    file = tmp_path / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": [{"mcp": mcp, **entry}]}))
    return {tool.name: tool for tool in load_tools(str(file), "key")}


@pytest.fixture(scope="module", autouse=True)
def no_server_left() -> Iterator[None]:
    yield
    mcp_tools.close_servers()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, server: Any) -> dict[str, AnyTool]:
    return load(tmp_path_factory.mktemp("stdio"), {"servers": {"arithmetic": server}}, config={"type": "mcp", "timeout": 1})


@needs_mcp
def test_tools_of_a_server_run(found: dict[str, AnyTool]) -> None:
    assert [*found] == ["add", "fail", "pid", "leave", "nap", "wait", "block"]
    function = found["add"].schema["function"]
    assert function["description"] == "Add two numbers." and function["parameters"]["required"] == ["a"]
    results, box = use(found["add"], {"a": 1}, {"a": 1, "b": 2}, {"a": "x"}, {})
    assert [result.text for result in results[:2]] == ["2", "3"] and box.counts == {"ok": 2, "arguments": 2}


@needs_mcp
def test_errors_of_a_tool_are_text_and_counted(found: dict[str, AnyTool]) -> None:
    (result,), box = use(found["fail"], {})
    assert result.status == "error" and result.text.startswith("Error: fail failed: Error executing tool fail")
    assert box.counts == {"error": 1}


def in_sessions(tools: dict[str, AnyTool], n: int, *calls: ToolCall) -> list[list[str]]:
    """Results of the calls in each of n sessions at once."""

    async def one(i: int) -> list[str]:
        loop = SessionLoop()
        async with ToolBox([*tools.values()], ToolLimits(2, 100, "right", 60.0), session=str(i), loop=loop) as box:
            texts = [result.text for result in await box.run([*calls])]
        loop.close()
        return texts

    async def main() -> list[list[str]]:
        return await asyncio.gather(*map(one, range(n)))

    return asyncio.run(main())


@needs_mcp
def test_calls_of_many_sessions_share_a_connection(found: dict[str, AnyTool]) -> None:
    results = in_sessions(found, 20, ToolCall("a", "add", {"a": 4}), ToolCall("b", "pid", {}))
    assert [texts[0] for texts in results] == ["5"] * 20
    assert len({texts[1] for texts in results}) == 1, "one server"


def pid(found: dict[str, AnyTool]) -> int:
    (result,), _ = use(found["pid"], {})
    assert result.status == "ok", result.text
    return int(result.text.split()[0])


@needs_mcp
def test_a_call_that_waits_is_an_error_and_the_server_stays(found: dict[str, AnyTool]) -> None:
    before = pid(found)
    (result,), _ = use(found["wait"], {})
    assert result.text == "Error: wait failed: no result within 1 s" and pid(found) == before


@needs_mcp
def test_a_server_that_exits_is_an_error_of_the_call_and_started_again(found: dict[str, AnyTool]) -> None:
    before = pid(found)
    (result,), _ = use(found["leave"], {})
    assert result.status == "error" and "the server arithmetic is started again for the next call" in result.text
    assert pid(found) != before and not psutil.pid_exists(before)
    killed = pid(found)
    os.kill(killed, signal.SIGKILL)  # between two calls
    use(found["pid"], {})
    assert pid(found) != killed


@needs_mcp
def test_a_server_that_has_ended_without_a_call_is_started_again_before_the_next(
    found: dict[str, AnyTool], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pid(found)
    os.kill(before, signal.SIGKILL)
    monkeypatch.setattr(mcp_tools, "_IDLE", 0.0)
    assert pid(found) != before, "the first call succeeds"


@needs_mcp
def test_one_of_many_calls_at_once_asks_whether_the_server_lives(
    tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait for a reply while its call blocks the server, and end it."""
    found = load(tmp_path, {"servers": {"arithmetic": server}}, config={"type": "mcp", "timeout": 20})
    before, asked, check = pid(found), list[int](), mcp_tools._check

    async def slow(*session: Any) -> None:
        asked.append(1)
        await asyncio.sleep(0.3)
        await check(*session)

    monkeypatch.setattr(mcp_tools, "_IDLE", 0.0)
    monkeypatch.setattr(mcp_tools, "_check", slow)
    assert in_sessions(found, 6, ToolCall("a", "nap", {})) == [["rested"]] * 6 and len(asked) == 1
    assert pid(found) == before


@needs_mcp
def test_a_server_that_is_blocked_is_replaced(found: dict[str, AnyTool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_tools, "_PING", 0.3)
    before = pid(found)
    (result,), _ = use(found["block"], {})
    assert "no result within 1 s; the server arithmetic is started again" in result.text
    assert pid(found) != before
    psutil.wait_procs([psutil.Process(before)] if psutil.pid_exists(before) else [], timeout=60)
    assert not psutil.pid_exists(before)


PARENT = """
import asyncio, json, sys
from trainer.agents.mcp_tools import load_mcp_tools

tools = {tool.name: tool for tool in load_mcp_tools({"mcp": {"servers": {"a": json.loads(sys.argv[1])}}}, "key")}
asyncio.run(tools["block"].bind({"file": sys.argv[2]})())
"""


@needs_mcp
def test_a_blocked_server_dies_with_its_parent(tmp_path: Path, server: Any) -> None:
    file = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, json.dumps(server), str(file)], env={**os.environ, **server["env"]})
    try:
        while not (file.exists() and file.read_text()):
            with pytest.raises(subprocess.TimeoutExpired):  # or it has ended
                parent.wait(0.02)
        child = psutil.Process(int(file.read_text()))
        assert child.ppid() == parent.pid
    finally:
        parent.kill()
        parent.wait()
    try:
        while child.status() != psutil.STATUS_ZOMBIE:  # where nothing collects it
            child.wait(0.05)
    except (psutil.NoSuchProcess, psutil.TimeoutExpired) as error:
        assert isinstance(error, psutil.NoSuchProcess) or child.status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def over_http(server: Any) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([server["command"], *server["args"], str(port)], env={**os.environ, **server["env"]})
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@needs_mcp
def test_servers_over_http_in_the_form_of_verl(tmp_path: Path, over_http: str) -> None:
    servers = tmp_path / "mcp_server.json"
    servers.write_text(json.dumps({"mcpServers": {"Arithmetic": {"url": over_http, "auth_token": "secret"}}}))
    mcp = {"mcp_servers_config_path": str(servers), "tool_selected_list": ["fail", "add"]}
    config = {"type": "mcp", "rate_limit": 120, "timeout": 120}
    while True:
        try:
            found = load(tmp_path, mcp, config=config, class_name="verl.tools.mcp_search_tool.MCPSearchTool")
            break
        except ValueError as error:  # until it listens
            assert "server Arithmetic" in str(error) and "does not start: " in str(error) and "\n" not in str(error)
    assert [*found] == ["add", "fail"]
    results, _ = use(found["add"], {"a": 1}, {"a": 5})
    assert [result.text for result in results] == ["2", "6"]
    with pytest.raises(ValueError, match=r"tool_selected_list: no tool search; the servers have add, fail, pid"):
        load(tmp_path, mcp | {"tool_selected_list": ["search"]})


WRONG = [
    ({}, {}, r"mcp: it must have one of mcp_servers_config_path and servers"),
    ({"servers": {"a": {}}}, {}, r"mcp.servers: server a must have command \(and args, env, cwd\), or url"),
    ({"servers": {"a": {"command": "x", "url": "y"}}}, {}, r"server a must have command"),
    ({"servers": {"a": {"url": "x", "type": "sse"}}}, {}, r"server a: SSE is not supported"),
    ({"servers": {}}, {}, r"it must have servers by name"),
    ({"servers": {"a": {"command": "x", "args": "y z"}}}, {}, r"server a: args=y z must be a list of texts"),
    ({"servers": {"a": {"command": "x", "args": [1]}}}, {}, r"server a: args=\[1\] must be a list of texts"),
    ({"servers": {"a": {"command": "x", "env": ["A=1"]}}}, {}, r"server a: env=\['A=1'\] must be a mapping"),
    ({"servers": {"a": {"command": None}}}, {}, r"server a: command=None must be text"),
    ({"servers": {"a": {"url": "x"}}}, {"config": {"rate_limit": float("nan")}}, r"config.rate_limit=nan: it must be a number"),
    ({"mcp_servers_config_path": "none.json"}, {}, r"mcp_servers_config_path=none.json: no such file"),
    ({"servers": {"a": {"url": "x"}}}, {"config": {"timeout": 0}}, r"config.timeout=0: it must be a number above 0"),
    ({"servers": {"a": {"url": "x"}}}, {"class_name": "my.Tool"}, r"class_name=my.Tool: MCP tools have no class of their own"),
    ({"servers": {"a": {"url": "x"}}, "tool_selected_list": "a"}, {}, r"tool_selected_list=a: it must be a list"),
]


@pytest.mark.parametrize(("mcp", "entry", "expected"), WRONG)
def test_wrong_entries_are_refused(tmp_path: Path, mcp: Any, entry: Any, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", sys.modules[__name__])  # the checks of servers come after that of the package
    with pytest.raises(ValueError, match=expected) as caught:
        load(tmp_path, mcp, **entry)
    assert str(caught.value).startswith("key=") and "tools[0]" in str(caught.value) and "\n" not in str(caught.value)


def test_without_the_package_an_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ValueError, match=r"tools\[0\]: MCP tools need the package mcp; run: pip install 'tandem\[mcp\]'"):
        load(tmp_path, {"servers": {"a": {"command": "x"}}})


@needs_mcp
def test_a_server_that_does_not_start_is_an_error(tmp_path: Path, server: Any) -> None:
    wrong = [
        ("no-such", [], "there is no program no-such"),
        ("/no/such/server", [], "there is no program /no/such/server"),
        (sys.executable, ["-c", "exit(1)"], "Connection closed"),
    ]
    for command, args, why in wrong:
        with pytest.raises(ValueError, match=rf"mcp: server a: the server a does not start: {why}") as caught:
            load(tmp_path, {"servers": {"a": {"command": command, "args": args}}})
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"the server a does not start: .*(?i:connect)"):  # the reason, and no address in memory
        load(tmp_path, {"servers": {"a": {"url": f"http://127.0.0.1:{free_port()}/mcp"}}})


@needs_mcp
@pytest.mark.parametrize("cwd", [None, "servers"])
def test_a_command_may_be_a_path_from_the_servers_directory(
    tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch, cwd: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / (cwd or ".") / "run.sh"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\nexec {server['command']} {server['args'][0]}\n")
    program.chmod(0o755)
    assert "add" in load(tmp_path, {"servers": {"a": server | {"command": "./run.sh", "args": None, "cwd": cwd}}})


@needs_mcp
def test_calls_that_wait_for_the_rate_beyond_their_limit_take_no_time_of_others(tmp_path: Path, server: Any) -> None:
    tools = load(tmp_path, {"servers": {"a": server}}, config={"type": "mcp", "timeout": 5, "rate_limit": 5})
    for _ in range(2):
        results, _ = use(tools["add"], *({"a": a} for a in range(12)), parallel=True, seconds=1.2)
        assert 4 <= sum(result.text.isdigit() for result in results) <= 8


@needs_mcp
def test_a_tool_that_is_not_selected_may_be_unusable(tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(parameters: Any, *, closed: bool) -> Any:
        if "b" not in parameters["properties"]:
            raise ValueError("not a JSON schema")
        return lambda arguments: None

    monkeypatch.setattr(mcp_tools, "validator", refuse)
    assert [*load(tmp_path, {"servers": {"a": server}, "tool_selected_list": ["add"]})] == ["add"]
    with pytest.raises(ValueError, match="tool fail: not a JSON schema"):
        load(tmp_path, {"servers": {"a": server}})
