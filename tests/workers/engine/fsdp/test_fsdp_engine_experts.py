"""A mixture of experts on FSDP, on one rank and on two, against transformers one row at a time.

Which experts a token goes to is no continuous function: the tiny model's router must be sure, by far more than rounding.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.workers.engine.fsdp.cases import all_cuts, exported, invariance_batch, train, training_batch
from tests.workers.engine.fsdp.test_fsdp_engine_checkpoint import assert_same_bits
from tests.workers.engine.toy import (
    ToyLoss,
    ValueLoss,
    cut,
    distance,
    gradients,
    plain_gradients,
    plain_model,
    toy_engine,
)
from workers.metric import plain_numbers

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-6}
DTYPES = [pytest.param(dtype, id=str(dtype)) for dtype in BOUNDS]
TwoRanks = tuple[Path, list[dict[str, Any]]]


def plain_loop(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Expert by expert, in plain Python."""
    model = plain_model(path, dtype)
    assert isinstance(model, PreTrainedModel)
    model.set_experts_implementation("eager")
    return model


@pytest.fixture(scope="module")
def plain(models: dict[str, str]) -> dict[torch.dtype, dict[str, Tensor]]:
    return {
        dtype: plain_gradients(plain_loop(models["experts"], dtype), invariance_batch("token-mean", dtype)) for dtype in BOUNDS
    }


@torch.no_grad()
def test_the_router_of_these_tests_is_sure(models: dict[str, str]) -> None:
    model = plain_loop(models["experts"], torch.float64)
    margins = []
    for row in invariance_batch("token-mean", torch.float64).split_rows("input_ids"):
        for logits in model(input_ids=row[None], output_router_logits=True).router_logits:
            best = logits.topk(3, dim=-1).values
            margins.append(float((best[:, 1] - best[:, 2]).min()))
    assert min(margins) > 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_on_one_rank(
    group: None, models: dict[str, str], plain: dict[torch.dtype, dict[str, Tensor]], dtype: torch.dtype
) -> None:
    """Micro-batches of a row or two leave most experts without a token."""
    engine = toy_engine(models["experts"], dtype=str(dtype).removeprefix("torch."))
    apart = {
        name: distance(gradients(engine, shares[0], plans[0], ToyLoss()), plain[dtype])
        for name, (shares, plans) in all_cuts(invariance_batch("token-mean", dtype), 1).items()
    }
    assert {case: value for case, value in apart.items() if not value <= BOUNDS[dtype]} == {}
    assert len(apart) == 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_on_two_ranks(two_ranks: TwoRanks, plain: dict[torch.dtype, dict[str, Tensor]], dtype: torch.dtype) -> None:
    found = two_ranks[1][0]["experts"]
    cuts = all_cuts(invariance_batch("token-mean", dtype), 2)
    apart = {name: distance(found[f"{dtype} {name}"], plain[dtype]) for name in cuts}
    assert {case: value for case, value in apart.items() if not value <= BOUNDS[dtype]} == {}


@pytest.mark.parametrize("recompute", [False, True])
def test_the_auxiliary_loss_is_that_of_each_micro_batch_by_its_share_of_tokens(
    group: None, models: dict[str, str], recompute: bool
) -> None:
    """Also where layers are recomputed. With a coefficient of 0 nothing is added."""
    engine = toy_engine(models["experts"], router_aux_loss_coef=0.5, enable_gradient_checkpointing=recompute)
    batch = training_batch(0)
    (share,), (plan,) = cut(batch, 1, max_tokens=80)
    assert len(plan) > 1
    model = plain_loop(models["experts"], torch.float32)
    wanted, whole = plain_gradients(model, batch), 0.0
    rows = share.split_rows("input_ids")
    for chosen in plan:
        ids = torch.cat([rows[i] for i in chosen])
        # A call of transformers' own is over rows of one length: one call a row, and their logits joined.
        logits = [model.model(input_ids=rows[i][None], output_router_logits=True).router_logits for i in chosen]
        joined = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
        model.zero_grad()
        loss = len(ids) / batch.total_tokens * load_balancing_loss_func(joined, 8, 2)
        (0.5 * loss).backward()
        whole += float(loss.detach())
        wanted = {
            name: wanted[name] if param.grad is None else wanted[name] + param.grad for name, param in model.named_parameters()
        }
    assert distance(gradients(engine, share, plan, ToyLoss()), wanted) <= 1e-6
    reported = plain_numbers(engine.accumulate(share, plan, ToyLoss()))
    engine.move(grads="cpu")
    assert reported["moe_aux_loss"] == pytest.approx(whole, rel=1e-6)
    assert 1.0 <= reported["moe_load_max_over_mean"] <= 4.0 and 0.0 <= reported["moe_dead_experts"] < 1.0
    off = toy_engine(models["experts"], enable_gradient_checkpointing=recompute)
    assert distance(gradients(off, share, plan, ToyLoss()), plain_gradients(model, batch)) <= 1e-6
    assert plain_numbers(off.accumulate(share, plan, ToyLoss()))["moe_aux_loss"] == pytest.approx(whole, rel=1e-6)


def test_a_critic_is_balanced_too(group: None, models: dict[str, str]) -> None:
    (share,), (plan,) = cut(training_batch(0), 1, max_tokens=80)
    plain, balanced = (toy_engine(models["experts"], "value", router_aux_loss_coef=coefficient) for coefficient in (0.0, 0.5))
    router = "model.layers.0.mlp.gate.weight"
    assert float(gradients(plain, share, plan, ValueLoss())[router].norm()) == 0.0, "its head starts at zero"
    assert float(gradients(balanced, share, plan, ValueLoss())[router].norm()) > 0.0


def test_tokens_cut_over_ranks_are_balanced_as_one(group: None, two_ranks: TwoRanks, models: dict[str, str]) -> None:
    engine = toy_engine(models["experts"], router_aux_loss_coef=0.5)
    (share,), (plan,) = cut(training_batch(0), 1, max_tokens=80)
    wanted = gradients(engine, share, plan, ToyLoss())
    reported = {
        name: value for name, value in plain_numbers(engine.accumulate(share, plan, ToyLoss())).items() if name.startswith("moe_")
    }
    for rank in two_ranks[1]:
        assert distance(rank["experts"]["ulysses"], wanted) <= 1e-6
        metrics = rank["experts"]["ulysses metrics"]
        assert {name: metrics[name] for name in reported} == pytest.approx(reported, rel=1e-6)


def test_the_load_is_that_of_all_ranks(group: None, two_ranks: TwoRanks, models: dict[str, str]) -> None:
    engine = toy_engine(models["experts"])
    (share,), (plan,) = cut(invariance_batch("token-mean", torch.float32), 1, max_tokens=400)
    reported = plain_numbers(engine.accumulate(share, plan, ToyLoss()))
    engine.move(grads="cpu")
    for rank in two_ranks[1]:
        for name in ("moe_load_max_over_mean", "moe_dead_experts"):
            assert rank["experts"]["balance"][name] == reported[name]


def test_an_empty_micro_batch_chooses_no_expert(group: None, models: dict[str, str]) -> None:
    """A rank runs as many as the others, and a dummy row where it has none left."""
    engine = toy_engine(models["experts"], router_aux_loss_coef=0.5)
    (share,), (plan,) = cut(training_batch(0), 1, max_tokens=80)
    wanted, metrics = gradients(engine, share, plan, ToyLoss()), plain_numbers(engine.accumulate(share, plan, ToyLoss()))
    engine.move(grads="cpu")
    longer = (*plan, ())
    assert distance(gradients(engine, share, longer, ToyLoss()), wanted) <= 1e-6
    assert plain_numbers(engine.accumulate(share, longer, ToyLoss())) == metrics


def test_a_dense_model_has_nothing_to_balance(group: None, models: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0.01: .* \(qwen2\) has no routers to balance; leave it at 0"):
        toy_engine(models["qwen2"], router_aux_loss_coef=0.01)


def test_a_file_has_each_expert_by_itself(group: None, models: dict[str, str], tmp_path: Path) -> None:
    engine = toy_engine(models["experts"])
    train(engine, range(2))
    engine.export_hf(str(tmp_path))
    files = load_file(tmp_path / "model.safetensors")
    assert files.keys() == load_file(Path(models["experts"]) / "model.safetensors").keys()
    assert files["model.layers.1.mlp.experts.7.up_proj.weight"].shape == (32, 32)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_bits(dict(read.named_parameters()), exported(engine))


def test_two_ranks_continue_as_one(group: None, two_ranks: TwoRanks, models: dict[str, str]) -> None:
    path, (found, _) = two_ranks
    engine = toy_engine(models["experts"])
    engine.load(str(path / "experts"))
    assert_same_bits(exported(engine), found["experts"]["saved"])
    torch.testing.assert_close(
        train(engine, range(2, 4))["grad_norm"], found["experts"]["metrics"]["grad_norm"], rtol=1e-5, atol=0
    )


def test_resumed_bitwise(group: None, models: dict[str, str], tmp_path: Path) -> None:
    engine = toy_engine(models["experts"])
    train(engine, range(1))
    engine.save(str(tmp_path / "saved")).result()
    train(engine, range(1, 3))
    again = toy_engine(models["experts"])
    again.load(str(tmp_path / "saved"))
    train(again, range(1, 3))
    assert_same_bits(exported(again), exported(engine))


def test_flops_are_those_of_the_experts_that_a_token_passes(group: None, models: dict[str, str]) -> None:
    """H 32, 2 layers, 4 heads of 8 with 2 of keys and values, 2 of 8 experts of 32, vocabulary 61."""
    attention = 32 * 32 + 2 * 32 * 16 + 32 * 32
    layer = attention + 2 * 8 + 8 * 32 + 2 * 3 * 32 * 32 + 2 * 32
    scores = 2 * 2 * 4 * 8 * 17**2
    assert toy_engine(models["experts"]).flops([17], backward=False) == 2 * 17 * (2 * layer + 32 + 61 * 32) + scores
