import json
from pathlib import Path

import pytest

from tests.runs import make_task, run_ppo
from trainer.checkpoint.training_data import TrainingData


def test_other_content_of_the_data_is_reported_at_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"prompt": str(row)}) + "\n" for row in range(9)))
    saved = TrainingData([str(file), "of a class"]).state()
    assert TrainingData([str(file)]).state() == saved, "names that are no files are left out"
    TrainingData([str(file)]).load(saved)
    TrainingData([str(file)]).load({})
    TrainingData(["of a class"]).load(saved)
    assert capsys.readouterr().err == ""
    file.write_text(file.read_text().replace("8", "7"))
    TrainingData([str(file)]).load(saved)
    assert capsys.readouterr().err == (
        f"note: data.train_files={file}: other content than at the checkpoint; rows may be repeated or left out from here\n"
    )


def test_run_that_resumes_on_other_data_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = make_task(tmp_path / "task", train_size=16, sft_size=8)
    steps = ("trainer.save_freq=1", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    run_ppo(task, tmp_path / "run", *steps, "trainer.total_training_steps=1")
    make_task(task, train_size=12, sft_size=8)
    run_ppo(task, tmp_path / "run", *steps, "trainer.total_training_steps=2")
    assert "other content than at the checkpoint" in capsys.readouterr().err
