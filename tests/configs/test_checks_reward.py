"""Reward models that do not go together with the rest."""

import pytest

from configs.checks import check_evaluation, check_generation, check_ppo
from configs.compose import compose
from configs.keys import ConfigError
from configs.schema.evaluation import EvaluationConfig
from configs.schema.generation import GenerationConfig
from configs.schema.ppo import PPOConfig

MODEL = "reward.models.a.path=x"


def ppo_lines(*overrides: str) -> list[str]:
    """The problems; none: the notes."""
    config = compose("ppo_trainer", PPOConfig, overrides)
    try:
        return check_ppo(config, {override.partition("=")[0] for override in overrides}, needs_values=True)
    except ConfigError as error:
        return [f"error: {line}" for line in str(error).splitlines()]


def test_models_beside_rules_and_alone_work() -> None:
    assert ppo_lines(MODEL) == [] == ppo_lines(MODEL, "reward.weight=0") == ppo_lines(MODEL, "reward.scorer=none")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a]"],
            "reward.timeout_score=0.0: algorithm.adv_estimator=gdpo wants",
        ),
        (
            ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=f1"],
            "reward.timeout_score=0.0: algorithm.filter_groups.metric=f1",
        ),
        (["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"], None),
    ],
)
def test_a_late_answer_that_is_kept_has_a_score_alone(words: list[str], told: str | None) -> None:
    lines = [line for line in ppo_lines(*words, "reward.timeout_score=0.0") if "timeout_score" in line]
    assert [line.startswith(f"error: {told}") for line in lines] == [True] * (told is not None)
    assert not [line for line in ppo_lines(*words) if "timeout_score" in line]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["reward.scorer=none"],
            "reward.scorer=none: no reward models either (reward.models): nothing would score the",
        ),
        (["reward.weight=0"], "reward.weight=0: the scores are measured only, and there are no reward models (reward.models) to"),
        ([MODEL, "reward.models.a.clip=[1,1]"], "reward.models.a.clip=[1, 1]: the first must be less than the second"),
        (
            [MODEL, "reward.models.a.kind=token", "reward.models.a.normalize=stored"],
            "reward.models.a.normalize=stored: is of whole",
        ),
        (
            [MODEL, "reward.models.a.kind=token", "reward.models.a.truncation=left"],
            "reward.models.a.truncation=left: reward.models.a",
        ),
        (
            [MODEL, "reward.reward_model.forward_max_token_len_per_gpu=1000"],
            "reward.models.a.forward_max_token_len_per_gpu=1000: a micro-batch of so many tokens does not hold the longest row, "
            "data.max_prompt_length + data.max_response_length = 512 + 512",
        ),
        (
            [MODEL, "reward.models.a.max_length=40000"],
            "reward.models.a.forward_max_token_len_per_gpu=32768: a micro-batch of so many tokens does not hold the longest row, "
            "reward.models.a.max_length = 40000",
        ),
        (
            [MODEL, "reward.models.a.fsdp_config.ulysses_sequence_parallel_size=3"],
            "reward.models.a.fsdp_config.ulysses_sequence_parallel_size=3: does not divide 8 workers",
        ),
        (
            [MODEL, "actor_rollout_ref.actor.strategy=megatron", "reward.models.a.megatron.tensor_model_parallel_size=2"],
            "reward.models.a.megatron.tensor_model_parallel_size=2: actor_rollout_ref.actor.megatron.tensor_model_parallel_size=",
        ),
    ],
)
def test_what_cannot_work_is_told(words: list[str], told: str) -> None:
    (line,) = ppo_lines(*words)
    assert line.startswith(f"error: {told}"), line


def test_a_shorter_bound_lets_micro_batches_be_smaller() -> None:
    assert ppo_lines(MODEL, "reward.models.a.max_length=900", "reward.reward_model.forward_max_token_len_per_gpu=1000") == []


def test_keys_without_a_model_and_filters_that_drop_nothing_are_told() -> None:
    (line,) = ppo_lines("reward.reward_model.max_length=12")
    assert line.startswith("reward.reward_model.max_length has no effect: there are no reward models")
    filtered = ("algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.n=4")
    (line,) = ppo_lines(MODEL, *filtered)
    assert line.startswith("algorithm.filter_groups: with reward models two answers hardly ever have the same score")
    assert ppo_lines(MODEL, *filtered, "algorithm.filter_groups.metric=acc") == [] == ppo_lines(*filtered)


def test_without_a_training_nothing_runs() -> None:
    config = compose("generation", GenerationConfig, [MODEL, "reward.models.a.normalize=running"])
    with pytest.raises(ConfigError, match="normalize=running: it is over the steps of a training; stored, or null"):
        check_generation(config, ())
    with pytest.raises(ConfigError, match="scorer=none: nothing would score the answers; there are no reward models here"):
        check_evaluation(compose("evaluation", EvaluationConfig, ["reward.scorer=none"]), ())
