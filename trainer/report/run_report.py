"""Report of a run: report.html, a single self-contained page made of the files that the tracker wrote.

The page is written again while the run continues (``GrowingReport``) and when it ends (``finish``). ``python -m trainer.report
<run directory>`` writes it for any run at any time, also after a crash: only the run directory is read.
"""

from __future__ import annotations

import json
import math
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.report.charts import Chart, Curve, Lanes, Stack, draw, lanes, stack
from trainer.report.page import render
from trainer.report.pool_balance import balance_line
from trainer.run.logger import Sample
from trainer.run.run_dir import (
    ANSWERS,
    CONFIG,
    ENVIRONMENT,
    EVENTS,
    GLOBAL_STEP,
    METRICS,
    REPORT,
    SAMPLES,
    TIMELINE,
    read_config,
    read_lines,
    read_metrics,
    write_atomic,
)
from trainer.run.timing import AFTER_STEP, AGENTS, WHOLE_STEP, WITHIN
from trainer.tracking.formatting import duration, number
from trainer.tracking.token_dump import shown
from workers.controller.logs import tell

ACCURACY = "val/accuracy"
PROBLEMS = "val/problems"
PARTIAL_CREDIT = "val/partial_credit"
MOST_ANSWERS = 16
UNKNOWN = {"command": "unknown", "commit": "unknown"}  # in run directories of version 0.1.0 before 2026-11-24
DRAWN_STEPS = 3
MOST_WORKERS = 32
MOST_TOOLS = 10  # curves of a chart, those with the most calls
SHARE = 0.01
"""Maximum fraction of the time that is spent on writing the page during a run."""
SECONDS = 5.0  # minimum time between two pages
CONTROLLER = "controller"
PHASE_OF = {
    "generation": "gen", "forward of actor": "old_log_prob", "forward of ref": "ref", "forward of critic": "values",
    "update of actor": "update_actor", "update of critic": "update_critic", "weight sync": "sync",
}  # fmt: skip
"""{call of a worker: phase whose colour it has}."""

Series = dict[str, tuple[list[float], list[float]]]
"""{metric: (steps, values)}."""


@dataclass(frozen=True, slots=True)
class CurveSpec:
    """Specification of a chart; metrics that the run does not have are left out.

    metrics: (metric, label) of each curve. band: prefix of the metrics <band>/min and <band>/max, drawn as a band. exact, dots,
    at_least: see charts.Curve and charts.draw. zero: draw a curve also if it is 0 throughout; otherwise such a curve is left out.
    """

    title: str
    note: str
    metrics: tuple[tuple[str, str], ...]
    band: str | None = None
    exact: bool = False
    dots: bool = False
    at_least: tuple[float, float] | None = None
    zero: bool = False


CURVES = (
    CurveSpec("Held-out accuracy", "", ((ACCURACY, "all"),), exact=True, dots=True, at_least=(0.0, 1.0), zero=True),
    CurveSpec("Score", "mean over training answers", (("critic/score/mean", "score"),), zero=True),
    CurveSpec("Loss", "of the supervised run", (("train/loss", "training"), ("val/loss", "held-out"))),
    CurveSpec("Turns", "of the model, a session", (("agents/turns", "mean"), ("agents/turns/max", "longest session"))),
    CurveSpec(
        "Tokens of sessions",
        "after the first prompt",
        (("agents/tokens/sampled", "sampled"), ("agents/tokens/observed", "observed")),
    ),
    CurveSpec("Answer length", "tokens; shortest to longest", (("response_length/mean", "mean"),), band="response_length"),
    CurveSpec("Entropy", "of the policy, a token", (("actor/entropy", "entropy"),)),
    CurveSpec(
        "KL",
        "nats a token",
        (
            ("actor/kl_loss", "to reference, in the loss"),
            ("actor/reward_kl_penalty", "to reference, in the reward"),
            ("actor/ppo_kl", "to old policy"),
        ),
    ),
    CurveSpec(
        "Gradient norm",
        "before clipping",
        (("actor/grad_norm", "actor"), ("critic/grad_norm", "critic"), ("train/grad_norm", "model")),
    ),
    CurveSpec("Policy loss", "", (("actor/pg_loss", "pg_loss"),)),
    CurveSpec("Value loss", "", (("critic/vf_loss", "vf_loss"),)),
    CurveSpec("Explained variance", "of the returns, by the critic", (("critic/vf_explained_var", "critic"),)),
    CurveSpec("Clipped", "share of tokens", (("actor/pg_clipfrac", "above"), ("actor/pg_clipfrac_lower", "dual clip"))),
    CurveSpec(
        "Trainer vs rollout",
        "|difference of probability|",
        (("training/rollout_probs_diff_mean", "mean"), ("training/rollout_probs_diff_max", "max")),
    ),
    CurveSpec(
        "Skipped updates",
        "loss or gradient not finite",
        (("actor/skipped_updates", "actor"), ("critic/skipped_updates", "critic"), ("train/skipped_updates", "model")),
    ),
    CurveSpec("Staleness", "versions, of trained tokens", (("rollout/staleness/mean", "mean"), ("rollout/staleness/max", "max"))),
    CurveSpec("Idle pools", "share of the step", (("perf/rollout_idle", "engines"), ("perf/trainer_idle", "trainer"))),
    CurveSpec("Learning rate", "", (("actor/lr", "actor"), ("critic/lr", "critic"), ("train/lr", "model")), exact=True),
    CurveSpec("Throughput", "tokens a second and GPU", (("perf/throughput", "tokens/s"),)),
    CurveSpec(
        "GPU memory",
        "GB, by the driver, in updates",
        (("perf/gpu_memory_gb/actor", "actor"), ("perf/gpu_memory_gb/critic", "critic"), ("perf/gpu_memory_gb/model", "model")),
    ),
)


@dataclass(frozen=True, slots=True)
class Share:
    """Time of a phase over the whole run. share: fraction of the total time."""

    label: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class ResponsePair:
    """Responses to a held-out prompt at the first validation and at the last one (None if there was only one)."""

    first: Sample
    last: Sample | None


def finish(run_dir: Path) -> None:
    """Write the final report, whether the run succeeded or failed; print held-out accuracy, balance of pools, and its path.

    An unreadable file or a full disk is reported in one line: it must not make a failure of a run that succeeded, nor hide the
    error of one that failed.
    """
    try:
        path, steps = write_report(run_dir), read_metrics(run_dir)
    except Exception as error:  # as GrowingReport: the page draws whatever the files hold
        named = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        tell(f"note: {run_dir / REPORT} is not written: {named}{error}")
        return
    series = series_of(steps)
    if ACCURACY in series:
        accuracies = series[ACCURACY][1]
        of = f" ({series[PROBLEMS][1][-1]:g} problems)" if PROBLEMS in series else ""  # a reward model's is of pairs
        print(f"held-out {held_out_name(series)}: {accuracies[0]:.2f} -> {accuracies[-1]:.2f}{of}")
    if (line := balance_line(steps)) is not None:
        print(f"balance: {line}")
    print(f"report: {path}")


def held_out_name(series: Series) -> str:
    """What val/accuracy is: a mean score where a response may get partial credit."""
    return "score" if any(series.get(PARTIAL_CREDIT, ((), ()))[1]) else "accuracy"


def write_report(run_dir: Path) -> Path:
    """Write ``run_dir``/report.html, a single self-contained file, and return its path. May be called during the run."""
    steps = read_metrics(run_dir)
    series = series_of(steps)
    first_step, last_step, answers = answers_of(read_lines(run_dir / SAMPLES))
    scores = [sample["score"] for answer in answers for sample in (answer.first, answer.last) if sample is not None]
    timeline, training = read_lines(run_dir / TIMELINE), shown(read_lines(run_dir / ANSWERS))
    config = read_config(run_dir)
    shares, columns = timing_of(steps)
    # One colour per phase in all charts of the page.
    colors = {share.label: place for place, share in enumerate(shares)}
    page = render(
        "report/report.html.j2",
        project=config["trainer"]["project_name"],
        experiment=config["trainer"]["experiment_name"],
        run_dir=run_dir.absolute(),
        seed=config["trainer"]["seed"],
        accuracy=[series[ACCURACY][1][0], series[ACCURACY][1][-1]] if ACCURACY in series else None,
        held_out=held_out_name(series),
        problems=series[PROBLEMS][1][-1] if PROBLEMS in series else None,
        facts=facts_of(steps, series),
        failed=sum(series["reward/failed"][1]) if "reward/failed" in series else 0,
        charts=charts_of(series, [*reward_curves(config, series), *tool_curves(series)]),
        balance=balance_line(steps),
        shares=shares,
        columns=columns,
        timeline=timeline_of(timeline, colors),
        workers=workers_of(timeline, colors),
        drawn_steps=DRAWN_STEPS,
        answers=answers,
        tokens=[{name: value for name, value in row.items() if name != "conversation"} for row in training],
        conversations=[row.get("conversation") for row in training],
        first_step=first_step,
        last_step=last_step,
        good=(min(scores) + max(scores)) / 2 if scores and min(scores) < max(scores) else 0.0,
        events=read_lines(run_dir / EVENTS),
        table=[(name, values[0], values[-1], min(values), max(values)) for name, (_, values) in sorted(series.items())],
        config=(run_dir / CONFIG).read_text(encoding="utf-8"),
        environment=UNKNOWN | json.loads((run_dir / ENVIRONMENT).read_text(encoding="utf-8")),
    )
    # Atomic: a browser that reloads during the run never reads a partial page.
    write_atomic(run_dir / REPORT, page)
    return run_dir / REPORT


class GrowingReport:
    """Logger that updates report.html during the run.

    A thread writes the page after a step and then sleeps long enough that writing takes at most SHARE of the time. So the cost
    stays bounded although each page takes longer than the one before. An error of the report never ends the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._stepped, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="report", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._stepped.set()

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Do nothing: the next page reads the samples from their file."""

    def go_back(self, step: int) -> None:
        """Do nothing: the next page reads the files, which have been rolled back."""

    def close(self) -> None:
        """End the thread; ``finish`` writes the last page."""
        # _over first: _work checks it when _stepped wakes it.
        self._over.set()
        self._stepped.set()
        self._thread.join()

    def _work(self) -> None:
        while True:
            self._stepped.wait()
            self._stepped.clear()
            if self._over.is_set():
                return
            # CPU time of this thread, and not wall time: what it waits for the interpreter is not taken from the run.
            before = time.thread_time()
            try:
                write_report(self._run_dir)
            except Exception as error:  # the run matters more than its report: note the error once, then stop updating
                tell(f"note: {self._run_dir / REPORT} is not written during the run: {type(error).__name__}: {error}")
                return
            if self._over.wait(max(SECONDS, (time.thread_time() - before) / SHARE)):
                return


def series_of(steps: Sequence[Mapping[str, float]]) -> Series:
    """Transpose the entries of metrics.jsonl: steps and values of each metric."""
    series: Series = {}
    for entry in steps:
        for name, value in entry.items():
            if name != GLOBAL_STEP:
                xs, ys = series.setdefault(name, ([], []))
                xs.append(entry[GLOBAL_STEP])
                ys.append(value)
    return series


def reward_curves(config: Mapping[str, Any], series: Series) -> list[CurveSpec]:
    """Charts of the scorer and of the reward models, empty without a reward model.

    Scores of the models that rise while those of the scorer fall are a sign of over-optimisation.
    """
    reward = config.get("reward", {})
    names = [*(["reward_model"] if reward.get("reward_model", {}).get("enable") else []), *reward.get("models", {})]
    if not names:
        return []
    # Metrics are named val-aux/<source>/<name>/mean@n.
    held_out = {metric: parts for metric in series if (parts := metric.split("/"))[0] == "val-aux" and parts[-2] in names}
    sources = len({parts[1] for parts in held_out.values()})
    labels = {metric: " ".join(parts[1:-1] if sources > 1 else parts[-2:-1]) for metric, parts in held_out.items()}
    training = [(f"reward/{name}/mean", name) for name in names]
    return [
        CurveSpec("Scorer alone", "mean over training answers", (("reward/acc/mean", "scorer"),), zero=True),
        CurveSpec("Reward models", "raw scores, mean over training answers", tuple(training), zero=True),
        CurveSpec("Reward models, held-out", "raw scores", tuple(labels.items()), dots=True, zero=True),
    ]


def tool_curves(series: Series) -> list[CurveSpec]:
    """Charts of the tools' calls and errors, with a curve per tool."""
    names = (found for name in series if (found := re.fullmatch("agents/tool/(.+)/calls", name)))
    calls = {found[1]: sum(series[found[0]][1]) for found in names}
    tools = sorted(calls, key=lambda tool: (-calls[tool], tool))[:MOST_TOOLS]
    note = f"of {tools[0]}, a session" if len(tools) == 1 else "a session"  # a chart names its curves if it has several
    return [
        CurveSpec(f"Tool {what}", note, tuple((f"agents/tool/{tool}/{what}", tool) for tool in tools))
        for what in ("calls", "errors")
    ]


def charts_of(series: Series, more: Sequence[CurveSpec] = ()) -> list[Chart]:
    """All charts of the page that have data. more: specifications inserted after accuracy and score."""
    charts = []
    for spec in (*CURVES[:2], *more, *CURVES[2:]):
        curves = []
        for name, label in spec.metrics + _by_data_source(spec, series):
            if any(math.isfinite(value) and (spec.zero or value) for value in series.get(name, ((), ()))[1]):
                low, high = (series[f"{spec.band}/{end}"][1] if spec.band else None for end in ("min", "max"))
                curves.append(Curve(label, *series[name], low=low, high=high, exact=spec.exact, dots=spec.dots))
        if curves:
            title = f"Held-out {held_out_name(series)}" if spec.metrics == ((ACCURACY, "all"),) else spec.title
            charts.append(draw(title, spec.note, curves, at_least=spec.at_least))
    return charts


def _by_data_source(spec: CurveSpec, series: Series) -> tuple[tuple[str, str], ...]:
    """Additional curves of the accuracy chart: one per data set, if there are several."""
    is_accuracy = bool(spec.metrics) and spec.metrics[0][0] == ACCURACY
    names = [name for name in series if name.startswith("val-core/")] if is_accuracy else []
    return tuple((name, name.split("/", 1)[1]) for name in names) if len(names) > 1 else ()


def facts_of(steps: Sequence[Mapping[str, float]], series: Series) -> list[tuple[str, str]]:
    """(label, value) of the figures in the headline."""
    facts = [("steps", number(steps[-1][GLOBAL_STEP]) if steps else "0")]
    if "perf/total_num_tokens" in series:
        facts.append(("tokens", number(sum(series["perf/total_num_tokens"][1]))))
    shares, _ = timing_of(steps)
    facts.append(("time", duration(sum(share.seconds for share in shares))))
    if "perf/throughput" in series:
        # The median, which single slow steps do not change.
        middle = sorted(series["perf/throughput"][1])[len(series["perf/throughput"][1]) // 2]
        facts.append(("tokens/s/GPU", number(middle)))
    if "perf/mfu" in series:
        facts.append(("MFU", f"{sum(series['perf/mfu'][1]) / len(series['perf/mfu'][1]):.1%}"))
    return facts


def phase_seconds(steps: Sequence[Mapping[str, float]]) -> tuple[list[str], list[float], list[list[float]]]:
    """(phases, steps, seconds of each step by phase). Phases are in order of first occurrence; the last one is the remainder."""
    # Validation before the first step has an entry in metrics.jsonl, but no times.
    timed = [entry for entry in steps if f"timing_s/{WHOLE_STEP}" in entry]
    names = dict.fromkeys(name.removeprefix("timing_s/") for entry in timed for name in entry if name.startswith("timing_s/"))
    phases = [name for name in names if name not in (WHOLE_STEP, *WITHIN) and not name.startswith(AGENTS)]
    parts = []
    for entry in timed:
        spent = [entry.get(f"timing_s/{phase}", 0.0) for phase in phases]
        # The remainder is the step minus the phases within it; AFTER_STEP is not part of a step. Concurrent phases may exceed it.
        inside = sum(value for phase, value in zip(phases, spent, strict=True) if phase not in AFTER_STEP)
        parts.append([*spent, max(0.0, entry[f"timing_s/{WHOLE_STEP}"] - inside)])
    rest = "other" if set(phases) - set(AFTER_STEP) else WHOLE_STEP
    return [*phases, rest], [entry[GLOBAL_STEP] for entry in timed], parts


def timing_of(steps: Sequence[Mapping[str, float]]) -> tuple[list[Share], Stack | None]:
    """Total time of each phase, and the chart of phases by step; ([], None) without a timed step."""
    phases, xs, parts = phase_seconds(steps)
    if not xs:
        return [], None
    totals = [sum(column) for column in zip(*parts, strict=True)]
    whole = sum(totals)
    return [Share(name, total, total / whole) for name, total in zip(phases, totals, strict=True)], stack(phases, xs, parts)


def timeline_of(entries: Sequence[Mapping[str, Any]], colors: Mapping[str, int]) -> Lanes | None:
    """Phases of the last DRAWN_STEPS steps, with a lane per pool and one for the controller; None if there are no steps.

    colors: {phase: index of its colour}.
    """
    entries = [entry for entry in entries if entry["spans"]][-DRAWN_STEPS:]
    spans = [
        (pool, phase, start, end)
        for entry in entries
        for phase, pools, start, end in entry["spans"]
        for pool in (pools or [CONTROLLER])
        if phase != WHOLE_STEP
    ]
    # Pools by name, the controller last.
    order = {pool: (pool == CONTROLLER, pool) for pool, *_ in spans}
    return lanes(sorted(spans, key=lambda span: (order[span[0]], span[2])), colors) if spans else None


def workers_of(entries: Sequence[Mapping[str, Any]], colors: Mapping[str, int]) -> tuple[int, Lanes] | None:
    """(last step, calls of each worker in it, with the controller's own phases below); None if there is no step yet.

    At most MOST_WORKERS ranks of each pool are shown. colors: {phase: index of its colour}.
    """
    entry = next((entry for entry in reversed(entries) if entry.get("calls")), None)
    if entry is None:
        return None
    calls = sorted(
        (pool, rank, start, what, start + seconds)
        for what, pool, start, by_rank in entry["calls"]
        for rank, seconds in enumerate(by_rank[:MOST_WORKERS])
    )
    spans = [(f"{pool} {rank}", what, start, end) for pool, rank, start, what, end in calls]
    spans += [(CONTROLLER, phase, start, end) for phase, pools, start, end in entry["spans"] if not pools and phase != WHOLE_STEP]
    # Only phases that the run has; lanes() gives the other calls colours of their own.
    calls_too = {what: colors[phase] for what, phase in PHASE_OF.items() if phase in colors}
    return entry[GLOBAL_STEP], lanes(spans, {**colors, **calls_too})


def answers_of(entries: Sequence[Mapping[str, Any]]) -> tuple[int, int, list[ResponsePair]]:
    """(first step with samples, last one, at most MOST_ANSWERS prompts that both have)."""
    if not entries:
        return 0, 0, []
    first_step, last_step = entries[0][GLOBAL_STEP], entries[-1][GLOBAL_STEP]
    by_step: dict[int, dict[int, Any]] = {}
    for entry in entries:
        by_step.setdefault(entry[GLOBAL_STEP], {})[entry["uid"]] = {**entry, "score": float(entry["score"])}
    last = by_step[last_step] if last_step != first_step else {}
    pairs = [ResponsePair(sample, last.get(uid)) for uid, sample in by_step[first_step].items()]
    return first_step, last_step, [pair for pair in pairs if pair.last is not None or not last][:MOST_ANSWERS]


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 1 or not (Path(arguments[0]) / METRICS).exists():
        raise SystemExit(f"usage: python -m trainer.report <run directory that holds {METRICS}>")
    try:
        print(f"report: {write_report(Path(arguments[0]))}")
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"error: {arguments[0]}: {type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main(sys.argv[1:])
