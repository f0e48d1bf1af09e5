"""Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2): which groups have something to teach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from configs.schema.ppo import FilterGroupsConfig
from workers.batch import Batch

Verdict = Literal["kept", "low", "high", "failed"]
"""low, high: all answers are worth the same, that is 0 or less, or more. failed: too few answers have a score."""


def metric_values(batch: Batch, metric: str | None) -> list[float]:
    """What algorithm.filter_groups.metric compares, of every row: (B,).

    rows: score, as the scorer gave it, reward, with the overlong penalty. objects: reward_extra, the function's other numbers.
    "acc" is the score where the function tells none. Raises ValueError if a row lacks the metric.
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
            told = ", ".join(sorted({"score", "seq_reward", "acc", *extra}))
            raise ValueError(
                f"algorithm.filter_groups.metric={metric}: the reward function tells no such number for data source {source}; "
                f"known: {told}"
            )
    return [extra[metric] for extra in extras]


def judge_groups(asked: Sequence[int], uids: Sequence[int], values: Sequence[float], n: int) -> dict[int, Verdict]:
    """What becomes of each group in ``asked``, in its order. uids, values: group and metric of every answer that has a score.

    A group is judged by these answers alone: it is kept if two of them differ, and with n = 1 answer a prompt if it has one.
    """
    groups: dict[int, list[float]] = {uid: [] for uid in asked}
    for uid, value in zip(uids, values, strict=True):
        groups[uid].append(value)
    return {uid: _judge(scored, n) for uid, scored in groups.items()}


def _judge(scored: Sequence[float], n: int) -> Verdict:
    if len(scored) < min(n, 2):
        return "failed"
    if n == 1 or min(scored) != max(scored):
        return "kept"
    return "high" if scored[0] > 0 else "low"


@dataclass(slots=True)
class Tally:
    """How far a step has come in filling its batch of ``wanted`` groups. idle: rounds since one was kept."""

    config: FilterGroupsConfig
    wanted: int
    rounds_per_epoch: int
    rounds: int = 0
    idle: int = 0
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    total: float = 0.0
    n_values: int = 0

    @property
    def is_full(self) -> bool:
        return self.verdicts["kept"] >= self.wanted

    def add(self, verdicts: Collection[Verdict], values: Sequence[float]) -> None:
        """A round: its groups, and the metric of its answers that have a score."""
        self.rounds += 1
        self.idle = 0 if "kept" in verdicts else self.idle + 1
        self.verdicts.update(verdicts)
        self.total += sum(values)
        self.n_values += len(values)

    def check_another(self, step: int) -> None:
        """Raises ValueError, one line, if the batch is not full and there shall be no other round."""
        cap = self.config.max_num_gen_batches
        if 0 < cap <= self.rounds:
            reason, advice = f"algorithm.filter_groups.max_num_gen_batches={cap} is reached", "raise it (0: no cap), "
        elif self.idle >= self.rounds_per_epoch:
            reason, advice = f"{self.idle} rounds, a whole pass over the data, kept none", ""
        else:
            return
        count = self.verdicts
        raise ValueError(
            f"step {step}: algorithm.filter_groups kept {count['kept']} of the {self.wanted} groups that the batch needs "
            f"(data.train_batch_size) in {self.rounds} rounds, and {reason}: of {count.total()} groups {count['low']} were all "
            f"wrong (every answer {self.config.metric or 'score'} <= 0), {count['high']} all right, {count['failed']} lost their "
            f"answers to failed rewards; {advice}take prompts that the model solves now and then, or raise rollout.n"
        )

    def metrics(self) -> dict[str, float]:
        """metric_mean: over all answers with a score, before any group was dropped."""
        count = self.verdicts
        found: dict[str, float] = {"rounds": self.rounds, "groups": count.total(), "surplus": count["kept"] - self.wanted}
        found |= {f"dropped_{verdict}": count[verdict] for verdict in ("low", "high", "failed")}
        found |= {"metric_mean": self.total / self.n_values}
        return {f"training/filter_groups/{name}": float(value) for name, value in found.items()}
