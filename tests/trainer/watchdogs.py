"""A watchdog without limits, except those that a test sets."""

from pathlib import Path

from trainer.cluster.watchdog import Watchdog

PHASES = ("start", "generate", "reward", "forward", "update", "sync", "save", "load", "ask", "collective")


def watchdog(run_dir: Path, **limits: float) -> Watchdog:
    return Watchdog(dict.fromkeys(PHASES, 300.0) | limits, run_dir)
