"""Sweeps that are started again: the state of each trial is read from its own run directory."""

import json
import math
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from configs.argv import normalise
from configs.schema.ppo import PPOConfig
from configs.schema.supervised import SFTConfig
from configs.sweeps.sweep_points import INTERRUPTED, Point, Result, read_results, write_result
from tests.runs import make_task, metrics_of, ppo_arguments, repeatable, run_ppo
from trainer import main_ppo
from trainer.cli.program import Program
from trainer.resilience.restart import RunLifecycle, run_with_restarts
from trainer.resilience.stopping import Stopping
from trainer.run.events import Events
from trainer.run.run_dir import GLOBAL_STEP, OUTCOME
from trainer.run.run_status import write_outcome
from trainer.tracking.tracker import Tracker


class Runs:
    """A program whose runs keep their run directories and end at once. fail: learning rates for which it raises.
    gone: missing files."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.planned: list[str] = []
        self.gone: list[str] = []
        self.fail: dict[float, BaseException] = {}

    def __call__(self, *words: str) -> int:
        def check(config: SFTConfig, typed: Any) -> list[str]:
            return []

        program = Program(
            name="trainer.main_sft", about="", root="sft_trainer", schema=SFTConfig, often_used=(), examples=(),
            check=check, run=self.run, inputs=lambda config: self.gone, plan=self.plan,
        )  # fmt: skip
        return program(["-m", "trainer.default_local_dir=x", "trainer.logger=[]", "trainer.objective=-train/loss", *words])

    def plan(self, config: SFTConfig) -> None:
        self.planned.append(Path(config.trainer.default_local_dir).name)

    def run(self, config: SFTConfig, output: list[str]) -> None:
        run_dir = Path(config.trainer.default_local_dir)
        self.begun.append(run_dir.name)
        lifecycle = RunLifecycle(config.trainer, run_dir)

        def attempt() -> None:
            tracker = Tracker([], run_dir, "p", "e", asdict(config))
            assert not (run_dir / OUTCOME).exists(), "the trial has not ended"
            lifecycle.started = True
            tracker.log({"train/loss": math.log10(config.optim.lr) ** 2, GLOBAL_STEP: 1}, 1)
            tracker.close()
            if config.optim.lr in self.fail:
                raise self.fail[config.optim.lr]

        run_with_restarts(lifecycle, attempt)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.chdir(tmp_path)
    return Runs()


GRID = "optim.lr=0.1,0.01"


def rows(out: str) -> list[list[str]]:
    """The words of the printed lines, without Hydra's own."""
    return [line.split() for line in out.splitlines() if not line.startswith("[")]


def test_finished_trial_is_not_run_again(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs(GRID) == 0 and runs.begun == ["0", "1"]
    lines = rows(capsys.readouterr().out)
    assert [line[:3] for line in lines] == [["point", "status", "objective"], ["0", "finished", "-1"], ["1", "finished", "-4"]]
    assert lines[2][4:] == ["optim.lr=0.01"]
    write_outcome(Path("x/1"), "finished", 12.25)
    written = {path: path.stat().st_mtime_ns for path in Path("x").glob("[01]/*")}
    assert runs(GRID, "trainer.dry_run=full") == 0 and runs.planned == ["0", "1"], "a plan is requested, not a result"
    out, err = capsys.readouterr()
    assert rows(out) == [] and err == ""
    runs.gone = ["data.train_files=a: no such file"]
    assert runs(GRID, "trainer.objective=train/loss", "trainer.max_restarts=2") == 0 and runs.begun == ["0", "1"]
    out, err = capsys.readouterr()
    assert [line[2] for line in rows(out)] == ["objective", "1", "4"], "the objective may be named after all trials ended"
    assert rows(out)[2][3] == "12.2", "the seconds of the run itself"
    assert [line for line in err.splitlines() if line.startswith("point")] == [
        f"point {point} was finished by an earlier start: it is left as it is (x/{point})" for point in "01"
    ]
    assert written == {path: path.stat().st_mtime_ns for path in Path("x").glob("[01]/*")} and len(written) > 4
    assert runs("optim.lr=0.1") == 0 and len(rows(capsys.readouterr().out)) == 2, "the trials of this start alone"
    assert runs("optim.lr=0.1,0.01,0.5") == 2 and runs.begun == ["0", "1"], "inputs are checked for trials that start"


def test_finished_trial_without_its_exported_model_is_run_again(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    words = (GRID, "trainer.export_dir=model")
    assert runs(*words) == 0
    Path("model/1").mkdir(parents=True)
    Path("model/1/config.json").write_text("{}")
    assert runs(*words) == 0 and runs.begun == ["0", "1", "0"]
    err = capsys.readouterr().err
    assert (
        "point 0 finished, and its exported model is missing, or another run's: it is exported again\n" in err
        and "point 1 was finished" in err
    )


def test_a_signal_in_the_last_step_of_a_trial_ends_the_sweep(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial ends by itself; those that follow do not begin."""
    whole = runs.run

    def signalled(config: SFTConfig, output: list[str]) -> None:
        stopping, events = (
            Stopping(config.trainer, Path(config.trainer.default_local_dir)),
            Events(Path(config.trainer.default_local_dir)),
        )
        with stopping:
            assert not stopping.is_due(0, {}, 0.0, events)
            signal.raise_signal(signal.SIGTERM)
            stopping.withdraw()
        stopping.check()
        whole(config, output)

    monkeypatch.setattr(runs, "run", signalled)
    monkeypatch.setattr(Stopping, "received", None)
    assert runs(GRID) == 143 and runs.begun == ["0"]
    assert [result.status for result in read_results(Path("x"))] == ["finished", "not started"]
    monkeypatch.setattr(runs, "run", whole)
    assert runs(GRID) == 0 and runs.begun == ["0", "1"]


def test_wrong_values_of_a_sweep_are_found_before_its_first_trial(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        runs("optim.lr=0.1,abc,0.2", "trainer.seed=1,x", "data.truncation=right,up,'left'", "optim.betas=[0.9,0.99],[0.8,0.9]")
        == 2
    )
    lines = capsys.readouterr().err.splitlines()
    assert runs.begun == [] and [line.partition(":")[0] for line in lines] == ["error"] * 3
    assert lines[0] == 'error: optim.lr="abc": must be a valid number' and 'trainer.seed="x"' in lines[1]
    assert 'data.truncation="up": must be one of ' in lines[2]
    assert runs("optim.lr=0.1,1e-2", "trainer.walltime=null,3600") == 0
    assert runs("optim.lr=0.1,1e-2", "trainer.project_name=a[b") == 2
    assert capsys.readouterr().err.startswith("error: trainer.project_name=a[b: cannot be parsed")


def test_killed_and_failed_trials_are_run_again(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.fail = {0.01: RuntimeError("broken")}
    assert runs("optim.lr=0.1,0.01,0.001") == 1
    Path("x/2/outcome.json").unlink()  # as a killed process leaves it
    assert [line[1:3] for line in rows(capsys.readouterr().out)[1:]] == [["finished", "-1"], ["failed", "-"], ["finished", "-9"]]
    runs.begun, runs.fail = [], {}
    assert runs("optim.lr=0.1,0.01,0.001") == 0 and runs.begun == ["1", "2"]
    output = [line for line in capsys.readouterr().err.splitlines() if line.startswith("point")]
    assert (
        len(output) == 3
        and output[1].startswith("point 1 failed: it is tried again")
        and output[2].startswith("point 2 was interrupted: it resumes")
    )
    assert json.loads(Path("x/1/outcome.json").read_text())["status"] == "finished"


def test_other_run_in_the_directory_of_a_trial_is_a_one_line_error(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs(GRID) == 0
    before = {path: path.read_bytes() for path in Path("x/1").iterdir()}
    capsys.readouterr()
    runs.begun = []
    assert runs("optim.lr=0.1,0.02") == 2 and runs.begun == []
    out, err = capsys.readouterr()
    (error,) = [line for line in err.splitlines() if line.startswith("error")]
    assert error.startswith("error: x/1 holds a run with optim.lr=0.01, not 0.02: take another trainer.default_local_dir")
    assert [line[1] for line in rows(out)] == ["status", "finished", "failed"]
    assert before == {path: path.read_bytes() for path in Path("x/1").iterdir()}


def test_resume_mode_disable_restarts_every_trial(runs: Runs) -> None:
    assert runs(GRID) == runs(GRID, "trainer.dry_run=full") == 0 and runs.planned == ["0", "1"], "every trial is planned"
    assert runs(GRID, "trainer.resume_mode=disable") == 0
    assert runs.begun == ["0", "1", "0", "1"] and Path("x/0/earlier_1").is_dir()


def test_ctrl_c_leaves_the_trial_interrupted(runs: Runs) -> None:
    runs.fail = {0.1: KeyboardInterrupt()}
    assert runs(GRID) == 130 and runs.begun == ["0"]
    assert json.loads(Path("x/0/outcome.json").read_text())["status"] == "interrupted"
    runs.fail = {}
    assert runs(GRID) == 0 and runs.begun == ["0", "0", "1"]


def test_objective_without_a_measurement_is_reported(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs(GRID, "trainer.objective=train/los") == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert errors == [
        f"error: trainer.objective=train/los: the run in x/{point} has no such metric; did you mean train/loss?" for point in "01"
    ]


def test_trial_that_did_not_start_after_a_signal_counts_as_interrupted(runs: Runs, tmp_path: Path) -> None:
    """With a launcher of concurrent trials: the sweeper gets the same result as for an interrupted one."""
    write_result(Point(0, (), tmp_path), Result(0, (), "interrupted", 143, None, 1.0))
    left = main_ppo.PROGRAM.point(
        OmegaConf.create(), normalise([], PPOConfig, "ppo_trainer"), Point(1, (), tmp_path), full_traceback=True
    )
    assert left == INTERRUPTED and [result.status for result in read_results(tmp_path)] == ["interrupted", "not started"]


def test_dry_run_leaves_no_table_and_no_file(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs(GRID, "model.path=a", "trainer.dry_run=config") == 0 and runs.begun == []
    assert [line[:3] for line in rows(capsys.readouterr().out)] == [["configuration", "is", "fine:"]] * 2
    assert list(tmp_path.iterdir()) == []
    assert runs("trainer.total_epochs=1,0", "trainer.dry_run=config") == 2, "one of them cannot work"


STOPPING_REWARD = """
import os, signal
from pathlib import Path
calls = Path({flag!r})
def compute_score(data_source, solution_str, ground_truth, extra_info):
    n = int(calls.read_text()) + 1
    calls.write_text(str(n))
    if n == {when}:
        os.kill(os.getpid(), signal.SIGTERM)
    return sum(a == b for a, b in zip(solution_str, ground_truth)) + solution_str.count("7") / 8
"""


@pytest.mark.soak
def test_real_grid_continues_after_a_signal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGTERM in the first of two steps of the second of three trials; 8 prompts times 4 responses a step."""
    task = make_task(tmp_path / "task")
    whole = run_ppo(task, tmp_path / "whole", "trainer.seed=2")
    handler = signal.getsignal(signal.SIGTERM)
    flag = tmp_path / "calls"
    flag.write_text("0")
    (task / "stopping.py").write_text(STOPPING_REWARD.format(flag=str(flag), when=32 * 2 + 5))
    words = ["-m", *ppo_arguments(task, tmp_path / "grid", "trainer.seed=1,2,3")]
    words += ["trainer.objective=critic/score/mean", f"reward.custom_reward_function.path={task}/stopping.py"]
    assert main_ppo.PROGRAM(words) == 143 and signal.getsignal(signal.SIGTERM) == handler
    statuses = [line[1] for line in rows(capsys.readouterr().out)[-3:]]
    assert statuses == ["finished", "interrupted", "not"] and not (tmp_path / "grid/2").exists()
    first = (tmp_path / "grid/0/metrics.jsonl").stat().st_mtime_ns
    assert main_ppo.PROGRAM(words) == 0
    assert [line[1] for line in rows(capsys.readouterr().out)[-3:]] == ["finished"] * 3
    assert (tmp_path / "grid/0/metrics.jsonl").stat().st_mtime_ns == first
    assert repeatable(metrics_of(tmp_path / "grid/1")) == repeatable(whole), "it resumed from its checkpoint, bitwise identical"
    assert int(flag.read_text()) == 32 * (2 + 2 + 2), "no step of the second trial ran twice"
    assert os.environ.get("HYDRA_FULL_ERROR") is None
