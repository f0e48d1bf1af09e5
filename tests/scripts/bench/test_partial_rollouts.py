"""Partial rollouts on a real engine: the same responses as in the simulation."""

import json
from collections.abc import Mapping, Sequence

import pytest

from scripts.bench import partial_rollouts
from scripts.bench.partial_rollouts import FEWEST, Points, decode_points, main


def test_decode_steps_are_medians_and_others_are_scaled() -> None:
    before = ((1, 1.0), (100, 2.0), (200, 4.0))
    taken = {95: [5.0] * FEWEST, 105: [7.0] * (FEWEST + 1), 200: [0.1] * (FEWEST - 1), 150: [9.0] * FEWEST}
    assert decode_points(taken, before) == ((1, 3.5), (100, 7.0), (200, 14.0))
    assert decode_points({200: taken[200]}, before) == before


def test_quick_run_generates_what_is_simulated(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mode is simulated with its own decode steps, here of 1, 2, ... seconds. The first call is before the first mode."""
    calls = list[Mapping[int, Sequence[float]]]()

    def steps_of_seconds(taken: Mapping[int, Sequence[float]], before: Points) -> Points:
        calls.append(taken)
        return tuple((n, float(len(calls))) for n, _ in before)

    monkeypatch.setattr(partial_rollouts, "decode_points", steps_of_seconds)
    main(["--quick"])
    report = json.loads(capsys.readouterr().out)
    assert min(report["settings"][cost] for cost in "ac") > 0 and report["settings"]["b"] >= 0
    for mode in ("synchronous", "partial"):
        measured, simulated = report["measured"][mode], report["simulated"][mode]
        assert measured["tokens"] == simulated["tokens"] > 0 and measured["seconds"] > 0
        assert 0 < measured["running"] <= report["settings"]["slots"]
    for name in ("rollout/stale_tokens", "rollout/recomputed_tokens", "rollout/age/mean"):
        assert report["measured"]["partial"][name] == report["simulated"]["partial"][name]
    assert report["measured"]["partial"]["rollout/age/mean"] > 0
    assert len(calls) == 4, "before and after the steps of each mode"
    assert all(taken and taken.keys() <= set(range(1, report["settings"]["slots"] + 1)) for taken in calls[1:])
    # A response of the most tokens is in each mode's only step, or nearly so: seconds are those of its decode steps.
    for mode, seconds in (("synchronous", 2), ("partial", 4)):
        assert {value for _, value in report["decode"][mode]} == {seconds}
        steps = (report["simulated"][mode]["seconds"] - 1) / seconds
        assert 32 <= steps <= 2 * report["settings"]["max_tokens"], f"{mode}: whole decode steps of these seconds"
    assert report["ratio"]["measured"] > 0 and report["ratio"]["simulated"] > 0
