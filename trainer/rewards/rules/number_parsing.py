"""Exact values of numbers in prose and LaTeX."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

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
_UNIT = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|°|\\(?:text|mathrm|mbox)\s*\{[^{}]{0,40}\}(?:\^\{?[23]\}?)?|\.)*\s*")


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
    if match is None or not _UNIT.fullmatch(text, match.end()) or (match["whole"] and text[match.end("whole")] == "-"):
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
