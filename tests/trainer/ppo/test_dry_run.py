"""trainer.dry_run=full: what it says is what the run does, and it leaves the configuration alone."""

import json
import re
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open

from tests.runs import make_task, ppo_arguments, run_ppo
from trainer import main_ppo
from trainer.ppo import assemble, dry_run
from trainer.rewards.runner import RewardRunner

FULL = "trainer.dry_run=full"
SAVED = ("trainer.save_freq=2", "trainer.test_freq=2", "trainer.total_training_steps=4")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"), train_size=30, test_size=8, sft_size=8)


def plan(task: Path, run_dir: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    capsys.readouterr()
    assert main_ppo.PROGRAM(ppo_arguments(task, run_dir, *overrides, FULL)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(task: Path, run_dir: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    capsys.readouterr()
    assert main_ppo.PROGRAM(ppo_arguments(task, run_dir, *overrides, FULL)) == 2
    return capsys.readouterr().err


def test_it_says_what_a_run_would_do(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*args: object, **kwargs: object) -> None:
        raise AssertionError("nothing is started")

    monkeypatch.setattr(assemble, "open_backend", started)
    monkeypatch.setattr(RewardRunner, "start", started)
    words = ("trainer.total_training_steps=null", "trainer.total_epochs=5", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    told = plan(task, tmp_path / "run", capsys, *words, "algorithm=ppo", "reward.num_workers=2")
    with safe_open(task / "base" / "model.safetensors", "pt") as weights:
        names: list[str] = list(weights.keys())
        parameters = sum(weights.get_tensor(name).numel() for name in names)
    assert f"actor_rollout_ref.actor: {parameters / 1e6:.3g} million parameters (qwen2, {task}/base)" in told
    assert "data.train_files: 30 prompts of 30 rows" in told and "data.val_files: 8 prompts of 8 rows" in told
    assert "15 steps (5 epochs); 3 an epoch" in told, "30 prompts are 3 batches of 8"
    assert "a step: 8 prompts x 4 answers = 32 sequences" in told
    assert "actor: 2 updates a step, of 4 prompts = 16 sequences each" in told
    assert "workers (actor, critic, rollout): node 0, GPU 0" in told
    assert "rollout: 1 engine (embedded), each on 1 GPU" in told
    assert "starts anew" in told and "checkpoints: never (trainer.save_freq)" in told
    phases = re.findall(r"^  workers +(\S.*?)  +([\d.e+-]+) GB$", told, re.MULTILINE)
    assert [phase for phase, _ in phases] == [
        "answers", "actor: log-probs", "actor: update", "critic: values", "critic: update",
    ]  # fmt: skip
    assert all(0 < float(size) < 1 for _, size in phases), "a tiny model"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_the_configuration_is_the_runs_own_and_a_run_is_left_alone(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    told = plan(task, run_dir, capsys, *SAVED)
    ours = (run_dir / "config.yaml").read_text()
    assert "checkpoints: every 2 steps, after the last; all kept" in told
    steps = run_ppo(task, run_dir, *SAVED)
    assert len(steps) == 4 and (run_dir / "config.yaml").read_text() == ours
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    told = plan(task, run_dir, capsys, *SAVED, "trainer.total_training_steps=6")
    assert f"goes on from step 4: {run_dir}/global_step_4" in told and "6 steps (trainer.total_training_steps)" in told
    after = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    written = after.keys() - before.keys()
    assert written == {run_dir / dry_run.BESIDE} and {path: after[path] for path in before} == before
    assert yaml.safe_load(after[run_dir / dry_run.BESIDE])["trainer"]["total_training_steps"] == 6
    other = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    said = refused(task, run_dir, capsys, *SAVED, *other)
    assert said.startswith("error: cannot resume with another configuration: ") and "data.train_batch_size: 8 -> 4" in said
    place = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={run_dir}/global_step_2")
    assert f"goes on from step 2: {run_dir}/global_step_2" in plan(task, tmp_path / "other", capsys, *SAVED, *place)
    weights = next((run_dir / "global_step_2" / "actor").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "trainer.resume_from_path: " in refused(task, tmp_path / "other", capsys, *SAVED, *place)


def test_prompts_that_are_dropped_are_counted(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"data_source": "sort_digits", "reward_model": {"ground_truth": "1"}, "prompt": [{"role": "user", "content": "1="}]}
    rows = [row] * 9 + [row | {"prompt": [{"role": "user", "content": "1" * 99}]}] * 2
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows))
    words = (f"data.train_files={tmp_path}/mixed.jsonl", "data.filter_overlong_prompts=true")
    told = plan(task, tmp_path / "run", capsys, *words, "trainer.total_training_steps=null", "trainer.total_epochs=1")
    assert "data.train_files: 9 prompts of 11 rows" in told and "1 steps (1 epochs)" in told


def test_it_can_be_planned_on_a_machine_without_the_gpus(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ("trainer.backend=ray", "trainer.n_gpus_per_node=4", "trainer.device=cuda", "placement=split", "algorithm=ppo")
    sizes = ("trainer.n_gpus_per_node=3", "data.train_batch_size=6", "actor_rollout_ref.actor.ppo_mini_batch_size=6")
    told = plan(task, tmp_path / "run", capsys, *words, *sizes)
    assert "trainer.n_gpus_per_node=3: this machine has 0 CUDA devices" in told
    assert "critic (critic): node 0, GPU 1" in told and "critic: fsdp, 1 rank, data parallel 1" in told
    beside = plan(task, tmp_path / "second", capsys, "trainer.backend=ray", "trainer.n_gpus_per_node=2", "trainer.device=cuda")
    assert "rollout: 2 engines (embedded), each on 1 GPU" in beside
    assert "actor_rollout_ref.actor: fsdp, 2 ranks, data parallel 2" in beside
