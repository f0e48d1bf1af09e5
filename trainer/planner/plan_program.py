"""The program trainer.main_plan: from its words to a table, JSON and a page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from configs.schema.ppo import DataConfig, PPOConfig
from trainer.planner.dry_run import measured
from trainer.planner.failures import FailureCosts, intervals, save_seconds
from trainer.planner.hardware import GpuCluster
from trainer.planner.plan_report import (
    FailureForecast,
    as_html,
    as_json,
    as_lines,
    placement_line,
    run_charts,
    run_json,
    run_lines,
)
from trainer.planner.search import Overrides, RankedPlan, alternatives, as_words, placements
from trainer.planner.simulation import SimulatedRun, simulate
from trainer.planner.time_model import ResponseLengths
from trainer.ppo.ppo_builder import check_splits
from trainer.run.run_dir import read_lines

OWN = ("cluster", "lengths", "plans", "simulate", "failure_hours", "save_seconds", "restart_seconds", "output")
RESTART = "180"
"""Seconds from a failure to the next step: 7B with vLLM starts in 141 to 186 s on four H200."""


def plan(
    words: Sequence[str], composed: Callable[[Sequence[str]], PPOConfig], inputs: Callable[[PPOConfig], Iterable[str]]
) -> None:
    """Print the plan of a command line of main_plan, and write its files. inputs: problems of files.

    composed: the checked configuration of a command line.

    Raises ValueError and FileNotFoundError."""
    own = {key: value for key, _, value in (word.partition("=") for word in words) if key in OWN}
    overrides = [word for word in words if word.partition("=")[0] not in OWN]
    if "cluster" not in own:
        raise ValueError("cluster=null: the GPUs to plan for are not named; set cluster=2x8xH100")
    cluster = GpuCluster.of(own["cluster"])
    folder = Path(own.get("output", ""))
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output={folder}: is a file; name a directory")
    count, steps = (numbered(own, key, default) for key, default in (("plans", 5), ("simulate", 0)))
    overrides += [
        f"trainer.nnodes={cluster.nodes}", f"trainer.n_gpus_per_node={cluster.gpus}", f"trainer.device={cluster.hardware.device}",
    ]  # fmt: skip
    config = composed(overrides)
    check_splits(config)
    if problems := [*inputs(config)]:
        raise ValueError("\n".join(problems))
    models = measured(config)
    if unknown := sorted(key for key, model in models.items() if model.shape is None or model.shape.experts):
        raise ValueError(f"{unknown[0]}.model.path: the planner covers dense decoders, and this model is none")
    shapes = {key: model.shape for key, model in models.items() if model.shape is not None}
    given = RankedPlan(config, cluster, shapes, lengths_of(own.get("lengths"), config), {})

    def checked(more: Overrides) -> PPOConfig:
        config = composed([*overrides, *as_words(more)])
        check_splits(config)
        return config

    others = alternatives(given, count, checked)
    run = simulate(given, steps) if steps else None
    failures = failures_of(own, given, run)
    lines = [
        *as_lines(given, others, searched=count > 0),
        placement_line(placements(given, checked)),
        *run_lines(given, run, failures),
    ]
    print("\n".join(lines))
    if "output" in own:
        folder.mkdir(parents=True, exist_ok=True)
        found = {"command": list(words), "plan": as_json(given), "alternatives": [as_json(other) for other in others]}
        found |= run_json(run, failures)
        (folder / "plan.json").write_text(json.dumps(found, indent=1) + "\n")
        (folder / "plan.html").write_text(as_html(given, lines, run_charts(run, failures)))


def numbered(own: Mapping[str, str], key: str, default: int) -> int:
    if not (words := own.get(key, str(default))).isdigit():
        raise ValueError(f"{key}={words}: must be a number; set it for example to {key}={default or 100}")
    return int(words)


def failures_of(own: Mapping[str, str], plan: RankedPlan, run: SimulatedRun | None) -> FailureForecast | None:
    """Goodput by checkpoint interval, if failure_hours is set: of the simulated steps, or of the planned one."""
    values = {key: own[key] for key in ("failure_hours", "save_seconds", "restart_seconds") if key in own}
    for key, words in values.items():
        if not re.fullmatch(r"\d+(\.\d+)?", words) or (key == "failure_hours" and not float(words)):
            raise ValueError(f"{key}={words}: must be a number of {key.partition('_')[2]} above 0; set for example {key}=12")
    if "failure_hours" not in values:
        if values:
            raise ValueError(f"{next(iter(values))} has no effect without failures; set for example failure_hours=12")
        return None
    save = float(values["save_seconds"]) if "save_seconds" in values else save_seconds(plan)
    costs = FailureCosts(3600 * float(values["failure_hours"]), save, float(values.get("restart_seconds", RESTART)))
    steps = run.steps if run is not None else [plan.seconds]
    goodput = {every: costs.goodput(steps, every) for every in intervals(steps, costs)}
    return FailureForecast(costs, sum(steps) / len(steps), goodput)


def lengths_of(words: str | None, config: PPOConfig) -> ResponseLengths:
    """Lengths from MEAN:MAX or the metrics of a run. Prompts count as half of their maximum, unless the metrics have them."""
    data = config.data
    if words is None:
        return ResponseLengths(data.max_prompt_length / 2, data.max_response_length, data.max_response_length)
    if found := re.fullmatch(r"(\d+(?:\.\d+)?):(\d+)", words):
        return _checked(words, ResponseLengths(data.max_prompt_length / 2, float(found[1]), int(found[2])), data)
    if not Path(words).is_file():
        raise ValueError(f"lengths={words}: no such file; name the metrics.jsonl of a run, or mean:maximum, for example 800:4096")
    keys = ("prompt_length/mean", "response_length/mean", "response_length/max")
    lines = [line for line in read_lines(Path(words)) if all(is_finite(line.get(key)) for key in keys)]
    if not lines:
        raise ValueError(f"lengths={words}: no line has {', '.join(keys)}; name the metrics.jsonl of a run")
    # The last tenth: lengths change while a model learns.
    last = lines[-max(1, len(lines) // 10) :]
    means = {key: sum(line[f"{key}_length/mean"] for line in last) / len(last) for key in ("prompt", "response")}
    most = int(max(line["response_length/max"] for line in last))
    return _checked(words, ResponseLengths(means["prompt"], means["response"], most), data)


def is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _checked(words: str, lengths: ResponseLengths, data: DataConfig) -> ResponseLengths:
    if not lengths.response <= lengths.most <= data.max_response_length:
        needs = f"mean <= maximum <= data.max_response_length={data.max_response_length}"
        raise ValueError(f"lengths={words}: {lengths.response:g}:{lengths.most}, needs {needs}; change one of them")
    return lengths
