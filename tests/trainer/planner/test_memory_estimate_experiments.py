"""The experiment scripts fit the GPUs that their first lines name, by the memory model; they were not run on those."""

import re
from dataclasses import replace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from configs.schema.scoring_model import ScoringModelConfig
from configs.validation.batches import roles_of
from configs.validation.placement import placement_of
from configs.validation.rollout import world_size
from scripts.bench.shapes import SHAPES
from tests.experiments import EXPERIMENTS, started_by
from tests.layout.source import ROOT
from trainer.planner.memory_estimate import estimate
from trainer.planner.memory_model import Shape

GIB = 2**30
USABLE = {24: 23.6 * GIB, 40: 39.4 * GIB, 80: 79.1 * GIB}  # of a GPU of this name, as torch reports it (docs/performance.md)
LLAMA_8B = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {
    "Qwen/Qwen2-7B-Instruct": "7b",
    "Qwen/Qwen2.5-7B": "7b",
    "Qwen/Qwen2.5-7B-Instruct": "7b",
    "Qwen/Qwen2.5-1.5B-Instruct": "1.5b",
    "Qwen/Qwen2.5-Math-1.5B": "1.5b",
    "Qwen/Qwen2.5-0.5B-Instruct": "0.5b",
    "Qwen/Qwen2.5-72B-Instruct": "72b",
}


def gpus_named(name: str) -> tuple[int, int]:
    """Number of GPUs, and GB of each."""
    ((count, size),) = re.findall(r"\b(\d+) GPUs? of (\d+) GB", (ROOT / "scripts" / name).read_text())
    return int(count), int(size)


def config_of(name: str) -> PPOConfig:
    """The configuration; of a sweep, that of its first run."""
    _, _, *words = started_by(name)
    parsed = OverridesParser.create().parse_overrides([word for word in words if not word.startswith("--")])
    first = [
        next(override.sweep_string_iterator()) if override.is_sweep_override() else override.get_value_string()
        for override in parsed
    ]
    return compose(
        "ppo_trainer", PPOConfig, [f"{override.key_or_group}={value}" for override, value in zip(parsed, first, strict=True)]
    )


def shapes_of(config: PPOConfig) -> dict[str, Shape]:
    """Shapes by key of the role."""
    shape = Shape.of(SHAPES[MODELS[config.actor_rollout_ref.model.path]])
    shapes = {}
    for key, role in roles_of(config, has_critic=config.algorithm.adv_estimator == "gae").items():
        shapes[key] = replace(shape, tied=True) if key == "critic" else shape  # without a language head
        if isinstance(role, ScoringModelConfig):
            assert role.path == "sfairXC/FsfairX-LLaMA3-RM-v0.1"
            shapes[key] = Shape.of(LLAMA_8B)
    return shapes


def fullest(config: PPOConfig, size: int) -> dict[str, float]:
    """Bytes on one GPU of ``size`` GB, by phase."""
    shapes = shapes_of(config)
    place = placement_of(config, has_critic="critic" in shapes)
    return {f"{use.pool}, {use.phase}": use.bytes or 0.0 for use in estimate(config, place, shapes, USABLE[size])}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_fits_the_gpus_that_it_names(name: str) -> None:
    config, (count, size) = config_of(name), gpus_named(name)
    assert world_size(config.trainer) == count
    found = fullest(config, size)
    output = {what: f"{taken / 1e9:.1f}" for what, taken in found.items()}
    assert max(found.values()) < 0.93 * USABLE[size], output  # less than all of it: the allocator's memory is fragmented
    (row,) = [line for line in (ROOT / "docs/recipes.md").read_text().splitlines() if line.startswith(f"| [{name}]")]
    assert f"| {count} x {size} GB | {max(found.values()) / 1e9:.0f} |" in row, output
