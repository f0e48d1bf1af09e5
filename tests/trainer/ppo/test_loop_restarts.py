"""A worker fails, and the run restarts by itself: in one process, on the PPO loop."""

import re
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import ray.exceptions

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from configs.schema.supervised import SFTConfig
from tests.faults import loss_that, reward_that
from tests.runs import make_task, metrics_of, ppo_arguments, repeatable, run_ppo
from tests.trainer.ppo.test_loop_stops import events_of
from trainer import main_ppo
from trainer.resilience.restart import RunLifecycle, run_with_restarts
from trainer.run.errors import Stopped
from workers.controller.group import PhaseTimeout, WorkerError
from workers.plan import Limits

FOUR = ("trainer.total_training_steps=4", "trainer.checkpoint.async_save=false")
"""Waits for each checkpoint: one that is still being written when a step fails is discarded, and the run resumes from another."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"))


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    run_dir = tmp_path_factory.mktemp("whole")
    return repeatable(run_ppo(task, run_dir, *FOUR, loss_that(run_dir, "pass")))


@pytest.fixture(scope="module")
def saved_step(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that saved its only step."""
    run_dir = tmp_path_factory.mktemp("saved")
    run_ppo(task, run_dir, "trainer.total_training_steps=1", "trainer.save_freq=1")
    return run_dir


@pytest.mark.parametrize(("save_freq", "start"), [(2, "step 2"), pytest.param(-1, "the beginning", marks=pytest.mark.soak)])
def test_restarted_run_resumes_from_the_last_checkpoint(
    task: Path, whole: list[dict[str, float]], tmp_path: Path, save_freq: int, start: str
) -> None:
    """The event is recorded and in the report, also if the run restarts from the beginning; metrics have each step once."""
    loss = loss_that(tmp_path, "if n == 3: raise RuntimeError('a <b>bolt</b> fell off')")
    steps = run_ppo(task, tmp_path / "run", *FOUR, loss, f"trainer.save_freq={save_freq}", "trainer.max_restarts=1")
    assert repeatable(steps) == whole
    ((step, kind, text),) = events_of(tmp_path / "run")
    assert (step, kind) == (2, "restart")
    assert re.fullmatch(rf"1 of 1: rank 0 failed in .*: RuntimeError: a <b>bolt</b> fell off; it resumes from {start}", text)
    assert "fell off; it resumes from" in (tmp_path / "run" / "report.html").read_text()


def test_run_without_progress_gives_up(task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A bug in the user's code fails at the same step each time: two restarts without progress, whatever max_restarts allows."""
    loss = loss_that(tmp_path, "assert n < 3, 'too far'")
    arguments = (*FOUR, loss, "trainer.save_freq=2", "trainer.max_restarts=9")
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *arguments)) == 1
    output = events_of(tmp_path / "run")
    assert [(step, kind) for step, kind, _ in output] == [(2, "restart"), (2, "restart"), (2, "gave up")]
    assert re.fullmatch(r"after 2 restarts \(it got no further\): rank 0 failed in .*: AssertionError: too far", output[-1][2])
    assert ": AssertionError: too far" in capfd.readouterr().err
    assert "after 2 restarts" in (tmp_path / "run" / "report.html").read_text()
    assert [step["training/global_step"] for step in metrics_of(tmp_path / "run")] == [1, 2]


def test_restarts_with_progress_are_limited_by_max_restarts(task: Path, whole: list[dict[str, float]], tmp_path: Path) -> None:
    """Steps 2, 3 and 4 fail once each: the third failure ends a run with two restarts. Started again, it completes."""
    fault = "if n in (2, 4, 6): raise RuntimeError('again')"
    arguments = (*FOUR, "trainer.save_freq=1", loss_that(tmp_path / "loss", fault), "trainer.max_restarts=2")
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *arguments)) == 1
    kinds = [(step, kind) for step, kind, _ in events_of(tmp_path / "run")]
    assert kinds == [(1, "restart"), (2, "restart"), (3, "gave up")]
    assert repeatable(run_ppo(task, tmp_path / "run", *arguments)) == whole


@pytest.mark.parametrize("error", ["ValueError", "FileNotFoundError"])
def test_user_error_is_not_retried(task: Path, tmp_path: Path, error: str) -> None:
    loss = loss_that(tmp_path, f"raise {error}('no')")
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", loss, "trainer.max_restarts=9")) == 1
    assert events_of(tmp_path / "run") == [] and len((tmp_path / "losses").read_text()) == 1


def test_default_run_does_not_restart(task: Path, tmp_path: Path) -> None:
    loss = loss_that(tmp_path, "raise RuntimeError('no')")
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", loss)) == 1
    assert events_of(tmp_path / "run") == [] and len((tmp_path / "losses").read_text()) == 1


def test_stopped_run_does_not_restart(task: Path, tmp_path: Path) -> None:
    reward = reward_that(tmp_path, "n == 40 and os.kill(os.getpid(), signal.SIGTERM)")
    loss = loss_that(tmp_path, "if n == 2: raise RuntimeError('no')")
    arguments = (*FOUR, reward, loss, "trainer.max_restarts=9", "trainer.save_freq=1")
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *arguments)) == 143
    assert [step["training/global_step"] for step in metrics_of(tmp_path / "run")] == [1]
    assert events_of(tmp_path / "run") == []


def test_restart_does_not_resume_an_earlier_run_in_the_directory(saved_step: Path, tmp_path: Path) -> None:
    """With resume_mode=disable: before its first step the run restarts from the beginning, then from its own checkpoints."""
    shutil.copytree(saved_step, tmp_path, dirs_exist_ok=True)
    lifecycle = RunLifecycle(
        compose("ppo_trainer", PPOConfig, ["trainer.max_restarts=2", "trainer.resume_mode=disable"]).trainer, tmp_path
    )
    lifecycle.handle_failure(WorkerError(0, "__init__", "process 7 died"))
    assert lifecycle.restarted and lifecycle.resume() is None
    lifecycle.started = True
    lifecycle.handle_failure(WorkerError(0, "run", "process 8 died"))
    assert (own := lifecycle.resume()) is not None and own.step == 1


@pytest.mark.parametrize("error", [ray.exceptions.RaySystemError("a node left"), PhaseTimeout("a node left", [1], 3.0)])
def test_lost_node_and_exceeded_limit_restart_the_run(tmp_path: Path, error: Exception) -> None:
    """A lost node takes the object store or the scheduler with it; the error is Ray's own, without a rank."""
    lifecycle = RunLifecycle(compose("ppo_trainer", PPOConfig, ["trainer.max_restarts=1"]).trainer, tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    outcomes: list[Exception | None] = [error, None]

    def attempt() -> None:
        if (error := outcomes.pop(0)) is not None:
            raise error

    run_with_restarts(lifecycle, attempt)
    ((_, kind, text),) = events_of(tmp_path)
    assert kind == "restart" and lifecycle.restarted
    assert "a node left" in text and text.endswith("; it resumes from the beginning")
    with pytest.raises(KeyError):
        outcomes.append(KeyError("key"))
        run_with_restarts(lifecycle, attempt)
    assert len(events_of(tmp_path)) == 1


DEATH = WorkerError(0, "generation", "process 7 died", process_died=True)


def test_replacements_count_as_restarts(tmp_path: Path) -> None:
    """Two replacements without a new step; each is an event once it is complete. A later step allows another one."""
    lifecycle = lifecycle_at(3, tmp_path, "trainer.max_restarts=3")
    for number in (1, 2):
        with lifecycle.replacement("replica 5 of rollout", DEATH):
            assert len(events_of(tmp_path)) == number - 1
    with pytest.raises(WorkerError), lifecycle.replacement("replica 5 of rollout", DEATH):
        raise AssertionError("it is not replaced")
    lifecycle.stopping.furthest = 4
    with pytest.raises(RuntimeError, match="no engine"), lifecycle.replacement("replica 5 of rollout", DEATH):
        raise RuntimeError("no engine")
    text = "replica 5 of rollout was replaced, {} of 3: rank 0 failed in generation: process 7 died"
    assert events_of(tmp_path) == [(3, "replaced", text.format(number)) for number in (1, 2)]
    lifecycle.stopping.furthest = 5
    with pytest.raises(WorkerError), lifecycle.replacement("replica 5 of rollout", DEATH):
        raise AssertionError("three are all that max_restarts allows")
    with pytest.raises(WorkerError):
        lifecycle.handle_failure(DEATH)
    (*_, (_, kind, text)) = events_of(tmp_path)
    assert (kind, text.partition(":")[0]) == ("gave up", "after 3 restarts (trainer.max_restarts=3)")


def test_restart_follows_replacements_without_progress(tmp_path: Path) -> None:
    """Restarts without progress have a count of their own: the run gives up after two of each."""
    lifecycle = lifecycle_at(3, tmp_path, "trainer.max_restarts=9")
    for _ in range(2):
        with lifecycle.replacement("replica 5 of rollout", DEATH):
            pass
    for _ in range(2):
        with pytest.raises(WorkerError), lifecycle.replacement("replica 5 of rollout", DEATH):
            raise AssertionError("it is not replaced")
        lifecycle.handle_failure(DEATH)
    with pytest.raises(WorkerError):
        lifecycle.handle_failure(DEATH)
    assert [kind for _, kind, _ in events_of(tmp_path)] == ["replaced", "replaced", "restart", "restart", "gave up"]


def test_run_that_is_to_stop_replaces_nothing(tmp_path: Path) -> None:
    lifecycle = lifecycle_at(3, tmp_path, "trainer.max_restarts=3")
    lifecycle.stopping._signal = signal.SIGTERM
    with pytest.raises(Stopped), lifecycle.replacement("replica 5 of rollout", DEATH):
        raise AssertionError("it is not replaced")


OUT_OF_MEMORY = WorkerError(3, "update of actor", "OutOfMemory: CUDA out of memory. Tried to allocate 2.00 GiB")


def lifecycle_at(step: int, run_dir: Path, *overrides: str) -> RunLifecycle:
    """The lifecycle of a run that completed ``step`` steps."""
    lifecycle = RunLifecycle(compose("ppo_trainer", PPOConfig, [*overrides]).trainer, run_dir)
    lifecycle.started, lifecycle.stopping.furthest = True, step
    return lifecycle


def test_out_of_memory_without_a_checkpoint_ends_the_run_instead_of_repeating_it(tmp_path: Path) -> None:
    """By default nothing is saved before the end and nothing restarts: a run of 900 steps stops and reports what to change."""
    lifecycle = lifecycle_at(900, tmp_path)
    lifecycle.budget("actor").halve(Limits(max_tokens=512), [(2, 512)], 256, "no memory")
    with pytest.raises(ValueError) as stopped:
        lifecycle.handle_failure(OUT_OF_MEMORY)
    assert not lifecycle.restarted
    advice = " ".join(str(stopped.value).split())
    assert advice.startswith(
        "memory ran out in step 901, and a restart in halved micro-batches would repeat 900 steps: rank 3 failed in "
    )
    assert (
        "Halve actor_rollout_ref.actor.ppo_max_token_len_per_gpu (the gradient is the same), set trainer.save_freq (it is end)"
        in advice
    )
    assert "from the beginning: there is no checkpoint. trainer.max_restarts=1 would" in advice
    assert [(step, kind) for step, kind, _ in events_of(tmp_path)] == [(900, "out of memory"), (900, "gave up")]


@pytest.mark.parametrize(
    ("step", "saved", "overrides", "restarts"),
    [
        (2, None, (), True),  # the first steps may be repeated
        (3, None, (), False),
        (3, None, ("trainer.save_freq=50",), True),  # save_freq allows to repeat that many steps
        (51, None, ("trainer.save_freq=50",), False),  # no checkpoint exists after save_freq steps
        (3, 1, (), True),
        (4, 1, (), False),  # a checkpoint of an earlier start: this one saves nothing
        (40, 1, ("trainer.save_freq=50",), True),  # save_freq allows to repeat that many steps
        (900, None, ("trainer.max_restarts=1",), True),  # as after any other failure
    ],
)
def test_restart_after_out_of_memory_repeats_a_limited_number_of_steps(
    saved_step: Path, tmp_path: Path, step: int, saved: int | None, overrides: tuple[str, ...], restarts: bool
) -> None:
    if saved is not None:
        shutil.copytree(saved_step, tmp_path, dirs_exist_ok=True)
    lifecycle = lifecycle_at(step, tmp_path, *overrides)
    with nullcontext() if restarts else pytest.raises(ValueError, match=f"in step {step + 1}, .* would repeat "):
        lifecycle.handle_failure(OUT_OF_MEMORY)
    assert lifecycle.restarted == restarts
    kept = lifecycle.resume() if restarts else None
    assert kept is None or kept.step == saved


def test_supervised_run_that_saves_after_each_epoch_may_repeat_an_epoch(saved_step: Path, tmp_path: Path) -> None:
    shutil.copytree(saved_step, tmp_path, dirs_exist_ok=True)
    lifecycle = RunLifecycle(compose("sft_trainer", SFTConfig, ["trainer.save_freq=after_each_epoch"]).trainer, tmp_path)
    lifecycle.started, lifecycle.stopping.furthest = True, 40
    lifecycle.handle_failure(OUT_OF_MEMORY)
    assert lifecycle.restarted
