"""Format numbers and durations as short text, and print tables of them."""

from __future__ import annotations

import math

from rich.console import Console

WIDTH = 160  # characters of a table without a terminal, so that no number is truncated


def table_console() -> Console:
    """Console for a wide table: as wide as the terminal, or WIDTH without one."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def number(value: float) -> str:
    """Format a number with about three digits: 0.883, 1.2k, 3.4M, 3e-4."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    if size and size < 1e-3:
        digits, power = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    return f"{value:.0f}" if size >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Format seconds in the two largest units: 42.1 s, 3 min 20 s, 5 h 7 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
