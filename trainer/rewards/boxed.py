"""The last \\boxed of an answer."""

import re
from dataclasses import dataclass

_MAX_CONTENT = 2000  # characters: longer ones are no answers
_COMMAND = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BARE_END = re.compile(r"[\s$]|\\\]|\\\)")
_KEYWORDS = ("\\boxed", "\\fbox")


@dataclass(frozen=True, slots=True)
class Boxed:
    """start: where the command stands."""

    content: str
    start: int


def last_boxed(text: str) -> Boxed | None:
    """The last \\boxed{...} or \\fbox{...}, braces nested, or ``\\boxed 5`` without. None if there is none or it stays open."""
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
    """Behind an odd number of backslashes."""
    return (at - len(text[:at].rstrip("\\"))) % 2 == 1
