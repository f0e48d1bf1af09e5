"""The experiment scripts fit the GPUs that their first lines name, by the memory model: nothing of the kind was run there."""

import re
from dataclasses import dataclass, replace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from configs.checks_batches import wants_ref
from configs.checks_placement import placement_of
from configs.checks_rollout import world_size
from configs.compose import compose
from configs.reward_models import reward_models
from configs.schema.common import FSDPConfig, MegatronConfig, ModelConfig, ShardedConfig
from configs.schema.ppo import PPOConfig
from workers.engine.memory_model import Setting, Shape, head_chunk, resident, training
from scripts.bench.shapes import SHAPES
from tests.experiments import EXPERIMENTS, started_by
from tests.layout.source import ROOT

GIB = 2**30
USABLE = {24: 23.6 * GIB, 40: 39.4 * GIB, 80: 79.1 * GIB}  # of a GPU so called, as torch sees it (docs/performance.md)
ASLEEP = 1.8e9  # what stays of a sleeping engine, at most (the same)
LLAMA_8B = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {
    "Qwen/Qwen2-7B-Instruct": "7b",
    "Qwen/Qwen2.5-7B": "7b",
    "Qwen/Qwen2.5-7B-Instruct": "7b",
    "Qwen/Qwen2.5-Math-1.5B": "1.5b",
    "Qwen/Qwen2.5-0.5B-Instruct": "0.5b",
    "Qwen/Qwen2.5-72B-Instruct": "72b",
}


def gpus_named(name: str) -> tuple[int, int]:
    """How many, and GB of each."""
    ((count, size),) = re.findall(r"\b(\d+) GPUs? of (\d+) GB", (ROOT / "scripts" / name).read_text())
    return int(count), int(size)


def config_of(name: str) -> PPOConfig:
    """Of a sweep, of its first run."""
    _, _, *words = started_by(name)
    parsed = OverridesParser.create().parse_overrides([word for word in words if not word.startswith("--")])
    first = [
        next(override.sweep_string_iterator()) if override.is_sweep_override() else override.get_value_string()
        for override in parsed
    ]
    return compose(
        "ppo_trainer", PPOConfig, [f"{override.key_or_group}={value}" for override, value in zip(parsed, first, strict=True)]
    )


def adapter_bytes(shape: Shape, model: ModelConfig) -> float:
    """Of a LoRA adapter on all linear layers, its gradients and its moments, in float32."""
    if not model.has_adapter:
        return 0.0
    widths = 2 * (shape.hidden + shape.queries) + 2 * (shape.hidden + shape.keys) + 3 * (shape.hidden + shape.intermediate)
    return 16.0 * shape.layers * model.lora_rank * widths


def fsdp_bytes(
    shape: Shape, model: ModelConfig, fsdp: FSDPConfig, gpus: int, tokens: int, *, learns: bool
) -> tuple[float, float]:
    """(at rest, in a train step) of one role on one GPU."""
    kept = 2 if fsdp.model_dtype == "bfloat16" else 4
    trained = learns and not model.has_adapter
    setting = Setting(gpus=gpus, kept=kept, trained=trained, optimizer_offload=fsdp.optimizer_offload, several=True)
    lying, adapter = resident(shape, setting), adapter_bytes(shape, model)
    at_rest = lying["moments"] + (0.0 if fsdp.param_offload else lying["parameters"]) + adapter
    return at_rest, sum(training(shape, setting, tokens).values()) + adapter


def megatron_bytes(shape: Shape, cut: MegatronConfig, gpus: int, tokens: int, *, learns: bool) -> tuple[float, float]:
    """The same: weights in bfloat16; gradients, the optimizer's copy and its two moments in float32; layers recomputed.
    Stages count as alike, and each keeps the inputs of as many micro-batches as there are stages.
    """
    tp, pp = cut.tensor_model_parallel_size, cut.pipeline_model_parallel_size
    parameters = shape.parameters / (tp * pp)
    weights, gradients, optimizer = 2 * parameters, 4 * parameters, 12 * parameters / (gpus // cut.model_parallel_size)
    kept = ((weights, cut.param_offload), (gradients, cut.grad_offload), (optimizer, cut.optimizer_offload))
    at_rest = sum(part for part, offloaded in (kept if learns else kept[:1]) if not offloaded)
    inputs = tokens * 2 * shape.hidden * shape.layers / tp  # of pp micro-batches, a pp-th of the layers each
    at_work = tokens * (12 * shape.intermediate + 26 * shape.hidden + 8 * shape.queries) / tp
    return at_rest, weights + gradients + optimizer + inputs + at_work + head_chunk(shape, Setting()) / tp


@dataclass(frozen=True)
class Role:
    """tokens: of a micro-batch, those of a train step for a role that learns."""

    config: ShardedConfig
    model: ModelConfig
    shape: Shape
    tokens: int
    learns: bool

    def bytes(self, gpus: int) -> tuple[float, float]:
        if self.config.strategy == "megatron":
            return megatron_bytes(self.shape, self.config.megatron, gpus, self.tokens, learns=self.learns)
        return fsdp_bytes(self.shape, self.model, self.config.fsdp_config, gpus, self.tokens, learns=self.learns)


def roles_of(config: PPOConfig) -> dict[str, Role]:
    models, critic = config.actor_rollout_ref, config.critic
    shape = Shape.of(SHAPES[MODELS[models.model.path]])
    roles = {"actor": Role(models.actor, models.model, shape, models.actor.ppo_max_token_len_per_gpu, True)}
    if wants_ref(config) and not models.model.has_adapter:
        roles["ref"] = Role(models.ref, models.model, shape, models.ref.log_prob_max_token_len_per_gpu, False)
    if config.algorithm.adv_estimator == "gae":
        body = replace(shape, tied=True)  # without a language head
        roles["critic"] = Role(critic, critic.model, body, critic.ppo_max_token_len_per_gpu, True)
    for model in reward_models(config.reward).values():
        assert model.path == "sfairXC/FsfairX-LLaMA3-RM-v0.1" and "reward" not in roles
        roles["reward"] = Role(model, critic.model, Shape.of(LLAMA_8B), model.forward_max_token_len_per_gpu, False)
    return roles


def fullest(config: PPOConfig, size: int) -> dict[str, float]:
    """Bytes on one GPU of ``size`` GB, by what it does."""
    rollout, roles = config.actor_rollout_ref.rollout, roles_of(config)
    place = placement_of(config, has_critic="critic" in roles)
    found = {name: role.bytes(world_size(place.pool(name))) for name, role in roles.items()}

    def at_rest(role: str) -> float:
        """Of all that is where ``role`` is."""
        return sum(rest for name, (rest, _) in found.items() if name in place.pool(role).roles)

    beside = at_rest("rollout")
    free = USABLE[size] - (beside if rollout.name == "sglang" else 0)  # SGLang's share is of what is free
    bytes_of = {"rollout": beside + rollout.gpu_memory_utilization * free}
    for name, (rest, at_work) in found.items():
        if roles[name].learns:
            asleep = ASLEEP if "rollout" in place.pool(name).roles else 0.0
            bytes_of[name] = asleep + at_rest(name) - rest + at_work
    return bytes_of


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_fits_the_gpus_that_it_names(name: str) -> None:
    config, (count, size) = config_of(name), gpus_named(name)
    assert world_size(config.trainer) == count
    found = fullest(config, size)
    told = {what: f"{taken / 1e9:.1f}" for what, taken in found.items()}
    assert max(found.values()) < 0.93 * USABLE[size], told  # what fits is less than what is free: the allocator leaves holes
    (row,) = [line for line in (ROOT / "docs/recipes.md").read_text().splitlines() if line.startswith(f"| [{name}]")]
    assert f"| {count} x {size} GB | {max(found.values()) / 1e9:.0f} |" in row, told
