"""MLflow and SwanLab, with modules that record their calls. (The others: test_tracker.py.)"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.trainer.tracking.test_tracker import CONFIG, checkpoint, sample, track
from trainer.tracking.loggers import swanlab_can_start


class Recorder(ModuleType):
    """Every call, by its name; ``answers`` are returned, ``failures`` raised."""

    def __init__(self, name: str, **answers: Any) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers = answers
        self.failures: dict[str, Exception] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            if name in self.failures:
                raise self.failures[name]
            return self.answers.get(name)

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


class MlflowError(Exception):
    pass


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    module = Recorder("mlflow", start_run=SimpleNamespace(info=SimpleNamespace(run_id="r7")))
    module.exceptions = SimpleNamespace(MlflowException=MlflowError)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


@pytest.fixture
def swanlab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorder:
    module = Recorder("swanlab", Text="a text")
    monkeypatch.setitem(sys.modules, "swanlab", module)
    for name in ("SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path / "home"))
    return module


@pytest.mark.parametrize("name", ["mlflow", "swanlab"])
def test_logger_that_is_not_installed_is_skipped(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    track(tmp_path, name).close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"logger {name} left out: package {name} is not installed; pip install {name}")


def test_mlflow_gets_metrics_samples_and_the_same_run_on_resume(tmp_path: Path, mlflow: Recorder) -> None:
    tracker = track(tmp_path, "mlflow", shown_samples=1)
    tracker.log({"val-core/a b/mean@1": 0.5, "x(1)": 1.0}, 1)
    tracker.log_samples([sample(0), sample(1)], 1)
    tracker.close()
    checkpoint(tmp_path, 1)
    track(tmp_path, "mlflow", resume_step=1).close()
    track(tmp_path, "mlflow").close()
    assert mlflow.of("set_experiment")[0] == (("project",), {})
    assert [kwargs for _, kwargs in mlflow.of("start_run")] == [
        {"run_name": "experiment"}, {"run_id": "r7"}, {"run_name": "experiment"},
    ]  # fmt: skip
    assert mlflow.of("log_metrics") == [(({"val-core/a b/mean_at_1": 0.5, "x_1_": 1.0},), {"step": 1, "synchronous": False})]
    (config, _), (samples, _), (_, _) = mlflow.of("log_dict")
    assert config[0]["ray_kwargs"]["env"]["HF_TOKEN"] == "***" and config[1] == "config.yaml"
    assert samples == ([sample(0)], "validation/step_1.json")
    assert [name for name, *_ in mlflow.calls[-2:]] == ["flush_async_logging", "end_run"]


def test_mlflow_that_cannot_start_is_skipped(tmp_path: Path, mlflow: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    mlflow.failures["set_experiment"] = MlflowError("no\nserver")
    track(tmp_path, "mlflow").close()
    assert capsys.readouterr().err == "logger mlflow left out: no server\n"


def test_swanlab_gets_metrics_samples_and_the_same_run_on_resume(
    tmp_path: Path, swanlab: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWANLAB_API_KEY", "k")
    tracker = track(tmp_path, "swanlab", shown_samples=1)
    tracker.log({"x": 0.5}, 1)
    tracker.log_samples([sample(0), sample(1)], 1)
    tracker.close()
    checkpoint(tmp_path, 1)
    track(tmp_path, "swanlab", resume_step=1).close()
    track(tmp_path, "swanlab").close()
    first, again, other = (kwargs for _, kwargs in swanlab.of("init"))
    assert first["project"] == "project" and first["experiment_name"] == "experiment" and first["logdir"] == f"{tmp_path}/swanlab"
    assert first["config"]["ray_kwargs"]["env"]["HF_TOKEN"] == "***" and first["config"].keys() == CONFIG.keys()
    assert first["id"] == again["id"] != other["id"] and len(first["id"]) == 21 and first["resume"] == "allow"
    assert swanlab.of("log") == [(({"x": 0.5},), {"step": 1}), (({"val/generations": ["a text"]},), {"step": 1})]
    assert swanlab.of("Text") == [(("«1»",), {"caption": "0= (1)"})] and len(swanlab.of("finish")) == 3


def test_local_swanlab_has_no_id(tmp_path: Path, swanlab: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "local")
    track(tmp_path, "swanlab").close()
    ((_, kwargs),) = swanlab.of("init")
    assert not {"id", "resume"} & kwargs.keys()


def test_swanlab_key_is_found_in_each_place(tmp_path: Path) -> None:
    env = {"SWANLAB_SAVE_DIR": str(tmp_path)}
    assert not swanlab_can_start(env) and swanlab_can_start(env | {"SWANLAB_MODE": "offline"})
    assert swanlab_can_start(env | {"SWANLAB_API_KEY": "k"}) and not swanlab_can_start(env | {"SWANLAB_MODE": "cloud"})
    (tmp_path / ".netrc").write_text("")
    assert swanlab_can_start(env)
