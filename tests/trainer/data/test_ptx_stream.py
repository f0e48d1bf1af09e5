"""The pretraining stream: rows per mini-batch, their weights, and resuming."""

import random
from pathlib import Path

import pytest
import torch

from data_preprocess.writer import sft_row, write
from tests.trainer.data.tokenizers import byte_tokenizer, data_config
from tests.workers.engine.toy import toy_batch
from trainer.data.ptx_stream import PtxStream, ptx_stream
from workers.batch import Batch
from workers.engine.shared_prefixes import SharedPrefixes
from workers.plan import Limits, SharedRows
from workers.prefixes import chains_by_group, chains_by_tokens

TOKENS = [12, 13, 17, 15, 14]  # tokens of the rows below, with <user>, <a> and <eos>


def stream(folder: Path, coefficient: float, *, ratio: float, shuffle: bool = True, **changes: object) -> PtxStream:
    pairs = [("a", "b"), ("aa", "b"), ("a", "bcdefg"), ("ab", "cde"), ("ab", "cd")]
    file = write([sft_row(*pair) for pair in pairs], str(folder), "texts")
    data = data_config(ptx_files=[str(file)], shuffle=shuffle, **changes)
    found = ptx_stream(data, coefficient, ratio, byte_tokenizer(), seed=1)
    assert found is not None
    return found


def mini_batch() -> Batch:
    """A mini-batch of 41 tokens, one of its columns two-dimensional."""
    batch = toy_batch([20, 15, 6])
    wide = torch.randn(41, 7)
    return batch.with_tokens(wide=wide).with_rows(
        uid=torch.tensor([5, 5, 9]), group=torch.tensor([8, 8, 10]), trajectory=torch.arange(3)
    )


def test_configuration_without_files_has_no_stream() -> None:
    assert ptx_stream(data_config(), 0.1, 1.0, byte_tokenizer(), seed=1) is None


@pytest.mark.parametrize(("ratio", "rows"), [(0.01, 1), (0.5, 1), (0.62, 2), (1.0, 2), (1.05, 3), (2.1, 6)])
def test_rows_are_added_up_to_the_budget_and_one_at_least(tmp_path: Path, ratio: float, rows: int) -> None:
    texts = stream(tmp_path, 1.0, ratio=ratio, shuffle=False)
    assert [len(texts.data.batch([i]).tokens["input_ids"]) for i in range(5)] == TOKENS
    mixed = texts.extend(mini_batch())
    assert mixed.lengths.tolist() == [20, 15, 6, *(TOKENS * 2)[:rows]] and texts.drawn == rows
    following = texts.extend(mini_batch())
    assert following.lengths.tolist()[3] == (TOKENS * 2)[rows]


def test_mini_batch_is_unchanged_and_appended_rows_are_marked(tmp_path: Path) -> None:
    batch = mini_batch()
    mixed = stream(tmp_path, 0.3, ratio=1.0).extend(batch)
    policy, texts = mixed.select(range(3)), mixed.select(range(3, len(mixed)))
    for name, column in batch.tokens.items():
        assert torch.equal(policy.tokens[name].to(column.dtype), column), name
    assert not policy.tokens["ptx"].any() and texts.tokens["ptx"].all() and mixed.meta == batch.meta
    mask, weight = texts.tokens["response_mask"], texts.tokens["loss_weight"]
    assert float(weight.sum()) == pytest.approx(0.3) and weight[mask.bool()].unique().numel() == 1 and not weight[mask == 0].any()
    assert set(texts.rows) == {"uid", "group", "trajectory"}
    assert all((column < 0).all() and len(column.unique()) == len(texts) for column in texts.rows.values()), "of no response"
    assert 0 < mask.sum() < texts.total_tokens and not texts.tokens["wide"].any() and not texts.tokens["advantages"].any()


@pytest.mark.parametrize("cases", [1000, pytest.param(3000, marks=pytest.mark.soak)])
def test_no_micro_batch_has_more_tokens_than_the_cap_whatever_the_data_rows_are(tmp_path: Path, cases: int) -> None:
    """Every text has a prompt of its own; counted as a response to a policy prompt, its prompt would count as computed."""
    texts, draw = stream(tmp_path, 0.5, ratio=1.0), random.Random(1)
    for _ in range(cases):
        groups = [(group, draw.randint(1, 40), draw.randint(1, 3)) for group in draw.sample(range(4), draw.randint(1, 3))]
        rows = [(group, prompt, prompt + draw.randint(1, 40)) for group, prompt, n in groups for _ in range(n)]
        group, prompts, lengths = (torch.tensor(column) for column in zip(*rows, strict=True))
        ids = torch.repeat_interleave(1000 + group, lengths)
        columns = {"input_ids": ids, "response_mask": torch.ones(len(ids)), "loss_weight": torch.ones(len(ids))}
        mixed = texts.extend(Batch(lengths, columns, {"group": group, "prompt_length": prompts}))
        lengths_of, cap = mixed.lengths.tolist(), int(mixed.lengths.max()) + draw.randint(0, 60)
        planned, computed = SharedRows(lengths_of, chains_by_group(mixed)), chains_by_tokens(mixed)
        assert computed is not None
        plan = planned.plan(draw.randint(1, 2), Limits(max_tokens=cap))
        for part in (part for cut in plan.rows_by_rank() for part in cut if part):
            chosen = [lengths_of[row] for row in part]
            shared = SharedPrefixes.of(chosen, [computed[row] for row in part], torch.device("cpu"))
            assert (sum(chosen) if shared is None else len(shared.computed)) <= cap


def test_stream_resumes_and_reorders_each_epoch(tmp_path: Path) -> None:
    texts, again = (stream(tmp_path, 1.0, ratio=0.01) for _ in range(2))
    lengths = [int(texts.extend(mini_batch()).lengths[-1]) for _ in range(15)]
    assert sorted(lengths[:5]) == sorted(lengths[5:10]) == sorted(TOKENS)
    assert len({tuple(lengths[i : i + 5]) for i in (0, 5, 10)}) > 1
    again.load({"drawn": 7})
    assert [int(again.extend(mini_batch()).lengths[-1]) for _ in range(8)] == lengths[7:] and again.state() == {"drawn": 15}


def test_long_row_raises_with_the_ptx_keys(tmp_path: Path) -> None:
    assert "(data.ptx_truncation=right)" in stream(tmp_path, 1.0, ratio=1.0, ptx_max_length=12).data.notices[0]
    with pytest.raises(ValueError, match=r"data\.ptx_max_length is 12: raise it, or set data\.ptx_truncation=left or right"):
        stream(tmp_path, 1.0, ratio=1.0, ptx_max_length=12, ptx_truncation="error")
