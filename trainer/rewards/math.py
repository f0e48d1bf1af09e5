"""MATH: is the boxed answer right? Hendrycks et al. 2021, arXiv:2103.03874; equivalence by math-verify where the texts differ."""

import re

from trainer.rewards.boxed import last_boxed
from trainer.rewards.equivalence import MAX_LENGTH, equivalent
from trainer.rewards.values import value_of

# Spellings that mean the same, in this order. Texts are short, and no pattern backtracks far.
_SPELLINGS = [
    (re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\[!,;: ]|\\q?quad(?![a-zA-Z])|[\s~]"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\^\{?\\circ\}?|\\?\$|\\?%"), ""),
    (re.compile(r"(?<=[0-9])\{?,\}?(?=[0-9]{3}(?![0-9]))(?![^(\[{]*[)\]}])"), ""),
    (re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\frac([0-9])([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac([0-9])\{"), r"\\frac{\1}{"),
    (re.compile(r"\\sqrt([0-9a-zA-Z])"), r"\\sqrt{\1}"),
    (re.compile(r"^(-?)([0-9]+)/([0-9]+)$"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"^[a-zA-Z]{1,2}=(?=[^=]*$)"), ""),
    (re.compile(r"\.$"), ""),
]
_UNIT = re.compile(r"(?<=[0-9}])\s*\\(?:text|mathrm|mbox)\{\s+[^{}]*\}(?:\^\{?[23]\}?)?\s*$")


def score(answer: str, ground_truth: str) -> float:
    """1 if the last \\boxed of the answer means what the ground truth does, else 0.

    ground_truth: what belongs into the box, or a solution with its own. Raises ValueError if it is empty.
    """
    boxed_truth = last_boxed(ground_truth)
    truth = (ground_truth if boxed_truth is None else boxed_truth.content).strip()
    if not truth:
        raise ValueError("the ground truth is empty")
    boxed = last_boxed(answer)
    return float(boxed is not None and same(boxed.content, truth))


def same(answer: str, truth: str) -> bool:
    """Whole numbers and fractions by value; else by the text, spelt in one way; else by what it means."""
    if len(answer) > max(MAX_LENGTH, 2 * len(truth)):
        return False
    if answer.strip() == truth or spelt(answer) == spelt(truth):
        return True
    number, wanted = value_of(answer), value_of(truth)
    if number is not None and wanted is not None:
        return number.equals(wanted)
    return equivalent(answer, truth)


def spelt(text: str) -> str:
    """The expression in one spelling of LaTeX, for comparison: no spaces, sizes, units, degrees, dollars and per cents."""
    text = _UNIT.sub("", text.replace("\n", " "))
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return text
