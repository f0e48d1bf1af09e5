"""A plan for people and programs: a table, JSON, and a page with the step's Gantt chart and memory by phase."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.planner.failures import FailureCosts
from trainer.planner.search import RankedPlan, as_words
from trainer.planner.simulation import SimulatedRun
from trainer.report.charts import Chart, Curve, draw
from workers.host_memory import GB

COLOURS = ("#4477aa", "#8c7bb8", "#cc6677", "#228866")  # by stage
WIDTH, LEFT, LANE = 900, 150, 26


@dataclass(frozen=True, slots=True)
class FailureForecast:
    """Goodput by the number of steps between checkpoints. step: mean seconds of a step."""

    costs: FailureCosts
    step: float
    goodput: Mapping[int, float]

    @property
    def best(self) -> int:
        return max(self.goodput, key=lambda every: self.goodput[every])


def binding(plan: RankedPlan) -> str:
    """The longest phase and the part that takes most of it; for memory the fullest phase."""
    longest, fullest = max(plan.phases, key=lambda phase: phase.seconds), max(plan.uses, key=lambda use: use.bytes or 0.0)
    time = f"time: {longest.phase}, {longest.binds}" if plan.seconds else "time: nothing"
    share = (fullest.bytes or 0.0) / plan.cluster.hardware.memory
    return f"{time} ({longest.seconds / plan.seconds:.0%} of the step); memory: {fullest.phase} ({share:.0%} of a GPU)"


def as_lines(plan: RankedPlan, others: Sequence[RankedPlan], *, searched: bool = True) -> Iterator[str]:
    """searched: whether ``others`` were looked for."""
    hardware = plan.cluster.hardware
    gpus = f"{plan.cluster.nodes} x {plan.cluster.gpus} {hardware.name}"
    yield f"{gpus}; responses of {plan.lengths.response:.0f} tokens on average, {plan.lengths.most} at most"
    yield f"{'pool':<12}{'phase':<22}{'seconds':>9}{'GB':>8}  by part"
    uses = {(use.pool, use.phase): use for use in plan.uses}
    for phase in plan.phases:
        use = uses.get((phase.pool, phase.phase))
        size = f"{(use.bytes or 0.0) / GB:>8.3g}" if use else f"{'':>8}"
        parts = sorted(phase.parts.items(), key=lambda part: -part[1])
        words = ", ".join(f"{name} {seconds:.2g}" for name, seconds in parts if seconds > 0.005 * phase.seconds)
        yield f"{phase.pool:<12}{phase.phase:<22}{phase.seconds:>9.3g}{size}  {words}"
    yield f"{'':<12}{'step':<22}{plan.seconds:>9.3g}{'':>8}  {'fits' if plan.fits else 'does not fit'}; binds: {binding(plan)}"
    for number, other in enumerate(others, 1):
        words = " ".join(as_words(other.overrides)) or "as given"
        fullest = max((use.bytes or 0.0 for use in other.uses), default=0.0) / GB
        yield f"{number}. {other.seconds:.3g} s a step ({plan.seconds / other.seconds:.2f} x), {fullest:.3g} GB: {words}"
    if searched and not others:
        yield "no settings fit this cluster: take more GPUs, or shorter responses"


def placement_line(placed: Sequence[RankedPlan]) -> str:
    """The fastest placement without other overrides, against the next. placed: fastest first."""
    if not placed:
        return "placement: none fits with the other settings as given"
    best = placed[0]
    words = f"placement: {best.config.placement.layout}, {best.seconds:.3g} s a step with the other settings as given"
    if len(placed) == 1:
        return f"{words}; no other placement is valid and fits"
    following = placed[1]
    return f"{words}, against {following.seconds:.3g} s of {following.config.placement.layout}"


def run_lines(plan: RankedPlan, run: SimulatedRun | None, failures: FailureForecast | None) -> Iterator[str]:
    """Lines on simulated steps and failures."""
    if run is not None:
        seconds, generation = (sum(values) / len(values) for values in (run.steps, run.generation))
        times = f"{min(run.steps):.3g} to {max(run.steps):.3g} s, {seconds:.3g} on average ({plan.seconds:.3g} planned)"
        first = max(running for _, running in run.running)
        half = next((at for at, running in reversed(run.running) if 2 * running >= first), 0.0) / run.generation[0]
        yield f"simulated: {len(run.steps)} steps of {times}; generation {generation:.3g} s"
        yield f"  at most {first} sequences run at once, fewer than half of them in the last {1 - half:.0%} of generation"
    if failures is not None:
        costs, best = failures.costs, failures.best
        hours = costs.lost_every / 3600
        yield f"failures: a node lost every {hours:g} h; {costs.save:.3g} s a checkpoint, {costs.restart:.3g} s a restart"
        daly, worst = costs.daly() / failures.step, min(failures.goodput, key=lambda every: failures.goodput[every])
        yield (
            f"  trainer.save_freq={best} keeps {failures.goodput[best]:.1%} of the time, {worst} keeps "
            f"{failures.goodput[worst]:.1%}; Daly's formula: {daly:.3g} steps"
        )


def run_json(run: SimulatedRun | None, failures: FailureForecast | None) -> dict[str, Any]:
    found: dict[str, Any] = {} if run is None else {"simulated": asdict(run)}
    if failures is not None:
        found["failures"] = asdict(failures) | {"save_freq": failures.best}
    return found


def run_charts(run: SimulatedRun | None, failures: FailureForecast | None) -> str:
    """Running sequences over the time of the first step's generation; goodput over the interval of checkpoints."""
    charts = []
    if run is not None:
        at, running = zip(*run.running, (run.generation[0], 0), strict=True)
        charts.append(
            draw("Running sequences", "seconds of the first step", [Curve("", at, running, exact=True)], at_least=(0, 1))
        )
    if failures is not None:
        every, share = zip(*failures.goodput.items(), strict=True)
        curves = [Curve("", every, [100 * value for value in share], exact=True, dots=True)]
        charts.append(draw("Goodput, %", "steps between checkpoints", curves))
    return "".join(map(svg, charts))


def svg(chart: Chart) -> str:
    words = [f'<text x="{tick.at}" y="210" text-anchor="middle">{tick.label}</text>' for tick in chart.x_ticks]
    words += [f'<text x="43" y="{tick.at + 4}" text-anchor="end">{tick.label}</text>' for tick in chart.y_ticks]
    paths = [f'<path d="{line.path}" fill="none" stroke="{COLOURS[0]}"/>' for line in chart.lines]
    size = 'viewBox="0 0 440 220" width="440" font-size="11"'
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join([*words, *paths])}</svg>'
    return f"<figure><figcaption>{chart.title} ({chart.note})</figcaption>{picture}</figure>"


def as_json(plan: RankedPlan) -> dict[str, Any]:
    return {
        "overrides": as_words(plan.overrides),
        "seconds": plan.seconds,
        "fits": plan.fits,
        "binds": binding(plan),
        "phases": [
            {"pool": s.time.pool, "phase": s.time.phase, "start": s.start, "end": s.end, "parts": s.time.parts}
            for s in plan.spans
        ],
        "memory": [asdict(use) for use in plan.uses],
    }


def as_html(plan: RankedPlan, lines: Sequence[str], charts: str) -> str:
    """A page without scripts: a lane for each pool, memory by phase, ``charts``, and the table."""
    pools = [pool.name for pool in plan.place.pools]
    scale = (WIDTH - LEFT) / max(plan.seconds, 1e-9)
    bars = []
    for span in plan.spans:
        x, y, width = LEFT + span.start * scale, LANE * pools.index(span.time.pool), (span.end - span.start) * scale
        bars.append(
            f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{LANE - 4}" fill="{COLOURS[span.time.stage]}">'
            f"<title>{html.escape(span.time.phase)}: {span.time.seconds:.3g} s, {html.escape(span.time.binds)}</title></rect>"
        )
        if width > 7 * len(span.time.phase):
            bars.append(f'<text x="{x + 4:.1f}" y="{y + 15}" fill="white">{html.escape(span.time.phase)}</text>')
    top, full = LANE * len(pools) + LANE, (WIDTH - LEFT) / plan.cluster.hardware.memory
    for i, use in enumerate(plan.uses):
        y, width = top + LANE * i, (use.bytes or 0.0) * full
        bars.append(
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{LANE - 4}" fill="{"#ddaa55" if plan.fits else "#cc3311"}"/>'
        )
        bars.append(f'<text x="0" y="{y + 15}">{html.escape(use.phase)}</text>')
        bars.append(f'<text x="{LEFT + 4}" y="{y + 15}">{(use.bytes or 0.0) / GB:.3g} GB</text>')
    bars += [f'<text x="0" y="{LANE * i + 15}">{html.escape(name)}</text>' for i, name in enumerate(pools)]
    height = top + LANE * len(plan.uses)
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-size="12">{"".join(bars)}</svg>'
    table = html.escape("\n".join(lines))
    title = "Plan of a step: time by pool, memory by phase (a full line is one GPU)"
    return f'<!doctype html><meta charset="utf-8"><title>{title}</title><h1>{title}</h1>{picture}{charts}<pre>{table}</pre>\n'
