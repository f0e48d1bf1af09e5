"""The bench of shared prompts, in little."""

import json
import subprocess
import sys


def test_prompts_that_are_computed_once_cost_less() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "scripts.bench.shared_prompts", "--quick"], capture_output=True, text=True, check=True
    )
    case = json.loads(ran.stdout)["cases"]["64x8"]
    assert case["tokens"] == 16 * 72 and case["computed"] == 2 * 64 + 16 * 8
    assert 0.1 < case["f+b"]["of_whole"] < 0.8 and 0.1 < case["log-probs"]["of_whole"] < 0.8
    assert "| 64 x 8 | 1152 | 256 |" in ran.stderr
