"""A watchdog with time for everything, but for what a test says."""

from pathlib import Path

from trainer.cluster.watchdog import Watchdog

PHASES = ("start", "generate", "reward", "forward", "update", "sync", "save", "load", "ask", "collective")


def watchdog(run_dir: Path, **limits: float) -> Watchdog:
    return Watchdog(dict.fromkeys(PHASES, 300.0) | limits, run_dir)
