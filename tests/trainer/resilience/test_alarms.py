"""Synthetic metric series, healthy and diverged."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.compose import compose
from configs.schema.alarms import AlarmConfig
from configs.schema.ppo import PPOConfig
from trainer.resilience.alarms import END_TOKENS, MEAN, SKIPPED_IN_A_ROW, WINDOW, Alarm, Alarms, ppo_alarms, react
from trainer.run.errors import CheckFailed
from trainer.run.events import Events
from trainer.run.run_dir import EVENTS, read_lines

CONFIG = compose("ppo_trainer", PPOConfig)
NAMES = [name for name in asdict(CONFIG.alarms) if name != "max_rollbacks"]


def with_alarm(name: str, **changes: Any) -> PPOConfig:
    """The defaults with one alarm changed."""
    alarm = AlarmConfig(**(asdict(CONFIG.alarms)[name] | changes))
    return replace(CONFIG, alarms=replace(CONFIG.alarms, **{name: alarm}))


def healthy(steps: int, seed: int = 0, **changes: Any) -> list[dict[str, float]]:
    """Metrics of a run that learns: the score rises with noise, other metrics vary. changes: values of a metric."""
    draw = np.random.default_rng(seed)
    scores = np.clip(np.linspace(0.1, 0.9, steps) + draw.normal(0, 0.05, steps), 0, 1)
    columns: dict[str, Any] = {
        "critic/score/mean": scores, "critic/score/max": np.ones(steps), "critic/score/min": np.zeros(steps),
        "actor/entropy": np.linspace(2.0, 0.05, steps), "actor/ppo_kl": draw.normal(0, 0.01, steps),
        "actor/kl_loss": np.linspace(0, 0.5, steps), "training/rollout_log_probs_diff_mean": np.full(steps, 1e-3),
        "actor/grad_norm": draw.lognormal(0, 0.5, steps), "critic/grad_norm": draw.lognormal(2, 0.5, steps),
        "response_length/mean": np.linspace(100, 300, steps), "response_length/clip_ratio": draw.uniform(0, 0.3, steps),
        "reward/failed_share": draw.uniform(0, 0.04, steps), "training/zero_signal_groups": draw.uniform(0, 0.9, steps),
        "val/accuracy": np.linspace(0.1, 0.9, steps), "val/accuracy_std": np.full(steps, 0.5),
        "val/accuracy_min": np.zeros(steps), "val/problems": np.full(steps, 200.0),
        "rollout/staleness/mean": draw.uniform(0, 2, steps), "perf/rollout_idle": draw.uniform(0, 0.45, steps),
        "perf/trainer_idle": draw.uniform(0, 0.45, steps),
    }  # fmt: skip
    columns |= changes
    return [{name: float(column[i]) for name, column in columns.items() if column[i] is not None} for i in range(steps)]


def fired(alarms: Alarms, run: Sequence[dict[str, float]], first: int = 1) -> list[tuple[int, Alarm]]:
    return [(step, alarm) for step, metrics in enumerate(run, first) for alarm in alarms.evaluate(step, metrics)]


def step_change(steps: int, healthy_steps: int, before: float, after: float) -> np.ndarray:
    return np.where(np.arange(steps) < healthy_steps, before, after)


# A diverged series of each alarm: what changes after step 20, and the step at which the defaults fire.
DIVERGED: dict[str, tuple[dict[str, Any], int]] = {
    "nonfinite": ({SKIPPED_IN_A_ROW: [None] * 20 + list(range(1, 21))}, 25),
    "reward": ({"critic/score/mean": step_change(40, 20, 0.8, 0.0)}, 28),  # 0.32 below its best from the 4th on
    "entropy": ({"actor/entropy": step_change(40, 20, 0.5, 1e-6)}, 30),
    "policy_kl": ({"actor/ppo_kl": step_change(40, 20, 0.01, -2.0)}, 22),
    "ref_kl": ({"actor/kl_loss": step_change(40, 20, 0.5, 11.0)}, 25),
    "mismatch": ({"training/rollout_log_probs_diff_mean": step_change(40, 20, 1e-3, 0.11)}, 21),
    "grad_norm": ({"critic/grad_norm": step_change(40, 20, 1.0, 31.0)}, 22),
    "length": ({"response_length/mean": step_change(40, 20, 100.0, 401.0)}, 25),
    "clip_ratio": ({"response_length/clip_ratio": step_change(40, 20, 0.0, 0.9)}, 30),  # 0.54 above its minimum from the 6th on
    "failed_rewards": ({"reward/failed_share": step_change(40, 20, 0.0, 1 / 3)}, 21),
    "zero_signal": ({"training/zero_signal_groups": step_change(40, 20, 0.5, 0.95)}, 30),
    "no_learning": ({"critic/score/mean": np.zeros(40), "actor/grad_norm": step_change(40, 20, 1.0, 0.0)}, 25),
    "validation": ({"val/accuracy": step_change(40, 20, 0.53, 0.004)}, 21),
    "truncated": ({"response_length/clip_ratio": np.full(40, 0.97)}, 5),  # from the first step on
    "end_token": ({END_TOKENS: np.zeros(40)}, 1),
    "staleness": ({"rollout/staleness/mean": step_change(40, 20, 1.0, 4.5)}, 25),
    "idle": ({"perf/rollout_idle": step_change(40, 20, 0.1, 0.6), "perf/trainer_idle": step_change(40, 20, 0.3, 0.2)}, 30),
}


@pytest.mark.parametrize("name", NAMES)
def test_diverged_run_is_reported_once_by_its_own_alarm(name: str) -> None:
    changes, when = DIVERGED[name]
    output = fired(ppo_alarms(with_alarm(name, action="warn")), healthy(40, **changes))
    assert [(step, alarm.text.split(":")[0], alarm.action) for step, alarm in output] == [(when, name, "warn")]
    bound = asdict(CONFIG.alarms)[name]["bound"]
    assert f"alarms.{name}.bound={bound:g}" in output[0][1].text and len(output[0][1].text) < 400


@pytest.mark.parametrize("name", NAMES)
def test_alarm_fires_after_patience_consecutive_steps(name: str) -> None:
    changes, when = DIVERGED[name]
    default = asdict(CONFIG.alarms)[name]["patience"]
    output = fired(ppo_alarms(with_alarm(name, patience=default + 3, action="warn")), healthy(40, **changes))
    assert [step for step, _ in output] == [when + 3]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [{"action": "off"}, {"bound": None}], ids=["off", "no bound"])
def test_disabled_alarm_never_fires(name: str, change: dict[str, Any]) -> None:
    assert fired(ppo_alarms(with_alarm(name, **change)), healthy(40, **DIVERGED[name][0])) == []


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 150), st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_healthy_run_fires_no_alarm(seed: int, steps: int, shift: float, scale: float) -> None:
    """For any unit of the reward and any length."""
    run = healthy(steps, seed)
    for metrics in run:
        metrics |= {name: shift + scale * metrics[name] for name in metrics if name.startswith("critic/score")}
    assert fired(ppo_alarms(CONFIG), run) == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.dictionaries(st.sampled_from(sorted(healthy(1)[0])), st.floats(), max_size=8), max_size=40), st.integers(0, 40)
)
def test_resumed_alarms_fire_as_uninterrupted_ones_on_any_series(run: list[dict[str, float]], cut: int) -> None:
    """Including values that are not finite and missing metrics; the state passes through JSON."""
    whole = ppo_alarms(CONFIG)
    output = fired(whole, run)
    broken = ppo_alarms(CONFIG)
    first = fired(broken, run[:cut])
    resumed = ppo_alarms(CONFIG)
    resumed.load(json.loads(json.dumps(broken.state(), allow_nan=False)))
    assert first + fired(resumed, run[cut:], first=len(run[:cut]) + 1) == output
    assert resumed.state() == whole.state()


@settings(max_examples=25, deadline=None)
@given(st.integers(MEAN + 5, 60), st.floats(0.45, 1.0))
def test_collapse_of_the_reward_is_reported_within_the_window_and_patience(before: int, depth: float) -> None:
    run = healthy(before + 20, **{"critic/score/mean": step_change(before + 20, before, 1.0, 1.0 - depth)})
    (output,) = fired(ppo_alarms(CONFIG), run)
    assert before < output[0] <= before + MEAN + CONFIG.alarms.reward.patience


def test_warning_fires_again_after_a_healthy_step() -> None:
    mismatch = [0.2, 0.2, 1e-3, 0.2, None, 0.2]
    run = healthy(6, **{"training/rollout_log_probs_diff_mean": mismatch})
    assert [step for step, _ in fired(ppo_alarms(CONFIG), run)] == [1, 4]
    # A step without a measurement counts neither as healthy nor as diverged.
    assert [step for step, _ in fired(ppo_alarms(with_alarm("mismatch", patience=2)), run)] == [2, 6]


def test_alarm_with_an_action_fires_until_it_acted() -> None:
    """A resumed run whose alarm was made stricter acts without waiting for the next episode."""
    alarms = ppo_alarms(CONFIG)
    run = healthy(9, **{"training/rollout_log_probs_diff_mean": [0.2] * 9})
    fired(alarms, run[:5])
    stricter = ppo_alarms(with_alarm("mismatch", action="stop"))
    stricter.load(alarms.state())
    assert [step for step, _ in fired(stricter, run[5:], first=6)] == [6, 7, 8, 9]


def test_healthy_until_precedes_the_window_of_the_alarm() -> None:
    """The mean of ten steps is below its bound from step 24 on: it covers steps 15 to 24."""
    (output,) = fired(ppo_alarms(with_alarm("reward", action="warn")), healthy(40, **DIVERGED["reward"][0]))
    assert output[1].healthy_until == 24 - MEAN
    (output,) = fired(ppo_alarms(CONFIG), healthy(40, **DIVERGED["ref_kl"][0]))
    assert output[1].healthy_until == 20


@pytest.mark.parametrize(
    "norms", [[1.0, 0.0, 0.0] * WINDOW, [1.0, 0.0] * WINDOW, [1e-3] * 3 + [1.0] * WINDOW], ids=["mostly none", "some", "warm-up"]
)
def test_steps_without_a_gradient_do_not_lower_the_usual_norm(norms: list[float]) -> None:
    """Groups with equal rewards have no gradient; the next one that has is no explosion. Nor is the end of a warm-up."""
    assert fired(ppo_alarms(CONFIG), healthy(len(norms), **{"actor/grad_norm": norms})) == []


@pytest.mark.parametrize(
    ("accuracies", "problems", "when"),
    [
        ([0.072, 0.05, 0.002], 200, [3]),  # 0.070 of 0.072, and the standard error is 0.018
        ([0.072, 0.05, 0.002], 20, []),  # an equal decrease, within the noise of 20 problems
        ([0.53, 0.43, 0.45, 0.95], 200, []),  # a temporary decrease
        ([0.9, 0.5, 0.4, 0.5, 0.4], 200, [3, 5]),  # again after it was above half of the best
        ([0.0, 0.0, 0.0], 200, []),
    ],
    ids=["lost", "noise", "dip", "twice", "nothing to lose"],
)
def test_validation_alarm_fires_below_half_of_the_best_beyond_noise(
    accuracies: list[float], problems: int, when: list[int]
) -> None:
    """Scores of right and wrong responses. Steps between validations have none of these metrics."""
    spreads = [(share * (1 - share)) ** 0.5 for share in accuracies]
    run = [
        {"val/accuracy": share, "val/accuracy_std": std, "val/accuracy_min": 0.0, "val/problems": float(problems)}
        for share, std in zip(accuracies, spreads, strict=True)
    ]
    alarms, output = ppo_alarms(CONFIG), []
    for number, measured in enumerate(run, 1):
        output += [number for _ in alarms.evaluate(10 * number, measured)] + [0 for _ in alarms.evaluate(10 * number + 1, {})]
    assert output == when


def test_validation_alarm_measures_reward_models_from_their_minimum() -> None:
    """Raw scores of at least -2: from 1 to -1 is a loss of two thirds of the range above the minimum."""
    alarms = ppo_alarms(CONFIG)
    run = [{"val/accuracy": value, "val/accuracy_std": 1.0, "val/accuracy_min": -2.0, "val/problems": 100.0} for value in (1, -1)]
    ((step, alarm),) = fired(alarms, run)
    assert step == 2 and "in parts of the best, is 0.667" in alarm.text


def test_ignore_eos_disables_the_truncation_alarms() -> None:
    models = CONFIG.actor_rollout_ref
    config = replace(CONFIG, actor_rollout_ref=replace(models, rollout=replace(models.rollout, ignore_eos=True)))
    assert fired(ppo_alarms(config), healthy(40, **DIVERGED["truncated"][0], **DIVERGED["end_token"][0])) == []


def test_state_of_a_checkpoint_without_an_alarm_is_loaded() -> None:
    alarms = ppo_alarms(CONFIG)
    alarms.load(
        {"memory": {"recent": {}, "extremes": {"critic/score max": 1.0}}, "beyond": {"reward": 2}, "since": {"reward": 7}}
    )
    assert [alarm.text.split(":")[0] for alarm in alarms.evaluate(9, {"reward/failed_share": 0.5})] == ["failed_rewards"]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_ref_kl_alarm_is_active_only_if_the_loss_is_a_mean_over_tokens(mode: Any) -> None:
    models = CONFIG.actor_rollout_ref
    config = replace(CONFIG, actor_rollout_ref=replace(models, actor=replace(models.actor, loss_agg_mode=mode)))
    assert len(fired(ppo_alarms(config), healthy(40, **DIVERGED["ref_kl"][0]))) == (mode == "token-mean")


def test_stop_raises_after_all_alarms_are_reported(tmp_path: Path) -> None:
    events = Events(tmp_path)
    warning, back, end = (Alarm(action, f"{action} text", 3) for action in ("warn", "rollback", "stop"))  # type: ignore[arg-type]
    assert react([], events, 7) is None and react([warning], events, 7) is None
    assert react([warning, back], events, 8) is back
    with pytest.raises(CheckFailed, match="stopped at step 9 by an alarm: stop text"):
        react([back, end, warning], events, 9)
    assert [event["text"].split()[0] for event in read_lines(tmp_path / EVENTS)] == [
        "warn", "warn", "rollback", "rollback", "stop", "warn"
    ]  # fmt: skip
