"""Learning of the quick start with three seeds, by GRPO and PPO. Long: scripts/test.sh soak."""

import json
import statistics
from pathlib import Path

import pytest

from scripts.bench.learning import run, warm_up

SEEDS = (11, 12, 13)
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def warm_models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The quick start's data, and a model for each seed, warmed up as in scripts/quickstart.sh."""
    task = tmp_path_factory.mktemp("sort_digits")
    return {seed: warm_up(task, seed) for seed in SEEDS}


def accuracies(warm: Path, run_dir: Path, seed: int, *overrides: str) -> tuple[float, float, float]:
    """Held-out greedy accuracy before and after, and seconds of the steps between."""
    task = warm.parent
    run(
        "trainer.main_ppo", "recipe=quickstart", f"trainer.seed={seed}", f"data.train_files={task}/train.parquet",
        f"data.val_files={task}/test.parquet", f"actor_rollout_ref.model.path={warm}", f"critic.model.path={warm}",
        f"trainer.default_local_dir={run_dir}", "trainer.logger=[]", *overrides,
    )  # fmt: skip
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return steps[0]["val/accuracy"], steps[-1]["val/accuracy"], sum(step.get("timing_s/step", 0.0) for step in steps)


def table(warm_models: dict[int, Path], folder: Path, *overrides: str) -> list[tuple[float, float, float]]:
    rows = [accuracies(warm, folder / str(seed), seed, *overrides) for seed, warm in warm_models.items()]
    print(*(f"seed {seed}: {a:.3f} -> {b:.3f} in {s:.0f} s" for seed, (a, b, s) in zip(SEEDS, rows, strict=True)), sep="\n")
    return rows


def test_grpo_reaches_085_within_three_minutes(warm_models: dict[int, Path], tmp_path: Path) -> None:
    for before, after, seconds in table(warm_models, tmp_path):
        assert 0.35 < before < 0.7 and after >= 0.85 and seconds < 180


@pytest.mark.parametrize(
    "overrides",
    [("trainer.n_gpus_per_node=2",), ("algorithm=ppo",), ("algorithm=ppo", "trainer.n_gpus_per_node=2")],
    ids=["grpo-2", "ppo-1", "ppo-2"],
)
def test_accuracy_of_ppo_and_of_two_workers_rises(
    warm_models: dict[int, Path], tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    rises = [after - before for before, after, _ in table(warm_models, tmp_path, *overrides)]
    assert statistics.median(rises) >= 0.15, rises
