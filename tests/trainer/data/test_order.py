import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.order import DataOrder, draw, permutation

sizes = st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(sizes, st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_epoch_has_each_row_once_except_less_than_a_batch(size: tuple[int, int], seed: int, epoch: int) -> None:
    n, batch_size = size
    order = DataOrder(n, batch_size, seed, shuffle=True)
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    batches = [order.batch(step) for step in steps]
    rows = [row for batch in batches for row in batch]
    assert all(len(batch) == batch_size for batch in batches)
    assert len(set(rows)) == len(rows) and set(rows) <= set(range(n)) and n - len(rows) < batch_size


def test_steps_can_be_read_in_any_order() -> None:
    def run(steps: list[int]) -> dict[int, list[int]]:
        permutation.cache_clear()
        order = DataOrder(50, 8, 3, shuffle=True)
        return {step: order.batch(step) for step in steps}

    assert run(list(range(20))) == run(list(range(19, -1, -1)))
    assert run([13])[13] == run(list(range(20)))[13]


def test_epochs_and_seeds_have_their_own_order() -> None:
    def rows(seed: int, epoch: int) -> list[int]:
        order = DataOrder(64, 64, seed, shuffle=True)
        return order.batch(epoch)

    assert len({tuple(rows(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_order_is_the_same_on_every_machine_and_numpy_version() -> None:
    """Resumed and published runs depend on these values: they must never change."""
    assert permutation(8, 1).tolist() == [2, 4, 7, 5, 0, 6, 3, 1]
    assert DataOrder(10, 5, 7, shuffle=True).batch(0) == [2, 9, 1, 6, 3]
    assert DataOrder(10, 5, 7, shuffle=True).batch(2) == [4, 3, 8, 7, 9]


def test_orders_are_uniform() -> None:
    """4,000 orders of 4 rows: each of the 24 occurs 167 times on average, standard deviation 13."""
    orders, counts = np.unique([permutation(4, seed) for seed in range(4000)], axis=0, return_counts=True)
    assert len(orders) == 24 and counts.min() > 167 - 5 * 13 and counts.max() < 167 + 5 * 13


def test_rows_without_shuffle_keep_their_order() -> None:
    order = DataOrder(7, 3, 0, shuffle=False)
    assert [order.batch(step) for step in range(4)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]


def test_notice_reports_the_excluded_rows() -> None:
    assert DataOrder(12, 4, 0, shuffle=True).notice is None
    assert "1 of 13 rows do not fill a batch of 4" in (DataOrder(13, 4, 0, shuffle=True).notice or "")
    assert "always the last" in (DataOrder(13, 4, 0, shuffle=False).notice or "")


def test_batch_larger_than_the_data_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="batch of 1024 rows cannot be filled: the data has 512"):
        DataOrder(512, 1024, 0, shuffle=True)


@given(st.integers(1, 100), st.integers(-1, 120), st.integers(0, 99), st.booleans())
def test_draw(n: int, max_samples: int, seed: int, shuffle: bool) -> None:
    rows = draw(n, max_samples, seed, shuffle)
    assert len(rows) == (n if max_samples == -1 else min(n, max_samples))
    assert rows == sorted(set(rows)) and set(rows) <= set(range(n))
    if not shuffle:
        assert rows == list(range(len(rows)))


def test_draw_depends_on_the_seed_alone() -> None:
    assert draw(1000, 10, 1, True) == draw(1000, 10, 1, True) != draw(1000, 10, 2, True)
    assert set(draw(1000, 10, 1, True)) < set(draw(1000, 20, 1, True))
