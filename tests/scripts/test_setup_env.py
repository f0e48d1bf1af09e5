"""scripts/setup_env.sh with a stand-in for Python and pip that records its calls."""

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
    """A clone with the script, and a simulated machine: Python, network, GPU."""

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
        """Calls of the stand-in since the last call of this method."""
        lines = self.calls_file.read_text().splitlines()
        self.calls_file.write_text("")
        return lines


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_first_run_installs_only_the_core(clone: Clone) -> None:
    done = clone.set_up()
    assert done.returncode == 0, done.stderr
    venv, torch, tandem = clone.calls()
    assert venv == "venv"
    assert torch.endswith("--constraint .venv/constraints.txt torch")
    assert tandem.endswith("--constraint .venv/constraints.txt --editable .")
    assert len(done.stdout.splitlines()) == 3, "a line a stage"


def test_second_run_returns_at_once(clone: Clone) -> None:
    clone.set_up("dev")
    clone.calls()
    start = time.monotonic()
    assert clone.set_up().returncode == clone.set_up("dev").returncode == 0
    assert time.monotonic() - start < 1.0
    assert clone.calls() == []


def test_an_extra_is_added_to_the_environment(clone: Clone) -> None:
    clone.set_up()
    clone.calls()
    clone.set_up("dev", "hub")
    assert [call.split()[-1] for call in clone.calls()] == ["torch", ".[dev,hub]", "requirements/ray-default.txt", ENGINES[-1]]


@pytest.mark.parametrize("changed", ["pyproject.toml", *REQUIREMENTS])
def test_changed_requirements_are_installed(clone: Clone, changed: str) -> None:
    clone.set_up("dev")
    clone.calls()
    original = (clone.root / changed).read_text()
    (clone.root / changed).write_text(original + "\n# changed\n")
    clone.set_up()
    assert [call.split()[-1] for call in clone.calls()] == ["torch", "."]
    (clone.root / changed).write_text(original)
    clone.set_up()
    assert clone.calls(), "the stamps of the earlier state are deleted"


def test_dev_installs_the_engines_cpu_builds_without_dependencies(clone: Clone) -> None:
    clone.set_up()
    assert not any("vllm" in call for call in clone.calls())
    done = clone.set_up("dev")
    files = " ".join(f"--requirement {name}" for name in ENGINES)
    *_, jobs, engines = clone.calls()
    assert jobs.endswith("--no-deps --upgrade --target .venv/ray-default -r requirements/ray-default.txt"), "apart from the rest"
    assert engines.endswith(f"--no-deps {files}")
    assert "Engines, CPU builds ... " in done.stdout


def test_dev_with_a_gpu_installs_no_cpu_build(clone: Clone) -> None:
    clone.program("nvidia-smi", "#!/usr/bin/env bash\nexit 0\n")
    clone.set_up("dev")
    assert [call.split()[-1] for call in clone.calls()] == ["venv", "torch", ".[dev]"]


def test_cpu_index_of_pytorch_is_used_only_for_torch_and_if_reachable(clone: Clone) -> None:
    clone.machine["OFFLINE"] = "0"
    clone.set_up()
    _, torch, tandem = clone.calls()
    assert "--extra-index-url https://download.pytorch.org/whl/cpu torch" in torch
    assert "index" not in tandem


def test_torch_is_pinned_only_without_a_gpu(clone: Clone) -> None:
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


def test_an_old_python_is_an_error_of_one_line(clone: Clone) -> None:
    clone.machine["TOO_OLD"] = "1"
    done = clone.set_up()
    assert done.returncode != 0 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "3.11" in done.stderr
    assert clone.calls() == []


def test_a_failure_shows_pips_output_and_is_retried(clone: Clone) -> None:
    clone.machine["PIP_FAILS"] = "1"
    done = clone.set_up()
    assert done.returncode != 0
    assert "pip's own words" in done.stderr and "failed" in done.stdout
    clone.machine["PIP_FAILS"] = "0"
    assert clone.set_up().returncode == 0
    assert [call.split()[-1] for call in clone.calls()] == ["venv", "torch", "torch", "."], "the environment was kept"
