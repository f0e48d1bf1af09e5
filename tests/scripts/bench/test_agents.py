"""The bench of agent processes: all sessions end, and its numbers are positive."""

from scripts.bench.agents import measure


def test_a_small_bench_measures_all_turns() -> None:
    found = measure(1, 8, 3)
    assert (found["sessions"], found["turns"]) == (8, 3) and found["tokens_per_session"] > 0
    assert found["turns_per_s"] > 0 and found["controller_ms"] > 0 and found["turns_per_core_s"] > 0


def test_sessions_that_end_are_followed_by_others() -> None:
    found = measure(1, 8, 3, seconds=1.0)
    assert found["sessions"] > 8 and found["sessions"] % 8 == 0 and found["turns"] == 3
