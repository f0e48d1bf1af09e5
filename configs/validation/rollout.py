"""Validate options of rollout engines and warn about unused ones; see configs/validation/programs.py."""

from collections.abc import Collection, Iterator, Mapping

from configs.schema.common import RunConfig, WorkersConfig
from configs.schema.placement import Pool
from configs.schema.ppo import RolloutEngineConfig

ROLLOUT = "actor_rollout_ref.rollout"
# Keys that the embedded engine does not use, and the reason.
UNUSED_BY_EMBEDDED = {
    f"{ROLLOUT}.tensor_model_parallel_size": "the embedded engine is not split over GPUs",
    f"{ROLLOUT}.gpu_memory_utilization": "the embedded engine allocates memory for max_num_seqs responses",
    f"{ROLLOUT}.max_num_batched_tokens": "the embedded engine is limited by max_num_seqs only",
    f"{ROLLOUT}.enforce_eager": "the embedded engine does not capture graphs",
    f"{ROLLOUT}.cudagraph_capture_sizes": "the embedded engine does not capture graphs",
    f"{ROLLOUT}.enable_chunked_prefill": "the embedded engine prefills a prompt in one step",
    f"{ROLLOUT}.enable_prefix_caching": "the embedded engine computes identical prompts once",
    f"{ROLLOUT}.load_format": "the embedded engine gets its weights from the trainer",
    f"{ROLLOUT}.seed": "the embedded engine samples every response with its own seed",
}
# Arguments of vLLM that other keys set, or that must keep the value this integration needs.
TAKEN_VLLM_ARGUMENTS = frozenset(
    (
        "model", "trust_remote_code", "hf_overrides", "dtype", "seed", "load_format", "tensor_parallel_size", "max_model_len",
        "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "enforce_eager", "cudagraph_capture_sizes",
        "enable_chunked_prefill", "enable_prefix_caching", "distributed_executor_backend", "data_parallel_size", "worker_cls",
        "logprobs_mode", "enable_sleep_mode", "skip_tokenizer_init", "generation_config",
    )
)  # fmt: skip
# vLLM clamps lower temperatures to this value, so log-probs would belong to a different distribution than the configured one.
VLLM_LOWEST_TEMPERATURE = 0.01
# Arguments of SGLang that other keys set, or that must keep the value this integration needs.
TAKEN_SGLANG_ARGUMENTS = frozenset(
    (
        "model_path", "trust_remote_code", "json_model_override_args", "context_length", "tp_size", "mem_fraction_static",
        "max_running_requests", "max_prefill_tokens", "chunked_prefill_size", "disable_cuda_graph", "cuda_graph_bs_decode",
        "disable_radix_cache", "dtype", "load_format", "random_seed", "enable_memory_saver", "skip_tokenizer_init",
        "sleep_on_idle", "base_gpu_id", "gpu_id_step", "custom_weight_loader", "device", "pp_size", "dp_size", "nnodes",
        "node_rank", "tokenizer_worker_num", "enable_weights_cpu_backup", "enable_lora", "lora_paths", "max_lora_rank",
        "lora_target_modules", "max_loras_per_batch", "lora_strict_loading",
    )
)  # fmt: skip
# SGLang decodes greedily below this temperature.
SGLANG_LOWEST_TEMPERATURE = 1e-6


Workers = WorkersConfig | Pool
"""Workers of a role: all workers of the run, or those of a pool."""


def engine_ranks(rollout: RolloutEngineConfig) -> int:
    """Number of ranks that form one rollout engine."""
    return 1 if rollout.name == "embedded" else rollout.tensor_model_parallel_size


def world_size(workers: Workers) -> int:
    """Number of workers: one per GPU."""
    return workers.nnodes * workers.n_gpus_per_node


def workers_in_words(workers: Workers) -> str:
    """Number of workers with its arithmetic, for messages."""
    return f"{world_size(workers)} workers ({workers.sizes})"


def engine_problems(rollout: RolloutEngineConfig, place: Workers, temperatures: Mapping[str, float]) -> Iterator[str]:
    """Problems of a rollout engine. place: its workers. temperatures: {key: temperature} of all sampling in the run."""
    if rollout.name == "embedded":
        return
    engine, lowest, own, taken = {
        "vllm": ("vLLM", VLLM_LOWEST_TEMPERATURE, rollout.engine_kwargs.vllm, TAKEN_VLLM_ARGUMENTS),
        "sglang": ("SGLang", SGLANG_LOWEST_TEMPERATURE, rollout.engine_kwargs.sglang, TAKEN_SGLANG_ARGUMENTS),
    }[rollout.name]
    workers, size, on_node = world_size(place), rollout.tensor_model_parallel_size, place.n_gpus_per_node
    if workers % size:
        division = f"{workers} = {workers // size} * {size} + {workers % size}"
        does_not = f"does not divide {workers_in_words(place)} ({division}); use a divisor"
        yield f"{ROLLOUT}.tensor_model_parallel_size={size}: {does_not}"
    # vLLM engines may span nodes; an SGLang engine is started by one worker, on the GPUs of its node.
    elif rollout.name == "sglang" and on_node % size:
        division = f"{on_node} = {on_node // size} * {size} + {on_node % size}"
        yield (
            f"{ROLLOUT}.tensor_model_parallel_size={size}: an SGLang engine must fit on one node, but {size} does not divide "
            f"the {on_node} GPUs of a node ({division}); use a divisor"
        )
    if rollout.dtype == "float64":
        yield f"{ROLLOUT}.dtype=float64: not supported by {engine}; use float32, bfloat16 or float16"
    for key, temperature in temperatures.items():
        if 0 < temperature < lowest:
            yield (
                f"{ROLLOUT}.{key}={temperature:g}: the minimum of {engine} is {lowest:g}; use do_sample=false for greedy decoding"
            )
    for name in sorted(taken & own.keys()):
        yield f"{ROLLOUT}.engine_kwargs.{rollout.name}.{name}: set by another key, or required as it is; remove it"


def determinism_problems(rollout: RolloutEngineConfig, trainer: RunConfig) -> Iterator[str]:
    """Problems of trainer.deterministic with the rollout engine."""
    # vLLM becomes batch-invariant by an environment variable that the worker sets. SGLang needs an engine argument, which may
    # conflict with other arguments, so the user has to set it.
    wanted = trainer.deterministic and trainer.device == "cuda" and rollout.name == "sglang"
    if wanted and not rollout.engine_kwargs.sglang.get("enable_deterministic_inference"):
        yield (
            "trainer.deterministic=true: SGLang on CUDA is not deterministic by default; also set "
            f"{ROLLOUT}.engine_kwargs.sglang.enable_deterministic_inference=true, or use another engine"
        )


def engine_notes(rollout: RolloutEngineConfig, typed: Collection[str]) -> Iterator[str]:
    """Warnings about keys on the command line that the engine does not use."""
    for key, why in UNUSED_BY_EMBEDDED.items():
        if rollout.name == "embedded" and any(name == key or name.startswith(f"{key}.") for name in typed):
            yield f"{key} has no effect: {why}"
