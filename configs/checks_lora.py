"""Where there can be no LoRA adapter, and what of its keys has no effect; see configs/checks.py."""

from collections.abc import Collection, Iterator, Mapping

from configs.checks_rollout import ROLLOUT
from configs.schema.common import ModelConfig, ShardedConfig
from configs.schema.ppo import RolloutEngineConfig

ALPHA = "set it to lora_rank, or twice that"
SHAPE = ("lora_alpha", "target_modules")
REFERENCE = ("actor_rollout_ref.ref.strategy", "actor_rollout_ref.ref.fsdp_config.", "actor_rollout_ref.ref.megatron.")


def lora_problems(models: Mapping[str, tuple[ModelConfig, ShardedConfig]]) -> Iterator[str]:
    """models: by their key, each with the role that trains it."""
    for key, (model, role) in models.items():
        if model.has_adapter and role.strategy == "megatron":
            yield f"{_given(key, model)}: the Megatron engine has no LoRA; take strategy=fsdp, or leave it out"
        if model.lora_rank > 0 and model.lora_alpha == 0:
            yield f"{key}.lora_alpha=0: the adapter's part is multiplied by lora_alpha / lora_rank, and would be nothing; {ALPHA}"


def lora_sync_problems(model: ModelConfig, rollout: RolloutEngineConfig) -> Iterator[str]:
    if model.has_adapter and rollout.lora_sync == "adapter" and rollout.name == "embedded":
        yield f"{ROLLOUT}.lora_sync=adapter: the embedded engine takes whole weights alone; leave it at merged"


def lora_notes(key: str, model: ModelConfig, typed: Collection[str]) -> Iterator[str]:
    """key: the model's."""
    ignored = [f"{key}.{name}" for name in SHAPE if f"{key}.{name}" in typed]
    if model.lora_adapter_path is not None:
        yield from (f"{name} has no effect: the adapter in {key}.lora_adapter_path has its own" for name in ignored)
    elif not model.lora_rank:
        yield from (f"{name} has no effect: {key}.lora_rank=0, all parameters are trained" for name in ignored)


def reference_notes(typed: Collection[str]) -> Iterator[str]:
    """Of a run whose policy is an adapter."""
    for key in sorted(key for key in typed if key.startswith(REFERENCE)):
        yield f"{key} has no effect: beside a LoRA adapter the reference is the actor's engine, with the adapter off"


def lora_sync_notes(model: ModelConfig, rollout: RolloutEngineConfig) -> Iterator[str]:
    if rollout.lora_sync == "adapter" and not model.has_adapter:
        yield f"{ROLLOUT}.lora_sync=adapter has no effect: the model has no LoRA adapter"


def _given(key: str, model: ModelConfig) -> str:
    if model.lora_adapter_path is not None:
        return f"{key}.lora_adapter_path={model.lora_adapter_path}"
    return f"{key}.lora_rank={model.lora_rank}"
