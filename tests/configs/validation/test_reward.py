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
            "reward.timeout_score=0.0: algorithm.adv_estimator=gdpo needs",
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
    assert line.startswith("algorithm.filter_groups: scores of reward models are almost never equal")
    assert ppo_lines(MODEL, *filtered, "algorithm.filter_groups.metric=acc") == [] == ppo_lines(*filtered)


def test_without_a_training_nothing_runs() -> None:
    config = compose("generation", GenerationConfig, [MODEL, "reward.models.a.normalize=running"])
    with pytest.raises(ConfigError, match=r"normalize=running: uses statistics over training steps; use stored or null"):
        check_generation(config, ())
    with pytest.raises(
        ConfigError,
        match=r"scorer=none: nothing would score the responses; trainer\.main_eval has no reward models, so set a scorer",
    ):
        check_evaluation(compose("evaluation", EvaluationConfig, ["reward.scorer=none"]), ())
