"""The bench of the model server: its smoke version generates the same number of tokens both ways."""

import json
import subprocess
import sys

import pytest

from tests.layout.source import ROOT


@pytest.mark.parametrize("stream", [(), pytest.param(("--stream",), marks=pytest.mark.soak)])
def test_quick_bench_measures_both_ways(stream: tuple[str, ...]) -> None:
    command = [sys.executable, "scripts/bench/serve.py", "--quick", *stream]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["ratio"] > 0 and found["generate_tokens_per_s"] > 0 and found["serve_tokens_per_s"] > 0
