"""Checks before any process starts."""

from pathlib import Path

import pytest

from configs.compose import compose
from configs.schema.parity import ParityConfig
from tests.tiny import save_tiny_model
from trainer.parity import run_parity


def test_model_that_the_engine_cannot_hold_is_refused(tmp_path: Path) -> None:
    overrides = ["actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.model.override_config.hidden_act=gelu"]
    config = compose("parity", ParityConfig, [f"model={save_tiny_model(tmp_path / 'model')}", *overrides])
    with pytest.raises(ValueError, match=r"^actor_rollout_ref\.actor: strategy=megatron has the activation silu"):
        run_parity.run(config, ())
