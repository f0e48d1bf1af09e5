"""Status of a run directory: whether it has the requested configuration, how the run ended, what it reached."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from trainer.run.run_dir import CONFIG as CONFIG_FILE
from trainer.run.run_dir import GLOBAL_STEP, LATEST, METRICS, OUTCOME, json_line, write_config
from trainer.run.run_status import (
    Outcome,
    earlier_outcome,
    ended_with,
    last_metrics,
    objective_of,
    write_outcome,
)

CONFIG = {"optim": {"lr": 0.1}, "trainer": {"seed": 1}, "judge": {"api_key": "hidden"}}


def with_key(key: str, value: Any) -> dict[str, Any]:
    config = deepcopy(CONFIG)
    *groups, leaf = key.split(".")
    node: dict[str, Any] = config
    for group in groups:
        node = node.setdefault(group, {})
    node[leaf] = value
    return config


def test_outcome_of_new_interrupted_and_failed_runs(tmp_path: Path) -> None:
    assert earlier_outcome(tmp_path, CONFIG) is None, "the run has not begun"
    write_config(tmp_path, CONFIG)
    assert "hidden" not in (tmp_path / "config.yaml").read_text()
    assert earlier_outcome(tmp_path, CONFIG) == Outcome("interrupted", 0.0), "the run was killed"
    write_outcome(tmp_path, "failed", 1.23456)
    assert earlier_outcome(tmp_path, CONFIG) == Outcome("failed", 1.235)


@pytest.mark.parametrize(
    "key",
    [
        "trainer.default_local_dir", "trainer.resume_mode", "trainer.max_restarts", "trainer.walltime", "trainer.watch.disk_gb",
        "trainer.logger", "trainer.objective", "trainer.dry_run", "trainer.full_traceback", "timeouts.step", "ray_kwargs.a.b",
        "trainer.project_name", "trainer.experiment_name", "trainer.export_dir", "trainer.rollout_data_dir",
    ],
)  # fmt: skip
def test_keys_without_effect_on_the_result_may_change(key: str, tmp_path: Path) -> None:
    write_config(tmp_path, with_key(key, "old"))
    assert earlier_outcome(tmp_path, with_key(key, "new")) == earlier_outcome(tmp_path, CONFIG) == Outcome("interrupted", 0.0)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (CONFIG, with_key("optim.lr", 0.2), "holds a run with optim.lr=0.1, not 0.2: "),
        (with_key("trainer.watchful", 1), CONFIG, "holds a run with trainer.watchful=1, not (not set): "),
        (CONFIG, with_key("trainer.objectives", 1), "holds a run with trainer.objectives=(not set), not 1: "),
    ],
)
def test_other_configuration_is_reported_by_its_first_key(
    before: dict[str, Any], now: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_config(tmp_path, before)
    write_outcome(tmp_path, "finished", 1.0)
    with pytest.raises(ValueError) as caught:
        earlier_outcome(tmp_path, now)
    assert str(caught.value).startswith(f"{tmp_path} {message}")


def ended(run_dir: Path) -> Path:
    """The directory of a finished run with CONFIG."""
    write_config(run_dir, CONFIG)
    (run_dir / METRICS).write_text("".join(json_line({GLOBAL_STEP: step}) for step in (1, 2, 3)))
    for step in (2, 3):
        (run_dir / f"global_step_{step}").mkdir(parents=True)
    (run_dir / LATEST).write_text("3")
    write_outcome(run_dir, "finished", 1.0)
    return run_dir


@pytest.mark.parametrize(
    "otherwise",
    [
        lambda run_dir: write_config(run_dir, with_key("optim.lr", 0.2)),
        lambda run_dir: write_outcome(run_dir, "failed", 1.0),
        lambda run_dir: (run_dir / OUTCOME).unlink(),
        lambda run_dir: (run_dir / LATEST).unlink(),
        lambda run_dir: (run_dir / LATEST).write_text("2"),
        lambda run_dir: (run_dir / "global_step_3").rmdir(),
        lambda run_dir: (run_dir / CONFIG_FILE).unlink(),
    ],
    ids=["another", "failed", "killed", "nothing saved", "gone back to", "removed", "not begun"],
)
def test_only_a_finished_run_with_its_last_checkpoint_has_ended(otherwise: Any, tmp_path: Path) -> None:
    assert ended_with(ended(tmp_path), CONFIG) == 3
    otherwise(tmp_path)
    assert ended_with(tmp_path, CONFIG) is None


def test_last_value_of_each_metric_counts(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text("".join(map(json_line, [{"a": 1.0, "b": 2.0}, {"a": 3.0}])))
    assert last_metrics(tmp_path) == {"a": 3.0, "b": 2.0}
    assert (objective_of(tmp_path, "a"), objective_of(tmp_path, "-b")) == (3.0, -2.0)


def test_former_default_of_the_critics_model_is_the_same_run(tmp_path: Path) -> None:
    """The critic's model now follows the policy's, and had a default of its own."""
    now = with_key("critic.model.path", "base")
    write_config(tmp_path, with_key("critic.model.path", "/a/models/deepseek-llm-7b-chat"))
    assert earlier_outcome(tmp_path, now) == Outcome("interrupted", 0.0)
    write_config(tmp_path, with_key("critic.model.path", "another"))
    with pytest.raises(ValueError, match=r"holds a run with critic\.model\.path="):
        earlier_outcome(tmp_path, now)
