"""Validate batch, mini-batch and micro-batch sizes; see configs/validation/programs.py."""

from collections.abc import Iterator
from dataclasses import dataclass

from configs.reward_models import model_key, reward_models
from configs.schema.common import MicroBatching, ShardedConfig
from configs.schema.placement import Placement
from configs.schema.ppo import PPOConfig
from configs.schema.scoring_model import ScoringModelConfig
from configs.schema.supervised import SupervisedConfig
from configs.validation.parallel import context_parallel_key, context_parallel_size, data_parallel_size
from configs.validation.rollout import ROLLOUT, Workers, workers_in_words, world_size


def wants_ref(config: PPOConfig) -> bool:
    """Whether a KL term needs the reference model."""
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def roles_of(config: PPOConfig, *, has_critic: bool) -> dict[str, ShardedConfig]:
    """{key: role} of the run's roles with a training engine."""
    models = config.actor_rollout_ref
    roles: dict[str, ShardedConfig] = {"actor_rollout_ref.actor": models.actor}
    # With a LoRA adapter the reference is the actor with its adapter disabled, and needs no workers of its own.
    if wants_ref(config) and not models.model.has_adapter:
        roles["actor_rollout_ref.ref"] = models.ref
    if has_critic:
        roles["critic"] = config.critic
    scorers = reward_models(config.reward).items()
    return roles | {model_key(name, config.reward): model for name, model in scorers if not model.urls}


def name_of(key: str) -> str:
    """Name of the role with this key in configs/schema/placement.py."""
    return "reward" if key.startswith("reward.") else key.rpartition(".")[2]


def shares_in_words(shares: int, workers: Workers) -> str:
    """Description of the data-parallel size: the number of workers, divided by the workers per copy of the model."""
    if shares == world_size(workers):
        return workers_in_words(workers)
    return f"the data-parallel size {shares} = {workers_in_words(workers)} / {world_size(workers) // shares}"


def micro_batch_limits(
    per_gpu: int | None, over_all: int | None, dynamic: bool, max_tokens: int, role: ShardedConfig, workers: Workers
) -> tuple[int | None, int | None]:
    """Maximum (tokens, rows) of a micro-batch; one of them is None: rows if ``dynamic`` or no number of rows is set, else tokens.

    per_gpu: rows per copy of the model. over_all: older key, rows over all copies; at least one row each. max_tokens: per GPU;
    context parallelism splits a micro-batch over several GPUs. Raises ValueError if over_all is not divisible by the
    data-parallel size.
    """
    if dynamic or (per_gpu is None and over_all is None):
        return max_tokens * context_parallel_size(role), None
    if per_gpu is not None:
        return None, per_gpu
    assert over_all is not None
    shares = data_parallel_size(role, workers)
    if over_all > shares and over_all % shares:
        quotient = f"{over_all} / {shares} = {over_all / shares:.4g}"
        raise ValueError(f"the number of sequences is not divisible by the data-parallel size ({quotient})")
    return None, max(1, over_all // shares)


@dataclass(frozen=True, slots=True)
class Cut:
    """Micro-batch limits of a role.

    key: of the role; its limits are <key>.<kind>micro_batch_size and so on. workers: the role's workers.
    """

    key: str
    kind: str
    sizes: MicroBatching
    role: ShardedConfig
    workers: Workers

    def limits(self) -> tuple[int | None, int | None]:
        """Maximum (tokens, rows) of a micro-batch; see micro_batch_limits."""
        return micro_batch_limits(*self.sizes, self.role, self.workers)

    def tokens(self, longest: int) -> int:
        """Maximum tokens per micro-batch, assuming rows of ``longest`` tokens if the limit is a number of rows."""
        tokens, rows = self.limits()
        if tokens is not None:
            return tokens
        assert rows is not None  # exactly one of the two limits is set
        return rows * longest

    def problems(self, longest: int, longest_in_words: str) -> Iterator[str]:
        """Problems of the limits. longest: maximum tokens of a row."""
        try:
            tokens, _ = self.limits()
        except ValueError as error:
            key = f"{self.key}.{self.kind}micro_batch_size"
            yield f"{key}={self.sizes.over_all}: {error}; use {self.kind}micro_batch_size_per_gpu"
            return
        # Sequences are never split across micro-batches, so the longest row must fit into one.
        if tokens is not None and tokens < longest:
            per_gpu, ranks, name = self.sizes.max_tokens, context_parallel_size(self.role), context_parallel_key(self.role)
            size = f"{tokens} tokens" if ranks == 1 else f"{per_gpu} * {ranks} ({name}) = {tokens} tokens"
            key = f"{self.key}.{self.kind}max_token_len_per_gpu"
            yield f"{key}={per_gpu}: a micro-batch of {size} cannot hold the longest row, {longest_in_words}; increase it"


def scoring_cut(key: str, model: ScoringModelConfig, workers: Workers) -> Cut:
    """Micro-batch limits of a reward model."""
    return Cut(key, "forward_", model.micro_batching, model, workers)


def supervised_cut(config: SupervisedConfig) -> Cut:
    """Micro-batch limits of fine-tuning and of reward-model training, from ``data.*``."""
    return Cut("data", "", config.data.micro_batching, config.engine, config.trainer)


def cuts(config: PPOConfig, place: Placement, *, has_critic: bool) -> Iterator[Cut]:
    """Micro-batch limits of all roles that have their own keys."""
    models, critic = config.actor_rollout_ref, config.critic
    actor, rollout, ref = models.actor, models.rollout, models.ref
    yield Cut("actor_rollout_ref.actor", "ppo_", actor.micro_batching, actor, place.pool("actor"))
    # verl's keys: the limits of the actor's log-prob pass are in the rollout block.
    yield Cut(ROLLOUT, "log_prob_", rollout.micro_batching, actor, place.pool("actor"))
    if wants_ref(config):
        # With an adapter the actor's engine computes the reference.
        role = actor if models.model.has_adapter else ref
        yield Cut("actor_rollout_ref.ref", "log_prob_", ref.micro_batching, role, place.pool("ref"))
    if has_critic:
        yield Cut("critic", "ppo_", critic.micro_batching, critic, place.pool("critic"))
        yield Cut("critic", "forward_", critic.forward_micro_batching, critic, place.pool("critic"))


def batch_problems(config: PPOConfig, place: Placement, *, has_critic: bool) -> Iterator[str]:
    """Problems of batch and mini-batch sizes."""
    n, batch, most = config.actor_rollout_ref.rollout.n, config.data.train_batch_size, config.data.train_max_samples
    # {size: first role with it}: the critic follows the actor by default, and one message is then enough.
    mini_batches = {config.actor_rollout_ref.actor.ppo_mini_batch_size: "actor_rollout_ref.actor"}
    if has_critic:
        mini_batches.setdefault(config.critic.ppo_mini_batch_size, "critic")
    for size, role in mini_batches.items():
        # Unequal mini-batches would give prompts different weights, because a loss is normalized per mini-batch.
        if batch % size:
            division = f"{batch} = {batch // size} * {size} + {batch % size}"
            fits = min((other for other in range(1, batch + 1) if batch % other == 0), key=lambda other: abs(other - size))
            yield (
                f"{role}.ppo_mini_batch_size={size}: data.train_batch_size={batch} is not a multiple of it ({division}); "
                f"use for example {fits}"
            )
    shares = {
        key: data_parallel_size(role, place.pool(name_of(key))) for key, role in roles_of(config, has_critic=has_critic).items()
    }
    # Every data-parallel rank needs at least one sequence; check the role with the largest data-parallel size.
    most_cut = max(shares, key=lambda key: shares[key])
    if batch * n < shares[most_cut]:
        product = f"data.train_batch_size * {ROLLOUT}.n = {batch} * {n} = {batch * n}"
        needed = shares_in_words(shares[most_cut], place.pool(name_of(most_cut)))
        yield f"data.train_batch_size={batch}: {product} sequences per step are fewer than {needed}; increase it"
    if 0 <= most < batch:
        yield f"data.train_max_samples={most}: less than one batch, data.train_batch_size={batch}; increase it (-1 = all rows)"
    if config.data.val_max_samples == 0:
        yield "data.val_max_samples=0: no prompt is left; increase it (-1 = all rows)"


def length_problems(config: PPOConfig, place: Placement, *, has_critic: bool) -> Iterator[str]:
    """Problems of sequence lengths against micro-batch limits and the rollout engine."""
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    longest = prompt + response
    in_words = longest_in_words(prompt, response)
    for cut in cuts(config, place, has_critic=has_critic):
        yield from cut.problems(longest, in_words)
    yield from room_problems(config.actor_rollout_ref.rollout.max_model_len)


def longest_in_words(prompt: int, response: int) -> str:
    """The maximum sequence length with its arithmetic, for messages."""
    return f"data.max_prompt_length + data.max_response_length = {prompt} + {response} = {prompt + response}"


def room_problems(max_model_len: int | None) -> Iterator[str]:
    """Problems of the rollout engine's maximum sequence length."""
    if max_model_len == 1:
        yield f"{ROLLOUT}.max_model_len=1: no room for a prompt and a response; increase it, or use null"
