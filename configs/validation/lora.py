"""Validate LoRA options and warn about those without effect; see configs/validation/programs.py."""

from collections.abc import Collection, Iterator, Mapping

from configs.schema.common import ModelConfig, ShardedConfig
from configs.schema.ppo import RolloutEngineConfig
from configs.validation.rollout import ROLLOUT

ALPHA = "set it to lora_rank or twice lora_rank"
SHAPE = ("lora_alpha", "target_modules")
REFERENCE = ("actor_rollout_ref.ref.strategy", "actor_rollout_ref.ref.fsdp_config.", "actor_rollout_ref.ref.megatron.")


def lora_problems(models: Mapping[str, tuple[ModelConfig, ShardedConfig]]) -> Iterator[str]:
    """Problems of LoRA adapters. models: {key: (model, role that trains it)}."""
    # Whether the engine supports adapters is checked here, before a worker loads a model for minutes.
    for key, (model, role) in models.items():
        if model.has_adapter and role.strategy == "megatron":
            yield f"{_given(key, model)}: the Megatron engine does not support LoRA; use strategy=fsdp, or remove the key"
        if model.lora_rank > 0 and model.lora_alpha == 0:
            yield f"{key}.lora_alpha=0: the adapter's output is scaled by lora_alpha / lora_rank = 0; {ALPHA}"


def lora_sync_problems(model: ModelConfig, rollout: RolloutEngineConfig) -> Iterator[str]:
    """Problems of the way an adapter is sent to the rollout engine."""
    if model.has_adapter and rollout.lora_sync == "adapter" and rollout.name == "embedded":
        yield f"{ROLLOUT}.lora_sync=adapter: the embedded engine only accepts full weights; use merged"


def lora_notes(key: str, model: ModelConfig, typed: Collection[str]) -> Iterator[str]:
    """Warnings about adapter keys without effect. key: of the model."""
    ignored = [f"{key}.{name}" for name in SHAPE if f"{key}.{name}" in typed]
    if model.lora_adapter_path is not None:
        yield from (f"{name} has no effect: the adapter in {key}.lora_adapter_path defines it" for name in ignored)
    elif not model.lora_rank:
        yield from (f"{name} has no effect: {key}.lora_rank=0 trains all parameters" for name in ignored)


def reference_notes(typed: Collection[str]) -> Iterator[str]:
    """Warnings about reference keys without effect, for a policy with a LoRA adapter."""
    for key in sorted(key for key in typed if key.startswith(REFERENCE)):
        yield f"{key} has no effect: with a LoRA adapter the reference is the actor with its adapter disabled"


def lora_sync_notes(model: ModelConfig, rollout: RolloutEngineConfig) -> Iterator[str]:
    """Warnings about lora_sync without an adapter."""
    if rollout.lora_sync == "adapter" and not model.has_adapter:
        yield f"{ROLLOUT}.lora_sync=adapter has no effect: the model has no LoRA adapter"


def _given(key: str, model: ModelConfig) -> str:
    if model.lora_adapter_path is not None:
        return f"{key}.lora_adapter_path={model.lora_adapter_path}"
    return f"{key}.lora_rank={model.lora_rank}"
