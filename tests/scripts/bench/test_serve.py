"""The bench of the model server: its smoke version generates the same number of tokens all ways."""

import json
import subprocess
import sys

from tests.layout.source import ROOT


def test_quick_bench_measures_all_ways() -> None:
    command = [sys.executable, "scripts/bench/serve.py", "--quick"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    for way in ("generate", "served", "streamed"):
        assert found[way]["tokens_per_s"] > 0 and found[way]["cpu_s"] > 0
    assert (found["generate"]["wall_ratio"], found["generate"]["cpu_ratio"]) == (1, 1)
    assert found["served"]["wall_ratios"] != found["streamed"]["wall_ratios"]
