"""The panel of a run: contents, cost, and what remains when it ends."""

import io
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.terminal import CONTROL
from trainer.run.timing import Phases
from trainer.tracking.console import ConsoleLogger
from trainer.tracking.display import PERIOD, Display
from workers.rollout.progress import Progress, progress_file


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def seen(screen: io.StringIO) -> str:
    return CONTROL.sub("", screen.getvalue())


def open_display(run_dir: Path, screen: Screen, *, phases: Phases | None = None, step: int = 0, total: int = 10) -> Display:
    console = Console(file=screen, force_terminal=True, width=120, height=30)
    return Display(console, run_dir, "project · experiment", phases or Phases(), step, total)


def panel_of(display: Display) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(display.panel())
    return out.getvalue()


def test_responses_are_counted_during_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases = Phases()
    display = open_display(tmp_path, Screen(), phases=phases)
    with phases("step"), phases("gen"):
        for engine, done in enumerate((3, 5)):
            progress = Progress(progress_file(tmp_path, engine))
            progress.begin(16)
            time.sleep(0.11)
            progress.record(done, done * 100)
            progress.close()
        assert re.search(r"generating 8 of 32 answers · [\d,]+ tokens/s · left 0:0\d", panel_of(display))
    with phases("step"), phases("update_actor"):
        assert "update of the actor 0.0 s" in panel_of(display) and " answers" not in panel_of(display)
    with phases("gen"):  # the files have the counts of the previous call
        time.sleep(0.01)
        for engine in range(2):
            progress = Progress(progress_file(tmp_path, engine))
            progress.begin(16)
            progress.record(16, 1600)
            progress.close()
        assert "generating 0.0 s" in panel_of(display)
        long_ago = time.time() - 60
        monkeypatch.setattr("workers.rollout.progress.time.time", lambda: long_ago)
        for engine in range(2):  # of a run that was killed
            progress = Progress(progress_file(tmp_path, engine))
            progress.begin(16)
            progress.close()
        monkeypatch.undo()
        assert "generating 0.0 s" in panel_of(display)
    display.close()


def test_refreshes_are_limited_at_a_thousand_steps_per_second(tmp_path: Path) -> None:
    screen = Screen()
    display = open_display(tmp_path, screen, total=2000)
    logger = ConsoleLogger(Console(), 2000, display)
    started, spent = time.monotonic(), 0.0
    for step in range(1, 1001):
        before = time.thread_time()
        logger.log({"critic/score/mean": 0.5}, step)
        spent += time.thread_time() - before
        time.sleep(0.0005)
    elapsed = time.monotonic() - started
    logger.close()
    assert screen.getvalue().count("\u256d") <= elapsed / PERIOD + 2
    assert spent / 1000 < 2e-3, "on the thread of the loop"
    assert seen(screen).count("score 0.500") == 1000, "no line is lost"


def test_panel_is_never_behind_the_lines_above_it(tmp_path: Path) -> None:
    """Also if every refresh has new lines."""
    screen = Screen()
    logger = ConsoleLogger(Console(), 10, open_display(tmp_path, screen))
    for step in (1, 2, 3, 4):
        logger.log({"critic/score/mean": 0.5}, step)
        time.sleep(1.1 * PERIOD)
    logger.close()
    pictures = seen(screen).split("\u256d")
    lines = [max([0, *map(int, re.findall(r"step +(\d+)/10  score", above))]) for above in pictures[:-1]]
    panels = [int(re.findall(r"\u2502 step (\d+)/10", below)[0]) for below in pictures[1:]]
    assert max(lines) == 4 and all(panel >= line for line, panel in zip(lines, panels, strict=True))


def test_panel_after_a_rollback_shows_the_earlier_step(tmp_path: Path) -> None:
    display = open_display(tmp_path, Screen())
    for step in (1, 2, 3):
        display.show({}, step)
    display.go_back(1)
    assert "step 1/10" in panel_of(display)
    display.close()
