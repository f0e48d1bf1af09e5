"""What a step says about itself: pure functions from its batch and its times to numbers under the field's names.

Everything is computed in float64 on the controller, over real tokens, so a number depends on the batch alone and not
on how the work was cut.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, pstdev
from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.segments import group_ids, sum_by
from trainer.run.timing import WHOLE_STEP, Phases
from workers.batch import Batch

ROUNDING = 1e-8
"""An advantage of this size is none: a mean of equal rewards, weighted by length, may be off by so much."""
UNNAMED = "prompts"
"""The data source of data that name none."""


def data_metrics(batch: Batch, max_prompt_length: int) -> dict[str, float]:
    """Scores, rewards, advantages, returns, values and lengths of a step.

    tokens: response_mask, token_level_rewards (after any KL penalty), advantages, returns, values if there is a critic.
    rows: score, prompt_length, finished (1 stopped, 0 cut at the length limit). ``response_length/clip_ratio`` is the share
    of answers that were cut, ``prompt_length/clip_ratio`` that of prompts which fill ``max_prompt_length``,
    ``training/zero_signal_groups`` that of prompts (rows uid) none of whose trained tokens has an advantage.
    """
    mask = batch.tokens["response_mask"].bool()
    prompts = batch.rows["prompt_length"].double()
    metrics = (
        _spread("critic/score", batch.rows["score"])
        | _spread("critic/rewards", sum_by(batch.tokens["token_level_rewards"], batch.segment_ids(), len(batch)))
        | _spread("critic/advantages", batch.tokens["advantages"][mask])
        | _spread("critic/returns", batch.tokens["returns"][mask])
        | _spread("response_length", batch.lengths - batch.rows["prompt_length"])
        | _spread("prompt_length", prompts)
    )
    metrics["response_length/clip_ratio"] = float((batch.rows["finished"] == 0).double().mean())
    metrics["prompt_length/clip_ratio"] = float((prompts >= max_prompt_length).double().mean())
    learnt = sum_by((batch.tokens["advantages"].abs() > ROUNDING) & mask, batch.segment_ids(), len(batch))
    group, size = group_ids(batch.rows["uid"])
    metrics["training/zero_signal_groups"] = float((sum_by(learnt, group, len(size)) == 0).double().mean())
    if "values" in batch.tokens:
        values, returns = batch.tokens["values"][mask].double(), batch.tokens["returns"][mask].double()
        metrics |= _spread("critic/values", values)
        unexplained = (returns - values).var(correction=0) / (returns.var(correction=0) + 1e-5)
        metrics["critic/vf_explained_var"] = float(1 - unexplained)
    return metrics


def reward_metrics(batch: Batch, data_sources: Collection[str]) -> dict[str, float]:
    """What the reward function told beside the score, and of several data sources each by itself.

    rows: score, finished. objects: data_source, reward_extra. data_sources: those of the training data; a step may lack one.
    ``reward/<name>/mean`` and ``reward/<name>/std`` are over the answers for which the number was told.
    """
    told: dict[str, list[float]] = {}
    for extra in batch.objects["reward_extra"]:
        for name, value in extra.items():
            told.setdefault(name, []).append(value)
    metrics = {}
    for name, values in told.items():
        mean = math.fsum(values) / len(values)
        metrics[f"reward/{name}/mean"] = mean
        metrics[f"reward/{name}/std"] = (math.fsum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
    if len(data_sources) > 1:
        for source in sorted(set(batch.objects["data_source"])):
            rows = torch.tensor([other == source for other in batch.objects["data_source"]])
            metrics[f"critic/score/{source}/mean"] = float(batch.rows["score"][rows].double().mean())
            metrics[f"response_length/{source}/clip_ratio"] = float((batch.rows["finished"][rows] == 0).double().mean())
    return metrics


def performance_metrics(
    batch: Batch,
    seconds: Mapping[str, float],
    n_gpus: int,
    *,
    flops: Mapping[str, float],
    peak: float | None,
    gpus_of: Mapping[str, int] | None = None,
) -> dict[str, float]:
    """Times and speeds of a step.

    meta: generated_tokens, those of answers that are not in the batch among them. seconds: by phase, ``step`` among them.
    n_gpus: of the run; gpus_of: those that work in a phase, where they are not all. flops: model FLOPs by phase, over all GPUs.
    peak: FLOP/s of one GPU, None if unknown: then there is no mfu.
    ``perf/throughput`` is tokens of the batch, prompts included, a second and GPU; ``perf/mfu`` is all of ``flops`` over what the
    GPUs could have done in the step; ``perf/mfu/actor`` (update_actor), ``perf/mfu/critic`` and the like, over what they could
    have done in that phase.
    """
    total = batch.total_tokens
    tokens = {"gen": batch.meta["generated_tokens"]} | dict.fromkeys(
        ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"), total
    )
    step = seconds[WHOLE_STEP]
    metrics = {f"timing_s/{phase}": spent for phase, spent in seconds.items()}
    metrics |= {f"timing_per_token_ms/{phase}": seconds[phase] * 1e3 / n for phase, n in tokens.items() if phase in seconds and n}
    metrics |= {"perf/total_num_tokens": float(total), "perf/time_per_step": step, "perf/throughput": total / (step * n_gpus)}
    if peak is not None:
        metrics["perf/mfu"] = sum(flops.values()) / (step * n_gpus * peak)
        metrics |= {
            f"perf/mfu/{phase.removeprefix('update_')}": work / (seconds[phase] * (gpus_of or {}).get(phase, n_gpus) * peak)
            for phase, work in flops.items()
        }
    return metrics


def validation_metrics(
    data_sources: Sequence[str], uids: Sequence[int], values: Mapping[str, Sequence[float | None]]
) -> dict[str, float]:
    """Means over held-out prompts, of the mean over each prompt's n answers.

    data_sources, uids: data set and prompt of each answer. values: what was measured of each answer, by name: "reward", and
    what the reward function tells; a number that is not told for every answer of a source (None) is left out there. Of each
    source ``val-core/<data_source>/<name>/mean@n`` for the name that counts (acc, if it is told, else reward) and
    ``val-aux/...`` for the others; ``val/accuracy`` is the mean over all prompts of what counts, ``val/accuracy_std`` and
    ``val/accuracy_min`` are the deviation and the least over them, and ``val/problems`` is the number of prompts.
    """
    n = max(Counter(uids).values())
    metrics: dict[str, float] = {}
    counts: dict[int, float] = {}
    for source in sorted(set(data_sources)):
        mine = [i for i, other in enumerate(data_sources) if other == source]
        columns = {name: [value for i in mine if (value := column[i]) is not None] for name, column in values.items()}
        told = {name: column for name, column in columns.items() if len(column) == len(mine)}
        core = "acc" if "acc" in told else "reward"
        counts |= dict(zip(mine, told[core], strict=True))
        for name, column in told.items():
            kind = "core" if name == core else "aux"
            metrics[f"val-{kind}/{source or UNNAMED}/{name}/mean@{n}"] = fmean(_means_by_group([uids[i] for i in mine], column))
    means = _means_by_group(uids, [counts[i] for i in range(len(uids))])
    metrics["val/accuracy"] = fmean(means)
    metrics["val/accuracy_std"] = pstdev(means)
    metrics["val/accuracy_min"] = min(means)
    metrics["val/problems"] = float(len(means))
    return metrics


# Dense bf16 FLOP/s (no sparsity) by a part of the device's name; the first that is found counts.
PEAK_FLOPS = {
    "GB200": 2.5e15, "B200": 2.25e15, "H200": 989e12, "GH200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
    "H800": 989e12, "H20": 148e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A40": 150e12,
    "A10G": 70e12, "A10": 125e12, "RTX 5090": 210e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip


def peak_flops(device: Literal["cuda", "cpu"]) -> float | None:
    """FLOP/s of one device of this machine at best; None if it is not known.

    cuda: from the first GPU's name. cpu: of one thread, measured (in float32, some milliseconds, once).
    """
    if device == "cpu":
        return _measured_cpu_flops()
    return next((peak_flops_of(name) for name in gpu_names()), None)


def peak_flops_of(gpu: str) -> float | None:
    """gpu: the name that the driver gives, such as "NVIDIA H100 80GB HBM3"."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in gpu), None)


def gpu_names(driver: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Names of this machine's NVIDIA GPUs, from the driver: takes no memory on them, as asking through CUDA would."""
    lines = [line for path in sorted(driver.glob("*/information")) for line in path.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


@cache
def _measured_cpu_flops(size: int = 384, repeats: int = 5) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        matrix = torch.full((size, size), 0.5)
        phases = Phases()
        best = float("inf")
        for _ in range(repeats + 1):  # the first one pays for the library's start
            phases.seconds.clear()
            with phases("gemm"):
                matrix @ matrix
            best = min(best, phases.seconds["gemm"])
    finally:
        torch.set_num_threads(threads)
    return 2.0 * size**3 / best


def _spread(name: str, values: Tensor) -> dict[str, float]:
    """Mean, max and min; nothing of nothing."""
    if not len(values):
        return {}
    exact = values.double()
    return {f"{name}/mean": float(exact.mean()), f"{name}/max": float(exact.max()), f"{name}/min": float(exact.min())}


def _means_by_group(uids: Sequence[int], values: Sequence[float]) -> list[float]:
    groups: dict[int, list[float]] = {}
    for uid, value in zip(uids, values, strict=True):
        groups.setdefault(uid, []).append(value)
    return [sum(group) / len(group) for group in groups.values()]
