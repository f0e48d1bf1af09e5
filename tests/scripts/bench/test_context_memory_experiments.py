"""The experiment scripts fit the GPUs that their first lines name, by the memory model: nothing of the kind was run there."""

import re
from dataclasses import replace

import pytest

from configs.checks import world_size
from configs.checks_batches import wants_ref
from configs.compose import compose
from configs.schema.common import FSDPConfig, MegatronConfig
from configs.schema.ppo import PPOConfig
from scripts.bench.context_memory import Setting, Shape, head_chunk, resident, training
from scripts.bench.shapes import SHAPES
from tests.experiments import EXPERIMENTS, started_by
from tests.layout.source import ROOT

GIB = 2**30
USABLE = {24: 23.6 * GIB, 40: 39.4 * GIB, 80: 79.1 * GIB}  # of a GPU so called, as torch sees it (docs/performance.md)
ASLEEP = 1.8e9  # what stays of a sleeping engine, at most (the same)
MODELS = {
    "Qwen/Qwen2-7B-Instruct": "7b",
    "Qwen/Qwen2.5-7B": "7b",
    "Qwen/Qwen2.5-7B-Instruct": "7b",
    "Qwen/Qwen2.5-Math-1.5B": "1.5b",
    "Qwen/Qwen2.5-0.5B-Instruct": "0.5b",
}


def gpus_named(name: str) -> tuple[int, int]:
    """How many, and GB of each."""
    ((count, size),) = re.findall(r"\b(\d+) GPUs? of (\d+) GB", (ROOT / "scripts" / name).read_text())
    return int(count), int(size)


def config_of(name: str) -> PPOConfig:
    """Of a sweep, of its first run."""
    _, _, *words = started_by(name)
    return compose("ppo_trainer", PPOConfig, [re.sub(r"=([^\[,]*),.*", r"=\1", word) for word in words if word[:2] != "--"])


def fsdp_bytes(shape: Shape, fsdp: FSDPConfig, gpus: int, tokens: int, *, trained: bool = True) -> tuple[float, float]:
    """(at rest, in a train step) of one role on one GPU."""
    kept = 2 if fsdp.model_dtype == "bfloat16" else 4
    setting = Setting(gpus=gpus, kept=kept, trained=trained, optimizer_offload=fsdp.optimizer_offload, several=True)
    lying = resident(shape, setting)
    at_rest = lying["moments"] + (0.0 if fsdp.param_offload else lying["parameters"])
    return at_rest, sum(training(shape, setting, tokens).values()) if trained else 0.0


def megatron_bytes(shape: Shape, cut: MegatronConfig, gpus: int, tokens: int, *, trained: bool = True) -> tuple[float, float]:
    """The same: weights in bfloat16; gradients, the optimizer's copy and its two moments in float32; layers recomputed.
    Stages count as alike, and each keeps the inputs of as many micro-batches as there are stages.
    """
    tp, pp = cut.tensor_model_parallel_size, cut.pipeline_model_parallel_size
    parameters = shape.parameters / (tp * pp)
    weights, gradients, optimizer = 2 * parameters, 4 * parameters, 12 * parameters / (gpus // cut.model_parallel_size)
    kept = ((weights, cut.param_offload), (gradients, cut.grad_offload), (optimizer, cut.optimizer_offload))
    at_rest = sum(part for part, offloaded in (kept if trained else kept[:1]) if not offloaded)
    inputs = tokens * 2 * shape.hidden * shape.layers / tp  # of pp micro-batches, a pp-th of the layers each
    at_work = tokens * (12 * shape.intermediate + 26 * shape.hidden + 8 * shape.queries) / tp
    return at_rest, weights + gradients + optimizer + inputs + at_work + head_chunk(shape, Setting()) / tp


def fullest(config: PPOConfig, size: int) -> dict[str, float]:
    """Bytes on one GPU of ``size`` GB, by what it does."""
    models, gpus = config.actor_rollout_ref, world_size(config.trainer)
    shape = Shape.of(SHAPES[MODELS[models.model.path]])
    roles = {"actor": (models.actor, shape, models.actor.ppo_max_token_len_per_gpu, True)}
    if wants_ref(config):
        roles["ref"] = (models.ref, shape, models.ref.log_prob_max_token_len_per_gpu, False)
    if config.algorithm.adv_estimator == "gae":
        body = replace(shape, tied=True)  # without a language head
        roles["critic"] = (config.critic, body, config.critic.ppo_max_token_len_per_gpu, True)
    found = {
        name: megatron_bytes(of, role.megatron, gpus, tokens, trained=trained)
        if role.strategy == "megatron"
        else fsdp_bytes(of, role.fsdp_config, gpus, tokens, trained=trained)
        for name, (role, of, tokens, trained) in roles.items()
    }
    at_rest = sum(rest for rest, _ in found.values())
    free = USABLE[size] - (at_rest if models.rollout.name == "sglang" else 0)  # SGLang's share is of what is free
    bytes_of = {"rollout": at_rest + models.rollout.gpu_memory_utilization * free}
    for name in {"actor", "critic"} & found.keys():
        bytes_of[name] = ASLEEP + at_rest - found[name][0] + found[name][1]
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
