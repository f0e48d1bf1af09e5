import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import rollout
from tests.workers.rollout.vllm_workers import CPU_BUILD

ROOT = Path(__file__).parents[3]


def bench(*arguments: str) -> dict[str, Any]:
    """Workloads of the report of a bench in a separate process, whose stdout is only the report."""
    command = [sys.executable, "-m", "scripts.bench.rollout", "--quick", *arguments]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)["workloads"]


def test_quick_run_compares_equal_numbers_of_tokens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """scripts/bench/rollout.py itself asserts that each contender generates exactly the requested tokens."""
    monkeypatch.setattr(sys, "argv", ["rollout.py", "--quick", "--engines", "embedded", "--workload", "ragged"])
    rollout.main()
    report = json.loads(capsys.readouterr().out)["workloads"]
    assert set(report) == {"ragged"}
    for name, result in report.items():
        assert result["requests"] == 16 and result["response_tokens"] >= 16, name
        assert set(result["tokens_per_cpu_second"]) == set(result["tokens_per_second"]) == {"embedded", "generate, batch 16"}
        assert result["best_generate"] == "generate, batch 16" and result["missing"] == {}
        assert result["cpu_ratios"]["embedded"] == 1.0 and 0 < result["cpu_ratios"]["generate, batch 16"] < 2, name
    assert report["ragged"]["model"]["parameters"] == 3385600


@CPU_BUILD
@pytest.mark.soak
def test_several_engines_are_compared_and_an_unsupported_model_is_reported_as_missing() -> None:
    report = bench("--engines", "embedded", "vllm", "--workload", "ragged", "--workload", "quickstart", "--reference", "vllm")
    ragged, quickstart = report["ragged"], report["quickstart"]
    assert ragged["wall_ratios"].keys() == {"embedded", "vllm", "generate, batch 16"} and ragged["wall_ratios"]["vllm"] == 1.0
    assert "vllm" not in quickstart["cpu_seconds"] and quickstart["cpu_ratios"] == {}
    assert "on CPU vLLM has attention for heads of 32" in quickstart["missing"]["vllm"]


def test_ratios_of_speed_are_taken_within_a_round() -> None:
    """In the second round the machine is busy and slows both."""
    found = rollout.ratios({"a": [1.0, 10.0, 2.0], "b": [0.5, 5.0, 4.0]}, "a")
    assert found == {"a": 1.0, "b": pytest.approx(2.0)}
