import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithms.weights import token_weights

rows = st.lists(st.lists(st.tuples(st.floats(-3, 3), st.booleans()), min_size=1, max_size=8), min_size=1, max_size=6)


@pytest.mark.parametrize(
    "mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
@given(rows)
def test_weighted_sum_is_the_aggregation(mode: str, batch: list[list[tuple[float, bool]]]) -> None:
    loss = torch.tensor([value for row in batch for value, _ in row], dtype=torch.float64)
    mask = torch.tensor([float(chosen) for row in batch for _, chosen in row])
    chosen = [[value for value, is_chosen in row if is_chosen] for row in batch]
    full = [row for row in chosen if row] or [[0.0]]
    expected = {
        "token-mean": sum(map(sum, full)) / sum(map(len, full)),
        "token-sum": sum(map(sum, full)),
        "seq-mean-token-sum": sum(map(sum, full)) / len(full),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in full) / len(full),
        "seq-mean-token-sum-norm": sum(sum(row) / 16 for row in full) / len(full),
    }[mode]
    weights = token_weights(mode, mask, torch.tensor([len(row) for row in batch]), norm_length=16)
    assert float((weights * loss).sum()) == pytest.approx(expected, abs=1e-9)
    assert not weights[mask == 0].any()
