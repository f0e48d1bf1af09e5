"""Generation ahead with engines that sleep takes the time that the simulated scheduler predicts."""

import json
from dataclasses import replace

import pytest

import trainer.rollout.remote_rollout as remote_rollout
from scripts.bench.ahead import SleepingEngine, main, seconds_per_step
from scripts.bench.rollout_flow import Settings, SimulatedEngine

SMALL = Settings(
    prompts=4, n=4, prompt_tokens=8, max_tokens=64, slots=16, replicas=1, oversubmit=1.5, max_age=0, a=1e-2, b=1e-4, c=1e-5,
    train=0.3, steps=3, warm_up=1,
)  # fmt: skip


@pytest.mark.parametrize("bound", [1, 2])
def test_a_step_takes_the_longer_of_generation_and_update(bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeping takes at least the time; the upper limit leaves room for a loaded machine."""
    monkeypatch.setattr(remote_rollout, "STEPS", 8)
    settings = replace(SMALL, max_staleness=bound)
    measured, predicted = (seconds_per_step(settings, engine) for engine in (SleepingEngine, SimulatedEngine))
    assert 0.99 * predicted < measured < 1.5 * predicted
    one_after_the_other = seconds_per_step(replace(settings, max_staleness=0), SimulatedEngine)
    assert predicted < one_after_the_other - 0.8 * min(settings.train, one_after_the_other - settings.train)


def test_prediction_without_training_is_the_time_of_the_engine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of one_step_off waits for the longest response, as a synchronous one does; with a larger bound it does not."""
    monkeypatch.setattr(remote_rollout, "STEPS", 4)
    found = [seconds_per_step(replace(SMALL, train=0.0, steps=8, max_staleness=bound), SimulatedEngine) for bound in (0, 1, 4)]
    assert found[0] == pytest.approx(found[1], rel=0.2) and found[2] < 0.9 * found[1]


@pytest.mark.soak
def test_measured_steps_per_hour_are_within_five_percent_of_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    """Needs an idle core."""
    main([])
    modes = json.loads(capsys.readouterr().out)["modes"]
    assert list(modes) == ["0", "1", "2", "4"]
    assert all(0.95 <= mode["ratio"] <= 1.0 for mode in modes.values()), modes
    assert 1 == modes["0"]["speedup"] < modes["1"]["speedup"] < modes["2"]["speedup"] < modes["4"]["speedup"]
