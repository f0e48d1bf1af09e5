"""How a step's batch is generated: one round of prompts, or rounds until enough groups are kept."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch

from configs.schema.ppo import FilterGroupsConfig
from trainer.algorithms.trajectories import Trajectories
from trainer.data.dataset import Prompt, PromptStream
from trainer.rollout.group_filtering import Tally, group_verdicts, metric_values
from trainer.rollout.rounds import Rounds
from trainer.rollout.sampler import Overlap, Sampler, check_some_scored
from trainer.run.timing import Phases
from workers.batch import Batch


class OneRound:
    """The prompts of one round."""

    selects_groups = False

    def batch(self, sampler: Sampler, step: int, prompts: PromptStream, phases: Phases, overlap: Overlap | None) -> Batch:
        """Batch of one round of prompts, without rows whose reward failed."""
        return sampler.scored_only(sampler.sample_to_train(prompts.draw(), step, phases, overlap))


class FilteredRounds:
    """Dynamic sampling: groups whose responses all have the same score are dropped (group_filtering.py).

    kept_share: kept groups over all of the last round. A round begins early if, with this share, those before it do not fill the
    batch.
    """

    selects_groups = True

    def __init__(self, config: FilterGroupsConfig, groups: int) -> None:
        """groups: prompts in a step's batch."""
        self.config = config
        self.groups = groups
        self.kept_share = 1.0

    def state(self) -> dict[str, float]:
        return {"kept_share": self.kept_share}

    def load(self, state: dict[str, float]) -> None:
        self.kept_share = state.get("kept_share", 1.0)

    def batch(self, sampler: Sampler, step: int, prompts: PromptStream, phases: Phases, overlap: Overlap | None) -> Batch:
        """Generate rounds until ``groups`` groups are kept; the first ``groups`` form the batch, surplus groups are discarded.

        A prompt that was kept is not sampled again in the step. A dropped prompt is resampled, with different seeds, when the
        next pass over the data reaches it.
        """
        kept = KeptGroups(sampler, Tally(self.config, self.groups, prompts.rounds_per_epoch))
        tally, rounds = kept.tally, Rounds(sampler, step, prompts, phases)
        generated = 0
        while not tally.is_full:
            tally.check_another(step)
            asked = (one := rounds.next({prompt.uid for prompt in kept.prompts})).prompts
            if not asked:
                # Counts as a round without a kept group, so that check_another ends the loop after a full pass.
                tally.add((), ())
                continue
            answered = rounds.generate(
                one, lambda open_rounds, groups: tally.expects_another(open_rounds, self.kept_share * groups)
            )
            self.kept_share = kept.add(answered, asked) / len(asked)
            generated += answered.meta["generated_tokens"]
        batch = kept.batch([prompt.ordinal for prompt in kept.prompts[: self.groups]])
        metrics = batch.meta["metrics"] | {"rollout/wasted_tokens": float(rounds.give_back())}
        return batch.with_meta({"metrics": metrics, "generated_tokens": generated})


class KeptGroups:
    """Groups that a step's filter has kept so far, with their scores. prompts: of these groups, in the order of verdicts."""

    def __init__(self, sampler: Sampler, tally: Tally) -> None:
        self.tally = tally
        self.prompts: list[Prompt] = []
        self._sampler = sampler
        self._parts: list[Batch] = []
        self._failed = 0

    @property
    def ordinals(self) -> set[int]:
        return {prompt.ordinal for prompt in self.prompts}

    def add(self, answered: Batch, asked: Sequence[Prompt], rounds: Fraction = Fraction(1)) -> int:
        """Judge the groups of ``asked``, whose scored responses are ``answered``; returns how many are kept.

        rounds: see Tally. Raises ValueError if, after a complete round, no response of the step has a score.
        """
        scored, tally = self._sampler.drop_failed(answered), self.tally
        whole = Trajectories.of(scored).joined(scored)
        values, groups = metric_values(whole, tally.config.metric), whole.rows["group"].tolist()
        verdicts = group_verdicts([prompt.ordinal for prompt in asked], groups, values, self._sampler.n)
        tally.add(verdicts.values(), values, rounds)
        if tally.rounds >= 1:
            check_some_scored(answered, tally.n_values)
        kept = [prompt for prompt in asked if verdicts[prompt.ordinal] == "kept"]
        self._parts.append(select_groups(scored, [prompt.ordinal for prompt in kept]))
        self.prompts += kept
        self._failed += len(Trajectories.of(answered)) - len(whole)
        return len(kept)

    def batch(self, groups: Sequence[int]) -> Batch:
        """Rows of these groups in the order of verdicts, with metrics of all groups."""
        metrics = {"reward/failed": self._failed} | self._sampler.failures.metrics() | self.tally.metrics()
        return select_groups(Batch.concat(self._parts), groups).with_meta({"metrics": metrics})


def select_groups(batch: Batch, groups: Sequence[int]) -> Batch:
    """Rows of ``groups``, in the order of the batch."""
    return batch.select(torch.isin(batch.rows["group"], torch.tensor(groups, dtype=torch.int64)).nonzero().flatten())
