"""The lifecycle that every training loop shares: restarts, resume, steps, metrics, alarms, checkpoints, stopping.

A loop owns models and data; it iterates over ``Trainer.steps`` and ends each step with ``complete`` and ``save_if_due``::

    trainer.begin()
    for step in trainer.steps():
        with trainer.phases("step"):
            trainer.metrics |= ...
        trainer.complete(step)
        trainer.save_if_due()
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configs.base.locks import locked
from configs.schema.ppo import PPOConfig
from configs.schema.supervised import SupervisedConfig
from trainer.checkpoint.manifest import MANIFEST, check_weights
from trainer.checkpoint.resume import Checkpoint, Stateful, check_config, check_in_flight
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.training_data import TrainingData
from trainer.cluster.determinism import KernelWatch
from trainer.cluster.remote import RemoteModel
from trainer.cluster.watchdog import Watchdog
from trainer.data.order import DataOrder
from trainer.report.run_report import GrowingReport, finish
from trainer.resilience.alarms import Alarm, Alarms, react
from trainer.resilience.failed_tools import FailedTools
from trainer.resilience.restart import Figures, RunLifecycle, run_with_restarts
from trainer.resilience.skipped_updates import SkippedUpdates
from trainer.run.events import Events
from trainer.run.logger import Logger
from trainer.run.run_dir import checkpoint_dir, owner_only
from trainer.run.timing import Phases
from trainer.tracking.tracker import Tracker
from workers.controller.group import WorkerGroup
from workers.controller.logs import announce

Config = PPOConfig | SupervisedConfig


def run(
    config: Config, attempt: Callable[[RunLifecycle], None], loggers: Sequence[Logger] = (), figures: Figures | None = None
) -> None:
    """Run ``attempt`` in the locked run directory, again after a failure that a restart can fix, and write the final report.

    loggers: additional to those of ``trainer.logger``. figures: computes further metrics of a complete step.
    """
    run_dir = Path(config.trainer.default_local_dir)
    with owner_only(config.trainer.private), locked(run_dir, "trainer.default_local_dir"):
        lifecycle = RunLifecycle(config.trainer, run_dir, loggers, figures)
        try:
            run_with_restarts(lifecycle, lambda: attempt(lifecycle), quiet=not config.ray_kwargs.ray_init.get("log_to_driver"))
        finally:
            # A failed run gets its report too.
            if lifecycle.started:
                finish(run_dir)


def resume_from(config: Config, lifecycle: RunLifecycle, *, in_flight: bool = False) -> Checkpoint | None:
    """The checkpoint that this attempt resumes from; prints a note for each setting that differs from the checkpoint's.

    in_flight: whether the run continues responses that are in flight. Raises ValueError if it cannot resume.
    """
    resume = lifecycle.resume()
    if resume is not None:
        changes = check_config(resume.manifest.config, asdict(config))
        # Without training nothing is lost.
        if not (isinstance(config, PPOConfig) and config.trainer.val_only):
            check_in_flight(resume, continued=in_flight, train_files=config.data.train_files)
        announce(f"resumed with another {change}" for change in changes)
    return resume


def data_order(config: Config, n: int) -> tuple[DataOrder, int]:
    """Order of the ``n`` prompts, rows or pairs of the training data, and the number of training steps of the run."""
    data, trainer = config.data, config.trainer
    # data.seed changes the order of the data alone; sampling and initialisation keep trainer.seed.
    order = DataOrder(n, data.train_batch_size, trainer.seed if data.seed is None else data.seed, data.shuffle)
    return order, trainer.total_training_steps or trainer.total_epochs * order.steps_per_epoch


class HasArrays(Protocol):
    """A component of the controller whose state has tensors, which checkpoints hold as a file of their own."""

    def arrays(self) -> dict[str, Tensor]:
        """The tensors, on the CPU."""

    def load_arrays(self, arrays: Mapping[str, Tensor]) -> None:
        """Replace the state by that of a checkpoint. Empty for a checkpoint that was saved without this component."""


@dataclass
class Health:
    """The health checks of an attempt. kernels: None unless ``trainer.deterministic``."""

    alarms: Alarms
    skipped_updates: SkippedUpdates
    kernels: KernelWatch | None
    tools: FailedTools
    events: Events

    def check(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """Evaluate all alarms on a step's metrics. Returns the alarm that requests a rollback, if any.

        Raises CheckFailed if an alarm requests a stop.
        """
        # Before the alarms: the warnings of this step are reported even if an alarm ends the run.
        if self.kernels is not None:
            self.kernels.look(step)
        self.tools.look(step, metrics)
        return react(self.alarms.evaluate(step, metrics), self.events, step)


@dataclass
class Trainer:
    """One attempt at a run: everything of a loop that does not depend on what is trained.

    save_every: steps between checkpoints, -1: never. resume: the checkpoint to continue from. models: those that are saved, by
    their name in a checkpoint. stateful: what the loop remembers between steps, by its name in a checkpoint. extra_files:
    {name: content} saved with each model after a step. arrays: components whose state has tensors, by their name in a checkpoint.
    step: the last complete step. metrics: of the step that is running.
    """

    lifecycle: RunLifecycle
    total_steps: int
    save_every: int
    resume: Checkpoint | None
    phases: Phases
    tracker: Tracker
    saver: Saver
    watchdog: Watchdog
    health: Health
    models: Mapping[str, RemoteModel]
    stateful: Mapping[str, Stateful]
    extra_files: Callable[[int], Mapping[str, bytes]]
    arrays: Mapping[str, HasArrays] = field(default_factory=dict)
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def events(self) -> Events:
        return self.health.events

    def begin(self) -> None:
        """Restore the checkpoint, if there is one."""
        if self.resume is not None:
            self.load(self.resume)

    def steps(self, prepare_stop: Callable[[int, bool], bool] = lambda step, last: True, between_stops: int = 1) -> Iterator[int]:
        """The numbers of the steps that remain; they count from 1. A step that was not completed is not counted, and after a
        rollback steps repeat. Ends early, with a checkpoint, if the run has to stop.

        prepare_stop: called before that checkpoint with the step, and whether the next step was abandoned; False: it cannot be
        written, and the run continues to a step after which it can. between_stops: steps between those after which it can, at
        most.
        """
        abandoned = False
        while self.step < self.total_steps:
            seconds = self.phases.seconds
            if self.lifecycle.stopping.is_due(self.step, seconds, self.saver.seconds(), self.events, between_stops):
                # Before the first step there is nothing to save, and a checkpoint that exists is not written again.
                if not self.step or self.saver.has(self.step):
                    return
                # A step that was abandoned would be abandoned again.
                if prepare_stop(self.step, abandoned):
                    self.save()
                    return
            self.phases.clear()
            self.watchdog.step = step = self.step + 1
            before, self.metrics = self.metrics, {}
            yield step
            if abandoned := self.step < step:  # a checkpoint of the step before has that step's metrics
                self.metrics = before
        # A run that had to stop where no checkpoint could be written may have reached its last step.
        self.lifecycle.stopping.withdraw()

    def is_due(self, step: int, every: int) -> bool:
        """Whether what happens every ``every`` steps (-1: never) happens after ``step``. The last step always counts."""
        return every > 0 and (step == self.total_steps or step % every == 0)

    def complete(self, step: int) -> Alarm | None:
        """Log the step and check its health. Returns the alarm that asks for a rollback, if any; CheckFailed is raised to stop.

        Logging precedes saving: the metrics of a checkpoint's step are always in metrics.jsonl.
        """
        self.step = step
        self.metrics |= self.health.skipped_updates.report(step) | self.saver.figures()
        memory = {name: model.take_gpu_memory() for name, model in self.models.items()}
        self.metrics |= {f"perf/gpu_memory_gb/{name}": used / 1e9 for name, used in memory.items() if used}
        if self.lifecycle.figures is not None:
            self.metrics |= self.lifecycle.figures(step, self.metrics)
        self.tracker.log(self.metrics, step)
        return self.health.check(step, self.metrics)

    def save_if_due(self) -> None:
        if self.is_due(self.step, self.save_every):
            self.save()
        self.saver.finish_pending(patient=False)
        self.tracker.log_spans(self.phases.spans, self.watchdog.take_calls(), self.step)

    def save(self) -> None:
        """Write a checkpoint of the last complete step."""
        state = {name: part.state() for name, part in self._all_stateful().items()}
        arrays = {name: part.arrays() for name, part in self.arrays.items()}
        with self.phases("save_checkpoint"):
            self.saver.save(self.step, self.models, state, self.metrics, arrays=arrays, extra_files=self.extra_files(self.step))

    def load(self, checkpoint: Checkpoint) -> None:
        """Restore models and state from ``checkpoint``, which becomes the last complete step."""
        for name, model in self.models.items():
            model.load(str(checkpoint.role(name)))
        for name, part in self._all_stateful().items():
            part.load(checkpoint.state(name))
        for name, has_arrays in self.arrays.items():
            has_arrays.load_arrays(checkpoint.arrays(name))
        self.step = self.watchdog.step = checkpoint.step

    def _all_stateful(self) -> dict[str, Stateful]:
        budgets = {f"{name}_budget": model.budget for name, model in self.models.items()}
        return {**self.stateful, "alarms": self.health.alarms, "skips": self.health.skipped_updates, **budgets}


def open_tracker(
    config: Config,
    lifecycle: RunLifecycle,
    resume: Checkpoint | None,
    groups: Mapping[str, WorkerGroup],
    watchdog: Watchdog,
    phases: Phases,
    total_steps: int,
    *,
    shown_samples: int = 0,
    rollout_dir: str | None = None,
) -> Tracker:
    """The tracker of an attempt. Opened before anything is written: it brings the run directory to the step of ``resume``.

    groups: workers of each role that ``resume`` has. Raises Damaged if its weights are.
    """
    trainer = config.trainer
    # First: a damaged checkpoint is found while the records of the run directory are not yet truncated to its step.
    if resume is not None:
        check_weights(resume, groups, watchdog)
    return Tracker(
        trainer.logger,
        lifecycle.run_dir,
        trainer.project_name,
        trainer.experiment_name,
        asdict(config),
        resume_step=resume.step if resume is not None else None,
        total_steps=total_steps,
        shown_samples=shown_samples,
        rollout_dir=Path(rollout_dir) if rollout_dir is not None else None,
        restarted=lifecycle.restarted,
        own=resume is None or is_own(resume, lifecycle.run_dir),
        more=[GrowingReport(lifecycle.run_dir), *lifecycle.loggers],
        phases=phases,
    )


def is_own(checkpoint: Checkpoint, run_dir: Path) -> bool:
    """Whether it is the checkpoint of its step in ``run_dir``, or a copy of it."""
    own = checkpoint_dir(run_dir, checkpoint.step) / MANIFEST
    return own.exists() and own.read_bytes() == (checkpoint.path / MANIFEST).read_bytes()


def build_trainer(
    config: Config,
    lifecycle: RunLifecycle,
    *,
    groups: Callable[[], Collection[WorkerGroup]],
    n_gpus: int,
    tokenizer: PreTrainedTokenizerBase,
    tracker: Tracker,
    watchdog: Watchdog,
    phases: Phases,
    alarms: Alarms,
    models: Mapping[str, RemoteModel],
    keep: Mapping[str, int | None],
    resume: Checkpoint | None,
    total_steps: int,
    save_every: int,
    stateful: Mapping[str, Stateful] | None = None,
    arrays: Mapping[str, HasArrays] | None = None,
    extra_files: Callable[[int], Mapping[str, bytes]] = lambda step: {},
) -> Trainer:
    """groups: all worker groups, each once. n_gpus: of the run. keep: checkpoints of each model that stay; None: all."""
    run_dir, events, plain = lifecycle.run_dir, Events(lifecycle.run_dir), asdict(config)
    kernels = KernelWatch(groups, events, watchdog) if config.trainer.deterministic else None
    return Trainer(
        lifecycle=lifecycle,
        total_steps=total_steps,
        save_every=save_every,
        resume=resume,
        phases=phases,
        tracker=tracker,
        saver=Saver(
            run_dir,
            events,
            config=plain,
            world_size=n_gpus,
            keep=keep,
            options=config.trainer.checkpoint,
            best_metric=config.trainer.best_metric,
            tokenizer=tokenizer,
        ),
        watchdog=watchdog,
        health=Health(alarms, SkippedUpdates(run_dir, events, plain), kernels, FailedTools(events), events),
        models=models,
        stateful={"training_data": TrainingData(config.data.train_files), **(stateful or {})},
        extra_files=extra_files,
        arrays=arrays or {},
    )
