"""Measurements within a run of verl 0.9.1; loaded into each of its processes by

    VERL_USE_EXTERNAL_MODULES=verl_measure     # verl's own way; this folder is in PYTHONPATH

Nothing here changes what is computed. RIVAL_NOTES names a file to which processes add lines: threads and types of the workers,
and optimizer steps as they happen. Tokens of each training step are as verl's own batch has them.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import psutil
import torch
import verl.utils.profiler as profiler
from verl.workers.engine.fsdp import transformer_impl

DAEMONS = ("raylet", "gcs_server", "dashboard", "log_monitor", "runtime_env_agent")


def note(**facts: Any) -> None:
    """Append a line to RIVAL_NOTES."""
    with open(os.environ["RIVAL_NOTES"], "a") as file:
        file.write(json.dumps(facts | {"time": time.time()}) + "\n")


def cpu_seconds() -> float:
    """CPU seconds of the driver and all its processes, vLLM's included, without Ray's daemons."""
    total = 0.0
    driver = psutil.Process(int(os.environ["RIVAL_DRIVER"]))
    for process in (driver, *driver.children(recursive=True)):
        try:
            if not any(daemon in " ".join(process.cmdline()[:4]) for daemon in DAEMONS):
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return total


plain_timer = profiler.marked_timer


@contextmanager
def timer_with_cpu(name: str, timing_raw: dict[str, float], **options: Any) -> Iterator[None]:
    """verl's timer of a phase, which also records the CPU seconds of all processes."""
    before = cpu_seconds()
    with plain_timer(name, timing_raw, **options):
        yield
    timing_raw[f"{name}_cpu"] = timing_raw.get(f"{name}_cpu", 0.0) + cpu_seconds() - before


profiler.marked_timer = timer_with_cpu
import verl.utils.debug as debug  # noqa: E402

debug.marked_timer = timer_with_cpu

import verl.utils.tokenizer.continuous_token_wiring as wiring  # noqa: E402

# Between turns verl inserts the end-of-turn token of Qwen's template, which this vocabulary lacks. There is one turn here.
del wiring._MODEL_TYPE_TO_FAMILY["qwen2"]

import verl.trainer.ppo.metric_utils as metric_utils  # noqa: E402

plain_data_metrics = metric_utils.compute_data_metrics


@wraps(plain_data_metrics)
def data_metrics(batch: Any, **options: Any) -> dict[str, Any]:
    """verl's metrics, with the tokens of the step's batch (without padding), and its end in wall and CPU seconds."""
    found = {f"bench/{part}_tokens": int(batch.batch[f"{part}_length"].sum()) for part in ("prompt", "response")}
    found |= {"bench/ended": time.time(), "bench/cpu": cpu_seconds()}
    return plain_data_metrics(batch=batch, **options) | found


metric_utils.compute_data_metrics = data_metrics

plain_optimizer_step = transformer_impl.FSDPEngine.optimizer_step


@wraps(plain_optimizer_step)
def optimizer_step(self: transformer_impl.FSDPEngine) -> float:
    dtypes = {str(parameter.dtype) for parameter in self.module.parameters()} | {str(self._autocast_dtype)}
    note(kind="update", threads=torch.get_num_threads(), dtypes=sorted(dtypes))
    return plain_optimizer_step(self)


transformer_impl.FSDPEngine.optimizer_step = optimizer_step
