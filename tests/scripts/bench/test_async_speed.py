"""scripts/bench/async_speed.py: rates from a run's metrics, a mode that fails, and lengths that are geometric."""

import json
from pathlib import Path

import pytest

from scripts.bench.async_speed import geometric_model, main, summary


def step(seconds: float, mean: float) -> dict[str, float]:
    return {"timing_s/step": seconds, "timing_s/gen": seconds / 2, "response_length/mean": mean, "rollout/staleness/mean": 0.5}


def test_rates_are_of_the_sum_of_all_steps() -> None:
    found = summary([step(2.0, 10.0), step(4.0, 20.0), step(6.0, 60.0)], responses=8)
    assert found["tokens_per_second"] == 8 * 90 / 12 and found["steps_per_hour"] == 900
    assert found["seconds"] == {"step": 4.0, "gen": 2.0} and found["metrics"]["rollout/staleness/mean"] == 0.5
    assert summary([], 8) == {}


def test_one_token_of_mean_tokens_ends_a_response(tmp_path: Path) -> None:
    path = geometric_model(tmp_path, "tiny", 8)
    ends = json.loads((path / "generation_config.json").read_text())["eos_token_id"]
    assert len(set(ends)) == 320 // 8 and 0 not in ends and max(ends) == 319
    assert geometric_model(tmp_path, "tiny", 8) == path and geometric_model(tmp_path, "tiny", 80) != path


def test_a_mode_that_fails_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--out", str(tmp_path), "--quick", "--modes", "synchronous", "--overrides", "trainer.nonsense=1"])
    failed = json.loads(capsys.readouterr().out)["modes"]["synchronous"]["failed"]
    assert failed.startswith("exit code") and "trainer.nonsense" in failed


@pytest.mark.soak
def test_modes_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--out", str(tmp_path), "--quick", "--modes", "synchronous", "async-1"])
    modes = json.loads(capsys.readouterr().out)["modes"]
    assert modes["synchronous"]["speedup"] == 1 and modes["async-1"]["speedup"] > 0
    assert modes["async-1"]["steps"] == 2 and modes["async-1"]["metrics"]["rollout/staleness/max"] == 1
