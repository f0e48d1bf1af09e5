"""Supervised training loop (SFT, reward models, DPO); shares engines, batch plans and harness with PPO."""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema.common import steps_between
from configs.schema.supervised import SupervisedConfig
from configs.validation.rollout import world_size
from trainer.cluster.remote import RemoteModel
from trainer.data.order import DataOrder
from trainer.harness import Trainer
from trainer.supervised.tasks import Task
from workers.batch import Batch
from workers.metric import plain_numbers


@dataclass
class SupervisedLoop:
    """Supervised loop; built by supervised_builder.py, run by ``fit``. task: what distinguishes SFT, reward models and DPO."""

    config: SupervisedConfig
    trainer: Trainer
    task: Task
    order: DataOrder
    model: RemoteModel

    def fit(self) -> None:
        """Run all remaining steps."""
        trainer = self.trainer
        done = 0 if trainer.resume is None else trainer.resume.step
        self.task.prepare(self.model, self.order, range(done, trainer.total_steps))
        trainer.begin()
        for step in trainer.steps():
            # The rows of a step are a function of the step alone: no sampler state is saved or restored.
            batch = self.task.batch(self.order.batch(step - 1))
            with trainer.phases("step"):
                self.train(step, batch)
            self.measure(step, batch)
            if self.task.is_done(trainer.metrics):
                trainer.total_steps = step
            trainer.complete(step)
            trainer.save_if_due()

    def train(self, step: int, batch: Batch) -> None:
        """Run one optimizer step on a global mini-batch of T tokens and record its metrics."""
        trainer = self.trainer
        metrics = plain_numbers(self.model.train_step(batch, columns=(), rows=self.task.rows, units=self.task.unit))
        trainer.health.skipped_updates.record("model", step, batch, metrics)
        self.model.budget.tell(trainer.events, step)
        trainer.metrics |= {name if "/" in name else f"train/{name}": value for name, value in metrics.items()}
        trainer.metrics["training/epoch"] = (step - 1) // self.order.steps_per_epoch

    def measure(self, step: int, batch: Batch) -> None:
        """Validate if due; record times in seconds and throughput in tokens per second and worker."""
        trainer = self.trainer
        if trainer.is_due(step, steps_between(self.config.trainer.test_freq, self.order.steps_per_epoch)):
            with trainer.phases("testing"):
                trainer.metrics |= self.task.validate(self.model, step)
        seconds = trainer.phases.seconds
        trainer.metrics |= {f"timing_s/{phase}": spent for phase, spent in seconds.items()}
        trainer.metrics["perf/throughput"] = batch.total_tokens / (seconds["step"] * world_size(self.config.trainer))
