"""Validation of reward models and their combination with other options."""

import pytest

from configs.base.keys import ConfigError
from configs.compose import compose
from configs.schema.evaluation import EvaluationConfig
from configs.schema.generation import GenerationConfig
from configs.schema.ppo import PPOConfig
from configs.validation.programs import check_evaluation, check_generation, check_ppo

MODEL = "reward.models.a.path=x"


def ppo_lines(*overrides: str) -> list[str]:
    """Errors, or the notes if there are none."""
    config = compose("ppo_trainer", PPOConfig, overrides)
    try:
        return check_ppo(config, {override.partition("=")[0] for override in overrides}, needs_values=True)
    except ConfigError as error:
        return [f"error: {line}" for line in str(error).splitlines()]


def test_reward_models_with_and_without_rules_are_accepted() -> None:
    assert ppo_lines(MODEL) == [] == ppo_lines(MODEL, "reward.weight=0") == ppo_lines(MODEL, "reward.scorer=none")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a]"],
            "reward.timeout_score=0.0: algorithm.adv_estimator=gdpo needs",
        ),
        (
            ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=f1"],
            "reward.timeout_score=0.0: algorithm.filter_groups.metric=f1",
        ),
        (["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"], None),
    ],
)
def test_a_timeout_score_conflicts_with_other_reward_keys(words: list[str], message: str | None) -> None:
    """A response that timed out has only this score, not the scorer's other numbers."""
    lines = [line for line in ppo_lines(*words, "reward.timeout_score=0.0") if "timeout_score" in line]
    assert [line.startswith(f"error: {message}") for line in lines] == [True] * (message is not None)
    assert not [line for line in ppo_lines(*words) if "timeout_score" in line]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["reward.scorer=none"],
            "reward.scorer=none: there are no reward models either (reward.models), so nothing would score the",
        ),
        (["reward.weight=0"], "reward.weight=0: scores are only logged, and there are no reward models (reward.models) to"),
        ([MODEL, "reward.models.a.clip=[1,1]"], "reward.models.a.clip=[1, 1]: the lower bound must be less than the upper"),
        (
            [MODEL, "reward.models.a.kind=token", "reward.models.a.normalize=stored"],
            "reward.models.a.normalize=stored: applies to scores of whole",
        ),
        (
            [MODEL, "reward.models.a.kind=token", "reward.models.a.truncation=left"],
            "reward.models.a.truncation=left: reward.models.a",
        ),
        (
            [MODEL, "reward.reward_model.forward_max_token_len_per_gpu=1000"],
            "reward.models.a.forward_max_token_len_per_gpu=1000: a micro-batch of 1000 tokens cannot hold the longest row, "
            "data.max_prompt_length + data.max_response_length = 512 + 512",
        ),
        (
            [MODEL, "reward.models.a.max_length=40000"],
            "reward.models.a.forward_max_token_len_per_gpu=32768: a micro-batch of 32768 tokens cannot hold the longest row, "
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
def test_invalid_reward_keys_are_refused(words: list[str], message: str) -> None:
    (line,) = ppo_lines(*words)
    assert line.startswith(f"error: {message}"), line


def test_max_length_of_a_model_allows_smaller_micro_batches() -> None:
    assert ppo_lines(MODEL, "reward.models.a.max_length=900", "reward.reward_model.forward_max_token_len_per_gpu=1000") == []


def test_keys_without_a_model_and_filters_without_effect_give_notes() -> None:
    (line,) = ppo_lines("reward.reward_model.max_length=12")
    assert line.startswith("reward.reward_model.max_length has no effect: there are no reward models")
    filtered = ("algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.n=4")
    (line,) = ppo_lines(MODEL, *filtered)
    assert line.startswith("algorithm.filter_groups: scores of reward models are almost never equal")
    assert ppo_lines(MODEL, *filtered, "algorithm.filter_groups.metric=acc") == [] == ppo_lines(*filtered)


def test_running_statistics_and_missing_scorers_are_refused_without_training() -> None:
    config = compose("generation", GenerationConfig, [MODEL, "reward.models.a.normalize=running"])
    with pytest.raises(ConfigError, match=r"normalize=running: uses statistics over training steps; use stored or null"):
        check_generation(config, ())
    with pytest.raises(
        ConfigError,
        match=r"scorer=none: nothing would score the responses; trainer\.main_eval has no reward models, so set a scorer",
    ):
        check_evaluation(compose("evaluation", EvaluationConfig, ["reward.scorer=none"]), ())
