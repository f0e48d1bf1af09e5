"""Validate the dtypes of trained models; see configs/validation/programs.py."""

from collections.abc import Iterator, Mapping

from configs.schema.common import ModelConfig, ShardedConfig

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
