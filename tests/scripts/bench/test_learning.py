"""Learning within 60 steps for every method, 80 on Megatron, and 120 for GRPO on every engine. Long: scripts/test.sh soak."""

from pathlib import Path

import pytest

from scripts.bench.learning import (
    ENGINE_STEPS,
    ENGINES,
    HEADS,
    MEGATRON,
    MEGATRON_STEPS,
    METHODS,
    SEEDS,
    Curve,
    draw,
    learn,
    rise,
    warm_up,
)
from tests.workers.rollout.vllm_workers import CPU_BUILD

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("sort_digits")
    return {seed: warm_up(folder, seed) for seed in SEEDS}


@pytest.mark.soak
@pytest.mark.parametrize("method", list(METHODS))
def test_accuracy_of_every_method_rises_within_60_steps(warm: dict[int, Path], tmp_path: Path, method: str) -> None:
    curves = [learn(model, tmp_path / str(seed), seed, METHODS[method]) for seed, model in warm.items()]
    print(f"{method}:", *(f"{curve[0][1]:.2f} -> {curve[-1][1]:.2f}" for curve in curves))
    assert all(curve[0][0] == 0 and curve[-1][0] == 60 for curve in curves)
    assert rise(curves) >= 0.15


@pytest.mark.soak
@pytest.mark.parametrize("way", list(MEGATRON))
def test_accuracy_of_megatron_runs_rises_within_80_steps(warm: dict[int, Path], tmp_path: Path, way: str) -> None:
    curves = [learn(model, tmp_path / str(seed), seed, MEGATRON[way], MEGATRON_STEPS) for seed, model in warm.items()]
    print(f"{way}:", *(f"{curve[0][1]:.2f} -> {curve[-1][1]:.2f}" for curve in curves))
    assert all(curve[0][0] == 0 and curve[-1][0] == MEGATRON_STEPS for curve in curves)
    assert rise(curves) >= 0.15


@pytest.fixture(scope="module")
def warm_for_engines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("heads_of_32")
    return {seed: warm_up(folder, seed, *HEADS) for seed in SEEDS}


@CPU_BUILD
@pytest.mark.soak
@pytest.mark.parametrize("engine", list(ENGINES))
def test_accuracy_of_grpo_rises_on_every_engine(warm_for_engines: dict[int, Path], tmp_path: Path, engine: str) -> None:
    curves = [learn(model, tmp_path / str(seed), seed, ENGINES[engine], ENGINE_STEPS) for seed, model in warm_for_engines.items()]
    print(f"{engine}:", *(f"{curve[0][1]:.2f} -> {curve[-1][1]:.2f}" for curve in curves))
    assert all(curve[0][0] == 0 and curve[-1][0] == ENGINE_STEPS for curve in curves)
    assert rise(curves) >= 0.15


def test_picture_of_curves_is_drawn_and_the_rise_is_their_median(tmp_path: Path) -> None:
    curves: list[Curve] = [[(0, 0.1), (10, 0.2)], [(0, 0.3), (10, 0.9)], [(0, 0.2), (10, 0.5)]]
    assert rise(curves) == pytest.approx(0.3)
    draw({"grpo": curves, "ppo": curves}, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").stat().st_size > 5000
