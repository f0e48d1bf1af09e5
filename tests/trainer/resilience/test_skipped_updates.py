"""Records and reports of skipped updates."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.workers.test_batch import numbered
from trainer.resilience.skipped_updates import MOST_DUMPS, SkippedUpdates
from trainer.run.events import Events
from trainer.run.run_dir import EVENTS, read_lines
from trainer.tracking.batch_file import load_batch

CONFIG = {"trainer": {"hf_token": "s3cret", "seed": 1}}
SKIPPED = {"loss": math.nan, "grad_norm": math.inf, "skipped_updates": 1.0}
APPLIED = {"loss": 0.5, "grad_norm": 1.0, "skipped_updates": 0.0}
BATCH = numbered([3, 4])


@pytest.fixture
def skips(tmp_path: Path) -> SkippedUpdates:
    return SkippedUpdates(tmp_path, Events(tmp_path), CONFIG)


def texts(skips: SkippedUpdates) -> list[str]:
    return [event["text"] for event in read_lines(skips.events.path.parent / EVENTS)]


def test_applied_update_leaves_no_record(skips: SkippedUpdates, tmp_path: Path) -> None:
    skips.record("actor", 1, BATCH, APPLIED)
    assert skips.report(1) == {} and list(tmp_path.iterdir()) == []


def test_step_is_reported_once_with_the_first_batch_of_each_role(skips: SkippedUpdates, tmp_path: Path) -> None:
    other = BATCH.select([1])
    for role, batch in (("critic", other), ("actor", BATCH), ("actor", other)):
        skips.record(role, 3, batch, SKIPPED)
    assert skips.report(3) == {"training/skipped_in_a_row": 2.0}
    assert texts(skips) == [
        "3 updates were skipped, on all ranks alike: critic: loss nan, norm of the gradient inf; its batch is in "
        "logs/nonfinite/step_3_critic.safetensors"
    ]
    kept, about = load_batch(tmp_path / "logs/nonfinite/step_3_actor.safetensors")
    assert torch.equal(kept.lengths, BATCH.lengths)
    assert kept.tokens.keys() == BATCH.tokens.keys() and kept.rows.keys() == BATCH.rows.keys()
    assert all(torch.equal(kept.tokens[name], column) for name, column in BATCH.tokens.items())
    assert about == {
        "step": 3,
        "role": "actor",
        "metrics": {"loss": "NaN", "grad_norm": "Infinity", "skipped_updates": 1.0},
        "config": {"trainer": {"hf_token": "***", "seed": 1}},
    }
    assert skips.report(4) == {"training/skipped_in_a_row": 2.0} and len(texts(skips)) == 1, "no new event"


def test_columns_that_share_memory_are_dumped(skips: SkippedUpdates, tmp_path: Path) -> None:
    """safetensors refuses tensors that share memory."""
    mask = torch.ones(7)
    skips.record("model", 1, BATCH.with_tokens(response_mask=mask, kept_mask=mask), SKIPPED)
    assert (tmp_path / "logs/nonfinite/step_1_model.safetensors").is_file()


def test_number_of_dumped_batches_is_limited(skips: SkippedUpdates, tmp_path: Path) -> None:
    for step in range(1, MOST_DUMPS + 3):
        skips.record("actor", step, BATCH, SKIPPED)
        skips.report(step)
    assert {path.name for path in (tmp_path / "logs/nonfinite").iterdir()} == {
        f"step_{n}_actor.safetensors" for n in range(1, MOST_DUMPS + 1)
    }
    assert [text.endswith(f"step_{n}_actor.safetensors") for n, text in enumerate(texts(skips), 1)] == [True] * MOST_DUMPS + [
        False
    ] * 2


def test_incomplete_dump_is_written_again(skips: SkippedUpdates, tmp_path: Path) -> None:
    directory = tmp_path / "logs/nonfinite"
    directory.mkdir(parents=True)
    for step in range(1, MOST_DUMPS + 1):
        (directory / f"step_{step}_actor.safetensors.partial").write_bytes(b"half")
    skips.record("actor", 1, BATCH, SKIPPED)
    kept, _ = load_batch(directory / "step_1_actor.safetensors")
    assert torch.equal(kept.lengths, BATCH.lengths)


def test_consecutive_count_resets_per_role_and_survives_a_resume(skips: SkippedUpdates, tmp_path: Path) -> None:
    for metrics in (SKIPPED, SKIPPED):
        skips.record("actor", 1, BATCH, metrics)
    skips.record("critic", 1, BATCH, APPLIED)
    resumed = SkippedUpdates(tmp_path, skips.events, CONFIG)
    resumed.load(json.loads(json.dumps(skips.state())))
    resumed.record("actor", 2, BATCH, SKIPPED)
    assert resumed.report(2) == {"training/skipped_in_a_row": 3.0}
    resumed.record("actor", 3, BATCH, APPLIED)
    assert resumed.report(3) == {}
