import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithms.losses.value_losses import clipped_value_loss

number = st.floats(-5, 5)


@given(number, number, number)
def test_loss_is_the_worse_of_plain_and_clipped(value: float, old: float, target: float) -> None:
    v, o, r = (torch.tensor([x], dtype=torch.float64) for x in (value, old, target))
    loss, is_clipped = clipped_value_loss(v.requires_grad_(), o, r, 0.5)
    moved = min(max(value, old - 0.5), old + 0.5)
    torch.testing.assert_close(loss, torch.tensor([0.5 * max((value - target) ** 2, (moved - target) ** 2)], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(loss.sum(), v)
    if is_clipped and abs(value - old) > 0.5:
        assert float(gradient) == 0.0
