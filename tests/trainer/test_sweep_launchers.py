"""The launchers that start points elsewhere: submitit's, and a cluster's jobs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.points import read_results
from tests.layout.source import ROOT
from tests.nodes import cluster
from tests.runs import make_task, metrics_of, ppo_arguments
from workers.controller.shell import free_port


def test_points_through_submitit_chosen_by_optuna(tmp_path: Path) -> None:
    """Two processes of submitit's at the same time; their results come back to the study and to the table. Then a third."""
    task = make_task(tmp_path / "task")
    words = [
        "-m", "hydra/launcher=submitit_local", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=2",
        *ppo_arguments(task, tmp_path / "search", "trainer.total_training_steps=1", "trainer.objective=critic/score/mean"),
        "actor_rollout_ref.actor.optim.lr=tag(log,interval(1e-5,1e-3))", "actor_rollout_ref.rollout.n=choice(2,4)",
    ]  # fmt: skip

    def search(n_trials: int) -> list[str]:
        command = [sys.executable, "-m", "trainer.main_ppo", *words, f"hydra.sweeper.n_trials={n_trials}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return [line for line in done.stdout.splitlines() if not line.startswith("[")]

    best, *table = search(2)
    results = read_results(tmp_path / "search")
    assert [(result.number, result.status, result.code) for result in results] == [(0, "finished", 0), (1, "finished", 0)]
    for result in results:
        (step,) = metrics_of(tmp_path / "search" / str(result.number))
        assert result.objective == step["critic/score/mean"]
        assert [word.partition("=")[0] for word in result.overrides] == [
            "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.rollout.n",
        ]  # fmt: skip
    top = max(results, key=lambda result: result.objective or 0.0)
    assert best.startswith(f"best: point {top.number}, critic/score/mean with actor_rollout_ref.actor.optim.lr=")
    assert [line.split()[:2] for line in table] == [["point", "status"], ["0", "finished"], ["1", "finished"]]
    assert list((tmp_path / "search/.submitit").glob("*/*_0_log.out")), "they ran in submitit's processes"
    again = search(3)
    assert [line.split()[:2] for line in again[1:]] == [["point", "status"], ["2", "finished"]]


@pytest.mark.soak
def test_ray_job_submit(tmp_path: Path) -> None:
    """A cluster on this machine with a job server; the job joins it, and its workers run there."""
    pytest.importorskip("aiohttp_cors", reason="ray job submit needs ray[default]")
    task = make_task(tmp_path / "task")
    joins = ("trainer.backend=ray", "trainer.n_gpus_per_node=2", "+ray_kwargs.ray_init.address=auto")
    server = f"127.0.0.1:{free_port()}"
    head = ("--head", "--disable-usage-stats", "--dashboard-host=127.0.0.1", f"--dashboard-port={server.partition(':')[2]}")
    with cluster(tmp_path, 2, head) as nodes:
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "job", "submit", f"--address=http://{server}",
            f'--runtime-env-json={{"env_vars": {{"PYTHONPATH": "{os.pathsep.join([str(ROOT), *sys.path[1:]])}"}}}}', "--",
            sys.executable, "-m", "trainer.main_ppo", *ppo_arguments(task, tmp_path / "run", *joins),
        ]  # fmt: skip
        done = subprocess.run(command, env=os.environ | nodes.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "succeeded" in done.stdout, done.stdout + done.stderr
    assert len(metrics_of(tmp_path / "run")) == 2
