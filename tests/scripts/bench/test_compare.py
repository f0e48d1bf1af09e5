"""Comparison of synthetic reports: no rival is installed, nothing is measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import compare

WORK = ["--task", "quickstart", "--steps", "2"]


def report(name: str, *walls: float, cpu: float = 0.0, **changes: Any) -> dict[str, Any]:
    """Report of a run whose steps take ``walls`` seconds."""
    steps = [
        {
            "wall_s": wall,
            "cpu_s": cpu or wall,
            "prompt_tokens": 56,
            "response_tokens": 64,
            "updates": 1,
            "phases": {"gen": wall / 4},
        }
        for wall in walls
    ]
    return {"rival": name, "dtype": "float32", "threads": 1, "steps": steps, **changes}


def with_step(**changes: Any) -> dict[str, Any]:
    """A rival's report whose second step differs."""
    made = report("trl", 1.0, 1.0)
    made["steps"][1] |= changes
    return made


@pytest.mark.parametrize(
    ("rival", "words"),
    [
        (with_step(prompt_tokens=57), "prompt tokens of measured step 2: tandem 56, trl 57"),
        (with_step(response_tokens=60), "response tokens of measured step 2: tandem 64, trl 60"),
        (with_step(updates=2), "updates of measured step 2: tandem 1, trl 2"),
        (report("trl", 1.0, 1.0, dtype="bfloat16"), "dtype: tandem float32, trl bfloat16"),
        (report("trl", 1.0, 1.0, threads=2), "threads: tandem 1, trl 2"),
        (report("trl", 1.0), "measured steps: tandem 2, trl 1"),
    ],
)
def test_different_work_of_the_sides_is_named(rival: dict[str, Any], words: str) -> None:
    assert compare.difference(report("tandem", 0.5, 0.5), rival) == words


def test_ratios_are_of_medians_within_a_round() -> None:
    """In the second round the machine is busy: both sides are slow."""
    rounds = [
        (report("tandem", 0.5, 0.5, 9.0, cpu=0.6), report("trl", 1.0, 1.0, 1.0, cpu=0.8)),
        (report("tandem", 2.0, 2.0, 2.0, cpu=0.8), report("trl", 4.0, 5.0, 6.0, cpu=0.8)),
        (report("tandem", 0.9, 0.9, 0.9, cpu=0.8), report("trl", 1.0, 1.0, 1.0, cpu=1.6)),
    ]
    found = compare.ratios(rounds)
    assert found == {"wall_s": pytest.approx([0.5, 0.4, 0.9]), "cpu_s": pytest.approx([0.75, 1.0, 0.5])}
    assert compare.ratio_lines("trl", found) == [
        "tandem / trl, wall: 0.50 (0.40 to 0.90, 3 rounds)",
        "tandem / trl, CPU: 0.75 (0.50 to 1.00, 3 rounds)",
    ]
    assert compare.middle_of([tandem for tandem, _ in rounds])["steps"][0]["wall_s"] == 0.9


class Sides:
    """Stand-ins for both sides, which record the order of runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rival_report: dict[str, Any]) -> None:
        self.ran: list[str] = []
        self.tasks: list[dict[str, Any]] = []
        self.rival_report = rival_report
        monkeypatch.setattr(compare, "installed", lambda rival, env: Path("python"))
        monkeypatch.setattr(compare, "run_tandem", self.tandem)
        monkeypatch.setattr(compare, "run_rival", self.rival)

    def tandem(self, work: Any, task: dict[str, Any], run_dir: Path, overrides: list[str]) -> dict[str, Any]:
        assert overrides == ["trainer.backend=local"]
        self.ran.append("tandem")
        return report("tandem", 0.5, 0.5)

    def rival(self, rival: str, python: Path, folder: Path, threads: int) -> dict[str, Any]:
        self.ran.append(rival)
        self.tasks.append(json.loads((folder / "task.json").read_text()))
        return self.rival_report


def test_sides_alternate_and_all_figures_are_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sides = Sides(monkeypatch, report("trl", 1.0, 1.0, cpu=2.0))
    files = ["--json", str(tmp_path / "all.json"), "--plot", str(tmp_path / "steps.png")]
    compare.main(["--rival", "trl", *WORK, "--quick", *files, "trainer.backend=local"])
    assert sides.ran == ["tandem", "trl", "trl", "tandem", "tandem", "trl"]
    table = capsys.readouterr().out
    assert "tandem / trl, wall: 0.50 (0.50 to 0.50, 3 rounds)\ntandem / trl, CPU: 0.25" in table
    figures = json.loads((tmp_path / "all.json").read_text())
    assert figures["ratios"]["wall_s"] == [0.5, 0.5, 0.5] and len(figures["rounds"]) == 3
    assert figures["settings"]["steps"] == 2 and figures["overrides"] == ["trainer.backend=local"]
    assert (tmp_path / "steps.png").stat().st_size > 5000
    task = sides.tasks[0]
    assert (task["prompts"], task["n"], task["steps"], task["warmup"], task["kl_coef"]) == (4, 2, 2, 5, 0.0)
    assert task["lengths"] is None and task["ignore_eos"]


def test_sides_with_different_work_give_one_line_and_no_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Sides(monkeypatch, with_step(response_tokens=63))
    with pytest.raises(SystemExit) as stopped:
        compare.main(["--rival", "trl", *WORK, "--quick", "--json", str(tmp_path / "all.json"), "trainer.backend=local"])
    words = "no ratio, the sides differ in round 1: response tokens of measured step 2: tandem 64, trl 63"
    assert stopped.value.code == words
    assert capsys.readouterr().out == "" and not (tmp_path / "all.json").exists()


def test_a_failed_rival_ends_the_comparison(tmp_path: Path) -> None:
    """The program `false`, which takes any arguments, replaces the driver's Python."""
    with pytest.raises(SystemExit, match="the run of trl ended with 1"):
        compare.run_rival("trl", Path("false"), tmp_path, 1)


def test_pythonpath_is_not_passed_to_the_rival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folders would come before the packages of the rival's environment."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf \'["%s", "%s"]\' "$PYTHONPATH" "$OMP_NUM_THREADS" > {tmp_path}/out.json\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", "/tandem")
    assert compare.run_rival("trl", python, tmp_path, 3) == ["", "3"]
