from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from trainer.tracking.sample_dump import first_samples, write_dump
from workers.batch import Batch


def make_batch() -> Batch:
    """Two prompts, two responses each; the last response has an observation of two tokens."""
    return Batch(
        lengths=torch.tensor([4, 5, 3, 6]),
        tokens={
            "input_ids": torch.arange(18),
            "response_mask": torch.tensor([int(mark) for mark in "001100111011010011"]).float(),
        },
        rows={
            "uid": torch.tensor([10, 10, 11, 11]),
            "sample": torch.tensor([0, 1, 0, 1]),
            "score": torch.tensor([1.0, 0.0, 0.25, 1.0]),
            "finished": torch.tensor([1, 0, 1, 1]),
            "reward_failed": torch.tensor([False, False, False, True]),
        },
        objects={
            "data_source": ["math"] * 4,
            "prompt": ["1+1=", "1+1=", "2+2=", "2+2="],
            "response": ["2", "«ä»\n", "<b>", ""],
            "ground_truth": ["2", "2", 4, [4, "vier"]],
            "reward_extra": [{"acc": np.float32(0.5)}, {"votes": np.array([1, 2])}, {}, {"of": Path}],
            "reward_error": [None, None, None, "late"],
        },
    )


def test_dump_has_every_row_and_column(tmp_path: Path) -> None:
    path = write_dump(tmp_path / "rollouts", 12, make_batch())
    assert path == tmp_path / "rollouts/step_12.parquet"
    table = pq.read_table(path).to_pydict()
    assert table["step"] == [12] * 4
    assert table["uid"] == [10, 10, 11, 11] and table["sample"] == [0, 1, 0, 1] and table["score"] == [1.0, 0.0, 0.25, None]
    assert table["response_length"] == [2, 3, 2, 3], "without the observation"
    assert table["finish_reason"] == ["stop", "length", "stop", "stop"]
    assert table["response"] == ["2", "«ä»\n", "<b>", ""]
    assert table["ground_truth"] == ["2", "2", "4", '[4, "vier"]']
    assert table["reward_extra"] == ['{"acc": 0.5}', '{"votes": [1, 2]}', "{}", f'{{"of": "{Path!r}"}}']
    assert table["reward_error"] == [None, None, None, "late"]
    assert table["reward_failed"] == [False, False, False, True]


def test_excluded_rows_follow_with_their_error(tmp_path: Path) -> None:
    """They lack columns that are computed later."""
    batch = make_batch()
    kept, failed = batch.select([0, 1, 2]).with_rows(baseline=torch.tensor([0.5, 0.5, 1.0])), batch.select([3])
    table = pq.read_table(write_dump(tmp_path, 1, kept, [failed])).to_pydict()
    assert table["reward_error"] == [None, None, None, "late"] and table["reward_failed"] == [False, False, False, True]
    assert table["score"] == [1.0, 0.0, 0.25, None] and table["baseline"] == [0.5, 0.5, 1.0, None]


def test_file_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_half(table: object, path: Path) -> None:
        path.write_bytes(b"PAR1")
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", write_half)
    with pytest.raises(OSError, match="disk full"):
        write_dump(tmp_path, 1, make_batch())
    assert not (tmp_path / "step_1.parquet").exists()


def test_column_types_do_not_depend_on_the_step(tmp_path: Path) -> None:
    """A directory of steps can be read as one table."""
    first = make_batch()
    second = make_batch()
    second.objects["reward_error"] = ["late"] * 4
    first.objects["reward_error"] = [None] * 4
    write_dump(tmp_path, 1, first)
    write_dump(tmp_path, 2, second)
    assert pq.read_table(tmp_path).num_rows == 8


def test_samples_are_the_first_responses_to_the_first_prompts() -> None:
    samples = first_samples(make_batch(), 5)
    assert [sample["uid"] for sample in samples] == [10, 11]
    assert samples[1] == {
        "uid": 11, "data_source": "math", "prompt": "2+2=", "response": "<b>", "ground_truth": "4", "score": 0.25,
        "reward_error": None,
    }  # fmt: skip
    assert len(first_samples(make_batch(), 1)) == 1


def test_samples_of_sessions_have_their_conversation(tmp_path: Path) -> None:
    batch = make_batch()
    batch.objects["session"] = [
        {"messages": [{"role": "user", "content": f"{i}" * 2000}], "turns": [[0, 1, 2]]} for i in range(4)
    ]
    first, second = first_samples(batch, 5)
    assert first["conversation"][0]["text"].startswith("000") and len(first["conversation"][0]["text"]) < 1100
    assert second["conversation"][0]["text"].startswith("222")
    assert pq.read_table(write_dump(tmp_path, 1, batch))["session"][0].as_py().count("0") > 2000, "the dump has all"
