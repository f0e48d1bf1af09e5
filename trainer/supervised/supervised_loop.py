"""The supervised loop, on the engine, the plan and the logs that PPO uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from configs.schema.common import Frequency, is_ever
from configs.schema.supervised import SupervisedConfig
from configs.validation.programs import world_size
from trainer.checkpoint.resume import Checkpoint, Stateful
from trainer.checkpoint.saver import Saver
from trainer.cluster.determinism import KernelWatch
from trainer.cluster.remote import RemoteModel
from trainer.cluster.watchdog import Watchdog
from trainer.data.order import DataOrder
from trainer.resilience.alarms import Alarms, react
from trainer.resilience.skipped_updates import Skips
from trainer.resilience.stopping import Stopping
from trainer.run.events import Events
from trainer.run.timing import Phases
from trainer.supervised.task import Task
from trainer.tracking.tracker import Tracker
from workers.batch import Batch
from workers.metric import plain_numbers


@dataclass
class SupervisedLoop:
    """Built by supervised_builder.py; ``fit`` runs it."""

    config: SupervisedConfig
    run_dir: Path
    task: Task
    order: DataOrder
    model: RemoteModel
    tracker: Tracker
    saver: Saver
    watchdog: Watchdog
    events: Events
    stopping: Stopping
    alarms: Alarms
    skips: Skips
    phases: Phases
    kernels: KernelWatch | None
    resume: Checkpoint | None
    total_steps: int
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def fit(self) -> None:
        if self.resume is not None:
            self.load(self.resume)
        for step, batch in self.remaining_steps():
            with self.phases("step"):
                told = self.model.train_step(batch, columns=(), rows=self.task.rows, together=self.task.together)
                metrics = plain_numbers(told)
                self.skips.see("model", step, batch, metrics)
            self.after(step, batch, metrics)

    def remaining_steps(self) -> Iterator[tuple[int, Batch]]:
        """Steps count from 1; which rows a step sees is a function of the step alone. A run that has to stop is saved before."""
        for step in range(self.step + 1, self.total_steps + 1):
            if self.stopping.is_due(self.step, self.phases.seconds, self.saver.seconds(), self.events):
                if self.step and not self.saver.has(self.step):
                    self.save(self.step)
                return
            self.phases.clear()
            self.watchdog.step = step
            yield step, self.task.batch(self.order.batch(step - 1))

    def after(self, step: int, batch: Batch, metrics: dict[str, float]) -> None:
        """Validate, log, and save: a checkpoint's step is always in the log already. A sick run stops here."""
        config, self.step = self.config.trainer, step
        self.model.budget.tell(self.events, step)
        values = {name if "/" in name else f"train/{name}": value for name, value in metrics.items()} | self.skips.tell(step)
        values["training/epoch"] = (step - 1) // self.order.steps_per_epoch
        if self.is_due(config.test_freq, step):
            with self.phases("testing"):
                values |= self.task.validate(self.model, step)
        seconds = self.phases.seconds
        values |= {f"timing_s/{phase}": spent for phase, spent in seconds.items()}
        values["perf/throughput"] = batch.total_tokens / (seconds["step"] * world_size(config))
        if self.kernels is not None:
            self.kernels.look(step)
        values |= self.saver.figures()
        self.tracker.log(values, step)
        self.metrics = values
        react(self.alarms.see(step, values), self.events, step)
        if self.is_due(config.save_freq, step):
            self.save(step)
        self.saver.settle(patient=False)
        self.tracker.log_spans(self.phases.spans, self.watchdog.take_calls(), step)

    def is_due(self, frequency: Frequency, step: int) -> bool:
        """After this step; what is done at times is done after the last, too."""
        every = self.order.steps_per_epoch if isinstance(frequency, str) else frequency
        return is_ever(frequency) and (step == self.total_steps or step % every == 0)

    def save(self, step: int) -> None:
        state = {name: part.state() for name, part in self.stateful().items()}
        with self.phases("save_checkpoint"):
            beside = self.task.beside(self.model, step)
            self.saver.save(step, {"model": self.model}, state, self.metrics, beside=beside)

    def stateful(self) -> dict[str, Stateful]:
        """What the controller remembers from step to step."""
        return {"model_budget": self.model.budget, "alarms": self.alarms, "skips": self.skips}

    def load(self, checkpoint: Checkpoint) -> None:
        self.model.load(str(checkpoint.role("model")))
        for name, part in self.stateful().items():
            part.load(checkpoint.state(name))
        self.step = checkpoint.step
