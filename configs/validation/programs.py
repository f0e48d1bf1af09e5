"""Validation of configurations before any process starts; messages contain the arithmetic and the remedy.

A problem is a combination of values that cannot work: all problems are collected and raised as one ConfigError. A note is a
combination that works but has no effect, or a surprising one: it is returned as a warning.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from configs.base.keys import ConfigError, did_you_mean
from configs.reward_models import model_key, reward_models, served_model
from configs.schema.common import Checked, ModelConfig, ShardedConfig, is_ever, is_repeated
from configs.schema.evaluation import EvaluationConfig
from configs.schema.generation import GenerationConfig
from configs.schema.parity import ParityConfig
from configs.schema.placement import Placement
from configs.schema.ppo import AsyncTrainingConfig, PPOConfig, RolloutEngineConfig, TrainerConfig, has_score
from configs.schema.serve import ServeConfig
from configs.schema.serve_reward import ServeRewardConfig
from configs.schema.supervised import DPOConfig, RewardModelConfig, SFTConfig, SupervisedConfig, SupervisedTrainerConfig
from configs.validation.agents import agent_notes, agent_problems
from configs.validation.batches import (
    batch_problems,
    length_problems,
    longest_in_words,
    roles_of,
    room_problems,
    shares_in_words,
    supervised_cut,
    wants_ref,
)
from configs.validation.megatron import megatron_notes, megatron_problems, repeat_problems
from configs.validation.model import (
    activation_problems,
    lora_notes,
    lora_problems,
    lora_sync_notes,
    lora_sync_problems,
    precision_problems,
    reference_notes,
)
from configs.validation.parallel import data_parallel_size, parallel_notes, parallel_problems
from configs.validation.placement import placement_notes, placement_of, placement_problems, pool_problems
from configs.validation.reward import (
    filter_notes,
    generation_problems,
    model_problems,
    remote_notes,
    reward_model_notes,
    reward_model_problems,
    timeout_score_problems,
)
from configs.validation.rollout import ROLLOUT, determinism_problems, engine_notes, engine_problems
from configs.validation.stability import alarm_problems, stability_notes, stability_problems

GROUP_ESTIMATORS = (
    "grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "gdpo", "optimal_token_baseline"
)  # fmt: skip


def block_problems(config: Any) -> Iterator[str]:
    """Problems of single blocks, which their `problems` methods report."""
    # The trainer block first, because its workers are the base of all other sizes; then in the order of the schema.
    for field in sorted(fields(config), key=lambda field: field.name != "trainer"):
        block = getattr(config, field.name)
        if isinstance(block, Checked):
            yield from block.problems()
        if is_dataclass(block):
            yield from block_problems(block)


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
        *block_problems(config),
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
        *_filter_problems(config),
        *_async_problems(config, place),
        *agent_problems(config),
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
    if config.algorithm.truncated_answers == "bootstrap" and not has_critic:
        problems.append(
            "algorithm.truncated_answers=bootstrap: needs the critic's values, but there is no critic; use keep or mask"
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
        *agent_notes(config, typed),
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
        *block_problems(config),
        *room_problems(rollout.max_model_len),
        *engine_problems(rollout, config.trainer, {"temperature": rollout.temperature}),
        *lora_sync_problems(config.actor_rollout_ref.model, rollout),
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
    problems = list(block_problems(config))
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
    problems = [*block_problems(config), *_judge_engine_problems(config)]
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


def check_serve(config: ServeConfig, typed: Collection[str]) -> list[str]:
    """Validate a model server's configuration; see check_ppo."""
    rollout = config.actor_rollout_ref.rollout
    problems = [
        *block_problems(config),
        *room_problems(rollout.max_model_len),
        *engine_problems(rollout, config.trainer, {"temperature": rollout.temperature}),
        *lora_sync_problems(config.actor_rollout_ref.model, rollout),
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return list(engine_notes(rollout, typed))


def check_parity(config: ParityConfig, typed: Collection[str]) -> list[str]:
    """Validate a parity configuration; see check_ppo."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    roles = {"actor_rollout_ref.actor": config.actor_rollout_ref.actor}
    known = get_args(get_type_hints(RolloutEngineConfig)["name"])
    problems = [
        *block_problems(config),
        *parallel_problems(roles, config.trainer),
        *megatron_problems(roles, config.trainer),
        *lora_problems({"actor_rollout_ref.model": (config.actor_rollout_ref.model, config.actor_rollout_ref.actor)}),
    ]
    if rollout.max_model_len is not None and rollout.max_model_len < data.max_prompt_length + data.max_response_length:
        less = f"less than {longest_in_words(data.max_prompt_length, data.max_response_length)}; increase it, or use null"
        problems.append(f"{ROLLOUT}.max_model_len={rollout.max_model_len}: {less}")
    if f"{ROLLOUT}.name" in typed:
        problems.append(f"{ROLLOUT}.name={rollout.name}: the engines are selected by engines=[{rollout.name}]; remove the key")
    if "model" in typed and "actor_rollout_ref.model.path" in typed:
        problems.append("model and actor_rollout_ref.model.path are the same key: set only one of them")
    if not config.engines or len(set(config.engines)) < len(config.engines):
        problems.append(f"engines=[{','.join(config.engines)}]: must list at least one engine, and none twice")
    unknown = [name for name in config.engines if name not in known]
    problems += [f"engines: {name}: unknown engine; known: {', '.join(known)}{did_you_mean(name, known)}" for name in unknown]
    notes = [*parallel_notes(roles), *megatron_notes(roles)]
    for name in config.engines:
        if name in known:
            # Each engine is checked as if it were the only one; its own notes would only repeat with several engines.
            own = config.actor_rollout_ref.rollout_of(name)
            problems += engine_problems(own, config.trainer, {"temperature": rollout.temperature})
            problems += lora_sync_problems(config.actor_rollout_ref.model, own)
            notes += engine_notes(own, typed) if len(config.engines) == 1 else []
    if problems:
        raise ConfigError("\n".join(problems))
    if rollout.do_sample and rollout.temperature == 1.0:
        notes.append(f"{ROLLOUT}.temperature=1: an engine that ignores the temperature is not detected; use for example 0.8")
    if rollout.do_sample and (rollout.top_k != -1 or rollout.top_p != 1.0):
        notes.append(f"bounds.draw_z has no effect: {ROLLOUT}.top_k or top_p truncate the distribution")
    return notes


def check_sft(config: SFTConfig, typed: Collection[str]) -> list[str]:
    """Validate an SFT configuration; see check_ppo."""
    data, longest = config.data, config.data.max_length
    problems = list(_supervised_problems(config, "rows", longest, f"data.max_length = {longest}"))
    if data.tools_key is not None and data.messages_key is None:
        problems.append(f"data.tools_key={data.tools_key}: only conversations have tools; set data.messages_key")
    bound, every = config.trainer.stop_at_probability, config.trainer.test_freq
    if bound is not None and not is_ever(every):
        problems.append(f"trainer.stop_at_probability={bound}: trainer.test_freq={every} never measures it; use for example 10")
    unused = sorted({"data.prompt_key", "data.response_key"} & {*typed}) if data.messages_key is not None else []
    notes = [f"{key} has no effect: data.messages_key={data.messages_key} is the column of whole conversations" for key in unused]
    return _supervised_notes(config, typed, problems) + notes


def check_pairs(config: RewardModelConfig | DPOConfig, typed: Collection[str]) -> list[str]:
    """Validate the configuration of a program that trains on preference pairs; see check_ppo."""
    # Both responses of a pair must be in the same micro-batch, because the loss compares them.
    longest = 2 * config.data.max_length
    problems = list(_supervised_problems(config, "pairs", longest, f"a pair, 2 * data.max_length = {longest}"))
    return _supervised_notes(config, typed, problems)


def _supervised_problems(config: SupervisedConfig, units: str, longest: int, in_words: str) -> Iterator[str]:
    """Problems of all supervised programs. units: what data.train_batch_size counts. longest: maximum tokens of one unit."""
    data, engine, trainer = config.data, config.engine, config.trainer
    roles, shares = {"engine": engine}, data_parallel_size(engine, trainer)
    yield from block_problems(config)
    yield from parallel_problems(roles, trainer)
    yield from megatron_problems(roles, trainer)
    yield from repeat_problems(roles, trainer)
    yield from lora_problems({"model": (config.model, engine)})
    yield from precision_problems({"model": (config.model, engine)})
    yield from activation_problems("model", config.model, engine)
    if data.train_batch_size < shares:
        yield f"data.train_batch_size={data.train_batch_size}: fewer {units} than {shares_in_words(shares, trainer)}"
    yield from supervised_cut(config).problems(longest, in_words)
    if is_ever(trainer.test_freq) and not data.val_files:
        yield f"trainer.test_freq={trainer.test_freq}: no validation data; set data.val_files"


def _supervised_notes(config: SupervisedConfig, typed: Collection[str], problems: list[str]) -> list[str]:
    if problems:
        raise ConfigError("\n".join(problems))
    roles = {"engine": config.engine}
    return [
        *run_notes(config.trainer),
        *parallel_notes(roles),
        *megatron_notes(roles),
        *lora_notes("model", config.model, typed),
        *_unused_supervised_keys(config, typed),
    ]


def _unused_supervised_keys(config: SupervisedConfig, typed: Collection[str]) -> Iterator[str]:
    optim, schedule = config.optim, f"optim.lr_scheduler_type={config.optim.lr_scheduler_type}"
    unused = {
        "data.micro_batch_size_per_gpu": (
            config.data.use_dynamic_bsz,
            "data.use_dynamic_bsz=true fills micro-batches up to data.max_token_len_per_gpu",
        ),
        "optim.min_lr_ratio": (optim.lr_scheduler_type == "constant", schedule),
        "optim.num_cycles": (optim.lr_scheduler_type in ("constant", "linear"), schedule),
        "optim.lr_warmup_steps_ratio": (optim.lr_warmup_steps >= 0, f"optim.lr_warmup_steps={optim.lr_warmup_steps}"),
    }
    yield from (f"{key} has no effect: {why}" for key, (is_unused, why) in unused.items() if is_unused and key in typed)


def _judge_engine_problems(config: ServeRewardConfig) -> Iterator[str]:
    """Problems of a served language-model judge."""
    engine, judge = config.judge_engine, config.reward.judge
    if not engine.enable:
        return
    others = {"model.path": config.model.path, "reward.scorer": config.reward.scorer}
    for key, value in (others | {"reward.custom_reward_function.path": config.reward.custom_reward_function.path}).items():
        if value is not None:
            yield (
                f"judge_engine.enable=true: a server returns a single score, but {key}={value} also computes one; remove one of "
                "them"
            )
    longest, bound = engine.max_prompt_length + judge.max_tokens, engine.rollout.max_model_len
    if bound is not None and bound < longest:
        words = f"judge_engine.max_prompt_length + reward.judge.max_tokens = {engine.max_prompt_length} + {judge.max_tokens}"
        yield f"judge_engine.rollout.max_model_len={bound}: less than {words} = {longest}"
    for problem in engine_problems(engine.rollout, config.trainer, {}):
        # The engine checks name the keys of a training run; here the same block has another key.
        yield problem.replace(ROLLOUT, "judge_engine.rollout")


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


def _filter_problems(config: PPOConfig) -> Iterator[str]:
    groups, data = config.algorithm.filter_groups, config.data
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


def _proximal_problems(config: PPOConfig) -> Iterator[str]:
    algorithm, correction, generation = config.algorithm, config.algorithm.rollout_correction, config.async_training
    key = f"async_training.prox_logp={generation.prox_logp}"
    if generation.prox_logp == "recompute":
        return
    if generation.mode is None or (generation.mode == "async" and generation.max_staleness == 0):
        yield f"{key}: all tokens are of the present weights, whose log-probs are the proximal policy's; use recompute"
        return
    if correction.bypass_mode:
        yield (
            f"{key}: with algorithm.rollout_correction.bypass_mode=true the ratio is taken to the rollout's log-probs; use "
            "recompute"
        )
    if generation.prox_logp != "loglinear":
        return
    why = "old log-probs are interpolated in the update"
    needs = [
        name
        for name, is_set in (
            ("algorithm.use_kl_in_reward", algorithm.use_kl_in_reward),
            (f"algorithm.adv_estimator={algorithm.adv_estimator}", algorithm.adv_estimator == "optimal_token_baseline"),
            ("algorithm.rollout_correction.rollout_rs", correction.rollout_rs is not None),
            ("algorithm.rollout_correction.rollout_token_veto_threshold", correction.rollout_token_veto_threshold is not None),
            ("algorithm.rollout_correction.rollout_is_batch_normalize", correction.rollout_is_batch_normalize),
        )
        if is_set
    ]
    if needs:
        yield f"{key}: {why}, and they are needed before by {', '.join(needs)}; use recompute"
    if correction.rollout_is is None and not correction.bypass_mode:
        yield f"{key}: {why} for the weights of stale tokens; set algorithm.rollout_correction.rollout_is=token (or sequence)"


def _in_flight_problems(generation: AsyncTrainingConfig, rollout: RolloutEngineConfig, device: str) -> Iterator[str]:
    """Problems of the weight syncs while responses are in flight."""
    engine = rollout.name
    every = generation.trigger_parameter_sync_step
    if generation.mode not in ("one_step_off", "async"):
        changed = {
            f"trigger_parameter_sync_step={every}": every != 1,
            f"pause={generation.pause}": generation.pause != "abort",
            f"kv_cache={generation.kv_cache}": generation.kv_cache != "recompute",
        }
        for setting in (setting for setting, is_changed in changed.items() if is_changed):
            yield (
                f"async_training.{setting}: with async_training.mode={generation.mode or 'null'} nothing is generated during an "
                "update; use mode=one_step_off or async, or remove it"
            )
        return
    if every > max(1, generation.max_staleness):
        yield (
            f"async_training.trigger_parameter_sync_step={every}: a batch is generated one step ahead, with weights from up to "
            f"{every} - 1 steps before, so its tokens are up to 1 + {every - 1} = {every} versions old, more than "
            f"async_training.max_staleness={generation.max_staleness}; increase that, or sync more often"
        )
    if generation.kv_cache == "keep" and generation.pause != "keep":
        yield f"async_training.kv_cache=keep: with async_training.pause={generation.pause} no response is running; use pause=keep"
    if generation.kv_cache == "keep" and engine not in ("embedded", "vllm"):
        yield (
            f"async_training.kv_cache=keep: {engine} cannot drop the cached prefixes of old weights while requests run, and new "
            "requests would share them; use kv_cache=recompute, or rollout.name=vllm or embedded"
        )
    # vLLM computes a step ahead on GPUs. Its tokens would get the version of weights that did not sample them.
    is_ahead = engine == "vllm" and device == "cuda" and rollout.engine_kwargs.vllm.get("async_scheduling") is not False
    if generation.kv_cache == "keep" and is_ahead:
        yield (
            "async_training.kv_cache=keep: vLLM would have a step of the old weights in progress at a sync; set "
            f"{ROLLOUT}.engine_kwargs.vllm.async_scheduling=false"
        )


def _async_problems(config: PPOConfig, place: Placement) -> Iterator[str]:
    yield from _proximal_problems(config)
    yield from _in_flight_problems(config.async_training, config.actor_rollout_ref.rollout, config.trainer.device)
    algorithm, correction, generation = config.algorithm, config.algorithm.rollout_correction, config.async_training
    has_tools = config.actor_rollout_ref.rollout.multi_turn.enable
    if generation.clock == "wall" and generation.mode not in ("one_step_off", "async") and not has_tools:
        yield (
            f"async_training.clock=wall: with async_training.mode={generation.mode or 'null'} nothing is generated during an "
            "update; set async_training.mode=one_step_off (or async), or async_training.clock=logical"
        )
    if generation.mode is None or (generation.mode == "async" and generation.max_staleness == 0):
        return
    key = f"async_training.mode={generation.mode}"
    corrects = (correction.rollout_is, correction.rollout_rs, correction.rollout_token_veto_threshold) != (None, None, None)
    if not (corrects or correction.bypass_mode):
        yield (
            f"{key}: responses contain tokens of earlier weights, and nothing corrects for them; set "
            "algorithm.rollout_correction.rollout_is=token (or sequence), or algorithm.rollout_correction.bypass_mode=true"
        )
    engines = place.pool("rollout")
    if generation.mode != "partial":
        if others := [role for role in engines.roles if role != "rollout"]:
            yield (
                f"{key}: the engine generates while the trainer works, but shares its GPUs with {', '.join(others)}; use "
                "placement.layout=split, or custom with a pool for placement.roles.rollout alone"
            )
        if algorithm.filter_groups.enable:
            yield (
                f"{key}: with algorithm.filter_groups.enable=true groups are judged on the controller, which trains "
                "while the next batch is generated; use async_training.mode=partial"
            )
    elif algorithm.filter_groups.enable and "reward" in engines.roles:
        yield (
            f"{key}: with algorithm.filter_groups.enable=true groups are scored while others are generated, "
            "but the reward model is on the GPUs of the rollout engine; use placement.layout=split, or servers (urls)"
        )


def run_notes(trainer: TrainerConfig | SupervisedTrainerConfig) -> Iterator[str]:
    """Warnings about the `trainer` block of a training program."""
    if trainer.best_metric is not None and not is_repeated(trainer.save_freq):
        yield f"trainer.best_metric has no effect: trainer.save_freq={trainer.save_freq} saves no checkpoint before the last step"
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


def _trust_region_notes(config: PPOConfig) -> Iterator[str]:
    generation, actor = config.async_training, config.actor_rollout_ref.actor
    one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == config.data.train_batch_size
    is_stale = generation.mode == "async" and generation.max_staleness > 1
    if is_stale and one_update and not config.algorithm.rollout_correction.bypass_mode:
        yield (
            f"async_training.max_staleness={generation.max_staleness}: a step is one update, so the ratio to the proximal policy "
            "is 1 and is never clipped, and the updates of several steps with tokens of the same weights add up; "
            "algorithm.rollout_correction.bypass_mode=true clips the ratio to the policy that sampled"
        )


def _unused_async_keys(config: PPOConfig, typed: Collection[str]) -> Iterator[str]:
    generation = config.async_training
    mode, key = generation.mode, "async_training"
    # With one_step_off the staleness bounds the steps between two syncs.
    is_bound = mode == "async" or (mode == "one_step_off" and generation.trigger_parameter_sync_step > 1)
    unused = {"max_staleness": not is_bound, "max_age": mode != "partial", "oversubmit": mode in (None, "one_step_off")}
    for name in (name for name, is_unused in unused.items() if is_unused and f"{key}.{name}" in typed):
        yield f"{key}.{name} has no effect: {key}.mode={mode or 'null'}"


def _ppo_notes(config: PPOConfig, typed: Collection[str]) -> Iterator[str]:
    yield from engine_notes(config.actor_rollout_ref.rollout, typed)
    yield from _lora_notes(config, typed)
    yield from _correction_notes(config)
    yield from _gdpo_notes(config)
    estimator, rollout = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout
    if estimator in GROUP_ESTIMATORS and rollout.n > 1 and not rollout.do_sample:
        yield (
            f"{ROLLOUT}.do_sample=false: the {rollout.n} responses to a prompt are identical (greedy decoding), so {estimator} "
            "has no signal from a group; set do_sample=true"
        )
    if estimator in GROUP_ESTIMATORS and config.actor_rollout_ref.rollout.n == 1:
        yield (
            f"{ROLLOUT}.n=1: {estimator} compares the responses of a group, and a group of one has no baseline; set for example "
            "n=8"
        )
    yield from _trust_region_notes(config)
    yield from _unused_async_keys(config, typed)
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


def _correction_notes(config: PPOConfig) -> Iterator[str]:
    correction, key = config.algorithm.rollout_correction, "algorithm.rollout_correction"
    if correction.bypass_mode and correction.loss_type == "ppo_clip" and correction.rollout_is is not None:
        yield (
            f"{key}.rollout_is has no effect with bypass_mode and loss_type=ppo_clip: the ratio already uses the rollout's "
            "log-probs; only loss_type=reinforce uses weights"
        )
    if correction.loss_type == "reinforce" and not correction.bypass_mode:
        yield f"{key}.loss_type=reinforce has no effect: {key}.bypass_mode=false"
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if correction.bypass_mode and correction.loss_type == "reinforce" and mode != "vanilla":
        yield f"actor_rollout_ref.actor.policy_loss.loss_mode={mode} has no effect: {key}.loss_type=reinforce is the loss"
    if correction.rollout_is is None and correction.rollout_is_batch_normalize:
        yield f"{key}.rollout_is_batch_normalize has no effect: {key}.rollout_is=null"
    if correction.rollout_rs is None and correction.rollout_rs_threshold is not None:
        yield f"{key}.rollout_rs_threshold={correction.rollout_rs_threshold} has no effect: {key}.rollout_rs=null"


def _gdpo_notes(config: PPOConfig) -> Iterator[str]:
    """GDPO reads the numbers that the reward function names, and nothing that is added to their sum."""
    if config.algorithm.adv_estimator != "gdpo":
        return
    reward, overlong = config.reward, config.reward.reward_kwargs.overlong_buffer_cfg
    named = config.algorithm.gdpo_reward_keys or ()
    changed = [
        model_key(name, reward)
        for name, model in reward_models(reward).items()
        if name in named and (model.normalize is not None or model.clip is not None or model.weight != 1.0)
    ]
    added = {
        "algorithm.use_kl_in_reward": config.algorithm.use_kl_in_reward,
        "reward.missing_eos_penalty": reward.missing_eos_penalty is not None,
        "reward.reward_kwargs.overlong_buffer_cfg": overlong.enable,
        "reward.shaping": reward.shaping.normalize is not None or reward.shaping.clip is not None,
    }
    for key in (*(key for key, is_set in added.items() if is_set), *(f"{key}: its weight, normalize or clip" for key in changed)):
        yield f"{key} has no effect on advantages: algorithm.adv_estimator=gdpo reads only the numbers of gdpo_reward_keys"
