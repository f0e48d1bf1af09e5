"""How Megatron cuts models over GPUs, and which cuts cannot be; see configs/checks.py."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

from configs.checks_rollout import Workers, workers_in_words, world_size
from configs.keys import did_you_mean
from configs.schema.common import MegatronConfig, RunConfig, ShardedConfig

CUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
)
# Fields of megatron-core's TransformerConfig that the engine's layers heed, and that no key of ours says.
HEEDED = (
    "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "bias_activation_fusion", "bias_dropout_fusion", "deallocate_pipeline_outputs", "transformer_impl",
)  # fmt: skip
RECOMPUTED = ("core_attn", "mlp")  # parts of a layer, with recompute_granularity=selective
# Those that are left out, * for any text: they choose kernels, what waits for what, or where things lie.
OWN_ATTENTION = "the engine has its own attention over packed rows"
SPEED, MEMORY = "a matter of speed alone", "a matter of memory alone"
LEFT_OUT = {
    "moe_*": "models with experts are trained by FSDP, and others have no use for it",
    "attention_backend": OWN_ATTENTION,
    "apply_rope_fusion": OWN_ATTENTION,
    "masked_softmax_fusion": OWN_ATTENTION,
    "persist_layer_norm": "the engine has its own norm",
    "cross_entropy_loss_fusion": "the engine has its own log-probs, computed in chunks",
    "cross_entropy_fusion_impl": "the engine has its own log-probs, computed in chunks",
    "fused_single_qkv_rope": OWN_ATTENTION,
    "attention_softmax_in_fp32": OWN_ATTENTION,
    "memory_efficient_layer_norm": "the engine has its own norm",
    "variable_seq_lengths": "micro-batches are of any length",
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
    "gradient_accumulation_fusion": "a matter of speed alone, and its kernel is no part of megatron-core",
}
# And these, at a value that says what is so anyway.
SO_ANYWAY: dict[str, tuple[Any, ...]] = {
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
    """roles: by their key, those that share GPUs."""
    cut = {key: role.megatron for key, role in roles.items() if role.strategy == "megatron"}
    if not cut:
        return
    first, *others = cut
    yield from _cut_problems(first, cut[first], workers)
    for other in others:
        yield from _unlike(first, cut[first], other, cut[other])
    told: list[Mapping[str, Any]] = []
    for key, megatron in cut.items():
        if megatron.override_transformer_config not in told:  # the others follow the actor
            told.append(megatron.override_transformer_config)
            yield from _override_problems(f"{key}.megatron.override_transformer_config", megatron.override_transformer_config)


def megatron_notes(roles: Mapping[str, ShardedConfig]) -> Iterator[str]:
    told: set[str] = set()
    for key, role in roles.items():
        asked = role.megatron.override_transformer_config if role.strategy == "megatron" else {}
        for name in sorted(asked.keys() - told):
            if (why := _left_out(name, asked[name])) is not None:
                told.add(name)
                yield f"{key}.megatron.override_transformer_config.{name} has no effect: {why}"


def repeat_problems(roles: Mapping[str, ShardedConfig], trainer: RunConfig) -> Iterator[str]:
    """What was never measured is not promised."""
    keys = [key for key, role in roles.items() if role.strategy == "megatron"]
    if keys and trainer.deterministic and trainer.device == "cuda":
        yield (f"trainer.deterministic=true: {keys[0]}.strategy=megatron is not known to repeat itself on CUDA; strategy=fsdp is")


def _cut_problems(key: str, megatron: MegatronConfig, workers: Workers) -> Iterator[str]:
    sizes = (megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size, megatron.context_parallel_size)
    size, total = megatron.model_parallel_size, world_size(workers)
    if total % size:
        product = f"{' * '.join(map(str, sizes))} = {size}"
        division = f"{total} = {total // size} * {size} + {total % size}"
        yield (
            f"{key}.megatron: tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size = {product} "
            f"does not divide {workers_in_words(workers)} ({division})"
        )
    parts, stages = megatron.virtual_pipeline_model_parallel_size, megatron.pipeline_model_parallel_size
    if parts is not None and (parts == 1 or stages == 1):
        needs = "takes 2 at least" if parts == 1 else f"needs pipeline_model_parallel_size of 2 at least, not {stages}"
        yield f"{key}.megatron.virtual_pipeline_model_parallel_size={parts}: {needs}; null leaves the layers of a GPU in one part"


def _unlike(first: str, one: MegatronConfig, second: str, other: MegatronConfig) -> Iterator[str]:
    """Two roles in the same processes."""
    mine, theirs = asdict(one), asdict(other)
    for name in CUT:
        if mine[name] != theirs[name]:
            yield (
                f"{second}.megatron.{name}={_typed(theirs[name])}: {first}.megatron.{name}={_typed(mine[name])}, and models that "
                "share GPUs are cut alike: Megatron's process groups are global to a process; leave it out to follow the actor"
            )


def _left_out(name: str, value: Any) -> str | None:
    """Why; None if it is not."""
    if name in SO_ANYWAY and value in SO_ANYWAY[name]:
        return "it is so anyway"
    return next((why for pattern, why in LEFT_OUT.items() if fnmatchcase(name, pattern)), None)


def _override_problems(key: str, own: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(name for name in own.keys() - set(HEEDED) if _left_out(name, own[name]) is None):
        why = "the model or another key says it, or the engine's layers do not heed it"
        yield f"{key}.{name}: {why}{did_you_mean(name, HEEDED)}; there are {', '.join(HEEDED)}"
    granularity = own.get("recompute_granularity")
    method, layers, parts = own.get("recompute_method"), own.get("recompute_num_layers"), own.get("recompute_modules")
    if granularity not in (None, "full", "selective"):
        yield f"{key}.recompute_granularity={granularity}: must be one of full, selective or null"
    if granularity == "full" and (method not in ("uniform", "block") or not layers):
        yield (
            f"{key}.recompute_granularity=full: wants recompute_method=uniform or block and recompute_num_layers=1 or more "
            f"beside it, not {_typed(method)} and {_typed(layers)}"
        )
    if granularity == "selective" and (method is not None or layers is not None):
        yield f"{key}.recompute_granularity=selective: recompute_method and recompute_num_layers go with full; leave them at null"
    for part in parts or ():
        if part not in RECOMPUTED:
            yield f"{key}.recompute_modules: {part}: these layers can recompute {' and '.join(RECOMPUTED)}"


def _typed(value: object) -> str:
    return "null" if value is None else str(value)
