"""Compare an engine's responses with the trainer's distribution and with another engine's responses. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

QUANTILES = (0.5, 0.9, 0.99, 0.999)
LENGTH_QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class EngineResponses:
    """A responses of T tokens in total, and the trainer's outputs for the same tokens at the same temperature.

    limit: maximum number of tokens per response. uids, lengths int64 (A,): row in the data, number of tokens. finished bool (A,):
    the engine reports that the response terminated. token_ids int64 (T,). log_probs (T,): the engine's. trainer_log_probs (T,),
    entropy (T,) and top_log_probs (T, 2), the two largest: the trainer's. All floats are float64.
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
        """Split a token column (T,) or (T, 2) by response."""
        return np.split(column, np.cumsum(self.lengths)[:-1])

    @property
    def positions(self) -> np.ndarray:
        """Position of each token in its response, from 0: (T,)."""
        return np.concatenate([np.arange(length) for length in self.lengths])

    @property
    def gaps(self) -> np.ndarray:
        """Trainer's log-prob of its most likely token minus that of the generated token, in nats: (T,)."""
        return self.top_log_probs[:, 0] - self.trainer_log_probs


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences of log-probs, engine - trainer, in nats. quantiles: of absolute values. uid, position: where the largest is."""

    mean: float
    mean_abs: float
    max_abs: float
    quantiles: dict[str, float]
    uid: int
    position: int


def differences(answers: EngineResponses) -> Differences:
    """Statistics of the log-prob differences. NaN counts as the largest difference, since np.argmax returns it first."""
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
    """Agreement of greedy tokens with the trainer. first: share of tokens that the trainer would choose too.

    within: share at most the margin below the trainer's choice. largest_gap: in nats; uid, position: its location.
    """

    first: float
    within: float
    largest_gap: float
    uid: int
    position: int


def choices(greedy: EngineResponses, margin: float) -> Choices:
    """Compare each greedy token with the trainer's choice. margin: in nats."""
    # The trainer scored every token after the engine's own prefix, so an early difference does not propagate to later tokens.
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
    """The first token in which two responses to a prompt differ.

    tokens: both token ids, None if that response has ended. log_probs: of both tokens, by the trainer. margin: difference of the
    trainer's two largest log-probs at this position, in nats.
    """

    uid: int
    position: int
    tokens: tuple[int | None, int | None]
    log_probs: tuple[float | None, float | None]
    margin: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of two engines' responses to the same prompts.

    answers: share of identical responses. tokens: share of tokens before the first difference, relative to the longer response.
    """

    answers: float
    tokens: float
    divergences: list[Divergence]


def agreement(reference: EngineResponses, own: EngineResponses) -> Agreement:
    """Compare two engines' responses to the same prompts in the same order."""
    found: list[Divergence] = []
    equal = 0
    for uid, first, second in zip(reference.uids.tolist(), rows_of(reference), rows_of(own), strict=True):
        position = common_prefix(first[0], second[0])
        equal += position
        if position == len(first[0]) == len(second[0]):
            continue
        tokens = [int(ids[position]) if position < len(ids) else None for ids, _, _ in (first, second)]
        log_probs = [float(values[position]) if position < len(values) else None for _, values, _ in (first, second)]
        # Both responses have the same prefix here, so either one's top log-probs apply; one of them may have ended.
        best, runner_up = (first if position < len(first[0]) else second)[2][position]
        found.append(
            Divergence(uid, position, (tokens[0], tokens[1]), (log_probs[0], log_probs[1]), margin=float(best - runner_up))
        )
    longest = int(np.maximum(reference.lengths, own.lengths).sum())
    return Agreement(answers=1 - len(found) / len(reference.uids), tokens=equal / longest, divergences=found)


def rows_of(answers: EngineResponses) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """token_ids, trainer_log_probs and top_log_probs of each response."""
    return zip(*map(answers.split, (answers.token_ids, answers.trainer_log_probs, answers.top_log_probs)), strict=True)


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Number of tokens before the first difference."""
    n = min(len(first), len(second))
    different = np.flatnonzero(first[:n] != second[:n])
    return int(different[0]) if len(different) else n


def draw_z(sampled: EngineResponses) -> float:
    """Test statistic: deviation of the sampled tokens from the trainer's distribution, in standard errors.

    Problem: an engine may report correct log-probs and still sample at another temperature. Idea: given its prefix, a token's
    log-prob plus the entropy, both the trainer's, has mean 0 if it is sampled from the trainer's distribution. The sum over all
    tokens is a martingale; divided by the root of the sum of squares it is approximately standard normal. Positive: tokens are
    too likely. Valid only without top_k and top_p, which truncate the distribution.
    """
    # log p + H: the entropy is minus the expected log-prob, hence mean 0 under the trainer's distribution.
    surplus = sampled.trainer_log_probs + sampled.entropy
    scale = float(np.sqrt(np.square(surplus).sum()))
    return float(surplus.sum()) / scale if scale else 0.0


@dataclass(frozen=True, slots=True)
class Ends:
    """Statistics of how responses end.

    stopped: share that terminated. ended_by: {stop token: number of responses}. special: number of special tokens, other than
    stop tokens, within responses. wrong: {error: number of responses that end incorrectly}.
    """

    stopped: float
    ended_by: dict[int, int]
    special: int
    wrong: dict[str, int]


def ends(answers: EngineResponses, stop_token_ids: Collection[int], special_token_ids: Collection[int]) -> Ends:
    """Check how responses end. stop_token_ids: empty with ignore_eos; a stop token ends a response and is its last token."""
    wrong: Counter[str] = Counter()
    ended_by: Counter[int] = Counter()
    for ids, finished in zip(answers.split(answers.token_ids), answers.finished.tolist(), strict=True):
        is_stop = np.isin(ids, list(stop_token_ids))
        ended_by.update(ids[-1:][is_stop[-1:]].tolist())
        for what, is_so in {
            "it stopped, and not with a stop token": finished and not is_stop[-1],
            "it ends with a stop token, and did not stop": not finished and is_stop[-1],
            "it continues after a stop token": is_stop[:-1].any(),
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
    """Response lengths in tokens. quantiles: over responses, 0 is the shortest and 1 the longest."""

    mean: float
    quantiles: dict[str, float]


def length_figures(lengths: np.ndarray) -> Lengths:
    return Lengths(float(lengths.mean()), {f"{q:g}": float(np.quantile(lengths, q)) for q in LENGTH_QUANTILES})


@dataclass(frozen=True, slots=True)
class Heads:
    """Statistics of how prompts begin.

    bos: the tokenizer's BOS token, None if it has none. wanted: number of prompts that should begin with it, according to the
    chat template, or to the tokenizer for plain text. begun: prompts that begin with it. doubled: with two. lost: wanted but
    missing.
    """

    bos: str | None
    wanted: int
    begun: int
    doubled: int
    lost: int


def heads(bos: str | None, bos_id: int | None, prompts: Sequence[tuple[int, ...]], wanted: Sequence[bool]) -> Heads:
    """Count BOS tokens at the start of ``prompts`` (token ids). wanted: whether each prompt should begin with BOS."""
    begun = [ids[0] == bos_id for ids in prompts]
    return Heads(
        bos=bos,
        wanted=sum(wanted),
        begun=sum(begun),
        doubled=sum(ids[:2] == (bos_id, bos_id) for ids in prompts),
        lost=sum(wants and not begins for wants, begins in zip(wanted, begun, strict=True)),
    )
