"""Console logger: one readable line per step, printed above the display if stdout is a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from trainer.run.logger import Sample
from trainer.tracking.conversation import lines_of, split_prompt, visible
from trainer.tracking.display import Display

# (metric, label, format) in order of importance: a narrow terminal drops the last ones. Metrics that a step lacks are left out.
COLUMNS = (
    ("val/accuracy", "held-out", ".3f"),
    ("val/loss", "val loss", ".4f"),
    ("reward/failed", "failed rewards", ".0f"),
    ("reward/timed_out_share", "late rewards", ".0%"),
    ("actor/skipped_updates", "skipped updates", ".0f"),
    ("train/skipped_updates", "skipped updates", ".0f"),
    ("critic/score/mean", "score", ".3f"),
    ("train/loss", "loss", ".4f"),
    ("response_length/mean", "length", ".1f"),
    ("actor/entropy", "entropy", ".3f"),
    ("actor/pg_loss", "pg", "+.4f"),
    ("actor/kl_loss", "kl", ".4f"),
    ("critic/vf_loss", "vf", ".4f"),
    ("actor/grad_norm", "grad", ".3f"),
    ("train/grad_norm", "grad", ".3f"),
    ("actor/lr", "lr", ".1e"),
    ("train/lr", "lr", ".1e"),
    ("timing_s/step", "s", ".2f"),
    ("perf/throughput", "tok/s/gpu", ",.0f"),
)
# Failures, shown only if there are any.
QUIET_AT_ZERO = {"reward/failed", "reward/timed_out_share", "actor/skipped_updates", "train/skipped_updates"}


def step_line(metrics: Mapping[str, float], step: int, total_steps: int | None, width: int | None = None) -> str:
    """Format a step: ``step   7/100  held-out 0.712  score 0.531  length 7.0 ...``.

    width: maximum number of characters; the last figures are dropped to fit. None: no limit.
    """
    total = "" if total_steps is None else f"/{total_steps}"
    parts = [f"step {step:>{max(len(total) - 1, 1)}}{total}"]
    for name, label, form in COLUMNS:
        if name in metrics and not (name in QUIET_AT_ZERO and metrics[name] == 0):
            parts.append(f"{label} {metrics[name]:{form}}")
    while width is not None and len("  ".join(parts)) > width and len(parts) > 1:
        parts.pop()
    return "  ".join(parts)


def score_of(sample: Sample) -> Text:
    """The score of a sample, or the reason why it has none."""
    return Text(f"{sample['score']:g}" if sample["reward_error"] is None else f"none: {sample['reward_error']}")


def drawn(turns: Sequence[Mapping[str, Any]]) -> Text:
    """A line for each turn; what the model did not sample is dim."""
    lines = [
        Text.assemble((f"{role}: " if role else "", "bold" if sampled else "dim"), (line, "" if sampled else "dim"))
        for role, line, sampled in lines_of(turns)
    ]
    return Text("\n").join(lines)


class ConsoleLogger:
    """Logger that prints to the console."""

    def __init__(self, console: Console, total_steps: int | None, display: Display | None = None) -> None:
        """display: panel above which lines are printed; None if stdout is not a terminal."""
        self.console = console
        self.total_steps = total_steps
        self.display = display

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        width = None if self.display is None else self.console.width
        line = Text(step_line(metrics, step, self.total_steps, width))
        line.highlight_regex(r"(?<=  )[a-z][a-z /-]*(?= )", "dim")
        line.highlight_regex(r"held-out \S+", "bold green")
        if self.display is not None:
            self.display.show(metrics, step)
        self._print(line)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        table = Table(title=f"validation answers, step {step}", title_justify="left", expand=False)
        for header in ("prompt", "answer", "ground truth", "score"):
            table.add_column(header, overflow="fold")
        # As Text: rich would interpret brackets in a str, such as [bold] in a response, as markup.
        for sample in samples:
            prompt, response = Text(visible(sample["prompt"])), Text(visible(sample["response"]))
            if turns := sample.get("conversation"):
                prompt, response = map(drawn, split_prompt(turns))
            table.add_row(prompt, response, Text(visible(sample["ground_truth"])), score_of(sample))
        self._print(table)

    def _print(self, line: RenderableType) -> None:
        if self.display is None:
            self.console.print(line, soft_wrap=isinstance(line, Text))
        else:
            self.display.print(line)

    def go_back(self, step: int) -> None:
        if self.display is not None:
            self.display.go_back(step)

    def close(self) -> None:
        if self.display is not None:
            self.display.close()
