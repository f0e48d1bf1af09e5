"""Prefixes that are computed once against whole rows, each with a prefix of its own."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from tests.tiny import fsdp_config, save_tiny_model
from tests.workers.engine.megatron.cases import megatron_config
from tests.workers.engine.toy import ToyLoss, ValueLoss, distance, exact_norm, gradients, toy_batch, toy_engine
from tests.workers.forests import batch_of, conversation, forest
from tests.workers.test_prefixes import plain_shares
from workers.batch import Batch
from workers.engine.base import LossSpec
from workers.engine.fsdp.fsdp_engine import FSDPEngine
from workers.engine.hf.packed_attention import PackedRows, packed_attention
from workers.engine.micro_batch import longest_first, micro_batch
from workers.engine.shared_prefixes import SharedPrefixes, Stretch
from workers.plan import MicroBatches
from workers.prefixes import PREFIX_ENDS, Chain, chains_by_group, chains_by_tokens, prefix_ends
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


CPU = torch.device("cpu")
BOUNDS = {"float64": 1e-10, "float32": 1e-6}


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen2RMSNorm, "forward", exact_norm)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose second layer sees four tokens, by one head of keys and values."""
    layers = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 4}
    return save_tiny_model(tmp_path_factory.mktemp("window"), "qwen2", num_key_value_heads=1, max_window_layers=1, **layers)


def tree_and_rows(batch: Batch) -> tuple[Batch, Batch]:
    """The batch as engines get it from the controller, and without what they share."""
    whole = Batch(batch.lengths, batch.tokens, meta=batch.meta)
    return whole.with_rows(**{PREFIX_ENDS: prefix_ends(chains_by_group(batch))}), whole


def cuts_of(batch: Batch) -> Iterator[MicroBatches]:
    rows = range(len(batch))
    yield (tuple(rows),)
    yield (tuple(rows[::2]), (), tuple(rows[1::2]))
    yield (tuple(rows[:5]), tuple(rows[5:]))


def row_by_row(batch: Batch) -> MicroBatches:
    return tuple((row,) for row in range(len(batch)))


def outputs_of(engine: FSDPEngine, batch: Batch, plan: MicroBatches, names: set[str]) -> dict[str, Tensor]:
    """Outputs in the engine's own precision, in row order: its forward would return float32."""
    chains, found = engine.chains(batch), {}
    for chosen in filter(None, plan):
        rows = micro_batch(batch, chosen, engine.device)
        with torch.no_grad():
            results = engine._run(rows, names, shared=engine._shared(rows, chains, longest_first(batch, chosen)))
        for name, out in results.items():
            parts = out.split(rows.lengths.tolist()) if len(out) == rows.total_tokens and name != "last_value" else out.split(1)
            for row, part in zip(longest_first(batch, chosen), parts, strict=True):
                found[name, row] = part
    return {name: torch.cat([found[name, row] for row in range(len(batch))]) for name in {name for name, _ in found}}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("model", ["qwen2", "window"])
def test_random_forests_give_the_outputs_and_gradients_of_single_rows(
    group: None, models: dict[str, str], window: str, exact_norms: None, model: str, head: str, dtype: str
) -> None:
    engine = toy_engine((models | {"window": window})[model], head, dtype=dtype, model_dtype=dtype)
    loss: Any = ToyLoss() if head == "lm" else ValueLoss()
    names = {"log_probs", "entropy"} if head == "lm" else {"values"}
    if head == "value":
        nn.init.normal_(engine._model.value_head.weight)
    for seed in range(3):
        tree, rows = tree_and_rows(forest(seed, vocabulary=61 if seed else 3, dtype=getattr(torch, dtype)))
        expected, single = gradients(engine, rows, row_by_row(rows), loss), outputs_of(engine, rows, row_by_row(rows), names)
        for plan in cuts_of(tree):
            assert distance(gradients(engine, tree, plan, loss), expected) < BOUNDS[dtype]
            found = outputs_of(engine, tree, plan, names)
            assert found.keys() == single.keys() == (names if head == "lm" else {"values", "last_value"})
            for name, column in single.items():
                torch.testing.assert_close(found[name], column, rtol=0, atol=10 * BOUNDS[dtype])
    assert min(column.abs().max() for column in single.values()) > 0.1


@pytest.mark.parametrize("seed", range(30))
def test_every_token_is_computed_at_most_once(seed: int) -> None:
    batch = forest(seed, vocabulary=3)
    lengths, chains, shares = batch.lengths.tolist(), chains_by_group(batch), plain_shares(batch)
    for unit in (1, 2, 5):
        shared = SharedPrefixes.of(lengths, chains, CPU, unit)
        own = sum(length - max([shares[row][other] for other in range(row)], default=0) for row, length in enumerate(lengths))
        if shared is None:
            assert own == sum(lengths)
            continue
        n_computed = len(shared.computed)
        assert (n_computed - shared.padding, shared.padding) == (own, -own % unit)
        assert len(shared.computed.unique()) == n_computed and len(shared.places) == sum(lengths) + shared.padding
        padded = batch_of([(0, 0, 0, [0] * n, [0] * n) for n in [*lengths, *[shared.padding][: shared.padding]]])
        ids = torch.cat([batch.tokens["input_ids"], torch.full((shared.padding,), 60)])
        positions = padded.positions()
        for column in (ids, positions):
            assert torch.equal(column[shared.computed][shared.places], column)
        # The keys of a stretch are a row up to its last token, and its queries are the last of them.
        seen = shared.seen.split([stretch.seen for stretch in shared.stretches])
        for stretch, keys, own_tokens in zip(
            shared.stretches, seen, torch.arange(n_computed).split([s.length for s in shared.stretches]), strict=True
        ):
            assert torch.equal(positions[shared.computed[keys]], torch.arange(stretch.seen))
            assert torch.equal(ids[shared.computed[keys]], ids[stretch.start : stretch.start + stretch.seen])
            assert torch.equal(keys[stretch.before :], own_tokens)


def test_a_prefix_ends_a_stretch_only_where_rows_branch_off() -> None:
    """Eight conversations of four rows: their prompt, and one stretch for each."""
    rows = []
    for sample in range(8):
        rows += conversation(0, [9, 9, 9], [([sample, turn], [turn]) for turn in range(4)], parts=True)
    batch = batch_of(rows)
    shared = SharedPrefixes.of(batch.lengths.tolist(), chains_by_group(batch), CPU)
    assert shared is not None
    starts = batch.offsets[3::4].tolist()
    assert shared.stretches == (*(Stretch(start, 3, 11) for start in starts), Stretch(0, 0, 3))


@pytest.mark.parametrize("seed", range(20))
def test_groups_of_single_responses_are_laid_out_as_prompts_and_responses(seed: int) -> None:
    """Reference: each group's prompt from its first row, then what follows it in each row."""
    batch = forest(seed, vocabulary=2, turns=False)
    lengths, groups = batch.lengths.tolist(), batch.rows["group"].tolist()
    starts, prompts = batch.offsets.tolist(), batch.rows["prompt_length"].tolist()
    stretches = []
    for group in set(groups):
        rows = [row for row in range(len(batch)) if groups[row] == group]
        if len(rows) == 1:
            stretches.append((starts[rows[0]], 0, lengths[rows[0]]))
            continue
        stretches += [(starts[rows[0]], 0, prompts[rows[0]])]
        stretches += [(starts[row], prompts[row], lengths[row] - prompts[row]) for row in rows if lengths[row] > prompts[row]]
    stretches.sort(key=lambda stretch: (-stretch[1] - stretch[2], -stretch[2], stretch[0]))
    place = {
        token: i for i, token in enumerate(t for start, before, n in stretches for t in range(start + before, start + before + n))
    }
    firsts = [starts[groups.index(group)] for group in groups]
    places = [
        place[firsts[row] + i if i < prompts[row] else starts[row] + i] for row in range(len(batch)) for i in range(lengths[row])
    ]
    shared = SharedPrefixes.of(lengths, chains_by_group(batch), CPU)
    if len(set(groups)) == len(groups):
        assert shared is None
        return
    assert shared is not None
    assert [(s.start, s.before, s.length) for s in shared.stretches] == stretches
    assert shared.computed.tolist() == list(place) and shared.places.tolist() == places
    assert shared.seen.tolist() == np.concatenate([places[start : start + before + n] for start, before, n in stretches]).tolist()
