import signal
import threading

import pytest

from trainer.rewards.rules.equivalence import LIMITS, equivalent, is_cheap


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
def test_costly_expressions_are_not_evaluated(expression: str) -> None:
    assert not is_cheap(expression)


@pytest.mark.parametrize(
    "expression", [r"x^{100}", "2^{999}", r"\frac{\sqrt{x^2+y^2}}{(a+b)^2}", "x^4+x^3+x^2+x+1", "a^2b^2c^2d^2", "10!", "9" * 39]
)
def test_common_answers_are_evaluated(expression: str) -> None:
    assert is_cheap(expression)


def test_comparison_over_its_limits_is_false_and_the_next_one_works() -> None:
    endless = r"x^{999}-y^{998}+(x+y)^{997}"
    assert is_cheap(endless) and LIMITS.cpu_seconds < 1.0
    assert not equivalent(endless, "5")
    assert equivalent("y+1", "1+y")


def test_comparisons_work_in_any_thread_and_set_no_alarm() -> None:
    found: list[bool] = []
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    thread = threading.Thread(target=lambda: found.append(equivalent("2(x+1)", "2x+2")))
    thread.start()
    thread.join()
    assert found == [True] and equivalent("2(y+1)", "2y+2")
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0) == before
