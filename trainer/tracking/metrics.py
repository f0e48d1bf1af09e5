"""Metrics of a step: pure functions from its batch and its phase times to numbers, with the field's usual names.

Everything is computed in float64 on the controller over the flat batch, without padding. A metric therefore depends on the batch
alone, and not on its split into ranks and micro-batches.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, pstdev
from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.segments import first_in, group_ids, sum_by, sum_rows
from trainer.algorithms.trajectories import Trajectories
from trainer.run.timing import WHOLE_STEP, Phases
from workers.batch import Batch, counts_in

ROUNDING = 1e-8
"""Advantages up to this size count as zero: a length-weighted mean of equal rewards may differ from them by rounding."""
UNNAMED = "prompts"
"""Data source of rows that do not name one."""


def data_metrics(batch: Batch, max_prompt_length: int) -> dict[str, float]:
    """Statistics of scores, rewards, advantages, returns, values and lengths of a step; by trajectory where it has several rows.

    batch: tokens response_mask, sampled_mask, token_level_rewards (after any KL penalty), advantages, returns, and values if
    there is a critic; rows group, score, finished (1: stopped, 0: truncated at the length limit).

    ``response_length`` counts sampled tokens, also those that the loss excludes; ``prompt_length`` the tokens before the first.

    ``response_length/clip_ratio`` is the fraction of truncated responses. ``prompt_length/clip_ratio`` is the fraction of prompts
    of at least ``max_prompt_length`` tokens. ``training/zero_signal_groups`` is the fraction of groups without any trained token
    that has a non-zero advantage.
    """
    batch = Trajectories.of(batch).joined(batch)
    mask = batch.tokens["response_mask"].bool()
    advantages, returns = (batch.tokens[name] for name in ("advantages", "returns"))
    of_advantages = _spread("critic/advantages", _masked(advantages, mask))
    # Estimators without a baseline by token have one column for both.
    of_returns = (
        {name.replace("advantages", "returns"): value for name, value in of_advantages.items()}
        if returns is advantages
        else _spread("critic/returns", _masked(returns, mask))
    )
    sampled = batch.tokens["sampled_mask"]
    prompts = first_in(sampled, batch.lengths).double()
    metrics = (
        _spread("critic/score", batch.rows["score"])
        | _spread("critic/rewards", sum_rows(batch.tokens["token_level_rewards"], batch.lengths))
        | of_advantages
        | of_returns
        | _spread("response_length", counts_in(sampled, batch.lengths))
        | _spread("prompt_length", prompts)
    )
    metrics["response_length/clip_ratio"] = float((batch.rows["finished"] == 0).double().mean())
    metrics["prompt_length/clip_ratio"] = float((prompts >= max_prompt_length).double().mean())
    learnt = counts_in((advantages.abs() > ROUNDING) & mask, batch.lengths)
    group, size = group_ids(batch.rows["group"])
    metrics["training/zero_signal_groups"] = float((sum_by(learnt, group, len(size)) == 0).double().mean())
    if "values" in batch.tokens:
        values, returns = (_masked(column, mask).double() for column in (batch.tokens["values"], returns))
        metrics |= _spread("critic/values", values)
        # 1 for a perfect critic, 0 for one that predicts a constant, negative for a worse one. 1e-5 avoids 0 / 0.
        unexplained = (returns - values).var(correction=0) / (returns.var(correction=0) + 1e-5)
        metrics["critic/vf_explained_var"] = float(1 - unexplained)
    return metrics


def staleness_metrics(batch: Batch, step: int) -> dict[str, float]:
    """Staleness of the sampled tokens that ``step`` trains on: versions from the weights that sampled each to those before it.

    batch: tokens response_mask, weight_version. ``rollout/staleness/<k>``: share of the tokens with staleness k.
    """
    staleness = step - 1 - batch.tokens["weight_version"][batch.tokens["response_mask"].bool()].long()
    if not len(staleness):
        return {}
    values, counts = staleness.unique(return_counts=True)
    shares = (counts.double() / len(staleness)).tolist()
    metrics = {f"rollout/staleness/{value}": share for value, share in zip(values.tolist(), shares, strict=True)}
    return metrics | {
        "rollout/staleness/mean": float(staleness.double().mean()),
        "rollout/staleness/max": float(staleness.max()),
    }


def idle_metrics(seconds: Mapping[str, float], rollout_idle: float) -> dict[str, float]:
    """Shares of a step for which one pool waits for the other, with generation ahead.

    seconds: by phase; ``gen`` is the time for which the trainer waits. rollout_idle: seconds for which the engines do.
    """
    step = seconds[WHOLE_STEP]
    return {"perf/rollout_idle": rollout_idle / step, "perf/trainer_idle": seconds.get("gen", 0.0) / step}


def reward_metrics(batch: Batch, data_sources: Collection[str]) -> dict[str, float]:
    """Additional numbers that the reward function returned, and scores by data source if there are several; by trajectory.

    batch: rows score, finished; objects data_source, reward_extra. data_sources: of the training data; a step may lack some.
    ``reward/<name>/mean`` and ``reward/<name>/std`` are over the responses for which the number was returned.
    """
    batch = Trajectories.of(batch).joined(batch)
    numbers: dict[str, list[float]] = {}
    for extra in batch.objects["reward_extra"]:
        for name, value in extra.items():
            numbers.setdefault(name, []).append(value)
    metrics = {}
    for name, values in numbers.items():
        # fsum is exact, so the result does not depend on the order of the rows.
        mean = math.fsum(values) / len(values)
        metrics[f"reward/{name}/mean"] = mean
        metrics[f"reward/{name}/std"] = (math.fsum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
    if len(data_sources) > 1:
        for source in sorted(set(batch.objects["data_source"]), key=str):
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
    """Times and throughput of a step.

    batch: meta generated_tokens, including responses that did not enter the batch. seconds: by phase, including ``step``. n_gpus:
    of the run. gpus_of: number of GPUs that work in a phase, if not all. flops: model FLOPs by phase, over all GPUs. peak: FLOP/s
    of one GPU; None (unknown): no mfu.

    ``perf/throughput``: tokens of the batch, prompts included, per second and GPU. ``perf/mfu``: all of ``flops`` divided by what
    the GPUs could have computed in the step. ``perf/mfu/actor`` (phase update_actor), ``perf/mfu/critic`` and so on: FLOPs of the
    phase divided by what its GPUs could have computed in that phase.
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
    """Means over held-out prompts of the mean over the n responses to each prompt.

    data_sources, uids: data set and prompt of each response. values: {name: number of each response}: "reward", and the numbers
    that the reward function returned. A number that is None for any response of a source is left out for that source.

    Per source: ``val-core/<data_source>/<name>/mean@n`` for the decisive number ("acc" if present, else "reward") and
    ``val-aux/...`` for the others. ``val/accuracy``: mean of the decisive number over all prompts. ``val/accuracy_std`` and
    ``val/accuracy_min``: standard deviation and minimum over prompts. ``val/partial_credit``: share of
    responses whose decisive number is neither 0 nor 1: where there are some, val/accuracy is a mean score. ``val/problems``:
    number of prompts.
    """
    # The largest group: responses whose reward failed are left out, so a prompt may have fewer than n.
    n = max(Counter(uids).values())
    metrics: dict[str, float] = {}
    counts: dict[int, float] = {}
    for source in sorted(set(data_sources), key=str):
        mine = [i for i, other in enumerate(data_sources) if other == source]
        columns = {name: [value for i in mine if (value := column[i]) is not None] for name, column in values.items()}
        numbers = {name: column for name, column in columns.items() if len(column) == len(mine)}
        core = "acc" if "acc" in numbers else "reward"
        counts |= dict(zip(mine, numbers[core], strict=True))
        for name, column in numbers.items():
            kind = "core" if name == core else "aux"
            metrics[f"val-{kind}/{source or UNNAMED}/{name}/mean@{n}"] = fmean(_means_by_group([uids[i] for i in mine], column))
    # A mean of means: every prompt has the same weight, whatever its number of responses.
    means = _means_by_group(uids, [counts[i] for i in range(len(uids))])
    metrics["val/accuracy"] = fmean(means)
    metrics["val/accuracy_std"] = pstdev(means)
    metrics["val/accuracy_min"] = min(means)
    metrics["val/partial_credit"] = fmean(count not in (0.0, 1.0) for count in counts.values())
    metrics["val/problems"] = float(len(means))
    return metrics


# Dense bf16 FLOP/s (without sparsity) by a part of the device's name. The first match counts, so a name precedes its own parts:
# GB200 before B200, L40 before L4, A100 before A10.
PEAK_FLOPS = {
    "GB200": 2.5e15, "B200": 2.25e15, "H200": 989e12, "GH200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
    "H800": 989e12, "H20": 148e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A40": 150e12,
    "A10G": 70e12, "A10": 125e12, "RTX 5090": 210e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip


def peak_flops(device: Literal["cuda", "cpu"]) -> float | None:
    """Peak FLOP/s of one device of this machine, None if unknown.

    cuda: from the name of the first GPU. cpu: of one thread, measured once in float32 (takes some milliseconds).
    """
    if device == "cpu":
        return _measured_cpu_flops()
    return next((peak_flops_of(name) for name in gpu_names()), None)


def peak_flops_of(gpu: str) -> float | None:
    """Peak FLOP/s of a GPU, None if unknown. gpu: name given by the driver, such as "NVIDIA H100 80GB HBM3"."""
    # Whole words: the A1000 and the A4000 are not these.
    return next((peak for name, peak in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", gpu)), None)


def gpu_names(driver: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Names of this machine's NVIDIA GPUs, read from the driver's files: a CUDA context would take memory on each of them."""
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
        for _ in range(repeats + 1):  # the first one includes the initialization of the library
            phases.seconds.clear()
            with phases("gemm"):
                matrix @ matrix
            # The fastest one: other processes can only slow a measurement down.
            best = min(best, phases.seconds["gemm"])
    finally:
        torch.set_num_threads(threads)
    return 2.0 * size**3 / best


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """Entries of ``values`` (T,) where ``mask`` (bool, T) is set."""
    return torch.from_numpy(values.numpy()[mask.numpy()])  # torch's own indexing takes four times as long


def _spread(name: str, values: Tensor) -> dict[str, float]:
    """Mean, max and min of ``values`` as metrics; none if it is empty."""
    if not len(values):
        return {}
    least, most = values.aminmax()
    return {f"{name}/mean": float(values.double().mean()), f"{name}/max": float(most), f"{name}/min": float(least)}


def _means_by_group(uids: Sequence[int], values: Sequence[float]) -> list[float]:
    groups: dict[int, list[float]] = {}
    for uid, value in zip(uids, values, strict=True):
        groups.setdefault(uid, []).append(value)
    return [sum(group) / len(group) for group in groups.values()]
