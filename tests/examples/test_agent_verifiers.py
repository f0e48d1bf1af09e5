"""The environment of verifiers of docs/programs.md: its episodes are trained."""

import os
from pathlib import Path

import pytest

from examples import agent_verifiers
from tests.layout.source import ROOT
from tests.trainer.agents.sessions.scripted import call, sampled, setup, task
from tests.trainer.agents.sessions.test_agent_program import finished, run
from trainer.agents.sessions.agent_loop import AgentKit
from trainer.agents.sessions.agent_program import ProgramRunner
from trainer.agents.sessions.protocol import Journal

PYTHON = "TANDEM_VERIFIERS_PYTHON"
"""An interpreter that has verifiers 0.3."""
FAKE = """#!/bin/sh
test "$KEY" = secret || exit 3
case "$3" in fails) echo no model >&2; exit 1;; esac
echo "$2 $3 $4"; echo reward 0.5
"""


def test_it_starts_itself_in_the_other_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text(FAKE)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv(PYTHON, str(tmp_path / "python"))
    assert agent_verifiers.run("http://host", "secret", task()) == 0.5
    with pytest.raises(RuntimeError, match="no model"):
        agent_verifiers.run("http://host", "secret", task(extra_info={"client": "fails"}))


@pytest.mark.soak
@pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no interpreter with verifiers 0.3")
@pytest.mark.parametrize("client", ["openai_chat_completions", "openai_chat_completions_token", "openai_responses"])
def test_an_environment_of_verifiers_is_trained_unmodified(client: str, tmp_path: Path) -> None:
    runner = ProgramRunner(f"{ROOT}/examples/agent_verifiers.py:run")
    texts = {0: call("add", a=1), 1: call("add", a=2, b=3), 2: "ba"}
    journal = Journal(task(ground_truth="ba", extra_info={"client": client}))
    end = finished(
        run(runner, AgentKit(setup(tmp_path)), [journal], model=lambda wanted: sampled(wanted, texts[len(journal.turns)]))[0]
    )
    assert "error" not in end.extra, end.extra
    assert end.reward == 1.0 and end.metrics["turns"] == 3 and len(end.parts) == 1
    assert [message["content"] for message in end.messages if message["role"] == "tool"] == ["2", "5"]
