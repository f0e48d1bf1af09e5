"""Training engines: checks before a start, and construction."""

from importlib.util import find_spec
from typing import Literal

from configs.base.keys import ConfigError
from configs.schema.common import FSDPConfig, MegatronConfig, ModelConfig, ShardedConfig
from workers.engine.base import EngineSpec, Head, TrainEngine


def check_engine(key: str, role: ShardedConfig, model: ModelConfig, head: Head, device: Literal["cpu", "cuda"]) -> None:
    """Check that the role's engine is installed and can hold the model. key: of the role, for messages.

    Raises ValueError with what to do, and FileNotFoundError if the model does not exist.
    """
    check_routers(key, model, head)
    if isinstance(role.sharding, FSDPConfig):
        check_split(key, role, model, head)
        check_tiling(key, model, head)
        return check_adapter(key, model, head)
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise ValueError(
            f"{key}.strategy=megatron: megatron-core is not installed here; "
            "run scripts/install_engine.sh megatron cpu, or on a machine with a GPU scripts/install_engine.sh megatron cuda"
        )
    # Imported late, here and below: a check that fails earlier does not wait for torch.
    import torch

    # Megatron takes CUDA where it exists; the patches for the CPU are applied only without it.
    if device == "cpu" and torch.cuda.is_available():
        raise ValueError(
            f"{key}.strategy=megatron takes the GPUs of a machine that has some; for trainer.device=cpu hide them: "
            "CUDA_VISIBLE_DEVICES= before the command"
        )
    check_split(key, role, model, head)


def check_split(key: str, role: ShardedConfig, model: ModelConfig, head: Head) -> None:
    """Check that the role's GPUs divide the model's heads and layers; its engine need not be installed. Raises ConfigError."""
    if isinstance(role.sharding, FSDPConfig):
        name, size = "fsdp_config.ulysses_sequence_parallel_size", role.sharding.ulysses_sequence_parallel_size
        return check_shared_heads(f"{key}.{name}", size, model, head)
    from workers.engine.hf.hf_model import model_config
    from workers.engine.megatron.limits import check_model

    try:
        check_model(model_config(model, head), role.sharding)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def check_shared_heads(key: str, size: int, model: ModelConfig, head: Head) -> None:
    """Check that ``size``, the value of ``key``, divides the model's attention heads. Raises ConfigError."""
    if size == 1:
        return
    from workers.engine.hf.hf_model import model_config
    from workers.engine.ulysses import check_heads

    try:
        check_heads(model_config(model, head), size, key)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_tiling(key: str, model: ModelConfig, head: Head) -> None:
    """Check that the model's MLPs can process their tokens in tiles, if configured. Raises as check_engine does."""
    if not model.tiled_mlp.enabled:
        return
    import torch

    from workers.engine.fsdp.activations import tile_mlps
    from workers.engine.hf.hf_model import empty_model, model_config

    try:
        tile_mlps(empty_model(model, model_config(model, head), head, torch.float32), model.tiled_mlp.num_shards)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def check_routers(key: str, model: ModelConfig, head: Head) -> None:
    """Check that the model has the routers that model.router_aux_loss_coef is for. Raises as check_engine does."""
    if not model.router_aux_loss_coef:
        return
    from workers.engine.hf.hf_model import DTYPES, empty_model, model_config

    try:
        empty_model(model, model_config(model, head), head, DTYPES["bfloat16"])
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def check_adapter(key: str, model: ModelConfig, head: Head) -> None:
    """Check that the configured LoRA adapter fits the model. Raises as check_engine does."""
    if not model.has_adapter:
        return
    from workers.engine.fsdp.lora import check_fit  # imported late: peft is slow to import

    try:
        check_fit(model, head)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def make_engine(spec: EngineSpec) -> TrainEngine:
    """Build the engine that ``spec.sharding`` belongs to. Collective: torch.distributed is initialised and every rank calls."""
    match spec.sharding:
        case FSDPConfig():
            from workers.engine.fsdp.fsdp_engine import FSDPEngine

            return FSDPEngine(spec, spec.sharding)
        case MegatronConfig():
            from workers.engine.megatron.megatron_engine import MegatronEngine

            return MegatronEngine(spec, spec.sharding)
