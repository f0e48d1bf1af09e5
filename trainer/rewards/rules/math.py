"""MATH scorer: compare the boxed answer (Hendrycks et al. 2021, arXiv:2103.03874), by math-verify if the texts differ."""

import re
from collections.abc import Callable

from trainer.rewards.rules.boxed import last_boxed
from trainer.rewards.rules.equivalence import MAX_LENGTH, equivalent
from trainer.rewards.rules.number_parsing import value_of

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
