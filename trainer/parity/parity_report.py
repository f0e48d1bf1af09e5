"""Report of an engine comparison: a console table and a page with charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml
from rich.table import Table

from configs.schema.common import Dtype
from trainer.parity.agreement import Agreement, Divergence, EngineResponses, Heads, common_prefix
from trainer.parity.bounds import Engine, Pass
from trainer.parity.measure import Measured
from trainer.report.charts import Chart, Curve, draw
from trainer.report.page import render
from trainer.tracking.formatting import duration, number

MOST_DIVERGENCES = 20  # per engine, on the page
SMALLEST = 1e-9  # smallest difference that a logarithmic chart shows


@dataclass(frozen=True, slots=True)
class Parity:
    """Results of all engines. dtype: the coarser of the engine's and the trainer's. broken: a line for each exceeded bound.

    temperature: of sampling; None: greedy responses only. margin: nats within which a token counts as the trainer's choice.
    """

    model: str
    dtype: Dtype
    prompts: int
    temperature: float | None
    margin: float
    heads: Heads
    engines: dict[str, Engine]
    broken: list[str]


@dataclass(frozen=True, slots=True)
class ReportLine:
    """A row of the table. title: the row is a heading. cells: one per engine."""

    label: str
    cells: list[str]
    title: bool = False


def lines(parity: Parity) -> list[ReportLine]:
    """Rows of the table, the same on console and page."""
    engines = list(parity.engines.values())
    first = next(iter(parity.engines))
    found = [ReportLine("greedy", [f"{e.greedy.answers:,} answers, {e.greedy.tokens:,} tokens" for e in engines], title=True)]
    found.append(ReportLine("the trainer's choice", [f"{e.choices.first:.6g} of tokens" for e in engines]))
    found.append(ReportLine(f"  or {parity.margin:g} nats below it", [f"{e.choices.within:.6g}" for e in engines]))
    found.append(ReportLine("  the furthest below", [f"{number(e.choices.largest_gap)} nats" for e in engines]))
    if len(engines) > 1:
        found.append(ReportLine(f"plainest difference from {first}", [_or_dash(e.greedy.agreement, plainest) for e in engines]))
    found += _of_passes([e.greedy for e in engines], first)
    sampled = [e.sampled for e in engines if e.sampled is not None]
    if sampled:
        title = f"sampled at {parity.temperature:g}"
        found.append(ReportLine(title, [f"{p.answers:,} answers, {p.tokens:,} tokens" for p in sampled], title=True))
        found.append(ReportLine("draws, standard errors off", ["-" if e.draw_z is None else f"{e.draw_z:+.2f}" for e in engines]))
        found += _of_passes(sampled, first)
    found.append(ReportLine("cost", ["" for _ in engines], title=True))
    found.append(ReportLine("start", [duration(e.start_seconds) for e in engines]))
    found.append(ReportLine("first weight sync", [duration(e.sync_seconds) for e in engines]))
    found.append(ReportLine("memory, trainer alone", [size(e.memory_without_bytes) for e in engines]))
    found.append(ReportLine("memory, engine awake", [size(e.memory_with_bytes) for e in engines]))
    return found


def _of_passes(passes: list[Pass], first: str) -> Iterator[ReportLine]:
    if len(passes) > 1:
        agreements = [answers.agreement for answers in passes]
        yield ReportLine(f"answers as {first}", [_or_dash(a, lambda a: f"{a.answers:.4g}") for a in agreements])
        yield ReportLine(f"tokens as {first}", [_or_dash(a, lambda a: f"{a.tokens:.4g}") for a in agreements])
    yield ReportLine("log-probs - trainer: mean", [number(p.differences.mean) for p in passes])
    yield ReportLine("  |difference|: mean", [number(p.differences.mean_abs) for p in passes])
    yield ReportLine("  median, 99 %", [", ".join(number(p.differences.quantiles[q]) for q in ("0.5", "0.99")) for p in passes])
    worst = [f"{number(p.differences.max_abs)} (row {p.differences.uid}, token {p.differences.position})" for p in passes]
    yield ReportLine("  largest", worst)
    yield ReportLine("ended by a stop token", [f"{p.ends.stopped:.4g} of answers" for p in passes])
    yield ReportLine("  ended wrongly", [f"{sum(p.ends.wrong.values())}" for p in passes])
    yield ReportLine("  special tokens inside", [f"{p.ends.special}" for p in passes])
    yield ReportLine("length: mean (10, 50, 90 %)", [_length(p) for p in passes])
    yield ReportLine("tokens a second", [f"{p.tokens_per_second:,.0f}" for p in passes])
    yield ReportLine("prompt tokens from a cache", ["not reported" if p.cached is None else f"{p.cached:.1%}" for p in passes])


def _or_dash(agreement: Agreement | None, render: Any) -> str:
    return "-" if agreement is None else render(agreement)


def _length(answers: Pass) -> str:
    at = answers.lengths.quantiles
    return f"{answers.lengths.mean:.1f} ({at['0.1']:.0f}, {at['0.5']:.0f}, {at['0.9']:.0f})"


def plainest(agreement: Agreement) -> str:
    """The divergence with the largest margin: rounding is least likely to explain it."""
    if not agreement.divergences:
        return "none"
    worst = max(agreement.divergences, key=lambda found: found.margin)
    return f"margin {number(worst.margin)} (row {worst.uid}, token {worst.position})"


def size(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB"


def table(parity: Parity) -> Table:
    drawn = Table(title=f"{parity.model}: {parity.prompts} prompts, {parity.dtype}", title_justify="left", expand=False)
    drawn.add_column("", no_wrap=True)
    for name in parity.engines:
        drawn.add_column(name, justify="right")
    for line in lines(parity):
        drawn.add_row(line.label, *line.cells, style="bold" if line.title else None)
    return drawn


def page(parity: Parity, measured: Mapping[str, Measured], config: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """The report as self-contained HTML, without external resources."""
    return render(
        "parity/parity.html.j2",
        parity=parity,
        engines=", ".join(parity.engines),
        lines=lines(parity),
        charts=charts(measured),
        divergences=[
            (name, divergence)
            for name, engine in parity.engines.items()
            if engine.greedy.agreement is not None
            for divergence in plainest_first(engine.greedy.agreement)
        ],
        config=yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True),
        environment=environment,
    )


def plainest_first(agreement: Agreement) -> list[Divergence]:
    return sorted(agreement.divergences, key=lambda found: -found.margin)[:MOST_DIVERGENCES]


def charts(measured: Mapping[str, Measured]) -> list[Chart]:
    greedy = {name: own.greedy.answers for name, own in measured.items()}
    sampled = {name: own.sampled.answers for name, own in measured.items() if own.sampled is not None}
    found = []
    for kind, answers in (("greedy", greedy), ("sampled", sampled)):
        if answers:
            shares = [Curve(name, *by_share(own), exact=True) for name, own in answers.items()]
            found.append(draw(f"|engine - trainer|, {kind}", "log10, by % of tokens", shares))
            along = [Curve(name, *by_position(own), exact=True) for name, own in answers.items()]
            found.append(draw(f"Along the answer, {kind}", "log10 of the mean", along))
    reference, *others = greedy
    if others:
        equal = [Curve(name, *survival(greedy[reference], greedy[name]), exact=True) for name in others]
        note = f"greedy answers as {reference}"
        found.append(draw("Still the same", note, equal, at_least=(0.0, 1.0)))
    lengths = [Curve(name, *cumulative(own.lengths), exact=True) for name, own in (sampled or greedy).items()]
    note = f"{'sampled' if sampled else 'greedy'} answers, up to so long"
    found.append(draw("Lengths", note, lengths, at_least=(0.0, 1.0)))
    return found


Points = tuple[list[float], list[float]]
"""x and y of a curve."""


def by_share(answers: EngineResponses) -> Points:
    """Quantile curve: the log10 difference that 0, 1, ..., 100 % of the tokens do not exceed."""
    at = np.arange(101.0)
    values = np.quantile(np.abs(answers.log_probs - answers.trainer_log_probs), at / 100)
    return at.tolist(), np.log10(np.maximum(values, SMALLEST)).tolist()


def by_position(answers: EngineResponses) -> Points:
    """log10 of the mean absolute difference at each position of the response."""
    positions = answers.positions
    totals = np.bincount(positions, weights=np.abs(answers.log_probs - answers.trainer_log_probs))
    means = totals / np.bincount(positions)
    return np.arange(float(len(means))).tolist(), np.log10(np.maximum(means, SMALLEST)).tolist()


def survival(reference: EngineResponses, own: EngineResponses) -> Points:
    """Share of response pairs that are identical up to each position; pairs identical to their end count at every position."""
    pairs = list(zip(reference.split(reference.token_ids), own.split(own.token_ids), strict=True))
    same = np.array([common_prefix(first, second) for first, second in pairs])
    whole = np.array([n == len(first) == len(second) for n, (first, second) in zip(same, pairs, strict=True)])
    at = np.arange(float(np.maximum(reference.lengths, own.lengths).max() + 1))
    return at.tolist(), [float((whole | (same >= position)).mean()) for position in at]


def cumulative(lengths: np.ndarray) -> Points:
    """Share of responses of at most each length."""
    shares = np.bincount(lengths).cumsum() / len(lengths)
    return np.arange(float(len(shares))).tolist(), shares.tolist()
