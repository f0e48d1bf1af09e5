"""A complete run on a field of a struct column, validated and saved after each epoch."""

from pathlib import Path

from data_preprocess import tiny_model
from data_preprocess.writer import write
from tests.runs import metrics_of
from trainer import main_sft
from trainer.run.run_dir import checkpoint_steps


def test_struct_column_is_trained_on(tmp_path: Path) -> None:
    """The next digit, in columns named like verl's gsm8k files; 5 batches an epoch, the run ends within one."""
    tiny_model.main([f"--save_dir={tmp_path / 'model'}", "--alphabet=0123456789"])
    rows = [{"extra_info": {"index": i, "question": str(i % 10), "answer": str((i + 1) % 10)}} for i in range(80)]
    file = write(rows, str(tmp_path), "train")
    words = [
        "recipe=sort_digits", "trainer.backend=local", "trainer.logger=[]",
        f"data.train_files={file}", f"data.val_files={file}",
        "data.prompt_key=extra_info", "data.prompt_dict_keys=['question']",
        "data.response_key=extra_info", "+data.response_dict_keys=['answer']",
        f"model.path={tmp_path}/model", "data.train_batch_size=16",
        "optim.lr=1e-2", "optim.lr_decay_style=linear", "optim.min_lr=1e-3",
        "trainer.total_training_steps=37", "trainer.test_freq=after_each_epoch", "trainer.save_freq=after_each_epoch",
        "trainer.export_dir=null", f"trainer.default_local_dir={tmp_path}/run",
    ]  # fmt: skip
    assert main_sft.PROGRAM(words) == 0
    steps = metrics_of(tmp_path / "run")
    tested = [number for number, step in enumerate(steps, 1) if "val/loss" in step]
    assert tested == [5, 10, 15, 20, 25, 30, 35, 37] == checkpoint_steps(tmp_path / "run")
    assert steps[4]["val/loss"] > 0.5 and steps[-1]["val/loss"] < 0.1
    assert steps[-1]["train/lr"] < 0.15e-2 < steps[0]["train/lr"]
