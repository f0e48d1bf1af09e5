"""The auxiliary loss and the figures of a router, against transformers' own and by hand."""

from pathlib import Path

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.workers.engine.toy import one_rank
from workers.engine.hf.moe_aux_loss import LoadBalance, balance_loss, measure
from workers.metric import Metrics, join_metrics, plain_numbers


def test_the_loss_and_its_gradient_are_those_of_transformers() -> None:
    logits = [torch.randn(37, 8, generator=torch.Generator().manual_seed(layer)) for layer in range(3)]
    mine, expected = ([layer.clone().requires_grad_() for layer in logits] for _ in range(2))
    load, probabilities = measure(mine, 2)
    loss = balance_loss(load, probabilities, 37)
    wanted = load_balancing_loss_func(tuple(expected), num_experts=8, top_k=2)
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    wanted.backward()
    for layer, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(layer.grad, other.grad)


def test_by_hand(tmp_path: Path) -> None:
    """4 experts, 1 of them for each token, 2 layers, micro-batches of 1 and 3 tokens and a dummy. In the first layer all go to
    expert 0, in the second two each to experts 1 and 2."""
    chosen = [([0], [1]), ([0, 0, 0], [1, 2, 2]), ([3], [3])]
    with one_rank(tmp_path):
        balance = LoadBalance(0.5, 1, 4, torch.device("cpu"))
        added, reported = 0.0, list[Metrics]()
        for layers in chosen:
            load, probabilities = measure([20.0 * torch.eye(4)[layer] for layer in layers], 1)
            more, metrics = balance.take(load, probabilities, real=layers != ([3], [3]))
            added += float(more)
            reported.append(metrics)
        numbers = plain_numbers(join_metrics([*reported, balance.metrics()]))
    # E * sum of shares squared, the probabilities being 0 or 1: 4 * (1/4 + 1/4), then 4 * (9 + 1 + 4) / 36.
    losses = [2.0, 14 / 9]
    assert added == pytest.approx(0.5 * (losses[0] + 3 * losses[1]) / 4)
    assert numbers == {
        "moe_aux_loss": pytest.approx((losses[0] + 3 * losses[1]) / 4),
        "moe_load_max_over_mean": 4.0,
        "moe_dead_experts": 5 / 8,
    }
