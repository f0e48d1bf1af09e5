"""Partial rollouts: a step takes the groups that are complete, and the other responses continue in the next step.

Problem: responses have very different lengths, and a synchronous step waits for its longest one with engines that are nearly
empty. Idea (Kimi k1.5, arXiv:2501.12599, section 2.6.2): keep more groups in flight than a step needs, end its generation as soon
as enough of them are complete, and let unfinished responses continue with the weights of the next step. Their tokens come from
several versions of the policy: algorithm.rollout_correction weights each by its own log-prob.

A step begins directly after a weight sync. There every unfinished response is submitted anew, in the order of ordinals, and the
engines compute prompt and beginning again with the new weights. A run that is resumed does the same, hence the same numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Generator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from configs.schema.ppo import FilterGroupsConfig
from trainer.agents.sessions.session_flow import Flow
from trainer.data.dataset import Prompt, PromptStream
from trainer.rollout.buffer import GroupBuffer, PendingGroup
from trainer.rollout.group_filtering import Tally
from trainer.rollout.policies import KeptGroups
from trainer.rollout.responses import in_order, prompt_batch
from trainer.rollout.sampler import Overlap, Sampler
from trainer.run.timing import Phases
from trainer.tracking.metrics import staleness_metrics
from workers.batch import Batch
from workers.seeding import seed_of


@dataclass(slots=True)
class TokenCounts:
    """Tokens that the engines sampled, and tokens that they computed again."""

    generated: int = 0
    recomputed: int = 0


class PartialRollouts:
    """Batches of the first groups that are complete, by tick and ordinal. in_step: see RemoteRollout.flow."""

    selects_groups = False
    in_step = True

    def __init__(self, buffer: GroupBuffer, *, groups: int, oversubmit: float, max_age: int) -> None:
        """groups: prompts in a step's batch. oversubmit: groups that are generated at the same time, relative to ``groups``.

        max_age: of a group when a step takes it, in steps since its admission.
        """
        self.buffer = buffer
        self.groups = groups
        self.in_flight = round(oversubmit * groups)
        self.max_age = max_age

    def batch(self, sampler: Sampler, step: int, prompts: PromptStream, phases: Phases, overlap: Overlap | None) -> Batch:
        scored, taken, counts = list[Batch](), list[PendingGroup](), TokenCounts()
        with phases("gen"):
            # Scored by other processes while the engines generate the next tick.
            for new in self.generate(sampler, step, prompts, counts):
                scored += self._submit(sampler, new, len(taken))
                taken += new
        batch = self._taken(sampler, scored, taken, step, phases, overlap)
        metrics = batch.meta["metrics"] | {"rollout/recomputed_tokens": float(counts.recomputed)}
        return batch.with_meta({"generated_tokens": counts.generated, "metrics": metrics})

    def generate(
        self,
        sampler: Sampler,
        step: int,
        prompts: PromptStream,
        counts: TokenCounts,
        ended: Callable[[], bool] | None = None,
        *,
        replaces: bool = True,
    ) -> Generator[list[PendingGroup], None, None]:
        """Generate until the step's batch is complete; yields its groups as they complete, while a tick runs. Adds to ``counts``.

        Nothing is generated if the buffer has the batch already, and nothing more if no engine has a request that it can work on.
        ended: asked after every tick; generate until it is true instead, whether or not the batch is complete. replaces: see
        RemoteRollout.flow.
        """
        buffer = self.buffer
        new = taken = self._further((), step)

        def is_over() -> bool:
            return len(taken) >= self.groups if ended is None else ended()

        if not is_over():
            flow = self._begin(sampler, counts, replaces=replaces)
            if ended is None:
                # Groups that have waited since the last step count: else more would wait, and become older, with every step.
                n_waiting = len(buffer) - buffer.n_unfinished
                # In the first tick no more than the batch needs: where all of them end in it, others would only become stale.
                n_unfinished = self.groups - n_waiting
            else:
                n_waiting, n_unfinished = 0, self.in_flight
            while not is_over():
                # The second bound: see GroupBuffer.choose.
                while buffer.n_unfinished < n_unfinished and len(buffer) < (self.max_age + 1) * self.groups:
                    self._admit(flow, prompts.draw_one(), sampler, step)
                if not flow.start():
                    break
                yield new
                counts.generated += self._wait(flow)
                n_unfinished = self.in_flight - n_waiting
                new = self._further(taken, step)
                taken = taken + new
            self._end(flow, counts)
        yield new

    def _begin(self, sampler: Sampler, counts: TokenCounts, *, replaces: bool) -> Flow:
        """Flow of the step, with all unfinished responses."""
        options: dict[str, Any] = {"expected": self.groups * self.buffer.n, "in_step": self.in_step, "replaces": replaces}
        flow = sampler.flow(sampler.sampling, self.buffer, **options)
        counts.recomputed += self._resubmit(flow)
        return flow

    def _end(self, flow: Flow, counts: TokenCounts) -> None:
        """End the generation of the step."""
        counts.generated += self._suspend(flow)

    def _taken(
        self,
        sampler: Sampler,
        submitted: Sequence[Batch],
        taken: Sequence[PendingGroup],
        step: int,
        phases: Phases,
        overlap: Overlap | None,
    ) -> Batch:
        """The step's batch of groups that were ``submitted`` for scoring, see Sampler.next_batch; they leave the buffer."""
        batch = self._scored(sampler, submitted, taken, step, phases, overlap)
        # Not before: if the scores do not come, the step is abandoned, and the buffer may have to be whole (Loop.next_batch).
        self.buffer.remove([group.ordinal for group in taken])
        return sampler.scored_only(batch.with_meta({"metrics": self._metrics(step, taken, batch, sampler.rollout.version)}))

    def _further(self, taken: Sequence[PendingGroup], step: int) -> list[PendingGroup]:
        """Complete groups that the step takes besides ``taken``, by tick and ordinal."""
        complete = {group.ordinal: group for group in self.buffer.complete()}
        chosen = self.buffer.choose(complete.keys(), self.groups, step, self.max_age)
        further = set(chosen) - {group.ordinal for group in taken}
        return [group for ordinal, group in complete.items() if ordinal in further]

    def _resubmit(self, flow: Flow) -> int:
        """Queue all unfinished responses; returns the number of tokens that the engines compute again."""
        tokens = 0
        for ids in self.buffer.unfinished():
            prompt_length = len(self.buffer.prompt(ids[0]).prompt_ids)
            flow.admit(ids, prompt_length)
            # Now: sessions that were resumed have their calls, except those that had to begin anew.
            if known := self.buffer.with_call(ids):
                requests = self.buffer.requests(known)
                begun = requests.rows["begun"]
                longest, again = int((requests.lengths - begun).max()), int(begun.sum())
                # What waited for a slot of an engine has not been computed yet.
                if again or longest > prompt_length:
                    tokens += longest + again
        return tokens

    def _admit(self, flow: Flow, prompt: Prompt, sampler: Sampler, step: int) -> None:
        """Queue the responses to a new prompt. Sample n exists with baselines only: the greedy response."""
        purpose = sampler.rollbacks.purpose("train")
        # By ordinal: two epochs of small data may be in flight at the same step.
        seeds = [seed_of(sampler.seed, purpose, "group", prompt.ordinal, sample) for sample in range(self.buffer.n)]
        ids = self.buffer.admit(step, prompt, seeds, [sample == sampler.n for sample in range(self.buffer.n)])
        flow.admit(ids, len(prompt.prompt_ids))

    def _wait(self, flow: Flow) -> int:
        """Wait for the end of the tick; returns the number of tokens of responses that ended."""
        tokens = sum(self.buffer.add(part, ended=True) for part in flow.wait())
        self.buffer.tick += 1
        return tokens

    def _suspend(self, flow: Flow) -> int:
        """Take all requests from the engines; returns the number of tokens that were sampled for them."""
        late, interrupted = flow.suspend()
        tokens = sum(self.buffer.add(part, ended=True) for part in late)
        return tokens + sum(self.buffer.add(part, ended=False) for part in interrupted)

    def _submit(self, sampler: Sampler, groups: Sequence[PendingGroup], first: int = 0) -> list[Batch]:
        """Submit complete groups for scoring, the first at place ``first``; returns one batch for each."""
        n, found = self.buffer.n, list[Batch]()
        for place, group in enumerate(groups, first):
            seeds, rows = [response.seed for response in group.responses], group.batch(range(place * n, (place + 1) * n))
            greedy = torch.tensor([response.greedy for response in group.responses])
            questions = prompt_batch([group.prompt] * n, seeds, greedy)
            found.append(sampler.submit(rows, questions, [group.prompt] * len(rows)))  # a session may have several
        return found

    def _scored(
        self,
        sampler: Sampler,
        submitted: Sequence[Batch],
        groups: Sequence[PendingGroup],
        step: int,
        phases: Phases,
        overlap: Overlap | None = None,
        known: Container[int] = (),
    ) -> Batch:
        """Wait for the scores of ``groups``, which were ``submitted``; see Sampler.finish_scoring and with_penalties."""
        asked = [group.prompt for group in groups for _ in group.responses]
        samples = [sample for group in groups for sample in range(self.buffer.n)]
        batch = in_order(submitted).with_meta({"temperature": sampler.sampling.divisor})
        batch = sampler.finish_scoring(
            batch, asked, samples, phases, n=sampler.n, step=step, trains=True, overlap=overlap, known=known
        )
        return sampler.with_penalties(batch)

    def _metrics(self, step: int, taken: Sequence[PendingGroup], batch: Batch, version: int) -> dict[str, float]:
        """Ages of the groups in steps since their admission, with the share of each; staleness of tokens; groups in flight."""
        ages = [step - group.step for group in taken]
        versions = batch.tokens["weight_version"][batch.tokens["response_mask"].bool()]
        shares = {f"rollout/age/{age}": count / len(ages) for age, count in sorted(Counter(ages).items())}
        return (
            shares
            | staleness_metrics(batch, step)
            | {
                "rollout/age/mean": sum(ages) / len(ages),
                "rollout/age/max": float(max(ages)),
                "rollout/stale_tokens": float((versions < version).float().mean()),
                "rollout/unfinished_groups": float(self.buffer.n_unfinished),
                "rollout/waiting_groups": float(len(self.buffer) - self.buffer.n_unfinished),
            }
        )


class FilteredPartialRollouts(PartialRollouts):
    """Partial rollouts with dynamic sampling: batches of the first groups that are complete and kept (group_filtering.py).

    Verdicts take effect at ticks, so that a scorer's speed changes nothing: groups that end in a tick are scored while the
    engines generate the next one, and judged at its end, which waits for late scores. Dropped groups leave the buffer, and other
    prompts are admitted. Kept groups beyond the batch wait for the next step, which scores and judges them again: a checkpoint
    has no scores, and a run that is not resumed does the same.
    """

    selects_groups = True

    def __init__(self, buffer: GroupBuffer, filters: FilterGroupsConfig, *, groups: int, oversubmit: float, max_age: int) -> None:
        super().__init__(buffer, groups=groups, oversubmit=oversubmit, max_age=max_age)
        self.filters = filters

    def batch(self, sampler: Sampler, step: int, prompts: PromptStream, phases: Phases, overlap: Overlap | None) -> Batch:
        buffer, round_size = self.buffer, prompts.order.batch_size
        kept = KeptGroups(sampler, Tally(self.filters, self.groups, prompts.rounds_per_epoch))
        # Those that have waited since the last step are judged first.
        ended = waited = buffer.complete()
        with phases("gen"):
            flow = sampler.flow(sampler.sampling, buffer, expected=self.groups * buffer.n, in_step=True)
            generated, recomputed = 0, self._resubmit(flow)
        while len(chosen := buffer.choose(kept.ordinals, self.groups, step, self.max_age)) < self.groups:
            if not kept.tally.is_full:
                kept.tally.check_another(step)
            with phases("gen"):
                # As without a filter: groups that have waited since the last step count as in flight.
                self._fill(flow, sampler, step, prompts, self.in_flight - sum(group.ordinal in buffer for group in waited))
                flow.start()
                submitted = self._submit(sampler, ended)
            if ended:
                # Those that were scored in an earlier step are not learned from again.
                known = {group.ordinal for group in ended if group.scored}
                scored = self._scored(sampler, submitted, ended, step, phases, known=known)
                for group in ended:
                    group.scored = True
                kept.add(scored, [group.prompt for group in ended], Fraction(len(ended), round_size))
                buffer.remove({group.ordinal for group in ended} - kept.ordinals)
            with phases("gen"):
                generated += self._wait(flow)
            ended = [group for group in buffer.complete() if group.ordinal not in kept.ordinals]
        with phases("gen"):
            generated += self._suspend(flow)
        batch, taken = kept.batch(chosen), buffer.remove(chosen)
        metrics = self._metrics(step, taken, batch, sampler.rollout.version) | {"rollout/recomputed_tokens": float(recomputed)}
        return batch.with_meta({"generated_tokens": generated, "metrics": batch.meta["metrics"] | metrics})

    def _fill(self, flow: Flow, sampler: Sampler, step: int, prompts: PromptStream, n_unfinished: int) -> None:
        """Admit prompts until ``n_unfinished`` groups are unfinished. A prompt that is in flight is skipped."""
        in_flight = self.buffer.uids
        # Bounds: see GroupBuffer.choose; and an epoch must have a prompt that is not in flight.
        most = min((self.max_age + 1) * self.groups, prompts.rounds_per_epoch * prompts.order.batch_size)
        while self.buffer.n_unfinished < n_unfinished and len(self.buffer) < most:
            prompt = prompts.draw_one()
            if prompt.uid not in in_flight:
                in_flight.add(prompt.uid)
                self._admit(flow, prompt, sampler, step)
