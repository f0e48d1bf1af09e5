"""Reward models that do not go together with the rest; see configs/checks.py."""

from collections.abc import Collection, Iterator

from configs.checks_batches import Cut
from configs.checks_rollout import Workers
from configs.checks_servers import served_problems
from configs.reward_models import SHORT_FORM, model_key, reward_models
from configs.rules import NO_RULES, has_score
from configs.schema.generation import GenerationConfig
from configs.schema.ppo import ModelScoringConfig, PPOConfig
from configs.schema.scoring_model import ScoringModelConfig


def reward_model_problems(reward: ModelScoringConfig, workers: Workers, prompt: int, response: int) -> Iterator[str]:
    """workers: the models' own. prompt, response: tokens that each may have at most. Raises ConfigError for what is no model."""
    models = reward_models(reward)
    if not models and not has_score(reward):
        yield f"reward.scorer={NO_RULES}: no reward models either (reward.models): nothing would score the answers; name one"
    elif not models and reward.weight == 0:
        yield "reward.weight=0: the scores are measured only, and there are no reward models (reward.models) to decide; name one"
    for name, model in models.items():
        yield from model_problems(model_key(name, reward), model, workers, prompt, response)


def model_problems(key: str, model: ScoringModelConfig, workers: Workers, prompt: int, response: int) -> Iterator[str]:
    """prompt, response: tokens that each may have at most, where the model has no max_length."""
    if model.clip is not None and model.clip[0] >= model.clip[1]:
        yield f"{key}.clip=[{model.clip[0]:g}, {model.clip[1]:g}]: the first must be less than the second"
    if model.urls:
        yield from served_problems(key, model)
        return
    longest, in_words = prompt + response, f"data.max_prompt_length + data.max_response_length = {prompt} + {response}"
    if model.max_length is not None:
        longest, in_words = model.max_length, f"{key}.max_length = {model.max_length}"
    yield from scoring_cut(key, model, workers).problems(longest, in_words)
    if model.kind == "token" and model.normalize is not None:
        yield f"{key}.normalize={model.normalize}: is of whole answers' scores, and {key}.kind=token has those of tokens; null"
    if model.kind == "token" and model.truncation != "fail":
        yield f"{key}.truncation={model.truncation}: {key}.kind=token wants a score for every token of the answer; fail"


def scoring_cut(key: str, model: ScoringModelConfig, workers: Workers) -> Cut:
    """How a reward model cuts its micro-batches."""
    return Cut(
        key,
        model,
        workers,
        "forward_",
        model.forward_micro_batch_size_per_gpu,
        model.forward_micro_batch_size,
        model.use_dynamic_bsz,
        model.forward_max_token_len_per_gpu,
    )


def generation_problems(config: GenerationConfig) -> Iterator[str]:
    """Of reward models where nothing is trained."""
    reward, data = config.reward, config.data
    yield from reward_model_problems(reward, config.trainer, data.max_prompt_length, data.max_response_length)
    for name, model in reward_models(reward).items():
        if model.normalize == "running":
            yield f"{model_key(name, reward)}.normalize=running: it is over the steps of a training; stored, or null"


def timeout_score_problems(config: PPOConfig) -> Iterator[str]:
    """A late answer that is kept has the score, and none of the other numbers that the function gives."""
    algorithm, kept = config.algorithm, f"reward.timeout_score={config.reward.timeout_score}"
    own = algorithm.filter_groups.metric if algorithm.filter_groups.enable else None
    if config.reward.timeout_score is None:
        return
    if algorithm.adv_estimator == "gdpo":
        yield f"{kept}: algorithm.adv_estimator=gdpo wants numbers of every answer that a late one does not have; take null"
    if own not in (None, "score", "acc", "reward", "seq_reward"):
        yield f"{kept}: algorithm.filter_groups.metric={own} is a number that a late answer does not have; take null"


def reward_model_notes(reward: ModelScoringConfig, typed: Collection[str]) -> Iterator[str]:
    if reward_models(reward):
        return
    below = f"reward.{SHORT_FORM}."
    for key in sorted(key for key in typed if key.startswith(below) and key != f"{below}enable"):
        yield f"{key} has no effect: there are no reward models ({below}enable=true, or reward.models)"


def filter_notes(config: PPOConfig) -> Iterator[str]:
    """What algorithm.filter_groups makes of models' scores."""
    if reward_models(config.reward) and config.algorithm.filter_groups.enable and config.algorithm.filter_groups.metric is None:
        yield (
            "algorithm.filter_groups: with reward models two answers hardly ever have the same score, so that no group is "
            "dropped; algorithm.filter_groups.metric=acc compares the scorer's alone"
        )
