"""Checks before any process starts."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
from transformers import AutoTokenizer

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from configs.validation.placement import placement_of
from tests.runs import make_task, ppo_arguments
from tests.tiny import save_tiny_model
from tests.trainer.data.tokenizers import byte_tokenizer
from trainer.cluster.launch import RunWorkers
from trainer.data.dataset import PromptStream
from trainer.data.order import DataOrder
from trainer.ppo import ppo_builder
from trainer.resilience.restart import RunLifecycle
from trainer.rollout.partial import FilteredPartialRollouts

KL = "actor_rollout_ref.actor.use_kl_loss=true"
MEGATRON = "actor_rollout_ref.actor.strategy=megatron"


@pytest.mark.parametrize(
    ("overrides", "output"),
    [
        ([MEGATRON, "actor_rollout_ref.model.override_config.hidden_act=gelu"], "actor_rollout_ref.actor: "),
        (
            [KL, "actor_rollout_ref.ref.strategy=megatron", "actor_rollout_ref.model.override_config.hidden_act=gelu"],
            "actor_rollout_ref.ref: ",
        ),
        ([MEGATRON, "critic.model.override_config.hidden_act=gelu"], "critic: "),
    ],
)
def test_model_that_the_engine_of_a_role_cannot_hold_is_refused(
    overrides: list[str], output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_starts(*_: Any) -> NoReturn:
        raise AssertionError("a process was started")

    monkeypatch.setattr(ppo_builder, "open_rewards", nothing_starts)
    monkeypatch.setattr(ppo_builder, "reader", lambda config: None)  # there is no data
    path = save_tiny_model(tmp_path / "model")
    models = [f"actor_rollout_ref.model.path={path}", f"critic.model.path={path}", f"trainer.default_local_dir={tmp_path}/run"]
    with pytest.raises(ValueError, match=rf"^{output}strategy=megatron has the activation silu"):
        ppo_builder.run(compose("ppo_trainer", PPOConfig, [*models, *overrides]), ())
    unused = [*models, *overrides, "algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=false"]
    if output != "actor_rollout_ref.actor: ":
        with pytest.raises(AssertionError, match="a process was started"):
            ppo_builder.run(compose("ppo_trainer", PPOConfig, unused), ())


def test_dynamic_sampling_with_partial_rollouts_needs_a_batch_of_prompts_in_an_epoch() -> None:
    overrides = ["async_training.mode=partial", "algorithm.filter_groups.enable=true", "data.train_batch_size=8"]
    parts = cast(Any, SimpleNamespace(config=compose("ppo_trainer", PPOConfig, overrides), wants_baselines=False))
    stream = PromptStream(cast(Any, [None] * 10), DataOrder(10, 8, seed=0, shuffle=False))
    assert isinstance(ppo_builder.Assembly.batch_policy(parts, stream), FilteredPartialRollouts)
    stream.order = DataOrder(10, 6, seed=0, shuffle=False)
    with pytest.raises(ValueError, match=r"data.gen_batch_size=6: an epoch has 1 \* 6 = 6 prompts, .*train_batch_size=8 at"):
        ppo_builder.Assembly.batch_policy(parts, stream)


def test_pretraining_texts_with_tokens_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    make_task(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.add_tokens(["@"])
    tokenizer.save_pretrained(tmp_path / "words")
    (tmp_path / "texts.jsonl").write_text(json.dumps({"prompt": "1", "response": "@"}) + "\n")
    words = [f"actor_rollout_ref.model.tokenizer_path={tmp_path}/words", f"data.ptx_files={tmp_path}/texts.jsonl"]
    config = compose("ppo_trainer", PPOConfig, ppo_arguments(tmp_path, tmp_path / "run", *words))
    place = placement_of(config, has_critic=False)
    lifecycle = RunLifecycle(config.trainer, tmp_path / "run")
    with pytest.raises(
        ValueError, match=rf"texts\.jsonl, row 0: it contains token {len(tokenizer) - 1}, .* set actor_rollout_ref\.model\.tok"
    ):
        ppo_builder.Assembly(config, place, RunWorkers({}, None), lifecycle, ppo_builder.reader(config))


def test_several_engines_decode_whole_responses(tmp_path: Path) -> None:
    def decode(engines: int, *overrides: str) -> bool:
        parts = cast(Any, SimpleNamespace(config=compose("ppo_trainer", PPOConfig, overrides), tokenizer=tokenizer))
        return ppo_builder.Assembly.replicas_decode(parts, engines)

    tokenizer: Any = byte_tokenizer()
    assert decode(2) and not decode(1)
    assert not decode(2, "rollout=vllm", "actor_rollout_ref.rollout.multi_turn.enable=true")
    tokenizer = None
    assert not decode(2), "one that cannot be sent"
