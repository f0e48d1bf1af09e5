"""Fine-tuning ends when the held-out responses are probable enough."""

import math
from pathlib import Path
from typing import Any, cast

from configs.compose import compose
from configs.schema.supervised import SFTConfig
from data_preprocess.writer import sft_row, write
from tests.runs import make_task, metrics_of
from tests.tiny import save_tiny_model
from tests.trainer.data.tokenizers import byte_tokenizer
from trainer import main_sft
from trainer.supervised.tasks import SFTTask
from workers.batch import Batch


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


class Certain:
    """A model that gives each trained token the log-probability -2."""

    def forward(self, batch: Batch, outputs: object) -> Batch:
        return batch.with_tokens(log_probs=-2.0 * batch.tokens["response_mask"])


def test_truncated_responses_are_not_measured(tmp_path: Path) -> None:
    """Of a response that is cut, the rest is more probable; one that is cut away would have the probability 1."""
    pairs = [("1", "2"), ("1", "23456789"), ("123456789", "2")]
    file = write([sft_row(*pair) for pair in pairs], str(tmp_path), "sft")
    model = save_tiny_model(tmp_path / "model", vocab_size=len(byte_tokenizer()))
    files = [f"data.train_files={file}", f"data.val_files={file}"]
    words = [*files, f"model.path={model}", "trainer.test_freq=1", "data.truncation=right"]

    def probability(max_length: int) -> float:
        config = compose("sft_trainer", SFTConfig, [*words, f"data.max_length={max_length}"])
        return SFTTask(config, byte_tokenizer()).validate(cast(Any, Certain()), 1)["val/probability"]

    response_and_eos = math.exp(-4.0)
    assert math.isclose(probability(12), response_and_eos) and math.isnan(probability(11))
    assert math.isclose(probability(64), (2 * response_and_eos + math.exp(-18.0)) / 3)
