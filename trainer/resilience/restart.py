"""A run that loses a worker, an engine or a node is torn down, started again, and goes on from its last checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from configs.schema.common import RunConfig, is_ever
from configs.sweeps.sweep_points import Status
from trainer.checkpoint.manifest import Damaged
from trainer.checkpoint.resume import Checkpoint, resolve_resume
from trainer.cluster.oom_backoff import Budget
from trainer.resilience.stopping import Stopping
from trainer.run.errors import Stopped
from trainer.run.events import Events
from trainer.run.logger import Logger
from trainer.run.run_dir import CONTROLLER_LOG, LATEST, checkpoint_steps, goes_on, write_atomic
from trainer.run.run_status import write_outcome
from workers.controller.group import PhaseTimeout, WorkerError
from workers.controller.logs import chatter_to, tell
from workers.controller.stop import graceful_stop

MOST_IN_VAIN = 2
"""Restarts, one after the other, that may get no further than what went before them."""
LOST_AT_MOST = 2
"""Steps that a restart for want of memory may repeat where nothing says how many the user would."""
MENDED_BY_USER = ("ValueError", "FileNotFoundError")


class Lifetime:
    """What outlives an attempt at a run. started: the run directory is this run's. restarted: this is not the first attempt.
    loggers: beside those of trainer.logger."""

    def __init__(self, trainer: RunConfig, run_dir: Path, loggers: Sequence[Logger] = ()) -> None:
        self.trainer = trainer
        self.run_dir = run_dir
        self.loggers = loggers
        self.stopping = Stopping(trainer, run_dir)
        self.started = False
        self.restarted = False
        self._budgets: dict[str, Budget] = {}
        self._restarts = 0
        self._in_vain = 0
        self._reached: int | None = None  # the furthest step when it last fell
        self._resume: Checkpoint | None = None
        self._taken: Checkpoint | None = None  # by the attempt that is under way

    def budget(self, role: str) -> Budget:
        return self._budgets.setdefault(role, Budget(role))

    def resume(self) -> Checkpoint | None:
        """What the next attempt goes on from. A run that has begun goes on from its own last checkpoint, whatever the mode says
        of those that were there before; without one, from where it began."""
        found = self._resume if self.restarted else self._asked_for()
        if found is not None:
            tell(f"note: goes on from {found.path}")
        self._taken = found
        return found

    def damaged(self, damage: Damaged) -> None:
        """After an attempt whose workers found the weights of its checkpoint damaged: the next one takes the one before it.

        Raises ValueError if the user named the checkpoint, or there is no other.
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
        write_atomic(self.run_dir / LATEST, str(before[-1]))
        if self.restarted:
            self._resume = self._found()

    def fell(self, error: Exception) -> None:
        """After an attempt. Raises the error if that is the end, and Stopped if the run was to stop anyway.

        When memory ran out among several ranks, the next attempt has a smaller budget: such a restart counts as none. Where it
        would lose more than LOST_AT_MOST steps, and more than trainer.save_freq puts at risk, it is one of trainer.max_restarts,
        and ValueError says what to do if there are none.
        """
        self.stopping.check(fell=True)
        cause, events = str(error).partition("\n")[0], Events(self.run_dir)
        step = max(self.stopping.furthest, 0)
        if isinstance(error, WorkerError) and error.kind == "OutOfMemory":
            for budget in self._budgets.values():
                budget.tell(events, step)
            found = self._found()
            lost = step - (found.step if found is not None else 0)
            if lost <= LOST_AT_MOST or (
                is_ever(self.trainer.save_freq) and (found is not None or self._before_the_first_save(lost))
            ):
                self._go_on(events, step, f"in smaller micro-batches: {cause}", found)
                return
            if self.trainer.max_restarts == 0:
                raise self._out_of_memory(events, step, lost, cause) from error
        if self.trainer.max_restarts == 0 or (isinstance(error, WorkerError) and error.kind in MENDED_BY_USER):
            raise error
        self._in_vain = self._in_vain + 1 if self._reached == self.stopping.furthest else 0
        self._reached = self.stopping.furthest
        if self._restarts == self.trainer.max_restarts or self._in_vain == MOST_IN_VAIN:
            why = "it got no further" if self._in_vain == MOST_IN_VAIN else f"trainer.max_restarts={self.trainer.max_restarts}"
            events.add(step, "gave up", f"after {self._restarts} restarts ({why}): {cause}")
            raise error
        self._restarts += 1
        self._go_on(events, step, f"{self._restarts} of {self.trainer.max_restarts}: {cause}", self._found())

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Within is the run; how it ended is written to the run directory. One that is killed leaves no record."""
        began = time.perf_counter()
        status: Status = "interrupted"
        try:
            yield
            status = "finished"
        except Exception as error:
            status = "interrupted" if isinstance(error, Stopped) else "failed"
            raise
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(goes_on(self.run_dir)) from interrupt
        finally:
            if self.started:
                write_outcome(self.run_dir, status, time.perf_counter() - began)

    def _asked_for(self) -> Checkpoint | None:
        trainer = self.trainer
        remote_dir = trainer.checkpoint.remote_dir
        return resolve_resume(trainer.resume_mode, trainer.resume_from_path, self.run_dir, remote_dir, weights=False)

    def _found(self) -> Checkpoint | None:
        """The checkpoint that a restart resumes from."""
        own = resolve_resume("auto", None, self.run_dir, None, weights=False) if self.started else None
        return own or self._asked_for()

    def _before_the_first_save(self, lost: int) -> bool:
        """The steps to be repeated are no more than trainer.save_freq, or an epoch, puts at risk."""
        freq = self.trainer.save_freq
        return not isinstance(freq, int) or lost <= freq

    def _out_of_memory(self, events: Events, step: int, lost: int, cause: str) -> ValueError:
        """What to do where a restart would repeat ``lost`` steps and nothing allows it."""
        why = f"memory ran out in step {step + 1}, and a restart in halved micro-batches would repeat {lost} steps: {cause}"
        events.add(step, "gave up", why)
        keys = ", ".join(budget.key for budget in self._budgets.values() if budget.most is not None) or "the micro-batch size"
        return ValueError(
            f"{why}. Halve {keys} (the gradient is the same), set trainer.save_freq (it is {self.trainer.save_freq}), and start "
            f"again: {goes_on(self.run_dir)}. trainer.max_restarts=1 would allow the restart"
        )

    def _go_on(self, events: Events, step: int, text: str, found: Checkpoint | None) -> None:
        self._resume = found
        self.restarted = True
        where = f"step {self._resume.step}" if self._resume is not None else "the beginning"
        events.add(step, "restart", f"{text}; it goes on from {where}")


def keep_going(life: Lifetime, attempt: Callable[[], None], *, hushed: bool = False) -> None:
    """Attempts, each after everything of the one before is gone, until one ends or there is no sense in another.

    hushed: what libraries write on the controller goes to a file. Within, signals unwind the stack. Raises what the last attempt
    raised, or Stopped.
    """
    quietly = chatter_to(life.run_dir / CONTROLLER_LOG) if hushed else nullcontext()
    with life.recorded(), graceful_stop(), quietly:
        while True:
            try:
                return attempt()
            except Damaged as damage:
                life.damaged(damage)
            except Exception as error:
                if not (isinstance(error, WorkerError | PhaseTimeout) or is_rays_own(error)):
                    raise
                life.fell(error)


def is_rays_own(error: Exception) -> bool:
    """Raised by Ray on the controller: a node is gone, and with it the store or the scheduler. Only its backend imports it."""
    return type(error).__module__.partition(".")[0] == "ray"
