"""Workers that return at once, so that the time of a step is the controller's (dispatch.py)."""

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import torch

from workers.batch import Batch
from workers.controller.group import WorkerGroup, WorkerInfo
from workers.controller.local_backend import LocalBackend
from workers.controller.resource_pool import ResourcePool
from workers.engine.base import EngineSpec, Loss, LossSpec
from workers.metric import Metric, Metrics
from workers.plan import MicroBatches
from workers.roles.rollout_role import with_texts
from workers.rollout.base import RolloutSpec, Sampling

PHASES = {"actor forward": "old_log_prob", "ref forward": "ref", "critic forward": "values", "rollout advance": "gen",
          "rollout sync_weights": "sync", "actor train_step": "update_actor", "critic train_step": "update_critic"}  # fmt: skip


class Clock:
    """Time within workers, and marks between steps.

    spent: seconds within workers by phase. marks: at each step's first call of a rollout engine, (wall seconds, CPU seconds
    outside workers, spent until then). longest: maximum tokens of a response; the mean is half of it.
    """

    longest = 127

    def __init__(self) -> None:
        self.due = True
        """Whether the next call of a rollout engine is the first of a step."""
        self.spent: Counter[str] = Counter()
        self.cpu = 0.0
        self.marks: list[tuple[float, float, Counter[str]]] = []

    def mark(self) -> None:
        self.marks.append((time.perf_counter(), time.process_time() - self.cpu, self.spent.copy()))


CLOCK = Clock()


class Role:
    """A role whose every method is ``call`` with the method's name."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, method)


class Dummy:
    """Replacement for workers/roles/worker.py's Worker."""

    def __init__(self, info: WorkerInfo, *_: Any, **__: Any) -> None:
        self.info = info
        self.losses: dict[str, Loss] = {}
        self.roles = {role: Role(partial(self._timed, role)) for role in ("actor", "ref", "critic", "rollout")}

    def build_model(self, role: str, spec: EngineSpec, loss: LossSpec | None) -> tuple[int, bool]:
        if loss is not None:
            self.losses[role] = loss.resolve()
        return self.info.rank, True

    def build_rollout(self, role: str, spec: RolloutSpec, source: str) -> tuple[int, bool]:
        self.tokenizer = spec.tokenizer
        return self.info.rank, True

    def _timed(self, role: str, method: str, *args: Any) -> Any:
        if self.info.rank == 0 and method == "sync_weights":
            CLOCK.due = True
        if self.info.rank == 0 and method == "advance" and CLOCK.due:
            CLOCK.mark()
            CLOCK.due = False
        started, used = time.perf_counter(), time.process_time()
        try:
            return methodcaller(method, role, *args)(self)
        finally:
            CLOCK.spent[PHASES[f"{role} {method}"]] += time.perf_counter() - started
            CLOCK.cpu += time.process_time() - used

    def sync_weights(self, role: str, version: int, keep_cache: bool = False) -> Metrics:
        return {}

    def advance(self, role: str, prompts: Batch, sampling: Sampling, steps: int) -> Batch:
        """Complete all responses in the first call."""
        lengths = prompts.rows["seed"] % CLOCK.longest + 1
        ids, finished = torch.randint(2, 12, (int(lengths.sum()),)), torch.zeros(len(lengths), dtype=torch.int64)
        tokens = {
            "input_ids": ids,
            "rollout_log_probs": torch.full((len(ids),), -2.0),
            "weight_version": torch.zeros_like(ids).int(),
        }
        found = Batch(lengths, tokens, {"id": prompts.rows["id"], "finished": finished})
        return found if self.tokenizer is None else with_texts(found, self.tokenizer)

    def forward(self, role: str, batch: Batch, plan: MicroBatches, outputs: list[str], adapter: bool, snapshot: bool) -> Batch:
        return Batch(batch.lengths, {name: torch.full((batch.total_tokens,), -2.0) for name in outputs})

    def train_step(self, role: str, batch: Batch, plan: MicroBatches) -> Metrics:
        loss = self.losses[role]
        _, metrics = loss({name: torch.full((batch.total_tokens,), -2.0) for name in loss.needs}, batch)
        engine_metrics = {name: Metric.sum(1.0) for name in ("loss", "grad_norm", "lr", "flops")}
        return metrics | engine_metrics | {"skipped_updates": Metric.max(0.0)}

    def start_times(self) -> tuple[float, dict[str, float]]:
        return 0.0, {}

    def close(self) -> None:
        """Nothing to release."""


class Dummies(LocalBackend):
    """Backend that starts dummies in place of all workers."""

    def start_group(self, name: str, pool: ResourcePool, worker: str | type, /, *args: Any, **kwargs: Any) -> WorkerGroup:
        return super().start_group(name, pool, "scripts.bench.dummies:Dummy", *args, **kwargs)
