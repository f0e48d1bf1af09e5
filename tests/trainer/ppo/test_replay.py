"""Replay of a single step: bitwise equal if nothing changed; changed inputs are reported."""

import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from tests.runs import make_task, ppo_arguments, run_ppo
from tests.trainer.checkpoints import responses, save
from trainer import main_ppo
from trainer.checkpoint.manifest import read_checkpoint
from trainer.ppo.ppo_builder import Assembly
from trainer.ppo.replay import with_state
from trainer.tracking.batch_file import load_batch, save_batch

PPO = (
    "algorithm=ppo",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "algorithm.use_kl_in_reward=true",
    "reward.shaping.normalize=running",
)
FILTER = ("algorithm=grpo", "algorithm.filter_groups.enable=true", "data.gen_batch_size=6", "actor_rollout_ref.rollout.n=2")
TWO_WORKERS = ("algorithm=grpo", "trainer.backend=ray", "trainer.n_gpus_per_node=2", "reward.num_workers=1")
Run = tuple[Path, tuple[str, ...]]
RUNS = {"ppo": PPO, "filter": FILTER, "two_workers": TWO_WORKERS}
LONG = pytest.param("two_workers", marks=pytest.mark.soak)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"), train_size=96, sft_size=8)


@pytest.fixture(scope="module", params=["ppo", "filter", LONG])
def kept(request: pytest.FixtureRequest, task: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two steps that dumped everything."""
    run_dir = tmp_path_factory.mktemp(request.param) / "run"
    overrides = ("trainer.save_freq=1", f"trainer.rollout_data_dir={run_dir / 'rollouts'}", *RUNS[request.param])
    run_ppo(task, run_dir, *overrides)
    return run_dir, overrides


def again(task: Path, run_dir: Path, overrides: tuple[str, ...], mode: str, step: int, *more: str) -> int:
    asked = (f"trainer.replay.mode={mode}", f"trainer.replay.path={run_dir / 'rollouts' / f'step_{step}.safetensors'}")
    return main_ppo.PROGRAM(ppo_arguments(task, run_dir, *overrides, *asked, *more))


@pytest.mark.parametrize(("rollbacks", "left"), [(0, True), (1, False)])
def test_state_of_the_dump_replaces_that_of_a_checkpoint_before_a_rollback(rollbacks: int, left: bool, tmp_path: Path) -> None:
    """A rollback discards what was in flight, and continues with other prompts."""
    save(tmp_path, 2, arrays=responses(2))
    found = read_checkpoint(tmp_path / "global_step_2")
    found.manifest.state.update(rollbacks={"count": 0}, data={"drawn": 2})
    with_state(found, {"rollbacks": {"count": rollbacks}, "data": {"drawn": 5}})
    assert found.state("rollbacks") == {"count": rollbacks} and found.state("data") == {"drawn": 5}
    assert bool(found.arrays("groups")) == left
    with_state(found, {})
    assert found.state("data") == {"drawn": 5}, "dumps of earlier versions have no state"


def contents(run_dir: Path) -> dict[str, bytes]:
    found = (path.relative_to(run_dir) for path in sorted(run_dir.rglob("*")) if path.is_file())
    return {str(path): (run_dir / path).read_bytes() for path in found if not path.parts[0].startswith("replay_")}


@pytest.mark.parametrize("mode", ["rollout", "train"])
def test_replayed_steps_are_bitwise_equal_and_the_run_is_unchanged(
    mode: str, kept: Run, task: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, overrides = kept
    before = contents(run_dir)
    unwanted = "critic" if mode == "rollout" else "rollout"
    monkeypatch.setattr(Assembly, unwanted, lambda self: pytest.fail(f"a replay of the {mode} has no use for a {unwanted}"))
    for step in (2,) if "trainer.backend=ray" in overrides else (1, 2):
        assert again(task, run_dir, overrides, mode, step) == 0
        assert capfd.readouterr().out.strip().endswith("all equal")
        directory = run_dir / f"replay_{mode}_{step}"
        assert yaml.safe_load((directory / "config.yaml").read_text())["trainer"]["default_local_dir"] == str(directory)
    assert contents(run_dir) == before


@pytest.fixture(scope="module")
def plain(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    overrides = ("algorithm=grpo", "trainer.save_freq=2", f"trainer.rollout_data_dir={run_dir / 'rollouts'}")
    run_ppo(task, run_dir, *overrides)
    return run_dir, overrides


@pytest.fixture
def copied(plain: Run, tmp_path: Path) -> Run:
    """A copy that tests may change. The dumps are not where the configuration has them: trainer.replay.path names them."""
    shutil.copytree(plain[0], tmp_path / "run")
    return tmp_path / "run", plain[1]


def test_changed_token_in_the_dump_is_reported(copied: Run, task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir, overrides = copied
    file = run_dir / "rollouts/step_1.safetensors"
    batch, facts = load_batch(file)
    last = int(batch.offsets[2]) - 1
    batch.tokens["input_ids"][last] += 1
    batch.meta["metrics"]["reward/failed"] += 2
    save_batch(file, batch, facts)
    uid, sample, position = int(batch.rows["uid"][1]), int(batch.rows["sample"][1]), int(batch.lengths[1]) - 1
    assert again(task, run_dir, overrides, "rollout", 1) == 3
    output = capfd.readouterr().err
    assert f"error: tokens (1 of 32 answers; the first: uid {uid}, sample {sample}, token {position})" in output
    assert "error: reward/failed: 2 then, 0 now" in output, "the failures of all rounds"
    assert again(task, run_dir, overrides, "train", 1) == 3
    output = capfd.readouterr().err
    assert "error: actor/grad_norm: " in output and "error: critic/score/mean" not in output


def test_dump_without_groups_is_replayed(copied: Run, task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Earlier versions wrote none."""
    run_dir, overrides = copied
    file = run_dir / "rollouts/step_1.safetensors"
    batch, facts = load_batch(file)
    del batch.rows["group"]
    save_batch(file, batch, facts)
    assert again(task, run_dir, overrides, "train", 1) == 0
    assert capfd.readouterr().out.strip().endswith("all equal")


def test_changed_weight_is_reported(copied: Run, task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir, overrides = copied
    file = task / "base/model.safetensors"
    original = file.read_bytes()
    weights = load_file(file)
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 0.01
    save_file(weights, file, metadata={"format": "pt"})
    try:
        assert again(task, run_dir, overrides, "rollout", 1) == 3
        assert "error: rollout_log_probs (32 of 32 answers" in capfd.readouterr().err
        assert again(task, run_dir, overrides, "train", 1) == 3
        assert "error: actor/grad_norm: " in capfd.readouterr().err
        assert again(task, run_dir, overrides, "train", 1, "trainer.replay.bound=inf") == 2
        assert again(task, run_dir, overrides, "train", 1, "trainer.replay.bound=1e6") == 0
        assert "within trainer.replay.bound=1e+06" in capfd.readouterr().out
    finally:
        file.write_bytes(original)


def test_missing_weights_of_the_previous_step_list_the_checkpoints(
    plain: Run, task: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir, overrides = plain
    assert again(task, run_dir, overrides, "train", 2) == 2
    output = capfd.readouterr().err
    assert f"step 2 began with the weights of step 1, in a process that started from {task}/base" in output
    assert "has checkpoints of steps [2]: replay one of steps [1, 3]" in output
    chosen = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={run_dir}/global_step_2")
    assert again(task, run_dir, overrides, "train", 2, *chosen) == 2
    assert "step 2 wants the weights of step 1" in capfd.readouterr().err


@pytest.mark.parametrize("kept", ["ppo"], indirect=True)
def test_checkpoint_elsewhere_is_used_if_named(kept: Run, task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir, overrides = kept
    shutil.move(run_dir / "global_step_1", tmp_path / "global_step_1")
    try:
        chosen = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_1")
        assert again(task, run_dir, overrides, "train", 2, *chosen) == 0
        assert capfd.readouterr().out.strip().endswith("all equal")
    finally:
        shutil.move(tmp_path / "global_step_1", run_dir / "global_step_1")


@pytest.mark.parametrize(
    ("path", "output"),
    [
        ("rollouts/step_9.safetensors", "has step_1.safetensors to step_2.safetensors, 2 files"),
        ("rollouts/step_1.parquet", "is no dump of a batch"),
    ],
)
def test_path_without_a_dump_is_a_one_line_error(
    path: str, output: str, plain: Run, task: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir, overrides = plain
    asked = ("trainer.replay.mode=train", f"trainer.replay.path={run_dir / path}")
    assert main_ppo.PROGRAM(ppo_arguments(task, run_dir, *overrides, *asked)) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and output in errors[0]


def test_changed_configuration_is_refused(plain: Run, task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir, overrides = plain
    assert again(task, run_dir, overrides, "train", 1, "actor_rollout_ref.actor.optim.lr=1.0") == 2
    assert "actor_rollout_ref.actor.optim.lr: 0.0003 -> 1.0" in capfd.readouterr().err


def test_replay_of_a_step_without_logged_metrics_is_refused(copied: Run, task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir, overrides = copied
    (run_dir / "metrics.jsonl").write_text("")
    assert again(task, run_dir, overrides, "train", 1) == 2
    assert "metrics.jsonl has no step 1 to compare with; it has []" in capfd.readouterr().err
