"""The experiment scripts, run by bash with a stand-in for Python: the commands that they would start."""

import os
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.layout.source import ROOT

# run_*_cpu.sh are small enough for complete runs in separate tests.
EXPERIMENTS = sorted(
    script.name
    for script in [*(ROOT / "scripts").glob("run_*.sh"), *(ROOT / "scripts").glob("sweep_*.sh")]
    if not script.name.endswith("_cpu.sh")
)
STAND_IN = """#!/usr/bin/env bash
printf '%s\\n' "$@" >>"$0.calls"
"""


@cache
def started_by(name: str, *arguments: str) -> tuple[str, ...]:
    """The words after ``python`` of the only command that scripts/``name`` starts. A stand-in for Python records them."""
    with TemporaryDirectory() as folder:
        python = Path(folder, "python")
        python.write_text(STAND_IN)
        python.chmod(0o755)
        environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "DATA": "data"}
        subprocess.run([ROOT / "scripts" / name, *arguments], env=environment, check=True, capture_output=True, timeout=60)
        return tuple(Path(folder, "python.calls").read_text().splitlines())
