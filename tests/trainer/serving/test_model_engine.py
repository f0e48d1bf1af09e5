"""The length of a tick: short enough for its clients, long enough to pay for its call."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.model_serving import EchoServer, echo_server, post
from trainer.rollout.remote_rollout import STEPS
from trainer.serving.model_engine import tick_steps

PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("seconds", "steps", "wanted"),
    [(0.1, 4, 4), (0.036, 4, 11), (0.4, 4, 1), (3.0, 1, 1), (0.001, 1, STEPS), (0.05, 1, 2)],
)
def test_a_tick_takes_about_a_tenth_of_a_second(seconds: float, steps: int, wanted: int) -> None:
    assert tick_steps(seconds, steps) == wanted


def test_a_tick_whose_requests_are_mostly_new_is_one_step() -> None:
    """The others of a burst enter after it, and the first token of a single request comes at once."""
    ticks: list[tuple[int, int]] = []
    with echo_server() as server, ThreadPoolExecutor(8) as pool:
        recorded(server, ticks)
        first = pool.submit(post, server.url, PATH, say(450))
        while len(ticks) < 5:
            time.sleep(0.001)
        server.rollout.hold.clear()  # the next tick ends when the others have come
        time.sleep(0.05)
        others = [pool.submit(post, server.url, PATH, say(100)) for _ in range(3)]
        while server.engine.unfinished < 4:
            time.sleep(0.001)
        time.sleep(0.05)
        server.rollout.hold.set()
        assert [one.result()[0] for one in (first, *others)] == [200] * 4
    assert ticks[0] == (1, 1) and ticks[1][0] > 1
    assert next(steps for steps, running in ticks if running == 4) == 1
    assert next(steps for steps, running in reversed(ticks) if running == 4) > 1


def say(tokens: int) -> dict[str, object]:
    return {"model": "echo", "prompt": f"say:{'x' * tokens}", "max_tokens": tokens}


def recorded(server: EchoServer, ticks: list[tuple[int, int]]) -> None:
    """Record (steps, running requests) of each tick."""
    start = server.rollout.start

    def watched(steps: int, *, streams: bool) -> bool:
        working = start(steps, streams=streams)
        if working:
            ticks.append((steps, server.engine.unfinished))
        return working

    server.rollout.start = watched  # type: ignore[method-assign]
