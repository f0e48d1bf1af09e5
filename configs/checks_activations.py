"""Ways to save activations' memory that the engine of a model does not have; see configs/checks.py."""

from collections.abc import Iterator

from configs.schema.common import ModelConfig, ShardedConfig


def activation_problems(key: str, model: ModelConfig, role: ShardedConfig) -> Iterator[str]:
    """key: the model's. role: what trains it."""
    asked = {"enable_activation_offload": model.enable_activation_offload, "tiled_mlp.enabled": model.tiled_mlp.enabled}
    for name in (name for name, on in asked.items() if on and role.strategy == "megatron"):
        yield (
            f"{key}.{name}=true: strategy=megatron does not have it; strategy=fsdp does, and for Megatron there are "
            "context_parallel_size and override_transformer_config.recompute_granularity"
        )
    if model.enable_activation_offload and role.strategy == "fsdp" and not model.enable_gradient_checkpointing:
        yield (
            f"{key}.enable_activation_offload=true: {key}.enable_gradient_checkpointing=false, so all of a layer's activations "
            "and weights would go to the host; set enable_gradient_checkpointing=true"
        )
