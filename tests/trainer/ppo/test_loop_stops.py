"""Runs that end before their last step and resume bitwise; runs that run out of memory. In one process."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.faults import TOO_MUCH, loss_that, reward_that
from tests.runs import make_task, metrics_of, ppo_arguments, repeatable, run_ppo
from tests.trainer.ppo.test_loop import weights_of
from trainer import main_ppo
from trainer.checkpoint.resume import find_latest
from trainer.run.run_dir import EVENTS, TIMELINE, read_lines

PPO = ("algorithm=ppo", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100")
PARTIAL = ("async_training.mode=partial", "algorithm.rollout_correction.rollout_is=token")
SIX = ("trainer.total_training_steps=6",)
A_STEP = 32  # responses


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"))


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six uninterrupted steps of PPO."""
    run_dir = tmp_path_factory.mktemp("whole")
    run_ppo(task, run_dir, *PPO, *SIX, "trainer.save_freq=6")
    return run_dir


def events_of(run_dir: Path) -> list[tuple[int, str, str]]:
    return [(event["step"], event["kind"], event["text"]) for event in read_lines(run_dir / EVENTS)]


def resumes_as(whole: Path, task: Path, run_dir: Path, *overrides: str) -> bool:
    """Run the same command again; compare metrics and weights bitwise."""
    steps = run_ppo(task, run_dir, *PPO, *SIX, "trainer.save_freq=6", *overrides)
    same = [weights_of(path, role, 6) for role in ("actor", "critic") for path in (whole, run_dir)]
    return repeatable(steps) == repeatable(metrics_of(whole)) and all(
        mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)
        for mine, other in (same[:2], same[2:])
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGUSR1, 138, marks=pytest.mark.soak)])
def test_signal_waits_for_the_end_of_the_step_and_loses_nothing(
    task: Path, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    before = signal.getsignal(number)
    reward = reward_that(tmp_path, f"n == {2 * A_STEP + 5} and os.kill(os.getpid(), signal.{number.name})")
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *PPO, *SIX, reward)) == code
    assert signal.getsignal(number) == before
    assert [step["training/global_step"] for step in metrics_of(tmp_path / "run")] == [1, 2, 3]
    latest = find_latest(tmp_path / "run")
    assert latest is not None and latest.step == 3, "saved, though save_freq is -1"
    assert events_of(tmp_path / "run") == [(3, "stop", number.name)]
    message = capfd.readouterr()
    where = f"with trainer.resume_mode=auto it resumes from {tmp_path / 'run' / 'global_step_3'}"
    assert message.err.splitlines()[-1] == f"stopped after step 3: {number.name}; {where}"
    assert message.out.splitlines()[-1].startswith("report: ")
    assert resumes_as(whole, task, tmp_path / "run", reward)


def test_second_sigterm_ends_the_run_at_once(task: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    fault = f"n in ({A_STEP + 5}, {A_STEP + 6}) and (os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.1))"
    with pytest.raises(SystemExit) as left:
        main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *SIX, reward_that(tmp_path, fault)))
    assert left.value.code == 143 and signal.getsignal(signal.SIGTERM) == before
    assert len((tmp_path / "rewards").read_text()) == A_STEP + 6
    assert [step["training/global_step"] for step in metrics_of(tmp_path / "run")] == [1] and find_latest(
        tmp_path / "run"
    ) is None


@pytest.mark.parametrize(
    "algorithm",
    [
        (),
        pytest.param(("algorithm.filter_groups.enable=true", "data.gen_batch_size=4"), marks=pytest.mark.soak),
        PARTIAL,
        (*PARTIAL, "algorithm.filter_groups.enable=true"),
    ],
    ids=["one round", "filter_groups", "partial", "filter_groups and partial"],
)
def test_step_with_hanging_rewards_is_abandoned_and_repeated(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: tuple[str, ...]
) -> None:
    """The checkpoint has nothing of that step: the run resumes bitwise. With filter_groups, a round of the step was scored."""
    monkeypatch.setattr("trainer.cluster.watchdog.HURRIED", 0.2)
    monkeypatch.setattr("trainer.rollout.remote_rollout.STEPS", 4)  # so that partial rollouts have responses in flight
    run_ppo(task, tmp_path / "whole", *algorithm, "trainer.total_training_steps=3", reward_that(tmp_path / "plain", "pass"))
    n = 2 * A_STEP + 20
    reward = reward_that(tmp_path, f"n == {n} and (os.kill(os.getpid(), signal.SIGTERM), time.sleep(100))")
    arguments = (*algorithm, "trainer.total_training_steps=3", reward)
    began = time.monotonic()
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *arguments)) == 143
    assert time.monotonic() - began < 60
    done = len(metrics_of(tmp_path / "run"))
    latest = find_latest(tmp_path / "run")
    assert latest is not None and latest.step == done and done < 3
    assert events_of(tmp_path / "run") == [
        (done, "left", f"step {done + 1}: a signal to stop, and the rewards did not come"), (done, "stop", "SIGTERM")
    ]  # fmt: skip
    assert repeatable(run_ppo(task, tmp_path / "run", *arguments)) == repeatable(metrics_of(tmp_path / "whole"))


def test_validation_with_hanging_rewards_is_abandoned(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.cluster.watchdog.HURRIED", 0.2)
    reward = reward_that(tmp_path, f"n == {A_STEP + 5} and (os.kill(os.getpid(), signal.SIGTERM), time.sleep(100))")
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *SIX, reward, "trainer.test_freq=1")) == 143
    latest = find_latest(tmp_path / "run")
    assert latest is not None and latest.step == 1 and len(metrics_of(tmp_path / "run")) == 1
    assert [kind for _, kind, _ in events_of(tmp_path / "run")] == ["left", "stop"]


def test_signal_in_the_last_step_changes_nothing(task: Path, tmp_path: Path) -> None:
    reward = reward_that(tmp_path, "n == 5 and os.kill(os.getpid(), signal.SIGTERM)")
    assert len(run_ppo(task, tmp_path / "run", "trainer.total_training_steps=1", reward)) == 1
    assert events_of(tmp_path / "run") == []


def test_ctrl_c_ends_the_run_at_once(task: Path, tmp_path: Path) -> None:
    fault = f"n == {A_STEP + 5} and (signal.signal(2, signal.default_int_handler), os.kill(os.getpid(), signal.SIGINT))"
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *SIX, reward_that(tmp_path, fault))) == 130
    assert len((tmp_path / "rewards").read_text()) == A_STEP + 5 and (tmp_path / "run" / "report.html").exists()


def test_run_ends_within_the_walltime(task: Path, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each step takes more than a second; the time suffices for some of them."""
    fault = f"n % {A_STEP} == 0 and time.sleep(1.2)"
    walltime = time.time() - psutil.Process().create_time() + 7.0
    arguments = (*PPO, *SIX, reward_that(tmp_path, fault), f"trainer.walltime={walltime}", "trainer.save_freq=1")
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *arguments)) == 0
    ended = max(end for line in read_lines(tmp_path / "run" / TIMELINE) for *_, end in line["spans"])
    assert ended - psutil.Process().create_time() < walltime
    steps = len(metrics_of(tmp_path / "run"))
    assert 1 <= steps < 6
    ((at, kind, text),) = events_of(tmp_path / "run")
    assert (at, kind) == (steps, "stop") and text.endswith(f"s left of trainer.walltime={walltime}")
    assert f"stopped after step {steps}: the longest step (1." in capfd.readouterr().err


def test_short_host_memory_stops_the_run_with_its_own_exit_code(task: Path, whole: Path, tmp_path: Path) -> None:
    """The first step does not begin; no checkpoint is saved before it."""
    run = ppo_arguments(task, tmp_path / "run", *PPO, *SIX, "trainer.watch.memory_warn=1", "trainer.watch.memory_stop=1")
    assert main_ppo.PROGRAM(run) == 4
    output = events_of(tmp_path / "run")
    assert [(step, kind) for step, kind, _ in output] == [(0, "low memory"), (0, "stop")] and find_latest(
        tmp_path / "run"
    ) is None
    assert output[1][2].endswith("less than trainer.watch.memory_stop=1")


def test_full_disk_stops_the_run_after_one_more_checkpoint(task: Path, tmp_path: Path) -> None:
    run_ppo(task, tmp_path, "trainer.total_training_steps=1", "trainer.save_freq=1")
    free = int(os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize / 1e9)
    stopped = ppo_arguments(task, tmp_path, *SIX, f"trainer.watch.disk_stop_gb={free + 1000}")
    assert main_ppo.PROGRAM(stopped) == 4
    assert [kind for _, kind, _ in events_of(tmp_path)] == ["stop"]
    assert json.loads((tmp_path / "global_step_1" / "manifest.json").read_text())["step"] == 1


@pytest.mark.parametrize("cut", ["tokens", pytest.param("rows", marks=pytest.mark.soak)])
def test_step_out_of_memory_is_repeated_in_halved_micro_batches(task: Path, tmp_path: Path, cut: str) -> None:
    """Reported once; the halves stay, after a resume too; the step's gradient is equal up to rounding."""
    size = {"tokens": (), "rows": ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",)}[cut]
    saved = (*size, "trainer.total_training_steps=4", "trainer.save_freq=2")
    plain = run_ppo(task, tmp_path / "plain", *saved, loss_that(tmp_path / "plain", "pass"))
    loss = loss_that(tmp_path / "short", f"n == 2 and {TOO_MUCH}")
    run_ppo(task, tmp_path / "run", *saved, loss, "trainer.total_training_steps=2")
    calls = tmp_path / "short" / "losses"
    parts = len(calls.read_text()) - 2  # after the first step, and the micro-batch that was too large
    assert parts == 2 or (parts == 3 and cut == "tokens"), "halves; rows may not fill two micro-batches completely"
    ((step, kind, text),) = events_of(tmp_path / "run")
    assert (step, kind) == (2, "out of memory") and "can't allocate memory" in text
    assert text.startswith("actor: memory ran out in the update, at micro-batches of up to ")
    steps = run_ppo(task, tmp_path / "run", *saved, loss)
    assert len(calls.read_text()) == 2 + 3 * parts, "the checkpoint contains the back-off"
    assert [step.get("actor/out_of_memory") for step in steps] == [None, 1.0, None, None]
    assert steps[1]["actor/grad_norm"] == pytest.approx(plain[1]["actor/grad_norm"], rel=1e-5)
    assert steps[1]["actor/grad_norm"] != plain[2]["actor/grad_norm"]
    assert len(events_of(tmp_path / "run")) == 1


def test_single_row_that_does_not_fit_is_reported(task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", loss_that(tmp_path, TOO_MUCH))
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *arguments)) == 2
    assert len((tmp_path / "losses").read_text()) == 3, "micro-batches of 4, 2 and 1 rows"
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("error: actor: memory ran out in the update, and micro-batches are as small as can be: one row")
