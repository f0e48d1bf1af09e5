import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.metric import Metric, join_metrics, masked_extreme


@given(st.lists(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), max_size=8), min_size=1, max_size=6))
def test_joined_parts_equal_the_whole(parts: list[list[tuple[float, bool]]]) -> None:
    def metrics(pairs: list[tuple[float, bool]]) -> dict[str, Metric]:
        values = torch.tensor([value for value, _ in pairs], dtype=torch.float64)
        mask = torch.tensor([chosen for _, chosen in pairs], dtype=torch.float64)
        return {
            "mean": Metric.token_mean(values, mask),
            "seq": Metric.seq_mean(values),
            "sum": Metric.sum((values * mask).sum()),
            "max": masked_extreme(values, mask, "max"),
            "min": masked_extreme(values, mask, "min"),
        }

    joined, whole = join_metrics(map(metrics, parts)), metrics([pair for part in parts for pair in part])
    for name, metric in whole.items():
        assert joined[name].value == pytest.approx(metric.value, abs=1e-9), name
    assert joined["mean"].count == whole["mean"].count


def test_unlike_kinds_do_not_join() -> None:
    with pytest.raises(AssertionError, match="cannot join sum with max"):
        Metric.sum(1.0).join(Metric.max(1.0))
