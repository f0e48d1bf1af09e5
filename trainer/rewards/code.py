"""A program, judged by unit tests: each runs in a confined process (trainer/rewards/confine.py)."""

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
from trainer.rewards.assertions import PASSED
from trainer.rewards.forkserver import Limits, Outcome, fork_server

_LEAST_OUTPUT = 1 << 20  # bytes that a test may print; twice the expected output if that is more
_MARGIN = 1.0  # seconds that an answer needs besides its tests
_RELATIVE, _ABSOLUTE = 1e-5, 1e-8  # how near two numbers that are not whole must be


@dataclass(frozen=True, slots=True)
class Test:
    """job, stdin: see sandbox.run. assertions: a job for assertions.run, or None; then ``expected`` must come back."""

    job: dict[str, Any]
    stdin: str = ""
    expected: Any = None
    assertions: dict[str, Any] | None = None

    def run(self, limits: Limits) -> tuple[bool, bool]:
        """Whether the program passes, and whether time ran out."""
        if self.assertions is not None:
            outcome, verdict = _call(self.job, self.assertions, limits)
            return verdict == Outcome(None, PASSED, verdict.output), _ran_out_of_time(outcome) or _ran_out_of_time(verdict)
        outcome = fork_server("trainer.rewards.sandbox").run(self.job, limits, self.stdin)
        return outcome.ending is None and self._is_right(outcome), _ran_out_of_time(outcome)

    def _is_right(self, outcome: Outcome) -> bool:
        if "fn_name" not in self.job:
            return same_output(outcome.output, self.expected)
        with suppress(ValueError, RecursionError):  # what came back is the program's, and may be no JSON
            return _same_value(json.loads(outcome.result), self.expected)
        return False


def _call(job: dict[str, Any], assertions: dict[str, Any], limits: Limits) -> tuple[Outcome, Outcome]:
    """A program in one process, the assertions that call it in another: how both ended."""
    ours, theirs = socket.socketpair()
    program, judge = fork_server("trainer.rewards.sandbox"), fork_server("trainer.rewards.assertions")
    with ours, theirs, program.start(job, limits, peer=ours) as called, judge.start(assertions, limits, peer=theirs) as calling:
        ours.close()  # each end is open in one process alone, so that the other sees its end
        theirs.close()
        verdict = calling.wait()
        return called.stop(), verdict


def score(answer: str, ground_truth: Any, config: CodeRewardConfig, *, seconds: float) -> dict[str, float]:
    """score: the fraction of the tests that pass, or with ``partial=false`` 1 if all do, else 0. acc: all do.

    ground_truth, JSON or what JSON holds: verl's ``{"inputs": [...], "outputs": [...], "fn_name": optional}``; a list of
    assertions, or ``{"assert_case": [...]}``; HumanEval's ``{"test": "def check(candidate): ...", "entry_point": name}``.
    A test that runs into its time limit ends the run: it and what is left have failed. So has what could not be started in time
    to end in ``seconds``.
    Raises ValueError for other ground truths, RuntimeError where nothing can be confined.
    """
    tests = list(_tests(extract(answer), ground_truth))
    if not tests:
        raise ValueError("the ground truth holds no test")
    start, passed = time.monotonic(), 0
    for test in tests:
        output_bytes = max(_LEAST_OUTPUT, 2 * len(test.expected) if isinstance(test.expected, str) else 0)
        limits = Limits(config.time_limit, config.memory_limit_mb << 20, output_bytes)
        good, late = test.run(limits)
        passed += good
        if not good and (not config.partial or late):
            break
        if time.monotonic() - start + limits.clock_seconds + _MARGIN > seconds:
            break
    everything = passed == len(tests)
    return {"score": passed / len(tests) if config.partial else float(everything), "acc": float(everything)}


def extract(answer: str) -> str:
    """The last block fenced as Python; without one the last fenced; without any, all. A last fence may be missing."""
    start = max(answer.rfind("```python"), answer.rfind("```py\n"))
    if start >= 0:
        return answer[start + 3 :].partition("\n")[2].partition("```")[0]
    blocks = answer.split("```")[1::2]
    return blocks[-1].partition("\n")[2] if blocks else answer


def same_output(output: str, expected: str) -> bool:
    """Word by word, however they are spaced; numbers that are not whole may differ a little."""
    ours, theirs = output.split(), expected.split()
    return ours == theirs or (len(ours) == len(theirs) and all(map(_same_word, ours, theirs)))


def _same_word(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    try:
        if theirs.lstrip("+-").isdigit():  # exactly: it may be a remainder or an index
            return abs(Decimal(ours) - Decimal(theirs)) <= _ABSOLUTE
        found, expected = float(ours), float(theirs)
    except (ValueError, ArithmeticError):
        return False
    return isfinite(found) and isfinite(expected) and isclose(found, expected, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)


def _same_value(ours: Any, theirs: Any) -> bool:
    """A list of one value may stand for the value, as verl's data have it."""
    return _equal(ours, theirs) or (isinstance(theirs, list) and len(theirs) == 1 and _equal(ours, theirs[0]))


def _equal(ours: Any, theirs: Any) -> bool:
    """As Python compares what JSON holds (1 == 1.0), except that a truth value is no number."""
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_equal(ours[key], theirs[key]) for key in theirs)
    return ours == theirs and isinstance(ours, bool) == isinstance(theirs, bool)


def _ran_out_of_time(outcome: Outcome) -> bool:
    return outcome.ending is not None and any(sign in outcome.ending for sign in ("SIGPROF", "SIGKILL", "timed out"))


def _tests(code: str, ground_truth: Any) -> Iterator[Test]:
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
            f"tests need inputs and outputs, assert_case, or test and entry_point; the ground truth has {', '.join(truth)}"
        )


def _lines(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _arguments(given: Any) -> list[Any]:
    """Each line of the text is an argument in JSON; a list holds them as they are."""
    return [json.loads(line) for line in given.split("\n")] if isinstance(given, str) else list(given)


def _value(expected: Any) -> Any:
    return json.loads(expected) if isinstance(expected, str) else expected
