"""Estimators of pass@k, best@k and maj@k from n responses per prompt, and confidence intervals of means over prompts.

Problem: metrics of k responses are to be estimated from n >= k. Idea: average over all subsets of size k in closed form instead
of sampling subsets. Such a mean is a U-statistic (Hoeffding 1948): unbiased for k fresh responses, and without sampling error of
its own. Pure functions; the bootstrap depends on its seed alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from math import comb, isclose
from typing import Literal, NamedTuple

import numpy as np

MAX_VOTERS = 1000  # responses per prompt: numbers of subsets are floats, and C(1000, 500) is near the largest float


class Interval(NamedTuple):
    """Mean over prompts with its 95 % confidence interval. kind: method of the interval."""

    value: float
    low: float
    high: float
    kind: Literal["exact", "bootstrap"]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k responses passes if c of n do: 1 - C(n - c, k) / C(n, k).

    Chen et al. 2021, arXiv:2107.03374, eq. 1, evaluated as a product, which does not overflow.
    """
    assert 0 <= c <= n and 1 <= k <= n, (n, c, k)
    if n - c < k:  # too few failures to fill a subset
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def best_of_k(scores: Sequence[float], values: Sequence[float], k: int) -> float:
    """Expected value of the highest-scoring response out of k; ties go to the first response.

    scores, values: (n,). The response of rank i (from 0) is selected if the other k - 1 rank below it, which has probability
    C(n - 1 - i, k - 1) / C(n, k).
    """
    n = len(scores)
    assert len(values) == n and 1 <= k <= n, (n, len(values), k)
    ranked = sorted(range(n), key=lambda i: -scores[i])
    return sum(comb(n - 1 - rank, k - 1) / comb(n, k) * values[i] for rank, i in enumerate(ranked))


def maj_at_k(votes: Sequence[Hashable | None], scores: Sequence[float], k: int) -> float:
    """Expected score of the majority vote among k of n responses (self-consistency: Wang et al. 2022, arXiv:2203.11171).

    votes: final answer of each response (n,); None casts no vote. The winner is the most frequent vote; tied candidates win with
    equal probability. Its score is the mean score, among all n, of the responses with that vote; 0 if none of the k votes.
    Raises ValueError for more than MAX_VOTERS responses.
    """
    n = len(votes)
    assert len(scores) == n and 1 <= k <= n, (n, len(scores), k)
    if n > MAX_VOTERS:
        raise ValueError(f"maj@k of {n} answers to a prompt: at most {MAX_VOTERS} can be counted")
    scores_of_vote: defaultdict[Hashable, list[float]] = defaultdict(list)
    for vote, score in zip(votes, scores, strict=True):
        if vote is not None:
            scores_of_vote[vote].append(score)
    sizes = sorted(len(members) for members in scores_of_vote.values())
    wins = winning(sizes, n - sum(sizes), k)
    return sum(wins[len(members)] * sum(members) / len(members) for members in scores_of_vote.values())


def winning(sizes: Sequence[int], silent: int, k: int) -> dict[int, float]:
    """{size: probability that a given candidate with that number of voters wins} when k of all voters are sampled.

    sizes: voters of each candidate. silent: voters without a vote. A tie of t candidates counts as 1/t of a win for each.
    """
    # Candidates of equal size win with equal probability, so one computation per distinct size is enough.
    subsets = float(comb(sum(sizes) + silent, k))
    counts = Counter(sizes)
    found = {}
    for size in counts:
        others = list((counts - Counter([size])).elements())
        found[size] = sum(_won_with(most, size, others, silent, k) for most in range(1, min(size, k) + 1)) / subsets
    return found


def _won_with(most: int, size: int, others: Sequence[int], silent: int, k: int) -> float:
    """Number of subsets of size k in which the candidate has exactly ``most`` votes and no other has more; a tie of t counts 1/t.

    Dynamic program over the other candidates. ways[t, v]: number of subsets of v voters of the candidates seen so far in which t
    candidates have exactly ``most`` votes and none has more.
    """
    left = k - most
    # At most left // most other candidates can have ``most`` votes each.
    ways = np.zeros((left // most + 1, left + 1))
    ways[0, 0] = 1.0
    for other in others:
        grown = np.zeros_like(ways)
        for v in range(min(other, most - 1, left) + 1):
            grown[:, v:] += comb(other, v) * ways[:, : left + 1 - v]
        if most <= min(other, left):
            grown[1:, most:] += comb(other, most) * ways[:-1, : left + 1 - most]
        ways = grown
    # The remaining places go to voters without a vote. Row t of ways: a tie with t others, of which the candidate wins 1/(t + 1).
    rest = np.array([float(comb(silent, left - v)) for v in range(left + 1)])
    return comb(size, most) * float((ways @ rest / np.arange(1, len(ways) + 1)).sum())


def mean_with_interval(values: Sequence[float], resamples: int, seed: int) -> Interval:
    """Mean and 95 % confidence interval of ``values``, one per prompt, at least one.

    If all values are 0 or 1, the interval is the exact binomial one (Clopper and Pearson 1934), which is also valid if all are
    equal. Otherwise it spans the 2.5 % to 97.5 % quantiles of the means of ``resamples`` bootstrap samples (Efron 1979).
    """
    array = np.asarray(values, dtype=np.float64)
    if np.isin(array, (0.0, 1.0)).all():
        return Interval(float(array.mean()), *clopper_pearson(int(array.sum()), len(array)), "exact")
    n = len(array)
    # The raw stream of a BitGenerator is the same in every version of NumPy, unlike the methods of Generator.
    raw = np.random.PCG64(seed)
    means = np.sort([array[(raw.random_raw(n) % n).astype(np.int64)].mean() for _ in range(resamples)])
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(array.mean()), float(low), float(high), "bootstrap")


def clopper_pearson(c: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Exact confidence interval of a proportion after c successes in n trials (Clopper and Pearson 1934)."""
    tail = (1.0 - level) / 2.0
    low = 0.0 if c == 0 else _root(lambda p: 1.0 - binomial_cdf(c - 1, n, p) - tail)
    high = 1.0 if c == n else _root(lambda p: tail - binomial_cdf(c, n, p))
    return low, high


def binomial_cdf(c: int, n: int, p: float) -> float:
    """P(X <= c) for X ~ B(n, p), 0 < p < 1."""
    # In logarithms: the binomial coefficients of large n overflow.
    x = np.arange(c + 1)
    logs = _log_factorials(n)
    terms = logs[n] - logs[x] - logs[n - x] + x * np.log(p) + (n - x) * np.log1p(-p)
    return float(np.exp(terms).sum())


def _log_factorials(n: int) -> np.ndarray:
    """log(0!) ... log(n!), float64 (n + 1,)."""
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])


def _root(rising: Callable[[float], float], low: float = 0.0, high: float = 1.0) -> float:
    """Root of an increasing function in [low, high], by bisection."""
    while not isclose(low, high, rel_tol=1e-12, abs_tol=1e-15):
        middle = (low + high) / 2.0
        low, high = (middle, high) if rising(middle) < 0.0 else (low, middle)
    return (low + high) / 2.0
