"""run_ppo from a script: arguments of callbacks, results, exceptions."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.base.keys import ConfigError
from configs.compose import compose
from configs.schema.ppo import PPOConfig
from tests.layout.source import ROOT
from tests.runs import make_task, metrics_of, ppo_arguments, repeatable
from trainer import Callback, RunResult, run_ppo
from trainer.run.run_status import read_outcome


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"))


class Seen(Callback):
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.steps: list[dict[str, float]] = []

    def on_train_begin(self, config: PPOConfig) -> None:
        self.calls.append(("begin", config))

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("step", step))
        self.steps.append(dict(metrics))

    def on_validation_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("validation", step))
        assert metrics["val/problems"] == 32 and all(name.startswith("val") for name in metrics)

    def on_train_end(self, result: RunResult) -> None:
        self.calls.append(("end", result))


def test_callbacks_are_called_at_every_step_and_at_the_end(task: Path, tmp_path: Path) -> None:
    words = ppo_arguments(
        task, tmp_path, "trainer.val_before_train=true", "trainer.test_freq=2", "trainer.objective=-response_length/mean"
    )
    seen = Seen()
    result = run_ppo(words, callbacks=[seen, Callback()])
    (begin, config), *between, (end, output) = seen.calls
    assert begin == "begin" and isinstance(config, PPOConfig) and config.trainer.default_local_dir == str(tmp_path)
    assert between == [("validation", 0), ("step", 1), ("validation", 2), ("step", 2)]
    assert end == "end" and output is result and result.run_dir == tmp_path
    written = metrics_of(tmp_path)
    assert seen.steps == written[1:]
    assert result.metrics == written[0] | written[1] | written[2]
    assert result.objective == -written[2]["response_length/mean"]
    outcome = read_outcome(tmp_path)
    assert outcome is not None and outcome.status == "finished"


def test_configuration_object_equals_its_command_line(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = compose("ppo_trainer", PPOConfig, ppo_arguments(task, tmp_path / "words", "trainer.total_training_steps=1"))
    config = replace(plain, trainer=replace(plain.trainer, default_local_dir=str(tmp_path / "config")))
    assert run_ppo(config).objective is None
    run_ppo(ppo_arguments(task, tmp_path / "words", "trainer.total_training_steps=1", "use_remove_padding=true"))
    assert "note: use_remove_padding is left out: no batch is ever padded" in capsys.readouterr().err
    assert repeatable(metrics_of(tmp_path / "words")) == repeatable(metrics_of(tmp_path / "config"))


class Broken(Exception):
    pass


def test_exception_of_a_callback_ends_the_run_and_propagates(task: Path, tmp_path: Path) -> None:
    class Breaks(Seen):
        def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
            super().on_step_end(step, metrics)
            raise Broken

    seen = Breaks()
    with pytest.raises(Broken):
        run_ppo(ppo_arguments(task, tmp_path), callbacks=[seen])
    assert [name for name, _ in seen.calls] == ["begin", "step"] and len(metrics_of(tmp_path)) == 1
    outcome = read_outcome(tmp_path)
    assert outcome is not None and outcome.status == "failed" and (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["trainer.sed=1"], ConfigError, "trainer.sed: there is no such key; did you mean"),
        (["recipe=quickstart", "data.train_batch_size=-1"], ConfigError, "data.train_batch_size=-1"),
        (["recipe=quickstart", "data.train_files=nowhere.parquet"], ConfigError, "data.train_files=nowhere.parquet"),
        (["recipe=quickstart", "trainer.dry_run=config"], ValueError, "trainer.dry_run=config: not in run_ppo"),
        (
            ["recipe=quickstart", "trainer.replay.mode=train", "trainer.replay.path=x"],
            ValueError,
            "trainer.replay.mode=train: not in run_ppo",
        ),
    ],
)
def test_invalid_configuration_raises_before_the_run_starts(words: list[str], error: type[Exception], message: str) -> None:
    seen = Seen()
    with pytest.raises(error, match=re.escape(message)):
        run_ppo(words, callbacks=[seen])
    assert seen.calls == []


def test_page_documents_every_method() -> None:
    page = (ROOT / "docs/python_api.md").read_text()
    assert re.findall(r"`(on_\w+)\(", page) == [
        "on_train_begin", "on_validation_end", "on_step_end", "on_train_end",
    ]  # fmt: skip
    assert {name for name in vars(Callback) if name.startswith("on_")} == {*re.findall(r"`(on_\w+)\(", page)}


def test_first_example_of_the_page_runs(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unchanged, but for a smaller run in place of the quick start's."""
    first, second = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/python_api.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    small = ppo_arguments(task, tmp_path, "trainer.test_freq=2")
    assert '"recipe=quickstart", "trainer.total_training_steps=50"' in first
    code = first.replace('"recipe=quickstart", "trainer.total_training_steps=50"', ", ".join(map(repr, small)))
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})
    assert len(metrics_of(tmp_path)) == 2
    compile(second, "second example", "exec")
