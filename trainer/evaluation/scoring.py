"""Scores outside of training: the scorers alone, no penalty and no shaping."""

from collections.abc import Sequence

from configs.schema.ppo import OverlongConfig, RewardConfig, RewardKwargsConfig, ScoringConfig, ShapingConfig
from trainer.rewards.scoring import Score


def as_reward(scoring: ScoringConfig) -> RewardConfig:
    """What the reward runner is built from: the score is the reward."""
    return RewardConfig(
        num_workers=scoring.num_workers,
        timeout=scoring.timeout,
        memory_limit_mb=scoring.memory_limit_mb,
        scorer=scoring.scorer,
        custom_reward_function=scoring.custom_reward_function,
        gsm8k=scoring.gsm8k,
        math_dapo=scoring.math_dapo,
        code=scoring.code,
        judge=scoring.judge,
        reward_kwargs=RewardKwargsConfig(
            max_resp_len=1, overlong_buffer_cfg=OverlongConfig(enable=False, len=0, penalty_factor=0.0, log=False)
        ),
        missing_eos_penalty=None,
        shaping=ShapingConfig(clip=None, normalize=None),
    )


def check_some_scored(scores: Sequence[Score], of_what: str) -> None:
    """Raises ValueError, with the first error, if there is no score at all."""
    if scores and all(score.value is None for score in scores):
        raise ValueError(f"all {len(scores)} rewards of {of_what} failed; the first: {scores[0].error}")
