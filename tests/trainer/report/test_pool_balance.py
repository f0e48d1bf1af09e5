import pytest

from trainer.report.pool_balance import balance_line


def steps(rollout: float, trainer: float, n: int = 7) -> list[dict[str, float]]:
    """The first step has waited for its own generation, the last has generated nothing."""
    first = {"perf/rollout_idle": 0.0, "perf/trainer_idle": 0.9}
    return [first, *[{"perf/rollout_idle": rollout, "perf/trainer_idle": trainer}] * n, {"timing_s/gen": 0.0}]


@pytest.mark.parametrize(
    ("rollout", "trainer", "starts", "advises"),
    [
        (0.43, 0.01, "the engines wait 43% of a step for the trainer, which waits 1%", "from the rollout pool to the trainer's"),
        (0.02, 0.35, "the trainer waits 35% of a step for the engines, which wait 2%", "from the trainer's pool to the rollout"),
        (0.04, 0.1, "the pools are balanced: the engines wait 4% of a step, the trainer 10%", ""),
    ],
)
def test_advice_is_to_move_gpus_to_the_pool_that_is_waited_for(rollout: float, trainer: float, starts: str, advises: str) -> None:
    line = balance_line(steps(rollout, trainer))
    assert line is not None and line.startswith(starts) and advises in line
    assert ("placement.pools" in line) == bool(advises) and ("oversubmit" in line) == (trainer > 0.1)


def test_without_generation_ahead_there_is_no_balance() -> None:
    assert balance_line([]) is None and balance_line([{"timing_s/gen": 1.0, "timing_s/step": 2.0}]) is None
