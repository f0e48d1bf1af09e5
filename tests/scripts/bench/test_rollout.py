import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_a_quick_run_compares_equal_numbers_of_tokens() -> None:
    """scripts/bench/rollout.py itself refuses a contender that makes more or fewer."""
    command = [sys.executable, "-m", "scripts.bench.rollout", "--quick"]
    report = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    assert set(report["workloads"]) == {"ragged", "even", "quickstart"}
    for name, result in report["workloads"].items():
        assert result["requests"] == 16 and result["response_tokens"] >= 16, name
        assert set(result["tokens_per_s"]) == {"embedded", "generate, batch 16"}
        assert result["ratio"] > 0.5, name
    assert report["workloads"]["ragged"]["model"]["parameters"] == 3385600
