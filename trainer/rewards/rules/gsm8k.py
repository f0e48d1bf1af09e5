"""GSM8K scorer: compare the final number (Cobbe et al. 2021, arXiv:2110.14168; the answer format is the data set's)."""

import re
from typing import Literal

from trainer.rewards.rules.math import Value, last_boxed, values

Method = Literal["strict", "flexible", "math"]

_LOOKED_AT = 300  # characters at the end that strict and flexible search, as in verl
_SEGMENT = 300  # characters after #### that may contain the number
_ANY_NUMBER = re.compile(r"-?[0-9.,]+")
_MARKED_NUMBER = re.compile(r"#### (-?[0-9.,]+)")


def extract(text: str, method: Literal["strict", "flexible"]) -> str | None:
    """Final number in the last 300 characters of ``text``, without commas; None if there is none.

    strict: the last number after ``#### ``, including trailing full stops, as verl extracts it. flexible: the last number,
    without the full stop that ends a sentence.
    """
    text = text[-_LOOKED_AT:]
    if method == "strict":
        marked = _MARKED_NUMBER.findall(text)
        return marked[-1].replace(",", "") if marked else None
    numbers = (found.replace(",", "").rstrip(".") for found in reversed(_ANY_NUMBER.findall(text)))
    return next((number for number in numbers if number.strip("-.")), None)


def score(answer: str, ground_truth: str, method: Method = "strict") -> float:
    """1 if the final number equals the ground truth, else 0.

    strict and flexible compare the extracted text exactly: 18.00 is not 18. math compares values (18.00, $18, 1,800, 50%, 1/2
    and \\frac{1}{2}) after the last ``####`` or in the last \\boxed, whichever is later, else at the end of the text.
    Raises ValueError if the ground truth contains no number.
    """
    if method == "math":
        truth, found = final_value(ground_truth), final_value(answer)
        if truth is None:
            raise ValueError(f"the ground truth {ground_truth!r:.60} contains no number")
        return float(found is not None and found.equals(truth))
    number = re.sub(r"[,$\s]", "", ground_truth)
    if not _ANY_NUMBER.search(number):
        raise ValueError(f"the ground truth {ground_truth!r:.60} contains no number")
    return float(extract(answer, method) == number)


def final_value(text: str) -> Value | None:
    """Value of the final number, see ``score``; None if there is none. The text after the mark may be an equation with units."""
    marked, boxed = text.rfind("####"), last_boxed(text)
    if boxed is not None and boxed.start > marked:
        return _first(boxed.content)
    if marked >= 0:
        return _first(text[marked + 4 : marked + 4 + _SEGMENT].strip().partition("\n")[0])
    return max(enumerate(values(text[-_LOOKED_AT:])), default=(0, None), key=lambda pair: pair[0])[1]


def _first(segment: str) -> Value | None:
    return next(values(segment[:_SEGMENT].rpartition("=")[2]), None)
