"""Complete runs with each algorithm: what it enables, and properties that must hold then."""

import math
from pathlib import Path

import pytest

from tests.runs import make_task, repeatable, run_ppo
from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.policy_losses import POLICY_LOSSES

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
ONE_STEP = ("trainer.total_training_steps=1",)
EVERY_UPDATE = (f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.ppo_epochs=2")
NAMED = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    right = sum(a == b for a, b in zip(solution_str, ground_truth))
    return {"score": right, "right": right, "short": -len(solution_str)}

def mine(inputs, config):
    return inputs.outcome(3.0 * inputs.scores())

def my_loss(inputs, config):
    return -inputs.advantages * (inputs.log_probs - inputs.old_log_probs).exp(), {}
"""


QUICK = {"gspo"}
"""Losses outside soak: one per sequence; other runs have the vanilla loss, per token, and clip_cov, with sampled tokens."""
WITH_NEEDS = {"gae", "gdpo", "optimal_token_baseline", "remax"}
"""Estimators outside soak: those that need values, named scores, a sum of the head, or greedy responses. rloo and
reinforce_plus_plus_baseline are in tests/trainer/test_main_ppo_experiments.py, grpo in all other runs."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    task = make_task(tmp_path_factory.mktemp("sort_digits"))
    (task / "named.py").write_text(NAMED)
    return task


@pytest.fixture(scope="module")
def plain(task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The first step of the plain run: GRPO, vanilla, one update."""
    return run_ppo(task, tmp_path_factory.mktemp("plain"), *ONE_STEP)[0]


@pytest.mark.parametrize(
    "estimator", [name if name in WITH_NEEDS else pytest.param(name, marks=pytest.mark.soak) for name in ADVANTAGES]
)
def test_every_estimator_completes_a_step(task: Path, tmp_path: Path, estimator: str) -> None:
    named = f"reward.custom_reward_function.path={task}/named.py"
    options = {"gdpo": (named, "algorithm.gdpo_reward_keys=[right,short]"), "gae": (f"critic.model.path={task}/base",)}
    step = run_ppo(task, tmp_path, f"algorithm.adv_estimator={estimator}", *options.get(estimator, ()), *ONE_STEP)[0]
    assert all(math.isfinite(value) for value in step.values())
    assert step["critic/advantages/max"] > 0 and step["actor/grad_norm"] > 0
    assert step["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize(
    "loss_mode", [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in POLICY_LOSSES]
)
def test_every_loss_completes_its_steps(task: Path, tmp_path: Path, loss_mode: str, plain: dict[str, float]) -> None:
    step = run_ppo(task, tmp_path, f"{ACTOR}.policy_loss.loss_mode={loss_mode}", *EVERY_UPDATE, *ONE_STEP)[0]
    assert all(math.isfinite(value) for value in step.values())
    assert step["actor/grad_norm"] > 0
    first = run_ppo(task, tmp_path / "first", f"{ACTOR}.policy_loss.loss_mode={loss_mode}", *ONE_STEP)[0]
    if loss_mode not in {"clip_cov", "kl_cov"}:  # they exclude a token, or penalize one
        assert first["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-4), (
            "on-policy gradients of all losses are equal"
        )


def test_estimator_and_loss_from_a_users_file_are_used(task: Path, tmp_path: Path, plain: dict[str, float]) -> None:
    step = run_ppo(
        task, tmp_path, f"algorithm.adv_estimator={task}/named.py:mine",
        f"{ACTOR}.policy_loss.loss_mode={task}/named.py:my_loss", *ONE_STEP,
    )[0]  # fmt: skip
    assert step["critic/advantages/max"] == pytest.approx(3 * step["critic/score/max"])
    assert "actor/pg_clipfrac" not in step and "actor/pg_loss" in step


@pytest.mark.parametrize(
    "correction",
    [
        pytest.param(("rollout_is=token",), marks=pytest.mark.soak),
        pytest.param(("rollout_is=sequence", "rollout_is_threshold=0.5_2.0"), marks=pytest.mark.soak),
        pytest.param(
            ("rollout_rs=seq_mean_k1", "rollout_rs_threshold=0.99_1.01", "rollout_token_veto_threshold=1e-4"),
            marks=pytest.mark.soak,
        ),
        pytest.param(("bypass_mode=true",), marks=pytest.mark.soak),
        ("bypass_mode=true", "loss_type=reinforce", "rollout_is=token", "rollout_rs=token_k1", "rollout_rs_threshold=0.9_1.1"),
    ],
    ids=["token", "sequence", "rejection", "bypass", "bypass_reinforce"],
)
def test_correction_without_mismatch_changes_nothing(
    task: Path, tmp_path: Path, plain: dict[str, float], correction: tuple[str, ...]
) -> None:
    step = run_ppo(task, tmp_path, *ONE_STEP, *(f"{CORRECTION}.{change}" for change in correction))[0]
    assert step["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-4)
    assert step["training/rollout_log_probs_diff_max"] < 1e-5
    for name in ("rollout_kl_k1", "rollout_kl_k3", "rollout_ratio_p01", "rollout_ratio_p99"):
        assert f"training/{name}" in step and f"training/{name}" in plain
    assert "timing_s/old_log_prob" not in step or not correction[0].startswith("bypass")
    if len(correction) > 1 or correction[0] == "rollout_is=token":
        assert step["rollout_corr/kl"] == pytest.approx(0.0, abs=1e-6)


def test_mismatch_above_the_bound_warns(task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ppo(task, tmp_path / "a", *ONE_STEP)
    assert "mismatch_bound" not in capfd.readouterr().err
    run_ppo(task, tmp_path / "b", *ONE_STEP, f"{CORRECTION}.mismatch_bound=1e-12")
    assert "alarm: step 1: mismatch: training/rollout_log_probs_diff_mean is" in capfd.readouterr().err


def test_exact_kl_in_the_loss_and_in_the_reward(task: Path, tmp_path: Path) -> None:
    steps = run_ppo(task, tmp_path / "loss", f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full")
    assert steps[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6) and steps[1]["actor/kl_loss"] > 1e-6
    exact = run_ppo(task, tmp_path / "exact", "algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=full")
    estimated = run_ppo(task, tmp_path / "k3", "algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=k3")
    actual, expected = (run[1]["actor/reward_kl_penalty"] for run in (exact, estimated))
    assert 0.2 * expected < actual < 5 * expected and actual > 1e-6


def test_truncated_responses_are_masked_or_bootstrapped(task: Path, tmp_path: Path, plain: dict[str, float]) -> None:
    assert 0 < plain["response_length/clip_ratio"] < 1, "the batch must have truncated and terminated responses"
    masked = run_ppo(task, tmp_path / "mask", *ONE_STEP, "algorithm.truncated_answers=mask")[0]
    assert masked["actor/grad_norm"] != plain["actor/grad_norm"] and masked["critic/score/mean"] == plain["critic/score/mean"]
    everything = ("actor_rollout_ref.rollout.ignore_eos=true", "algorithm.truncated_answers=mask")
    assert run_ppo(task, tmp_path / "all", *ONE_STEP, *everything)[0]["actor/grad_norm"] == 0.0
    ppo = ("algorithm=ppo", "algorithm.gamma=0.9", "algorithm.lam=0.9")
    kept = run_ppo(task, tmp_path / "kept", *ppo)
    bootstrapped = run_ppo(task, tmp_path / "bootstrapped", *ppo, "algorithm.truncated_answers=bootstrap")
    assert repeatable(kept)[0]["critic/returns/mean"] == bootstrapped[0]["critic/returns/mean"], "values of a new critic are 0"
    assert kept[1]["critic/returns/mean"] != bootstrapped[1]["critic/returns/mean"]


def test_normalized_targets_resume_bitwise(task: Path, tmp_path: Path) -> None:
    overrides = ("algorithm=ppo", "critic.normalize_targets=true", "trainer.save_freq=2", "trainer.total_training_steps=3")
    whole = run_ppo(task, tmp_path / "whole", *overrides)
    run_ppo(task, tmp_path / "broken", *overrides, "trainer.total_training_steps=2")
    assert repeatable(run_ppo(task, tmp_path / "broken", *overrides)) == repeatable(whole)
    raw = run_ppo(task, tmp_path / "raw", *overrides, "critic.normalize_targets=false")
    assert whole[0]["critic/vf_loss"] == raw[0]["critic/vf_loss"], "no moments exist in the first step"
    assert whole[2]["critic/vf_loss"] != raw[2]["critic/vf_loss"]
    # The values that advantages are computed from are in units of the rewards again: at the mean of the returns, for a new head.
    assert abs(whole[1]["critic/values/mean"] - whole[0]["critic/returns/mean"]) < 0.5 * abs(whole[0]["critic/returns/mean"])


@pytest.mark.parametrize("mode", [(), ("bypass_mode=true", "loss_type=reinforce")], ids=["before", "bypass"])
def test_correction_weights_and_rejections_reach_the_loss(
    task: Path, tmp_path: Path, plain: dict[str, float], mode: tuple[str, ...]
) -> None:
    """The ratio is 1: truncated at 0.5 it halves the gradient; outside the bounds all tokens are masked."""
    halved = (*mode, "rollout_is=token", "rollout_is_threshold=0.5")
    step = run_ppo(task, tmp_path / "halved", *ONE_STEP, *(f"{CORRECTION}.{change}" for change in halved))[0]
    assert step["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"] / 2, rel=1e-4)
    rejected = (*mode, "rollout_rs=token_k1", "rollout_rs_threshold=1.5_2.0")
    step = run_ppo(task, tmp_path / "rejected", *ONE_STEP, *(f"{CORRECTION}.{change}" for change in rejected))[0]
    assert step["rollout_corr/rollout_rs_masked_fraction"] == 1.0 and step["actor/grad_norm"] == 0.0


def test_clip_cov_samples_new_tokens_in_every_update(task: Path, tmp_path: Path) -> None:
    """Every third token is excluded: the gradient differs from the plain one, and the same seed gives the same run."""
    loss = f"{ACTOR}.policy_loss"
    overrides = (f"{loss}.loss_mode=clip_cov", f"{loss}.clip_cov_ratio=0.3", f"{loss}.clip_cov_lb=-9", f"{loss}.clip_cov_ub=9")
    one, again = (run_ppo(task, tmp_path / name, *overrides, *EVERY_UPDATE, *ONE_STEP)[0] for name in ("one", "again"))
    assert repeatable([one]) == repeatable([again])
    assert one["actor/pg_clipfrac"] == pytest.approx(0.3, abs=0.02)
    other = run_ppo(task, tmp_path / "other", *overrides, *EVERY_UPDATE, *ONE_STEP, f"{loss}.clip_cov_ratio=1.0")[0]
    assert other["actor/grad_norm"] < one["actor/grad_norm"]


@pytest.mark.parametrize("mode", [pytest.param("before", marks=pytest.mark.soak), "bypass"])
def test_fully_masked_mini_batches_do_not_end_the_run(task: Path, tmp_path: Path, mode: str) -> None:
    """Every response is truncated and masked; the log has only finite numbers."""
    emptied = ("actor_rollout_ref.rollout.ignore_eos=true", "algorithm.truncated_answers=mask")
    rules = ["rollout_is=token", "rollout_rs=seq_mean_k1", "rollout_rs_threshold=0.5_2.0"]
    rules += ["bypass_mode=true", "loss_type=reinforce"] if mode == "bypass" else []
    steps = run_ppo(task, tmp_path, *emptied, *EVERY_UPDATE, *(f"{CORRECTION}.{rule}" for rule in rules))
    assert [step["actor/grad_norm"] for step in steps] == [0.0, 0.0]
    assert all(isinstance(value, int | float) and math.isfinite(value) for step in steps for value in step.values())
