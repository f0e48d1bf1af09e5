"""Validate Megatron's parallel sizes and overrides of its TransformerConfig; see configs/validation/programs.py."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

from configs.base.keys import did_you_mean
from configs.schema.common import CUT, MegatronConfig, RunConfig, ShardedConfig
from configs.validation.rollout import Workers, workers_in_words, world_size

# Fields of megatron-core's TransformerConfig that the engine's layers use and that no other key sets.
SUPPORTED = (
    "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "bias_activation_fusion", "bias_dropout_fusion", "deallocate_pipeline_outputs", "transformer_impl",
)  # fmt: skip
RECOMPUTED = ("core_attn", "mlp")  # modules that support recompute_granularity=selective
# Fields that are ignored with a warning (* matches any text): they select kernels, overlap or memory placement, but do not
# change results.
OWN_ATTENTION = "the engine has its own attention on packed rows"
SPEED, MEMORY = "affects speed only", "affects memory only"
LEFT_OUT = {
    "moe_*": "mixture-of-experts models are trained with FSDP, and other models do not use it",
    "attention_backend": OWN_ATTENTION,
    "apply_rope_fusion": OWN_ATTENTION,
    "masked_softmax_fusion": OWN_ATTENTION,
    "persist_layer_norm": "the engine has its own norm",
    "cross_entropy_loss_fusion": "the engine has its own log-probs, computed in chunks",
    "cross_entropy_fusion_impl": "the engine has its own log-probs, computed in chunks",
    "fused_single_qkv_rope": OWN_ATTENTION,
    "attention_softmax_in_fp32": OWN_ATTENTION,
    "memory_efficient_layer_norm": "the engine has its own norm",
    "variable_seq_lengths": "micro-batches always have variable length",
    "use_fused_*": SPEED,
    "tp_comm_*": SPEED,
    "overlap_*": SPEED,
    "batch_p2p_*": SPEED,
    "*_cuda_graph": SPEED,
    "cuda_graph_*": SPEED,
    "delay_wgrad_compute": SPEED,
    "defer_embedding_wgrad_compute": SPEED,
    "wgrad_deferral_limit": SPEED,
    "async_tensor_model_parallel_allreduce": SPEED,
    "disable_parameter_transpose_cache": SPEED,
    "barrier_with_L1_time": SPEED,
    "cpu_offloading*": MEMORY,
    "fine_grained_activation_offloading": MEMORY,
    "offload_modules": MEMORY,
    "distribute_saved_activations": MEMORY,
    "clone_scatter_output_in_embedding": MEMORY,
    "gradient_accumulation_fusion": "affects speed only, and its kernel is not part of megatron-core",
}
# Fields that are ignored at these values, which describe what the engine does in any case.
ALWAYS_SO: dict[str, tuple[Any, ...]] = {
    "account_for_embedding_in_pipeline_split": (False,),
    "account_for_loss_in_pipeline_split": (False,),
    "attention_dropout": (0, None),
    "hidden_dropout": (0, None),
    "fp8": (None, False),
    "fp4": (None, False),
    "mtp_num_layers": (0, None),
    "pipeline_model_parallel_layout": (None,),
    "calculate_per_token_loss": (False,),
    "deterministic_mode": (False,),
    "fp32_residual_connection": (False,),
}


def megatron_problems(roles: Mapping[str, ShardedConfig], workers: Workers) -> Iterator[str]:
    """Problems of the Megatron roles among ``roles`` ({key: role}), which share GPUs."""
    cut = {key: role.megatron for key, role in roles.items() if role.strategy == "megatron"}
    if not cut:
        return
    first, *others = cut
    yield from _cut_problems(first, cut[first], workers)
    for other in others:
        yield from _unlike(first, cut[first], other, cut[other])
    # The other roles follow the actor by default: check equal overrides once.
    checked: list[Mapping[str, Any]] = []
    for key, megatron in cut.items():
        if megatron.override_transformer_config not in checked:
            checked.append(megatron.override_transformer_config)
            yield from _override_problems(f"{key}.megatron.override_transformer_config", megatron.override_transformer_config)


def megatron_notes(roles: Mapping[str, ShardedConfig]) -> Iterator[str]:
    """Warnings about overrides of TransformerConfig without effect, one for each field."""
    reported: set[str] = set()
    for key, role in roles.items():
        asked = role.megatron.override_transformer_config if role.strategy == "megatron" else {}
        for name in sorted(asked.keys() - reported):
            if (why := _left_out(name, asked[name])) is not None:
                reported.add(name)
                yield f"{key}.megatron.override_transformer_config.{name} has no effect: {why}"


def repeat_problems(roles: Mapping[str, ShardedConfig], trainer: RunConfig) -> Iterator[str]:
    """Problems of trainer.deterministic with the Megatron engine, whose reproducibility on CUDA was never measured."""
    keys = [key for key, role in roles.items() if role.strategy == "megatron"]
    if keys and trainer.deterministic and trainer.device == "cuda":
        yield (
            f"trainer.deterministic=true: {keys[0]}.strategy=megatron is not known to be reproducible on CUDA; use strategy=fsdp"
        )


def _cut_problems(key: str, megatron: MegatronConfig, workers: Workers) -> Iterator[str]:
    sizes = (megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size, megatron.context_parallel_size)
    # The remaining factor is the data-parallel size, which must be an integer.
    size, total = megatron.model_parallel_size, world_size(workers)
    if total % size:
        product = f"{' * '.join(map(str, sizes))} = {size}"
        division = f"{total} = {total // size} * {size} + {total % size}"
        yield (
            f"{key}.megatron: tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size = {product} "
            f"does not divide {workers_in_words(workers)} ({division})"
        )
    # The interleaved schedule needs several stages with several chunks each.
    parts, stages = megatron.virtual_pipeline_model_parallel_size, megatron.pipeline_model_parallel_size
    if parts is not None and (parts == 1 or stages == 1):
        needs = "must be at least 2" if parts == 1 else f"needs pipeline_model_parallel_size >= 2, not {stages}"
        yield f"{key}.megatron.virtual_pipeline_model_parallel_size={parts}: {needs}; use null for one chunk per stage"


def _unlike(first: str, one: MegatronConfig, second: str, other: MegatronConfig) -> Iterator[str]:
    """Differences between the parallel sizes of two roles in the same processes."""
    sizes, other_sizes = asdict(one), asdict(other)
    for name in CUT:
        if sizes[name] != other_sizes[name]:
            yield (
                f"{second}.megatron.{name}={_typed(other_sizes[name])}: {first}.megatron.{name}={_typed(sizes[name])}, but "
                "models "
                "that share GPUs must be split the same way, because Megatron's process groups are global to a process; "
                "remove it "
                "to follow the actor"
            )


def _left_out(name: str, value: Any) -> str | None:
    """Reason why a field is ignored; None if it is not."""
    if name in ALWAYS_SO and value in ALWAYS_SO[name]:
        return "this is always the case"
    return next((why for pattern, why in LEFT_OUT.items() if fnmatchcase(name, pattern)), None)


def _override_problems(key: str, own: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(name for name in own.keys() - set(SUPPORTED) if _left_out(name, own[name]) is None):
        why = "the model or another key sets it, or the engine's layers do not use it"
        yield f"{key}.{name}: {why}{did_you_mean(name, SUPPORTED)}; allowed: {', '.join(SUPPORTED)}"
    granularity = own.get("recompute_granularity")
    method, layers, parts = own.get("recompute_method"), own.get("recompute_num_layers"), own.get("recompute_modules")
    if granularity not in (None, "full", "selective"):
        yield f"{key}.recompute_granularity={granularity}: must be one of full, selective or null"
    # megatron-core asserts these combinations only when the model is built, without naming the keys.
    if granularity == "full" and (method not in ("uniform", "block") or not layers):
        yield (
            f"{key}.recompute_granularity=full: needs recompute_method=uniform or block and recompute_num_layers >= 1, "
            f"not {_typed(method)} and {_typed(layers)}"
        )
    if granularity == "selective" and (method is not None or layers is not None):
        yield f"{key}.recompute_granularity=selective: recompute_method and recompute_num_layers require full; set them to null"
    for part in parts or ():
        if part not in RECOMPUTED:
            yield f"{key}.recompute_modules: {part}: the modules that can be recomputed are {' and '.join(RECOMPUTED)}"


def _typed(value: object) -> str:
    return "null" if value is None else str(value)
