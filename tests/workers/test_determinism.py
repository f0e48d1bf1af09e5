"""Deterministic kernels: settings of torch, and kernels that torch reports as nondeterministic."""

import warnings

import pytest
import torch
from torch import Tensor

from workers.determinism import deterministic_kernels, make_backward_deterministic
from workers.engine.out_of_memory import RepeatableOutOfMemory, convert_out_of_memory


class State(torch.autograd.Function):
    """x -> x; its backward records torch's reaction to a nondeterministic kernel."""

    seen: list[tuple[bool, bool]]

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        State.seen.append((torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()))
        return grad


def test_settings_of_torch_are_set_and_restored() -> None:
    before = warnings.showwarning, list(warnings.filters)
    with deterministic_kernels():
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic
    assert (warnings.showwarning, list(warnings.filters)) == before


def test_nondeterministic_kernels_are_named_and_other_warnings_shown() -> None:
    with warnings.catch_warnings(record=True) as shown, deterministic_kernels() as kernels:
        for _ in range(2):
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
        warnings.warn("Flash Attention defaults to a non-deterministic algorithm. To", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert kernels == {"put_", "Flash Attention"}
    assert [str(warning.message) for warning in shown] == ["something else"]


class Full(torch.autograd.Function):
    """Finds no memory for its backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_step_that_is_repeated_after_its_backward_failed_is_not_strict() -> None:
    """Strict mode would refuse the first nondeterministic kernel of the repeated step."""
    with deterministic_kernels():
        attended = Full.apply(torch.ones(3, requires_grad=True))
        make_backward_deterministic(attended)
        with pytest.raises(RepeatableOutOfMemory), convert_out_of_memory(lambda: None):
            attended.sum().backward()
        assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_only_the_backward_of_attention_is_strict() -> None:
    """FlashAttention's backward is deterministic only if torch would refuse nondeterministic kernels."""
    State.seen = []
    x = torch.ones(2, requires_grad=True)
    with deterministic_kernels():
        attended = State.apply(State.apply(x) * 2)
        make_backward_deterministic(attended)
        State.apply(attended).sum().backward()
    assert State.seen == [(True, True), (True, False), (True, True)]
    State.seen = []
    attended = State.apply(x)
    make_backward_deterministic(attended)
    attended.sum().backward()
    assert State.seen == [(False, False)], "without the setting"
