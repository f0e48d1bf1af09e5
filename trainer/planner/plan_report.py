"""A plan for people and programs: a table, JSON, and a page with the step's Gantt chart and memory by phase."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from trainer.planner.search import RankedPlan, as_words
from workers.host_memory import GB

COLOURS = ("#4477aa", "#8c7bb8", "#cc6677", "#228866")  # by stage
WIDTH, LEFT, LANE = 900, 150, 26


def binding(plan: RankedPlan) -> str:
    """The longest phase and the part that takes most of it; for memory the fullest phase."""
    longest, fullest = max(plan.phases, key=lambda phase: phase.seconds), max(plan.uses, key=lambda use: use.bytes or 0.0)
    time = f"time: {longest.phase}, {longest.binds}" if plan.seconds else "time: nothing"
    share = (fullest.bytes or 0.0) / plan.cluster.hardware.memory
    return f"{time} ({longest.seconds / plan.seconds:.0%} of the step); memory: {fullest.phase} ({share:.0%} of a GPU)"


def as_lines(plan: RankedPlan, others: Sequence[RankedPlan]) -> Iterator[str]:
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
    if not others:
        yield "no settings fit this cluster: take more GPUs, or shorter responses"


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


def as_html(plan: RankedPlan, others: Sequence[RankedPlan]) -> str:
    """A page without scripts: a lane for each pool, memory by phase, and the table."""
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
    table = html.escape("\n".join(as_lines(plan, others)))
    title = "Plan of a step: time by pool, memory by phase (a full line is one GPU)"
    return f'<!doctype html><meta charset="utf-8"><title>{title}</title><h1>{title}</h1>{picture}<pre>{table}</pre>\n'
