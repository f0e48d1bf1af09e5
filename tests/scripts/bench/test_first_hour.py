"""Edits of the benchmark are tasks; the table of a new user's first task (long: scripts/test.sh soak)."""

import json
import runpy
import statistics
from pathlib import Path
from random import Random

import pytest

from scripts.bench.first_hour import EDITS, edited, main
from trainer.new_task.create import create
from trainer.new_task.sizes import LocalMachine


@pytest.mark.parametrize("task", EDITS)
def test_edits_replace_functions_of_the_template(task: str, tmp_path: Path) -> None:
    template, functions = EDITS[task]
    create(tmp_path / task, template, LocalMachine())
    file = tmp_path / task / "task.py"
    before = file.read_text()
    file.write_text(edited(before, functions))
    made = runpy.run_path(str(file))
    assert len({made["make_problem"](Random(seed)) for seed in range(200)}) > 100
    if template == "own":
        _, answer = made["make_problem"](Random(0))
        assert made["compute_score"]("", answer, answer, {})["acc"] == 1.0
    else:
        games = [made["conversation"](Random(seed), *made["make_problem"](Random(seed))) for seed in range(20)]
        assert {len(turns) % 2 for turns in games} == {1}


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_every_task_gains_030_within_ten_minutes(tmp_path: Path) -> None:
    main(["--out", str(tmp_path / "table.json")])
    table = json.loads((tmp_path / "table.json").read_text())
    for task, gain in table["median_gain"].items():
        seconds = statistics.median(row["seconds"] for row in table["runs"] if row["task"] == task)
        assert gain >= 0.3 and seconds <= 600, table
