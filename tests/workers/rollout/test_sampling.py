import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from workers.rollout import sampling
from workers.rollout.sampling import BLOCK, draw, draw_from_logits, sample, stream_keys, uniforms

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """The published generator's output for this state, in Python's own integers."""
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def columns(n: int, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0) -> tuple[np.ndarray, ...]:
    return np.full(n, temperature), np.full(n, top_k, dtype=np.int64), np.full(n, top_p)


def spread(n: int) -> np.ndarray:
    """n evenly spaced uniforms: drawing with each of them counts out the distribution itself."""
    return (np.arange(n) + 0.5) / n


def test_draws_are_splitmix64_of_seed_and_position() -> None:
    seeds, counts = [0, 1, 2**62 + 12345, 7], np.array([0, 5, 3, 2**20])
    keys = stream_keys(seeds)
    golden = 0x9E3779B97F4A7C15
    expected = [
        (splitmix64((splitmix64(s) + (c + 1) * golden) & MASK) >> 12) / 2**52 for s, c in zip(seeds, counts.tolist(), strict=True)
    ]
    assert uniforms(keys, counts).tolist() == expected


def test_draws_are_uniform_and_unrelated_across_seeds_and_positions() -> None:
    keys = stream_keys(list(range(512)))
    table = np.stack([uniforms(keys, np.full(512, t)) for t in range(512)])
    assert table.min() >= 0 and table.max() < 1
    assert abs(table.mean() - 0.5) < 4 * (1 / 12 / table.size) ** 0.5
    counts, _ = np.histogram(table, bins=64, range=(0, 1))
    chi2 = ((counts - table.size / 64) ** 2 / (table.size / 64)).sum()
    assert chi2 < 63 + 5 * (2 * 63) ** 0.5
    for neighbours in (table[1:] * table[:-1], table[:, 1:] * table[:, :-1]):
        assert abs(neighbours.mean() - 0.25) < 4 * (7 / 144 / neighbours.size) ** 0.5


def test_the_largest_draw_times_the_total_is_below_it() -> None:
    largest = (2.0**52 - 1) * 2.0**-52
    totals = torch.rand(10000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 0.1
    assert bool((totals * largest < totals).all())


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, -1, 1.0), (0.6, -1, 1.0), (1.7, 5, 1.0), (1.0, -1, 0.7), (0.8, 9, 0.6), (1.0, 1, 1.0)],
)
def test_tokens_come_as_often_as_transformers_would_draw_them(temperature: float, top_k: int, top_p: float) -> None:
    n, vocabulary = 20000, 37
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(3)) * 2
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(torch.zeros(1, 1, dtype=torch.int64), logits)[0].softmax(-1)
    tokens, log_probs = sample(logits.expand(n, -1), *columns(n, temperature, top_k, top_p), spread(n))
    share = torch.bincount(tokens, minlength=vocabulary) / n
    assert (share - expected).abs().max() <= 1.5 / n + 1e-6
    assert bool((share[expected == 0] == 0).all())
    # Log-probs are of the whole vocabulary, whatever is cut.
    assert torch.allclose(log_probs, (logits[0] / temperature).log_softmax(-1)[tokens], atol=1e-6)


@pytest.mark.parametrize("vocabulary", [1, BLOCK - 1, BLOCK, 7 * BLOCK + 3])
def test_a_draw_is_where_the_whole_running_sum_passes_it(vocabulary: int) -> None:
    """Random numbers at the bounds of tokens, closer than float32 resolves."""
    n = 2000
    weights = torch.randn(n, vocabulary, generator=torch.Generator().manual_seed(5)).mul(3).exp()
    weights[:, BLOCK : 2 * BLOCK] = 0.0  # a block that holds nothing
    sums = weights.cumsum(-1, dtype=torch.float64)
    ends = sums.gather(1, torch.arange(n)[:, None] % vocabulary) / sums[:, -1:]
    for uniform in (ends * (1 - 1e-11), (ends * (1 + 1e-11)).clamp(max=1 - 2.0**-52)):
        tokens = draw(weights, uniform)
        assert torch.equal(tokens, torch.searchsorted(sums, uniform * sums[:, -1:], right=True))


@pytest.mark.parametrize("vocabulary", [1, BLOCK - 1, BLOCK, 7 * BLOCK + 3])
def test_a_draw_from_logits_is_one_from_their_softmax(vocabulary: int) -> None:
    """Also with tokens cut away; and where a token is given, its log-prob is."""
    n = 3000
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(n, vocabulary, generator=generator, dtype=torch.bfloat16) * 4 + 20
    logits[1::3, 1::2] = -torch.inf
    temperature = torch.rand(n, 1, generator=generator) + 0.5
    uniform = torch.from_numpy(spread(n))[torch.randperm(n, generator=generator), None]
    log_probs = (logits.double() / temperature).log_softmax(-1)
    tokens, found = draw_from_logits(logits, temperature, uniform)
    assert torch.equal(tokens, draw(log_probs.exp().float(), uniform))
    assert torch.allclose(found.double(), log_probs.gather(1, tokens), atol=1e-5, rtol=0)
    given = torch.arange(n)[:, None] % (vocabulary + 1) - 1
    mixed, found = draw_from_logits(logits, temperature, uniform, given)
    assert torch.equal(mixed, torch.where(given < 0, tokens, given))
    assert torch.allclose(found.double(), log_probs.gather(1, mixed), atol=1e-5, rtol=0)


def test_no_rounding_draws_what_has_no_weight() -> None:
    """Draws at the very end of a block, with the next one's beginning and this one's end cut away."""
    n, blocks = 4000, 8
    weights = torch.randn(n, blocks, BLOCK, generator=torch.Generator().manual_seed(6)).mul(5).exp()
    weights[:, :, [0, 1, -2, -1]] = 0.0
    sums = weights.sum(-1, dtype=torch.float64).cumsum(-1)
    weights = weights.view(n, -1)
    for block in range(blocks - 1):
        for nudge in (-2, -1, 0, 1, 2):
            uniform = sums[:, block : block + 1] / sums[:, -1:] * (1 + nudge * 2.0**-52)
            assert bool((weights.gather(1, draw(weights, uniform)) > 0).all())


def test_no_rounding_draws_a_last_token_without_weight() -> None:
    """Of a block that the vocabulary fills in part."""
    n, vocabulary = 4000, 2 * BLOCK + 60
    logits = torch.randn(n, vocabulary, generator=torch.Generator().manual_seed(8)) * 5
    logits[:, -2:] = -torch.inf
    for steps in (1, 2, 3):
        tokens, log_probs = draw_from_logits(
            logits, torch.ones(n, 1), torch.full((n, 1), 1 - steps * 2.0**-52, dtype=torch.float64)
        )
        assert bool((tokens < vocabulary - 2).all()) and bool(log_probs.isfinite().all())


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = torch.zeros(2, 50)
    logits[0, [7, 30, 49]] = 2.0
    logits[1, 12] = 1.0
    tokens, log_probs = sample(logits, *columns(2, temperature=0.0), spread(2))
    assert tokens.tolist() == [7, 12]
    assert torch.allclose(log_probs, logits.log_softmax(-1)[[0, 1], [7, 12]])


def test_of_equal_probabilities_top_k_and_top_p_keep_the_lowest_ids() -> None:
    logits = torch.zeros(1000, 10)
    logits[:, 0] = -5.0
    tokens, _ = sample(logits, *columns(1000, top_k=3), spread(1000))
    assert sorted(set(tokens.tolist())) == [1, 2, 3]
    tokens, _ = sample(logits, *columns(1000, top_p=0.45), spread(1000))
    assert sorted(set(tokens.tolist())) == [1, 2, 3, 4, 5]


def test_a_draw_of_zero_takes_the_first_token_that_is_kept() -> None:
    logits = torch.tensor([[-9.0, 1.0, 2.0, 0.0]])
    for top_k, top_p, first in ((2, 1.0, 1), (-1, 0.5, 2), (-1, 1.0, 0)):
        tokens, _ = sample(logits, *columns(1, top_k=top_k, top_p=top_p), np.zeros(1))
        assert tokens.tolist() == [first]


def test_a_row_does_not_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 60
    logits = torch.randn(n, 37, generator=torch.Generator().manual_seed(1)) * 3
    settings = [(1.0, -1, 1.0), (0.0, -1, 1.0), (0.5, 4, 1.0), (1.0, -1, 0.5), (2.0, 6, 0.9)]
    temperature, top_k, top_p = (np.array(column) for column in zip(*(settings[i % 5] for i in range(n)), strict=True))
    uniform = uniforms(stream_keys(list(range(n))), np.arange(n))
    tokens, log_probs = sample(logits, temperature, top_k, top_p, uniform)
    for i in range(n):
        one = slice(i, i + 1)
        alone = sample(logits[one], temperature[one], top_k[one], top_p[one], uniform[one])
        assert (alone[0].item(), alone[1].item()) == (tokens[i].item(), log_probs[i].item())
    monkeypatch.setattr(sampling, "ELEMENTS_AT_ONCE", 37 * 7)  # as a large vocabulary is: a few rows at a time
    assert all(
        torch.equal(*pair) for pair in zip(sample(logits, temperature, top_k, top_p, uniform), (tokens, log_probs), strict=True)
    )


def test_logits_that_are_not_finite_show_in_the_log_prob() -> None:
    logits = torch.zeros(2, 10)
    logits[1, 3] = float("nan")
    _, log_probs = sample(logits, *columns(2), spread(2))
    assert log_probs.isnan().tolist() == [False, True]
