"""Evaluate files of responses: mean@k, pass@k and maj@k per data source."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from configs.schema.evaluation import EvaluationConfig, MetricsConfig
from trainer.cluster.watchdog import Watchdog
from trainer.data.files import Rows, labels
from trainer.evaluation.estimators import MAX_VOTERS, Interval, maj_at_k, mean_with_interval, pass_at_k
from trainer.evaluation.votes import Vote, vote_function
from trainer.generation.shards import shard_files
from trainer.rewards.remote.remote_rewards import needs_data_sources, open_rewards
from trainer.rewards.rules.reward_registry import check_data_sources
from trainer.rewards.scoring import Response, Score, check_some_scored, finite
from trainer.run.run_dir import write_atomic
from trainer.tracking.formatting import table_console
from workers.seeding import seed_of

ALL, UNNAMED = "all", "unnamed"


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores and votes of a prompt's responses that have a score. failed: number of responses whose reward failed."""

    data_source: str
    scores: list[float]
    votes: list[str | None]
    failed: int


def run(config: EvaluationConfig, notices: Sequence[str]) -> None:
    """Score, print a table, write JSON. notices: warnings about the configuration."""
    prompts = read(config, vote_function(config.metrics.vote))
    failed = sum(prompt.failed for prompt in prompts)
    if failed:
        print(f"note: {failed} answers have no score, their rewards failed; they are left out", file=sys.stderr)
    if (most := max(len(prompt.scores) for prompt in prompts)) > MAX_VOTERS:
        why = f"a prompt has {most} scored answers, and at most {MAX_VOTERS} can be counted"
        print(f"note: maj@k is left out: {why}", file=sys.stderr)
    found = evaluate(prompts, config.metrics, config.trainer.seed)
    path = Path(config.data.output_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    table_console().print(table(found))
    print(f"evaluation: {path}")


def read(config: EvaluationConfig, vote: Vote) -> list[Scored]:
    """Read all rows and score them, or take data.score_key. Raises ValueError, one line, for unusable files, columns or rows."""
    data = config.data
    by_source = data.score_key is None and needs_data_sources(config.reward)
    needed = [f"{data.reward_model_key}.ground_truth"] if data.score_key is None else [data.score_key]
    needed += [data.data_source_key] if by_source else []
    # Columns that only scoring reads may be of any type where scores are given.
    optional = [data.data_source_key, *(["extra_info", "finish_reasons"] if data.score_key is None else [])]
    rows = Rows(files(data.path), [data.response_key, *needed], optional)
    answers = [as_list(value, str, data.response_key, rows.where(i)) for i, value in enumerate(rows.column(data.response_key))]
    sources = labels(rows.column(data.data_source_key), data.data_source_key, rows.where)
    if data.score_key is not None:
        given = rows.column(data.score_key)
        numbers = (float, int, type(None))
        # A score that the scorers would not return is a failed reward too: it would make the means NaN.
        scores = [[*map(finite, as_list(value, numbers, data.score_key, rows.where(i)))] for i, value in enumerate(given)]
        for i, (own, of_row) in enumerate(zip(answers, scores, strict=True)):
            if len(own) != len(of_row):
                raise ValueError(f"{rows.where(i)}: {len(own)} answers and {len(of_row)} scores")
    else:
        if by_source:
            check_data_sources(sources)
        scores = score(config, rows, answers, sources)
    return [
        Scored(
            data_source=source,
            scores=[value for value in of_row if value is not None],
            votes=[vote(text) for text, value in zip(own, of_row, strict=True) if value is not None],
            failed=of_row.count(None),
        )
        for source, own, of_row in zip(sources, answers, scores, strict=True)
    ]


def score(config: EvaluationConfig, rows: Rows, answers: Sequence[list[str]], sources: Sequence[str]) -> list[list[float | None]]:
    """Scores of each row's responses by reward.*. Without a column finish_reasons, all responses count as terminated."""
    truths = rows.column(f"{config.data.reward_model_key}.ground_truth")
    extras, reasons = rows.column("extra_info"), rows.column("finish_reasons")
    for i, (own, ends) in enumerate(zip(answers, reasons, strict=True)):
        if ends and (not isinstance(ends, list) or len(ends) != len(own)):
            raise ValueError(
                f"{rows.where(i)}: finish_reasons is {ends!r:.60}, not a list with one for each of {len(own)} answers"
            )
    asked = [
        Response(source, text, truth, extra or {}, finished=why == "stop")
        for own, source, truth, extra, ends in zip(answers, sources, truths, extras, reasons, strict=True)
        for text, why in zip(own, ends or ["stop"] * len(own), strict=True)
    ]
    with open_rewards(config.reward) as rewards:
        rewards.wait_ready()
        watchdog = Watchdog(asdict(config.timeouts), Path(config.trainer.default_local_dir))
        with watchdog.own("reward", "scoring", f"{len(asked)} answers"):
            scores: list[Score] = rewards.score(asked)
    check_some_scored(scores, "the answers")
    # Scores are flat, in the order in which the responses were collected above: regroup them by row.
    waiting = iter(scores)
    return [[next(waiting).value for _ in own] for own in answers]


def files(paths: Sequence[str]) -> list[str]:
    """Expand directories to their shards. Raises ValueError for a directory without shards."""
    found: list[str] = []
    for name in paths:
        path = Path(name).expanduser()
        if not path.exists():
            raise ValueError(f"data.path={name}: no such file or directory")
        if path.is_dir() and not shard_files(path):
            raise ValueError(f"data.path={name}: the directory has no shard_*.parquet or shard_*.jsonl")
        found += [str(shard) for shard in shard_files(path)] if path.is_dir() else [name]
    return found


def as_list(value: Any, kind: type | tuple[type, ...], key: str, where: str) -> list:
    """``value`` as a list; a single response or score becomes a list of one. Raises ValueError if empty or of another type."""
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, kind) for item in items):
        what = "texts" if kind is str else "numbers"
        raise ValueError(f"{where}: column {key!r} is {value!r:.60}, not a list of {what}")
    return items


def evaluate(prompts: Sequence[Scored], metrics: MetricsConfig, seed: int) -> dict[str, Any]:
    """Counts, and mean@k, pass@k and maj@k as fields of Interval, per data source and, if there are several, over all.

    Over all: under ALL, with an underscore behind it if a source has that name. A source without any score has counts only.
    A prompt with fewer than k scored responses is excluded from the metrics of k; prompts@k counts the included ones. mean@k is
    the mean over all their responses for every k: the mean of a random subset has the same expectation.
    """
    groups: dict[str, list[Scored]] = {}
    for prompt in sorted(prompts, key=lambda prompt: str(prompt.data_source)):
        groups.setdefault(str(prompt.data_source) or UNNAMED, []).append(prompt)
    if len(groups) > 1:
        name = ALL
        while name in groups:
            name += "_"
        groups[name] = list(prompts)
    return {source: of_group(group, metrics, seed) for source, group in groups.items()}


def of_group(group: Sequence[Scored], metrics: MetricsConfig, seed: int) -> dict[str, Any]:
    """Metrics over the prompts of one data source, without maj@k if a prompt has more than MAX_VOTERS responses.

    Raises ValueError if no prompt has k scored responses.
    """
    most = max(len(prompt.scores) for prompt in group)
    found: dict[str, Any] = {
        "prompts": len(group),
        "answers": sum(len(prompt.scores) for prompt in group),
        "failed": sum(prompt.failed for prompt in group),
    }
    for k in (metrics.k or ladder(most)) if most else ():
        having = [prompt for prompt in group if len(prompt.scores) >= k]
        if not having:
            raise ValueError(f"metrics.k={k}: no prompt has that many scored answers, the most are {most}")
        passed = [sum(value >= metrics.pass_score for value in prompt.scores) for prompt in having]
        values = {
            "mean": [sum(prompt.scores) / len(prompt.scores) for prompt in having],
            "pass": [pass_at_k(len(prompt.scores), c, k) for prompt, c in zip(having, passed, strict=True)],
        }
        if most <= MAX_VOTERS:
            values["maj"] = [maj_at_k(prompt.votes, prompt.scores, k) for prompt in having]
        found[f"prompts@{k}"] = len(having)
        for name, of_prompts in values.items():
            # The same bootstrap samples for every metric and k, so that equal values have equal intervals.
            drawn = seed_of(seed, "bootstrap")
            found[f"{name}@{k}"] = mean_with_interval(of_prompts, metrics.bootstrap_samples, drawn)._asdict()
    return found


def ladder(most: int) -> list[int]:
    """Default values of k: 1, 2, 4, ... and ``most``."""
    return sorted({2**power for power in range(most.bit_length())} | {most})


def table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """Console table with a row per data source and k: value and 95 % interval of each metric."""
    drawn = Table(title="mean over prompts, 95 % interval", title_justify="left", expand=False)
    for header in ("data source", "prompts", "k", "mean@k", "pass@k", "maj@k"):
        drawn.add_column(header, justify="left" if header == "data source" else "right", no_wrap=True)
    for source, metrics in found.items():
        if not metrics["answers"]:
            drawn.add_row(source, f"{metrics['prompts']:,}", *["-"] * 4)
        for k in [int(name.partition("@")[2]) for name in metrics if name.startswith("prompts@")]:
            keys = [f"{name}@{k}" for name in ("mean", "pass", "maj")]
            cells = [cell(Interval(**metrics[key])) if key in metrics else "-" for key in keys]
            drawn.add_row(source, f"{metrics[f'prompts@{k}']:,}", str(k), *cells)
    return drawn


def cell(interval: Interval) -> str:
    return f"{interval.value:.4f} [{interval.low:.4f}, {interval.high:.4f}]"
