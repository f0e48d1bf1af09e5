"""The supervised loop saves and resumes like the PPO loop."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.runs import make_task, metrics_of, repeatable
from trainer import main_export, main_sft
from trainer.run.run_dir import EVENTS, checkpoint_steps, read_lines


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"), sft_size=64)


def run(task: Path, run_dir: Path, *overrides: str) -> list[dict[str, float]]:
    words = [
        "recipe=sort_digits", "trainer.backend=local", "trainer.logger=[]", f"data.train_files={task}/sft.parquet",
        f"data.val_files={task}/sft.parquet", f"model.path={task}/base", "data.train_batch_size=16", "trainer.test_freq=1",
        "trainer.export_dir=null", f"trainer.default_local_dir={run_dir}", "trainer.save_freq=1",
        "trainer.resume_mode=auto", *overrides,
    ]  # fmt: skip
    assert main_sft.PROGRAM(words) == 0
    return metrics_of(run_dir)


def test_background_saves_are_resumed_and_exported(task: Path, tmp_path: Path) -> None:
    overrides = ("trainer.checkpoint.async_save=true", "trainer.best_metric=-val/loss", "trainer.max_ckpt_to_keep=1")
    whole = run(task, tmp_path / "whole", "trainer.total_training_steps=4", f"trainer.export_dir={tmp_path}/exported")
    run(task, tmp_path / "broken", *overrides, "trainer.total_training_steps=2")
    resumed = run(task, tmp_path / "broken", *overrides, "trainer.total_training_steps=4")
    assert repeatable(resumed) == repeatable(whole)
    losses = [step["val/loss"] for step in whole]
    assert checkpoint_steps(tmp_path / "broken") == sorted({losses.index(min(losses)) + 1, 4})
    assert main_export.PROGRAM([f"checkpoint={tmp_path}/broken", f"output={tmp_path}/model"]) == 0
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("model", "exported")]
    assert all((one == other).all() for one, other in zip(*(model.parameters() for model in models), strict=True))


def test_start_says_what_is_being_done(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(task, tmp_path, "trainer.total_training_steps=1", "trainer.save_freq=-1")
    assert capsys.readouterr().err.splitlines()[:4] == [
        "starting 1 worker on cpu",
        f"tokenizing {task}/sft.parquet",
        f"loading {task}/base",
        "training 1 step, each on 16 of 64 rows",
    ]


def test_jump_of_the_rate_in_an_extended_run_is_reported(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cosine = ("optim.lr_scheduler_type=cosine", "optim.lr=1e-4", "optim.lr_warmup_steps=0")
    run(task, tmp_path, *cosine, "trainer.total_training_steps=2")
    assert "learning rate" not in capsys.readouterr().err
    longer = ("trainer.total_training_steps=4",)
    steps = run(task, tmp_path, *cosine, *longer, "optim.total_training_steps=2", "trainer.save_freq=-1")
    assert "learning rate" not in capsys.readouterr().err and [step["train/lr"] for step in steps] == [1e-4, 5e-5, 0.0, 0.0]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2\n")
    steps = run(task, tmp_path, *cosine, *longer)
    assert (
        "note: optim: the schedule had 2 training steps and has 4: the learning rate of step 3 goes from 0 to 5e-05; "
        "optim.total_training_steps=2 keeps the old schedule\n"
    ) in capsys.readouterr().err
    assert [step["train/lr"] for step in steps] == pytest.approx([1e-4, 5e-5, 5e-5, 1.464e-5], rel=1e-3)


def test_damaged_weights_are_found_by_workers(task: Path, tmp_path: Path) -> None:
    whole = run(task, tmp_path, "trainer.total_training_steps=3")
    (shard,) = (tmp_path / "global_step_3/model").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    again = run(task, tmp_path, "trainer.total_training_steps=4")
    assert repeatable(again)[:3] == repeatable(whole)
    (reported,) = [event for event in read_lines(tmp_path / EVENTS) if event["kind"] == "damaged checkpoint"]
    assert reported["step"] == 3
