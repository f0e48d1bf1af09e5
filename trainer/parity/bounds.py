"""Results per engine, and the check against the bounds of the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from configs.schema.common import Dtype
from configs.schema.parity import BoundsConfig
from trainer.parity.agreement import Agreement, Choices, Differences, Ends, Heads, Lengths
from workers.engine.hf.hf_model import DTYPES


@dataclass(frozen=True, slots=True)
class Pass:
    """Results of one engine's greedy or sampled responses. agreement: with the first engine; None for the first engine itself.

    cached: share of prompt tokens read from a prefix cache; None if the engine does not report it.
    """

    answers: int
    tokens: int
    tokens_per_second: float
    cached: float | None
    lengths: Lengths
    differences: Differences
    ends: Ends
    agreement: Agreement | None


@dataclass(frozen=True, slots=True)
class Engine:
    """Results of one engine. choices: of the greedy pass. draw_z: of the sampled pass, None with top_k or top_p.

    start_seconds: construction of the engine. sync_seconds: first weight sync. memory_*_bytes: of all workers, with the trainer's
    model alone, and with the engine awake after its last response.
    """

    greedy: Pass
    choices: Choices
    sampled: Pass | None
    draw_z: float | None
    start_seconds: float
    sync_seconds: float
    memory_without_bytes: int
    memory_with_bytes: int


def coarser(dtypes: Sequence[Dtype]) -> Dtype:
    """The dtype with the largest rounding error, which limits how well two computations can agree."""
    return max(dtypes, key=lambda name: torch.finfo(DTYPES[name]).eps)


def margin(bounds: BoundsConfig, dtype: Dtype) -> float:
    """Margin in nats within which a token counts as the trainer's choice: twice bounds.log_prob_max."""
    # Two log-probs, each off by at most log_prob_max, can swap their order only if they are closer than twice that.
    return 2 * bounds.log_prob_max.of(dtype)


def broken(engines: Mapping[str, Engine], heads: Heads, bounds: BoundsConfig, dtype: Dtype) -> list[str]:
    """A line for each exceeded bound: engine, value, bound. NaN exceeds every bound."""
    lines = []
    if (wrong := heads.doubled + heads.lost) > bounds.wrong_prompts:
        lines.append(
            f"prompts: {heads.doubled} begin with {heads.bos} twice, {heads.lost} without it, though it is wanted: "
            f"{wrong} > bounds.wrong_prompts={bounds.wrong_prompts}"
        )
    for name, engine in engines.items():
        lines += [f"{name}: {line}" for line in _of_engine(engine, bounds, dtype)]
    return lines


def _of_engine(engine: Engine, bounds: BoundsConfig, dtype: Dtype) -> Iterator[str]:
    choices = engine.choices
    if choices.within < bounds.token_agreement:
        yield (
            f"greedy: {choices.within:.6g} of the tokens are the trainer's choice, or at most {margin(bounds, dtype):g} nats "
            f"below it: < bounds.token_agreement={bounds.token_agreement:g} (the furthest by {choices.largest_gap:.3g}, "
            f"row {choices.uid}, token {choices.position})"
        )
    # «not <=» instead of «>», here and below: NaN exceeds every bound.
    if engine.draw_z is not None and not abs(engine.draw_z) <= bounds.draw_z:
        kind = "too likely" if engine.draw_z > 0 else "too unlikely"
        yield (
            f"sampled: the samples are {kind} for the trainer's distribution, by {abs(engine.draw_z):.1f} standard errors: "
            f"> bounds.draw_z={bounds.draw_z:g}"
        )
    for kind, answers in (("greedy", engine.greedy), ("sampled", engine.sampled)):
        if answers is not None:
            yield from (f"{kind}: {line}" for line in _of_pass(answers, bounds, dtype))


def _of_pass(answers: Pass, bounds: BoundsConfig, dtype: Dtype) -> Iterator[str]:
    found = answers.differences
    most, mean = bounds.log_prob_max.of(dtype), bounds.log_prob_mean.of(dtype)
    if not found.max_abs <= most:
        yield (
            f"a log-prob is {found.max_abs:.3g} off the trainer's: > bounds.log_prob_max.{dtype}={most:g} "
            f"(row {found.uid}, token {found.position})"
        )
    if not found.mean_abs <= mean:
        yield f"log-probs are {found.mean_abs:.3g} off the trainer's on average: > bounds.log_prob_mean.{dtype}={mean:g}"
    if (wrong := sum(answers.ends.wrong.values())) > bounds.wrong_ends:
        summary = "; ".join(f"{count} x {what}" for what, count in answers.ends.wrong.items())
        yield f"answers end wrongly: {summary}: {wrong} > bounds.wrong_ends={bounds.wrong_ends}"
