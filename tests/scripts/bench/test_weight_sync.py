import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_a_quick_run_fills_the_table() -> None:
    command = [sys.executable, "-m", "scripts.bench.weight_sync", "--quick", "--engines", "embedded", "--ranks", "2", "--apart"]
    out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    titles, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")
    ]
    table = [dict(zip(titles, row, strict=True)) for row in rows]
    assert [(row["engine"], row["dtype"], row["ranks"]) for row in table] == [
        ("embedded", "float32", "2"),
        ("embedded", "bfloat16", "2"),
    ]
    for row in table:
        assert all(float(row[name]) > 0 for name in ("memcpy GB/s", "bare GB/s", "sync GB/s", "verify %", "apart GB/s"))
