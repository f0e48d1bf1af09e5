"""Validate reward servers: those a run sends requests to, and trainer.main_serve_reward; see configs/validation/programs.py."""

import os
from collections.abc import Collection, Iterator

from configs.base.addresses import is_loopback, url_problem
from configs.base.secrets import SHORTEST, is_secret
from configs.reward_models import reward_models
from configs.schema.ppo import ModelScoringConfig, RemoteScoringConfig
from configs.schema.scoring_model import ScoringModelConfig
from configs.schema.serve_reward import ServerConfig, ServeRewardConfig
from configs.validation.rollout import ROLLOUT, engine_problems


def remote_problems(reward: RemoteScoringConfig) -> Iterator[str]:
    """Problems of servers that replace the scorer."""
    for url in reward.remote_urls:
        if (problem := url_problem(url)) is not None:
            yield f"reward.remote_urls{problem}"
    yield from _name_problems("reward.remote.token_env", reward.remote.token_env)


def served_problems(key: str, model: ScoringModelConfig) -> Iterator[str]:
    """Problems of a reward model on servers."""
    for url in model.urls:
        if (problem := url_problem(url)) is not None:
            yield f"{key}.urls{problem}"
    if model.kind == "token":
        yield f"{key}.kind=token: a server returns one score per response; use sequence"
    if model.normalize == "stored":
        yield f"{key}.normalize=stored: the statistics are stored with the model, so its server normalizes; use running or null"


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


def server_problems(server: ServerConfig) -> Iterator[str]:
    """Problems of the server's address and token."""
    # An unauthenticated server is only acceptable if no other machine can reach it.
    token = os.environ.get(server.token_env, "").strip()
    yield from _name_problems("server.token_env", server.token_env)
    if not token and not is_loopback(server.host):
        yield (
            f"server.host={server.host}: reachable from other machines without a token; set the environment variable "
            f"{server.token_env} (server.token_env) here and where the trainer runs, or use 127.0.0.1"
        )
    if token and len(token) < SHORTEST:
        yield f"{server.token_env}: a token of {len(token)} characters is too easy to guess; use at least {SHORTEST}"


def judge_engine_problems(config: ServeRewardConfig) -> Iterator[str]:
    """Problems of a served language-model judge."""
    engine, judge = config.judge_engine, config.reward.judge
    if not engine.enable:
        return
    others = {"model.path": config.model.path, "reward.scorer": config.reward.scorer}
    for key, value in (others | {"reward.custom_reward_function.path": config.reward.custom_reward_function.path}).items():
        if value is not None:
            yield (
                f"judge_engine.enable=true: a server returns a single score, but {key}={value} also computes one; remove one of "
                "them"
            )
    longest, bound = engine.max_prompt_length + judge.max_tokens, engine.rollout.max_model_len
    if bound is not None and bound < longest:
        words = f"judge_engine.max_prompt_length + reward.judge.max_tokens = {engine.max_prompt_length} + {judge.max_tokens}"
        yield f"judge_engine.rollout.max_model_len={bound}: less than {words} = {longest}"
    for problem in engine_problems(engine.rollout, config.trainer, {}):
        # The engine checks name the keys of a training run; here the same block has another key.
        yield problem.replace(ROLLOUT, "judge_engine.rollout")


def _name_problems(key: str, name: str) -> Iterator[str]:
    """Problems of the name of a token's variable: values are only hidden in logs if the name is recognized as a secret's."""
    if not is_secret(name):
        yield (
            f"{key}={name}: the variable's name must end like that of a secret (..._TOKEN, ..._API_KEY), so that its value is "
            "hidden in logs"
        )
