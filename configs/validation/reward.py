"""Validate reward models and their combination with other options; see configs/validation/programs.py."""

from collections.abc import Collection, Iterator

from configs.base.addresses import url_problem
from configs.reward_models import SHORT_FORM, model_key, reward_models
from configs.schema.generation import GenerationConfig
from configs.schema.ppo import NO_RULES, ModelScoringConfig, PPOConfig, RemoteScoringConfig, has_score
from configs.schema.scoring_model import ScoringModelConfig
from configs.validation.batches import scoring_cut
from configs.validation.rollout import Workers


def reward_model_problems(reward: ModelScoringConfig, workers: Workers, prompt: int, response: int) -> Iterator[str]:
    """Problems of a run's reward models.

    workers: those of the reward models. prompt, response: maximum lengths in tokens. Raises ConfigError for an invalid entry.
    """
    models = reward_models(reward)
    if not models and not has_score(reward):
        yield (
            f"reward.scorer={NO_RULES}: there are no reward models either (reward.models), so nothing would score the "
            "responses; add one"
        )
    elif not models and reward.weight == 0:
        yield (
            "reward.weight=0: scores are only logged, and there are no reward models (reward.models) to compute the reward; "
            "add one"
        )
    for name, model in models.items():
        yield from model_problems(model_key(name, reward), model, workers, prompt, response)


def model_problems(key: str, model: ScoringModelConfig, workers: Workers, prompt: int, response: int) -> Iterator[str]:
    """Problems of one reward model. prompt, response: maximum lengths in tokens, used if the model has no max_length."""
    if model.clip is not None and model.clip[0] >= model.clip[1]:
        yield f"{key}.clip=[{model.clip[0]:g}, {model.clip[1]:g}]: the lower bound must be less than the upper"
    # The remaining checks are about local workers, which a model on servers does not have.
    if model.urls:
        for url in model.urls:
            if (problem := url_problem(url)) is not None:
                yield f"{key}.urls{problem}"
        if model.kind == "token":
            yield f"{key}.kind=token: a server returns one score per response; use sequence"
        if model.normalize == "stored":
            stored = "the statistics are stored with the model, so its server normalizes; use running or null"
            yield f"{key}.normalize=stored: {stored}"
        return
    longest, in_words = prompt + response, f"data.max_prompt_length + data.max_response_length = {prompt} + {response}"
    if model.max_length is not None:
        longest, in_words = model.max_length, f"{key}.max_length = {model.max_length}"
    yield from scoring_cut(key, model, workers).problems(longest, in_words)
    if model.kind == "token" and model.normalize is not None:
        yield (
            f"{key}.normalize={model.normalize}: applies to scores of whole responses, but {key}.kind=token scores tokens; use "
            "null"
        )
    if model.kind == "token" and model.truncation != "fail":
        yield f"{key}.truncation={model.truncation}: {key}.kind=token needs a score for every token of the response; use fail"


def generation_problems(config: GenerationConfig) -> Iterator[str]:
    """Problems of reward models in trainer.main_generation."""
    reward, data = config.reward, config.data
    yield from reward_model_problems(reward, config.trainer, data.max_prompt_length, data.max_response_length)
    for name, model in reward_models(reward).items():
        if model.normalize == "running":
            yield f"{model_key(name, reward)}.normalize=running: uses statistics over training steps; use stored or null"


def timeout_score_problems(config: PPOConfig) -> Iterator[str]:
    """Problems of reward.timeout_score: a response whose scoring timed out has a score, but no other numbers."""
    algorithm, kept = config.algorithm, f"reward.timeout_score={config.reward.timeout_score}"
    own = algorithm.filter_groups.metric if algorithm.filter_groups.enable else None
    if config.reward.timeout_score is None:
        return
    if algorithm.adv_estimator == "gdpo":
        yield f"{kept}: algorithm.adv_estimator=gdpo needs numbers that a response with a timeout does not have; use null"
    if own not in (None, "score", "acc", "reward", "seq_reward"):
        yield f"{kept}: algorithm.filter_groups.metric={own} is a number that a response with a timeout does not have; use null"


def reward_model_notes(reward: ModelScoringConfig, typed: Collection[str]) -> Iterator[str]:
    """Warnings about reward-model keys without a reward model."""
    if reward_models(reward):
        return
    below = f"reward.{SHORT_FORM}."
    for key in sorted(key for key in typed if key.startswith(below) and key != f"{below}enable"):
        yield f"{key} has no effect: there are no reward models ({below}enable=true, or reward.models)"


def filter_notes(config: PPOConfig) -> Iterator[str]:
    """Warnings about algorithm.filter_groups with reward models."""
    if reward_models(config.reward) and config.algorithm.filter_groups.enable and config.algorithm.filter_groups.metric is None:
        yield (
            "algorithm.filter_groups: scores of reward models are almost never equal, so no group is dropped; "
            "use algorithm.filter_groups.metric=acc to compare only the scorer's results"
        )


def remote_notes(reward: RemoteScoringConfig, typed: Collection[str]) -> Iterator[str]:
    """Warnings about server keys without servers, and scorers that servers replace."""
    by_servers = isinstance(reward, ModelScoringConfig) and any(model.urls for model in reward_models(reward).values())
    if not reward.remote_urls and not by_servers:
        for key in sorted(key for key in typed if key.startswith("reward.remote.")):
            yield f"{key} has no effect: reward.remote_urls is empty"
    if not reward.remote_urls:
        return
    for key, value in (("scorer", reward.scorer), ("custom_reward_function.path", reward.custom_reward_function.path)):
        if value is not None:
            yield f"reward.{key}={value} has no effect: the servers in reward.remote_urls compute the scores"
