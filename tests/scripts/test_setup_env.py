"""scripts/setup_env.sh with a stand-in for Python and pip that writes down what it is asked."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.layout.source import ROOT

PYTHON = r"""#!/usr/bin/env bash
case "$*" in
  --version) echo Python 3.12.0 ;;
  *version_info*) exit "$TOO_OLD" ;;
  *urlopen*) exit "$OFFLINE" ;;
  "-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && echo "venv" >>"$CALLS" ;;
  "-m pip install"*) echo "pip ${*:4}" >>"$CALLS"; echo "pip's own words"; exit "$PIP_FAILS" ;;
esac
"""

ENGINES = tuple(f"requirements/{name}-cpu.txt" for name in ("vllm", "sglang", "megatron"))
REQUIREMENTS = ("requirements/constraints-cpu.txt", "requirements/ray-default.txt", *ENGINES)


class Clone:
    """A clone with the script in it, and a machine around it: its Python, its network, its GPU."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls_file = root / "clone", root / "calls"
        for name in ("scripts/setup_env.sh", "scripts/install_engine.sh", "pyproject.toml", *REQUIREMENTS):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        self.calls_file.touch()
        self.programs = root / "programs"
        self.programs.mkdir()
        self.machine = {"TOO_OLD": "0", "OFFLINE": "1", "PIP_FAILS": "0"}
        for name in ("python3", "python3.13", "python3.12", "python3.11"):
            self.program(name, PYTHON)
        self.program("nvidia-smi", "#!/usr/bin/env bash\nexit 1\n")

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def set_up(self, *extras: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.programs}:{os.environ['PATH']}"
        environment = {"PATH": path, "CALLS": str(self.calls_file), "HOME": str(self.root)} | self.machine
        script = self.root / "scripts/setup_env.sh"
        return subprocess.run([script, *extras], cwd="/", env=environment, capture_output=True, text=True, timeout=60)

    def calls(self) -> list[str]:
        """What was asked since the last call."""
        lines = self.calls_file.read_text().splitlines()
        self.calls_file.write_text("")
        return lines


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_it_makes_an_environment_with_the_core_alone(clone: Clone) -> None:
    done = clone.set_up()
    assert done.returncode == 0, done.stderr
    venv, torch, tandem = clone.calls()
    assert venv == "venv"
    assert torch.endswith("--constraint .venv/constraints.txt torch")
    assert tandem.endswith("--constraint .venv/constraints.txt --editable .")
    assert len(done.stdout.splitlines()) == 3, "a line a stage"


def test_run_again_it_returns_at_once(clone: Clone) -> None:
    clone.set_up("dev")
    clone.calls()
    start = time.monotonic()
    assert clone.set_up().returncode == clone.set_up("dev").returncode == 0
    assert time.monotonic() - start < 1.0
    assert clone.calls() == []


def test_an_extra_is_added_to_what_is_there(clone: Clone) -> None:
    clone.set_up()
    clone.calls()
    clone.set_up("dev", "hub")
    assert [call.split()[-1] for call in clone.calls()] == ["torch", ".[dev,hub]", "requirements/ray-default.txt", ENGINES[-1]]


@pytest.mark.parametrize("changed", ["pyproject.toml", *REQUIREMENTS])
def test_a_change_of_what_is_wanted_is_installed(clone: Clone, changed: str) -> None:
    clone.set_up("dev")
    clone.calls()
    original = (clone.root / changed).read_text()
    (clone.root / changed).write_text(original + "\n# changed\n")
    clone.set_up()
    assert [call.split()[-1] for call in clone.calls()] == ["torch", "."]
    (clone.root / changed).write_text(original)
    clone.set_up()
    assert clone.calls(), "the stamps of the earlier state are gone"


def test_development_has_the_engines_cpu_builds_and_nothing_that_these_ask_for(clone: Clone) -> None:
    clone.set_up()
    assert not any("vllm" in call for call in clone.calls())
    done = clone.set_up("dev")
    files = " ".join(f"--requirement {name}" for name in ENGINES)
    *_, jobs, engines = clone.calls()
    assert jobs.endswith("--no-deps --upgrade --target .venv/ray-default -r requirements/ray-default.txt"), "apart from the rest"
    assert engines.endswith(f"--no-deps {files}")
    assert "Engines, CPU builds ... " in done.stdout


def test_on_a_gpu_development_has_no_cpu_build(clone: Clone) -> None:
    clone.program("nvidia-smi", "#!/usr/bin/env bash\nexit 0\n")
    clone.set_up("dev")
    assert [call.split()[-1] for call in clone.calls()] == ["venv", "torch", ".[dev]"]


def test_pytorchs_cpu_index_is_used_for_torch_alone_and_only_when_it_answers(clone: Clone) -> None:
    clone.machine["OFFLINE"] = "0"
    clone.set_up()
    _, torch, tandem = clone.calls()
    assert "--extra-index-url https://download.pytorch.org/whl/cpu torch" in torch
    assert "index" not in tandem


def test_without_gpu_torch_is_pinned_and_with_one_it_is_not(clone: Clone) -> None:
    clone.set_up()
    pins = (clone.root / "requirements/constraints-cpu.txt").read_text().splitlines()
    assert (clone.root / ".venv/constraints.txt").read_text().splitlines() == pins
    shutil.rmtree(clone.root / ".venv")
    clone.program("nvidia-smi", "#!/usr/bin/env bash\nexit 0\n")
    clone.machine["OFFLINE"] = "0"
    clone.calls()
    clone.set_up()
    kept = (clone.root / ".venv/constraints.txt").read_text().splitlines()
    assert set(pins) - set(kept) == {line for line in pins if line.startswith("torch==")} != set()
    assert not any("index" in call for call in clone.calls())


def test_without_a_fitting_python_it_says_so_in_one_line(clone: Clone) -> None:
    clone.machine["TOO_OLD"] = "1"
    done = clone.set_up()
    assert done.returncode != 0 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "3.11" in done.stderr
    assert clone.calls() == []


def test_a_failure_shows_pips_last_lines_and_is_not_taken_for_done(clone: Clone) -> None:
    clone.machine["PIP_FAILS"] = "1"
    done = clone.set_up()
    assert done.returncode != 0
    assert "pip's own words" in done.stderr and "failed" in done.stdout
    clone.machine["PIP_FAILS"] = "0"
    assert clone.set_up().returncode == 0
    assert [call.split()[-1] for call in clone.calls()] == ["venv", "torch", "torch", "."], "the environment was kept"
