"""Generation ahead: the next step's batch is generated while the present one is trained on, on GPUs of its own.

Problem: in a synchronous step the trainer waits for the engines and then the engines for the trainer. Idea: with pools of their
own both work at the same time, and meet once per step, where the engines get new weights. What a step trains on was sampled by
the weights of the step before the last, so its tokens are one version old at least; algorithm.rollout_correction corrects for it.

Nothing depends on which side is faster: the batch is complete and the update has ended before the weights are synced, and
generation begins directly after a sync. A run that is repeated or resumed therefore has the same numbers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

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

    replaces = False

    def __init__(self, buffer: GroupBuffer, *, groups: int, oversubmit: float, max_staleness: int) -> None:
        """max_staleness: versions between the weights before an update and those that sampled any token of it, at most."""
        # A group that is admitted for a step meets the weights of the step before the last, hence one less.
        super().__init__(buffer, groups=groups, oversubmit=oversubmit, max_age=max_staleness - 1)

    @contextmanager
    def generating(
        self, sampler: Sampler, step: int, prompts: PromptStream, phases: Phases, metrics: dict[str, float]
    ) -> Iterator[None]:
        """Generate the batch of ``step`` while the block runs, and wait for it at the end (phase "gen").

        metrics: gets those of the generation. Raises what the block raises, else what the generation raised.
        """
        failed, counts, ended, abandoned = list[BaseException](), TokenCounts(), list[float](), threading.Event()

        def work() -> None:
            try:
                for _ in self.generate(sampler, step, prompts, counts):
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
        waits = time.perf_counter()
        with phases("gen"):
            thread.join()
        if failed:
            raise failed[0]
        metrics["rollout/recomputed_tokens"] = float(counts.recomputed)
        metrics["timing_s/rollout_idle"] = max(0.0, waits - ended[0])

    def batch(self, sampler: Sampler, step: int, prompts: PromptStream, phases: Phases, overlap: Overlap | None) -> Batch:
        with phases("gen"):
            # Without a tick, except in the first step of a run.
            taken = [group for new in self.generate(sampler, step, prompts, TokenCounts()) for group in new]
            # Not in the thread: scores of the batch that is trained on and of a validation are collected between the two.
            submitted = self._submit(sampler, taken)
        batch = self._taken(sampler, submitted, taken, step, phases, overlap)
        return batch.with_meta({"generated_tokens": int(batch.tokens["response_mask"].count_nonzero())})
