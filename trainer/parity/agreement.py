"""What answers of an engine are like beside the trainer's distribution and another engine's answers. Pure: numbers to figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

QUANTILES = (0.5, 0.9, 0.99, 0.999)
LENGTH_QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class EngineAnswers:
    """A answers, T tokens in all, and what the trainer makes of the same tokens at the same temperature.

    limit: tokens at most. uids, lengths int64 (A,): row in the data, tokens. finished bool (A,): it stopped, says the engine.
    token_ids int64 (T,). log_probs (T,): the engine's. trainer_log_probs, entropy (T,) and top_log_probs (T, 2), the two largest,
    are the trainer's; float64.
    """

    limit: int
    uids: np.ndarray
    lengths: np.ndarray
    finished: np.ndarray
    token_ids: np.ndarray
    log_probs: np.ndarray
    trainer_log_probs: np.ndarray
    entropy: np.ndarray
    top_log_probs: np.ndarray

    def split(self, column: np.ndarray) -> list[np.ndarray]:
        """A column of tokens, cut into the answers."""
        return np.split(column, np.cumsum(self.lengths)[:-1])

    @property
    def positions(self) -> np.ndarray:
        """Of each token in its answer, from 0: (T,)."""
        return np.concatenate([np.arange(length) for length in self.lengths])

    @property
    def gaps(self) -> np.ndarray:
        """How far each token's log-prob is below the best one's, by the trainer: (T,)."""
        return self.top_log_probs[:, 0] - self.trainer_log_probs


@dataclass(frozen=True, slots=True)
class Differences:
    """Of log-probs, engine - trainer. quantiles: of the absolute values. uid, position: where the largest is."""

    mean: float
    mean_abs: float
    max_abs: float
    quantiles: dict[str, float]
    uid: int
    position: int


def differences(answers: EngineAnswers) -> Differences:
    """A difference that is no number counts as the largest, as numpy has it."""
    signed = answers.log_probs - answers.trainer_log_probs
    absolute = np.abs(signed)
    worst = int(np.argmax(absolute))
    return Differences(
        mean=float(signed.mean()),
        mean_abs=float(absolute.mean()),
        max_abs=float(absolute[worst]),
        quantiles={f"{q:g}": float(np.quantile(absolute, q)) for q in QUANTILES},
        uid=int(np.repeat(answers.uids, answers.lengths)[worst]),
        position=int(answers.positions[worst]),
    )


@dataclass(frozen=True, slots=True)
class Choices:
    """Of greedy tokens. first: share that the trainer's own choice is; within: share that is at most the margin below it.
    largest_gap: nats, and where.
    """

    first: float
    within: float
    largest_gap: float
    uid: int
    position: int


def choices(greedy: EngineAnswers, margin: float) -> Choices:
    """Every token is judged after the engine's own prefix: one early difference is one difference."""
    gaps = greedy.gaps
    worst = int(np.argmax(gaps))
    return Choices(
        first=float((gaps <= 0).mean()),
        within=float((gaps <= margin).mean()),
        largest_gap=float(gaps[worst]),
        uid=int(np.repeat(greedy.uids, greedy.lengths)[worst]),
        position=int(greedy.positions[worst]),
    )


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token in which two answers to a prompt differ; None: the answer has ended. log_probs: of both tokens, by the
    trainer. margin: between the trainer's best two there, nats.
    """

    uid: int
    position: int
    tokens: tuple[int | None, int | None]
    log_probs: tuple[float | None, float | None]
    margin: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of two engines' answers to the same prompts. answers: share that is equal. tokens: share before the first difference, of
    the longer answers'.
    """

    answers: float
    tokens: float
    divergences: list[Divergence]


def agreement(reference: EngineAnswers, own: EngineAnswers) -> Agreement:
    """Answers to the same prompts in the same order."""
    found: list[Divergence] = []
    equal = 0
    for uid, first, second in zip(reference.uids.tolist(), rows_of(reference), rows_of(own), strict=True):
        position = common_prefix(first[0], second[0])
        equal += position
        if position == len(first[0]) == len(second[0]):
            continue
        tokens = [int(ids[position]) if position < len(ids) else None for ids, _, _ in (first, second)]
        log_probs = [float(values[position]) if position < len(values) else None for _, values, _ in (first, second)]
        best, runner_up = (first if position < len(first[0]) else second)[2][position]
        found.append(
            Divergence(uid, position, (tokens[0], tokens[1]), (log_probs[0], log_probs[1]), margin=float(best - runner_up))
        )
    longest = int(np.maximum(reference.lengths, own.lengths).sum())
    return Agreement(answers=1 - len(found) / len(reference.uids), tokens=equal / longest, divergences=found)


def rows_of(answers: EngineAnswers) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of each answer: token_ids, trainer_log_probs, top_log_probs."""
    return zip(*map(answers.split, (answers.token_ids, answers.trainer_log_probs, answers.top_log_probs)), strict=True)


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Tokens before the first difference."""
    n = min(len(first), len(second))
    different = np.flatnonzero(first[:n] != second[:n])
    return int(different[0]) if len(different) else n


def draw_z(sampled: EngineAnswers) -> float:
    """How far the draws are from the trainer's distribution, in standard errors: about normal if they come from it.

    Each token's log-prob plus the entropy, both the trainer's, has mean 0 given what precedes it; the sum over all tokens, a
    martingale, is divided by the root of the sum of squares. It sees a temperature that the log-probs do not tell: draws that
    are too likely are above 0. Nothing was cut off by top_k or top_p.
    """
    surplus = sampled.trainer_log_probs + sampled.entropy
    scale = float(np.sqrt(np.square(surplus).sum()))
    return float(surplus.sum()) / scale if scale else 0.0


@dataclass(frozen=True, slots=True)
class Ends:
    """How answers end. stopped: share that a stop token ends. ended_by: how often each did. special: special tokens that are no
    end, in the answers. wrong: answers that end as they must not, by what is wrong.
    """

    stopped: float
    ended_by: dict[int, int]
    special: int
    wrong: dict[str, int]


def ends(answers: EngineAnswers, stop_token_ids: Collection[int], special_token_ids: Collection[int]) -> Ends:
    """stop_token_ids: none with ignore_eos. A stop token ends an answer, and is its last token."""
    wrong: Counter[str] = Counter()
    ended_by: Counter[int] = Counter()
    for ids, finished in zip(answers.split(answers.token_ids), answers.finished.tolist(), strict=True):
        is_stop = np.isin(ids, list(stop_token_ids))
        ended_by.update(ids[-1:][is_stop[-1:]].tolist())
        for what, is_so in {
            "it stopped, and not with a stop token": finished and not is_stop[-1],
            "it ends with a stop token, and did not stop": not finished and is_stop[-1],
            "it goes on after a stop token": is_stop[:-1].any(),
            "it is shorter than it may be, and did not stop": not finished and len(ids) < answers.limit,
            "it is longer than it may be": len(ids) > answers.limit,
        }.items():
            wrong[what] += int(is_so)
    others = set(special_token_ids) - set(stop_token_ids)
    return Ends(
        stopped=float(answers.finished.mean()),
        ended_by=dict(sorted(ended_by.items())),
        special=int(np.isin(answers.token_ids, list(others)).sum()),
        wrong={what: count for what, count in wrong.items() if count},
    )


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens an answer. quantiles: of the answers, 0 the shortest and 1 the longest."""

    mean: float
    quantiles: dict[str, float]


def length_figures(lengths: np.ndarray) -> Lengths:
    return Lengths(float(lengths.mean()), {f"{q:g}": float(np.quantile(lengths, q)) for q in LENGTH_QUANTILES})


@dataclass(frozen=True, slots=True)
class Heads:
    """How prompts begin. bos: the tokenizer's token, None if it has none. wanted: prompts that shall begin with it, by the chat
    template, or by the tokenizer where a prompt is plain text. begun: those that do; doubled: twice; lost: wanted, and not there.
    """

    bos: str | None
    wanted: int
    begun: int
    doubled: int
    lost: int


def heads(bos: str | None, bos_id: int | None, prompts: Sequence[tuple[int, ...]], wanted: Sequence[bool]) -> Heads:
    """wanted: of each prompt, whether it shall begin with the token."""
    begun = [ids[0] == bos_id for ids in prompts]
    return Heads(
        bos=bos,
        wanted=sum(wanted),
        begun=sum(begun),
        doubled=sum(ids[:2] == (bos_id, bos_id) for ids in prompts),
        lost=sum(wants and not begins for wants, begins in zip(wanted, begun, strict=True)),
    )
