"""Programs with parallel calls through an engine whose steps take time."""

import argparse

import pytest

from scripts.bench.parallel_calls import measure


@pytest.mark.alone
def test_calls_at_the_same_time_take_the_time_of_one() -> None:
    args = argparse.Namespace(sessions=1, calls=4, tokens=32, seconds=0.03)
    sequential, parallel = (measure(args, parallel=parallel) for parallel in (False, True))
    assert sequential["calls"] == parallel["calls"] == 4
    assert sequential["seconds"] > 4 * 32 * 0.03 and parallel["seconds"] < 0.6 * sequential["seconds"]
