import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from configs.schema.ppo import AlgorithmConfig
from tests.trainer.algorithms.plain import defaults
from trainer.algorithms.advantages import ADVANTAGES, AdvantageInputs, Advantages, estimated, gae, grpo


def config(**changes: object) -> AlgorithmConfig:
    return replace(defaults().algorithm, **({"gamma": 0.97, "lam": 0.9} | changes))


def ragged(seed: int, n: int = 6) -> AdvantageInputs:
    """Rows of 1 to 9 tokens, masks with holes, the second row untrained."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 10, (n,), generator=g)
    total = int(lengths.sum())
    mask = (torch.rand(total, generator=g) < 0.7).float()
    mask[int(lengths[0]) : int(lengths[:2].sum())] = 0
    return AdvantageInputs(
        token_rewards=torch.randn(total, generator=g) * mask,
        response_mask=mask,
        lengths=lengths,
        uid=torch.randint(0, 3, (n,), generator=g),
        values=torch.randn(total, generator=g),
    )


def gae_by_definition(inputs: AdvantageInputs, gamma: float, lam: float) -> Tensor:
    """Definition as plain sums, row by row: A_t = sum_l (gamma lam)^l delta_{t+l} over the trained tokens of the row."""
    out, start = torch.zeros(len(inputs.token_rewards), dtype=torch.float64), 0
    for length in inputs.lengths.tolist():
        where = [t for t in range(start, start + length) if inputs.response_mask[t]]
        start += length
        values = [float(inputs.values[t]) for t in where] + [0.0]
        deltas = [float(inputs.token_rewards[t]) + gamma * values[k + 1] - values[k] for k, t in enumerate(where)]
        for k, t in enumerate(where):
            out[t] = sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(where)))
    return out


@given(st.integers(0, 10**6))
def test_gae_equals_its_definition(seed: int) -> None:
    inputs = ragged(seed)
    result = gae(inputs, config())
    trained = inputs.response_mask.bool()
    raw = gae_by_definition(inputs, 0.97, 0.9)
    torch.testing.assert_close(result.returns[trained].double(), (raw + inputs.values)[trained], atol=1e-5, rtol=1e-5)
    if trained.sum() > 1:
        white = (raw[trained] - raw[trained].mean()) / torch.sqrt(raw[trained].var() + 1e-8)
        torch.testing.assert_close(result.advantages[trained].double(), white, atol=1e-4, rtol=1e-4)
    assert not result.advantages[~trained].any() and not result.returns[~trained].any()


def scores_in_groups(groups: list[list[float]]) -> AdvantageInputs:
    """One row per response: two prompt tokens, then three response tokens, the score on the last."""
    flat = [(uid, score) for uid, group in enumerate(groups) for score in group]
    return AdvantageInputs(
        token_rewards=torch.tensor([x for _, score in flat for x in (0.0, 0.0, 0.0, 0.0, score)]),
        response_mask=torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0]).repeat(len(flat)),
        lengths=torch.full((len(flat),), 5),
        uid=torch.tensor([7 * uid + 3 for uid, _ in flat]),
    )


def test_grpo_divides_by_the_sample_deviation() -> None:
    result = grpo(scores_in_groups([[1.0, 0.0, 0.0, 1.0], [4.0, 2.0]]), config()).advantages.view(-1, 5)
    std = math.sqrt(1 / 3)
    expected = [
        0.5 / (std + 1e-6),
        -0.5 / (std + 1e-6),
        -0.5 / (std + 1e-6),
        0.5 / (std + 1e-6),
        1 / (math.sqrt(2) + 1e-6),
        -1 / (math.sqrt(2) + 1e-6),
    ]
    torch.testing.assert_close(result[:, 2:], torch.tensor(expected).unsqueeze(1).expand(-1, 3))
    assert not result[:, :2].any()


def test_grpo_group_of_one_keeps_its_score_and_equal_scores_give_zero() -> None:
    result = grpo(scores_in_groups([[0.75], [2.0, 2.0, 2.0]]), config()).advantages.view(-1, 5)[:, 4]
    torch.testing.assert_close(result, torch.tensor([0.75, 0.0, 0.0, 0.0]), atol=1e-5, rtol=1e-5)
    assert not result[1:].any(), "equal scores must give exactly zero"


def test_unknown_estimator_lists_known_names_and_duplicate_registration_raises() -> None:
    with pytest.raises(
        ValueError, match=r"adv_estimator=grop is not known \(did you mean g[a-z]+\?\); known: gae, gdpo, gpg, grpo, "
    ):
        ADVANTAGES["grop"]
    with pytest.raises(ValueError, match=r"grpo is already registered by trainer\.algorithms\.advantages:grpo"):
        ADVANTAGES.register("grpo")(gae)
    assert ADVANTAGES.needs("gae") == {"values"} and not ADVANTAGES.needs("grpo")


OWN = """
from trainer.algorithms.advantages import Advantages

def right(inputs, config):
    return inputs.outcome(inputs.lengths.float())

def tensor(inputs, config):
    return inputs.token_rewards

def scalar(inputs, config):
    return Advantages(inputs.token_rewards, inputs.token_rewards.sum())

def counts(inputs, config):
    return Advantages(inputs.response_mask.long(), inputs.token_rewards)

def verls(token_level_rewards, response_mask, config=None, **kwargs):
    return token_level_rewards * response_mask
"""


def test_results_and_errors_of_a_users_estimator_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    inputs = ragged(0)

    def run(name: str) -> Advantages:
        return estimated(inputs, config(adv_estimator=f"{tmp_path}/own.py:{name}"))

    assert torch.equal(run("right").advantages, inputs.outcome(inputs.lengths.float()).advantages)
    n = len(inputs.response_mask)
    for name, message in (
        ("tensor", "returned a Tensor; return inputs.outcome(values) or Advantages(advantages, returns)"),
        (
            "scalar",
            f"returned returns that are a tensor () of torch.float32; one float of each token, ({n},)",
        ),
        ("counts", "returned advantages that are a tensor"),
        ("verls", "TypeError: unsupported operand"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            run(name)
        assert str(caught.value).startswith(f"algorithm.adv_estimator={tmp_path}/own.py:{name}") and "\n" not in str(caught.value)
