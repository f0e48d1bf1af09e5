"""The command and the commit of a run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.run.provenance import code_version, command_line

ROOT = Path(__file__).parents[3]


def test_a_command_of_a_module_can_be_typed_again(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text("from trainer.run.provenance import command_line\nprint(command_line())\n")
    words = ["a.b=1", "c=[1, 2]"]
    for program in (["-m", "shown"], ["shown.py"]):
        found = subprocess.run(
            [sys.executable, *program, *words],
            cwd=tmp_path,
            env={"PYTHONPATH": f"{ROOT}:{tmp_path}"},
            capture_output=True,
            text=True,
        )
        name = "python -m shown" if "-m" in program else "shown.py"
        assert found.stdout == f"{name} a.b=1 'c=[1, 2]'\n", found.stderr


def test_secrets_of_the_command_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "abcdefgh12345678")
    monkeypatch.setattr(sys, "argv", ["program", "url=http://abcdefgh12345678/"])
    assert "abcdefgh12345678" not in command_line()


def test_commit_is_that_of_the_checkout() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    head = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert (code_version()["commit"] or "").removesuffix("+") == head
    assert json.dumps(code_version())
