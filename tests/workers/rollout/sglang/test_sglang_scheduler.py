"""Numbers of the trainer's tensor, brought to where SGLang has them, and read from there. No engine is started."""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from workers.rollout.sglang.sglang_client import SharedBucket
from workers.rollout.sglang.sglang_scheduler import WeightPlace, Weights, copy_inside


@given(st.data(), st.booleans(), st.integers(1, 3))
def test_a_part_of_a_part_is_read_where_it_belongs(data: st.DataObject, transposed: bool, dims: int) -> None:
    """The engine holds a slice along each dim, maybe turned round; any range of the flattened tensor is asked for."""
    whole = torch.arange(1.0, 1 + 5 * 4**dims).view(5, *[4] * dims)
    source = whole
    for dim, size in enumerate(whole.shape):
        start = data.draw(st.integers(0, size - 1))
        source = source.narrow(dim, start, data.draw(st.integers(1, size - start)))
    source = source.transpose(0, 1) if transposed else source
    start = data.draw(st.integers(0, whole.numel() - 1))
    stop = data.draw(st.integers(start + 1, whole.numel()))
    out = torch.zeros(stop - start)
    WeightPlace(source.clone(), source.storage_offset(), source.stride()).read(start, out)
    held = set(source.flatten().tolist())
    assert out.tolist() == [value if value in held else 0.0 for value in whole.flatten()[start:stop].tolist()]


def test_what_is_outside_is_left() -> None:
    out = torch.zeros(3)
    copy_inside(torch.ones(4), -9, (2,), out)
    copy_inside(torch.ones(4), 3, (2,), out)
    assert not out.any()


class Half(nn.Module):
    """As a rank's model that has the first two rows of what comes as ``all``."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(2, 3))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "all":
                self.rows.data.copy_(tensor[:2])


@pytest.fixture
def bucket() -> SharedBucket:
    return SharedBucket(0, torch.device("cpu"), torch.float32)


def test_the_memory_of_a_bucket_goes_over_once(bucket: SharedBucket) -> None:
    """And again when there is another, larger one."""
    weights, sizes = Weights(Half()), []
    for factor, other in ((1.0, 1), (2.0, 1), (3.0, 500), (4.0, 1)):
        named = [("other", torch.zeros(other)), ("all", factor * torch.arange(12.0).view(4, 3))]
        places = [(name, tuple(view.shape), view.storage_offset()) for name, view in bucket.views(named)]
        number, memory = bucket.handle()
        sizes.append(len(memory))
        weights.load(number, memory, places)
        assert torch.equal(weights.model.rows, factor * torch.arange(6.0).view(2, 3))
    assert sizes == [32, 0, 528, 0]


def test_numbers_that_a_rank_has_not_are_none(bucket: SharedBucket) -> None:
    weights = Weights(Half())
    weights.model.rows.data = torch.arange(6.0).view(2, 3)
    memory = bucket.room(12).fill_(-1.0)
    weights.read(*bucket.handle(), [("all", (4, 3), 2, 8), ("all", (4, 3), 0, 2)], 3)
    assert memory.nan_to_num(9.0).tolist() == [-1, -1, -1, 2, 3, 4, 5, 9, 9, 0, 1, -1]


def test_a_weight_without_a_place_is_named(bucket: SharedBucket) -> None:
    bucket.room(1)
    with pytest.raises(RuntimeError, match=r"model\.extra cannot be read; verify_weights=off leaves all weights unproven"):
        Weights(Half()).read(*bucket.handle(), [("model.extra", (3,), 0, 1)], 0)
