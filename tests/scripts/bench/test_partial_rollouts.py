"""Partial rollouts on a real engine: the same responses as in the simulation."""

import json

import pytest

from scripts.bench.partial_rollouts import main


def test_quick_run_generates_what_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick"])
    report = json.loads(capsys.readouterr().out)
    assert min(report["settings"][cost] for cost in "ac") > 0 and report["settings"]["b"] >= 0
    for mode in ("synchronous", "partial"):
        measured, simulated = report["measured"][mode], report["simulated"][mode]
        assert measured["tokens"] == simulated["tokens"] > 0 and measured["seconds"] > 0
        assert 0 < measured["running"] <= report["settings"]["slots"]
    for name in ("rollout/stale_tokens", "rollout/recomputed_tokens", "rollout/age/mean"):
        assert report["measured"]["partial"][name] == report["simulated"]["partial"][name]
    assert report["measured"]["partial"]["rollout/recomputed_tokens"] > 0
    counts = [[n for n, _ in points] for points in report["decode"].values()]
    assert len(counts) == 3 and counts[0] == counts[1] == counts[2], "before, and in each of the modes"
    assert report["ratio"]["measured"] > 0 and report["ratio"]["simulated"] > 0
