"""The stream of texts: how many rows go along with a mini-batch, with which weights, and where it goes on."""

import random
from pathlib import Path

import pytest
import torch

from data_preprocess.writer import sft_row, write
from tests.trainer.data.tokenizers import byte_tokenizer, data_config
from tests.workers.engine.toy import toy_batch
from trainer.data.ptx import PtxStream, ptx_stream
from workers.batch import Batch
from workers.engine.shared_prompts import Prompts
from workers.plan import Limits, SharedRows

TOKENS = [12, 13, 17, 15, 14]  # of the rows below, with <user>, <a> and <eos>


def stream(folder: Path, coefficient: float, *, ratio: float, shuffle: bool = True, **changes: object) -> PtxStream:
    pairs = [("a", "b"), ("aa", "b"), ("a", "bcdefg"), ("ab", "cde"), ("ab", "cd")]
    file = write([sft_row(*pair) for pair in pairs], str(folder), "texts")
    data = data_config(ptx_files=[str(file)], shuffle=shuffle, **changes)
    found = ptx_stream(data, coefficient, ratio, byte_tokenizer(), seed=1)
    assert found is not None
    return found


def mini_batch() -> Batch:
    """41 tokens, with columns of a mini-batch, one of them wide."""
    batch = toy_batch([20, 15, 6])
    wide = torch.randn(41, 7)
    return batch.with_tokens(wide=wide).with_rows(uid=torch.tensor([5, 5, 9]))


def test_without_files_there_is_none() -> None:
    assert ptx_stream(data_config(), 0.1, 1.0, byte_tokenizer(), seed=1) is None


@pytest.mark.parametrize(("ratio", "rows"), [(0.01, 1), (0.5, 1), (0.62, 2), (1.0, 2), (1.05, 3), (2.1, 6)])
def test_rows_are_added_up_to_the_budget_and_one_at_least(tmp_path: Path, ratio: float, rows: int) -> None:
    texts = stream(tmp_path, 1.0, ratio=ratio, shuffle=False)
    assert [len(texts.data.batch([i]).tokens["input_ids"]) for i in range(5)] == TOKENS
    mixed = texts.beside(mini_batch())
    assert mixed.lengths.tolist() == [20, 15, 6, *(TOKENS * 2)[:rows]] and texts.drawn == rows
    following = texts.beside(mini_batch())
    assert following.lengths.tolist()[3] == (TOKENS * 2)[rows]


def test_what_the_mini_batch_was_stays_and_the_rest_is_marked(tmp_path: Path) -> None:
    batch = mini_batch()
    mixed = stream(tmp_path, 0.3, ratio=1.0).beside(batch)
    ours, texts = mixed.select(range(3)), mixed.select(range(3, len(mixed)))
    for name, column in batch.tokens.items():
        assert torch.equal(ours.tokens[name].to(column.dtype), column), name
    assert not ours.tokens["ptx"].any() and texts.tokens["ptx"].all() and mixed.meta == batch.meta
    mask, weight = texts.tokens["response_mask"], texts.tokens["loss_weight"]
    assert float(weight.sum()) == pytest.approx(0.3) and weight[mask.bool()].unique().numel() == 1 and not weight[mask == 0].any()
    assert 0 < mask.sum() < texts.total_tokens and not texts.tokens["wide"].any() and not texts.tokens["advantages"].any()


def test_no_micro_batch_has_more_tokens_than_the_cap_whatever_the_data_rows_are(tmp_path: Path) -> None:
    """Each data row has its own prompt; a text that counted as one of its answers would count its prompt as computed already."""
    texts, draw = stream(tmp_path, 0.5, ratio=1.0), random.Random(1)
    for _ in range(3000):
        groups = [(uid, draw.randint(1, 40), draw.randint(1, 3)) for uid in draw.sample(range(4), draw.randint(1, 3))]
        rows = [(uid, prompt, prompt + draw.randint(1, 40)) for uid, prompt, n in groups for _ in range(n)]
        uid, prompts, lengths = (torch.tensor(column) for column in zip(*rows, strict=True))
        ids = torch.repeat_interleave(1000 + uid, lengths)
        columns = {"input_ids": ids, "response_mask": torch.ones(len(ids)), "loss_weight": torch.ones(len(ids))}
        mixed = texts.beside(Batch(lengths, columns, {"uid": uid, "prompt_length": prompts}))
        lengths_of, cap = mixed.lengths.tolist(), int(mixed.lengths.max()) + draw.randint(0, 60)
        planned = SharedRows(lengths_of, mixed.rows["prompt_length"].tolist(), mixed.rows["uid"].tolist())
        computed = Prompts.of(mixed)
        assert computed is not None
        plan = planned.plan(draw.randint(1, 2), Limits(max_tokens=cap))
        for part in (part for cut in plan.rows_by_rank() for part in cut if part):
            chosen = [lengths_of[row] for row in part]
            shared = computed.shared(part, chosen, torch.device("cpu"))
            assert (sum(chosen) if shared is None else len(shared.computed)) <= cap


def test_it_goes_on_where_it_was_in_another_order_each_epoch(tmp_path: Path) -> None:
    texts, again = (stream(tmp_path, 1.0, ratio=0.01) for _ in range(2))
    lengths = [int(texts.beside(mini_batch()).lengths[-1]) for _ in range(15)]
    assert sorted(lengths[:5]) == sorted(lengths[5:10]) == sorted(TOKENS)
    assert len({tuple(lengths[i : i + 5]) for i in (0, 5, 10)}) > 1
    again.load({"drawn": 7})
    assert [int(again.beside(mini_batch()).lengths[-1]) for _ in range(8)] == lengths[7:] and again.state() == {"drawn": 15}


def test_a_long_row_is_told_with_the_key_that_cuts_it(tmp_path: Path) -> None:
    assert "(data.ptx_truncation=right)" in stream(tmp_path, 1.0, ratio=1.0, ptx_max_length=12).data.notices[0]
    with pytest.raises(ValueError, match=r"data\.ptx_max_length is 12: raise it, or set data\.ptx_truncation=left or right"):
        stream(tmp_path, 1.0, ratio=1.0, ptx_max_length=12, ptx_truncation="error")
