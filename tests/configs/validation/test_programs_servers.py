"""Reward servers: addresses, tokens, and keys without effect."""

import pytest

from configs.base.keys import ConfigError
from configs.compose import compose
from configs.schema.evaluation import EvaluationConfig
from configs.schema.ppo import PPOConfig
from configs.validation.programs import check_evaluation, check_ppo

URL = "http://127.0.0.1:8000/get_reward"


def lines(*overrides: str) -> list[str]:
    """Errors, or the notes if there are none."""
    typed = [override.partition("=")[0] for override in overrides]
    try:
        return check_ppo(compose("ppo_trainer", PPOConfig, ["recipe=quickstart", *overrides]), typed, needs_values=False)
    except ConfigError as error:
        return [f"error: {line}" for line in str(error).splitlines()]


def test_valid_servers_have_no_errors_or_notes() -> None:
    assert lines(f"reward.remote_urls=[{URL}]", "reward.remote.batch_size=8", "reward.remote.token_env=MY_API_KEY") == lines()
    assert lines(f"reward.models.far={{urls: [{URL}]}}", "reward.remote.batch_size=8") == lines()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "reward.remote_urls=[127.0.0.1:8000]",
            "reward.remote_urls=127.0.0.1:8000: must be http://HOST:PORT/PATH or https://...",
        ),
        ("reward.remote.token_env=MINE", "reward.remote.token_env=MINE: the variable's name must end like that of a secret"),
        ("reward.models.far={urls: [nowhere]}", "reward.models.far.urls=nowhere: must be http://HOST:PORT/PATH"),
        (
            f"reward.models.far={{urls: [{URL}], kind: token}}",
            "reward.models.far.kind=token: a server returns one score per response",
        ),
        (
            f"reward.models.far={{urls: [{URL}], normalize: stored}}",
            "reward.models.far.normalize=stored: the statistics are stored with",
        ),
        (f"reward.models.far={{urls: [{URL}], path: a}}", "reward.models.far.urls: conflicts with reward.models.far.path=a"),
        (f"reward.models.far={{urls: [{URL}], clip: [1, 0]}}", "reward.models.far.clip=[1, 0]: the lower bound must be less"),
    ],
)
def test_invalid_servers_are_refused(override: str, line: str) -> None:
    (error,) = lines(override)
    assert error.startswith(f"error: {line}")


def test_keys_without_effect_give_notes() -> None:
    assert lines("reward.remote.retries=5") == [
        *lines(),
        "reward.remote.retries has no effect: reward.remote_urls is empty",
    ]
    notes = lines(f"reward.remote_urls=[{URL}]", "reward.scorer=math")
    assert notes == [*lines(), "reward.scorer=math has no effect: the servers in reward.remote_urls compute the scores"]
    config = compose("evaluation", EvaluationConfig, [f"reward.remote_urls=[{URL}]", "custom_reward_function.path=mine.py"])
    assert check_evaluation(config, []) == [
        "reward.custom_reward_function.path=mine.py has no effect: the servers in reward.remote_urls compute the scores"
    ]


def test_servers_replace_a_scorer_that_is_none() -> None:
    """reward.scorer=none alone leaves no source of scores."""
    assert lines("reward.scorer=none")[0].startswith("error: reward.scorer=none: there are no reward models either")
    assert lines("reward.scorer=none", f"reward.remote_urls=[{URL}]") == [
        *lines(),
        "reward.scorer=none has no effect: the servers in reward.remote_urls compute the scores",
    ]
