"""A supervised run that diverges."""

from pathlib import Path

import pytest

from tests.runs import make_task
from trainer import main_sft
from trainer.run.run_dir import read_metrics


def test_diverged_run_stops_with_a_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The learning rate makes weights of 1e30: from the second step on no loss is finite."""
    task = make_task(tmp_path / "task")
    code = main_sft.PROGRAM(
        [
            "recipe=sort_digits", "trainer.backend=local", "trainer.total_training_steps=20", "data.train_batch_size=16",
            f"data.train_files={task}/sft.parquet", f"model.path={task}/base", f"trainer.default_local_dir={tmp_path / 'run'}",
            "optim.lr=1e30",
        ]
    )  # fmt: skip
    steps = read_metrics(tmp_path / "run")
    assert code == 3 and [step["train/skipped_updates"] for step in steps] == [0.0] + [1.0] * 5
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith("error: stopped at step 6 by an alarm: nonfinite:")
    assert (tmp_path / "run/logs/nonfinite/step_2_model.safetensors").is_file()
