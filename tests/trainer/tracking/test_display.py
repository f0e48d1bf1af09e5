"""The panel of a run: what it shows, what it costs, and what is left when it ends."""

import io
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.terminal import CONTROL
from trainer.rewards.scoring import Score
from trainer.rewards.scoring import ScoringProgress as Scored
from trainer.run.events import Events
from trainer.run.timing import Phases
from trainer.tracking.console import ConsoleLogger, step_line
from trainer.tracking.display import BARS, PERIOD, Display, clock, spark
from workers.controller.logs import tell
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


def test_the_panel_reports_steps_curves_memory_warnings_and_where_files_are(tmp_path: Path) -> None:
    Events(tmp_path).add(3, "low disk", "2 GB are free")
    display = open_display(tmp_path, Screen())
    assert "starting" in panel_of(display) and "step 0/10" in panel_of(display)
    for step in range(1, 5):
        metrics = {"critic/score/mean": step / 8, "actor/kl_loss": 0.25, "actor/entropy": 2.0 - step / 4, "val/accuracy": 0.625}
        display.show(metrics | {"response_length/mean": 7.0, "perf/throughput": 12345.6}, step)
    shown = panel_of(display)
    display.close()
    assert "step 4/10 ━" in shown and "40%" in shown and "left" in shown
    assert f"reward 0.5 {spark([1, 2, 3, 4])}" in shown and "KL 0.25" in shown and "entropy 1 " in shown and "length 7" in shown
    assert re.search(r"memory \d+\.\d of \d+\.\d GB · held-out 0.625 · 12,346 tokens/s/GPU", shown)
    assert "low disk: step 3: 2 GB are free" in shown
    assert "libraries write to" in shown and str(tmp_path)[:60] in shown


def test_answers_are_counted_while_they_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases = Phases()
    display = open_display(tmp_path, Screen(), phases=phases)
    with phases("step"), phases("gen"):
        for engine, done in enumerate((3, 5)):
            progress = Progress(progress_file(tmp_path, engine))
            progress.begin(16)
            time.sleep(0.11)
            progress.tell(done, done * 100)
            progress.close()
        assert re.search(r"generating 8 of 32 answers · [\d,]+ tokens/s · left 0:0\d", panel_of(display))
    with phases("step"), phases("update_actor"):
        assert "update of the actor 0.0 s" in panel_of(display) and " answers" not in panel_of(display)
    with phases("gen"):  # what is in the files is of the call before
        time.sleep(0.01)
        for engine in range(2):
            progress = Progress(progress_file(tmp_path, engine))
            progress.begin(16)
            progress.tell(16, 1600)
            progress.close()
        assert "generating 0.0 s" in panel_of(display)
        long_ago = time.time() - 60
        monkeypatch.setattr("workers.rollout.progress.time.time", lambda: long_ago)
        for engine in range(2):  # of a run that was killed meanwhile
            progress = Progress(progress_file(tmp_path, engine))
            progress.begin(16)
            progress.close()
        monkeypatch.undo()
        assert "generating 0.0 s" in panel_of(display)
    display.close()


def test_late_rewards_are_counted_while_others_are_scored(tmp_path: Path) -> None:
    phases, scored = Phases(), Scored(256)
    phases.progress["reward"] = lambda: scored
    display = open_display(tmp_path, Screen(), phases=phases)
    with phases("step"), phases("reward"):
        assert "scoring 0.0 s · 0 of 256 answers" in panel_of(display)
        scored.add([Score(1.0, {}, None), Score(None, {}, "timed out after 30 s", timed_out=True)])
        assert "scoring 0.0 s · 2 of 256 answers, 1 late" in panel_of(display)
    display.close()


def test_a_thousand_steps_a_second_cost_no_more_pictures_than_one(tmp_path: Path) -> None:
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
    assert spent / 1000 < 2e-3, "on the loop's thread"
    assert seen(screen).count("score 0.500") == 1000, "no line is lost"


def test_lines_scroll_above_and_the_panel_goes_when_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    display = open_display(tmp_path, screen)
    logger = ConsoleLogger(Console(), 10, display)
    logger.log({"critic/score/mean": 0.5}, 1)
    time.sleep(2.5 * PERIOD)
    logger.close()
    assert step_line({"critic/score/mean": 0.5}, 1, 10) in seen(screen)
    assert {len(line) for line in seen(screen).splitlines() if line.endswith("\u256e")} == {118}, "there is room for ^C"
    last = screen.getvalue().rpartition("\u256f")[2]
    assert "\x1b[2K" in last and "\x1b[?25h" in last, "wiped, and the cursor is back"
    tell("after it")
    assert capsys.readouterr().err == "after it\n"


def test_the_panel_is_never_behind_the_lines_above_it(tmp_path: Path) -> None:
    """Also where every picture has new lines."""
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


def test_a_line_above_it_is_as_long_as_the_terminal_is_wide(tmp_path: Path) -> None:
    screen = Screen()
    logger = ConsoleLogger(Console(file=screen, width=40), 10, open_display(tmp_path, screen))
    logger.log({"critic/score/mean": 0.5, "actor/lr": 1e-4, "perf/throughput": 1.0}, 1)
    logger.close()
    assert "step  1/10  score 0.500  lr 1.0e-04\n" in seen(screen) and "tok/s" not in seen(screen).replace("tokens/s", "")


def test_after_a_rollback_the_steps_are_those_that_are_left(tmp_path: Path) -> None:
    display = open_display(tmp_path, Screen())
    for step in (1, 2, 3):
        display.show({}, step)
    display.go_back(1)
    assert "step 1/10" in panel_of(display)
    display.close()


def test_a_curve_in_sixteen_characters() -> None:
    assert spark([0.0, 1.0]) == BARS[0] + BARS[-1] and spark([3.0, 3.0]) == BARS[0] * 2
    assert len(spark(list(range(1000)))) <= 16 and list(spark(list(range(1000)))) == sorted(spark(list(range(1000))))
    assert spark([0.0, float("nan"), 1.0]) == BARS[0] + " " + BARS[-1] and spark([float("inf")]) == " "


def test_time_for_people() -> None:
    assert [clock(seconds) for seconds in (0.4, 42, 187, 3723)] == ["0:00", "0:42", "3:07", "1:02:03"]
