"""Mathematics in responses: the MATH scorer, the last \\boxed expression, exact values of numbers, equivalence by math-verify.

The MATH scorer (Hendrycks et al. 2021, arXiv:2103.03874) compares the boxed answer as numbers and as normalised text, and asks
math-verify and SymPy only if that does not decide: SymPy can run forever or exhaust memory on short inputs (9^9^9), and a model
learns to produce them if a hang costs it nothing. Costly expressions are filtered by patterns, and the rest is compared in a
forked process with limits of CPU time and memory.

Numbers are parsed here, not by math-verify: that would take a sandboxed process per response, and it does not read the per cent
signs, units and mixed numbers within sentences that ``reward.gsm8k.method=math`` compares.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from trainer.rewards.sandbox.forkserver import JobLimits, fork_server, serve

# Rewrites to one spelling, applied in this order. Texts are short and no pattern backtracks far, so hostile text costs no time.
# A deletion between two digits leaves a space: 5 6 is not 56, and 3 1/2 is not 31/2.
_GROUPED = r"(?<![0-9.,}])[1-9][0-9]{0,2}(?:(?:\{,\}|\\?,| )[0-9]{3})+(?![, ]?[0-9])(?![^(\[{]*[)\]}])"
_SPELLINGS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"\\!|\\(?:left|right)(?![a-zA-Z])"), ""),
    (re.compile(_GROUPED), lambda thousands: re.sub(r"[^0-9]", "", thousands[0])),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\q?quad(?![a-zA-Z])|\\[,;: ]|~|\^\{?\\circ\}?|\\?\$|\\?%"), " "),
    (re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\s+"), " "),
    (re.compile(r"(?<![0-9.]) | (?![0-9.])"), ""),
    (re.compile(r"\\frac([0-9]) ?([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac([0-9])\{"), r"\\frac{\1}{"),
    (re.compile(r"\\sqrt([0-9a-zA-Z])"), r"\\sqrt{\1}"),
    (re.compile(r"^(-?)([0-9]+)/([0-9]+)$"), r"\1\\frac{\2}{\3}"),
    (re.compile(r" ?\.$"), ""),
]
_NAME = re.compile(r"^[\s$]*[a-zA-Z]{1,2}\s*=(?=[^=]*$)")
_UNIT = re.compile(r"(?<=[0-9}])\s*\\(?:text|mathrm|mbox)\{\s+[^{}]*\}(?:\^\{?[23]\}?)?\s*$")


def score(answer: str, ground_truth: str) -> float:
    """1 if the last \\boxed of the response is equivalent to the ground truth, else 0.

    ground_truth: the expected content of the box, or a solution with a box. Raises ValueError if it is empty.
    """
    boxed_truth = last_boxed(ground_truth)
    truth = (ground_truth if boxed_truth is None else boxed_truth.content).strip()
    if not truth:
        raise ValueError("the ground truth is empty")
    boxed = last_boxed(answer)
    return float(boxed is not None and same(boxed.content, truth))


def same(answer: str, truth: str) -> bool:
    """Whether two expressions are equal: as numbers, else as normalised text, else by math-verify.

    A variable name (``x =``) is compared only if both have one.
    """
    # Cheap tests first: most responses are decided without a process of math-verify.
    if len(answer) > max(MAX_LENGTH, 2 * len(truth)):
        return False
    if answer.strip() == truth:
        return True
    plain = [_NAME.sub("", text) for text in (answer, truth)]
    if (plain[0] == answer) == (plain[1] == truth):
        plain = [answer, truth]
    number, wanted = map(value_of, plain)
    if number is not None and wanted is not None:
        return number.equals(wanted)
    one, other = map(spelt, plain)
    # A space left between digits separates them; math-verify would ignore the \text{ } from which it may come and join them.
    has_gap = [" " in text for text in (one, other)]
    return one == other or (has_gap[0] == has_gap[1] and equivalent(answer, truth))


def spelt(text: str) -> str:
    """Normalise LaTeX for comparison: no sizes, units, degrees, currency and per cent signs, no spaces except between digits."""
    text = _UNIT.sub("", text.replace("\n", " "))
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return text


_MAX_CONTENT = 2000  # characters; bounds the time for hostile text
_COMMAND = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BARE_END = re.compile(r"[\s$]|\\\]|\\\)")
_KEYWORDS = ("\\boxed", "\\fbox")


@dataclass(frozen=True, slots=True)
class Boxed:
    """content: text inside the braces. start: position of the command."""

    content: str
    start: int


def last_boxed(text: str) -> Boxed | None:
    """The last \\boxed{...} or \\fbox{...} with nested braces, or ``\\boxed 5``; None if there is none or it is not closed."""
    start = max(text.rfind(keyword) for keyword in _KEYWORDS)
    if start < 0:
        return None
    match = _COMMAND.match(text[start : start + 32])
    if match is None:  # \boxedfoo
        return None
    rest = text[start + match.end() : start + match.end() + _MAX_CONTENT]
    if not rest.startswith("{"):
        bare = _BARE_END.split(rest, maxsplit=1)[0]
        return Boxed(bare, start) if bare else None
    depth = 0
    for i, letter in enumerate(rest):
        if letter in "{}" and not _is_escaped(rest, i):
            depth += 1 if letter == "{" else -1
            if depth == 0:
                return Boxed(rest[1:i], start)
    return None


def _is_escaped(text: str, at: int) -> bool:
    """Whether an odd number of backslashes precedes the position."""
    return (at - len(text[:at].rstrip("\\"))) % 2 == 1


_MAX_DIGITS = 100  # characters of one number; bounds the time of exact arithmetic on hostile text
_MAX_EXPONENT = 100
# Rewrites to the spelling that _NUMBER matches. None of the patterns can backtrack, so the time is linear in the text.
_REWRITES = [
    (re.compile(r"[−–]"), "-"),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\!"), ""),
    (re.compile(r"(?<=[0-9])(?:\{,\}|\\,|[\u00a0\u2009\u202f])(?=[0-9]{3})"), ","),
    (re.compile(r"\\(?:times|cdot)|[×·]"), "*"),
    (re.compile(r"\\[,;: ]|~|[\u00a0\u2009\u202f]"), " "),
    (re.compile(r"\\?\$|\\[()\[\]]|\*\*|€|£"), ""),
    (re.compile(r"\\%|\s*(?:percent|per cent)\b"), "%"),
]
_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_BRACED = rf"\{{\s*([+-]?\s*(?:{_DECIMAL}))\s*\}}"
_LATEX_FRACTION = rf"\\frac\s*(?:{_BRACED}\s*{_BRACED}|([0-9])\s*([0-9])|([0-9])\s*{_BRACED}|{_BRACED}\s*([0-9]))"
_NUMBER = re.compile(
    r"(?P<sign>(?:^\s*[+-]\s*|(?<![\w.)}\]])[+-])?)"
    rf"(?:(?P<whole>[0-9]+)(?:\s*(?=\\frac)|\s+(?=[0-9]+\s*/)|-(?=[0-9]+/)))?"
    rf"(?:(?P<latex>{_LATEX_FRACTION})"
    rf"|(?P<top>{_DECIMAL})(?:\s*/\s*(?P<bottom>-?(?:{_DECIMAL})))?)"
    r"(?:[eE](?P<e>[+-]?[0-9]{1,3})(?![0-9])|\s*\*\s*10\s*\^\s*\{?\s*(?P<power>-?[0-9]{1,3})\s*\}?)?"
    r"(?P<percent>\s*%)?"
)
_GROUPS_FROM_ZERO = re.compile(r"(?<![0-9.,])0[0-9]{0,2},")
_NUMBER_UNIT = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|°|\\(?:text|mathrm|mbox)\s*\{[^{}]{0,40}\}(?:\^\{?[23]\}?)?|\.)*\s*")


@dataclass(frozen=True, slots=True)
class Value:
    """Value of a number. number: as written, before a per cent sign. whole: written as an integer."""

    number: Fraction
    percent: bool
    whole: bool

    def equals(self, other: "Value") -> bool:
        """Exact equality. If only one has a per cent sign, 50% equals both 50 and 1/2."""
        return self.number == other.number or self._plain() == other._plain()

    def _plain(self) -> Fraction:
        return self.number / 100 if self.percent else self.number


def values(text: str) -> Iterator[Value]:
    """Numbers in ``text`` in order: 1,234.5, -3, .5, 1/2, 2 1/2, \\frac{1}{2}, 1.5e3, 2 * 10^3, each with or without %."""
    for match in _NUMBER.finditer(_rewrite(text)):
        if (value := _value(match)) is not None:
            yield value


def value_of(text: str) -> Value | None:
    """Value of ``text`` if it is a single number, optionally with a unit in \\text{}; else None.

    1-1/2 is a difference here; within a sentence, see ``values``, it is 1 1/2.
    """
    text = _rewrite(text).strip()
    match = _NUMBER.match(text)
    if match is None or not _NUMBER_UNIT.fullmatch(text, match.end()) or (match["whole"] and text[match.end("whole")] == "-"):
        return None
    return _value(match)


def _rewrite(text: str) -> str:
    for pattern, spelling in _REWRITES:
        text = pattern.sub(spelling, text)
    return text


def _value(match: re.Match[str]) -> Value | None:
    """Value of a match; None for a division by zero, a number that is too long, or thousands grouped after a zero (0,500)."""
    if len(match[0]) > _MAX_DIGITS or _GROUPS_FROM_ZERO.search(match[0]):
        return None
    if match["latex"]:
        top, bottom = (_decimal(part) for part in re.fullmatch(_LATEX_FRACTION, match["latex"]).groups() if part)  # type: ignore[union-attr]
    else:
        top, bottom = _decimal(match["top"]), _decimal(match["bottom"] or "1")
    exponent = int(match["e"] or match["power"] or 0)
    if bottom == 0 or abs(exponent) > _MAX_EXPONENT:
        return None
    number = (int(match["whole"] or 0) + top / bottom) * Fraction(10) ** exponent
    is_whole = number.denominator == 1 and "." not in match[0]
    return Value(-number if "-" in match["sign"] else number, match["percent"] is not None, is_whole)


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub(r"[\s,]", "", text))


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
    outcome = fork_server("trainer.rewards.rules.math").run([answer, ground_truth], LIMITS)
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
