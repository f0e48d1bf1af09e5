"""Score a program by unit tests, each run in a sandboxed process (trainer/rewards/sandbox/seccomp.py)."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from math import isclose, isfinite
from typing import Any

from configs.schema.ppo import CodeRewardConfig
from trainer.rewards.sandbox.assertions import PASSED
from trainer.rewards.sandbox.forkserver import JobLimits, JobOutcome, fork_server

_LEAST_OUTPUT = 1 << 20
"""Bytes that a test may print; twice the expected output if that is more."""
_MARGIN = 1.0
"""Seconds reserved for the overhead of a response besides its tests."""
_RELATIVE, _ABSOLUTE = 1e-5, 1e-8
"""Tolerances for non-integer numbers."""


@dataclass(frozen=True, slots=True)
class Test:
    """One unit test. job, stdin: see sandbox.run. assertions: a job for assertions.run; None: compare with ``expected``."""

    job: dict[str, Any]
    stdin: str = ""
    expected: Any = None
    assertions: dict[str, Any] | None = None

    def run(self, limits: JobLimits) -> tuple[bool, bool]:
        """Run the test: whether the program passes, and whether it exceeded its time limit."""
        if self.assertions is not None:
            # The outcome of the program's own process is ignored, except for time: it is written by the program.
            program, assertions = _call(self.job, self.assertions, limits)
            passed = assertions == JobOutcome(None, PASSED, assertions.output)
            return passed, _ran_out_of_time(program) or _ran_out_of_time(assertions)
        outcome = fork_server("trainer.rewards.sandbox.sandbox").run(self.job, limits, self.stdin)
        return outcome.ending is None and self._is_correct(outcome), _ran_out_of_time(outcome)

    def _is_correct(self, outcome: JobOutcome) -> bool:
        if "fn_name" not in self.job:
            return same_output(outcome.output, self.expected)
        with suppress(ValueError, RecursionError):  # the result is written by the program and may be invalid JSON
            return _same_value(json.loads(outcome.result), self.expected)
        return False


def _call(job: dict[str, Any], assertions: dict[str, Any], limits: JobLimits) -> tuple[JobOutcome, JobOutcome]:
    """Run a program and the assertions that call it in two connected processes; return the outcomes of both."""
    program_end, assertions_end = socket.socketpair()
    sandbox, evaluator = fork_server("trainer.rewards.sandbox.sandbox"), fork_server("trainer.rewards.sandbox.assertions")
    with (
        program_end,
        assertions_end,
        sandbox.start(job, limits, peer=program_end) as program,
        evaluator.start(assertions, limits, peer=assertions_end) as running,
    ):
        # Both ends are closed here: each must be open in one process only, so that the death of one is an end of file for the
        # other instead of a wait until its limit.
        program_end.close()
        assertions_end.close()
        result = running.wait()
        return program.stop(), result


def score(answer: str, ground_truth: Any, config: CodeRewardConfig, *, seconds: float) -> dict[str, float]:
    """score: fraction of the tests that pass, or with ``partial=false`` 1 if all pass, else 0. acc: 1 if all pass.

    ground_truth, JSON or decoded JSON: verl's ``{"inputs": [...], "outputs": [...], "fn_name": optional}``; a list of
    assertions, or ``{"assert_case": [...]}``; HumanEval's ``{"test": "def check(candidate): ...", "entry_point": name}``.
    A test that exceeds its time limit ends the run: it and the remaining tests count as failed, as do tests that could not
    finish within ``seconds``. Raises ValueError for other ground truths, RuntimeError if this machine cannot sandbox.
    """
    tests = list(_tests(extract(answer), ground_truth))
    if not tests:
        raise ValueError("the ground truth contains no test")
    start, passed = time.monotonic(), 0
    for test in tests:
        expected = test.expected if isinstance(test.expected, str) else json.dumps(test.expected)
        limits = JobLimits(config.time_limit, config.memory_limit_mb << 20, max(_LEAST_OUTPUT, 2 * len(expected.encode())))
        ok, late = test.run(limits)
        passed += ok
        if not ok and (not config.partial or late):
            break
        # Start no test that might outlast reward.timeout: the scoring process would be killed, and the response would have no
        # score instead of a partial one.
        if time.monotonic() - start + limits.clock_seconds + _MARGIN > seconds:
            break
    everything = passed == len(tests)
    return {"score": passed / len(tests) if config.partial else float(everything), "acc": float(everything)}


def extract(answer: str) -> str:
    """Program text of a response: the last Python code block, else the last code block, else the whole text.

    The closing fence may be missing.
    """
    start = max(answer.rfind("```python"), answer.rfind("```py\n"))
    if start >= 0:
        return answer[start + 3 :].partition("\n")[2].partition("```")[0]
    blocks = answer.split("```")[1::2]
    return blocks[-1].partition("\n")[2] if blocks else answer


def same_output(output: str, expected: str) -> bool:
    """Compare outputs word by word, ignoring whitespace, with a tolerance for non-integer numbers."""
    words, wanted = output.split(), expected.split()
    return words == wanted or (len(words) == len(wanted) and all(map(_same_word, words, wanted)))


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    try:
        # Integers are compared exactly: a relative tolerance would accept another remainder or index. Decimal, since float
        # rounds integers above 2^53.
        if expected.lstrip("+-").isdigit():
            return abs(Decimal(word) - Decimal(expected)) <= _ABSOLUTE
        number, wanted = float(word), float(expected)
    except (ValueError, ArithmeticError):
        return False
    return isfinite(number) and isfinite(wanted) and isclose(number, wanted, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)


def _same_value(value: Any, expected: Any) -> bool:
    """Whether the values are equal; a list of one value may stand for the value, as in verl's data sets."""
    return _equal(value, expected) or (isinstance(expected, list) and len(expected) == 1 and _equal(value, expected[0]))


def _equal(value: Any, expected: Any) -> bool:
    """Equality of JSON values as in Python (1 == 1.0), except that true and 1 differ."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_equal, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_equal(value[key], expected[key]) for key in expected)
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)


def _ran_out_of_time(outcome: JobOutcome) -> bool:
    # SIGPROF is the timer of CPU time, SIGKILL the kernel's hard limit behind it; «timed out» is the wall clock.
    return outcome.ending is not None and any(sign in outcome.ending for sign in ("SIGPROF", "SIGKILL", "timed out"))


def _tests(code: str, ground_truth: Any) -> Iterator[Test]:
    """The tests of a ground truth, see ``score``."""
    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if isinstance(truth, list):
        truth = {"assert_case": truth}
    if "assert_case" in truth:
        for asserts in truth["assert_case"]:
            yield Test({"code": code, "serve": True}, assertions={"asserts": asserts})
    elif "test" in truth:
        assertions = {"asserts": truth["test"], "entry_point": truth["entry_point"]}
        yield Test({"code": code, "serve": True}, assertions=assertions)
    elif "inputs" in truth and "outputs" in truth:
        for given, expected in zip(truth["inputs"], truth["outputs"], strict=True):
            if truth.get("fn_name") is None:
                yield Test({"code": code}, _lines(given), _lines(expected))
            else:
                yield Test({"code": code, "fn_name": truth["fn_name"], "arguments": _arguments(given)}, "", _value(expected))
    else:
        raise ValueError(
            f"the ground truth must have inputs and outputs, assert_case, or test and entry_point; it has {', '.join(truth)}"
        )


def _lines(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _arguments(given: Any) -> list[Any]:
    """Arguments of a call: one JSON value per line of a text, or the elements of a list."""
    return [json.loads(line) for line in given.split("\n")] if isinstance(given, str) else list(given)


def _value(expected: Any) -> Any:
    return json.loads(expected) if isinstance(expected, str) else expected
