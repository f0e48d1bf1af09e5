"""Ulysses and hybrid sharding, over four ranks: what one rank finds, and transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from tests.workers.engine.forks import fork_ranks
from tests.workers.engine.fsdp.cases import all_cuts, exported, invariance_batch, train, training_batch
from tests.workers.engine.fsdp.four_ranks import CUTS, KV_HEADS, OUTPUTS, QUICK, soak
from tests.workers.engine.fsdp.test_fsdp_engine_checkpoint import assert_same_bits
from tests.workers.engine.fsdp.test_fsdp_engine_parity import assert_equal_training
from tests.workers.engine.toy import (
    ToyLoss,
    ValueLoss,
    cut,
    distance,
    exact_norm,
    gradients,
    plain_gradients,
    plain_model,
    plain_outputs,
    toy_batch,
    toy_engine,
)
from tests.workers.forests import forest
from workers.batch import Batch
from workers.engine.hf.checkpoint import saved_tensors

FourRanks = tuple[Path, list[dict[str, Any]]]
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-6}
N_SHARES = {"ulysses 2": 2, "ulysses 4": 1, "hsdp 2x2": 4, "hsdp 2x2 ulysses 2": 2, "hsdp 4x1 ulysses 4": 1}


@pytest.fixture(scope="module")
def plain(models: dict[str, str]) -> dict[torch.dtype, dict[str, Tensor]]:
    """By transformers, one row at a time."""
    return {
        dtype: plain_gradients(plain_model(models["qwen2"], dtype), invariance_batch("token-mean", dtype)) for dtype in BOUNDS
    }


@pytest.mark.parametrize("name", QUICK)
def test_the_gradient_is_the_same(four_ranks: FourRanks, plain: dict[torch.dtype, dict[str, Tensor]], name: str) -> None:
    """Among the cuts of a batch are rows of fewer tokens than ranks, and ranks with dummy micro-batches."""
    assert_the_gradient(four_ranks[1][0]["invariance"], plain, name, torch.float64)


@pytest.mark.soak
def test_the_gradient_of_other_cuts_and_in_float32(
    models: dict[str, str], plain: dict[torch.dtype, dict[str, Tensor]], tmp_path: Path
) -> None:
    fork_ranks(soak, (str(tmp_path), models), nprocs=4)
    found = torch.load(tmp_path / "soak_0.pt", weights_only=True)
    for name in CUTS:
        assert_the_gradient(found, plain, name, torch.float32)
    for name in CUTS.keys() - set(QUICK):
        assert_the_gradient(found, plain, name, torch.float64)


def assert_the_gradient(
    found: dict[str, dict[str, Tensor]], plain: dict[torch.dtype, dict[str, Tensor]], name: str, dtype: torch.dtype
) -> None:
    cuts = all_cuts(invariance_batch("token-mean", dtype), N_SHARES[name])
    apart = {by: distance(found[f"{dtype} {name} {by}"], plain[dtype]) for by in cuts}
    assert {by: value for by, value in apart.items() if not value <= BOUNDS[dtype]} == {}
    assert len(apart) == 5


def test_a_sliding_window_and_fewer_kv_heads_than_ranks(four_ranks: FourRanks, models: dict[str, str]) -> None:
    batch = invariance_batch("token-mean", torch.float32)
    wanted = plain_gradients(plain_model(models["window"]), batch)
    for rank in four_ranks[1]:
        assert distance(rank["sliding_window"], wanted) <= 1e-6


def test_attention_over_heads_is_attention(four_ranks: FourRanks) -> None:
    """kv heads fewer than ranks, and with one and two query heads each; outputs and gradients."""
    for rank in four_ranks[1]:
        assert rank["attention"].keys() == {f"{heads} {window}" for heads in KV_HEADS for window in (None, 4)}
        assert max(rank["attention"].values()) < 1e-12


@pytest.mark.parametrize("name", ["ulysses 4", "hsdp 2x2 ulysses 2"])
def test_five_steps_are_those_of_plain_code(four_ranks: FourRanks, models: dict[str, str], name: str) -> None:
    """With layers that are recomputed. Ranks of one share tell the same loss, and one of them answers."""
    ranks = [rank["parity"][name] for rank in four_ranks[1]]
    assert [rank["is_output_rank"] for rank in ranks] == ([True, False] * 2 if N_SHARES[name] == 2 else [True, *[False] * 3])
    for rank in ranks:
        assert_same_bits(rank["weights"], ranks[0]["weights"])
        assert torch.equal(rank["metrics"]["grad_norm"], ranks[0]["metrics"]["grad_norm"])
    losses = torch.stack([rank["metrics"]["loss"] for rank in ranks])
    torch.testing.assert_close(losses.unflatten(0, (N_SHARES[name], -1)).std(1), torch.zeros(N_SHARES[name], 5).double())
    loss = losses[[rank["is_output_rank"] for rank in ranks]].sum(0)
    assert_equal_training((ranks[0]["metrics"] | {"loss": loss}, ranks[0]["weights"]), models["qwen2"])


def test_a_directory_that_copies_export(four_ranks: FourRanks) -> None:
    path, (first, *_) = four_ranks
    written = AutoModelForCausalLM.from_pretrained(path / "hf of four", dtype=torch.float32).state_dict()
    assert_same_bits(written, first["parity"]["hsdp 2x2 ulysses 2"]["weights"])


@pytest.mark.parametrize("name", ["ulysses 2", "ulysses 4"])
def test_answers(four_ranks: FourRanks, models: dict[str, str], group: None, name: str) -> None:
    """Of whole rows, by one rank of each share. Everything but log-probs and entropy is compared with one rank's."""
    found = [rank["answers"][name] for rank in four_ranks[1]]
    assert [rank for rank, answer in enumerate(found) if answer is not None] == [0, 2][: N_SHARES[name]]
    engine, model = toy_engine(models["qwen3"], optimizer=None), plain_model(models["qwen3"])
    for answer in filter(None, found):
        lengths = answer.pop("lengths").tolist()
        asked = {column: answer[column] for column in ("input_ids", "response_mask")}
        (share,), (plan,) = cut(toy_batch(lengths).with_tokens(**asked), max_tokens=80)
        alone = engine.forward(share, plan, OUTPUTS)
        assert alone is not None
        for output in OUTPUTS:
            torch.testing.assert_close(answer[output], alone.tokens[output], rtol=0, atol=1e-5)
        columns = (answer[column].split(lengths) for column in ("input_ids", "response_mask", "log_probs", "entropy"))
        for ids, mask, log_probs, entropy in zip(*columns, strict=True):
            with torch.no_grad():
                wanted = plain_outputs(model, ids, 0.7)
            for actual, expected in zip((log_probs, entropy), wanted, strict=True):
                assert actual[0] == 0.0
                torch.testing.assert_close(actual[1:], expected * mask[1:], rtol=0, atol=1e-5)


def test_fewer_rows_than_shares(four_ranks: FourRanks) -> None:
    first, _, other, _ = (rank["answers"]["ulysses 2, one row"] for rank in four_ranks[1])
    assert sorted(len(answer["lengths"]) for answer in (first, other)) == [0, 1]


def test_a_critic(four_ranks: FourRanks, models: dict[str, str], group: None) -> None:
    engine = toy_engine(models["qwen2"], "value")
    metrics = train(engine, range(3), ValueLoss())
    for rank in four_ranks[1]:
        torch.testing.assert_close(rank["critic"]["metrics"], metrics, rtol=1e-5, atol=1e-6)
        assert distance(rank["critic"]["weights"], exported(engine)) < 1e-6
    answer = four_ranks[1][0]["critic"]["answers"]
    (share,), (plan,) = cut(toy_batch([9, 30, 1, 14]), max_rows=2)
    alone = engine.forward(share, plan, {"values"})
    assert alone is not None and answer["last_value"].all()
    torch.testing.assert_close(answer["values"], alone.tokens["values"], rtol=0, atol=1e-5)
    torch.testing.assert_close(answer["last_value"], alone.rows["last_value"], rtol=0, atol=1e-5)


def test_a_loss_that_is_broken_in_one_copy_is_skipped_by_all(four_ranks: FourRanks) -> None:
    for rank in four_ranks[1]:
        assert rank["skipping"]["skipped"] == [1.0, 0.0]
        assert_same_bits(rank["skipping"]["weights"], four_ranks[1][0]["skipping"]["weights"])


@pytest.mark.parametrize("name", ["fsdp", "hsdp 2x2 ulysses 2"])
def test_two_ranks_checkpoint_on_four(
    two_ranks: FourRanks, four_ranks: FourRanks, models: dict[str, str], group: None, name: str
) -> None:
    """One rank resumes what four have saved, equal to an uninterrupted run."""
    before, (path, ranks) = two_ranks[1][0]["checkpoint"], four_ranks
    found = ranks[0]["from_two_ranks"][name]
    assert_same_bits(found["loaded"], before["saved"])
    torch.testing.assert_close(found["grad_norm"], before["metrics"][0]["grad_norm"], rtol=1e-5, atol=0)
    assert distance(found["weights"], before["weights"]) < 1e-6
    one = toy_engine(models["qwen2"])
    one.load(str(path / f"of four, {name}"))
    assert_same_bits(exported(one), found["weights"])
    unbroken = toy_engine(models["qwen2"])
    train(unbroken, range(4))
    after = train(one, range(4, 6))
    torch.testing.assert_close(after["grad_norm"], train(unbroken, range(4, 6))["grad_norm"], rtol=1e-5, atol=0)
    assert distance(exported(one), exported(unbroken)) < 1e-6


def test_copies_write_each_tensor_once_between_them(four_ranks: FourRanks) -> None:
    path = four_ranks[0] / "of four, hsdp 2x2 ulysses 2"
    files = [load_file(file) for file in sorted(path.glob("*.safetensors"))]
    whole = saved_tensors(str(path))
    assert len(files) == 4
    for name, tensor in whole.items():
        assert sum(file[name].numel() for file in files if name in file) == tensor.numel(), name
    sizes = [sum(tensor.numel() for tensor in file.values()) for file in files]
    assert max(sizes) < 0.4 * sum(tensor.numel() for tensor in whole.values()), "each writes its part"


def test_training_batches_do_not_divide() -> None:
    """By four: a row without weight pads them."""
    assert any(training_batch(step).lengths.sum() % 4 for step in range(5))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["ulysses 2", "ulysses 4"])
def test_shared_prefixes_are_split_over_ranks(
    four_ranks: FourRanks, models: dict[str, str], group: None, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    """Against one rank and one row at a time. Each rank holds its part of the tokens that are computed."""
    monkeypatch.setattr(Qwen2RMSNorm, "forward", exact_norm)
    batch, found = (
        forest(2, n_groups=4, dtype=getattr(torch, dtype)),
        [rank["prefixes"][f"{dtype} {name}"] for rank in four_ranks[1]],
    )
    whole = Batch(batch.lengths, batch.tokens, meta=batch.meta)
    rows = tuple((row,) for row in range(len(batch)))
    engine = toy_engine(models["window"], dtype=dtype, model_dtype=dtype)
    assert distance(found[0]["gradients"], gradients(engine, whole, rows, ToyLoss())) < BOUNDS[getattr(torch, dtype)]
    critic = toy_engine(models["window"], "value", dtype=dtype, model_dtype=dtype)
    torch.nn.init.constant_(critic._model.value_head.weight, 0.1)
    alone, values = engine.forward(whole, rows, {"log_probs", "entropy"}), critic.forward(whole, rows, {"values"})
    assert alone is not None and values is not None
    alone |= values
    size = int(name[-1])
    for rank in found:
        assert rank["tokens"] == [-(-tokens // size) for tokens in rank["planned"]]
        if rank["outputs"] is not None:
            mine = alone.select(rank["shares"])
            for column, expected in (mine.tokens | mine.rows).items():
                torch.testing.assert_close(rank["outputs"][column], expected, rtol=0, atol=2e-6)
    assert sum(sum(rank["planned"]) for rank in found[::size]) < 0.7 * batch.total_tokens
