import signal
import threading

import pytest

from trainer.rewards.equivalence import LIMITS, equivalent, is_tame


@pytest.mark.parametrize(
    "expression",
    [
        "9^9^9^9",
        "9^{9^{9^9}}",
        "9**9**9**9",
        "(((9^9)^9)^9)",
        "e^{e^{e^x}}",
        "2^{10000}",
        "2^(99999)",
        "5000!",
        "3!!",
        "9" * 40,
        "{" * 21 + "}" * 21,
        "(" * 21 + ")" * 21,
        "x\0",
        "+".join(f"x^{n}" for n in range(13)),
        "a" * 501,
    ],
)
def test_what_costs_time_is_not_tried(expression: str) -> None:
    assert not is_tame(expression)


@pytest.mark.parametrize(
    "expression", [r"x^{100}", "2^{999}", r"\frac{\sqrt{x^2+y^2}}{(a+b)^2}", "x^4+x^3+x^2+x+1", "a^2b^2c^2d^2", "10!", "9" * 39]
)
def test_what_people_answer_is(expression: str) -> None:
    assert is_tame(expression)


def test_what_does_not_end_is_not_equal_and_the_next_comparison_is_none_the_worse() -> None:
    endless = r"x^{999}-y^{998}+(x+y)^{997}"
    assert is_tame(endless) and LIMITS.cpu_seconds < 1.0
    assert not equivalent(endless, "5")
    assert equivalent("y+1", "1+y")


def test_any_thread_may_ask_and_no_alarm_is_touched() -> None:
    found: list[bool] = []
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    thread = threading.Thread(target=lambda: found.append(equivalent("2(x+1)", "2x+2")))
    thread.start()
    thread.join()
    assert found == [True] and equivalent("2(y+1)", "2y+2")
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0) == before
