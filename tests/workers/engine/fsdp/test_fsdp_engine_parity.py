"""Five optimizer steps against plain transformers and torch's AdamW."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.workers.engine.fsdp.cases import exported, train, training_batch
from tests.workers.engine.toy import ADAMW, plain_loss, plain_model, toy_engine


def plain_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay on matrices alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": ADAMW.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=ADAMW.lr, betas=ADAMW.betas, foreach=False, fused=False)


def plain_training(path: str, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(metrics, parameters): clip at 1, AdamW, weight decay on matrices alone."""
    model = plain_model(path)
    optimizer = plain_optimizer(model)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(float(plain_loss(model, training_batch(step))))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), ADAMW.clip_grad)))
        optimizer.step()
    metrics = {"loss": torch.tensor(losses, dtype=torch.float64), "grad_norm": torch.tensor(norms, dtype=torch.float64)}
    return metrics, {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_equal_training(actual: tuple[dict[str, Tensor], dict[str, Tensor]], path: str) -> None:
    """Loss, gradient norm and parameters within 1e-5."""
    metrics, weights = plain_training(path, 5)
    for name, values in metrics.items():
        torch.testing.assert_close(actual[0][name], values, rtol=1e-5, atol=1e-5)
    assert actual[0]["grad_norm"].min() > ADAMW.clip_grad, "clipping must have been at work"
    assert actual[1].keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(actual[1][name], weight, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_one_rank(group: None, models: dict[str, str], architecture: str) -> None:
    engine = toy_engine(models[architecture])
    metrics = train(engine, range(5))
    assert metrics["lr"].tolist() == [1e-4] * 5
    assert_equal_training((metrics, exported(engine)), models[architecture])


def test_two_ranks(two_ranks: tuple[Path, list[dict[str, Any]]], models: dict[str, str]) -> None:
    first, second = (found["parity"] for found in two_ranks[1])
    assert all(torch.equal(weight, second["weights"][name]) for name, weight in first["weights"].items())
    assert torch.equal(first["metrics"]["grad_norm"], second["metrics"]["grad_norm"])
    metrics = first["metrics"] | {"loss": first["metrics"]["loss"] + second["metrics"]["loss"]}
    assert_equal_training((metrics, first["weights"]), models["qwen2"])


def test_two_ranks_export(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    written = AutoModelForCausalLM.from_pretrained(two_ranks[0] / "hf", dtype=torch.float32).state_dict()
    weights = two_ranks[1][0]["parity"]["weights"]
    assert written.keys() == weights.keys()
    assert all(torch.equal(weight, written[name]) for name, weight in weights.items())
