"""Numbers of the trainer's tensor, read from wherever SGLang has them."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.rollout.sglang_scheduler import Place, copy_inside


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
    Place(source.clone(), source.storage_offset(), source.stride()).read(start, out)
    held = set(source.flatten().tolist())
    assert out.tolist() == [value if value in held else 0.0 for value in whole.flatten()[start:stop].tolist()]


def test_what_is_outside_is_left() -> None:
    out = torch.zeros(3)
    copy_inside(torch.ones(4), -9, (2,), out)
    copy_inside(torch.ones(4), 3, (2,), out)
    assert not out.any()
