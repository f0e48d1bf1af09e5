from pathlib import Path

import pyarrow.parquet as pq

from examples.largest_digit import main
from tests.runs import make_task, run_ppo


def test_rows_are_correct_and_distinct(tmp_path: Path) -> None:
    main(str(tmp_path))
    rows = [row for split in ("train", "test") for row in pq.read_table(tmp_path / f"{split}.parquet").to_pylist()]
    prompts = [row["prompt"][0]["content"] for row in rows]
    assert len({*prompts}) == len(rows) == 4128
    assert all(row["reward_model"]["ground_truth"] == max(prompt[:6]) for row, prompt in zip(rows, prompts, strict=True))


def test_run_scores_the_data_set(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task")
    main(str(tmp_path))
    files = (f"data.train_files={tmp_path}/train.parquet", f"data.val_files={tmp_path}/test.parquet")
    own = ("reward.custom_reward_function.path=null", "reward.scorer=exact_match", "trainer.test_freq=1")
    (step, *_) = run_ppo(task, tmp_path / "run", *files, *own, "trainer.total_training_steps=1")
    assert step["reward/failed"] == 0 and 0 <= step["val/accuracy"] <= 1
