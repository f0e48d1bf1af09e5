"""Numbers that cannot work fail here, before any process starts, with the arithmetic in the message."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from configs.keys import ConfigError
from configs.schema.common import RunConfig
from configs.schema.ppo import PPOConfig, RewardConfig
from configs.schema.sft import SFTConfig

ROLLOUT = "actor_rollout_ref.rollout"
# Keys that the embedded engine has no use for.
UNUSED_BY_EMBEDDED = {
    f"{ROLLOUT}.tensor_model_parallel_size": "the embedded engine is not split over GPUs",
    f"{ROLLOUT}.gpu_memory_utilization": "the embedded engine takes the memory that max_num_seqs answers need",
}


def check_ppo(config: PPOConfig, typed: Collection[str], *, needs_values: bool) -> list[str]:
    """Lines for the user about what has no effect, or an odd one. Raises ConfigError with a line for each problem.

    typed: keys given on the command line. needs_values: the advantage estimator reads values, and so wants a critic.
    """
    has_critic = needs_values or config.critic.enable is True
    problems = [*_run_problems(config.trainer), *_batch_problems(config, has_critic), *_length_problems(config, has_critic)]
    problems += _reward_problems(config.reward)
    if needs_values and config.critic.enable is False:
        problems.append(
            f"critic.enable=false: algorithm.adv_estimator={config.algorithm.adv_estimator} needs the critic's values; "
            "leave critic.enable at null, or choose another estimator, such as grpo"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return [*_run_notes(config.trainer), *_ppo_notes(config, typed)]


def check_sft(config: SFTConfig, typed: Collection[str]) -> list[str]:
    """See check_ppo."""
    data, workers = config.data, world_size(config.trainer)
    problems = list(_run_problems(config.trainer))
    if data.train_batch_size < workers:
        problems.append(f"data.train_batch_size={data.train_batch_size}: fewer rows than {_workers(config.trainer)}")
    cut = Cut("data", "", data.micro_batch_size_per_gpu, None, data.use_dynamic_bsz, data.max_token_len_per_gpu)
    problems += cut.problems(workers, data.max_length, f"data.max_length = {data.max_length}")
    if problems:
        raise ConfigError("\n".join(problems))
    return list(_run_notes(config.trainer))


def world_size(trainer: RunConfig) -> int:
    """Workers of the run, one a GPU."""
    return trainer.nnodes * trainer.n_gpus_per_node


def micro_batch_limits(
    per_gpu: int | None, over_all: int | None, dynamic: bool, max_tokens: int, world_size: int
) -> tuple[int | None, int | None]:
    """(tokens, rows) of a micro-batch at most, one of them None: tokens if ``dynamic`` or no count is given, else rows.

    per_gpu: rows on one worker. over_all: the older count, over all workers; at least one row each. Raises ValueError if
    over_all does not divide by the workers.
    """
    if dynamic or (per_gpu is None and over_all is None):
        return max_tokens, None
    if per_gpu is not None:
        return None, per_gpu
    assert over_all is not None
    if over_all > world_size and over_all % world_size:
        quotient = f"{over_all} / {world_size} = {over_all / world_size:.4g}"
        raise ValueError(f"so many sequences do not divide by the workers ({quotient})")
    return None, max(1, over_all // world_size)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a role cuts micro-batches. The keys are role.<kind>micro_batch_size and so on."""

    role: str
    kind: str
    per_gpu: int | None
    over_all: int | None
    dynamic: bool
    max_tokens: int

    def problems(self, workers: int, longest: int, longest_in_words: str) -> Iterator[str]:
        """longest: tokens that a row may have."""
        try:
            tokens, _ = micro_batch_limits(self.per_gpu, self.over_all, self.dynamic, self.max_tokens, workers)
        except ValueError as error:
            key = f"{self.role}.{self.kind}micro_batch_size"
            yield f"{key}={self.over_all}: {error}; {self.kind}micro_batch_size_per_gpu counts for one"
            return
        if tokens is not None and tokens < longest:
            key = f"{self.role}.{self.kind}max_token_len_per_gpu"
            yield f"{key}={tokens}: a micro-batch of so many tokens does not hold the longest row, {longest_in_words}"


def _cuts(config: PPOConfig, *, has_critic: bool) -> Iterator[Cut]:
    models, critic = config.actor_rollout_ref, config.critic
    actor, rollout, ref = models.actor, models.rollout, models.ref
    yield Cut(
        "actor_rollout_ref.actor",
        "ppo_",
        actor.ppo_micro_batch_size_per_gpu,
        actor.ppo_micro_batch_size,
        actor.use_dynamic_bsz,
        actor.ppo_max_token_len_per_gpu,
    )
    yield Cut(
        ROLLOUT,
        "log_prob_",
        rollout.log_prob_micro_batch_size_per_gpu,
        rollout.log_prob_micro_batch_size,
        rollout.log_prob_use_dynamic_bsz,
        rollout.log_prob_max_token_len_per_gpu,
    )
    if actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        yield Cut(
            "actor_rollout_ref.ref",
            "log_prob_",
            ref.log_prob_micro_batch_size_per_gpu,
            ref.log_prob_micro_batch_size,
            ref.log_prob_use_dynamic_bsz,
            ref.log_prob_max_token_len_per_gpu,
        )
    if has_critic:
        yield Cut(
            "critic",
            "ppo_",
            critic.ppo_micro_batch_size_per_gpu,
            critic.ppo_micro_batch_size,
            critic.use_dynamic_bsz,
            critic.ppo_max_token_len_per_gpu,
        )
        yield Cut(
            "critic",
            "forward_",
            critic.forward_micro_batch_size_per_gpu,
            critic.forward_micro_batch_size,
            critic.use_dynamic_bsz,
            critic.forward_max_token_len_per_gpu,
        )


def _workers(trainer: RunConfig) -> str:
    product = f"trainer.nnodes * trainer.n_gpus_per_node = {trainer.nnodes} * {trainer.n_gpus_per_node}"
    return f"{world_size(trainer)} workers ({product})"


def _batch_problems(config: PPOConfig, has_critic: bool) -> Iterator[str]:
    n, batch, most = config.actor_rollout_ref.rollout.n, config.data.train_batch_size, config.data.train_max_samples
    mini_batches = {config.actor_rollout_ref.actor.ppo_mini_batch_size: "actor_rollout_ref.actor"}
    if has_critic:
        mini_batches.setdefault(config.critic.ppo_mini_batch_size, "critic")
    for size, role in mini_batches.items():
        if batch % size:
            division = f"{batch} = {batch // size} * {size} + {batch % size}"
            yield f"{role}.ppo_mini_batch_size={size}: data.train_batch_size={batch} is not a multiple of it ({division})"
    if batch * n < world_size(config.trainer):
        product = f"data.train_batch_size * {ROLLOUT}.n = {batch} * {n} = {batch * n}"
        yield f"data.train_batch_size={batch}: {product} sequences a step are fewer than {_workers(config.trainer)}"
    if 0 <= most < batch:
        yield f"data.train_max_samples={most}: that is less than one batch, data.train_batch_size={batch}"


def _length_problems(config: PPOConfig, has_critic: bool) -> Iterator[str]:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    longest = prompt + response
    in_words = f"data.max_prompt_length + data.max_response_length = {prompt} + {response} = {longest}"
    max_model_len = config.actor_rollout_ref.rollout.max_model_len
    if max_model_len is not None and max_model_len < longest:
        yield f"{ROLLOUT}.max_model_len={max_model_len}: less than {in_words}"
    for cut in _cuts(config, has_critic=has_critic):
        yield from cut.problems(world_size(config.trainer), longest, in_words)


def _reward_problems(reward: RewardConfig) -> Iterator[str]:
    judge = reward.judge
    if reward.scorer == "judge":
        yield from (
            f"reward.scorer=judge: reward.judge.{name} is null; the judge is a server with OpenAI's chat completions"
            for name, value in (("url", judge.url), ("model", judge.model))
            if value is None
        )
    if judge.url is not None:
        requests, pauses = judge.retries + 1, judge.backoff * (2**judge.retries - 1)
        longest = requests * judge.timeout + pauses
        if longest > reward.timeout:
            yield (
                f"reward.timeout={reward.timeout:g}: less than the judge may take, (retries + 1) * timeout + pauses = "
                f"{requests} * {judge.timeout:g} + {pauses:g} = {longest:g} s (reward.judge.retries, timeout, backoff)"
            )


def _run_problems(trainer: RunConfig) -> Iterator[str]:
    if trainer.backend == "local" and world_size(trainer) > 1:
        yield f"trainer.backend=local: runs one worker, in this process, not {_workers(trainer)}"
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        yield "trainer.resume_mode=resume_path: trainer.resume_from_path is null; give it a global_step_N directory"


def _run_notes(trainer: RunConfig) -> Iterator[str]:
    if trainer.resume_from_path is not None and trainer.resume_mode != "resume_path":
        yield f"trainer.resume_from_path has no effect with trainer.resume_mode={trainer.resume_mode}; resume_path reads it"


def _ppo_notes(config: PPOConfig, typed: Collection[str]) -> Iterator[str]:
    for key, why in UNUSED_BY_EMBEDDED.items():
        if key in typed:
            yield f"{key} has no effect: {why}"
    if config.reward.scorer is not None and config.reward.custom_reward_function.path is not None:
        yield f"reward.scorer={config.reward.scorer} has no effect: reward.custom_reward_function gives the scores"
    if config.algorithm.adv_estimator == "grpo" and config.actor_rollout_ref.rollout.n == 1:
        yield f"{ROLLOUT}.n=1: grpo has nothing to compare an answer with, its advantage is the reward itself; set n=8, say"
