"""Validate model options (activations, dtypes, LoRA) against the training engine; see configs/validation/programs.py."""

from collections.abc import Collection, Iterator, Mapping

from configs.schema.common import ModelConfig, ShardedConfig
from configs.schema.ppo import RolloutEngineConfig
from configs.validation.rollout import ROLLOUT


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


TRAINED_BY = {"actor_rollout_ref.model": "actor_rollout_ref.actor", "critic.model": "critic", "model": "engine"}
"""{key of a model: key of the role that trains it}."""


def precision_problems(models: Mapping[str, tuple[ModelConfig, ShardedConfig]]) -> Iterator[str]:
    """Problems of dtypes. models: {key of a trained model: (model, role that trains it)}."""
    # Why float16 is refused: gradients of a token mean are of order 1 / tokens, and float16 flushes values below 6e-8 to 0. In a
    # mini-batch of 8 million tokens this affects 84 % of the gradient, and there is no loss scaling that would prevent it.
    for key, (model, role) in models.items():
        fsdp = role.fsdp_config if role.strategy == "fsdp" else None
        of_computing = fsdp is not None and fsdp.dtype == "float16"
        # With an adapter, model_dtype only applies to the frozen base weights.
        of_gradients = fsdp is not None and fsdp.model_dtype == "float16" and not model.has_adapter
        for name in ["dtype"] * of_computing + ["model_dtype"] * of_gradients:
            yield (
                f"{TRAINED_BY[key]}.fsdp_config.{name}=float16: small gradients underflow to 0, and there is no loss scaling; "
                "use bfloat16, or float32 on GPUs without bfloat16 (float16 is supported for frozen models and rollout.dtype)"
            )


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
