"""Fine-tuning ends when the held-out responses are probable enough."""

from pathlib import Path

from tests.runs import make_task, metrics_of
from trainer import main_sft


def test_run_ends_at_the_first_validation_that_reaches_the_bound(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task")
    words = [
        "recipe=sort_digits", "trainer.backend=local", f"data.train_files={task}/sft.parquet",
        f"data.val_files={task}/sft.parquet", f"model.path={task}/base", "data.train_batch_size=64",
        "trainer.total_training_steps=40", "trainer.test_freq=2", "trainer.stop_at_probability=1e-7",
        "trainer.export_dir=null", f"trainer.default_local_dir={tmp_path}/run",
    ]  # fmt: skip
    assert main_sft.PROGRAM(words) == 0
    measured = [step["val/probability"] for step in metrics_of(tmp_path / "run") if "val/probability" in step]
    assert measured[-1] >= 1e-7 and all(value < 1e-7 for value in measured[:-1]) and len(measured) < 20
    words[words.index("trainer.test_freq=2")] = "trainer.test_freq=-1"
    assert main_sft.PROGRAM(words) == 2
