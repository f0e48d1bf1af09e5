"""Back to the last checkpoint from before a run fell ill, and on from there with other data and other draws."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from trainer.checkpoint.manifest import check_weights
from trainer.checkpoint.resume import find_up_to
from trainer.cli.program import Found
from trainer.resilience.alarms import Alarm
from workers.seeding import seed_of

if TYPE_CHECKING:
    from trainer.ppo.loop import Loop


@dataclass(slots=True)
class Rollbacks:
    """How often the run has gone back. Enters the seeds of what training draws; 0 leaves them as they are."""

    count: int = 0

    def purpose(self, purpose: str) -> str:
        """Of draws for training."""
        return f"{purpose}, rollback {self.count}" if self.count else purpose

    def seed(self, seed: int) -> int:
        return seed_of(seed, "rollback", self.count) if self.count else seed

    def metrics(self) -> dict[str, float]:
        """Flags the steps of a run that has gone back."""
        return {"training/rollbacks": float(self.count)} if self.count else {}

    def state(self) -> dict[str, int]:
        return {"count": self.count}

    def load(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def roll_back(loop: Loop, alarm: Alarm) -> None:
    """In place, with the workers that are there. What the streams of prompts and texts have drawn stays drawn.

    A run that is killed before its next checkpoint resumes from the one gone back to, without a memory of this: it takes
    the same steps to the same alarm, and goes back again, to the same bits. Raises Found where it cannot go back.
    """
    most = loop.config.alarms.max_rollbacks
    if loop.rollbacks.count >= most:
        raise Found(f"stopped at step {loop.step}: an alarm asks for a rollback, alarms.max_rollbacks={most}: {alarm.text}")
    loop.saver.settle()
    groups = {role: model.group for role, model in loop.models().items()}
    check = partial(check_weights, groups=groups, watchdog=loop.watchdog)
    checkpoint = find_up_to(loop.run_dir, alarm.healthy_until, check)
    if checkpoint is None:
        raise Found(
            f"stopped at step {loop.step}: an alarm asks for a rollback, and there is no checkpoint of step "
            f"{max(alarm.healthy_until, 0)} or before (trainer.save_freq, trainer.max_actor_ckpt_to_keep): {alarm.text}"
        )
    left, count = loop.step, loop.rollbacks.count + 1
    drawn = [(stream, stream.drawn) for stream in (loop.prompts, loop.ptx) if stream is not None]
    loop.load(checkpoint)
    loop.rollbacks.count = count
    for stream, rounds in drawn:
        stream.drawn = rounds
    aside = loop.tracker.go_back(checkpoint.step)
    loop.events.add(
        left,
        "rollback",
        f"{count} of at most {most}: back to the checkpoint of step {checkpoint.step}, the last from before the alarm's steps "
        f"({alarm.healthy_until + 1} to {left}); on with other data and draws. What came after it is in {aside.name}/",
    )
    loop.sync_weights(checkpoint.step)
