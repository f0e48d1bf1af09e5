"""Compare a recorded step with its replay: responses, log-probs, scores, rewards and metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.table import Table

from workers.batch import Batch

NOT_REPLAYED = ("timing", "perf/", "rollout/", "val/", "val-")
"""Prefixes of metrics that a replayed update does not reproduce: times, throughput, weight sync and validation."""
MOST_LINES = 20


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference. then, now: recorded and replayed value, None if absent. beyond: exceeds trainer.replay.bound."""

    what: str
    where: str
    then: float | None
    now: float | None
    beyond: bool

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return f"{self.what}{place}: {shown(self.then)} then, {shown(self.now)} now"


def compare_answers(then: Batch, now: Batch, bound: float) -> list[Difference]:
    """Compare responses by prompt and sample: presence, tokens, rollout log-probs, scores and rewards.

    Each kind that differs yields one entry with the first or the largest difference and their number. Tokens must be equal;
    log-probs, scores and rewards may differ by ``bound``. Log-probs are compared up to the first different token.
    """
    places_then, places_now = places(then), places(now)
    alone = places_then.keys() ^ places_now.keys()
    found: list[Difference] = []
    if alone:
        first = min(alone)
        counts = float(len(places_then)), float(len(places_now))
        where = f"{len(alone)} are in one only; {named(first)} was {'there' if first in places_then else 'not'}"
        found.append(Difference("answers", where, *counts, True))
    common = [key for key in places_then if key in places_now]
    then, now = then.select([places_then[key] for key in common]), now.select([places_now[key] for key in common])
    found += compare_tokens(then, now, bound)
    for column in ("score", "reward"):
        gaps = (then.rows[column].double() - now.rows[column].double()).abs()
        if n := int((gaps != 0).sum()):
            row = int(gaps.argmax())
            where = f"{n} of {len(common)} answers; the largest: {name_of(then, row)}"
            values = float(then.rows[column][row]), float(now.rows[column][row])
            # «not <=» instead of «>»: NaN exceeds every bound.
            found.append(Difference(column, where, *values, not float(gaps[row]) <= bound))
    return found


def compare_tokens(then: Batch, now: Batch, bound: float) -> list[Difference]:
    """Compare tokens and log-probs of batches whose rows are the same responses in the same order."""
    parted: list[tuple[int, int, float | None, float | None]] = []  # row, position, token then and now
    drifted: list[tuple[float, int, int, float, float]] = []  # |difference|, row, position, log-prob then and now
    columns = (batch.split_rows(name) for name in ("input_ids", "rollout_log_probs") for batch in (then, now))
    for row, (ids_then, ids_now, log_probs_then, log_probs_now) in enumerate(zip(*columns, strict=True)):
        # Log-probs after the first different token have different prefixes and cannot be compared.
        shorter = min(len(ids_then), len(ids_now))
        unequal = (ids_then[:shorter] != ids_now[:shorter]).nonzero().flatten().tolist()
        same = unequal[0] if unequal else shorter
        if unequal or len(ids_then) != len(ids_now):
            first, second = (float(ids[same]) if same < len(ids) else None for ids in (ids_then, ids_now))
            parted.append((row, same, first, second))
        gaps = (log_probs_then[:same].double() - log_probs_now[:same].double()).abs()
        if (gaps != 0).any():
            at = int(gaps.argmax())
            drifted.append((float(gaps[at]), row, at, float(log_probs_then[at]), float(log_probs_now[at])))
    found = []
    if parted:
        row, position, first, second = parted[0]
        where = f"{len(parted)} of {len(then)} answers; the first: {name_of(then, row)}, token {position}"
        found.append(Difference("tokens", where, first, second, True))
    if drifted:
        gap, row, position, value_then, value_now = max(drifted)
        where = f"{len(drifted)} of {len(then)} answers; the largest: {name_of(then, row)}, token {position}"
        found.append(Difference("rollout_log_probs", where, value_then, value_now, not gap <= bound))
    return found


def places(batch: Batch) -> dict[tuple[int, ...], int]:
    """Row index of each response by (uid, sample), followed by its part where responses have several rows."""
    keys = zip(*(batch.rows[name].tolist() for name in ("uid", "sample", "part") if name in batch.rows), strict=True)
    return {key: row for row, key in enumerate(keys)}


def name_of(batch: Batch, row: int) -> str:
    return named(int(batch.rows[name][row]) for name in ("uid", "sample", "part") if name in batch.rows)


def named(key: Iterable[int]) -> str:
    uid, sample, *part = key
    return f"uid {uid}, sample {sample}" + (f", part {part[0]}" if part and part[0] else "")


def compare_metrics(then: Mapping[str, float], now: Mapping[str, float], bound: float) -> list[Difference]:
    """Metrics that differ, largest relative difference first; a relative difference above ``bound`` is beyond it."""
    sizes = {name: relative(then.get(name), now.get(name)) for name in then.keys() | now.keys()}
    order = sorted((name for name in sizes if sizes[name] != 0), key=lambda name: (-sizes[name], name))
    return [Difference(name, "", then.get(name), now.get(name), beyond=sizes[name] > bound) for name in order]


def untimed(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("timing")}


def replayed(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a replayed update reproduces."""
    return {name: value for name, value in metrics.items() if not name.startswith(NOT_REPLAYED)}


def relative(then: float | None, now: float | None) -> float:
    """|then - now| / max(|then|, |now|); infinite if only one exists or only one is finite. NaN equals NaN."""
    if then is None or now is None:
        return math.inf
    if then == now or (math.isnan(then) and math.isnan(now)):
        return 0.0
    if not (math.isfinite(then) and math.isfinite(now)):
        return math.inf
    return abs(then - now) / max(abs(then), abs(now))


def table(title: str, differences: list[Difference]) -> Table:
    """Console table of the first MOST_LINES differences; those beyond the bound in bold."""
    drawn = Table(title=title, title_justify="left", expand=False)
    for name, side in (("", "left"), ("then", "right"), ("now", "right"), ("|difference|", "right"), ("where", "left")):
        drawn.add_column(name, justify="right" if side == "right" else "left")
    for difference in differences[:MOST_LINES]:
        then, now = difference.then, difference.now
        gap = "" if then is None or now is None else f"{abs(then - now):.3g}"
        style = "bold" if difference.beyond else None
        drawn.add_row(difference.what, shown(then), shown(now), gap, difference.where, style=style)
    if len(differences) > MOST_LINES:
        drawn.add_row(f"and {len(differences) - MOST_LINES} more", "", "", "", "")
    return drawn


def shown(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.9g}"
