"""Validation of configurations before any process starts; messages contain the arithmetic and the remedy.

A problem is a combination of values that cannot work: all problems are collected and raised as one ConfigError. A note is a
combination that works but has no effect, or a surprising one: it is returned as a warning.
"""

from collections.abc import Collection, Iterator, Mapping

from configs.base.keys import ConfigError
from configs.base.secrets import USER_IN_ADDRESS
from configs.base.walltime import seconds_of
from configs.reward_models import served_model
from configs.reward_sources import has_score
from configs.schema.common import ModelConfig, RunConfig, ShardedConfig, WorkersConfig, is_ever
from configs.schema.evaluation import EvaluationConfig
from configs.schema.generation import GenerationConfig
from configs.schema.ppo import PPOConfig, RemoteScoringConfig, ReplayConfig, RewardConfig, ScoringConfig, TrainerConfig
from configs.schema.serve_reward import ServeRewardConfig
from configs.schema.supervised import SupervisedTrainerConfig
from configs.validation.batches import batch_problems, length_problems, roles_of, room_problems, wants_ref
from configs.validation.megatron import megatron_notes, repeat_problems
from configs.validation.model import (
    activation_problems,
    lora_notes,
    lora_problems,
    lora_sync_notes,
    lora_sync_problems,
    precision_problems,
    reference_notes,
)
from configs.validation.parallel import parallel_notes
from configs.validation.placement import placement_notes, placement_of, placement_problems, pool_problems
from configs.validation.reward import (
    filter_notes,
    generation_problems,
    model_problems,
    reward_model_notes,
    reward_model_problems,
    timeout_score_problems,
)
from configs.validation.rollout import ROLLOUT, determinism_problems, engine_notes, engine_problems, workers_in_words, world_size
from configs.validation.servers import judge_engine_problems, remote_notes, remote_problems, server_problems
from configs.validation.stability import alarm_problems, stability_notes, stability_problems

GROUP_ESTIMATORS = (
    "grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "gdpo", "optimal_token_baseline"
)  # fmt: skip


def check_ppo(config: PPOConfig, typed: Collection[str], *, needs_values: bool) -> list[str]:
    """Validate a PPO configuration; returns warnings. Raises ConfigError with one line for each problem.

    typed: keys on the command line. needs_values: the advantage estimator uses values and therefore needs a critic.
    """
    rollout = config.actor_rollout_ref.rollout
    has_critic = needs_values or config.critic.enable is True
    roles = roles_of(config, has_critic=has_critic)
    place = placement_of(config, has_critic=has_critic)
    # The placement comes first: all other sizes are checked against the pool of each role.
    problems = [
        *run_problems(config.trainer),
        *_replay_problems(config.trainer.replay),
        *placement_problems(config, place),
        *pool_problems(roles, place),
        *repeat_problems(roles, config.trainer),
        *_activation_problems(config, roles),
        *batch_problems(config, place, has_critic=has_critic),
        *length_problems(config, place, has_critic=has_critic),
        *engine_problems(
            rollout,
            place.pool("rollout"),
            {"temperature": rollout.temperature, "val_kwargs.temperature": rollout.val_kwargs.temperature},
        ),
        *determinism_problems(rollout, config.trainer),
        *lora_problems(_models(config, has_critic)),
        *precision_problems(_models(config, has_critic)),
        *lora_sync_problems(config.actor_rollout_ref.model, rollout),
        *_algorithm_problems(config, has_critic),
        *_filter_problems(config),
        *_shaping_problems(config.reward),
        *_reward_problems(config.reward),
        *reward_model_problems(
            config.reward, place.pool("reward"), config.data.max_prompt_length, config.data.max_response_length
        ),
        *timeout_score_problems(config),
        *alarm_problems(config),
        *stability_problems(config),
    ]
    if needs_values and config.critic.enable is False:
        problems.append(
            f"critic.enable=false: algorithm.adv_estimator={config.algorithm.adv_estimator} needs the critic's values; "
            "set critic.enable=null, or use another estimator, such as grpo"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return [
        *run_notes(config.trainer),
        *placement_notes(config.placement, place),
        *_ppo_notes(config, typed),
        *remote_notes(config.reward, typed),
        *stability_notes(config, typed, has_critic=has_critic),
        *reward_model_notes(config.reward, typed),
        *filter_notes(config),
        *parallel_notes(roles),
        *megatron_notes(roles),
    ]


def _activation_problems(config: PPOConfig, roles: Mapping[str, ShardedConfig]) -> Iterator[str]:
    models = config.actor_rollout_ref
    of_actor = list(activation_problems("actor_rollout_ref.model", models.model, models.actor))
    yield from of_actor
    if "actor_rollout_ref.ref" in roles:
        # Actor and reference share the model's keys: report a problem that both have once.
        of_ref = activation_problems("actor_rollout_ref.model", models.model, models.ref)
        yield from (problem for problem in of_ref if problem not in of_actor)
    if "critic" in roles:
        yield from activation_problems("critic.model", config.critic.model, config.critic)


def _models(config: PPOConfig, has_critic: bool) -> dict[str, tuple[ModelConfig, ShardedConfig]]:
    """{key of a trained model: (model, role that trains it)}."""
    models: dict[str, tuple[ModelConfig, ShardedConfig]] = {
        "actor_rollout_ref.model": (config.actor_rollout_ref.model, config.actor_rollout_ref.actor)
    }
    return models | ({"critic.model": (config.critic.model, config.critic)} if has_critic else {})


def check_generation(config: GenerationConfig, typed: Collection[str]) -> list[str]:
    """Validate a generation configuration; see check_ppo."""
    rollout, selection = config.actor_rollout_ref.rollout, config.selection
    problems = [
        *worker_problems(config.trainer),
        *room_problems(rollout.max_model_len),
        *engine_problems(rollout, config.trainer, {"temperature": rollout.temperature}),
        *lora_sync_problems(config.actor_rollout_ref.model, rollout),
        *_reward_problems(config.reward),
        *generation_problems(config),
        *_selection_problems(config),
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    notes = [*engine_notes(rollout, typed), *remote_notes(config.reward, typed)]
    if rollout.n > 1 and not rollout.do_sample:
        notes.append(f"{ROLLOUT}.do_sample=false: the {rollout.n} responses to a prompt are identical (greedy decoding); use n=1")
    if rollout.n == 1 and selection.best_of_n is not None:
        notes.append(f"selection.best_of_n has no effect: {ROLLOUT}.n=1")
    notes += reward_model_notes(config.reward, typed)
    return notes


def check_evaluation(config: EvaluationConfig, typed: Collection[str]) -> list[str]:
    """Validate an evaluation configuration; see check_ppo."""
    problems = list(_reward_problems(config.reward))
    if not has_score(config.reward):
        problems.append(
            f"reward.scorer={config.reward.scorer}: nothing would score the responses; trainer.main_eval has no reward "
            "models, so set a scorer"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    if config.data.score_key is None:
        return list(remote_notes(config.reward, typed))
    ignored = sorted(key for key in typed if key.startswith("reward."))
    return [f"{key} has no effect: scores are read from data.score_key={config.data.score_key}" for key in ignored]


def check_serve_reward(config: ServeRewardConfig) -> list[str]:
    """Validate a reward server's configuration; see check_ppo."""
    problems = [*judge_problems(config.reward), *server_problems(config.server), *worker_problems(config.trainer)]
    problems += judge_engine_problems(config)
    if config.model.path is not None:
        problems += model_problems("model", served_model(config.model), config.trainer, 1, 0)
        if config.reward.scorer is not None or config.reward.custom_reward_function.path is not None:
            problems.append(
                f"model.path={config.model.path}: a server returns a single score; remove reward.scorer and "
                "reward.custom_reward_function"
            )
    if problems:
        raise ConfigError("\n".join(problems))
    return []


def _selection_problems(config: GenerationConfig) -> Iterator[str]:
    # Output paths so far: two selections must not write the same file.
    selection, places = config.selection, {"data.output_path": config.data.output_path}
    for name, path in (("best_of_n", selection.best_of_n), ("sft", selection.sft), ("preferences", selection.preferences)):
        key = f"selection.{name}"
        if path is None:
            continue
        if not path.endswith((".parquet", ".jsonl")):
            yield f"{key}={path}: the file name must end in .parquet or .jsonl"
        for other, taken in places.items():
            if path == taken:
                yield f"{key}={path}: same file as {other}; use another name"
        places[key] = path


def _algorithm_problems(config: PPOConfig, has_critic: bool) -> Iterator[str]:
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if algorithm.adv_estimator == "gdpo" and not keys:
        yield (
            "algorithm.gdpo_reward_keys=null: gdpo needs the names of the rewards; set them to keys of the dict that the "
            "reward function returns"
        )
    if keys and weights and len(keys) != len(weights):
        counted = f"{len(weights)} weights for {len(keys)} keys, {', '.join(keys)}"
        yield f"algorithm.gdpo_reward_weights={weights}: {counted}; set one weight per key"
    if algorithm.truncated_answers == "bootstrap" and not has_critic:
        yield "algorithm.truncated_answers=bootstrap: needs the critic's values, but there is no critic; use keep or mask"
    if algorithm.rollout_correction.bypass_mode and algorithm.use_kl_in_reward:
        yield (
            "algorithm.rollout_correction.bypass_mode=true: algorithm.use_kl_in_reward needs the actor's log-probs, which are "
            "not computed; set actor_rollout_ref.actor.use_kl_loss instead"
        )
    if algorithm.rollout_correction.bypass_mode and algorithm.adv_estimator == "optimal_token_baseline":
        needs = "optimal_token_baseline needs the actor's log-probs, which are not computed; set bypass_mode=false"
        yield f"algorithm.rollout_correction.bypass_mode=true: {needs}"
    if actor.policy_loss.clip_cov_lb >= actor.policy_loss.clip_cov_ub:
        bounds = f"clip_cov_lb={actor.policy_loss.clip_cov_lb:g}: must be below clip_cov_ub={actor.policy_loss.clip_cov_ub:g}"
        yield f"actor_rollout_ref.actor.policy_loss.{bounds}"


def _filter_problems(config: PPOConfig) -> Iterator[str]:
    groups, data = config.algorithm.filter_groups, config.data
    if groups.enable and groups.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        yield (
            "algorithm.filter_groups.metric=seq_final_reward: groups are filtered before algorithm.use_kl_in_reward subtracts "
            "the KL; use seq_reward, the reward before the KL"
        )
    if not groups.enable and data.gen_batch_size not in (None, data.train_batch_size):
        yield (
            f"data.gen_batch_size={data.gen_batch_size}: without algorithm.filter_groups.enable=true a step generates "
            f"data.train_batch_size={data.train_batch_size} prompts; remove it"
        )
    # Prompts that all rounds of a step can generate together.
    reach = groups.max_num_gen_batches * (data.gen_batch_size or data.train_batch_size)
    if groups.enable and 0 < reach < data.train_batch_size:
        rounds = f"{groups.max_num_gen_batches} rounds of {data.gen_batch_size} prompts = {reach}"
        yield (
            f"algorithm.filter_groups.max_num_gen_batches={groups.max_num_gen_batches}: {rounds}, which cannot fill "
            f"data.train_batch_size={data.train_batch_size}; increase it, or data.gen_batch_size"
        )


def _shaping_problems(reward: RewardConfig) -> Iterator[str]:
    overlong, most, clip = reward.reward_kwargs.overlong_buffer_cfg, reward.reward_kwargs.max_resp_len, reward.shaping.clip
    if overlong.enable and not 0 < overlong.len <= most:
        yield (
            f"reward.reward_kwargs.overlong_buffer_cfg.len={overlong.len}: with enable=true it must be between 1 and "
            f"reward.reward_kwargs.max_resp_len={most} tokens"
        )
    if clip is not None and clip[0] >= clip[1]:
        yield f"reward.shaping.clip=[{clip[0]:g}, {clip[1]:g}]: the lower bound must be less than the upper"


def _reward_problems(reward: RemoteScoringConfig) -> Iterator[str]:
    yield from remote_problems(reward)
    yield from judge_problems(reward)


def judge_problems(reward: ScoringConfig) -> Iterator[str]:
    """Problems of the language-model judge: missing keys, credentials in its URL, and a timeout shorter than its retries."""
    judge = reward.judge
    if reward.scorer == "judge":
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
    if judge.url is not None:
        # Worst case: every request times out, with exponential backoff in between (backoff * (1 + 2 + 4 + ...)).
        requests, pauses = judge.retries + 1, judge.backoff * (2**judge.retries - 1)
        longest = requests * judge.timeout + pauses
        if longest > reward.timeout:
            yield (
                f"reward.timeout={reward.timeout:g}: less than the judge's maximum time, (retries + 1) * timeout + pauses = "
                f"{requests} * {judge.timeout:g} + {pauses:g} = {longest:g} s (reward.judge.retries, timeout, backoff)"
            )


def worker_problems(trainer: WorkersConfig) -> Iterator[str]:
    """Problems of the number of workers and their backend."""
    if trainer.backend == "local" and world_size(trainer) > 1:
        remedy = f"not {workers_in_words(trainer)}; use one worker, or trainer.backend=ray"
        yield f"trainer.backend=local: runs a single worker in this process, {remedy}"


def run_problems(trainer: RunConfig) -> Iterator[str]:
    """Problems of the `trainer` block of a training program."""
    yield from worker_problems(trainer)
    for key, name in (("project_name", trainer.project_name), ("experiment_name", trainer.experiment_name)):
        # Both names are parts of default_local_dir's default; a path separator is allowed, leaving the directory is not.
        if name.startswith("/") or ".." in name.split("/"):
            yield f"trainer.{key}={name}: is part of the run directory's path and must not lead out of it"
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        yield "trainer.resume_mode=resume_path: trainer.resume_from_path is null; set it to a global_step_N directory"
    if trainer.walltime is not None:
        try:
            seconds_of(trainer.walltime)
        except ValueError as error:
            yield f"trainer.walltime={trainer.walltime}: {error}"


def _replay_problems(replay: ReplayConfig) -> Iterator[str]:
    if replay.mode is not None and replay.path is None:
        yield (
            f"trainer.replay.mode={replay.mode}: trainer.replay.path is null; set it to a step_N.safetensors of rollout_data_dir"
        )
    if replay.mode is None and replay.path is not None:
        yield (
            f"trainer.replay.path={replay.path}: trainer.replay.mode is null; set it to rollout (generate the step again) or "
            "train"
        )


def run_notes(trainer: TrainerConfig | SupervisedTrainerConfig) -> Iterator[str]:
    """Warnings about the `trainer` block of a training program."""
    if trainer.best_metric is not None and not is_ever(trainer.save_freq):
        yield f"trainer.best_metric has no effect: trainer.save_freq={trainer.save_freq} disables checkpoints"
    if trainer.objective is not None and trainer.objective.removeprefix("-").startswith("val") and not is_ever(trainer.test_freq):
        yield f"trainer.objective={trainer.objective} is not measured: trainer.test_freq={trainer.test_freq} disables validation"
    if trainer.resume_from_path is not None and trainer.resume_mode != "resume_path":
        yield (
            f"trainer.resume_from_path has no effect with trainer.resume_mode={trainer.resume_mode}; set resume_mode=resume_path"
        )


def _lora_notes(config: PPOConfig, typed: Collection[str]) -> Iterator[str]:
    model = config.actor_rollout_ref.model
    yield from lora_notes("actor_rollout_ref.model", model, typed)
    yield from lora_notes("critic.model", config.critic.model, typed)
    yield from lora_sync_notes(model, config.actor_rollout_ref.rollout)
    if model.has_adapter and wants_ref(config):
        yield from reference_notes(typed)
    if model.lora_adapter_path is not None and wants_ref(config):
        yield "the reference is actor_rollout_ref.model.path without the adapter of lora_adapter_path"


def _ppo_notes(config: PPOConfig, typed: Collection[str]) -> Iterator[str]:
    yield from engine_notes(config.actor_rollout_ref.rollout, typed)
    yield from _lora_notes(config, typed)
    estimator, correction = config.algorithm.adv_estimator, config.algorithm.rollout_correction
    if estimator in GROUP_ESTIMATORS and config.actor_rollout_ref.rollout.n == 1:
        yield (
            f"{ROLLOUT}.n=1: {estimator} compares the responses of a group, and a group of one has no baseline; set for example "
            "n=8"
        )
    if correction.bypass_mode and correction.loss_type == "ppo_clip" and correction.rollout_is is not None:
        yield (
            "algorithm.rollout_correction.rollout_is has no effect with bypass_mode and loss_type=ppo_clip: the ratio "
            "already uses "
            "the rollout's log-probs; only loss_type=reinforce uses weights"
        )
    overlong, most = config.reward.reward_kwargs.overlong_buffer_cfg, config.reward.reward_kwargs.max_resp_len
    if overlong.enable and not overlong.penalty_factor:
        yield "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0: the overlong penalty has no effect"
    if overlong.enable and most - overlong.len >= config.data.max_response_length:
        yield (
            f"reward.reward_kwargs.max_resp_len={most}: no response is long enough for the overlong penalty "
            f"(data.max_response_length={config.data.max_response_length})"
        )
    if config.actor_rollout_ref.rollout.n == 1 and config.algorithm.filter_groups.enable:
        yield f"algorithm.filter_groups.enable has no effect: {ROLLOUT}.n=1, and groups of one are always kept"
    if config.actor_rollout_ref.rollout.n == 1 and config.reward.shaping.normalize == "group":
        yield (
            f"reward.shaping.normalize=group: {ROLLOUT}.n=1, so every reward becomes 0; use running, which compares with "
            "earlier steps"
        )
    if config.reward.scorer is not None and config.reward.custom_reward_function.path is not None:
        yield f"reward.scorer={config.reward.scorer} has no effect: reward.custom_reward_function computes the scores"
