"""Limits of the controller's calls: all of them go through the watchdog, which sets a limit for each."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.layout.source import parse, python_files

WATCHDOG = Path("trainer/cluster/watchdog.py")
# Files that wait for something other than a worker -> the limit.
OTHERS = {
    "trainer/agents/sessions/process.py": "a session that has ended",
    "trainer/rewards/scoring.py": "a scorer: timeouts.reward, around all scoring",
    "trainer/rewards/remote/remote_rewards.py": "a request, which has a timeout of its own; and the same limit",
    "trainer/checkpoint/saver.py": "a copy to remote_dir that has ended without an error",
    "trainer/agents/mcp_tools.py": "the start and the end of MCP servers, which have limits of their own",
    "trainer/agents/native/verifiers_environment.py": "a task of asyncio that has ended",
    "trainer/agents/gateway/endpoint.py": "a task of asyncio that has ended",
    "trainer/agents/sessions/agent_program.py": "a task of asyncio that has ended",
}


def calls(path: Path, method: str) -> Iterator[ast.Call]:
    """``something.method(...)``."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method:
            yield node


def receiver(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Attribute)
    return ast.unparse(call.func.value)


def test_workers_are_called_only_through_the_watchdog() -> None:
    strangers = [f"{path}:{call.lineno}" for path in python_files("trainer") for call in calls(path, "call")
                 if path != WATCHDOG and not receiver(call).endswith("watchdog")]  # fmt: skip
    assert strangers == []
    waiting = {str(path) for path in python_files("trainer") if any(calls(path, "result"))}
    assert waiting == {str(WATCHDOG), *OTHERS}


def test_the_watchdog_sets_a_limit_for_every_call() -> None:
    made = list(calls(WATCHDOG, "call"))
    assert made and all("limit" in {keyword.arg for keyword in call.keywords} for call in made)
    assert [receiver(call) for call in calls(WATCHDOG, "result")] == ["future"]
