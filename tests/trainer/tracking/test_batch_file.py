import math
from pathlib import Path

import pytest
import torch

from trainer.tracking import batch_file
from trainer.tracking.batch_file import load_batch, save_batch
from workers.batch import Batch


def make_batch() -> Batch:
    return Batch(
        lengths=torch.tensor([2, 3]),
        tokens={
            "input_ids": torch.tensor([5, 6, 7, 8, 9]),
            "rollout_log_probs": torch.tensor([0.0, -0.1, math.nan, -math.inf, -1e-30]),
            "seen": torch.arange(10.0).reshape(5, 2).T.reshape(2, 5).T,  # not contiguous
        },
        rows={"uid": torch.tensor([3, 4]), "reward_failed": torch.tensor([True, False])},
        objects={"data_source": ["a", "b"], "reward_extra": [{"acc": 0.1 + 0.2}, {}], "response": ["long", "text"]},
        meta={"temperature": 1.0, "metrics": {"reward/failed": 0}, "generated_tokens": 5},
    )


def test_batch_round_trips_bitwise(tmp_path: Path) -> None:
    batch = make_batch()
    read, facts = load_batch(save_batch(tmp_path / "step_3.safetensors", batch, {"step": 3, "config": {"a": [1, None]}}))
    assert facts == {"step": 3, "config": {"a": [1, None]}} and read.meta == batch.meta
    assert read.objects == {"data_source": ["a", "b"], "reward_extra": [{"acc": 0.30000000000000004}, {}]}
    for kind in ("tokens", "rows"):
        mine, other = vars(batch)[kind], vars(read)[kind]
        assert mine.keys() == other.keys()
        for name in mine:
            assert mine[name].dtype == other[name].dtype
            assert mine[name].contiguous().numpy().tobytes() == other[name].numpy().tobytes(), name
    assert torch.equal(read.lengths, batch.lengths)


def test_columns_that_share_memory_are_written_separately(tmp_path: Path) -> None:
    scores = torch.tensor([1.0, 2.0])
    batch = Batch(torch.tensor([1, 1]), rows={"score": scores, "reward": scores})
    read, _ = load_batch(save_batch(tmp_path / "file", batch, {}))
    assert torch.equal(read.rows["reward"], scores) and torch.equal(read.rows["score"], scores)


def test_file_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_half(columns: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(batch_file, "save_file", write_half)
    with pytest.raises(OSError, match="disk full"):
        save_batch(tmp_path / "step_1.safetensors", make_batch(), {})
    assert not (tmp_path / "step_1.safetensors").exists()


def test_other_file_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"not tensors, but a line of words")
    with pytest.raises(ValueError, match="text is no dump of a batch"):
        load_batch(tmp_path / "text")
    batch_file.save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors is no dump of a batch"):
        load_batch(tmp_path / "model.safetensors")
