"""Schema of `trainer.main_ppo`. Defaults are in configs/ppo_trainer.yaml; a test compares the keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from configs.base.addresses import LONGEST_PAUSE, url_problem
from configs.base.secrets import USER_IN_ADDRESS, secret_name_problems
from configs.schema.agents import AgentConfig, MultiTurnConfig
from configs.schema.alarms import AlarmsConfig
from configs.schema.common import (
    AggMode,
    Checked,
    Dtype,
    FollowingConfig,
    Fraction,
    KLKind,
    MicroBatching,
    ModelConfig,
    NonNegative,
    NonNegativeFloat,
    OptimConfig,
    Positive,
    PositiveFloat,
    RayConfig,
    RunConfig,
    ShardedConfig,
    TokenizedModelConfig,
    TrainingTimeoutsConfig,
)
from configs.schema.placement import PlacementConfig
from configs.schema.scoring_model import ScoringModelDefaults


@dataclass(slots=True, kw_only=True, frozen=True)
class PromptConfig:
    """Options for reading prompts, shared by training, generation and parity."""

    prompt_key: str
    reward_fn_key: str
    max_prompt_length: Positive
    max_response_length: Positive
    truncation: Literal["error", "left", "right", "middle"]
    filter_overlong_prompts: bool
    filter_overlong_prompts_workers: Positive
    shuffle: bool
    apply_chat_template_kwargs: dict[str, Any]


@dataclass(slots=True, kw_only=True, frozen=True)
class CustomDatasetConfig(Checked):
    path: str | None
    name: str | None

    def problems(self) -> Iterator[str]:
        if self.path is not None and self.name is None:
            yield f"data.custom_cls.path={self.path}: the file may have several classes; set data.custom_cls.name"


@dataclass(slots=True, kw_only=True, frozen=True)
class DataConfig(PromptConfig):
    train_files: list[str]
    val_files: list[str]
    custom_cls: CustomDatasetConfig
    train_max_samples: Annotated[int, Ge(-1)]
    val_max_samples: Annotated[int, Ge(-1)]
    train_batch_size: Positive
    gen_batch_size: Positive | None
    val_batch_size: Positive | None
    seed: int | None
    ptx_files: list[str] | None
    ptx_prompt_key: str
    ptx_response_key: str
    ptx_max_length: Positive
    ptx_truncation: Literal["error", "left", "right"]


@dataclass(slots=True, kw_only=True, frozen=True)
class PolicyLossConfig(Checked):
    # Not a Literal: besides the registered names, FILE.py:FUNCTION selects a user's loss.
    loss_mode: str
    clip_cov_ratio: Annotated[float, Gt(0.0), Le(1.0)]
    # A covariance can be negative, so these bounds have no sign constraint.
    clip_cov_lb: float
    clip_cov_ub: float
    kl_cov_ratio: Annotated[float, Gt(0.0), Le(1.0)]
    ppo_kl_coef: NonNegativeFloat

    def problems(self) -> Iterator[str]:
        if self.clip_cov_lb >= self.clip_cov_ub:
            bounds = f"clip_cov_lb={self.clip_cov_lb:g}: must be below clip_cov_ub={self.clip_cov_ub:g}"
            yield f"actor_rollout_ref.actor.policy_loss.{bounds}"


@dataclass(slots=True, kw_only=True, frozen=True)
class UpdatedConfig(ShardedConfig):
    """Options of the updates of actor and critic."""

    ppo_mini_batch_size: Positive  # in prompts, not sequences: a group is never split over mini-batches
    ppo_micro_batch_size: Positive | None
    ppo_micro_batch_size_per_gpu: Positive | None
    use_dynamic_bsz: bool
    ppo_max_token_len_per_gpu: Positive
    ppo_epochs: Positive
    shuffle: bool
    loss_agg_mode: AggMode
    loss_scale_factor: Positive | None
    grad_clip: PositiveFloat
    optim: OptimConfig

    @property
    def micro_batching(self) -> MicroBatching:
        """Micro-batches of the update."""
        return MicroBatching(
            self.ppo_micro_batch_size_per_gpu, self.ppo_micro_batch_size, self.use_dynamic_bsz, self.ppo_max_token_len_per_gpu
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class ActorConfig(UpdatedConfig):
    policy_loss: PolicyLossConfig
    clip_ratio: NonNegativeFloat
    clip_ratio_low: NonNegativeFloat
    clip_ratio_high: NonNegativeFloat
    # Dual clip bounds the loss at clip_ratio_c * |advantage|, which at 1 or less would clip on-policy tokens.
    clip_ratio_c: Annotated[float, Gt(1.0)]
    tau_pos: PositiveFloat
    tau_neg: PositiveFloat
    entropy_coeff: float
    calculate_entropy: bool
    use_kl_loss: bool
    kl_loss_coef: float
    kl_loss_type: KLKind
    ptx_coef: PositiveFloat
    ptx_ratio: PositiveFloat
    ema_decay: Annotated[float, Gt(0.0), Lt(1.0)] | None


@dataclass(slots=True, kw_only=True, frozen=True)
class RefConfig(FollowingConfig):
    log_prob_micro_batch_size: Positive | None
    log_prob_micro_batch_size_per_gpu: Positive | None
    log_prob_use_dynamic_bsz: bool
    log_prob_max_token_len_per_gpu: Positive

    @property
    def micro_batching(self) -> MicroBatching:
        """Micro-batches of log-probs."""
        return MicroBatching(
            self.log_prob_micro_batch_size_per_gpu,
            self.log_prob_micro_batch_size,
            self.log_prob_use_dynamic_bsz,
            self.log_prob_max_token_len_per_gpu,
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class SamplingConfig:
    """Sampling parameters of validation."""

    n: Positive
    do_sample: bool
    temperature: NonNegativeFloat
    top_k: Annotated[int, Ge(-1)]
    top_p: Annotated[float, Gt(0.0), Le(1.0)]


@dataclass(slots=True, kw_only=True, frozen=True)
class EngineKwargsConfig:
    vllm: dict[str, Any]
    sglang: dict[str, Any]


@dataclass(slots=True, kw_only=True, frozen=True)
class RolloutEngineConfig:
    """Options of a rollout engine and of sampling."""

    name: Literal["embedded", "vllm", "sglang"]
    n: Positive
    do_sample: bool
    # Positive, unlike in validation: log-probs are divided by it. Greedy decoding is do_sample=false.
    temperature: PositiveFloat
    top_k: Annotated[int, Ge(-1)]
    top_p: Annotated[float, Gt(0.0), Le(1.0)]
    ignore_eos: bool
    dtype: Dtype
    max_num_seqs: Positive
    balance: Literal["tokens", "static"]
    max_model_len: Positive | None
    tensor_model_parallel_size: Positive
    gpu_memory_utilization: Fraction
    max_num_batched_tokens: Positive
    enforce_eager: bool
    cudagraph_capture_sizes: list[int] | None
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    load_format: str
    seed: NonNegative
    engine_kwargs: EngineKwargsConfig
    free_cache_engine: bool
    update_weights_bucket_megabytes: Positive
    verify_weights: Literal["off", "sample", "full"]
    lora_sync: Literal["merged", "adapter"]


@dataclass(slots=True, kw_only=True, frozen=True)
class RolloutConfig(RolloutEngineConfig):
    """Options of the rollout engine in training: log-prob micro-batches of the actor, and validation sampling."""

    log_prob_micro_batch_size: Positive | None
    log_prob_micro_batch_size_per_gpu: Positive | None
    log_prob_use_dynamic_bsz: bool
    log_prob_max_token_len_per_gpu: Positive
    multi_turn: MultiTurnConfig
    agent: AgentConfig
    val_kwargs: SamplingConfig

    @property
    def micro_batching(self) -> MicroBatching:
        """Micro-batches of log-probs."""
        return MicroBatching(
            self.log_prob_micro_batch_size_per_gpu,
            self.log_prob_micro_batch_size,
            self.log_prob_use_dynamic_bsz,
            self.log_prob_max_token_len_per_gpu,
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class ActorRolloutRefConfig:
    model: TokenizedModelConfig
    actor: ActorConfig
    ref: RefConfig
    rollout: RolloutConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class CriticConfig(FollowingConfig, UpdatedConfig):
    enable: bool | None  # null: decided by the advantage estimator, which is only known when the registries are loaded
    model: ModelConfig
    forward_micro_batch_size: Positive | None
    forward_micro_batch_size_per_gpu: Positive | None
    forward_max_token_len_per_gpu: Positive
    cliprange_value: NonNegativeFloat
    normalize_targets: bool

    @property
    def forward_micro_batching(self) -> MicroBatching:
        """Micro-batches of values."""
        return MicroBatching(
            self.forward_micro_batch_size_per_gpu,
            self.forward_micro_batch_size,
            self.use_dynamic_bsz,
            self.forward_max_token_len_per_gpu,
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class KLControlConfig:
    """Controller of the KL coefficient in the reward (Ziegler et al., arXiv:1909.08593, for type=adaptive)."""

    type: Literal["fixed", "adaptive"]
    kl_coef: float
    horizon: Positive
    target_kl: PositiveFloat


@dataclass(slots=True, kw_only=True, frozen=True)
class RolloutCorrectionConfig:
    """Off-policy correction for the mismatch between rollout engine and trainer."""

    rollout_is: Literal["token", "sequence"] | None
    # Strings, because a value may contain two bounds: 0.5_5.0. trainer/algorithms/correction_rules.py parses them.
    rollout_is_threshold: str
    rollout_is_batch_normalize: bool
    rollout_rs: str | None
    rollout_rs_threshold: str | None
    rollout_token_veto_threshold: Annotated[float, Gt(0.0), Lt(1.0)] | None
    bypass_mode: bool
    loss_type: Literal["ppo_clip", "reinforce"]
    mismatch_bound: PositiveFloat | None


@dataclass(slots=True, kw_only=True, frozen=True)
class FilterGroupsConfig:
    enable: bool
    # Any number that the reward function returns may be named, so the names are only known at run time.
    metric: str | None
    max_num_gen_batches: int


@dataclass(slots=True, kw_only=True, frozen=True)
class AlgorithmConfig(Checked):
    # Not a Literal: besides the registered names, FILE.py:FUNCTION selects a user's estimator.
    adv_estimator: str
    gamma: Fraction
    lam: Fraction
    gamma_over: Literal["token", "turn"]
    norm_adv_by_std_in_grpo: bool
    gdpo_reward_keys: list[str] | None
    gdpo_reward_weights: list[float] | None
    whiten_advantages: Literal["batch", "group"] | None
    truncated_answers: Literal["keep", "mask", "bootstrap"]
    use_kl_in_reward: bool
    kl_penalty: KLKind
    kl_clip: PositiveFloat | None
    kl_ctrl: KLControlConfig
    rollout_correction: RolloutCorrectionConfig
    filter_groups: FilterGroupsConfig

    def problems(self) -> Iterator[str]:
        keys, weights = self.gdpo_reward_keys, self.gdpo_reward_weights
        if self.adv_estimator == "gdpo" and not keys:
            yield (
                "algorithm.gdpo_reward_keys=null: gdpo needs the names of the rewards; set them to keys of the dict that the "
                "reward function returns"
            )
        if keys and weights and len(keys) != len(weights):
            counted = f"{len(weights)} weights for {len(keys)} keys, {', '.join(keys)}"
            yield f"algorithm.gdpo_reward_weights={weights}: {counted}; set one weight per key"
        if self.rollout_correction.bypass_mode and self.use_kl_in_reward:
            yield (
                "algorithm.rollout_correction.bypass_mode=true: algorithm.use_kl_in_reward needs the actor's log-probs, which "
                "are not computed; set actor_rollout_ref.actor.use_kl_loss instead"
            )
        if self.rollout_correction.bypass_mode and self.adv_estimator == "optimal_token_baseline":
            needs = "optimal_token_baseline needs the actor's log-probs, which are not computed; set bypass_mode=false"
            yield f"algorithm.rollout_correction.bypass_mode=true: {needs}"
        if self.filter_groups.enable and self.filter_groups.metric == "seq_final_reward" and self.use_kl_in_reward:
            yield (
                "algorithm.filter_groups.metric=seq_final_reward: groups are filtered before algorithm.use_kl_in_reward "
                "subtracts the KL; use seq_reward, the reward before the KL"
            )


@dataclass(slots=True, kw_only=True, frozen=True)
class AsyncTrainingConfig:
    """Generation across steps."""

    mode: Literal["partial", "one_step_off", "async"] | None
    clock: Literal["logical", "wall"]
    oversubmit: Annotated[float, Ge(1.0)]
    max_age: Positive
    max_staleness: NonNegative
    prox_logp: Literal["recompute", "snapshot", "loglinear"]
    trigger_parameter_sync_step: Positive
    pause: Literal["abort", "keep", "finish"]
    kv_cache: Literal["recompute", "keep"]


@dataclass(slots=True, kw_only=True, frozen=True)
class CustomRewardConfig:
    path: str | None
    name: str
    reward_kwargs: dict[str, Any]


@dataclass(slots=True, kw_only=True, frozen=True)
class GSM8KRewardConfig:
    method: Literal["strict", "flexible", "math"]


@dataclass(slots=True, kw_only=True, frozen=True)
class MathDapoRewardConfig:
    strict_box_verify: bool


@dataclass(slots=True, kw_only=True, frozen=True)
class CodeRewardConfig:
    time_limit: PositiveFloat
    memory_limit_mb: Positive
    partial: bool


@dataclass(slots=True, kw_only=True, frozen=True)
class JudgeRewardConfig:
    url: str | None
    model: str | None
    api_key_env: str
    prompt: str
    max_score: PositiveFloat
    temperature: NonNegativeFloat
    max_tokens: Positive
    concurrency: Positive
    timeout: PositiveFloat
    retries: NonNegative
    backoff: NonNegativeFloat


@dataclass(slots=True, kw_only=True, frozen=True)
class RemoteConfig:
    batch_size: Positive
    concurrency: Positive
    timeout: PositiveFloat
    retries: NonNegative
    backoff: NonNegativeFloat
    token_env: str


@dataclass(slots=True, kw_only=True, frozen=True)
class OverlongConfig:
    enable: bool
    len: NonNegative
    penalty_factor: NonNegativeFloat
    log: bool


@dataclass(slots=True, kw_only=True, frozen=True)
class RewardKwargsConfig:
    max_resp_len: Positive
    overlong_buffer_cfg: OverlongConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class ShapingConfig:
    clip: tuple[float, float] | None
    normalize: Literal["running", "group"] | None


@dataclass(slots=True, kw_only=True, frozen=True)
class ScoringConfig(Checked):
    """Options for scoring responses on this machine."""

    num_workers: NonNegative
    timeout: PositiveFloat
    memory_limit_mb: Positive | None
    scorer: str | None
    custom_reward_function: CustomRewardConfig
    gsm8k: GSM8KRewardConfig
    math_dapo: MathDapoRewardConfig
    code: CodeRewardConfig
    judge: JudgeRewardConfig

    def problems(self) -> Iterator[str]:
        judge = self.judge
        if self.scorer == "judge":
            yield from (
                f"reward.scorer=judge: reward.judge.{name} is null; set the URL of an OpenAI-compatible server and its model"
                for name, value in (("url", judge.url), ("model", judge.model))
                if value is None
            )
        if judge.url is not None and USER_IN_ADDRESS.search(judge.url):
            yield (
                "reward.judge.url: contains a user name or a password; put the key into the variable named by "
                "reward.judge.api_key_env"
            )
        elif judge.url is not None and (problem := url_problem(judge.url)) is not None:
            yield f"reward.judge.url{problem}"
        if judge.url is not None:
            # Worst case: every request times out, with pauses in between: backoff * (1 + 2 + 4 ...), each LONGEST_PAUSE at most.
            requests, pauses = (
                judge.retries + 1,
                sum(min(LONGEST_PAUSE, judge.backoff * 2**retry) for retry in range(judge.retries)),
            )
            longest = requests * judge.timeout + pauses
            if longest > self.timeout:
                yield (
                    f"reward.timeout={self.timeout:g}: less than the judge's maximum time, (retries + 1) * timeout + pauses = "
                    f"{requests} * {judge.timeout:g} + {pauses:g} = {longest:g} s (reward.judge.retries, timeout, backoff)"
                )


@dataclass(slots=True, kw_only=True, frozen=True)
class RemoteScoringConfig(ScoringConfig):
    """Options for scoring responses on this machine or on servers."""

    remote_urls: list[str]
    remote: RemoteConfig

    def problems(self) -> Iterator[str]:
        for url in self.remote_urls:
            if (problem := url_problem(url)) is not None:
                yield f"reward.remote_urls{problem}"
        yield from secret_name_problems("reward.remote.token_env", self.remote.token_env)
        yield from ScoringConfig.problems(self)


@dataclass(slots=True, kw_only=True, frozen=True)
class ModelScoringConfig(RemoteScoringConfig):
    """Options for scoring with rules, servers and reward models."""

    weight: float
    # Untyped here: each entry is validated after it is merged over reward_model, see configs/reward_models.py.
    models: dict[str, dict[str, Any]]
    reward_model: ScoringModelDefaults


@dataclass(slots=True, kw_only=True, frozen=True)
class FollowingModelDefaults(FollowingConfig, ScoringModelDefaults):
    """Defaults of reward models in a training run, sharded like the actor unless set otherwise."""


@dataclass(slots=True, kw_only=True, frozen=True)
class RewardConfig(ModelScoringConfig):
    """Options for scoring, and for shaping scores into training rewards."""

    reward_model: FollowingModelDefaults
    reward_kwargs: RewardKwargsConfig
    timeout_score: float | None
    missing_eos_penalty: PositiveFloat | None
    shaping: ShapingConfig

    def problems(self) -> Iterator[str]:
        overlong, most, clip = self.reward_kwargs.overlong_buffer_cfg, self.reward_kwargs.max_resp_len, self.shaping.clip
        if overlong.enable and not 0 < overlong.len <= most:
            yield (
                f"reward.reward_kwargs.overlong_buffer_cfg.len={overlong.len}: with enable=true it must be between 1 and "
                f"reward.reward_kwargs.max_resp_len={most} tokens"
            )
        if clip is not None and clip[0] >= clip[1]:
            yield f"reward.shaping.clip=[{clip[0]:g}, {clip[1]:g}]: the lower bound must be less than the upper"
        yield from RemoteScoringConfig.problems(self)


NO_RULES = "none"
"""Value of reward.scorer that disables rule-based scoring."""


def asks_rules(reward: ScoringConfig) -> bool:
    """Whether a scorer or a user's function scores responses, with or without reward models."""
    return reward.custom_reward_function.path is not None or reward.scorer != NO_RULES


def has_score(reward: RemoteScoringConfig) -> bool:
    """Whether there is a score other than those of reward models: from rules, or from servers that replace them."""
    return bool(reward.remote_urls) or asks_rules(reward)


def wants_truth(reward: RemoteScoringConfig) -> bool:
    """Whether rows must have a data source and a ground truth, which rules need. Servers get these columns if they exist."""
    return not reward.remote_urls and asks_rules(reward)


@dataclass(slots=True, kw_only=True, frozen=True)
class ReplayConfig(Checked):
    """Replay of a single step from a file of trainer.rollout_data_dir."""

    mode: Literal["rollout", "train"] | None
    path: str | None
    bound: NonNegativeFloat

    def problems(self) -> Iterator[str]:
        if self.mode is not None and self.path is None:
            yield (
                f"trainer.replay.mode={self.mode}: trainer.replay.path is null; set it to a step_N.safetensors of "
                "rollout_data_dir"
            )
        if self.mode is None and self.path is not None:
            yield (
                f"trainer.replay.path={self.path}: trainer.replay.mode is null; set it to rollout (generate the step again) or "
                "train"
            )


@dataclass(slots=True, kw_only=True, frozen=True)
class TrainerConfig(RunConfig):
    # PPO counts in steps only; the supervised programs also accept after_each_epoch.
    save_freq: int | Literal["end"]
    test_freq: int
    log_val_generations: NonNegative
    rollout_data_dir: str | None
    replay: ReplayConfig
    critic_warmup: NonNegative
    val_before_train: bool
    val_only: bool
    max_actor_ckpt_to_keep: Positive | None
    max_critic_ckpt_to_keep: Positive | None


@dataclass(slots=True, kw_only=True, frozen=True)
class TimeoutsConfig(TrainingTimeoutsConfig):
    generate: PositiveFloat
    reward: PositiveFloat
    sync: PositiveFloat


@dataclass(slots=True, kw_only=True, frozen=True)
class PPOConfig:
    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    critic: CriticConfig
    algorithm: AlgorithmConfig
    async_training: AsyncTrainingConfig
    reward: RewardConfig
    alarms: AlarmsConfig
    trainer: TrainerConfig
    placement: PlacementConfig
    timeouts: TimeoutsConfig
    ray_kwargs: RayConfig
