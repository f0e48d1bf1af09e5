import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.run.logger import Sample
from trainer.run.run_dir import GLOBAL_STEP, read_lines, read_metrics
from trainer.tracking.loggers import wandb_can_start
from trainer.tracking.tracker import KEPT_SAMPLES, Tracker
from workers.batch import Batch

CONFIG = {"trainer": {"project_name": "p", "logger": ["console"]}, "ray_kwargs": {"env": {"HF_TOKEN": "s3cret"}}}

KINDS = ("parquet", "safetensors")
ROWS = {"finished": torch.tensor([1]), "reward_failed": torch.tensor([False])}
ROW = Batch(torch.tensor([2]), tokens={"response_mask": torch.tensor([0.0, 1.0])}, rows=ROWS)


def track(run_dir: Path, *loggers: str, **options: Any) -> Tracker:
    return Tracker(list(loggers), run_dir, "project", "experiment", CONFIG, **options)


def sample(uid: int) -> Sample:
    return Sample(uid=uid, data_source="sort", prompt=f"{uid}=", response="«1»", ground_truth="1", score=1.0, reward_error=None)


def run_steps(tracker: Tracker, *steps: int) -> None:
    for step in steps:
        tracker.log({"critic/score/mean": step / 7, GLOBAL_STEP: step}, step)
        tracker.log_samples([sample(step)], step)
        tracker.log_rollouts(ROW, step, "base", {})


def checkpoint(run_dir: Path, step: int) -> None:
    (run_dir / f"global_step_{step}").mkdir()


def test_every_step_is_one_line_written_at_once(tmp_path: Path) -> None:
    tracker = track(tmp_path)
    tracker.log({"actor/pg_loss": 0.1 + 0.2, "actor/grad_norm": float("inf")}, 1)
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"training/global_step": 1, "actor/pg_loss": 0.30000000000000004, "actor/grad_norm": "Infinity"}\n'
    )
    tracker.log({GLOBAL_STEP: 2, "training/epoch": 0}, 2)
    assert [type(entry[GLOBAL_STEP]) for entry in read_metrics(tmp_path)] == [int, int]
    tracker.close()


def test_resumed_files_equal_those_of_an_uninterrupted_run(tmp_path: Path) -> None:
    whole = track(tmp_path / "whole", rollout_dir=tmp_path / "whole/rollouts")
    run_steps(whole, 1, 2, 3, 4, 5)
    whole.close()

    killed = track(tmp_path / "killed", rollout_dir=tmp_path / "killed/rollouts")
    run_steps(killed, 1, 2, 3)
    checkpoint(tmp_path / "killed", 3)
    run_steps(killed, 4)
    killed.close()
    with (tmp_path / "killed/metrics.jsonl").open("a") as file:
        file.write('{"training/global_step": 5, "cri')
    resumed = track(tmp_path / "killed", resume_step=3, rollout_dir=tmp_path / "killed/rollouts")
    assert [entry[GLOBAL_STEP] for entry in read_metrics(tmp_path / "killed")] == [1, 2, 3]
    run_steps(resumed, 4, 5)
    resumed.close()
    for name in ("metrics.jsonl", "samples.jsonl", *(f"rollouts/step_{step}.{kind}" for step in range(1, 6) for kind in KINDS)):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_tensorboard_shows_a_resumed_run_without_the_truncated_steps(tmp_path: Path) -> None:
    killed = track(tmp_path, "tensorboard")
    for step in (1, 2, 3, 4):
        killed.log({"score": 10.0 + step}, step)
    killed.close()
    checkpoint(tmp_path, 2)
    resumed = track(tmp_path, "tensorboard", resume_step=2)
    resumed.log({"score": 23.0}, 3)
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("score")] == [(1, 11.0), (2, 12.0), (3, 23.0)]


def test_files_and_tensorboard_show_one_run_after_a_rollback(tmp_path: Path) -> None:
    tracker = track(tmp_path, "tensorboard", rollout_dir=tmp_path / "rollouts")
    run_steps(tracker, 1, 2, 3, 4)
    checkpoint(tmp_path, 2)
    aside = tracker.go_back(2)
    tracker.log({"critic/score/mean": 9.0, GLOBAL_STEP: 3}, 3)
    tracker.log_samples([sample(30)], 3)
    tracker.close()
    assert [(entry[GLOBAL_STEP], entry["critic/score/mean"]) for entry in read_metrics(tmp_path)] == [
        (1, 1 / 7),
        (2, 2 / 7),
        (3, 9.0),
    ]
    assert [entry["uid"] for entry in read_lines(tmp_path / "samples.jsonl")] == [1, 2, 30]
    assert [entry[GLOBAL_STEP] for entry in read_metrics(aside)] == [3, 4]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("critic/score/mean")] == [1, 2, 3]
    assert events.Scalars("critic/score/mean")[2].value == 9.0


def test_tensorboard_shows_responses_unchanged(tmp_path: Path) -> None:
    tracker = track(tmp_path, "tensorboard", shown_samples=1)
    tracker.log_samples([sample(7)], 4)
    tracker.close()
    (event,) = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tensors("validation/0/text_summary")
    assert event.step == 4 and "    «1»" in event.tensor_proto.string_val[0].decode()


def test_configuration_and_environment_are_saved_without_secrets(tmp_path: Path) -> None:
    track(tmp_path, "tensorboard").close()
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["trainer"]["project_name"] == "p"
    assert json.loads((tmp_path / "environment.json").read_text()).keys() >= {"python", "platform", "torch", "transformers"}
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"s3cret" not in path.read_bytes(), path


def test_unknown_logger_is_refused_before_any_file_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no logger wnadb; there are console, tensorboard, wandb"):
        track(tmp_path / "run", "console", "wnadb")
    assert not (tmp_path / "run").exists()


def test_samples_are_limited_in_number_and_printed_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = track(tmp_path, "console", shown_samples=2)
    tracker.log_samples([sample(uid) for uid in range(KEPT_SAMPLES + 5)], 1)
    tracker.close()
    assert len(read_lines(tmp_path / "samples.jsonl")) == KEPT_SAMPLES
    shown = capsys.readouterr().out
    assert "0=" in shown and "1=" in shown and "2=" not in shown


class FakeWandb(SimpleNamespace):
    """The parts of the package that are used: init, Settings, Table, Error."""

    class Error(Exception):
        pass

    def __init__(self, failure: str | None = None) -> None:
        super().__init__(Settings=lambda **given: given, Table=lambda columns, data: (columns, data))
        self.failure = failure
        self.calls: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, Any], int]] = []

    def init(self, **given: Any) -> SimpleNamespace:
        self.calls.append(given)
        if self.failure is not None:
            raise self.Error(self.failure)
        return SimpleNamespace(id="run-7", log=lambda data, step: self.logged.append((data, step)), finish=lambda: None)


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment without any of the places where W&B looks for a key. Returns the path of a netrc."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


def left_out(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("logger wandb left out: ")
    return line


def test_wandb_without_its_package_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracker = track(tmp_path / "run", "wandb")
    assert "not installed" in left_out(capsys)
    run_steps(tracker, 1)
    assert len(read_metrics(tmp_path / "run")) == 1
    tracker.close()


def test_wandb_without_a_key_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    track(tmp_path / "run", "wandb").close()
    assert "no key" in left_out(capsys)
    assert wandb.calls == []


def test_wandb_without_network_is_skipped_within_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb = FakeWandb("connection\nrefused")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    track(tmp_path / "run", "wandb").close()
    assert left_out(capsys).endswith("connection refused")
    assert wandb.calls[0]["settings"]["init_timeout"] <= 60


def test_wandb_gets_metrics_samples_and_the_same_run_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_key: Path
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = track(tmp_path, "wandb", shown_samples=1)
    tracker.log({"x": 0.5}, 1)
    tracker.log_samples([sample(0)], 1)
    tracker.close()
    checkpoint(tmp_path, 1)
    track(tmp_path, "wandb", resume_step=1).close()
    track(tmp_path, "wandb").close()
    assert [call["id"] for call in wandb.calls] == [None, "run-7", None]
    assert wandb.calls[0]["config"]["ray_kwargs"]["env"]["HF_TOKEN"] == "***"
    assert wandb.logged[0] == ({"x": 0.5}, 1)
    columns, rows = wandb.logged[1][0]["val/generations"]
    assert dict(zip(columns, rows[0], strict=True)) == sample(0)


def test_a_netrc_file_that_cannot_be_read_has_no_key(no_key: Path) -> None:
    no_key.write_text("machine\n")
    assert not wandb_can_start({"NETRC": str(no_key)})


def test_wandb_key_is_found_in_each_place(no_key: Path) -> None:
    env = {"NETRC": str(no_key)}
    assert not wandb_can_start(env)
    assert not wandb_can_start(env | {"WANDB_API_KEY": ""})
    assert wandb_can_start(env | {"WANDB_API_KEY": "k"})
    assert wandb_can_start(env | {"WANDB_MODE": "offline"})
    assert not wandb_can_start(env | {"WANDB_MODE": "online"})
    no_key.write_text("machine wandb.example.org login user password k\n")
    assert not wandb_can_start(env)
    assert wandb_can_start(env | {"WANDB_BASE_URL": "https://wandb.example.org:8080"})
