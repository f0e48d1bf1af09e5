"""Batches that are generated ahead with trainers of several ranks, and with SGLang: complete runs on Ray."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

import trainer.rollout.remote_rollout as remote_rollout
from tests.runs import make_task, repeatable, run_ppo
from tests.trainer.rollout.test_ahead_features import LORA, MODES, SGLANG, SMALL, pools
from tests.trainer.rollout.test_ahead_runs import reference_fit
from tests.workers.rollout.vllm_workers import CPU_BUILD
from trainer.ppo.loop import Loop

pytestmark = pytest.mark.soak
ACTOR = "actor_rollout_ref.actor"
TWO = (*pools(), "trainer.n_gpus_per_node=3", "placement.pools.actor.gpus=2")
TRAINERS = {
    "two ranks": TWO,
    "two replicas of the model": (*TWO, f"{ACTOR}.fsdp_config.fsdp_size=1"),
    "ulysses": (*TWO, f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"),
    "megatron tp2": (*TWO, f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=2"),
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"), train_size=32, sft_size=8)


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_rollout, "STEPS", 4)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainers_of_two_ranks_have_the_numbers_of_a_sequential_loop(
    trainer: str, mode: str, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequential loop resumes from the other run's checkpoint, which has what is in flight."""
    options = (*SMALL, *TRAINERS[trainer], *MODES[mode], f"{ACTOR}.shuffle=true", f"{ACTOR}.ppo_mini_batch_size=2")
    whole = run_ppo(task, tmp_path / "whole", *options)
    assert len(whole) == 4 and max(step["rollout/stale_tokens"] for step in whole) > 0 < whole[-1]["actor/grad_norm"]
    if mode != "partial":
        monkeypatch.setattr(Loop, "fit", reference_fit)
    path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'whole' / 'global_step_2'}")
    assert repeatable(run_ppo(task, tmp_path / "sequential", *options, *path)) == repeatable(whole[2:])


@CPU_BUILD
@pytest.mark.timeout(900)
@pytest.mark.parametrize("adapter", ["", "adapter"])
@pytest.mark.parametrize("mode", MODES)
def test_run_on_sglang_trains_each_group_once_and_in_time(mode: str, adapter: str, task: Path, tmp_path: Path) -> None:
    """SGLang keeps its own time: which responses are in flight differs from run to run."""
    lora = (*LORA, "actor_rollout_ref.rollout.lora_sync=adapter") if adapter else ()
    words = (*SMALL, *pools(), *MODES[mode], *SGLANG, *lora, f"trainer.rollout_data_dir={tmp_path / 'rollouts'}")
    steps = run_ppo(task, tmp_path / "run", *words)
    groups: list[int] = []
    for step in range(1, 5):
        dump = load_file(tmp_path / "rollouts" / f"step_{step}.safetensors")
        versions = dump["tokens.weight_version"][dump["tokens.response_mask"].bool()]
        assert step - 1 - int(versions.min()) <= (1 if mode == "one_step_off" else 2)
        groups += dump["rows.group"].unique().tolist()
    assert len(set(groups)) == len(groups) == 16
    # Absent if a step has no token of the present weights.
    assert max(step.get("training/rollout_log_probs_diff_max", 0.0) for step in steps) < 1e-5
