"""`ray job submit` to a cluster on this machine, whose job server requires a token."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.layout.source import ROOT
from tests.nodes import Nodes, cluster
from tests.runs import make_task, metrics_of, ppo_arguments
from trainer.run.run_dir import checkpoint_steps
from trainer.run.run_status import read_outcome
from workers.controller.ports import free_port

REWARD = """
import os
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(os.environ["TEST_REWARD"])
"""
RUN = (sys.executable, "-m", "trainer.main_ppo")


PACKAGES = Path(sys.prefix) / "ray-default"
"""Packages that the job server needs in addition to Ray."""

pytestmark = pytest.mark.skipif(not PACKAGES.is_dir(), reason="there is no .venv/ray-default: scripts/setup_env.sh dev makes it")


class Jobs:
    def __init__(self, nodes: Nodes, server: str) -> None:
        self.server = f"http://{server}"
        self.environment = os.environ | nodes.environment

    def __call__(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        """`ray job` with these words, in the repository. more: additional environment variables."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "job", words[0], f"--address={self.server}", *words[1:]]
        return subprocess.run(command, cwd=ROOT, env=self.environment | more, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Two slots, and a job server on the loopback."""
    server = f"127.0.0.1:{free_port()}"
    head = (
        "--head", "--disable-usage-stats", "--dashboard-host=127.0.0.1", f"--dashboard-port={server.partition(':')[2]}",
        f"--dashboard-agent-listen-port={free_port()}",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(PACKAGES))
        with cluster(tmp_path_factory.mktemp("nodes"), slots=2, head=head) as nodes:
            yield Jobs(nodes, server)


@pytest.mark.soak
def test_wrong_key_is_one_line_in_the_log_of_the_job(jobs: Jobs) -> None:
    done = jobs("submit", "--working-dir=.", "--", *RUN, "recipe=quickstart", "trainer.sed=1")
    assert done.returncode == 1 and "Job entrypoint command failed with exit code 2" in done.stdout, done.stderr
    log = done.stdout.partition("Running entrypoint")[2].partition("ERR cli")[0]
    assert [line for line in log.splitlines() if line.startswith(("error", "Traceback"))] == [
        "error: trainer.sed: there is no such key; did you mean trainer.seed?"
    ]


@pytest.mark.soak
def test_program_joins_the_cluster_that_runs_the_job(jobs: Jobs, tmp_path: Path) -> None:
    """Workers get slots of it; a reward file in the working directory is found; environment variables of the job arrive."""
    task = make_task(tmp_path / "task")
    (tmp_path / "work").mkdir()
    (tmp_path / "work/mine.py").write_text(REWARD)
    environment = {"env_vars": {"TEST_REWARD": "0.25", "PYTHONPATH": f"{ROOT}:{PACKAGES}"}}
    words = ppo_arguments(task, tmp_path / "run", "trainer.backend=ray", "trainer.n_gpus_per_node=2")
    words.append("reward.custom_reward_function.path=mine.py")
    done = jobs(
        "submit", f"--working-dir={tmp_path}/work", f"--runtime-env-json={json.dumps(environment)}", "--",
        *RUN, *words, "reward.num_workers=1",
    )  # fmt: skip
    assert done.returncode == 0 and "succeeded" in done.stdout, done.stdout + done.stderr
    steps = metrics_of(tmp_path / "run")
    assert [step["critic/score/mean"] for step in steps] == [0.25, 0.25]
    too_many = jobs(
        "submit", f"--working-dir={tmp_path}/work", f"--runtime-env-json={json.dumps(environment)}", "--",
        *RUN, *words, "reward.num_workers=0", "trainer.n_gpus_per_node=3", "data.train_batch_size=9",
        "actor_rollout_ref.actor.ppo_mini_batch_size=9", "timeouts.join=1",
    )  # fmt: skip
    assert too_many.returncode == 1 and "the nodes of this Ray have [2], 2 together" in too_many.stdout, too_many.stdout


@pytest.mark.soak
def test_stopped_job_saves_within_its_grace_time(jobs: Jobs, tmp_path: Path) -> None:
    task = make_task(tmp_path / "task")
    environment = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}
    words = ppo_arguments(task, tmp_path / "run", "trainer.backend=ray", "reward.num_workers=1")
    words.append("trainer.total_training_steps=999")
    begun = jobs("submit", "--no-wait", "--working-dir=.", f"--runtime-env-json={json.dumps(environment)}", "--", *RUN, *words)
    number = re.search(r"Job '(\w+)' submitted", begun.stdout)
    assert number is not None, begun.stderr
    deadline = time.monotonic() + 90
    while not (tmp_path / "run/metrics.jsonl").exists() or len(metrics_of(tmp_path / "run")) < 2:
        assert time.monotonic() < deadline, jobs("logs", number[1]).stdout
        time.sleep(0.1)
    stopped = jobs("stop", number[1])
    assert "was stopped" in stopped.stdout, stopped.stdout + stopped.stderr
    outcome = read_outcome(tmp_path / "run")
    assert outcome is not None and outcome.status == "interrupted", jobs("logs", number[1]).stdout
    assert checkpoint_steps(tmp_path / "run") == [len(metrics_of(tmp_path / "run"))]


@pytest.mark.soak
def test_request_without_the_token_starts_nothing(jobs: Jobs, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "none")
    for token in ("0" * 64, ""):
        done = jobs("submit", "--", "touch", str(tmp_path / "here"), RAY_AUTH_TOKEN=token, RAY_AUTH_TOKEN_PATH=nowhere)
        assert done.returncode != 0 and "uthentication" in done.stderr, done.stderr
    assert not (tmp_path / "here").exists()
