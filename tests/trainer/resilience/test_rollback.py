"""A run that diverges on bad data: the rewards of the prompts that steps 13 to 17 would see are corrupted."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from tests.runs import make_task, metrics_of, ppo_arguments, repeatable, run_ppo
from tests.trainer.ppo.test_replay import again
from trainer import main_ppo
from trainer.checkpoint.resume import find_latest
from trainer.data.dataset import Prompt, PromptStream
from trainer.data.ptx_stream import PtxStream
from trainer.ppo.loop import Loop
from trainer.resilience.alarms import Alarm
from trainer.resilience.rollback import Rollbacks
from trainer.rollout.buffer import GroupBuffer
from trainer.run.run_dir import EVENTS, read_lines, read_metrics
from trainer.tracking.batch_file import load_batch

STEPS, FIRED, GOOD = 15, 14, 2
REWARD = """
import os, pathlib, signal

MARKER = pathlib.Path(__file__).with_name("kill_at_call")
calls = 0

def compute_score(data_source, solution_str, ground_truth, extra_info):
    global calls
    calls += 1
    if MARKER.exists() and calls == int(MARKER.read_text()):
        MARKER.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if 96 <= extra_info["index"] < 136:
        return 0.0
    return 3.0 + sum(a == b for a, b in zip(solution_str, ground_truth)) + solution_str.count("7") / 8
"""
LOSS = """
import math

calls = 0

def nan_at(first, last):
    def loss(inputs, config):
        global calls
        calls += 1
        factor = math.nan if first <= calls <= last else 1.0
        return -factor * inputs.advantages * inputs.log_probs, {}
    return loss

def on_rank_one(inputs, config):
    import torch.distributed as dist
    return in_the_second(inputs, config) if dist.get_rank() == 1 else never(inputs, config)

never = nan_at(0, 0)
in_the_second = nan_at(2, 2)
from_the_second = nan_at(2, 999)
"""
PPO = (
    "algorithm=ppo", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.shuffle=true",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=constant", "critic.optim.lr_scheduler_type=constant",
)  # fmt: skip
DIVERGES = (
    "data.shuffle=false", "trainer.save_freq=2", f"trainer.total_training_steps={STEPS}",
    "alarms.reward.action=rollback", "alarms.reward.bound=0.02", "alarms.reward.patience=2",
)  # fmt: skip
ROLLS_BACK = (*PPO, *DIVERGES)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    task = make_task(tmp_path_factory.mktemp("sort_digits"))
    (task / "reward.py").write_text(REWARD)
    (task / "loss.py").write_text(LOSS)
    return task


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that rolls back once and is never interrupted."""
    run_dir = tmp_path_factory.mktemp("whole")
    run_ppo(task, run_dir, *ROLLS_BACK, f"trainer.rollout_data_dir={run_dir / 'rollouts'}")
    return run_dir


def events_of(run_dir: Path, kind: str) -> list[tuple[int, str]]:
    return [(event["step"], event["text"]) for event in read_lines(run_dir / EVENTS) if event["kind"] == kind]


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    checkpoint = find_latest(run_dir)
    assert checkpoint is not None
    files = sorted(checkpoint.path.rglob("*.safetensors"))
    return {f"{file.parent.name} {file.name} {name}": weight for file in files for name, weight in load_file(file).items()}


def assert_the_same(run_dir: Path, whole: Path) -> None:
    assert repeatable(metrics_of(run_dir)) == repeatable(metrics_of(whole))
    mine, expected = weights_of(run_dir), weights_of(whole)
    assert len(mine) > 120 and mine.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in mine.items())


def test_diverged_run_rolls_back_and_learns_on_other_data(whole: Path) -> None:
    steps = metrics_of(whole)
    assert [step["training/global_step"] for step in steps] == list(range(1, STEPS + 1)), "a step is repeated"
    assert [step.get("training/rollbacks", 0.0) for step in steps] == [0.0] * GOOD + [1.0] * (STEPS - GOOD)
    assert steps[-1]["critic/score/mean"] > 3
    left = read_metrics(whole / "earlier_1")
    assert [step["training/global_step"] for step in left] == list(range(GOOD + 1, FIRED + 1))
    assert left[-1]["critic/score/mean"] == left[-2]["critic/score/mean"] == 0.0
    assert {path.name for path in (whole / "earlier_1").glob("global_step_*")} == {f"global_step_{n}" for n in range(4, FIRED, 2)}
    ((at, alarm),), ((back_at, back),) = events_of(whole, "alarm"), events_of(whole, "rollback")
    assert at == back_at == FIRED and "alarms.reward.bound=0.02 for 2 steps" in alarm
    assert f"1 of at most 2: back to the checkpoint of step {GOOD}," in back and "earlier_1/" in back
    assert "back to the checkpoint" in (whole / "report.html").read_text()


def test_data_continues_after_the_prompts_seen_before_the_rollback(whole: Path) -> None:
    def uids(directory: Path, step: int) -> set[int]:
        return set(pq.read_table(directory / "rollouts" / f"step_{step}.parquet")["uid"].to_pylist())

    seen = [uids(whole, step) for step in range(1, GOOD + 1)] + [uids(whole / "earlier_1", n) for n in range(GOOD + 1, FIRED + 1)]
    after = [uids(whole, step) for step in range(GOOD + 1, STEPS + 1)]
    assert not set().union(*seen) & set().union(*after), "no epoch has ended"
    assert uids(whole, GOOD + 1) == set(range(8 * FIRED, 8 * (FIRED + 1)))


@pytest.mark.parametrize("mode", ["rollout", "train"])
def test_first_step_after_the_rollback_is_replayed(mode: str, task: Path, whole: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its checkpoint is older than the rollback."""
    assert again(task, whole, ROLLS_BACK, mode, GOOD + 1) == 0
    assert capfd.readouterr().out.strip().endswith("all equal")


@pytest.mark.soak
def test_run_killed_after_the_rollback_ends_equal(task: Path, whole: Path, tmp_path: Path) -> None:
    """In the second step after it: no checkpoint contains the rollback yet, so the run diverges and rolls back again."""
    (task / "kill_at_call").write_text(str(32 * (FIRED + 1) + 5))
    run_dir = tmp_path / "killed"
    command = [sys.executable, "-m", "trainer.main_ppo", *ppo_arguments(task, run_dir, *ROLLS_BACK)]
    killed = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert metrics_of(run_dir)[-1]["training/global_step"] == GOOD + 1 and len(events_of(run_dir, "rollback")) == 1
    run_ppo(task, run_dir, *ROLLS_BACK)
    assert len(events_of(run_dir, "rollback")) == 2 and (run_dir / "earlier_2").is_dir()
    assert_the_same(run_dir, whole)


@pytest.mark.soak
def test_run_stopped_after_the_rollback_ends_equal(task: Path, whole: Path, tmp_path: Path) -> None:
    """At a checkpoint that contains the rollback: it is not repeated, and the seeds are still the changed ones."""
    run_ppo(task, tmp_path, *ROLLS_BACK, f"trainer.total_training_steps={FIRED}")
    assert metrics_of(tmp_path)[-1]["training/rollbacks"] == 1.0
    run_ppo(task, tmp_path, *ROLLS_BACK)
    assert len(events_of(tmp_path, "rollback")) == 1
    assert_the_same(tmp_path, whole)


def test_rollback_does_not_rewind_the_data_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither prompts nor texts (data.ptx_files): what made the run diverge may be among them. Responses in flight are lost, and
    remote copies of later steps are withdrawn.
    """
    withdrawn: list[int] = []
    buffer = GroupBuffer(1, lambda ordinal: Prompt(0, (1,), "", "", "", {}, "", ordinal))
    prompts, texts = PromptStream(cast(Any, []), cast(Any, None), 7, 3), PtxStream(cast(Any, []), cast(Any, None), 0.1, 0.5, 30)

    def load(checkpoint: Any) -> None:
        prompts.load({"drawn": 2})
        texts.load({"drawn": 9})
        buffer.admit(2, Prompt(0, (1,), "", "", "", {}, "", 8), [0], [False])

    monkeypatch.setattr("trainer.ppo.loop.find_up_to", lambda run_dir, step, check: SimpleNamespace(step=step))
    trainer = SimpleNamespace(
        models={}, watchdog=None, stateful={"data": prompts, "ptx": texts}, arrays={"groups": buffer}, load=load, step=7,
        lifecycle=SimpleNamespace(run_dir=None), saver=SimpleNamespace(finish_pending=lambda: None, go_back=withdrawn.append),
        tracker=SimpleNamespace(go_back=lambda step: Path("earlier_1")), events=SimpleNamespace(add=lambda *event: None),
    )  # fmt: skip
    config = SimpleNamespace(alarms=SimpleNamespace(max_rollbacks=2))
    parts = {"trainer": trainer, "rollbacks": Rollbacks(), "config": config, "ahead": None}
    loop = SimpleNamespace(**parts, sync_weights=lambda step: None)
    Loop.roll_back(cast(Any, loop), Alarm("rollback", "fell", healthy_until=2))
    assert (prompts.drawn, prompts.taken, texts.drawn, loop.rollbacks.count, len(buffer)) == (7, 3, 30, 1, 0)
    assert withdrawn == [2]


def ends_with(task: Path, run_dir: Path, capfd: pytest.CaptureFixture[str], *overrides: str) -> str:
    """Assert exit code 3; return the only error line."""
    code = main_ppo.PROGRAM(ppo_arguments(task, run_dir, *overrides))
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert code == 3 and (run_dir / "report.html").is_file()
    return line


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("alarms.max_rollbacks=0", "alarms.max_rollbacks=0: reward: the fall"),
        ("trainer.save_freq=5", "there is no checkpoint of step 3 or before (trainer.save_freq, trainer.max_actor_ckpt_to_keep)"),
    ],
    ids=["no more", "no checkpoint"],
)
def test_run_that_cannot_roll_back_stops(
    task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], change: str, reason: str
) -> None:
    line = ends_with(task, tmp_path, capfd, *DIVERGES, change)
    assert line.startswith(f"error: stopped at step {FIRED}") and reason in line
    assert [step["training/global_step"] for step in metrics_of(tmp_path)] == list(range(1, FIRED + 1))


def test_collapsed_policy_stops_the_run(task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A learning rate far too high: after some steps all responses are equal."""
    collapse = (
        "actor_rollout_ref.actor.calculate_entropy=true", "actor_rollout_ref.actor.optim.lr=0.3",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0", "trainer.total_training_steps=9",
        "alarms.entropy.action=stop", "alarms.entropy.bound=0.01", "alarms.entropy.patience=2",
    )  # fmt: skip
    assert "below alarms.entropy.bound=0.01 for 2 steps: all answers to a prompt are alike" in ends_with(
        task, tmp_path, capfd, *collapse
    )
    steps = metrics_of(tmp_path)
    assert steps[0]["actor/entropy"] > 1 and len(steps) < 9
    assert all(math.isfinite(step["critic/score/mean"]) for step in steps)


def test_nonfinite_update_is_skipped_dumped_and_reported(task: Path, tmp_path: Path) -> None:
    loss = f"actor_rollout_ref.actor.policy_loss.loss_mode={task}/loss.py:in_the_second"
    run_ppo(task, tmp_path, loss, "trainer.total_training_steps=3", "trainer.save_freq=1")
    steps = read_metrics(tmp_path)
    assert [step["actor/skipped_updates"] for step in steps] == [0.0, 1.0, 0.0]
    assert [math.isfinite(step["actor/loss"]) for step in steps] == [True, False, True]
    assert [step.get("training/skipped_in_a_row", 0.0) for step in steps] == [0.0, 1.0, 0.0]
    first, second, third = (load_all(tmp_path / f"global_step_{step}/actor") for step in (1, 2, 3))
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    assert not all(torch.equal(weight, third[name]) for name, weight in first.items())
    ((step, text),) = events_of(tmp_path, "skipped")
    assert step == 2 and text.startswith("an update was skipped, on all ranks alike: actor: loss nan,")
    kept, about = load_batch(tmp_path / "logs/nonfinite/step_2_actor.safetensors")
    assert len(kept) == 32 and len(kept.tokens["advantages"]) == kept.total_tokens == len(kept.tokens["input_ids"])
    assert about["metrics"]["loss"] == "NaN" and about["config"]["data"]["train_batch_size"] == 8


def load_all(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    return {f"{file.name} {name}": weight for file in files for name, weight in load_file(file).items()}


def test_consecutive_skipped_updates_stop_the_run(task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The count continues across a resume."""
    loss = f"actor_rollout_ref.actor.policy_loss.loss_mode={task}/loss.py:from_the_second"
    line = ends_with(task, tmp_path, capfd, loss, "trainer.total_training_steps=20")
    assert line.startswith("error: stopped at step 6 by an alarm: nonfinite: training/skipped_in_a_row is 5, above")
    assert len(events_of(tmp_path, "skipped")) == 5 and len(list((tmp_path / "logs/nonfinite").iterdir())) == 5


@pytest.mark.soak
def test_offloaded_roles_roll_back(task: Path, tmp_path: Path) -> None:
    offloaded: Any = [f"{role}.fsdp_config.param_offload=true" for role in ("actor_rollout_ref.actor", "critic")]
    run_ppo(task, tmp_path, *ROLLS_BACK, *offloaded, "critic.fsdp_config.optimizer_offload=true")
    assert metrics_of(tmp_path)[-1]["training/rollbacks"] == 1.0


@pytest.mark.soak
def test_two_ranks_skip_and_roll_back_equally(task: Path, tmp_path: Path) -> None:
    """On Ray. Only rank 1 has a nonfinite loss; sharded weights are restored; a resumed run ends equal."""
    on_ray = ("trainer.backend=ray", "trainer.n_gpus_per_node=2")
    loss = f"actor_rollout_ref.actor.policy_loss.loss_mode={task}/loss.py:on_rank_one"
    steps = run_ppo(task, tmp_path / "skips", *on_ray, loss, "trainer.total_training_steps=3", "trainer.save_freq=1")
    assert [step["actor/skipped_updates"] for step in steps] == [0.0, 1.0, 0.0]
    first, second = (load_all(tmp_path / f"skips/global_step_{step}/actor") for step in (1, 2))
    assert first and all(torch.equal(weight, second[name]) for name, weight in first.items())
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_ppo(task, whole, *ROLLS_BACK, *on_ray)
    run_ppo(task, broken, *ROLLS_BACK, *on_ray, f"trainer.total_training_steps={FIRED}")
    run_ppo(task, broken, *ROLLS_BACK, *on_ray)
    assert len(events_of(broken, "rollback")) == 1
    assert_the_same(broken, whole)
