"""The rows of scripts/test_gpu.sh, as data: which command, of which size, on how many GPUs, and what is done with it.

A row runs its script (or trainer.main_ppo) on random weights of the model's true shape. Batches and responses are smaller than
the script's, and what a script sizes for 8 GPUs of 80 GB is set anew for two of 141 GB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["run", "resume", "kill_driver", "kill_worker", "two_nodes", "two_runs", "dry_run", "pytest"]
Engine = Literal["vllm", "sglang", "embedded"]
MINUTES = 60
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a step. batch, mini, round: prompts per step, update, round of dynamic sampling. n: responses per prompt."""

    batch: int = 16
    mini: int = 16
    round: int | None = None
    n: int = 8
    prompt: int = 1024
    response: int = 1024

    def tiny(self) -> Sizes:
        """Small sizes for a CPU, with the same number of updates per step, at most four."""
        updates = min(4, self.batch // self.mini)
        return Sizes(batch=4, mini=4 // updates, round=self.round and 6, n=min(self.n, 4), prompt=64, response=12)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One or more starts of the program. run: from the beginning to STEPS; resume: from there to RESUMED_STEPS; kill_*: as
    resume, with a kill after one more step. gpus: replaces the row's number, -2: half of it. limit: seconds; None: LIMITS of
    the shape. overrides: appended to those of the row.
    """

    name: str
    kind: Kind = "run"
    gpus: int | None = None
    overrides: tuple[str, ...] = ()
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration that is checked. about: description in one line. gpus, most: smallest and largest number of GPUs.
    shape: of scripts/gpu/make.py; reward: shape of a reward model, or None. engine: the rollout engine. instead: use the
    embedded engine if that package is missing. packages: further requirements. mismatch: bound on the difference of log-probs
    between trainer and engine, mean over tokens. base: the row whose checkpoint the stages resume. gigabytes: required memory
    per GPU, for rows without a forecast. long: use prompts of sizes.prompt tokens.
    """

    name: str
    about: str
    gpus: int
    most: int
    shape: str = "1.5b"
    script: str | None = None
    sizes: Sizes = Sizes()
    overrides: tuple[str, ...] = ()
    engine: Engine = "vllm"
    instead: bool = False
    packages: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = (Stage(name="run"),)
    reward: str | None = None
    mismatch: float = 0.05
    base: str | None = None
    gigabytes: float = 0.0
    long: bool = False
    quick: bool = False

    def limit(self, stage: Stage) -> int:
        """Time limit of a stage, in seconds."""
        return stage.limit or LIMITS.get(self.shape, 9 * MINUTES)

    @property
    def shares(self) -> str:
        """Name of the row whose run directory this row uses."""
        return self.base or self.name

    @property
    def saves(self) -> bool:
        """Whether the first stage saves a checkpoint for later stages or rows."""
        return len(self.stages) > 1 or any(row.base == self.name for row in ROWS)


LIMITS = {"0.5b": 4 * MINUTES, "1.5b": 5 * MINUTES, "moe": 6 * MINUTES}
STEPS, RESUMED_STEPS = 3, 5
RUN, RESUME = Stage(name="run"), Stage(name="resume", kind="resume")
EAGER = f"{ROLLOUT}.enforce_eager=true"


def share(of_gpu: float) -> str:
    """Override: the engine's fraction of GPU memory."""
    return f"{ROLLOUT}.gpu_memory_utilization={of_gpu}"


def tp(size: int) -> str:
    """Override: tensor parallel size of the engine."""
    return f"{ROLLOUT}.tensor_model_parallel_size={size}"


def kept_in(dtype: str, *roles: str) -> tuple[str, ...]:
    """Overrides: dtype of parameters, gradients and moments of these roles."""
    return tuple(f"{role}.fsdp_config.model_dtype={dtype}" for role in roles)


def offloaded(*roles: str) -> tuple[str, ...]:
    return tuple(f"{role}.fsdp_config.{part}_offload=true" for role in roles for part in ("param", "optimizer"))


def megatron(**cut: int) -> tuple[str, ...]:
    return (f"{ACTOR}.strategy=megatron", *(f"{ACTOR}.megatron.{name}_model_parallel_size={size}" for name, size in cut.items()))


GRPO, PPO = ("algorithm=grpo",), ("algorithm=ppo", "algorithm.use_kl_in_reward=true")
SMALL = Sizes(batch=32, mini=16, n=4, prompt=512, response=512)
ONE = Sizes(batch=64, mini=32, n=1, prompt=1024, response=1024)
SHORT = Sizes(batch=16, mini=8, n=4, prompt=512, response=256)
BF16 = kept_in("bfloat16", ACTOR, "critic")
JUDGED = (
    "reward.reward_model.enable=true", "reward.reward_model.normalize=running", "reward.weight=1.0",
    "reward.reward_model.fsdp_config.model_dtype=bfloat16",
)  # fmt: skip
GSM8K = "run_qwen2.5-0.5b_grpo_vllm.sh"
GRPO_7B = "run_qwen2.5-7b_grpo_vllm.sh"
ADAPTER_7B = "run_qwen2.5-7b_grpo_lora_vllm.sh"

QUICK = (
    Row(
        name="quick-residency",
        about="an engine wakes after an update that filled the GPU (tests/workers/roles/test_memory_scheduler_cuda.py)",
        gpus=1,
        most=1,
        packages=("pytest",),
        gigabytes=40,
        quick=True,
        engine="embedded",
        stages=(Stage(name="pytest", kind="pytest", limit=4 * MINUTES),),
    ),
    Row(
        name="quick-grpo",
        about="GRPO, checkpoint",
        script=GSM8K,
        shape="0.5b",
        gpus=1,
        most=1,
        sizes=SHORT,
        instead=True,
        overrides=(share(0.4), EAGER),
        quick=True,
    ),
    Row(
        name="quick-kill-driver",
        about="kill -9 of the driver, and the same command again",
        script=GSM8K,
        shape="0.5b",
        gpus=1,
        most=1,
        sizes=SHORT,
        instead=True,
        overrides=(share(0.4), EAGER),
        base="quick-grpo",
        quick=True,
        stages=(Stage(name="kill", kind="kill_driver"),),
    ),
    Row(
        name="quick-ppo",
        about="PPO with critic and reward model",
        script=GSM8K,
        shape="0.5b",
        reward="0.5b",
        gpus=1,
        most=1,
        sizes=SHORT,
        instead=True,
        overrides=("algorithm=ppo", "algorithm.use_kl_in_reward=true", *JUDGED, share(0.3), EAGER),
        quick=True,
    ),
    Row(
        name="quick-megatron",
        about="GRPO on Megatron",
        script=GSM8K,
        shape="0.5b",
        gpus=1,
        most=1,
        sizes=SHORT,
        instead=True,
        packages=("megatron",),
        overrides=(*megatron(tensor=1), share(0.4), EAGER),
        quick=True,
    ),
)

FULL = (
    Row(
        name="grpo-7b-tp1",
        about="GRPO, an engine a GPU",
        script=GRPO_7B,
        shape="7b",
        gpus=2,
        most=8,
        overrides=(tp(1), share(0.45)),
        stages=(RUN, RESUME),
    ),
    Row(
        name="grpo-7b-bf16",
        about="GRPO at 7B on one GPU, parameters, gradients and moments in bfloat16; kill -9 of the worker, of the driver",
        script=GRPO_7B,
        shape="7b",
        gpus=1,
        most=1,
        sizes=Sizes(n=4, response=512),
        overrides=(*kept_in("bfloat16", ACTOR), tp(1), share(0.35)),
        stages=(RUN, Stage(name="kill-worker", kind="kill_worker"), Stage(name="kill-driver", kind="kill_driver")),
    ),
    Row(
        name="grpo-7b-tp2",
        about="GRPO, an engine over two GPUs, all offloaded",
        script=GRPO_7B,
        shape="7b",
        gpus=2,
        most=8,
        overrides=(tp(2), share(0.7), *offloaded(ACTOR), "actor_rollout_ref.ref.fsdp_config.param_offload=true"),
    ),
    Row(
        name="dapo-7b",
        about="DAPO",
        script="run_qwen2.5-7b_dapo_vllm.sh",
        shape="7b",
        gpus=2,
        most=8,
        sizes=Sizes(batch=16, mini=4, round=24),
        overrides=("reward.reward_kwargs.overlong_buffer_cfg.len=256", share(0.5)),
    ),
    Row(
        name="ppo-7b",
        about="PPO with critic and reward model, all roles on all GPUs, offloaded",
        script="run_qwen2-7b_ppo_vllm_sleep.sh",
        shape="7b",
        reward="7b",
        gpus=2,
        most=8,
        sizes=ONE,
        overrides=(*BF16, *JUDGED, "critic.ppo_max_token_len_per_gpu=16384", share(0.7)),
    ),
    Row(
        name="megatron-tp2",
        about="GRPO, Megatron TP2 with vLLM",
        gpus=2,
        most=8,
        sizes=SMALL,
        packages=("megatron",),
        overrides=(*GRPO, *megatron(tensor=2), tp(1), share(0.4)),
        stages=(RUN, RESUME),
    ),
    Row(
        name="megatron-pp2",
        about="GRPO, Megatron PP2 with vLLM",
        gpus=2,
        most=8,
        sizes=SMALL,
        packages=("megatron",),
        overrides=(*GRPO, *megatron(pipeline=2), tp(1), share(0.4)),
        stages=(RUN, RESUME),
    ),
    Row(
        name="sglang-tp1",
        about="GRPO, SGLang",
        gpus=1,
        most=8,
        sizes=SMALL,
        engine="sglang",
        overrides=(*GRPO, tp(1), share(0.5)),
        stages=(RUN, RESUME),
    ),
    Row(
        name="sglang-tp2",
        about="GRPO, SGLang over two GPUs",
        gpus=2,
        most=8,
        sizes=SMALL,
        engine="sglang",
        overrides=(*GRPO, tp(2), share(0.5)),
    ),
    Row(
        name="placement-split",
        about="GRPO without KL, trainer and engine on GPUs of their own",
        gpus=2,
        most=8,
        sizes=SMALL,
        overrides=(*GRPO, "placement=split", f"{ACTOR}.use_kl_loss=false", tp(1), share(0.8)),
        stages=(RUN, RESUME),
    ),
    Row(
        name="placement-pairs",
        about="PPO, critic and reward model on GPUs of their own",
        gpus=2,
        most=8,
        sizes=SMALL,
        reward="1.5b",
        overrides=(*PPO, *JUDGED, "placement=colocate_pairs", tp(1), share(0.4)),
        stages=(RUN, RESUME),
    ),
    Row(
        name="lora-merged",
        about="LoRA at 7B on one GPU, merged for the engine",
        script=ADAPTER_7B,
        shape="7b",
        gpus=1,
        most=1,
        sizes=Sizes(batch=16, mini=4),
        overrides=(share(0.6),),
        stages=(RUN, RESUME),
    ),
    Row(
        name="lora-adapter",
        about="LoRA at 7B on one GPU, the adapter alone goes to the engine",
        script=ADAPTER_7B,
        shape="7b",
        gpus=1,
        most=1,
        sizes=Sizes(batch=16, mini=4),
        overrides=(share(0.6), f"{ROLLOUT}.lora_sync=adapter"),
        stages=(RUN, RESUME),
    ),
    Row(
        name="gspo-7b",
        about="GSPO",
        script="run_qwen2.5-7b_gspo_vllm.sh",
        shape="7b",
        gpus=2,
        most=8,
        sizes=Sizes(mini=4),
        overrides=(share(0.5),),
    ),
    Row(
        name="resume-7b-gpus",
        about="the checkpoint of grpo-7b-tp1 on half the GPUs",
        script=GRPO_7B,
        shape="7b",
        gpus=2,
        most=8,
        base="grpo-7b-tp1",
        overrides=(tp(1), share(0.3)),
        stages=(
            Stage(
                name="half",
                kind="resume",
                gpus=-2,
                overrides=(*offloaded(ACTOR), "actor_rollout_ref.ref.fsdp_config.param_offload=true"),
            ),
        ),
    ),
    Row(
        name="resume-7b-megatron",
        about="the checkpoint of grpo-7b-tp1, from FSDP to Megatron TP2",
        script=GRPO_7B,
        shape="7b",
        gpus=2,
        most=8,
        base="grpo-7b-tp1",
        packages=("megatron",),
        overrides=(tp(1), share(0.35)),
        stages=(
            Stage(name="megatron", kind="resume", overrides=(*megatron(tensor=2), f"{ACTOR}.megatron.optimizer_offload=true")),
        ),
    ),
    Row(
        name="kill-7b-worker",
        about="kill -9 of a worker, trainer.max_restarts=1",
        script=GRPO_7B,
        shape="7b",
        gpus=2,
        most=8,
        base="grpo-7b-tp1",
        overrides=(tp(1), share(0.45)),
        stages=(Stage(name="kill", kind="kill_worker"),),
    ),
    Row(
        name="kill-7b-driver",
        about="kill -9 of the driver, and the same command again",
        script=GRPO_7B,
        shape="7b",
        gpus=2,
        most=8,
        base="grpo-7b-tp1",
        overrides=(tp(1), share(0.45)),
        stages=(Stage(name="kill", kind="kill_driver"),),
    ),
    Row(
        name="two-nodes",
        about="GRPO over two Ray nodes of this host, a GPU each",
        gpus=2,
        most=2,
        sizes=SHORT,
        shape="0.5b",
        overrides=(*GRPO, tp(1), share(0.4), EAGER),
        stages=(Stage(name="run", kind="two_nodes"),),
    ),
    Row(
        name="two-runs",
        about="two runs in one Ray cluster, a GPU each",
        gpus=2,
        most=2,
        sizes=SHORT,
        shape="0.5b",
        overrides=(*GRPO, tp(1), share(0.4), EAGER),
        stages=(Stage(name="run", kind="two_runs"),),
    ),
    Row(
        name="ulysses-2",
        about="GRPO of 32k tokens, Ulysses over two GPUs",
        gpus=2,
        most=2,
        long=True,
        sizes=Sizes(batch=4, mini=4, n=2, prompt=32256, response=512),
        overrides=(
            *GRPO,
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2",
            f"{ACTOR}.ppo_max_token_len_per_gpu=16384",
            tp(1),
            share(0.4),
        ),
        stages=(RUN, RESUME),
    ),
    Row(
        name="ulysses-4",
        about="GRPO of 32k tokens, Ulysses over four GPUs",
        gpus=4,
        most=4,
        long=True,
        sizes=Sizes(batch=4, mini=4, n=2, prompt=32256, response=512),
        overrides=(
            *GRPO,
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=4",
            f"{ACTOR}.ppo_max_token_len_per_gpu=8192",
            tp(1),
            share(0.4),
        ),
    ),
    Row(
        name="moe",
        about="GRPO of a mixture of experts (Qwen3-MoE's kind, 3 billion parameters)",
        shape="moe",
        gpus=1,
        most=8,
        sizes=SMALL,
        overrides=(*GRPO, tp(1), share(0.4)),
        stages=(RUN, RESUME),
        mismatch=0.2,
        gigabytes=130,
    ),
    Row(
        name="reward-colocated",
        about="GRPO, a reward model on the trainer's GPUs",
        gpus=1,
        most=8,
        sizes=SMALL,
        reward="1.5b",
        overrides=(*GRPO, *JUDGED, tp(1), share(0.4)),
    ),
    Row(
        name="reward-apart",
        about="GRPO, a reward model on a GPU of its own",
        gpus=2,
        most=2,
        sizes=SMALL,
        reward="1.5b",
        overrides=(
            *GRPO,
            *JUDGED,
            "placement=custom",
            "placement.roles.actor=train",
            "placement.roles.reward=judge",
            "placement.pools={train: {nodes: 1, gpus: 1, fraction: 1.0}, judge: {nodes: 1, gpus: 1, fraction: 1.0}}",
            tp(1),
            share(0.4),
        ),
    ),
    Row(
        name="script-gsm8k",
        about="the smallest experiment",
        script=GSM8K,
        shape="0.5b",
        gpus=1,
        most=1,
        sizes=Sizes(batch=64, mini=16, prompt=512, response=512),
    ),
    Row(
        name="script-ppo-sglang",
        about="PPO, SGLang",
        script="run_qwen2-7b_ppo_sglang.sh",
        shape="7b",
        gpus=2,
        most=8,
        sizes=ONE,
        engine="sglang",
        overrides=BF16,
    ),
    Row(
        name="script-ppo-megatron",
        about="PPO, Megatron TP2, SGLang, offloaded",
        script="run_qwen2-7b_ppo_megatron.sh",
        shape="7b",
        gpus=2,
        most=8,
        sizes=ONE,
        engine="sglang",
        packages=("megatron",),
        overrides=("critic.ppo_max_token_len_per_gpu=16384",),
    ),
    Row(
        name="script-ppo-pairs",
        about="PPO against a reward model in two pairs",
        script="run_qwen2-7b_ppo_reward_model_pairs.sh",
        shape="7b",
        reward="7b",
        gpus=2,
        most=8,
        sizes=ONE,
        overrides=(*BF16, share(0.4)),
    ),
    Row(
        name="script-reinforce",
        about="REINFORCE++ with baseline",
        script="run_qwen2.5-7b_reinforce_plus_plus_baseline_vllm.sh",
        shape="7b",
        gpus=2,
        most=8,
        sizes=Sizes(mini=8),
        overrides=(share(0.45),),
    ),
    Row(
        name="script-rloo",
        about="RLOO",
        script="run_qwen2.5-7b_rloo_vllm.sh",
        shape="7b",
        gpus=2,
        most=8,
        sizes=Sizes(batch=32, mini=32, n=4),
        overrides=(share(0.45),),
    ),
    Row(
        name="script-dr-grpo",
        about="Dr.GRPO",
        script="run_qwen2.5-math-1.5b_dr_grpo_vllm.sh",
        shape="1.5b",
        gpus=1,
        most=8,
        sizes=Sizes(batch=32, mini=8),
        overrides=(share(0.5),),
    ),
    Row(
        name="script-gsm8k-tool",
        about="GSM8K with a tool",
        script="run_qwen2.5-1.5b_gsm8k_tool_vllm.sh",
        shape="1.5b",
        gpus=1,
        most=8,
        sizes=Sizes(batch=32, mini=8),
        overrides=(share(0.5),),
    ),
    Row(
        name="script-python-tool",
        about="programs that the model writes",
        script="run_qwen2.5-7b_grpo_python_tool_vllm.sh",
        shape="7b",
        gpus=2,
        most=8,
        sizes=Sizes(batch=32, mini=32, n=4),
        overrides=(share(0.45),),
    ),
    Row(
        name="script-search",
        about="search over HTTP",
        script="run_qwen2.5-7b_grpo_search_vllm.sh",
        shape="7b",
        gpus=2,
        most=8,
        sizes=Sizes(batch=32, mini=32, n=4),
        overrides=(share(0.45),),
    ),
    Row(
        name="script-72b",
        about="the plan of 72B on 32 GPUs",
        script="run_qwen2.5-72b_grpo_megatron_split.sh",
        shape="72b",
        gpus=0,
        most=0,
        engine="vllm",
        packages=("megatron",),
        stages=(Stage(name="plan", kind="dry_run", limit=3 * MINUTES),),
    ),
    Row(
        name="script-72b-depth",
        about="72B's widths, 2 of 80 layers, trainer and engine on GPUs of their own",
        script="run_qwen2.5-72b_grpo_megatron_split.sh",
        shape="72b-2",
        gpus=2,
        most=2,
        packages=("megatron",),
        sizes=Sizes(batch=16, mini=4, n=4, prompt=512, response=512),
        overrides=(
            "trainer.nnodes=1",
            "placement.pools={actor: {nodes: 1, gpus: 1, fraction: 1}, rollout: {nodes: 1, gpus: 1, fraction: 1}}",
            *megatron(tensor=1, pipeline=1),
            f"{ACTOR}.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=null",
            f"{ACTOR}.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=null",
            tp(1),
            share(0.8),
        ),
    ),
)

ROWS = (*QUICK, *FULL)
BY_NAME = {row.name: row for row in ROWS}
