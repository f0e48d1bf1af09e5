"""Checks before any process starts."""

from pathlib import Path

import pytest

from configs.compose import compose
from configs.schema.supervised import SFTConfig
from tests.tiny import save_tiny_model
from trainer.supervised import supervised_builder


def test_model_that_the_engine_cannot_hold_is_refused(tmp_path: Path) -> None:
    overrides = ["engine.strategy=megatron", "model.override_config.hidden_act=gelu", f"trainer.default_local_dir={tmp_path}/run"]
    config = compose("sft_trainer", SFTConfig, [f"model.path={save_tiny_model(tmp_path / 'model')}", *overrides])
    with pytest.raises(ValueError, match=r"^engine: strategy=megatron has the activation silu"):
        supervised_builder.run(config, ())
    assert not (tmp_path / "run").exists()
