"""The program trainer.main_plan: from its words to a table, JSON and a page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from configs.schema.ppo import PPOConfig
from trainer.planner.dry_run import measured
from trainer.planner.hardware import GpuCluster
from trainer.planner.plan_report import as_html, as_json, as_lines
from trainer.planner.search import Composed, RankedPlan, alternatives
from trainer.planner.time_model import ResponseLengths

OWN = ("cluster", "lengths", "plans", "output")


def plan(words: Sequence[str], composed: Composed, inputs: Callable[[PPOConfig], Iterable[str]]) -> None:
    """Print the plan of a command line of main_plan, and write its files. inputs: problems of files.

    Raises ValueError and FileNotFoundError."""
    own = {key: value for key, _, value in (word.partition("=") for word in words) if key in OWN}
    overrides = [word for word in words if word.partition("=")[0] not in OWN]
    if "cluster" not in own:
        raise ValueError("cluster=null: the GPUs to plan for are not named; set cluster=2x8xH100")
    cluster = GpuCluster.of(own["cluster"])
    if not (count := own.get("plans", "5")).isdigit():
        raise ValueError(f"plans={count}: must be a number; set how many plans are shown, for example plans=5")
    overrides += [
        f"trainer.nnodes={cluster.nodes}", f"trainer.n_gpus_per_node={cluster.gpus}", f"trainer.device={cluster.hardware.device}",
    ]  # fmt: skip
    config = composed(overrides)
    if problems := [*inputs(config)]:
        raise ValueError("\n".join(problems))
    models = measured(config)
    if unknown := sorted(key for key, model in models.items() if model.shape is None):
        raise ValueError(f"{unknown[0]}.model.path: the planner covers dense decoders, and this model is none")
    shapes = {key: model.shape for key, model in models.items() if model.shape is not None}
    given = RankedPlan(config, cluster, shapes, lengths_of(own.get("lengths"), config), {})
    others = alternatives(given, overrides, int(count), composed)
    print("\n".join(as_lines(given, others)))
    if "output" in own:
        folder = Path(own["output"])
        folder.mkdir(parents=True, exist_ok=True)
        found = {"command": list(words), "plan": as_json(given), "alternatives": [as_json(other) for other in others]}
        (folder / "plan.json").write_text(json.dumps(found, indent=1) + "\n")
        (folder / "plan.html").write_text(as_html(given, others))


def lengths_of(words: str | None, config: PPOConfig) -> ResponseLengths:
    """Lengths from MEAN:MAX or the metrics of a run. Prompts count as half of their maximum, unless the metrics have them."""
    data = config.data
    if words is None:
        return ResponseLengths(data.max_prompt_length / 2, data.max_response_length, data.max_response_length)
    if found := re.fullmatch(r"(\d+(?:\.\d+)?):(\d+)", words):
        mean, most = float(found[1]), int(found[2])
        if mean > most or most > data.max_response_length:
            limit = f"data.max_response_length={data.max_response_length}"
            raise ValueError(f"lengths={words}: needs mean <= maximum <= {limit}; change one of them")
        return ResponseLengths(data.max_prompt_length / 2, mean, most)
    if not Path(words).is_file():
        raise ValueError(f"lengths={words}: no such file; name the metrics.jsonl of a run, or mean:maximum, for example 800:4096")
    lines = [json.loads(line) for line in Path(words).read_text().splitlines()]
    lines = [line for line in lines if "response_length/mean" in line]
    if not lines:
        raise ValueError(f"lengths={words}: no line has response_length/mean; name the metrics.jsonl of a run")
    # The last tenth: lengths change while a model learns.
    last = lines[-max(1, len(lines) // 10) :]
    means = {key: sum(line[f"{key}_length/mean"] for line in last) / len(last) for key in ("prompt", "response")}
    return ResponseLengths(means["prompt"], means["response"], int(max(line["response_length/max"] for line in last)))
