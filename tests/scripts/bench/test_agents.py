"""The bench of agent processes: all sessions end, and its numbers are positive."""

from scripts.bench.agents import measure


def test_a_small_bench_measures_all_turns() -> None:
    found = measure(1, 8, 3)
    assert (found["sessions"], found["turns"]) == (8, 3) and found["tokens_per_session"] > 0
    assert found["turns_per_s"] > 0 and found["controller_ms"] > 0
