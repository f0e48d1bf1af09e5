import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.rollout.kv_cache import CacheShape, KVCache

SHAPE = CacheShape(layers=2, kv_heads=2, key_dim=4, value_dim=6)


def make_cache(max_rows: int = 8, max_length: int = 320) -> KVCache:
    return KVCache(SHAPE, max_rows, max_length, torch.float64, torch.device("cpu"))


def states(length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one row in every layer: (layers, length, kv heads, D)."""
    key, value = (torch.randn(2, length, 2, dim, generator=generator, dtype=torch.float64) for dim in (4, 6))
    return key, value


def put(cache: KVCache, row: int, key: torch.Tensor, value: torch.Tensor) -> None:
    places = cache.places(np.full(key.shape[1], row), np.arange(key.shape[1]))
    for layer in range(2):
        cache.write(layer, places, key[layer], value[layer])


def held(cache: KVCache, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = (pool[:, :, row].permute(0, 1, 3, 2, 4).flatten(1, 2)[:, :length] for pool in cache.pools)
    return key, value


def test_chunks_are_few_and_not_small() -> None:
    assert [make_cache(max_length=length).chunk for length in (7, 60, 320, 1024, 4096, 32768)] == [16, 64, 64, 64, 256, 2048]


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=2, max_size=6),
    grow_to=st.integers(1, 320),
    more_rows=st.integers(0, 2),
    seed=st.integers(0, 10),
)
def test_rows_survive_growing_and_any_permutation(lengths: list[int], grow_to: int, more_rows: int, seed: int) -> None:
    cache, n, generator = make_cache(), len(lengths), torch.Generator().manual_seed(seed)
    cache.reserve(n, max(lengths), kept=0, expected_rows=n)
    rows = [states(length, generator) for length in lengths]
    for row, (key, value) in enumerate(rows):
        put(cache, row, key, value)
    cache.reserve(n + more_rows, grow_to, kept=n, expected_rows=n + more_rows)
    order = torch.randperm(n, generator=generator).numpy()
    cache.copy(order, np.arange(n), np.array(lengths)[order])
    for row, source in enumerate(order.tolist()):
        for got, wanted in zip(held(cache, row, lengths[source]), rows[source], strict=True):
            assert torch.equal(got, wanted)


def test_one_row_is_copied_to_many() -> None:
    cache = make_cache()
    cache.reserve(8, 100, kept=0, expected_rows=8)
    wanted = states(100, torch.Generator().manual_seed(0))
    put(cache, 1, *wanted)
    cache.copy(np.array([1, 1, 1, 1]), np.array([2, 3, 4, 7]), np.array([100, 100, 100, 100]))
    for row in (2, 3, 4, 7):
        assert all(torch.equal(*pair) for pair in zip(held(cache, row, 100), wanted, strict=True))


def test_memory_is_what_rows_need() -> None:
    cache = make_cache(max_rows=1000, max_length=64 * 16)
    assert cache.nbytes == 0
    cache.reserve(3, 10, kept=0, expected_rows=5)
    token = 2 * 2 * (4 + 6) * 8  # layers, heads, key and value, bytes
    assert cache.nbytes == 5 * 4 * 64 * token
    cache.reserve(5, 64 * 4 + 1, kept=3, expected_rows=5)
    assert cache.nbytes == 5 * 8 * 64 * token
    cache.drop()
    assert cache.nbytes == 0
