from dataclasses import replace
from typing import Any

import pytest

from configs.schema.ppo import RolloutCorrectionConfig
from tests.trainer.algorithms.plain import defaults
from trainer.algorithms.correction_rules import rejection_rules, weight_bounds


def config(**changes: Any) -> RolloutCorrectionConfig:
    return replace(defaults().algorithm.rollout_correction, **changes)


def test_invalid_bounds_raise_a_one_line_error() -> None:
    assert weight_bounds("2") == (None, 2.0) and weight_bounds("0.5_5.0") == (0.5, 5.0)
    for spec in ("5.0_0.5", "0", "two", "1_2_3"):
        with pytest.raises(ValueError, match=r"rollout_is_threshold=.*(upper bound above 0|neither a number)"):
            weight_bounds(spec)
    with pytest.raises(ValueError, match=r"rollout_rs=token_k4: must be a comma-separated list of token_k1, "):
        rejection_rules(config(rollout_rs="token_k4", rollout_rs_threshold="1"))
    with pytest.raises(ValueError, match=r"rollout_rs_threshold=None: must be one bound for all rules, or 2"):
        rejection_rules(config(rollout_rs="token_k1,seq_sum_k2"))
    with pytest.raises(ValueError, match=r"token_k2 takes one upper bound"):
        rejection_rules(config(rollout_rs="token_k2", rollout_rs_threshold="0.1_0.2"))
    with pytest.raises(ValueError, match=r"token_k1 takes bounds of pi_rollout / pi_old"):
        rejection_rules(config(rollout_rs="token_k1", rollout_rs_threshold="0.5"))
