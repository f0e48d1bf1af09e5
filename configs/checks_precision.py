"""Types of numbers in which a model cannot learn; see configs/checks.py."""

from collections.abc import Iterator, Mapping

from configs.schema.common import ModelConfig, ShardedConfig

TRAINED_BY = {"actor_rollout_ref.model": "actor_rollout_ref.actor", "critic.model": "critic", "model": "engine"}
"""Key of a model: that of the role that trains it."""


def precision_problems(models: Mapping[str, tuple[ModelConfig, ShardedConfig]]) -> Iterator[str]:
    """models: those that are trained, by their keys, with the roles that train them.

    Gradients of a token mean are of order 1 / tokens, and in float16 what is below 6e-8 becomes 0: in a mini-batch of 8 million
    tokens, 84 % of the gradient.
    """
    for key, (model, role) in models.items():
        fsdp = role.fsdp_config if role.strategy == "fsdp" else None
        of_computing = fsdp is not None and fsdp.dtype == "float16"
        of_gradients = fsdp is not None and fsdp.model_dtype == "float16" and not model.has_adapter
        for name in ["dtype"] * of_computing + ["model_dtype"] * of_gradients:
            yield (
                f"{TRAINED_BY[key]}.fsdp_config.{name}=float16: small gradients become 0, and there is no loss scaling; "
                "use bfloat16, or float32 on GPUs without it (float16 is for models that do not learn, and for rollout.dtype)"
            )
