"""Find the last \\boxed expression of a response."""

import re
from dataclasses import dataclass

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
