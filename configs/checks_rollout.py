"""What a rollout engine cannot do here, or makes no use of; see configs/checks.py."""

from collections.abc import Collection, Iterator, Mapping

from configs.pools import Pool, whole_in_words
from configs.schema.common import RunConfig, WorkersConfig
from configs.schema.ppo import RolloutEngineConfig

ROLLOUT = "actor_rollout_ref.rollout"
# Keys that the embedded engine has no use for.
UNUSED_BY_EMBEDDED = {
    f"{ROLLOUT}.tensor_model_parallel_size": "the embedded engine is not split over GPUs",
    f"{ROLLOUT}.gpu_memory_utilization": "the embedded engine takes the memory that max_num_seqs answers need",
    f"{ROLLOUT}.max_num_batched_tokens": "the embedded engine is bounded by max_num_seqs alone",
    f"{ROLLOUT}.enforce_eager": "the embedded engine captures no graphs",
    f"{ROLLOUT}.cudagraph_capture_sizes": "the embedded engine captures no graphs",
    f"{ROLLOUT}.enable_chunked_prefill": "the embedded engine computes a prompt in one step",
    f"{ROLLOUT}.enable_prefix_caching": "the embedded engine computes like prompts once",
    f"{ROLLOUT}.load_format": "the embedded engine's weights come from the trainer",
    f"{ROLLOUT}.seed": "the embedded engine draws from each answer's own seed",
}
# Arguments of vLLM that keys of ours say, or that the engine cannot work here without.
TAKEN_VLLM_ARGUMENTS = frozenset(
    (
        "model", "trust_remote_code", "hf_overrides", "dtype", "seed", "load_format", "tensor_parallel_size", "max_model_len",
        "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "enforce_eager", "cudagraph_capture_sizes",
        "enable_chunked_prefill", "enable_prefix_caching", "distributed_executor_backend", "data_parallel_size", "worker_cls",
        "logprobs_mode", "enable_sleep_mode", "skip_tokenizer_init", "generation_config",
    )
)  # fmt: skip
VLLM_LOWEST_TEMPERATURE = 0.01  # vLLM takes a lower one for this, and log-probs would be of another distribution
# The same of SGLang.
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
SGLANG_LOWEST_TEMPERATURE = 1e-6  # SGLang takes a lower one for greedy


Workers = WorkersConfig | Pool
"""Of a role: all of the run, or a pool of them."""


def world_size(workers: Workers) -> int:
    """One worker a GPU."""
    return workers.nnodes * workers.n_gpus_per_node


def workers_in_words(workers: Workers) -> str:
    return f"{world_size(workers)} workers ({workers.sizes if isinstance(workers, Pool) else whole_in_words(workers)})"


def engine_problems(rollout: RolloutEngineConfig, place: Workers, temperatures: Mapping[str, float]) -> Iterator[str]:
    """place: the engine's workers. temperatures: by key, of all sampling that it is asked for."""
    if rollout.name == "embedded":
        return
    engine, lowest, own, taken = {
        "vllm": ("vLLM", VLLM_LOWEST_TEMPERATURE, rollout.engine_kwargs.vllm, TAKEN_VLLM_ARGUMENTS),
        "sglang": ("SGLang", SGLANG_LOWEST_TEMPERATURE, rollout.engine_kwargs.sglang, TAKEN_SGLANG_ARGUMENTS),
    }[rollout.name]
    workers, size, on_node = world_size(place), rollout.tensor_model_parallel_size, place.n_gpus_per_node
    if workers % size:
        division = f"{workers} = {workers // size} * {size} + {workers % size}"
        does_not = f"does not divide {workers_in_words(place)} ({division}); take one that does"
        yield f"{ROLLOUT}.tensor_model_parallel_size={size}: {does_not}"
    elif rollout.name == "sglang" and on_node % size:
        division = f"{on_node} = {on_node // size} * {size} + {on_node % size}"
        yield (
            f"{ROLLOUT}.tensor_model_parallel_size={size}: an engine of SGLang is on one node here, and {size} does not divide "
            f"the {on_node} GPUs of a node ({division}); take one that does"
        )
    if rollout.dtype == "float64":
        yield f"{ROLLOUT}.dtype=float64: {engine} computes in float32, bfloat16 or float16; take one of these"
    for key, temperature in temperatures.items():
        if 0 < temperature < lowest:
            yield f"{ROLLOUT}.{key}={temperature:g}: {engine} takes {lowest:g} at least; do_sample=false: greedy"
    for name in sorted(taken & own.keys()):
        yield f"{ROLLOUT}.engine_kwargs.{rollout.name}.{name}: another key says it, or it has to be as it is; leave it out"


def determinism_problems(rollout: RolloutEngineConfig, trainer: RunConfig) -> Iterator[str]:
    """vLLM is told to be batch-invariant by its environment; SGLang wants to be asked, and may then refuse other arguments."""
    wanted = trainer.deterministic and trainer.device == "cuda" and rollout.name == "sglang"
    if wanted and not rollout.engine_kwargs.sglang.get("enable_deterministic_inference"):
        yield (
            "trainer.deterministic=true: SGLang on CUDA does not repeat itself unless it is asked to; set "
            f"{ROLLOUT}.engine_kwargs.sglang.enable_deterministic_inference=true beside it, or take another engine"
        )


def engine_notes(rollout: RolloutEngineConfig, typed: Collection[str]) -> Iterator[str]:
    for key, why in UNUSED_BY_EMBEDDED.items():
        if rollout.name == "embedded" and any(name == key or name.startswith(f"{key}.") for name in typed):
            yield f"{key} has no effect: {why}"
