"""Model role (actor, critic, reference, reward model): a training engine with a head. Independent of the kind of engine."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future, wait
from contextlib import nullcontext

import torch

from workers.batch import Batch
from workers.engine.base import LossSpec, Saved, TrainEngine
from workers.engine.offload import WeightSnapshot
from workers.metric import Metric, Metrics
from workers.plan import MicroBatches
from workers.prefixes import repeated
from workers.roles.memory_scheduler import MemoryScheduler
from workers.rollout.sync.channel import Sender


class ModelRole:
    """One rank's part of a model role. The controller calls its methods by ``rpc.role_call``."""

    def __init__(self, name: str, engine: TrainEngine, loss: LossSpec | None, memory_scheduler: MemoryScheduler) -> None:
        """loss: minimised by train_step; None for a role that is never trained."""
        self.name = name
        self.engine = engine
        self.loss = loss.resolve() if loss is not None else None
        self.memory_scheduler = memory_scheduler
        self.saving: Future[Saved] | None = None
        self.sender: Sender | None = None
        self.snapshot = WeightSnapshot(engine)

    def forward(
        self, batch: Batch, plan: MicroBatches, outputs: list[str], adapter: bool, snapshot: bool = False
    ) -> Batch | None:
        """Columns ``outputs`` of this rank's rows, without gradient; see TrainEngine.forward. snapshot: see take_snapshot."""
        self.memory_scheduler.enter("forward", self.name)
        with self.snapshot.swapped_in() if snapshot else nullcontext():
            return self.engine.forward(batch, plan, set(outputs), adapter=adapter)

    def take_snapshot(self) -> None:
        """Copy this rank's part of the trained weights to the host, for ``forward``; the copy replaces an earlier one."""
        with self.memory_scheduler.parameters_on_device(self.name):
            self.snapshot.take()

    def train_step(self, batch: Batch, plan: MicroBatches) -> Metrics:
        """One optimizer step on this rank's rows of a mini-batch; see TrainEngine.train_step. Adds the metrics flops and,
        on GPUs, gpu_memory: bytes in use on this rank's GPU, by the driver's count.
        """
        assert self.loss is not None, f"role {self.name} has no loss: it is not trained"
        self.memory_scheduler.enter("train", self.name)
        metrics, chains = dict(self.engine.train_step(batch, plan, self.loss)), self.engine.chains(batch)
        # Rows that share a prefix compute it once: subtract its repetitions.
        spared = [] if chains is None else [length for rows in plan for length in repeated(rows, chains)]
        flops = (self.engine.flops(lengths, backward=True) for lengths in (batch.lengths.tolist(), spared))
        metrics["flops"] = Metric.sum(next(flops) - next(flops))
        if self.memory_scheduler.device == "cuda":
            # The peak of the update: torch's cache keeps what it has freed.
            free, total = torch.cuda.mem_get_info()
            metrics["gpu_memory"] = Metric.max(total - free)
        return metrics

    def send_weights(self, replicas: Collection[int] | None = None) -> None:
        """Send the weights to rollout engines in other processes, which run sync_weights meanwhile. Collective.

        replicas: numbers of the engines' channels, see Worker.offer_weights; None: all.
        """
        assert self.sender is not None, f"role {self.name}: no engine gets its weights"
        self.memory_scheduler.enter("sync", self.name)
        self.sender.serve(replicas)

    def save(self, path: str, background: bool) -> None:
        """Start to save, see TrainEngine.save. ``saved`` returns the outcome."""
        assert self.saving is None or self.saving.done(), f"{self.name}: the last save is still under way"
        with self.memory_scheduler.parameters_on_device(self.name):
            self.saving = self.engine.save(path, background=background)

    def saved(self, patient: bool) -> Saved | str | None:
        """What this rank wrote in the last save, or why it failed; None while it is writing. patient: wait until it has ended."""
        assert self.saving is not None, f"{self.name}: nothing was saved"
        if patient:
            wait([self.saving])
        if not self.saving.done():
            return None
        try:
            return self.saving.result()
        # Returned, not raised: a full disk costs a checkpoint, but an exception of a rank ends the run.
        except OSError as error:
            return str(error)

    def load(self, path: str) -> None:
        """Load a checkpoint. The rollout engine's weights are stale after it: it sleeps until the next sync."""
        # This phase brings the optimizer state to the device, and lets the rollout engine sleep.
        self.memory_scheduler.enter("train", self.name)
        self.engine.load(path)

    def export_hf(self, path: str) -> None:
        # After a save, offloaded parameters are on the host.
        with self.memory_scheduler.parameters_on_device(self.name):
            self.engine.export_hf(path)
