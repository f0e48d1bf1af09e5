"""Equivalence of mathematical expressions by math-verify and SymPy, sandboxed.

SymPy can run forever or exhaust memory on short inputs (9^9^9), and a model learns to produce them if a hang costs it nothing.
Costly expressions are filtered by patterns, and the rest is compared in a forked process with limits of CPU time and memory.
"""

import json
import logging
import re
from functools import lru_cache

from trainer.rewards.sandbox.forkserver import JobLimits, fork_server, serve

LIMITS = JobLimits(cpu_seconds=0.8, memory_bytes=4 << 30, output_bytes=1 << 10)
MAX_LENGTH = 500  # characters of an expression; the longest answer of MATH has 159
_MAX_DEPTH = 20
_POWER = re.compile(r"\^|\*\*")
_COSTLY = [
    re.compile(r"[0-9]{40}"),  # integers of 40 digits
    re.compile(r"(?:\^|\*\*)[\s{(]*-?[0-9]{4}"),  # exponents from 1000 on
    re.compile(r"(?:(?:\^|\*\*)[\s{(]*-?(?:[0-9]+|[a-zA-Z])[\s)}]*){3}"),  # towers such as 9^9^9^9, with any brackets
    re.compile(r"!\s*!|[0-9]{4}\s*!"),  # factorials of factorials and of 1000 and more
]
_MAX_POWERS = 12


@lru_cache(maxsize=4096)  # responses to one prompt often have the same answer
def equivalent(answer: str, ground_truth: str) -> bool:
    """Whether both expressions are equivalent; False if the comparison exceeds ``LIMITS``.

    Raises RuntimeError if this machine cannot sandbox.
    """
    if not (is_cheap(answer) and is_cheap(ground_truth)):
        return False
    outcome = fork_server("trainer.rewards.rules.equivalence").run([answer, ground_truth], LIMITS)
    return outcome.ending is None and outcome.result == "true"


def is_cheap(expression: str) -> bool:
    """Whether the expression is cheap enough to evaluate: no tower of powers, no number of 40 digits, no deep nesting."""
    if len(expression) > MAX_LENGTH or "\0" in expression:
        return False
    if any(pattern.search(expression) for pattern in _COSTLY) or len(_POWER.findall(expression)) > _MAX_POWERS:
        return False
    depth = 0
    for letter in expression:
        depth += (letter in "{([") - (letter in "})]")
        if depth > _MAX_DEPTH:
            return False
    return True


def main(fd: int) -> None:
    """Entry point of the fork server: import math-verify and warm up its caches before the first fork.

    The children inherit the imported modules, so that a comparison takes milliseconds instead of a second.
    """
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)  # math-verify logs what it cannot parse

    def compare(job: list[str]) -> str:
        # math-verify's timeouts use SIGALRM in the main thread; the limits of the child process replace them.
        answer, truth = (parse(f"\\boxed{{{text}}}", parsing_timeout=0) for text in job)
        return json.dumps(bool(verify(truth, answer, timeout_seconds=None)))

    for pair in (["\\frac{1}{2}", "0.5"], ["x^2+1", "1+x^2"], ["(1,2]", "\\left(1,2\\right]"], ["\\sqrt{8}", "2\\sqrt{2}"]):
        compare(pair)
    serve(fd, compare, opens=True)  # SymPy imports some modules lazily
