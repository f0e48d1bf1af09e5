"""Parallel layouts and options that Megatron does not support, with one line each."""

from dataclasses import replace
from typing import Any

import pytest

from configs.base.keys import ConfigError
from configs.compose import compose
from configs.schema.common import ShardedConfig
from configs.schema.parity import ParityConfig
from configs.validation.megatron import megatron_notes, megatron_problems, repeat_problems
from configs.validation.programs import check_parity
from tests.configs.test_argv import VERL_MEGATRON
from tests.configs.validation.test_batches import CP2, DEFAULTS, MEGATRON, PP2, TP2
from tests.configs.validation.test_programs import ACTOR, REF, ppo_lines, sft_lines

OVERRIDE = f"{ACTOR}.megatron.override_transformer_config"
VPP = "virtual_pipeline_model_parallel_size"
EIGHT = "8 workers (trainer.nnodes * trainer.n_gpus_per_node = 1 * 8)"
ALL_TWO = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    VPP: 2,
    "context_parallel_size": 2,
}


def role(**changes: Any) -> ShardedConfig:
    """A role on Megatron with these settings."""
    actor = DEFAULTS.actor_rollout_ref.actor
    return replace(actor, strategy="megatron", megatron=replace(actor.megatron, **changes))


def problems(actor: ShardedConfig, **others: ShardedConfig) -> list[str]:
    return list(megatron_problems({ACTOR: actor, **others}, DEFAULTS.trainer))


def of_override(**fields: Any) -> list[str]:
    return problems(role(override_transformer_config=fields), critic=role(override_transformer_config=fields))


def test_ranks_of_a_model_copy_must_divide_the_workers() -> None:
    assert problems(role(**ALL_TWO), critic=role(**ALL_TWO)) == []
    sizes = {"tensor_model_parallel_size": 3, "pipeline_model_parallel_size": 2}
    product = "tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size = 3 * 2 * 1 = 6"
    assert problems(role(**sizes), critic=role(**sizes)) == [
        f"{ACTOR}.megatron: {product} does not divide {EIGHT} (8 = 1 * 6 + 2)"
    ]
    (line,) = problems(role(context_parallel_size=16))
    assert line.endswith(f"= 1 * 1 * 16 = 16 does not divide {EIGHT} (8 = 0 * 16 + 8)")
    assert problems(replace(role(**sizes), strategy="fsdp")) == []


@pytest.mark.parametrize(
    ("parts", "stages", "why"),
    [
        (2, 1, "needs pipeline_model_parallel_size >= 2, not 1"),
        (1, 2, "must be at least 2"),
    ],
)
def test_virtual_stages_need_two_chunks_and_two_stages(parts: int, stages: int, why: str) -> None:
    (line,) = problems(role(pipeline_model_parallel_size=stages, **{VPP: parts}))
    assert line == f"{ACTOR}.megatron.{VPP}={parts}: {why}; use null for one chunk per stage"


@pytest.mark.parametrize("name", ALL_TWO)
def test_roles_on_the_same_gpus_must_be_split_in_the_same_way(name: str) -> None:
    unlike = role(**ALL_TWO | {name: None if name == VPP else 4})
    (line,) = problems(role(**ALL_TWO), critic=unlike)
    assert line == (
        f"critic.megatron.{name}={'null' if name == VPP else 4}: {ACTOR}.megatron.{name}=2, but models that share GPUs must be "
        "split the same way, because Megatron's process groups are global to a process; remove it to follow the actor"
    )
    assert problems(role(**ALL_TWO), critic=replace(unlike, strategy="fsdp")) == []
    (line,) = problems(replace(role(), strategy="fsdp"), ref=role(**ALL_TWO), critic=unlike)
    assert line.startswith(f"critic.megatron.{name}=") and f": ref.megatron.{name}=2, but" in line


def test_only_used_roles_are_checked() -> None:
    kl = f"{ACTOR}.use_kl_loss=true"
    assert ppo_lines(MEGATRON, TP2, PP2, CP2, f"{ACTOR}.megatron.{VPP}=2", kl) == [], "all follow the actor"
    unlike = f"{REF}.megatron.context_parallel_size=2"
    pairs = (MEGATRON, "placement=colocate_pairs", unlike)
    assert [line.split(": ")[1] for line in ppo_lines(*pairs, kl)] == [unlike]
    assert not any(line.startswith("error") for line in ppo_lines(*pairs)), "without a KL term there is no reference"


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ("moe_router_dtype=fp32", "mixture-of-experts models are trained with FSDP, and other models do not use it"),
        ("tp_comm_overlap=true", "affects speed only"),
        ("cpu_offloading_num_layers=2", "affects memory only"),
        ("hidden_dropout=0.0", "this is always the case"),
        ("fp8=null", "this is always the case"),
    ],
)
def test_an_override_without_effect_on_numbers_gives_a_note(field: str, why: str) -> None:
    key = f"{ACTOR}.megatron.override_transformer_config"
    notes = ppo_lines(MEGATRON, f"+{key}.{field}")
    assert notes == [f"{key}.{field.partition('=')[0]} has no effect: {why}"]


@pytest.mark.parametrize("field", ["hidden_dropout=0.1", "fp8=hybrid", "pipeline_model_parallel_layout=E|t|L"])
def test_an_override_that_changes_numbers_or_placement_is_refused(field: str) -> None:
    key = f"{ACTOR}.megatron.override_transformer_config"
    (line,) = ppo_lines(MEGATRON, f"+{key}.{field}")
    assert line.startswith(f"error: {key}.{field.partition('=')[0]}: the model or another key sets it")


def test_layouts_of_other_programs_are_checked() -> None:
    (line,) = sft_lines("engine.strategy=megatron", "engine.megatron.tensor_model_parallel_size=5")
    assert line.startswith("error: engine.megatron: ") and "= 5 does not divide" in line
    config = compose("parity", ParityConfig, [MEGATRON, TP2, "trainer.n_gpus_per_node=3"])
    with pytest.raises(ConfigError, match=r"2 \* 1 \* 1 = 2 does not divide 3 workers"):
        check_parity(config, ())
    assert check_parity(replace(config, trainer=replace(config.trainer, n_gpus_per_node=2)), ()) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 8}, ".hidden_size: the model or another key sets it"),
        ({"tensor_model_parallel_size": 2}, ".tensor_model_parallel_size: the model or another key sets it"),
        (
            {"recompute_granularty": "full"},
            "do not use it; did you mean recompute_granularity?; allowed: recompute_granularity,",
        ),
        ({"recompute_granularity": "whole"}, ".recompute_granularity=whole: must be one of full, selective or null"),
        ({"recompute_granularity": "full"}, "=full: needs recompute_method=uniform or block and recompute_num_layers >= 1"),
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, ">= 1, not uniform and null"),
        ({"recompute_granularity": "full", "recompute_method": "x", "recompute_num_layers": 1}, ">= 1, not x and 1"),
        (
            {"recompute_granularity": "selective", "recompute_num_layers": 1},
            "=selective: recompute_method and recompute_num_layers",
        ),
        ({"recompute_granularity": "selective", "recompute_method": "block"}, "=selective: recompute_method and"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]},
            ".recompute_modules: layernorm: the modules that can be recomputed are core_attn and mlp",
        ),
    ],
)
def test_unsupported_fields_of_transformer_config_are_refused(fields: dict[str, Any], message: str) -> None:
    (line,) = of_override(**fields)
    assert line.startswith(f"{OVERRIDE}.") and message in line


def test_supported_and_ineffective_fields_of_transformer_config_are_accepted() -> None:
    assert of_override(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1) == []
    assert of_override(recompute_granularity="selective", recompute_modules=["mlp"]) == []
    assert of_override(recompute_granularity=None, bias_activation_fusion=True) == []
    kernels = role(override_transformer_config={"attention_backend": "auto", "apply_rope_fusion": True})
    assert problems(kernels, critic=kernels) == []
    assert list(megatron_notes({ACTOR: kernels, "critic": kernels})) == [
        f"{OVERRIDE}.{name} has no effect: the engine has its own attention on packed rows"
        for name in ("apply_rope_fusion", "attention_backend")
    ]
    assert list(megatron_notes({ACTOR: replace(kernels, strategy="fsdp")})) == []


def test_verls_megatron_defaults_pass() -> None:
    typed = [f"{ACTOR}.{line}".replace("\t", "=") for line in VERL_MEGATRON.read_text().splitlines()[1:]]
    (note,) = ppo_lines(MEGATRON, *typed)
    assert note.startswith(f"{OVERRIDE}.attention_backend has no effect")


def test_deterministic_runs_on_megatron_are_refused_on_cuda() -> None:
    (line,) = ppo_lines(MEGATRON, "trainer.deterministic=true")
    assert line == (
        f"error: trainer.deterministic=true: {ACTOR}.strategy=megatron is not known to be reproducible on CUDA; use strategy=fsdp"
    )
    (line,) = sft_lines("engine.strategy=megatron", "trainer.deterministic=true")
    assert line.startswith("error: trainer.deterministic=true: engine.strategy=megatron")
    on = replace(DEFAULTS.trainer, deterministic=True)
    assert list(repeat_problems({ACTOR: role()}, replace(on, device="cpu"))) == []
    assert list(repeat_problems({ACTOR: role()}, DEFAULTS.trainer)) == []
    assert list(repeat_problems({ACTOR: DEFAULTS.actor_rollout_ref.actor}, on)) == []
    (line,) = repeat_problems({ACTOR: DEFAULTS.actor_rollout_ref.actor, "critic": role()}, on)
    assert "critic.strategy=megatron" in line
