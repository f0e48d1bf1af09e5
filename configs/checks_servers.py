"""Servers of rewards, those that are asked and the one that we are; see configs/checks.py."""

import os
from collections.abc import Collection, Iterator

from configs.addresses import is_loopback, url_problem
from configs.checks_rollout import ROLLOUT, engine_problems
from configs.reward_models import reward_models
from configs.schema.ppo import ModelScoringConfig, RemoteScoringConfig
from configs.schema.scoring_model import ScoringModelConfig
from configs.schema.serve_reward import ServerConfig, ServeRewardConfig
from configs.secret_names import SHORTEST, is_secret


def remote_problems(reward: RemoteScoringConfig) -> Iterator[str]:
    for url in reward.remote_urls:
        if (problem := url_problem(url)) is not None:
            yield f"reward.remote_urls{problem}"
    yield from _name_problems("reward.remote.token_env", reward.remote.token_env)


def served_problems(key: str, model: ScoringModelConfig) -> Iterator[str]:
    """Of a reward model on servers."""
    for url in model.urls:
        if (problem := url_problem(url)) is not None:
            yield f"{key}.urls{problem}"
    if model.kind == "token":
        yield f"{key}.kind=token: a server gives an answer one score; sequence"
    if model.normalize == "stored":
        yield f"{key}.normalize=stored: the statistics lie beside the model: its server normalises; running, or null"


def remote_notes(reward: RemoteScoringConfig, typed: Collection[str]) -> Iterator[str]:
    by_servers = isinstance(reward, ModelScoringConfig) and any(model.urls for model in reward_models(reward).values())
    if not reward.remote_urls and not by_servers:
        for key in sorted(key for key in typed if key.startswith("reward.remote.")):
            yield f"{key} has no effect: reward.remote_urls names no server"
    if not reward.remote_urls:
        return
    for key, value in (("scorer", reward.scorer), ("custom_reward_function.path", reward.custom_reward_function.path)):
        if value is not None:
            yield f"reward.{key}={value} has no effect: reward.remote_urls gives the scores"


def server_problems(server: ServerConfig) -> Iterator[str]:
    token = os.environ.get(server.token_env, "").strip()
    yield from _name_problems("server.token_env", server.token_env)
    if not token and not is_loopback(server.host):
        yield (
            f"server.host={server.host}: other machines reach it, and there is no token: set the environment variable "
            f"{server.token_env} (server.token_env) here and where the trainer runs, or take 127.0.0.1"
        )
    if token and len(token) < SHORTEST:
        yield f"{server.token_env}: a token of {len(token)} characters is soon guessed; {SHORTEST} at least"


def judge_engine_problems(config: ServeRewardConfig) -> Iterator[str]:
    engine, judge = config.judge_engine, config.reward.judge
    if not engine.enable:
        return
    others = {"model.path": config.model.path, "reward.scorer": config.reward.scorer}
    for key, value in (others | {"reward.custom_reward_function.path": config.reward.custom_reward_function.path}).items():
        if value is not None:
            yield f"judge_engine.enable=true: a server gives one score, and {key}={value} gives another; leave one of them out"
    longest, bound = engine.max_prompt_length + judge.max_tokens, engine.rollout.max_model_len
    if bound is not None and bound < longest:
        words = f"judge_engine.max_prompt_length + reward.judge.max_tokens = {engine.max_prompt_length} + {judge.max_tokens}"
        yield f"judge_engine.rollout.max_model_len={bound}: less than {words} = {longest}"
    for problem in engine_problems(engine.rollout, config.trainer, {}):
        yield problem.replace(ROLLOUT, "judge_engine.rollout")


def _name_problems(key: str, name: str) -> Iterator[str]:
    """What is not named like a secret would be shown wherever it turns up."""
    if not is_secret(name):
        yield f"{key}={name}: the variable's name must end like a secret's (..._TOKEN, ..._API_KEY), so that its value is hidden"
