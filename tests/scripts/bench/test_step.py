"""Quick real runs: exact counts of the work, and plausibility checks of the times."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from scripts.bench import step


def chosen(*arguments: str) -> step.Workload:
    parser = argparse.ArgumentParser()
    step.add_workload(parser)
    return step.workload(parser.parse_args(arguments))


def test_task_sets_defaults_and_typed_options_override_them() -> None:
    assert chosen() == step.Workload()
    small = chosen("--task", "quickstart", "--prompts", "8")
    assert (small.prompts, small.hidden_size, small.kl_coef, small.steps) == (8, 96, 0.0, 40)
    quick = chosen("--task", "ragged", "--quick", "--steps", "3")
    assert (quick.ragged, quick.prompts, quick.response_length, quick.steps) == (True, 4, 8, 3)
    with pytest.raises(SystemExit, match="--warmup 0: a step is measured from the end of one before it"):
        chosen("--warmup", "0")


@pytest.mark.soak
def test_ragged_run_has_the_drawn_lengths(tmp_path: Path) -> None:
    work = chosen("--task", "ragged", "--quick", "--response_length", "40")
    task = step.make_task(work, tmp_path, seed=3)
    lengths = json.loads(Path(task["lengths"]).read_text())
    assert len(lengths) == 3 * 8 and 1 <= min(lengths) < max(lengths) <= 40
    assert pq.read_metadata(task["train"]).num_rows == 3 * 4
    report = step.run_tandem(work, task, tmp_path / "run", ["trainer.backend=local", "actor_rollout_ref.actor.ppo_epochs=2"])
    made = [one["response_tokens"] for one in report["steps"]]
    assert made == [sum(lengths[8:16]), sum(lengths[16:])]  # without the warm-up
    assert [(one["prompt_tokens"], one["updates"]) for one in report["steps"]] == [(8 * 17, 2)] * 2
    assert (report["dtype"], report["threads"]) == ("float32", 1)
    for one in report["steps"]:
        assert {"gen", "ref", "update_actor", "sync"} <= one["phases"].keys()
        assert 0 < sum(one["phases"].values()) <= one["wall_s"] < 30
        assert 0 < one["cpu_s"] < 4 * one["wall_s"] + 0.1
    assert report["startup_s"] > 0.5


@pytest.mark.soak
def test_quick_step_reports_its_phases(capsys: pytest.CaptureFixture[str]) -> None:
    step.main(["--task", "quickstart", "--quick", "--warmup", "1", "trainer.backend=local"])
    output = capsys.readouterr()
    figures = json.loads(output.out)
    assert figures["tokens_per_step"] == 8 * (7 + 8)
    assert figures["tokens_per_s"] == pytest.approx(120 / figures["seconds"]["step"])
    assert "ref" not in figures["seconds"] and figures["settings"]["overrides"] == ["trainer.backend=local"]
    assert 0 < figures["share_outside_generate_log_prob_update"] < 1 and 0 < figures["mfu"] < 1
    assert "tandem" in output.err and "update_actor" in output.err


def test_a_failed_run_ends_the_bench(tmp_path: Path) -> None:
    work = chosen("--quick")
    task = step.make_task(work, tmp_path, seed=0)
    with pytest.raises(SystemExit, match="the run ended with 2"):
        step.run_tandem(work, task, tmp_path / "run", ["trainer.backend=nowhere"])


def test_cpu_seconds_exclude_the_daemons_of_ray() -> None:
    """Two busy processes, one of which has the name raylet."""
    busy = "import time, sys\nwhile time.process_time() < 0.3: pass\ntime.sleep(60)"
    mother = [sys.executable, "-c", f"import subprocess, sys, time\n[subprocess.Popen([name, '-c', {busy!r}], "
              "executable=sys.executable) for name in ('python', 'raylet')]\ntime.sleep(60)"]  # fmt: skip
    controller = psutil.Process(subprocess.Popen(mother).pid)
    try:
        everyone = [controller]
        until = time.monotonic() + 30
        while len(everyone) < 3 or any(step.seconds_of(process) < 0.2 for process in everyone[1:]):
            assert time.monotonic() < until
            time.sleep(0.05)
            everyone = [controller, *controller.children(recursive=True)]
        counted = step.own_processes(controller)
        assert [process.cmdline()[0] for process in counted] == [sys.executable, "python"]
        assert step.seconds_of(counted[1]) >= 0.2
    finally:
        for process in [*controller.children(recursive=True), controller]:
            process.kill()
        controller.wait()
