"""Complete runs over two Ray nodes on this machine: one starts late, one dies, one replaces it."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.nodes import Nodes, cluster
from tests.runs import make_task, metrics_of, ppo_arguments, run_ppo
from tests.trainer.ppo.test_loop_placement import ALL_ROLES, assert_same, spans_of
from tests.trainer.ppo.test_loop_stops import events_of

ROOT = Path(__file__).parents[3]
SIX = ("trainer.total_training_steps=6", "trainer.save_freq=2")

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"))


def start(nodes: Nodes, task: Path, run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    """A run on two nodes of one slot each."""
    joined = ("trainer.backend=ray", "trainer.nnodes=2", f"ray_kwargs.ray_init.address={nodes.address}")
    command = [sys.executable, "-m", "trainer.main_ppo", *ppo_arguments(task, run_dir, *ALL_ROLES, *joined, *overrides)]
    environment = os.environ | nodes.environment
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(run: subprocess.Popen[str], text: str) -> str:
    """The first line on stderr that contains ``text``."""
    assert run.stderr is not None
    line = next((line for line in run.stderr if text in line), None)
    assert line is not None, f"the run ended without {text!r}"
    return line


def wait_for_step(run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 240
    while not (run_dir / "metrics.jsonl").exists() or len(metrics_of(run_dir)) < step:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_run_waits_for_a_late_node(task: Path, tmp_path: Path) -> None:
    """Actor and critic on a node each: the same numbers as on one node."""
    alone = run_ppo(task, tmp_path / "alone", *ALL_ROLES)
    with cluster(tmp_path, slots=1) as nodes:
        early = start(nodes, task, tmp_path / "early", "timeouts.join=1")
        _, message = early.communicate()
        assert early.returncode == 2
        assert "needs 2 slots (tandem_slot), [1, 1] on 2 node(s); the nodes of this Ray have [1], 1 together after 1 s" in message
        run = start(nodes, task, tmp_path / "run", "placement=colocate_pairs")
        assert "the nodes of this Ray have [1]: waiting for more, 300 s at most" in wait_for(run, "waiting")
        nodes.join()
        _, message = run.communicate()
    assert run.returncode == 0, message
    assert_same(metrics_of(tmp_path / "run"), alone)
    assert {tuple(pools) for pools, _, _ in spans_of(tmp_path / "run")[1].values()} == {("actor",), ("critic",), ()}


def test_dead_node_is_named_and_the_run_ends(task: Path, tmp_path: Path) -> None:
    with cluster(tmp_path, slots=1) as nodes:
        node = nodes.join()
        run = start(nodes, task, tmp_path / "run", "trainer.total_training_steps=100000")
        wait_for_step(tmp_path / "run", 2)
        nodes.die(node)
        died = time.monotonic()
        _, message = run.communicate(timeout=120)
        assert time.monotonic() - died < 90
    assert run.returncode == 1
    (line,) = [line for line in message.splitlines() if line.startswith("error: ")]
    assert re.match(r"error: rank \d failed in .*: its process or its node is lost: The actor", line), line


def test_run_resumes_on_a_replacement_node(task: Path, tmp_path: Path) -> None:
    """From the last checkpoint, with the numbers of an uninterrupted run."""
    alone = run_ppo(task, tmp_path / "alone", *ALL_ROLES, *SIX)
    with cluster(tmp_path, slots=1) as nodes:
        node = nodes.join()
        run = start(nodes, task, tmp_path / "run", *SIX, "placement=colocate_pairs", "trainer.max_restarts=1")
        wait_for_step(tmp_path / "run", 3)
        nodes.die(node)
        nodes.join()
        _, message = run.communicate(timeout=240)
    assert run.returncode == 0, message
    assert_same(metrics_of(tmp_path / "run"), alone)
    ((_, kind, text),) = events_of(tmp_path / "run")
    assert kind == "restart" and "it resumes from step" in text
