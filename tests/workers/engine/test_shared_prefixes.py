"""Prompts that are computed once against whole rows, each with a prompt of its own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.tiny import fsdp_config
from tests.workers.engine.megatron.cases import megatron_config
from tests.workers.engine.toy import ToyLoss, ValueLoss, distance, gradients, toy_batch, toy_engine
from workers.batch import Batch
from workers.engine.base import LossSpec
from workers.engine.hf.packed_attention import PackedRows, packed_attention
from workers.engine.shared_prefixes import SharedPrefixes
from workers.plan import MicroBatches
from workers.prefixes import Chain, chains_by_tokens
from workers.roles.memory_scheduler import MemoryScheduler, ResidentModel
from workers.roles.model_role import ModelRole

LENGTHS = [9, 14, 9, 5, 12, 9, 6, 5, 7]
PROMPTS = [5, 5, 5, 5, 6, 1, 6, 3, 0]
GROUPS = [0, 0, 0, 0, 1, 2, 1, 3, 4]
"""Row 3 is its prompt alone; rows 5 and 7 and 8 share with no row."""
CHAINS: list[Chain] = [((group, prompt),) if prompt else () for group, prompt in zip(GROUPS, PROMPTS, strict=True)]


def grouped(dtype: torch.dtype = torch.float64) -> Batch:
    """Rows of a group begin with its first row's tokens."""
    batch = toy_batch(LENGTHS, dtype=dtype)
    rows = [ids.clone() for ids in batch.split_rows("input_ids")]
    for row, group in enumerate(GROUPS):
        rows[row][: PROMPTS[row]] = rows[GROUPS.index(group)][: PROMPTS[row]]
    return batch.with_tokens(input_ids=torch.cat(rows)).with_rows(prompt_length=torch.tensor(PROMPTS))


def both(batch: Batch) -> tuple[Batch, Batch]:
    return batch, Batch(batch.lengths, batch.tokens, meta=batch.meta)


ROUNDING = 2e-7
"""transformers takes norms in float32 even in float64: what attention rounds otherwise shows there."""
ONE_CUT: MicroBatches = (tuple(range(len(LENGTHS))),)
SEVERAL: MicroBatches = ((2, 0, 5), (), (1, 3, 4, 6), (7, 8))


def test_each_token_finds_its_own_among_those_that_are_computed() -> None:
    batch = grouped()
    shared = SharedPrefixes.of(LENGTHS, CHAINS, torch.device("cpu"))
    assert shared is not None
    ids, positions = batch.tokens["input_ids"], batch.positions()
    assert len(shared.computed) == sum(LENGTHS) - 3 * 5 - 6
    for column in (ids, positions):
        assert torch.equal(column[shared.computed][shared.places], column)
    seen, queries = shared.seen.split([s.seen for s in shared.stretches]), [s.length for s in shared.stretches]
    assert [positions[shared.computed[keys]].tolist() for keys in seen] == [list(range(len(keys))) for keys in seen]
    own = torch.arange(len(shared.computed)).split(queries)
    assert all(torch.equal(keys[len(keys) - len(mine) :], mine) for keys, mine in zip(seen, own, strict=True))


def test_nothing_to_share() -> None:
    assert SharedPrefixes.of([3, 4], [((0, 1),), ((1, 2),)], torch.device("cpu")) is None
    assert chains_by_tokens(toy_batch([3, 4])) is None
    other_tokens = toy_batch([3, 3]).with_rows(prompt_length=torch.tensor([2, 2]))
    chains = chains_by_tokens(other_tokens.with_tokens(input_ids=torch.tensor([5, 6, 1, 5, 7, 1])))
    assert chains == [((0, 2),), ((1, 2),)]


def test_stretches_that_are_alike_are_one_attention_call() -> None:
    shared = SharedPrefixes.of(LENGTHS, CHAINS, torch.device("cpu"))
    assert shared is not None
    reported = [(stretch.length, stretch.seen) for stretch in shared.stretches]
    assert reported == [(9, 14), (6, 12), (9, 9), (4, 9), (4, 9), (7, 7), (6, 6), (5, 5), (5, 5)]
    assert PackedRows.of(LENGTHS, torch.device("cpu"), shared=shared).blocks[3:] == ((2, 4, 9), (1, 7, 7), (1, 6, 6), (2, 5, 5))


@pytest.mark.parametrize("plan", [ONE_CUT, SEVERAL])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_the_same_answers_as_whole_rows(group: None, models: dict[str, str], head: str, plan: MicroBatches) -> None:
    engine = toy_engine(models["qwen2"], head, dtype="float64", model_dtype="float64", optimizer=None)
    outputs = {"log_probs", "entropy"} if head == "lm" else {"values"}
    found, whole = (engine.forward(batch, plan, outputs) for batch in both(grouped()))
    assert found is not None and whole is not None
    for name, column in (whole.tokens | whole.rows).items():
        torch.testing.assert_close((found.tokens | found.rows)[name], column, rtol=1e-6, atol=1e-7)
        assert column.abs().max() > 0.1 or head == "value"


@pytest.mark.parametrize("model", ["qwen2", "llama"])
@pytest.mark.parametrize("changes", [{}, {"enable_gradient_checkpointing": True}])
def test_the_same_gradients_as_whole_rows(group: None, models: dict[str, str], model: str, changes: dict[str, Any]) -> None:
    engine = toy_engine(models[model], dtype="float64", model_dtype="float64", **changes)
    for plan in (ONE_CUT, SEVERAL):
        found, whole = (gradients(engine, batch, plan, ToyLoss()) for batch in both(grouped()))
        assert distance(found, whole) < ROUNDING


def test_the_same_gradients_of_a_critic(group: None, models: dict[str, str]) -> None:
    engine = toy_engine(models["qwen2"], "value", dtype="float64", model_dtype="float64")
    torch.nn.init.normal_(engine._model.value_head.weight)
    found, whole = (gradients(engine, batch, ONE_CUT, ValueLoss()) for batch in both(grouped()))
    assert distance(found, whole) < ROUNDING


def test_a_prompt_goes_through_the_layers_once(group: None, models: dict[str, str]) -> None:
    engine, tokens = toy_engine(models["qwen2"]), []
    engine._model.layers[0].register_forward_pre_hook(lambda layer, args: tokens.append(args[0].shape[1]))
    for batch in both(grouped(torch.float32)):
        engine.forward(batch, ONE_CUT, {"log_probs"})
        gradients(engine, batch, SEVERAL, ToyLoss())
    whole = [9 + 9 + 9, 2, 14 + 5 + 12 + 6, 5 + 7]
    assert tokens == [sum(LENGTHS) - 3 * 5 - 6, whole[0] - 5, 2, whole[2] - 5 - 6, 12, sum(LENGTHS), *whole]


def test_megatron_takes_whole_rows(group: None, models: dict[str, str]) -> None:
    spec = toy_engine(models["qwen2"]).spec
    assert spec.shares_prefixes and replace(spec, sharding=fsdp_config(ulysses_sequence_parallel_size=2)).shares_prefixes
    assert not replace(spec, sharding=megatron_config()).shares_prefixes


def test_work_that_is_spared_is_not_counted(group: None, models: dict[str, str]) -> None:
    engine, batch = toy_engine(models["qwen2"]), grouped(torch.float32)
    memory_scheduler = MemoryScheduler()
    memory_scheduler.add_model("actor", ResidentModel(engine, False, False))
    role = ModelRole("actor", engine, LossSpec("tests.workers.rollout.vllm_workers:toy_loss", None), memory_scheduler)
    flops = [role.train_step(part, SEVERAL)["flops"].value for part in both(batch)]
    assert flops[1] == engine.flops(LENGTHS, backward=True)
    assert flops[0] == pytest.approx(flops[1] - engine.flops([5, 5, 6], backward=True), rel=1e-12)


def plain(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """The last queries of a row, (T, heads, D), and all its keys."""
    behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    seen = (behind >= 0) & (behind < (window or len(k)))
    with sdpa_kernel(SDPBackend.MATH):
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 0.3
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v.repeat_interleave(2, 1))


@pytest.mark.parametrize("window", [None, 4, 7])
def test_attention_over_a_shared_prompt_and_windows(window: int | None) -> None:
    shared = SharedPrefixes.of(LENGTHS, CHAINS, torch.device("cpu"))
    assert shared is not None
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(len(shared.computed), heads, 8, generator=draw, dtype=torch.float64) for heads in (4, 2, 2))
    rows = PackedRows.of(LENGTHS, q.device, shared=shared)
    states = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = packed_attention(torch.nn.Module(), *states, None, packed_rows=rows, scaling=0.3, sliding_window=window)[0][0]
    whole_q, whole_k, whole_v = (rows.whole(x).split(LENGTHS) for x in (q, k, v))
    expected = torch.cat([plain(*row, window) for row in zip(whole_q, whole_k, whole_v, strict=True)])
    torch.testing.assert_close(rows.whole(out), expected, rtol=1e-10, atol=1e-12)
