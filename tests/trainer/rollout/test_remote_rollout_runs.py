"""Complete runs with two rollout replicas in a pool of their own, one of which is killed; ticks of four steps."""

import os
import re
import signal
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import trainer.rollout.remote_rollout as remote_rollout
from tests.runs import make_task, metrics_of, ppo_arguments, repeatable, run_ppo
from tests.trainer.ppo.test_loop_stops import events_of
from tests.trainer.test_main_ppo_runs import survivors
from trainer import main_ppo
from trainer.rollout.remote_rollout import RemoteRollout

SPLIT = (
    "algorithm=grpo", "trainer.backend=ray", "placement=split", "trainer.n_gpus_per_node=3", "trainer.save_freq=2",
    *(f"placement.pools.{name}={{nodes: 1, gpus: {gpus}, fraction: 1.0}}" for name, gpus in (("actor", 1), ("rollout", 2))),
    "data.max_response_length=24", "actor_rollout_ref.rollout.max_num_seqs=6",
)  # fmt: skip
POLICIES = {
    "static": ("actor_rollout_ref.rollout.balance=static",),
    "partial": (
        "async_training.mode=partial", "algorithm.rollout_correction.rollout_is=token", "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"), train_size=64, sft_size=8)


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_rollout, "STEPS", 4)


class Killer:
    """Kills the worker of a replica directly after the calls with these numbers were started on it, counted by method.

    Before the calls is_alive and sync_weights.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, run_dir: Path, method: str, numbers: Container[int], pool: str = "rollout.1"
    ) -> None:
        """pool: of the replica, rollout.1 or rollout."""
        self.killed = list[int]()
        self.called = 0
        self._log = run_dir / "logs" / f"rank_0_{pool}.log"
        killed = int(pool.partition(".")[2] or 0)
        start, sync = RemoteRollout.start_call, RemoteRollout._sync

        def kill_and_sync(rollout: RemoteRollout, numbers_of_groups: Any, **options: Any) -> Any:
            if method == "sync_weights":
                self._kill(numbers)
            return sync(rollout, numbers_of_groups, **options)

        def start_and_kill(rollout: RemoteRollout, call: Any, replica: int, *words: Any, **options: Any) -> Any:
            if call.method == method == "is_alive" and replica == killed:
                self._kill(numbers)
            started = start(rollout, call, replica, *words, **options)
            if call.method == method != "is_alive" and replica == killed:
                self._kill(numbers)
            return started

        monkeypatch.setattr(RemoteRollout, "start_call", start_and_kill)
        monkeypatch.setattr(RemoteRollout, "_sync", kill_and_sync)

    def _kill(self, numbers: Container[int]) -> None:
        self.called += 1
        if self.called in numbers:
            self.killed.append(int(re.findall(r"^--- process (\d+)", self._log.read_text(), re.MULTILINE)[-1]))
            os.kill(self.killed[-1], signal.SIGKILL)


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors in the folder, by file and name. Except json, which has the configuration of the run."""
    files = sorted(folder.rglob("*.safetensors"))
    found = {f"{file.relative_to(folder)}:{name}": value for file in files for name, value in load_file(file).items()}
    return {name: value for name, value in found.items() if not name.endswith(":json")}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() and wanted
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def words(run_dir: Path, policy: str) -> tuple[str, ...]:
    return (*SPLIT, *POLICIES[policy], f"trainer.rollout_data_dir={run_dir / 'rollouts'}")


@pytest.fixture(scope="module")
def undisturbed(task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run directories by policy, filled on first use."""
    return {policy: tmp_path_factory.mktemp(policy) / "run" for policy in POLICIES}


@pytest.mark.parametrize(
    ("policy", "method", "number"),
    [
        pytest.param("static", "advance", 9, marks=pytest.mark.soak),
        pytest.param("static", "is_alive", 2, marks=pytest.mark.soak),
        pytest.param("partial", "advance", 5, marks=pytest.mark.soak),
        pytest.param("partial", "suspend", 1, marks=pytest.mark.soak),
    ],
)
def test_a_killed_replica_is_replaced_and_the_run_is_the_same(
    policy: str,
    method: str,
    number: int,
    task: Path,
    tmp_path: Path,
    undisturbed: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it generates, before a sync, and while its unfinished responses are taken. The trainer's worker lives on."""
    run_dir, whole = tmp_path / "run", undisturbed[policy]
    if not whole.exists():
        run_ppo(task, whole, *words(whole, policy))
    killer = Killer(monkeypatch, run_dir, method, {number})
    steps = run_ppo(task, run_dir, *words(run_dir, policy), "trainer.max_restarts=1")
    assert len(killer.killed) == 1
    assert repeatable(steps) == repeatable(metrics_of(whole))
    assert_same(tensors(run_dir / "rollouts"), tensors(whole / "rollouts"))
    assert_same(tensors(run_dir / "global_step_2"), tensors(whole / "global_step_2"))
    ((step, kind, text),) = events_of(run_dir)
    assert (step, kind) == (0, "replaced"), "in the first step"
    assert re.fullmatch(
        rf"replica 1 of rollout was replaced, 1 of 1: rank 0 failed in .* \(rollout engine embedded, replica 1\): "
        rf"process {killer.killed[0]} died: killed by a signal .*",
        text,
    )
    starts = {
        log.name: len(re.findall(r"^--- process", log.read_text(), re.MULTILINE)) for log in (run_dir / "logs").glob("rank_*")
    }
    assert starts == {"rank_0_actor.log": 1, "rank_0_rollout.0.log": 1, "rank_0_rollout.1.log": 2}
    assert survivors(str(run_dir)) == []


def test_every_prompt_is_trained_once(task: Path, undisturbed: dict[str, Path]) -> None:
    if not (whole := undisturbed["static"]).exists():
        run_ppo(task, whole, *words(whole, "static"))
    groups = torch.cat([load_file(whole / "rollouts" / f"step_{step}.safetensors")["rows.group"] for step in (1, 2)])
    assert sorted(groups.tolist()) == sorted([*range(16)] * 4)


@pytest.mark.soak
def test_without_restarts_a_death_ends_the_run(
    task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    killer = Killer(monkeypatch, run_dir, "advance", {2})
    assert main_ppo.PROGRAM(ppo_arguments(task, run_dir, *words(run_dir, "static"))) == 1
    assert events_of(run_dir) == [] and survivors(str(run_dir)) == []
    line = (
        f"rank 0 failed in generation (rollout engine embedded, replica 1): process {killer.killed[0]} died: killed by a signal"
    )
    assert capfd.readouterr().err.count(line) == 1


@pytest.mark.soak
def test_a_death_in_a_sync_restarts_the_run(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    Killer(monkeypatch, run_dir, "sync_weights", {2})
    steps = run_ppo(task, run_dir, *words(run_dir, "static"), "trainer.max_restarts=1")
    assert [step["training/global_step"] for step in steps] == [1, 2]
    ((_, kind, text),) = events_of(run_dir)
    assert kind == "restart"
    assert re.match(
        r"1 of 1: rank 0 failed in weight sync \(rollout engine embedded, replica 1\): process \d+ died: killed", text
    )
    assert survivors(str(run_dir)) == []


@pytest.mark.soak
def test_a_replica_that_dies_again_and_again_ends_the_run(
    task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third death ends a run with two restarts."""
    run_dir = tmp_path / "run"
    killer = Killer(monkeypatch, run_dir, "advance", range(2, 99))
    assert main_ppo.PROGRAM(ppo_arguments(task, run_dir, *words(run_dir, "static"), "trainer.max_restarts=2")) == 1
    assert len(killer.killed) == 3
    events = events_of(run_dir)
    assert [(step, kind) for step, kind, _ in events] == [(0, "replaced"), (0, "replaced"), (0, "gave up")]
    cause = rf"rank 0 failed in generation .*, replica 1\): process {killer.killed[2]} died: .*"
    assert re.fullmatch(rf"after 2 restarts \(trainer.max_restarts=2\): {cause}", events[-1][2])
    assert len(re.findall(rf"^error: {cause}", capfd.readouterr().err, re.MULTILINE)) <= 1
    assert survivors(str(run_dir)) == []
