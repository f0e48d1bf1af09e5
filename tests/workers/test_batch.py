from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

import workers.batch
from workers.batch import Batch, counts_in

lengths = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def numbered(sizes: list[int]) -> Batch:
    """Every token encodes its row and position, so that a misplaced one shows."""
    total = sum(sizes)
    return Batch(
        lengths=torch.tensor(sizes),
        tokens={
            "input_ids": torch.tensor([100 * row + t for row, n in enumerate(sizes) for t in range(n)], dtype=torch.int64),
            "log_probs": torch.arange(total, dtype=torch.float32),
        },
        rows={"uid": torch.arange(len(sizes))},
        objects={"text": [str(row) for row in range(len(sizes))]},
        meta={"step": 1},
    )


def as_lists(batch: Batch) -> list[tuple]:
    return [
        (ids.tolist(), log_probs.tolist(), uid, text)
        for ids, log_probs, uid, text in zip(
            batch.split_rows("input_ids"),
            batch.split_rows("log_probs"),
            batch.rows["uid"].tolist(),
            batch.objects["text"],
            strict=True,
        )
    ]


def test_select_from_a_micro_batch_on_a_gpu() -> None:
    """Whose lengths are on the CPU; PPO-ptx selects its responses. The device meta stands for it."""
    devices: list[set[torch.device]] = []

    class Indexed(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.index_select:
                devices.append({args[0].device, args[2].device})
            return func(*args, **(kwargs or {}))

    column, row = torch.zeros(5, device="meta"), torch.zeros(2, device="meta")
    with Indexed():
        selected = Batch(torch.tensor([3, 2]), {"log_probs": column}, {"group": row}).select(torch.tensor([1]))
    assert selected.lengths.tolist() == [2] and devices == [{torch.device("meta")}] * 2


@given(lengths, st.data())
def test_select_takes_rows_in_the_requested_order(sizes: list[int], data: st.DataObject) -> None:
    batch = numbered(sizes)
    wanted = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=15))
    rows = as_lists(batch)
    assert as_lists(batch.select(wanted)) == [rows[i] for i in wanted]


@given(lengths, st.integers(1, 5))
def test_chunk_then_concat_is_the_batch(sizes: list[int], n: int) -> None:
    batch = numbered(sizes)
    parts = batch.chunk(n)
    assert len(parts) == n and max(map(len, parts)) - min(map(len, parts)) <= 1
    assert as_lists(Batch.concat(parts)) == as_lists(batch)


KINDS = (torch.int64, torch.float64, torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.bool)


def test_long_and_short_rows_are_gathered_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of copying, from parts with a column of each kind, one with two values per token, and empty rows and parts."""

    def part(sizes: list[int], seed: int) -> Batch:
        total, generator = sum(sizes), torch.Generator().manual_seed(seed)
        tokens = {str(kind): torch.randint(0, 2, (total,), generator=generator).to(kind) for kind in KINDS}
        tokens["pairs"] = torch.rand(total, 2, generator=generator)
        tokens["trained"] = torch.rand(total, generator=generator).requires_grad_()
        return Batch(torch.tensor(sizes, dtype=torch.int64), tokens, {"uid": torch.arange(len(sizes)) + 100 * seed})

    parts = [part([300, 0, 170], 0), part([], 1), part([1, 999, 200, 0], 2)]
    order = torch.tensor([6, 4, 0, 4, 1, 2])
    found = Batch.concat(parts, order)
    for forced in (0, 10**9):
        monkeypatch.setattr(workers.batch, "LONG_ROW", forced)
        again, selected = Batch.concat(parts, order), Batch.concat(parts).select(order)
        for one in (again, selected):
            assert [*one.tokens] == [*found.tokens] and torch.equal(one.lengths, found.lengths)
            assert all(torch.equal(one.tokens[name], column) for name, column in found.tokens.items())
            assert one.rows["uid"].tolist() == [203, 201, 0, 201, 1, 2]
    rows = [row for one in parts for row in one.split_rows("pairs")]
    assert torch.equal(found.tokens["pairs"], torch.cat([rows[i] for i in order.tolist()]))
    assert found.tokens["trained"].requires_grad


def test_tokens_of_a_mask_are_counted_by_row() -> None:
    mask = torch.tensor([0.0, 0.5, -1.0, 0.0, 2.0])
    assert counts_in(mask, torch.tensor([3, 0, 2])).tolist() == [2, 0, 1]


@given(lengths)
def test_segments_and_positions_name_each_token(sizes: list[int]) -> None:
    batch = numbered(sizes)
    assert torch.equal(batch.segment_ids() * 100 + batch.positions(), batch.tokens["input_ids"])
    assert batch.offsets.tolist() == [sum(sizes[:i]) for i in range(len(sizes) + 1)]


def test_union_adds_columns_and_refuses_other_rows() -> None:
    batch = numbered([2, 3])
    united = batch | Batch(lengths=batch.lengths, tokens={"values": torch.zeros(5), "log_probs": torch.ones(5)}, meta={"step": 2})
    assert united.tokens.keys() == {"input_ids", "log_probs", "values"}
    assert united.tokens["log_probs"].sum() == 5 and united.meta == {"step": 2}
    with pytest.raises(ValueError, match="other lengths"):
        batch.union(numbered([3, 2]))


def test_concat_refuses_unequal_columns() -> None:
    with pytest.raises(ValueError, match="unequal tokens"):
        Batch.concat([numbered([1]), numbered([1]).only(tokens=["input_ids"], rows=["uid"])])


def test_column_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"tokens\['input_ids'\] has 4 entries, the batch 5 tokens"):
        Batch(lengths=torch.tensor([2, 3]), tokens={"input_ids": torch.zeros(4)})
