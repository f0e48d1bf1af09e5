"""GSM8K: is the final number right? Cobbe et al. 2021, arXiv:2110.14168; the answer format is the data set's own."""

import re
from decimal import Decimal
from typing import Literal

_NUMBER = r"(?:-\$?|\$-?)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_ANY_NUMBER = re.compile(_NUMBER)
_MARKED_NUMBER = re.compile(rf"####\s*({_NUMBER})")

Method = Literal["strict", "flexible"]


def extract(text: str, method: Method) -> str | None:
    """The final number of ``text``, without commas and dollar signs.

    strict: the last number that follows ``####``. flexible: the last number of all.
    """
    found = (_MARKED_NUMBER if method == "strict" else _ANY_NUMBER).findall(text)
    return re.sub(r"[,$]", "", found[-1]) if found else None


def score(answer: str, ground_truth: str, method: Method = "strict") -> float:
    """1 if the final number equals the ground truth (18, 18.00 and $18 are equal), else 0."""
    truth = extract(ground_truth, "flexible")
    if truth is None:
        raise ValueError(f"the ground truth {ground_truth!r:.60} holds no number")
    number = extract(answer, method)
    return float(number is not None and Decimal(number) == Decimal(truth))
