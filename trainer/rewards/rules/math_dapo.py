"""Scorer for DAPO's format, a line ``Answer: ...`` (Yu et al. 2025, arXiv:2503.14476, section 4.1).

Texts are compared after normalisation by Minerva's rules (Lewkowycz et al. 2022, arXiv:2206.14858, listing 1).
"""

import re
from typing import Any

_LOOKED_AT = 300  # characters at the end
_STRICT_LOOKED_AT = 100
_ANSWER_LINE = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)
NO_ANSWER = "[INVALID]"

# Minerva's tables of replacements and deletions. Their order matters and is part of the published metric, quirks included.
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
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),  # the text between dollar signs is the answer
    *((re.compile(rf"(\\{command}\{{)(.*?)(\}})"), r"\2") for command in ("text", "textbf", "overline")),
    (re.compile(r"(\\boxed\{)(.*)(\})"), r"\2"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),
    (re.compile(r"(sqrt)([^{])"), r"sqrt{\2}"),
]


def score(answer: str, ground_truth: str, *, strict_box_verify: bool) -> dict[str, Any]:
    """score: 1 if correct, else -1. acc: whether correct. pred: the extracted answer.

    Compares the last ``Answer:`` line of the last 300 characters, both sides normalised; without such a line, and always with
    ``strict_box_verify``, the last \\boxed{} of the last 100 characters, exactly.
    """
    text = answer[-_LOOKED_AT:]
    lines = [] if strict_box_verify else _ANSWER_LINE.findall(text)
    pred = normalise(lines[-1]) if lines else NO_ANSWER
    if pred != NO_ANSWER:
        correct = pred == normalise(ground_truth)
    else:
        boxed = _last_closed_box(text[-_STRICT_LOOKED_AT:])
        correct, pred = boxed is not None and boxed == ground_truth, NO_ANSWER if boxed is None else boxed
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def normalise(text: str) -> str:
    """Text after the last equals sign, normalised by Minerva's rules."""
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
    """Content of the last ``\\boxed{`` up to its closing brace; None if it is not closed. Escaped braces count, as in verl."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0 and text[i] == "}":
            return text[start + len("\\boxed{") : i]
    return None
