"""Complete runs that save: in the background, on a full disk, and the report at the end of such a run."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.runs import make_task, metrics_of, ppo_arguments, repeatable, run_ppo
from trainer import main_ppo
from trainer.checkpoint.manifest import read_checkpoint
from trainer.run.run_dir import EVENTS, checkpoint_steps, read_lines

# A kernel limit on the size of files of this process during some steps: the same errors as a full disk.
FULL_DISK = """
import resource
calls = 0

def compute_score(data_source, solution_str, ground_truth, extra_info, full):
    global calls
    calls += 1
    step = (calls - 1) // 32 + 1
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000 if step in full else hard, hard))
    return sum(a == b for a, b in zip(solution_str, ground_truth)) + solution_str.count("7") / 8
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"))


def shards(run_dir: Path, step: int) -> dict[str, tuple[int, str]]:
    """Size and hash of every file; both were compared with the file when the checkpoint was read."""
    files = read_checkpoint(run_dir / f"global_step_{step}").manifest.files
    return {name: (entry.size, entry.sha256) for name, entry in files.items()}


@pytest.mark.parametrize("freq, saved", [("end", [3]), ("2", [2, 3]), ("-1", [])])
def test_frequency_of_checkpoints(freq: str, saved: list[int], task: Path, tmp_path: Path) -> None:
    """``end`` is the default (tests/runs.py turns checkpoints off)."""
    run_ppo(task, tmp_path, f"trainer.save_freq={freq}", "trainer.total_training_steps=3")
    assert checkpoint_steps(tmp_path) == saved


def test_background_saves_give_the_same_run_and_the_same_files(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ("algorithm=ppo", "trainer.save_freq=1", "trainer.total_training_steps=3")
    best = ("trainer.best_metric=-critic/score/mean", "trainer.max_actor_ckpt_to_keep=1", "trainer.max_critic_ckpt_to_keep=1")
    waiting = run_ppo(task, tmp_path / "waiting", *overrides, "trainer.checkpoint.async_save=false")
    background = run_ppo(task, tmp_path / "background", *overrides, *best)
    assert repeatable(background) == repeatable(waiting)
    scores = [step["critic/score/mean"] for step in waiting]
    worst = max(step for step, score in enumerate(scores, 1) if score == min(scores))
    assert checkpoint_steps(tmp_path / "background") == sorted({worst, 3})
    assert (tmp_path / "background/best_checkpointed_iteration.txt").read_text() == str(worst)
    for step in {worst, 3}:
        assert shards(tmp_path / "background", step) == shards(tmp_path / "waiting", step)
    # Each resumes from the checkpoint of the other.
    resumes = ("trainer.total_training_steps=4", "trainer.resume_mode=resume_path")
    from_background = f"trainer.resume_from_path={tmp_path}/background/global_step_3"
    further = run_ppo(task, tmp_path / "further", *overrides, *resumes, from_background)
    whole = run_ppo(task, tmp_path / "waiting", *overrides, "trainer.total_training_steps=4")
    assert repeatable(further) == repeatable(whole)[3:]
    capsys.readouterr()
    assert run_ppo(task, tmp_path / "waiting", *overrides, "trainer.total_training_steps=4") == whole
    assert capsys.readouterr().out.startswith(f"the run in {tmp_path}/waiting ended with step 4: nothing is left to do")


def test_checkpoint_is_validated_alone(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the run's own directory, and that of another run, which has a checkpoint of the same step."""
    greedy = ("actor_rollout_ref.rollout.do_sample=false", "trainer.total_training_steps=2", "trainer.save_freq=end")
    steps = run_ppo(task, tmp_path / "run", *greedy)
    assert all(math.isfinite(step["actor/grad_norm"]) and not step.get("actor/skipped_updates") for step in steps)
    only = ("trainer.val_only=true", "trainer.log_val_generations=2")
    (*before, validated) = run_ppo(task, tmp_path / "run", *greedy, *only)
    assert repeatable(before) == repeatable(steps) and validated["training/global_step"] == 2 and "val/accuracy" in validated
    run_ppo(task, tmp_path / "other", *greedy, "trainer.save_freq=1", "trainer.seed=5")
    first = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/other/global_step_1")
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "other", *greedy, *only, *first, "trainer.seed=5")) == 2
    assert "has records up to step 2, which would be cut" in capsys.readouterr().err
    chosen = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/run/global_step_2")
    (again,) = run_ppo(task, tmp_path / "other", *greedy, *only, *chosen)
    assert again["val/accuracy"] == validated["val/accuracy"]
    assert checkpoint_steps(tmp_path / "other") == [] and checkpoint_steps(tmp_path / "other" / "earlier_1") == [1, 2]


def run_with_a_full_disk_at(task: Path, folder: Path, full: list[int], *overrides: str) -> int:
    (folder / "reward.py").write_text(FULL_DISK)
    function = f"reward.custom_reward_function.path={folder}/reward.py"
    steps = (
        "trainer.save_freq=2",
        "trainer.total_training_steps=4",
        f"++reward.custom_reward_function.reward_kwargs.full={full}",
    )
    return main_ppo.PROGRAM(ppo_arguments(task, folder / "run", function, *steps, *overrides))


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in read_lines(run_dir / EVENTS) if event["kind"] == "checkpoint"]


@pytest.mark.parametrize("background", ["true", pytest.param("false", marks=pytest.mark.soak)])
def test_full_disk_loses_a_checkpoint_and_not_the_run(background: str, task: Path, tmp_path: Path) -> None:
    assert run_with_a_full_disk_at(task, tmp_path, [2, 3], f"trainer.checkpoint.async_save={background}") == 0
    assert checkpoint_steps(tmp_path / "run") == [4]
    (event,) = events(tmp_path / "run")
    assert event["step"] == 2 and "File too large" in event["text"] and "the next save is tried" in event["text"]
    assert "File too large" in (tmp_path / "run/report.html").read_text()
    unbroken = run_ppo(
        task, tmp_path / "unbroken", "trainer.total_training_steps=4", f"reward.custom_reward_function.path={task}/reward.py"
    )
    assert repeatable(metrics_of(tmp_path / "run")) == repeatable(unbroken)


def test_run_whose_last_checkpoint_is_missing_reports_it(task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        code = run_with_a_full_disk_at(task, tmp_path, [4])
    finally:
        lift_the_limit()
    assert code == 1
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("error: "))
    assert "the last checkpoint is missing: step 4: " in line and "File too large" in line and line.endswith("run/global_step_2")
    assert "Traceback" not in capfd.readouterr().err
    assert (tmp_path / "run/report.html").exists()


def lift_the_limit() -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def damage(run_dir: Path, step: int) -> None:
    """Flip a bit in a shard: its name and size stay."""
    (shard,) = (run_dir / f"global_step_{step}/actor").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def test_damaged_weights_are_found_by_workers_and_the_previous_checkpoint_resumed(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, three = tmp_path / "run", ("trainer.save_freq=1", "trainer.total_training_steps=3")
    whole = repeatable(run_ppo(task, run_dir, *three))
    damage(run_dir, 3)
    four = (*three[:1], "trainer.total_training_steps=4")
    assert repeatable(run_ppo(task, run_dir, *four))[:3] == whole
    (output,) = [event for event in read_lines(run_dir / EVENTS) if event["kind"] == "damaged checkpoint"]
    assert output["step"] == 3 and "is not what was written: its sha256 is " in output["text"]
    assert output["text"].endswith("; the one before it is taken") and checkpoint_steps(run_dir) == [1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        damage(run_dir, step)
    capsys.readouterr()
    more = ppo_arguments(task, run_dir, *three[:1], "trainer.total_training_steps=5")
    assert main_ppo.PROGRAM(more) == 2
    assert "error: no checkpoint up to step 1 is whole: " in capsys.readouterr().err
    named = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={run_dir}/global_step_2")
    assert main_ppo.PROGRAM([*ppo_arguments(task, tmp_path / "other", *four), *named]) == 2
    error = capsys.readouterr().err
    assert "error: trainer.resume_from_path: " in error and "; take another one" in error
