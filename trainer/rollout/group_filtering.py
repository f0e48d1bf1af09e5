"""Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2): keep groups whose responses differ in score.

A group with equal scores has advantage 0 for every token under a group-relative estimator and contributes no gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from configs.schema.ppo import FilterGroupsConfig
from workers.batch import Batch

Verdict = Literal["kept", "low", "high", "failed"]
"""low, high: all responses have the same score, <= 0 or > 0. failed: too few responses have a score."""


def metric_values(batch: Batch, metric: str | None) -> list[float]:
    """Values of algorithm.filter_groups.metric, one per row (B,).

    metric: score (the scorer's), reward (with penalties), or a number in reward_extra. "acc" falls back to the score if the
    reward function does not return it. Raises ValueError if a row lacks the metric.
    """
    scores = batch.rows["score"].tolist()
    if metric in (None, "score"):
        return scores
    if metric in ("reward", "seq_reward", "seq_final_reward"):
        return batch.rows["reward"].tolist()
    extras = batch.objects["reward_extra"]
    if metric == "acc":
        return [extra.get("acc", score) for extra, score in zip(extras, scores, strict=True)]
    for extra, source in zip(extras, batch.objects["data_source"], strict=True):
        if metric not in extra:
            known = ", ".join(sorted({"score", "seq_reward", "acc", *extra}))
            raise ValueError(
                f"algorithm.filter_groups.metric={metric}: the reward function reports no such number for data source {source}; "
                f"known: {known}"
            )
    return [extra[metric] for extra in extras]


def group_verdicts(asked: Sequence[int], groups: Sequence[int], values: Sequence[float], n: int) -> dict[int, Verdict]:
    """Verdict of each group in ``asked``, in order. groups, values: group and metric of every response that has a score.

    A group is kept if two of its values differ, or, with n = 1 response per prompt, if it has one. Failed rewards do not count.
    """
    scored: dict[int, list[float]] = {group: [] for group in asked}
    for group, value in zip(groups, values, strict=True):
        scored[group].append(value)
    return {group: _judge(of_group, n) for group, of_group in scored.items()}


def _judge(scored: Sequence[float], n: int) -> Verdict:
    if len(scored) < min(n, 2):
        return "failed"
    # Not by the standard deviation, as in verl: that of [0.1, 0.1, 0.1] is not 0 in floating point.
    if n == 1 or min(scored) != max(scored):
        return "kept"
    return "high" if scored[0] > 0 else "low"


@dataclass(slots=True)
class Tally:
    """Progress of a step in filling its batch of ``wanted`` groups. idle: rounds since a group was last kept.

    Partial rollouts judge groups as they end: their rounds are numbers of groups, divided by that of a round.
    """

    config: FilterGroupsConfig
    wanted: int
    rounds_per_epoch: int
    rounds: Fraction = Fraction()
    idle: Fraction = Fraction()
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    total: float = 0.0
    n_values: int = 0

    @property
    def is_full(self) -> bool:
        return self.verdicts["kept"] >= self.wanted

    def add(self, verdicts: Collection[Verdict], values: Sequence[float], rounds: Fraction = Fraction(1)) -> None:
        """Record verdicts of groups, and metric values of their responses that have a score."""
        self.rounds += rounds
        self.idle = Fraction() if "kept" in verdicts else self.idle + rounds
        self.verdicts.update(verdicts)
        self.total += sum(values)
        self.n_values += len(values)

    def expects_another(self, open_rounds: int, expected: float) -> bool:
        """Whether another round is allowed and likely needed. expected: groups that ``open_rounds`` are expected to keep."""
        allowed = self.config.max_num_gen_batches <= 0 or self.rounds + open_rounds < self.config.max_num_gen_batches
        return allowed and self.verdicts["kept"] + expected < self.wanted

    def check_another(self, step: int) -> None:
        """Check that another round is allowed.

        Raises ValueError, one line, if max_num_gen_batches is reached or a complete pass over the data kept no group.
        """
        cap = self.config.max_num_gen_batches
        if 0 < cap <= self.rounds:
            reason, advice = f"algorithm.filter_groups.max_num_gen_batches={cap} is reached", "raise it (0: no cap), "
        elif self.idle >= self.rounds_per_epoch:
            reason, advice = f"{float(self.idle):g} rounds, a whole pass over the data, kept none", ""
        else:
            return
        count = self.verdicts
        raise ValueError(
            f"step {step}: algorithm.filter_groups kept {count['kept']} of the {self.wanted} groups that the batch needs "
            f"(data.train_batch_size) in {float(self.rounds):g} rounds, and {reason}: of {count.total()} groups {count['low']} "
            f"were all wrong (every answer {self.config.metric or 'score'} <= 0), {count['high']} all right, {count['failed']} "
            f"lost their answers to failed rewards; {advice}take prompts that the model solves now and then, or raise rollout.n"
        )

    def metrics(self) -> dict[str, float]:
        """Metrics training/filter_groups/*. metric_mean: over all responses with a score, before groups were dropped."""
        # Before filtering: the mean over kept groups would exclude every group that is all right or all wrong.
        count = self.verdicts
        found: dict[str, float] = {"rounds": float(self.rounds), "groups": count.total(), "surplus": count["kept"] - self.wanted}
        found |= {f"dropped_{verdict}": count[verdict] for verdict in ("low", "high", "failed")}
        found |= {"metric_mean": self.total / self.n_values}
        return {f"training/filter_groups/{name}": float(value) for name, value in found.items()}
