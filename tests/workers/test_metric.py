import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.metric import Metric, Sample, join_metrics, masked_extreme, plain_numbers


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


@given(st.lists(st.lists(st.floats(-9, 9, width=32), max_size=8), min_size=1, max_size=6))
def test_quantiles_of_joined_samples_equal_those_of_all_values(parts: list[list[float]]) -> None:
    """Equal to a percentile of all values; no metric without values."""
    samples = [Sample.where(torch.tensor([*part, 99.0]), torch.tensor([1.0] * len(part) + [0.0])) for part in parts]
    found = plain_numbers(join_metrics([{"ratio": sample, "n": Metric.sum(len(sample.values))} for sample in samples]))
    whole = [value for part in parts for value in part]
    expected = {f"ratio_p{p:02d}": np.percentile(np.float32(whole), p) for p in (1, 50, 99)} if whole else {}
    assert found == pytest.approx(expected | {"n": len(whole)}, rel=1e-6, abs=1e-6)


def test_number_and_sample_do_not_join() -> None:
    with pytest.raises(AssertionError, match="cannot join"):
        join_metrics([{"ratio": Metric.sum(1.0)}, {"ratio": Sample.where(torch.ones(2), torch.ones(2))}])


def test_extreme_of_no_values_is_nan() -> None:
    nothing, something = torch.zeros(2), torch.ones(2)
    found = {name: masked_extreme(torch.tensor([3.0, 5.0]), mask, "max") for name, mask in (("a", nothing), ("b", something))}
    assert plain_numbers(found) == {"b": 5.0}
    assert plain_numbers({"a": masked_extreme(torch.ones(2), nothing, "min")}) == {}


def test_a_mean_of_nothing_is_omitted() -> None:
    zeros, ones = torch.zeros(2), torch.ones(2)
    nothing = join_metrics([{"a": Metric.token_mean(ones, zeros), "b": Metric.seq_mean(torch.ones(0))}])
    assert plain_numbers(nothing | {"c": Metric.sum(0.0), "d": Metric.token_mean(zeros, ones)}) == {"c": 0.0, "d": 0.0}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_mean_over_tokens_excludes_those_outside_the_mask(value: float) -> None:
    values, mask = torch.tensor([1.0, value, 3.0]), torch.tensor([1.0, 0.0, 1.0])
    assert Metric.token_mean(values, mask) == Metric(2.0, "mean", 2.0) == Metric.token_mean(values, mask.bool())
    assert not math.isfinite(Metric.token_mean(values, torch.ones(3)).value)
