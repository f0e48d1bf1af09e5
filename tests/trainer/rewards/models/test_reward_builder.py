"""Recognising reward models, and the stored statistics of their scores."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from tests.reward_models import make_reward_model
from tests.trainer.rewards.config import scoring_model
from trainer.rewards.models.reward_builder import check_head, check_reward_models, engine_model, stored
from trainer.rewards.models.reward_models import Moments


def test_classifier_with_one_label_is_a_reward_model(tmp_path: Path) -> None:
    for of_tokens in (False, True):
        path = make_reward_model(tmp_path / str(of_tokens), seed=1, of_tokens=of_tokens)
        check_head(engine_model(scoring_model(path=str(path))))
        ppo = compose("ppo_trainer", PPOConfig, [f"reward.models.a.path={path}", "trainer.device=cpu"])
        check_reward_models(ppo.reward, ppo.trainer)


def test_classifier_without_its_head_raises(tmp_path: Path) -> None:
    """config.json promises a head: transformers would initialise one randomly."""
    path = Path(make_reward_model(tmp_path / "model", seed=1))
    weights = load_file(path / "model.safetensors")
    save_file({name: weight for name, weight in weights.items() if name != "score.weight"}, path / "model.safetensors")
    with pytest.raises(ValueError, match="Qwen2ForSequenceClassification has no score head"):
        check_head(engine_model(scoring_model(path=str(path))))


def test_several_labels_are_refused(tmp_path: Path) -> None:
    path = Path(make_reward_model(tmp_path / "model", seed=1))
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}))
    with pytest.raises(ValueError, match="a Qwen2ForSequenceClassification with 2 labels; a reward model has one"):
        check_head(engine_model(scoring_model(path=str(path))))


def test_statistics_are_read_from_the_models_directory(tmp_path: Path) -> None:
    path = make_reward_model(tmp_path / "model", seed=1, moments=(0.5, 2.0))
    assert stored(scoring_model(path=str(path), normalize="stored")) == Moments(0.5, 2.0)
    assert stored(scoring_model(path=str(path))) is None is stored(scoring_model(path=str(path), normalize="running"))


@pytest.mark.parametrize("std", [0.0, float("nan"), -1.0])
def test_statistics_that_cannot_be_divided_by_are_refused(tmp_path: Path, std: float) -> None:
    path = make_reward_model(tmp_path / "model", seed=1, moments=(0.5, std))
    with pytest.raises(ValueError, match=r"both must be finite, and std above 0"):
        stored(scoring_model(path=str(path), normalize="stored"))


def test_engine_model_allocates_nothing_for_training() -> None:
    model = engine_model(scoring_model(override_config={"rope_theta": 3}))
    assert (model.path, model.override_config, model.has_adapter) == ("x", {"rope_theta": 3}, False)
    assert not (model.enable_gradient_checkpointing or model.enable_activation_offload)
