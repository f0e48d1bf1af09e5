"""The MCP agent of docs/programs.md: its calls run on the server, and what was sampled for it is trained."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.layout.source import ROOT
from tests.trainer.agents.sessions.scripted import call, sampled, setup, task
from tests.trainer.agents.sessions.test_agent_program import finished, run
from trainer.agents.sessions.agent_loop import AgentKit
from trainer.agents.sessions.agent_program import ProgramRunner
from trainer.agents.sessions.protocol import Finished, Journal

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="mcp is not installed: pip install 'tandem[mcp]'")
OTHER = """
import runpy, sys
names = runpy.run_path(sys.argv[1])
print(names["described"].__name__, file=sys.stderr)
names["serve"]()
"""


def converse(tmp_path: Path, texts: list[str], **extra_info: Any) -> Finished:
    journal = Journal(task(ground_truth="42", extra_info=extra_info))
    runner = ProgramRunner(f"{ROOT}/examples/agent_mcp.py:run")
    return finished(
        run(runner, AgentKit(setup(tmp_path)), [journal], model=lambda wanted: sampled(wanted, texts[len(journal.turns)]))[0]
    )


def results(end: Finished) -> list[str]:
    return [message["content"] for message in end.messages if message["role"] == "tool"]


def test_its_calls_run_on_the_server_and_all_turns_are_trained(tmp_path: Path) -> None:
    end = converse(tmp_path, [call("add", a=40, b=1), call("add", a=41, b=1) + "\n" + call("add", a=1, b=2), "It is 42."])
    assert "error" not in end.extra, end.extra
    assert end.reward == 1.0 and end.metrics["turns"] == 3 and results(end) == ["41", "42", "3"]
    (part,) = end.parts
    assert int((part.response_mask[1:] > part.response_mask[:-1]).sum()) == 3, "three turns in a row"


def test_errors_are_results_and_the_number_of_calls_is_limited(tmp_path: Path) -> None:
    end = converse(tmp_path, [call("add", a="x", b=1), call("add", a=1), call("add", a=2, b=2), call("add", a=1, b=41)])
    assert "error" not in end.extra, end.extra
    first, second, third, *_ = results(end)
    assert "valid" in first and "valid" in second and third == "4"
    assert end.reward == 0.0 and end.metrics["turns"] == 4, "the result of a call is no answer"


def test_a_row_names_another_server(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(OTHER)
    server = [sys.executable, str(tmp_path / "other.py"), f"{ROOT}/examples/agent_mcp.py"]
    end = converse(tmp_path, [call("add", a=40, b=2), "42"], server=server)
    assert "error" not in end.extra and end.reward == 1.0 and results(end) == ["42"]
    gone = converse(tmp_path, [], server=["no-such-program"])
    assert gone.reward is None and "no-such-program" in gone.extra["error"]
