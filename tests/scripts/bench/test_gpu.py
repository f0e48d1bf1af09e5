"""scripts/bench/gpu.sh on the CPU: every part runs, and the table has its figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import warm_python

ROOT = Path(__file__).parents[3]


# Stands in for Python: one bench fails, others have a report, and the table is made of them.
BENCHES = f"""#!/usr/bin/env bash
case "$2" in
  *.gpu_table) exec {sys.executable} "$@" ;;
  *.engines) echo "there is no $6" >&2; exit 2 ;;
  *) printf '{{\\n"cases": {{}}\\n}}\\n' ;;
esac
"""


def suite(folder: Path, *words: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": python, "BENCH_OUT": str(folder), "OMP_NUM_THREADS": "1"}
    command = ["scripts/bench/gpu.sh", "--cpu", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.timeout(300)
def test_every_part_runs_without_a_gpu(tmp_path: Path) -> None:
    with warm_python(tmp_path) as python:
        done = suite(tmp_path / "out", python=python)
    assert done.returncode == 0, done.stderr
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    assert set(found) == {"train-tiny", "memory-tiny", "sync-tiny", "step-tiny"}
    assert found["train-tiny"]["cases"]["tiny bfloat16"]["padding_waste"] == 0
    assert "aten::mm" in (tmp_path / "out/train-tiny.log").read_text(), "no profile"
    assert found["memory-tiny"]["phases"]["update"]["peak"] > found["memory-tiny"]["phases"]["update"]["after"]
    assert found["sync-tiny"]["seconds"]["sync"]["seconds"] > 0
    assert found["step-tiny"]["tokens_per_s"] > 0
    rows = [line.split("|")[1:3] for line in done.stdout.splitlines() if line.startswith("| ")]
    table = {(part.strip(), what.strip()) for part, what in rows}
    for row in (
        ("train-tiny", "tiny bfloat16, update"),
        ("memory-tiny", "update, bytes"),
        ("sync-tiny", "sleep frees"),
        ("step-tiny", "MFU"),
    ):
        assert row in table


def test_a_part_that_fails_is_told_and_the_next_one_runs(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(BENCHES)
    python.chmod(0o755)
    done = suite(tmp_path, "engines-nonsense", "train-tiny", python=str(python))
    assert done.returncode == 1, done.stderr
    assert "engines-nonsense: failed with 2" in done.stderr and "there is no nonsense" in done.stderr
    assert "failed: engines-nonsense" in done.stderr and "train-tiny: done" in done.stderr
    assert [path.name for path in tmp_path.glob("*.json")] == ["train-tiny.json"]


def test_a_report_among_what_else_is_printed_or_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "engines-tiny.out").write_text('loading {\n{\n "fsdp": {"gpus": 1}\n}\nbye\n')
    (tmp_path / "model-tiny.out").write_text("made")
    (tmp_path / "compare.out").write_text("a table\n")
    (tmp_path / "compare.json").write_text('{"ratio": 0.5}')
    command = [sys.executable, "-m", "scripts.bench.gpu_table", str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert said.splitlines()[2:] == ['| compare | report | {"ratio": 0.5} |', "| engines-tiny | fsdp | gpus 1 |"]
    assert json.loads((tmp_path / "engines-tiny.json").read_text()) == {"fsdp": {"gpus": 1}}


def test_a_part_that_there_is_not(tmp_path: Path) -> None:
    done = suite(tmp_path, "sleep-7b")
    assert done.returncode == 2 and "no part sleep-7b" in done.stderr
