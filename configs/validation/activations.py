"""Validate options that save activation memory against the training engine; see configs/validation/programs.py."""

from collections.abc import Iterator

from configs.schema.common import ModelConfig, ShardedConfig


def activation_problems(key: str, model: ModelConfig, role: ShardedConfig) -> Iterator[str]:
    """Problems of a model's activation options. key: of the model. role: the role that trains it."""
    asked = {"enable_activation_offload": model.enable_activation_offload, "tiled_mlp.enabled": model.tiled_mlp.enabled}
    for name in (name for name, on in asked.items() if on and role.strategy == "megatron"):
        yield (
            f"{key}.{name}=true: not supported by strategy=megatron; use strategy=fsdp, or Megatron's "
            "context_parallel_size and override_transformer_config.recompute_granularity"
        )
    # The offload is meant for the inputs of checkpointed layers; without checkpointing every saved tensor would be transferred.
    if model.enable_activation_offload and role.strategy == "fsdp" and not model.enable_gradient_checkpointing:
        yield (
            f"{key}.enable_activation_offload=true: {key}.enable_gradient_checkpointing=false, so all activations "
            "and weights of a layer would be offloaded; set enable_gradient_checkpointing=true"
        )
