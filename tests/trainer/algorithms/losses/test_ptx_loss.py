"""Pretraining texts in the policy's mini-batch: the gradient is the sum of both losses, for any split into micro-batches."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tiny import save_tiny_model
from tests.trainer.algorithms.losses.test_actor_loss import actor_loss
from tests.trainer.data.test_ptx_stream import stream
from tests.workers.engine.toy import cut, distance, gradients, one_rank, plain_model, plain_outputs, toy_batch, toy_engine
from trainer.algorithms.losses.ptx_loss import ActorAndPtxLoss
from workers.batch import Batch
from workers.metric import join_metrics

COEFFICIENT = 0.3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tiny model, and a process group of one rank."""
    folder = tmp_path_factory.mktemp("ptx")
    with one_rank(folder):
        yield save_tiny_model(folder / "model", vocab_size=300)


def answers() -> Batch:
    """Responses with loss weights. Old log-probs differ from the current ones: on-policy ratios of 1 would hide a term."""
    batch = toy_batch([30, 5, 17, 9], dtype=torch.float64)
    columns = {name: batch.tokens[name].double() for name in ("response_mask", "loss_weight")}
    return batch.with_meta({"temperature": 1.0}).with_tokens(**columns)


def loss(**actor: object) -> ActorAndPtxLoss:
    return ActorAndPtxLoss(actor_loss(clip_ratio_low=100.0, clip_ratio_high=100.0, clip_ratio_c=1e9, **actor).config)


def plain(path: str, batch: Batch, texts: Batch) -> dict[str, Tensor]:
    """Policy gradient plus COEFFICIENT times the gradient of the texts' mean loss, computed with transformers row by row."""
    model = plain_model(path, torch.float64)
    model.zero_grad()
    columns = [batch.split_rows(name) for name in ("input_ids", "response_mask", "advantages", "old_log_probs", "loss_weight")]
    for ids, mask, advantages, old, weight in zip(*columns, strict=True):
        log_probs, entropy = plain_outputs(model, ids, 1.0)
        token_loss = -advantages[1:] * (log_probs - old[1:]).exp() - 0.1 * entropy
        (token_loss * weight[1:] * mask[1:]).sum().backward()
    rows = list(zip(texts.split_rows("input_ids"), texts.split_rows("response_mask"), strict=True))
    for ids, mask in rows:
        log_probs, _ = plain_outputs(model, ids, 1.0)
        (-COEFFICIENT * (log_probs * mask[1:]).sum() / sum(mask.sum() for _, mask in rows)).backward()
    return {name: param.grad.clone() for name, param in model.named_parameters()}


def test_outputs_of_routers_are_no_outputs_of_tokens(path: str, tmp_path: Path) -> None:
    batch = stream(tmp_path, COEFFICIENT, ratio=1.0).extend(answers())
    engine = toy_engine(save_tiny_model(tmp_path / "experts", "qwen3_moe", vocab_size=300), dtype="float64")
    (share,), (plan,) = cut(batch, 1, max_tokens=500)
    metrics = engine.train_step(share, plan, loss())
    assert {"actor/ptx_loss", "actor/pg_loss"} <= metrics.keys()


def test_gradient_is_the_sum_of_both_losses_for_any_micro_batches(path: str, tmp_path: Path) -> None:
    batch, texts = answers(), stream(tmp_path, COEFFICIENT, ratio=1.0)
    mixed = texts.extend(batch)
    expected = plain(path, batch, texts.data.batch([texts.order.batch(i)[0] for i in range(texts.drawn)]))
    engine = toy_engine(path, dtype="float64")
    found = {}
    for limits in ({"max_tokens": 500}, {"max_tokens": 40}, {"max_rows": 1}):
        for n_ranks in (1, 2):
            shares, plans = cut(mixed, n_ranks, **limits)
            parts = [gradients(engine, share, plan, loss(entropy_coeff=0.1)) for share, plan in zip(shares, plans, strict=True)]
            summed = {name: sum(part[name] for part in parts) for name in parts[0]}
            found[f"{limits}, {n_ranks} ranks"] = distance(summed, expected)
    assert {name: apart for name, apart in found.items() if not apart <= 1e-10} == {}
    alone = gradients(engine, *(part[0] for part in cut(batch, max_rows=9)), actor_loss(entropy_coeff=0.1))
    assert distance(alone, expected) > 1e-3, "the texts must change the gradient"


def test_policy_metrics_are_unchanged_by_texts(path: str, tmp_path: Path) -> None:
    batch, mixed = answers(), stream(tmp_path, COEFFICIENT, ratio=1.0).extend(answers())
    engine = toy_engine(path, dtype="float64")

    def metrics_of(rows: Batch, loss_fn: object, **limits: int) -> dict[str, float]:
        (share,), (plan,) = cut(rows, **limits)
        metrics = engine.accumulate(share, plan, loss_fn)
        engine.move(grads="cpu")
        return {name: metric.value for name, metric in metrics.items() if name != "loss"}

    expected = metrics_of(batch, actor_loss(calculate_entropy=True), max_tokens=500)
    for limits in ({"max_tokens": 500}, {"max_rows": 1}):
        found = metrics_of(mixed, ActorAndPtxLoss(actor_loss(calculate_entropy=True).config), **limits)
        ptx = found.pop("actor/ptx_loss")
        assert found == pytest.approx(expected, rel=1e-9) and len(found) > 4
        log_probs = engine.forward(mixed, cut(mixed, max_rows=9)[1][0], {"log_probs"}).tokens["log_probs"]
        marked = (mixed.tokens["ptx"] * mixed.tokens["response_mask"]).bool()
        assert ptx == pytest.approx(float(-log_probs[marked].mean()), rel=1e-5)


def test_micro_batch_of_texts_only_reports_no_policy_metrics() -> None:
    rows = Batch(
        torch.tensor([2]),
        tokens={"ptx": torch.ones(2), "response_mask": torch.tensor([0.0, 1.0]), "loss_weight": torch.tensor([0.0, 0.5])},
    )
    token_loss, metrics = loss()({"log_probs": torch.tensor([0.0, -3.0])}, rows)
    assert token_loss.tolist() == [0.0, 3.0] and set(metrics) == {"actor/ptx_loss"}
    joined = join_metrics([metrics, metrics])["actor/ptx_loss"]
    assert joined.value == 3.0
