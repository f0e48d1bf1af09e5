"""What every engine runs: rows of a batch, or a dummy that stands for none; and answers where they belong."""

import torch

from tests.workers.engine.toy import ToyLoss, toy_batch
from workers.engine.micro_batch import ForwardOutputs, micro_batch, weighted

CPU = torch.device("cpu")
LENGTHS = [5, 9, 1, 9, 3]


def test_rows_equally_long_lie_side_by_side() -> None:
    """So that they are one attention call: see PackedRows."""
    assert micro_batch(toy_batch(LENGTHS), range(5), CPU).lengths.tolist() == sorted(LENGTHS, reverse=True)


def test_no_rows_are_one_dummy_row_without_weight() -> None:
    batch = toy_batch(LENGTHS).with_rows(uid=torch.arange(5))
    dummy = micro_batch(batch, (), CPU)
    assert dummy.lengths.tolist() == [2] and dummy.tokens.keys() == batch.tokens.keys() and dummy.rows.keys() == batch.rows.keys()
    assert not any(column.any() for column in dummy.tokens.values())
    assert [column.dtype for column in dummy.tokens.values()] == [column.dtype for column in batch.tokens.values()]


def test_a_token_without_weight_takes_no_part_whatever_its_loss() -> None:
    rows = toy_batch(LENGTHS)
    nothing = torch.where(rows.tokens["loss_weight"] == 0, torch.inf, 0.0)
    outputs = {"log_probs": nothing, "entropy": torch.ones(rows.total_tokens)}
    total, metrics = weighted(ToyLoss(), outputs, rows)
    assert total.isfinite() and "ratio" in metrics


def test_answers_come_back_in_the_order_of_the_batch() -> None:
    batch = toy_batch(LENGTHS)
    collected = ForwardOutputs(batch, {"values"}, "value", 61)
    for chosen in ((3, 0), (), (1, 2, 4)):
        rows = micro_batch(collected.batch, chosen, CPU)
        if chosen:
            ends = rows.offsets[1:] - 1
            ids = rows.tokens["input_ids"].double()
            collected.put(rows, {"values": ids, "last_value": ids[ends]})
    whole = collected.batch_of_outputs()
    assert torch.equal(whole.tokens["values"], batch.tokens["input_ids"].float())
    assert torch.equal(whole.rows["last_value"], batch.tokens["input_ids"][batch.offsets[1:] - 1].float())
