"""Copies of tensors of a GPU, through pinned buffers and streams of several threads."""

import pytest
import torch

from workers.engine import staging
from workers.engine.staging import copied

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_copies_of_a_device_are_what_its_work_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is under way when the copying begins, and changes all of it again right after."""
    monkeypatch.setattr(staging, "PIECE", 2**20)
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(device)
    weights = {f"w{i}": torch.randn(1000, 1001, device=device) for i in range(20)} | {"steps": torch.tensor(3)}
    product = torch.randn(4096, 4096, device=device)
    for _ in range(20):
        product = product @ product / 64
    for i in range(20):
        weights[f"w{i}"].add_(product[0, 0].nan_to_num() * 0 + i)
    copies = copied(weights)
    expected = {name: weight.cpu() for name, weight in weights.items()}
    for i in range(20):
        weights[f"w{i}"].zero_()
    assert all(copy.device.type == "cpu" and torch.equal(copy, expected[name]) for name, copy in copies.items())
