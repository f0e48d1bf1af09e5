"""Terminal display of a run: a panel at the bottom of the screen, and lines that scroll away above it.

A thread draws the panel four times per second, however short the steps are; the training loop only stores values for it. Since
the loop modifies these containers meanwhile, the thread copies each one before it iterates.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from trainer.run.run_dir import EVENTS, LOGS, REPORT, read_lines
from trainer.run.timing import WHOLE_STEP, Phases
from trainer.tracking.formatting import number
from workers.controller.logs import heard_through, heard_where
from workers.host_memory import GB, host_memory
from workers.rollout.progress import read_progress

PERIOD = 0.25
"""Seconds between two updates of the panel, independent of the duration of a step."""
BARS = "▁▂▃▄▅▆▇█"
SPARK = 16  # characters
BAR = 24
WARNINGS = 3
RECENT = 20  # steps from which the remaining time is estimated

CURVES = (
    ("reward", ("critic/score/mean",)),
    ("loss", ("train/loss",)),
    ("KL", ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl")),
    ("entropy", ("actor/entropy",)),
    ("length", ("response_length/mean",)),
)
"""(label, candidate metrics) of each curve; the first metric that the run has is drawn."""
DRAWN = {name for _, names in CURVES for name in names}
DOING = {
    "gen": "generating", "reward": "scoring", "reward_model": "reward models", "old_log_prob": "log-probs", "ref": "reference",
    "values": "values", "adv": "advantages", "update_actor": "update of the actor", "update_critic": "update of the critic",
    "sync": "weights to the engine", "testing": "validation", "save_checkpoint": "saving", WHOLE_STEP: "step",
}  # fmt: skip


class Display:
    """Prints lines and draws the panel every PERIOD seconds, in a thread. ``close`` removes the panel and keeps the lines."""

    def __init__(self, console: Console, run_dir: Path, title: str, phases: Phases, step: int, total_steps: int) -> None:
        """phases: timer of the loop, read for the active phases. step: steps completed before this process."""
        self.step = step
        self._console = console
        self._run_dir = run_dir
        self._title = title
        self._phases = phases
        self._total = total_steps
        self._began = time.monotonic()
        self._ends: deque[tuple[float, int]] = deque(maxlen=RECENT)
        self._history: dict[str, list[float]] = {}
        self._last: dict[str, float] = {}
        self._lines: deque[RenderableType] = deque()
        self._events: list[str] = []
        self._events_size = 0
        self._over = threading.Event()
        self._panel = self.panel()
        self._live = Live(self, console=console, auto_refresh=False, transient=True, redirect_stderr=False)
        self._opened = ExitStack()
        self._live.start()
        # Closed in reverse order: output is no longer redirected through rich when Live stops.
        self._opened.callback(self._live.stop)
        # Other code that prints to the terminal must go through rich, too, or it would overwrite the panel.
        if (where := heard_where()).isatty():
            self._opened.enter_context(heard_through(cast(TextIO, FileProxy(console, where))))
        self._thread = threading.Thread(target=self._work, name="display", daemon=True)
        self._thread.start()

    def print(self, line: RenderableType) -> None:
        """Queue a line for the thread."""
        self._lines.append(line)

    def show(self, metrics: Mapping[str, float], step: int) -> None:
        """Set the metrics of a completed step."""
        for name in DRAWN & metrics.keys():
            self._history.setdefault(name, []).append(metrics[name])
        self._last = {**self._last, **metrics}
        self._ends.append((time.monotonic(), step))
        self.step = step

    def go_back(self, step: int) -> None:
        """Continue after ``step``. Curves keep the values of the abandoned steps; the estimate of the time left starts again."""
        self._ends.clear()
        self.step = step

    def close(self) -> None:
        """Print the remaining lines and remove the panel."""
        # After the join this thread is the only one that draws, so lines that were queued last are not lost.
        self._over.set()
        self._thread.join()
        try:
            self._draw()
        finally:
            self._opened.close()

    def _work(self) -> None:
        while not self._over.wait(PERIOD):
            self._draw()

    def _draw(self) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        self._panel = self.panel()  # after the lines were taken: the panel is never older than a line above it
        for is_text, group in groupby(lines, lambda line: isinstance(line, Text)):  # grouped, as each print redraws the panel
            self._console.print(Group(*group), soft_wrap=is_text)
        if not lines:
            self._live.refresh()

    def __rich__(self) -> Panel:
        """The panel, which rich draws below the lines of each print."""
        return self._panel

    def panel(self) -> Panel:
        """Build the panel from the current state; one terminal line per row."""
        rows = [self._steps(), self._phase(), *self._curves(), self._figures()]
        rows += [Text(warning, "yellow") for warning in self._warnings()]
        rows.append(Text(f"libraries write to {self._run_dir / LOGS} · report: {self._run_dir / REPORT}", "dim"))
        for row in rows:
            row.no_wrap, row.overflow = True, "ellipsis"
        # At Ctrl-C the terminal echoes ^C behind the panel. Without room for it the line would wrap and shift the panel.
        width = self._console.width - len("^C")
        return Panel(Group(*rows), title=Text(self._title), title_align="left", border_style="dim", width=width)

    def _steps(self) -> Text:
        done = self.step / self._total if self._total else 1.0
        full = round(BAR * done)
        text = Text.assemble(
            (f"step {self.step}/{self._total} ", "bold"), ("━" * full, "green"), ("━" * (BAR - full), "dim"), f" {done:.0%}"
        )
        text.append(f"  {clock(time.monotonic() - self._began)}")
        # The mean over the last RECENT steps. After a resume or a rollback fewer steps are known.
        if len(self._ends) > 1:
            (first, one), (last, other) = self._ends[0], self._ends[-1]
            left = (self._total - self.step) * (last - first) / max(other - one, 1)
            text.append(f"  left {clock(left)}")
        return text

    def _phase(self) -> Text:
        """The active phases with their progress: number of responses, or seconds next to those of the last step."""
        under_way = list(self._phases.under_way.items())  # a copy: the loop's thread modifies it meanwhile
        if not under_way:
            return Text("starting" if not self._last else "between steps")
        inner = [(name, since) for name, since in under_way if name != WHOLE_STEP] or under_way
        return Text(" · ".join(self._standing(name, time.perf_counter() - since) for name, since in inner))

    def _standing(self, phase: str, seconds: float) -> str:
        doing, usual = DOING.get(phase, phase), self._last.get(f"timing_s/{phase}")
        answers = self._answers(seconds) if phase in ("gen", "testing") else None
        if answers is not None:
            return f"{doing} {answers}"
        text = f"{doing} {seconds:.1f} s" + (f" (last {usual:.1f} s)" if usual else "")
        return f"{text} · {self._phases.progress[phase]()}" if phase in self._phases.progress else text

    def _answers(self, seconds: float) -> str | None:
        standing = read_progress(self._run_dir)
        spent = time.time() - standing.started
        # The file keeps the numbers of the last call. If they are complete, or older than this phase, they are of an earlier one.
        if not standing.requested or standing.done == standing.requested or spent > seconds + 1.0:
            return None
        text = f"{standing.done} of {standing.requested} answers"
        if standing.done and spent > 0:
            left = spent / standing.done * (standing.requested - standing.done)
            text += f" · {standing.tokens / spent:,.0f} tokens/s · left {clock(left)}"
        return text

    def _curves(self) -> list[Text]:
        drawn = []
        for label, names in CURVES:
            name = next((name for name in names if name in self._history), None)
            if name is not None:
                values = list(self._history[name])
                drawn.append(Text.assemble(f"{label} ", (number(values[-1]), "bold"), " ", (spark(values), "cyan")))
        return [Text("   ").join(drawn)] if drawn else []

    def _figures(self) -> Text:
        memory = host_memory()
        figures = [f"memory {(memory.total - memory.available) / GB:.1f} of {memory.total / GB:.1f} GB"]
        if "val/accuracy" in self._last:
            figures.append(f"held-out {self._last['val/accuracy']:.3f}")
        if "perf/throughput" in self._last:
            figures.append(f"{self._last['perf/throughput']:,.0f} tokens/s/GPU")
        return Text(" · ".join(figures))

    def _warnings(self) -> list[str]:
        """The last WARNINGS events. The file is read only when its size has changed."""
        path = self._run_dir / EVENTS
        size = path.stat().st_size if path.exists() else 0
        if size != self._events_size:
            self._events_size = size
            self._events = [f"{event['kind']}: step {event['step']}: {event['text']}" for event in read_lines(path)][-WARNINGS:]
        return self._events


def spark(values: Sequence[float], width: int = SPARK) -> str:
    """Draw ``values`` as bars in at most ``width`` characters. A mean that is not finite becomes a gap."""
    size = -(-len(values) // width)
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    means = [sum(group) / len(group) for group in groups]
    finite = [mean for mean in means if mean - mean == 0]  # inf - inf and nan - nan are nan
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] if mean - mean == 0 else " " for mean in means)


def clock(seconds: float) -> str:
    """Format seconds as a clock: 0:42, 3:07, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
