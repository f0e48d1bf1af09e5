"""What of a model Megatron does not have, or cannot cut."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config

from configs.load import ppo_config
from configs.schema.common import MegatronConfig
from tests.layout.source import imports, top_level
from tests.tiny import tiny_config
from workers.engine.megatron.limits import check_model, overrides

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


def cut(**changes: Any) -> MegatronConfig:
    return replace(ppo_config().actor_rollout_ref.actor.megatron, **changes)


def stages(pipeline: int, virtual: int | None = None, **own: int) -> MegatronConfig:
    return cut(
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        override_transformer_config=own,
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_models_that_it_has(family: str) -> None:
    """4 heads, 2 of keys and values, 2 layers."""
    for config in (cut(), cut(tensor_model_parallel_size=2), cut(context_parallel_size=4), stages(2)):
        check_model(tiny_config(family), config)


def test_another_family() -> None:
    with pytest.raises(ValueError, match="strategy=megatron knows llama, qwen2, qwen3, not gpt2; strategy=fsdp takes the model"):
        check_model(GPT2Config(), cut())
    with pytest.raises(ValueError, match="not qwen3_moe; strategy=fsdp takes the model"):
        check_model(tiny_config("qwen3_moe"), cut())


@pytest.mark.parametrize(
    ("family", "changes", "reported"),
    [
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "attends to whole rows, and the model has sliding_window=8; strategy=fsdp takes the model",
        ),
        ("llama", {"hidden_act": "gelu"}, "has the activation silu, and the model hidden_act=gelu"),
        ("llama", {"attention_bias": True}, "the model has attention_bias=true"),
        ("qwen3", {"attention_bias": True}, "the model has attention_bias=true"),
        ("llama", {"mlp_bias": True}, "the model has mlp_bias=true"),
    ],
)
def test_parts_that_its_layers_lack(family: str, changes: dict[str, Any], reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        check_model(tiny_config(family, **changes), cut())


@pytest.mark.parametrize(
    ("size", "changes", "reported"),
    [
        (4, {}, "=4 does not divide the model's num_key_value_heads=2; 1, 2 would"),
        (3, {}, "=3 does not divide the model's num_attention_heads=4, num_key_value_heads=2, intermediate_size=64; 1, 2 would"),
        (
            4,
            {"num_key_value_heads": 4, "intermediate_size": 66},
            "=4 does not divide the model's intermediate_size=66; 1, 2 would",
        ),
    ],
)
def test_heads_and_inner_size_fall_into_tensor_parallel_parts(size: int, changes: dict[str, Any], reported: str) -> None:
    with pytest.raises(ValueError) as error:
        check_model(tiny_config(**changes), cut(tensor_model_parallel_size=size))
    assert str(error.value) == f"megatron.tensor_model_parallel_size{reported}"


@pytest.mark.parametrize(
    ("layers", "config"),
    [
        (4, stages(4)),
        (8, stages(2, 2)),
        (5, stages(2, **{FIRST: 2})),
        (5, stages(2, **{LAST: 1})),
        (5, stages(2, **{FIRST: 3, LAST: 2})),
        (9, stages(4, **{FIRST: 2, LAST: 3})),
        (10, stages(3, 2, **{LAST: 2})),
    ],
)
def test_layers_fall_into_stages(layers: int, config: MegatronConfig) -> None:
    check_model(tiny_config(num_hidden_layers=layers), config)


@pytest.mark.parametrize(
    ("layers", "config", "reported"),
    [
        (
            4,
            stages(3),
            "pipeline_model_parallel_size=3 stages of megatron.virtual_pipeline_model_parallel_size=1 equal parts; take",
        ),
        (
            6,
            stages(2, 2),
            "pipeline_model_parallel_size=2 stages of megatron.virtual_pipeline_model_parallel_size=2 equal parts; take",
        ),
        (2, stages(4), "num_hidden_layers=2 do not fall into"),
        (5, stages(3, **{FIRST: 2}), f"equal parts, {FIRST}=2; take"),
        (5, stages(2, **{FIRST: 2, LAST: 2}), f"equal parts, {FIRST}=2, {LAST}=2; take"),
        (4, stages(2, **{FIRST: 4}), f"{FIRST}=4"),
        (4, stages(2, **{FIRST: 0}), f"{FIRST}=0"),
        (4, stages(1, **{FIRST: 2}), f"{FIRST}=2"),
        (4, stages(1, **{FIRST: 2, LAST: 2}), f"{FIRST}=2, {LAST}=2"),
        (8, stages(2, 2, **{FIRST: 3}), f"{FIRST}=3"),
        (7, stages(2, 2, **{FIRST: 3}), f"{FIRST}=3"),
    ],
)
def test_layers_that_do_not(layers: int, config: MegatronConfig, reported: str) -> None:
    with pytest.raises(ValueError) as error:
        check_model(tiny_config(num_hidden_layers=layers), config)
    assert reported in str(error.value) and str(error.value).startswith(
        f"the model's num_hidden_layers={layers} do not fall into"
    )


def test_all_problems_are_reported() -> None:
    with pytest.raises(ValueError, match=r"hidden_act=gelu.*tensor_model_parallel_size=3.*pipeline_model_parallel_size=3"):
        check_model(tiny_config(hidden_act="gelu"), cut(tensor_model_parallel_size=3, pipeline_model_parallel_size=3))


def test_fields_that_are_set() -> None:
    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert overrides(cut(), recompute=False) == {}
    assert overrides(cut(), recompute=True) == whole
    own = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    assert overrides(cut(override_transformer_config=own), recompute=True) == own
    null = {"recompute_granularity": None, "recompute_num_layers": 2, "attention_backend": "flash"}
    assert overrides(cut(override_transformer_config=null), recompute=True) == whole | {"recompute_num_layers": 2}
    assert overrides(cut(override_transformer_config=null), recompute=False) == {"recompute_num_layers": 2}


def test_the_controller_needs_no_megatron() -> None:
    for name in ("__init__", "limits"):
        assert "megatron" not in {top_level(module) for _, module in imports(Path(f"workers/engine/megatron/{name}.py"))}
