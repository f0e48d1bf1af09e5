"""Restart a run that lost a worker, an engine or a node: tear everything down, start again, resume from the last checkpoint.

A worker that dies may leave the others waiting in a collective, so a single one is not replaced, except in a pool of rollout
replicas, which have no collective in common. The whole attempt is ended instead (workers, Ray, reward processes), and the same
process starts the next one. ``RunLifecycle`` holds what must outlive an attempt, and decides after a failure whether another one
makes sense:

- Errors that the user has to fix, and errors of the controller itself, end the run.
- ``trainer.max_restarts`` limits the number of restarts, MAX_RESTARTS_WITHOUT_PROGRESS those in a row without progress. The
  replacement of a rollout replica counts as a restart.
- A restart with halved micro-batches after memory ran out is not counted if it repeats few steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal

from configs.schema.common import RunConfig, is_repeated
from configs.sweeps.sweep_points import Status
from trainer.checkpoint.manifest import Damaged
from trainer.checkpoint.resume import Checkpoint, resolve_resume
from trainer.cluster.oom_backoff import Budget
from trainer.resilience.stopping import Stopping
from trainer.run.errors import Stopped
from trainer.run.events import Events
from trainer.run.logger import Logger
from trainer.run.run_dir import CONTROLLER_LOG, LATEST, checkpoint_steps, resume_hint, write_atomic
from trainer.run.run_status import write_outcome
from workers.controller.group import PhaseTimeout, WorkerError
from workers.controller.logs import chatter_to, tell
from workers.controller.stop import graceful_stop

MAX_RESTARTS_WITHOUT_PROGRESS = 2
"""Maximum number of consecutive restarts that complete no new step; of replacements too."""
MAX_REPEATED_STEPS = 2
"""Maximum number of steps that an uncounted restart after out-of-memory may repeat if trainer.save_freq does not allow more."""
Figures = Callable[[int, Mapping[str, float]], dict[str, float]]
"""(step, its metrics) -> further metrics of the step."""
USER_ERRORS = ("ValueError", "ConfigError", "FileNotFoundError")
"""Exceptions of a worker that the user has to fix: another attempt would raise them again."""


class RunLifecycle:
    """State of a run that outlives its attempts.

    started: the run directory belongs to this run. restarted: this is not the first attempt. loggers: in addition to those of
    trainer.logger. figures: see harness.run.
    """

    def __init__(
        self,
        trainer: RunConfig,
        run_dir: Path,
        loggers: Sequence[Logger] = (),
        figures: Figures | None = None,
    ) -> None:
        self.trainer = trainer
        self.run_dir = run_dir
        self.loggers = loggers
        self.figures = figures
        self.stopping = Stopping(trainer, run_dir)
        self.started = False
        self.restarted = False
        self._budgets: dict[str, Budget] = {}
        self._restarts = 0
        self._without_progress: dict[str, tuple[int, int]] = {}
        """By kind: the furthest step at the last restart or replacement, and how many before it had the same."""
        self._resume: Checkpoint | None = None
        self._taken: Checkpoint | None = None  # the checkpoint of the current attempt

    def budget(self, role: str) -> Budget:
        """Micro-batch budget of ``role``. It outlives attempts: a restarted run must not run out of the same memory again."""
        return self._budgets.setdefault(role, Budget(role))

    def resume(self) -> Checkpoint | None:
        """The checkpoint from which the next attempt resumes, None for the beginning.

        A restarted run resumes from its own last checkpoint, whatever ``trainer.resume_mode`` says about earlier ones. Without a
        checkpoint of its own it starts again where the first attempt did.
        """
        found = self._resume if self.restarted else self._requested_checkpoint()
        if found is not None:
            tell(f"note: resumes from {found.path}")
        self._taken = found
        return found

    def handle_damage(self, damage: Damaged) -> None:
        """Select the previous checkpoint after an attempt whose workers found the weights of its checkpoint damaged.

        Raises ValueError if the user named the checkpoint, or if there is no other.
        """
        taken = self._taken
        assert taken is not None, "only a checkpoint is damaged"
        if not self.restarted and self.trainer.resume_mode == "resume_path":
            raise ValueError(f"trainer.resume_from_path: {damage}; take another one") from damage
        before = [step for step in checkpoint_steps(self.run_dir) if step < taken.step]
        if not before:
            raise ValueError(
                f"no checkpoint up to step {taken.step} is whole: {damage}. trainer.resume_mode=disable starts anew"
            ) from damage
        Events(self.run_dir).add(taken.step, "damaged checkpoint", f"{damage}; the one before it is taken")
        # find_latest starts at this step, so the damaged checkpoint is not tried again.
        write_atomic(self.run_dir / LATEST, str(before[-1]))
        if self.restarted:
            self._resume = self._newest_checkpoint()

    def handle_failure(self, error: Exception) -> None:
        """Prepare the next attempt after a failure. Raises ``error`` if there is none, Stopped if the run was to stop anyway.

        If memory ran out among several ranks, the next attempt has a smaller budget and is not counted. If it would repeat more
        than MAX_REPEATED_STEPS steps, and more than trainer.save_freq puts at risk, it counts towards trainer.max_restarts; if
        that is 0, ValueError says what to do.
        """
        # First: after a signal there is no restart, the run ends at its last checkpoint.
        self.stopping.check(after_failure=True)
        cause, events = str(error).partition("\n")[0], Events(self.run_dir)
        step = max(self.stopping.furthest, 0)
        if isinstance(error, WorkerError) and error.kind == "OutOfMemory":
            # The role that ran out of memory has halved its budget (RemoteModel.train_step); it is only reported here.
            for budget in self._budgets.values():
                budget.tell(events, step)
            found = self._newest_checkpoint()
            lost = step - (found.step if found is not None else 0)
            if lost <= MAX_REPEATED_STEPS or (
                is_repeated(self.trainer.save_freq) and (found is not None or self._fits_before_first_save(lost))
            ):
                self._schedule_restart(events, step, f"in smaller micro-batches: {cause}", found)
                return
            if self.trainer.max_restarts == 0:
                raise self._out_of_memory(events, step, lost, cause) from error
        if self.trainer.max_restarts == 0 or (isinstance(error, WorkerError) and error.kind in USER_ERRORS):
            raise error
        if (limit := self._count("restart")) is not None:
            events.add(step, "gave up", f"after {self._restarts} restarts ({limit}): {cause}")
            raise error
        self._schedule_restart(
            events, step, f"{self._restarts} of {self.trainer.max_restarts}: {cause}", self._newest_checkpoint()
        )

    @contextmanager
    def replacement(self, what: str, death: WorkerError) -> Iterator[None]:
        """Count the replacement of workers within the block as a restart, and record it. what: replica and role.

        Raises ``death`` if a limit of restarts is reached, for ``handle_failure``; Stopped if the run was to stop anyway.
        """
        self.stopping.check(after_failure=True)
        if self._count("replacement") is not None:
            raise death
        yield
        cause = str(death).partition("\n")[0]
        text = f"{what} was replaced, {self._restarts} of {self.trainer.max_restarts}: {cause}"
        Events(self.run_dir).add(max(self.stopping.furthest, 0), "replaced", text)

    def _count(self, kind: Literal["restart", "replacement"]) -> str | None:
        """Count a restart or a replacement, unless a limit is reached: returns this limit."""
        # Progress is a step beyond all steps of earlier attempts; repeating lost steps is none. Each kind has its own count: a
        # restart may help where replacements do not, such as after several deaths in one step.
        reached, repeats = self._without_progress.get(kind, (None, 0))
        repeats = repeats + 1 if reached == self.stopping.furthest else 0
        if repeats == MAX_RESTARTS_WITHOUT_PROGRESS:
            return "it got no further"
        if self._restarts == self.trainer.max_restarts:
            return f"trainer.max_restarts={self.trainer.max_restarts}"
        self._restarts += 1
        self._without_progress[kind] = self.stopping.furthest, repeats
        return None

    @contextmanager
    def record_status(self) -> Iterator[None]:
        """Write the outcome of the run within the block to the run directory. A killed run leaves no record."""
        began = time.perf_counter()
        status: Status = "interrupted"  # stays for SystemExit and KeyboardInterrupt, by which signals end the run
        try:
            yield
            status = "finished"
        except Exception as error:
            status = "interrupted" if isinstance(error, Stopped) else "failed"
            raise
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(resume_hint(self.run_dir)) from interrupt
        finally:
            if self.started:
                write_outcome(self.run_dir, status, time.perf_counter() - began)

    def _requested_checkpoint(self) -> Checkpoint | None:
        trainer = self.trainer
        remote_dir = trainer.checkpoint.remote_dir
        return resolve_resume(trainer.resume_mode, trainer.resume_from_path, self.run_dir, remote_dir, weights=False)

    def _newest_checkpoint(self) -> Checkpoint | None:
        """The checkpoint from which a restart resumes: the run's own, else the one that the first attempt resumed from."""
        own = resolve_resume("auto", None, self.run_dir, None, weights=False) if self.started else None
        return own or self._requested_checkpoint()

    def _fits_before_first_save(self, lost: int) -> bool:
        """Whether the steps to repeat are no more than the interval of trainer.save_freq (a number of steps, or an epoch)."""
        freq = self.trainer.save_freq
        return not isinstance(freq, int) or lost <= freq

    def _out_of_memory(self, events: Events, step: int, lost: int, cause: str) -> ValueError:
        """The error with advice if a restart would repeat ``lost`` steps and nothing allows that."""
        why = f"memory ran out in step {step + 1}, and a restart in halved micro-batches would repeat {lost} steps: {cause}"
        events.add(step, "gave up", why)
        keys = ", ".join(budget.key for budget in self._budgets.values() if budget.most is not None) or "the micro-batch size"
        return ValueError(
            f"{why}. Halve {keys} (the gradient is the same), set trainer.save_freq (it is {self.trainer.save_freq}), and start "
            f"again: {resume_hint(self.run_dir)}. trainer.max_restarts=1 would allow the restart"
        )

    def _schedule_restart(self, events: Events, step: int, text: str, found: Checkpoint | None) -> None:
        self._resume = found
        self.restarted = True
        where = f"step {self._resume.step}" if self._resume is not None else "the beginning"
        events.add(step, "restart", f"{text}; it resumes from {where}")


def run_with_restarts(lifecycle: RunLifecycle, attempt: Callable[[], None], *, quiet: bool = False) -> None:
    """Run attempts until one succeeds or another makes no sense. Each attempt has released everything before the next starts.

    quiet: redirect the output of libraries on the controller to a file. Signals unwind the stack meanwhile. Raises what the
    last attempt raised, or Stopped.
    """
    quietly = chatter_to(lifecycle.run_dir / CONTROLLER_LOG) if quiet else nullcontext()
    # record_status() is outermost: graceful_stop turns signals into the exceptions from which it derives the outcome.
    with lifecycle.record_status(), graceful_stop(), quietly:
        while True:
            try:
                return attempt()
            except Damaged as damage:  # not an error of a worker: the next clause would raise it again
                lifecycle.handle_damage(damage)
            except Exception as error:
                if not (isinstance(error, WorkerError | PhaseTimeout) or is_ray_error(error)):
                    raise
                lifecycle.handle_failure(error)


def is_ray_error(error: Exception) -> bool:
    """Whether Ray itself raised the error on the controller, as it does when a node with its object store or scheduler is lost.

    Judged by the module of its class: only the Ray backend may import Ray (tests/layout/test_imports.py).
    """
    return type(error).__module__.partition(".")[0] == "ray"
