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
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from trainer.data.dataset import PromptStream
from trainer.rollout.buffer import GroupBuffer
from trainer.rollout.partial import PartialRollouts, TokenCounts
from trainer.rollout.sampler import Overlap, Sampler
from trainer.run.timing import Phases
from workers.batch import Batch

ABANDON_SECONDS = 20.0
"""Limit for the generation to return after the step has failed; its workers end with the run."""


class RolloutsAhead(PartialRollouts):
    """Batches that were generated during the step before; the first of a run is generated when it is asked for.

    With ``max_staleness`` 1 every group is admitted and completed for one step. From 2 on long responses continue with newer
    weights, as in partial rollouts.
    """

    def __init__(
        self,
        buffer: GroupBuffer,
        *,
        groups: int,
        oversubmit: float,
        max_staleness: int,
        clock: Literal["logical", "wall"] = "logical",
    ) -> None:
        """max_staleness: versions between the weights before an update and those that sampled any token of it, at most.

        clock: "logical": what is generated ahead is the batch; "wall": until the update has ended, within the bound.
        """
        # A group that is admitted for a step meets the weights of the step before the last, hence one less.
        super().__init__(buffer, groups=groups, oversubmit=oversubmit, max_age=max_staleness - 1)
        self.in_step = clock == "logical"
        self._counts = TokenCounts()
        """Of the step."""

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

        def work() -> None:
            try:
                for _ in self.generate(sampler, step, prompts, self._counts, until, replaces=False):
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

    def batch(self, sampler: Sampler, step: int, prompts: PromptStream, phases: Phases, overlap: Overlap | None) -> Batch:
        self._counts = TokenCounts()
        with phases("gen"):
            # Without a tick, except in the first step of a run, with the wall clock, and after the death of a replica.
            taken = [group for new in self.generate(sampler, step, prompts, self._counts) for group in new]
            # Not in the thread: scores of the batch that is trained on and of a validation are collected between the two.
            submitted = self._submit(sampler, taken)
        batch = self._taken(sampler, submitted, taken, step, phases, overlap)
        return batch.with_meta({"generated_tokens": int(batch.tokens["response_mask"].count_nonzero())})
