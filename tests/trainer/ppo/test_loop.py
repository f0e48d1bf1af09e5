"""The complete loop, in one process, on the embedded engine."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from tests.runs import make_task, ppo_arguments, repeatable, run_ppo
from tests.workers.test_batch import numbered
from trainer import main_ppo
from trainer.checkpoint.resume import find_latest
from trainer.ppo.loop import Loop
from trainer.run.run_dir import START
from trainer.run.timing import Phases

PPO = (
    "algorithm=ppo", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.shuffle=true", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.05", "algorithm.kl_ctrl.horizon=100", "actor_rollout_ref.actor.entropy_coeff=0.001",
)  # fmt: skip
GRPO_WITH_KL = ("algorithm=grpo", "actor_rollout_ref.actor.use_kl_loss=true")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"))


def test_first_update_is_on_policy(task: Path, tmp_path: Path) -> None:
    """Ratio 1, nothing clipped, equal log-probs of engine and trainer: taken from the update, and computed before it."""
    lazy = run_ppo(task, tmp_path / "lazy")[0]
    eager = run_ppo(task, tmp_path / "eager", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.0")[0]
    assert "timing_s/old_log_prob" in eager and "timing_s/old_log_prob" not in lazy
    for step in (lazy, eager):
        assert step["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-7)
        assert step["actor/pg_clipfrac"] == step["actor/pg_clipfrac_lower"] == 0.0
        assert step["training/rollout_log_probs_diff_max"] < 1e-5
    for name in ("actor/grad_norm", "actor/pg_loss"):
        assert lazy[name] == pytest.approx(eager[name], rel=1e-4, abs=1e-9), name
    # Forward and update may split groups differently: which rows share a prompt affects rounding, and so this metric.
    assert lazy["training/rollout_log_probs_diff_mean"] == pytest.approx(eager["training/rollout_log_probs_diff_mean"], abs=1e-7)


@pytest.mark.parametrize(
    "algorithm", [pytest.param(GRPO_WITH_KL, id="grpo", marks=pytest.mark.soak), pytest.param(PPO, id="ppo")]
)
def test_resume_equals_uninterrupted_bitwise(task: Path, tmp_path: Path, algorithm: tuple[str, ...]) -> None:
    overrides = (*algorithm, "trainer.save_freq=2", "trainer.total_training_steps=4", "trainer.test_freq=2")
    whole = run_ppo(task, tmp_path / "whole", *overrides)
    run_ppo(task, tmp_path / "broken", *overrides, "trainer.total_training_steps=2")
    # Lines that a killed run may have written after its checkpoint, the last one torn.
    with (tmp_path / "broken" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(whole[2] | {"critic/score/mean": 99.0}) + "\n" + '{"training/global_step": 4, "cri')
    resumed = run_ppo(task, tmp_path / "broken", *overrides)
    assert [step["training/global_step"] for step in resumed] == [1, 2, 3, 4]
    assert repeatable(resumed) == repeatable(whole)
    roles = ("actor", "critic") if algorithm is PPO else ("actor",)
    for role in roles:
        mine, other = (weights_of(tmp_path / name, role, 4) for name in ("whole", "broken"))
        assert mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


def weights_of(run_dir: Path, role: str, step: int) -> dict[str, torch.Tensor]:
    """All tensors of the latest checkpoint of a role, optimizer included; one rank wrote it, so nothing is sharded."""
    checkpoint = find_latest(run_dir)
    assert checkpoint is not None and checkpoint.step == step
    files = sorted(checkpoint.role(role).glob("*.safetensors"))
    weights = {name: weight for file in files for name, weight in load_file(file).items()}
    assert len(weights) > 60
    return weights


def test_ppo_logs_the_standard_metrics(task: Path, tmp_path: Path) -> None:
    steps = run_ppo(task, tmp_path, *PPO, "trainer.critic_warmup=1", "trainer.val_before_train=true", "trainer.test_freq=2")
    assert [step["training/global_step"] for step in steps] == [0, 1, 2]
    assert "val/accuracy" in steps[0] and "val/accuracy" in steps[2] and "val/accuracy" not in steps[1]
    common = {
        "critic/score/mean", "critic/rewards/mean", "critic/advantages/mean", "critic/returns/mean", "critic/values/mean",
        "critic/vf_loss", "critic/vf_clipfrac", "critic/vf_explained_var", "critic/grad_norm", "critic/lr",
        "response_length/mean", "response_length/clip_ratio", "prompt_length/max", "training/rollout_probs_diff_mean",
        "timing_s/verify_weights", "rollout/verified_bytes",
        "timing_s/gen", "timing_s/reward", "timing_s/ref", "timing_s/values", "timing_s/update_critic", "timing_s/step",
        "perf/throughput", "perf/total_num_tokens", "perf/mfu", "perf/mfu/critic", "actor/reward_kl_penalty", "reward/failed",
    }  # fmt: skip
    of_the_actor = {"actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/lr", "actor/ppo_kl", "timing_s/update_actor"}
    assert common <= steps[1].keys(), common - steps[1].keys()
    assert not of_the_actor & steps[1].keys(), "step 1 is the critic's warm-up"
    assert common | of_the_actor <= steps[2].keys(), of_the_actor - steps[2].keys()
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert steps[2]["actor/reward_kl_penalty_coeff"] != 0.05, "the adaptive coefficient moved"
    assert_start_is_reported(tmp_path)


def assert_start_is_reported(run_dir: Path) -> None:
    """Seconds by part, of the controller and of the workers."""
    seconds = json.loads((run_dir / START).read_text())
    own = ["program", "checks", "backend", "data", "workers", "models", "engine", "rewards", "sync"]
    roles = {f"ranks/{role}" for role in ("actor", "ref", "critic", "rollout")}
    reads = {f"ranks/{role}/{part}" for role in ("actor", "ref", "critic") for part in ("check", "read")}
    assert [name for name in seconds if "/" not in name] == ["total", *own] and roles | reads <= seconds.keys()
    assert sum(seconds[name] for name in own) == pytest.approx(seconds["total"], abs=0.01)
    assert sum(seconds[role] for role in roles - {"ranks/rollout"}) <= seconds["models"] + 0.01


@pytest.mark.soak
def test_micro_batch_size_does_not_change_the_step(task: Path, tmp_path: Path) -> None:
    """Micro-batches by rows, by tokens, or a single one: the same gradient and the same loss, to float tolerance."""
    cuts = {
        "whole": (),
        "tokens": ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=48",),
        "rows": ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",),
        "checkpointed": ("actor_rollout_ref.model.enable_gradient_checkpointing=true",),
    }
    steps = {name: run_ppo(task, tmp_path / name, *cut, "trainer.total_training_steps=1")[0] for name, cut in cuts.items()}
    for name, step in steps.items():
        for metric in ("actor/grad_norm", "actor/pg_loss", "actor/loss"):
            assert step[metric] == pytest.approx(steps["whole"][metric], rel=2e-5, abs=1e-8), (name, metric)


def test_every_step_has_new_prompts_and_independent_samples(task: Path, tmp_path: Path) -> None:
    run_ppo(task, tmp_path, f"trainer.rollout_data_dir={tmp_path / 'rollouts'}")
    steps = [pq.read_table(tmp_path / "rollouts" / f"step_{step}.parquet").to_pydict() for step in (1, 2)]
    assert not set(steps[0]["uid"]) & set(steps[1]["uid"]), "no epoch has ended"
    for step in steps:
        assert len(set(step["uid"])) == 8 and step["sample"] == [0, 1, 2, 3] * 8
        answers = [step["response"][i : i + 4] for i in range(0, 32, 4)]
        assert sum(len(set(group)) > 1 for group in answers) == 8, "the four responses to a prompt are all equal"


def test_advantages_are_whitened_by_group_where_a_prompt_is_in_the_batch_twice() -> None:
    batch = numbered([1] * 8).with_tokens(
        response_mask=torch.ones(8), token_level_scores=torch.tensor([0.0, 0.0, 0.0, 4.0, 1.0, 1.0, 1.0, 2.0])
    )
    batch = batch.with_rows(uid=torch.full((8,), 4), group=torch.arange(8) // 4 + 6)
    batch.objects["reward_extra"] = [{}] * 8
    config = compose("ppo_trainer", PPOConfig, ["algorithm.adv_estimator=reinforce", "algorithm.whiten_advantages=group"])
    loop = SimpleNamespace(config=config, trainer=SimpleNamespace(phases=Phases()))
    found = Loop.advantages(cast(Any, loop), batch).tokens["advantages"]
    assert found.tolist() == pytest.approx([-(3**-0.5), -(3**-0.5), -(3**-0.5), 3**0.5] * 2)


def test_failed_rewards_are_counted_and_excluded(task: Path, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if extra_info['index'] % 2:\n        raise KeyError('no such thing')\n    return 1.0\n"
    )
    step = run_ppo(task, tmp_path / "run", f"reward.custom_reward_function.path={reward}")[0]
    assert 0 < step["reward/failed"] < 32 and step["reward/failed"] % 4 == 0
    assert step["critic/score/mean"] == 1.0, "a failed reward counts as zero"


def test_first_error_is_reported_when_every_reward_fails(task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**asked):\n    raise KeyError('no such thing')\n")
    code = main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", f"reward.custom_reward_function.path={reward}"))
    assert code == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("error: all 32 rewards of the step failed; the first: KeyError: 'no such thing' (reward.py:2)")


def test_every_weight_is_trained(task: Path, tmp_path: Path) -> None:
    run_ppo(task, tmp_path, "trainer.save_freq=2")
    trained = weights_of(tmp_path, "actor", 2)
    base = load_file(task / "base" / "model.safetensors")
    moved = [name for name in base if not torch.equal(base[name], trained[f"model.{name}"])]
    assert len(moved) == len(base)
