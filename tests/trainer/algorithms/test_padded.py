"""The padded interface against verl 0.9.1: values, gradients and metrics of verl_cases.json (made as verl_cases.py says)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.algorithms import padded, verl_cases

BATCHES, CASES = verl_cases.load()
TOLERANCE = {"rtol": 1e-6, "atol": 1e-7}


def cases(what: str) -> pytest.MarkDecorator:
    chosen = [case for case in CASES if case["what"] == what]
    assert chosen
    return pytest.mark.parametrize("case", chosen, ids=[f"{case['name']}-{case['batch']}-{n}" for n, case in enumerate(chosen)])


def close(actual: Any, expected: Any) -> None:
    given = actual.detach().double() if isinstance(actual, Tensor) else torch.tensor(actual, dtype=torch.float64)
    torch.testing.assert_close(given, torch.tensor(expected, dtype=torch.float64), **TOLERANCE)


def metrics_agree(actual: dict[str, Any], expected: dict[str, float]) -> None:
    assert expected.keys() <= actual.keys()
    for name, value in expected.items():
        torch.testing.assert_close(float(actual[name]), value, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


def advantages_of(case: dict[str, Any], mask: Tensor) -> tuple[Tensor, Tensor]:
    b, name, options = BATCHES[case["batch"]], case["name"], dict(case["options"])
    if name == "optimal_token_baseline":
        weights = b["is_weights"] if options.pop("rollout_is_weights", False) else None
        options |= {"old_log_probs": b["old_log_probs"], "sum_pi_squared": b["sum_pi_squared"], "rollout_is_weights": weights}
    if name == "gdpo":
        options["rewards"] = {key: b[key] for key in ("accuracy", "brevity")}
    return padded.advantages(
        name, b["token_rewards"], mask, b["groups"], values_BR=b["values"], baselines_B=b["baselines"], **options
    )  # fmt: skip


@cases("advantages")
def test_advantages(case: dict[str, Any]) -> None:
    mask = BATCHES[case["batch"]]["mask"]
    advantages, returns = advantages_of(case, mask)
    close(advantages[mask > 0], case["advantages"])
    close(returns[mask > 0], case["returns"])
    assert not advantages[mask == 0].any() and not returns[mask == 0].any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_mask_dtype_changes_nothing(dtype: torch.dtype) -> None:
    mask = BATCHES["ragged"]["mask"]
    for case in CASES:
        if case["what"] == "advantages" and case["batch"] == "ragged":
            close(advantages_of(case, mask.to(dtype))[0][mask > 0], case["advantages"])


@cases("policy_loss")
def test_policy_loss(case: dict[str, Any]) -> None:
    b, name = BATCHES[case["batch"]], case["name"]
    log_probs = b["log_probs"].clone().requires_grad_()
    loss, metrics = padded.policy_loss(
        name, b["old_log_probs"], log_probs, b["advantages" if name == "geo_mean" else "token_advantages"], b["mask"],
        case["mode"], is_weights_BR=b["is_weights"] if case["weighted"] else None, seed=5, **case["options"],
    )  # fmt: skip
    close(loss, case["loss"])
    metrics_agree(metrics, case["metrics"])
    loss.backward()
    assert log_probs.grad is not None
    assert not log_probs.grad[b["mask"] == 0].any()
    if "gradient" in case:
        close(log_probs.grad[b["mask"] > 0], case["gradient"])


@cases("value_loss")
def test_value_loss(case: dict[str, Any]) -> None:
    b = BATCHES[case["batch"]]
    loss, fraction = padded.value_loss(b["vpreds"], b["values"], b["returns"], b["mask"], case["name"], cliprange_value=0.5)
    close(loss, case["loss"])
    close(fraction, case["clip_fraction"])


@cases("aggregate")
def test_aggregate(case: dict[str, Any]) -> None:
    b = BATCHES[case["batch"]]
    close(padded.aggregate(b["values"], b["mask"], case["name"], norm_length=case["norm_length"]), case["loss"])


@cases("kl")
def test_kl(case: dict[str, Any]) -> None:
    b = BATCHES[case["batch"]]
    log_probs = b["log_probs"].clone().requires_grad_()
    value = padded.kl(case["name"], log_probs, b["old_log_probs"])
    close(value, case["value"])
    value.sum().backward()
    close(log_probs.grad, case["gradient"])


@cases("rollout_correction")
def test_rollout_correction(case: dict[str, Any]) -> None:
    b = BATCHES[case["batch"]]
    weights, mask, metrics = padded.rollout_correction(b["log_probs"], b["old_log_probs"], b["mask"], **case["options"])
    close(mask, case["mask"])
    metrics_agree(metrics, case["metrics"])
    if "weights" in case:
        close(weights[b["mask"] > 0], case["weights"])
