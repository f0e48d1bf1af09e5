import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.batch import Batch

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
