"""Answers in DAPO's format, ``Answer: ...`` on a line: Yu et al. 2025, arXiv:2503.14476, section 4.1; the texts are compared.

They are first brought into one form by the rules of Minerva (Lewkowycz et al. 2022, arXiv:2206.14858, listing 1).
"""

import re
from typing import Any

_LOOKED_AT = 300  # characters at the end
_STRICT_LOOKED_AT = 100
_ANSWER_LINE = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)
_NO_ANSWER = "[INVALID]"

# Minerva's tables, in their order. The first replaces, the second deletes.
_REPLACED = [
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
]
_UNITS = [
    "square",
    "ways",
    "integers",
    "dollars",
    "mph",
    "inches",
    "hours",
    "km",
    "units",
    "\\ldots",
    "sue",
    "points",
    "feet",
    "minutes",
    "digits",
    "cents",
    "degrees",
    "cm",
    "gm",
    "pounds",
    "meters",
    "meals",
    "edges",
    "students",
    "childrentickets",
    "multiples",
]
_DELETED = [
    *(*_UNITS, "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}"),
    *("^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
]
_REWRITTEN = [
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),  # what stands between dollar signs is the answer
    *((re.compile(rf"(\\{command}\{{)(.*?)(\}})"), r"\2") for command in ("text", "textbf", "overline")),
    (re.compile(r"(\\boxed\{)(.*)(\})"), r"\2"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),
    (re.compile(r"(sqrt)([^{])"), r"sqrt{\2}"),
]


def score(answer: str, ground_truth: str, *, strict_box_verify: bool) -> dict[str, Any]:
    """score: 1 if right, else -1. acc: is it right. pred: the answer as compared.

    The last ``Answer:`` line of the last 300 characters, both sides normalised; without such a line, or always with
    ``strict_box_verify``, the last \\boxed{} of the last 100 characters, to the letter.
    """
    text = answer[-_LOOKED_AT:]
    lines = [] if strict_box_verify else _ANSWER_LINE.findall(text)
    pred = normalise(lines[-1]) if lines else _NO_ANSWER
    if pred != _NO_ANSWER:
        right = pred == normalise(ground_truth)
    else:
        boxed = _last_closed_box(text[-_STRICT_LOOKED_AT:])
        right, pred = boxed is not None and boxed == ground_truth, _NO_ANSWER if boxed is None else boxed
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def normalise(text: str) -> str:
    """The part after the last equals sign, by Minerva's rules."""
    text = text.rpartition("=")[2]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for part in _DELETED:
        text = text.replace(part, "")
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def _last_closed_box(text: str) -> str | None:
    """What the last ``\\boxed{`` holds, up to the brace that closes it; None if none does. Escaped braces count."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0 and text[i] == "}":
            return text[start + len("\\boxed{") : i]
    return None
