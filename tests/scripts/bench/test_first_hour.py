"""Edits of the benchmark are tasks; the table of a new user's first task (long: scripts/test.sh soak)."""

import json
import runpy
import statistics
from pathlib import Path
from random import Random
from typing import Any

import pytest

from scripts.bench import first_hour
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


def test_runs_before_an_interruption_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(task: str, seed: int, folder: Path) -> dict[str, Any]:
        if seed == 2:
            raise KeyboardInterrupt
        return {"task": task, "seed": seed, "before": 0.25, "after": 0.5, "seconds": 1.0, "curve": [[0, 0.25], [10, 0.5]]}

    monkeypatch.setattr(first_hour, "learn", measured)
    out = tmp_path / "table.jsonl"
    for task in ("sticks", "brackets"):
        with pytest.raises(KeyboardInterrupt):
            main(["--tasks", task, "--seeds", "1", "2", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["task"], row["seed"], row["after"]) for row in rows] == [("sticks", 1, 0.5), ("brackets", 1, 0.5)]


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_every_task_gains_030_within_ten_minutes(tmp_path: Path) -> None:
    main(["--out", str(tmp_path / "table.jsonl")])
    table = [json.loads(line) for line in (tmp_path / "table.jsonl").read_text().splitlines()]
    for task in EDITS:
        rows = [row for row in table if row["task"] == task]
        assert statistics.median(row["after"] - row["before"] for row in rows) >= 0.3, table
        assert statistics.median(row["seconds"] for row in rows) <= 600, table
