"""Generation ahead: the next step's batch is generated while the present one is trained on, on GPUs of its own.

Problem: in a synchronous step the trainer waits for the engines and then the engines for the trainer. Idea: with pools of their
own both work at the same time, and meet once per step, where the engines get new weights. What a step trains on was sampled by
the weights of the step before the last, so its tokens are one version old at least; algorithm.rollout_correction corrects for it.

With the logical clock nothing depends on which side is faster: the batch is complete and the update has ended before the weights
are synced, and generation begins directly after a sync. A run that is repeated or resumed therefore has the same numbers. With
the wall clock no side waits before the update has ended: the engines continue with further groups when the batch is complete, and
what the batch lacks when the update ends is generated with the new weights.

The trainers cannot send weights during an update. If a replica dies then, the others continue; its unfinished responses return to
what the buffer has of them, and are generated after the sync, which replaces the replica.

Requests may stay in the engines between two steps, also while their weights change (``SyncSchedule``). A checkpoint holds no
engine's state: before it, and before a validation, all requests are taken from the engines, in an uninterrupted run too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from trainer.agents.sessions.session_flow import Flow
from trainer.data.dataset import PromptStream
from trainer.rollout.buffer import GroupBuffer, PendingGroup
from trainer.rollout.partial import PartialRollouts, TokenCounts
from trainer.rollout.sampler import Overlap, Sampler
from trainer.run.timing import Phases
from workers.batch import Batch

ABANDON_SECONDS = 20.0
"""Limit for the generation to return after the step has failed; its workers end with the run."""


@dataclass(frozen=True, slots=True)
class SyncSchedule:
    """Steps after which the engines get the trainer's weights, and what happens to unfinished responses there.

    Everything depends on step numbers alone, so that a resumed run has the syncs of the uninterrupted one.

    every: steps between syncs, at most. save_every, test_every: steps between checkpoints and validations, which need the present
    weights; -1: none. pause, keeps_cache: see async_training.pause and kv_cache.
    """

    every: int = 1
    save_every: int = -1
    test_every: int = -1
    pause: Literal["abort", "keep", "finish"] = "abort"
    keeps_cache: bool = False

    def syncs(self, step: int) -> bool:
        """Whether weights are synced after ``step``."""
        return step % self.every == 0 or self.needs_empty_engines(step)

    def needs_empty_engines(self, step: int) -> bool:
        """Whether a checkpoint or a validation follows ``step``."""
        return any(every > 0 and step % every == 0 for every in (self.save_every, self.test_every))

    def at_end(self, step: int) -> Literal["abort", "keep", "finish"]:
        """What happens to unfinished responses at the end of ``step``: see async_training.pause."""
        if not self.syncs(step):
            return "keep"
        return "abort" if self.pause == "keep" and self.needs_empty_engines(step) else self.pause


class RolloutsAhead(PartialRollouts):
    """Batches that were generated during the step before; the first of a run is generated when it is asked for.

    With the smallest ``max_staleness``, that of the schedule's ``every``, every group is admitted and completed for one step.
    Above it long responses continue with newer weights, as in partial rollouts.
    """

    def __init__(
        self,
        buffer: GroupBuffer,
        *,
        groups: int,
        oversubmit: float,
        max_staleness: int,
        schedule: SyncSchedule,
        clock: Literal["logical", "wall"] = "logical",
    ) -> None:
        """max_staleness: versions between the weights before an update and those that sampled any token of it, at most.

        clock: "logical": what is generated ahead is the batch; "wall": until the update has ended, within the bound.
        """
        # The batch of step s is generated in step s - 1 with weights of step s - 1 - every or later: its new groups have a
        # staleness of ``every`` at most, and one more for each step that they wait.
        super().__init__(buffer, groups=groups, oversubmit=oversubmit, max_age=max_staleness - schedule.every)
        self.schedule = schedule
        self.in_step = clock == "logical"
        self._counts = TokenCounts()
        """Of the step."""
        self._kept: Flow | None = None
        self._ended: float | None = None
        """When the last batch and the update of the same step had ended (perf_counter)."""

    @property
    def keeps_requests(self) -> bool:
        """Whether the engines have requests between two generations."""
        return self._kept is not None

    def generate_ahead(
        self,
        sampler: Sampler,
        step: int,
        prompts: PromptStream,
        counts: TokenCounts,
        ended: Callable[[], bool] | None = None,
    ) -> Generator[list[PendingGroup], None, None]:
        """``generate`` the batch of ``step`` during the step before it, with what its end means for unfinished responses."""
        yield from self.generate(sampler, step, prompts, counts, ended, replaces=False)
        match self.schedule.at_end(step - 1):
            case "abort":
                counts.generated += self.release()
            case "finish" if self._kept is not None:
                while self._kept.start():
                    counts.generated += self._wait(self._kept)
                self._kept = None

    def release(self) -> int:
        """Take all requests from the engines; returns the number of tokens that were sampled for them."""
        flow, self._kept = self._kept, None
        return 0 if flow is None else self._suspend(flow)

    def _begin(self, sampler: Sampler, counts: TokenCounts, *, replaces: bool) -> Flow:
        return self._kept or super()._begin(sampler, counts, replaces=replaces)

    def _end(self, flow: Flow, counts: TokenCounts) -> None:
        counts.generated += sum(self.buffer.add(part, ended=True) for part in flow.settle())
        self._kept = flow if flow.unfinished else None
        # What a replica had that died is in no engine: the next flow gets it, together with all others.
        if flow.has_lost:
            counts.generated += self.release()

    @contextmanager
    def generating(
        self, sampler: Sampler, step: int, prompts: PromptStream, phases: Phases, metrics: dict[str, float]
    ) -> Iterator[None]:
        """Generate the batch of ``step`` while the block runs; then wait for it, or for the end of the tick (phase "gen").

        metrics: gets those of the generation. Raises what the block raises, else what the generation raised.
        """
        failed, ended = list[BaseException](), list[float]()
        updated, abandoned = threading.Event(), threading.Event()
        until = None if self.in_step else updated.is_set
        if self._ended is not None:
            metrics["timing_s/engine_stall"] = time.perf_counter() - self._ended

        def work() -> None:
            try:
                for _ in self.generate_ahead(sampler, step, prompts, self._counts, until):
                    if abandoned.is_set():
                        break
            except BaseException as error:  # raised by the thread that waits
                failed.append(error)
            ended.append(time.perf_counter())

        # daemon: a call that hangs must not keep the process alive when the step has failed.
        thread = threading.Thread(target=work, name="generation ahead", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            abandoned.set()
            thread.join(ABANDON_SECONDS)
            raise
        updated.set()
        waits = time.perf_counter()
        with phases("gen"):
            thread.join()
        if failed:
            raise failed[0]
        metrics["rollout/recomputed_tokens"] = float(self._counts.recomputed)
        metrics["timing_s/rollout_idle"] = max(0.0, waits - ended[0])
        self._ended = max(waits, ended[0])

    def batch(self, sampler: Sampler, step: int, prompts: PromptStream, phases: Phases, overlap: Overlap | None) -> Batch:
        self._counts = TokenCounts()
        with phases("gen"):
            # Without a tick, except in the first step of a run, with the wall clock, and after the death of a replica. Between
            # two syncs no replica can be replaced: the trainers have newer weights than the others.
            is_synced = sampler.rollout.version == step - 1
            taken = self._whole(sampler, step, prompts, replaces=is_synced)
            if len(taken) < self.groups:
                self.release()
                sampler.rollout.sync_weights(step - 1)
                taken = self._whole(sampler, step, prompts, replaces=True)
            # Not in the thread: scores of the batch that is trained on and of a validation are collected between the two.
            submitted = self._submit(sampler, taken)
        batch = self._taken(sampler, submitted, taken, step, phases, overlap)
        return batch.with_meta({"generated_tokens": int(batch.tokens["response_mask"].count_nonzero())})

    def _whole(self, sampler: Sampler, step: int, prompts: PromptStream, *, replaces: bool) -> list[PendingGroup]:
        """The groups of the step's batch; fewer if a replica died that was not replaced."""
        return [group for new in self.generate(sampler, step, prompts, self._counts, replaces=replaces) for group in new]
