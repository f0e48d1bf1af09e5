import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "dtypes", "words"), [("2", ["bfloat16"], []), ("1", ["float32", "bfloat16"], ["--apart"])])
def test_quick_run_fills_the_table(ranks: str, dtypes: list[str], words: list[str]) -> None:
    options = ["--quick", "--engines", "embedded", "--ranks", ranks, "--dtypes", *dtypes, *words]
    command = [sys.executable, "-m", "scripts.bench.weight_sync", *options]
    out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    titles, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")
    ]
    table = [dict(zip(titles, row, strict=True)) for row in rows]
    assert [(row["engine"], row["dtype"], row["ranks"]) for row in table] == [("embedded", dtype, ranks) for dtype in dtypes]
    for row in table:
        assert all(float(row[name]) > 0 for name in ("memcpy GB/s", "bare GB/s", "sync GB/s", "verify %"))
        assert not words or float(row["apart GB/s"]) > 0
