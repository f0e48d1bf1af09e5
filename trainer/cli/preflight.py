"""Checks before a start: whether the models, data files and code that a configuration names exist and fit.

They run before anything heavy is imported or started. Problems that only reading all data would show, such as a prompt that
is too long, are left to the code that reads it.
"""

import os
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from pathlib import Path

from configs.base.locks import check_writable
from configs.required import UNSET, unset_keys
from configs.reward_models import model_key, reward_models
from configs.schema.common import RunConfig, TokenizedModelConfig, is_ever
from configs.schema.generation import GenerationConfig
from configs.schema.ppo import ModelScoringConfig, PPOConfig, PromptConfig, RemoteScoringConfig, RolloutConfig, wants_truth
from configs.schema.supervised import DPOConfig, RewardModelConfig, SFTConfig, SupervisedConfig
from configs.validation.programs import check_pairs, check_ppo, check_sft
from trainer.algorithms.correction_rules import rejection_rules, weight_bounds
from trainer.algorithms.known import check_policy_loss, estimator_needs
from trainer.cli.learning_notes import movement_notes, rounding_notes, updates_of_run
from trainer.rewards.rules.reward_registry import check_data_sources, scores_by_source, with_own_function
from trainer.run.user_code import check_file, check_source
from workers.model_path import check_files, check_tokenizer


def check_ppo_config(config: PPOConfig, typed: Collection[str]) -> list[str]:
    """Check values, including those that only an algorithm knows. Returns warnings; raises ValueError for invalid ones."""
    algorithm = config.algorithm
    check_policy_loss(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    weight_bounds(algorithm.rollout_correction.rollout_is_threshold)
    rejection_rules(algorithm.rollout_correction)
    with_own_function(config.reward)
    needs_values = "values" in estimator_needs(algorithm.adv_estimator)
    notes = check_ppo(config, typed, needs_values=needs_values)
    data, models, trainer, actor = config.data, config.actor_rollout_ref, config.trainer, config.actor_rollout_ref.actor

    def updates() -> int | None:
        if data.custom_cls.path is not None and trainer.total_training_steps is None:
            return None  # only the class knows the number of rows
        per_step = actor.ppo_epochs * data.train_batch_size // actor.ppo_mini_batch_size
        return updates_of_run(
            data.train_files, data.train_batch_size, trainer.total_training_steps, trainer.total_epochs, per_step
        )

    notes += rounding_notes("actor_rollout_ref.actor", models.model, actor, actor.optim)
    if needs_values or config.critic.enable is True:
        notes += rounding_notes("critic", config.critic.model, config.critic, config.critic.optim)
    notes += movement_notes("actor_rollout_ref.actor.optim.lr", models.model, actor.optim, trainer, updates, advice=3e-4)
    return notes


def check_sft_config(config: SFTConfig, typed: Collection[str]) -> list[str]:
    """See check_ppo_config."""
    return [*check_sft(config, typed), *_supervised_learning(config)]


def check_pairs_config(config: RewardModelConfig | DPOConfig, typed: Collection[str]) -> list[str]:
    """See check_ppo_config."""
    return [*check_pairs(config, typed), *_supervised_learning(config)]


def _supervised_learning(config: SupervisedConfig) -> Iterator[str]:
    data, trainer = config.data, config.trainer

    def updates() -> int | None:
        return updates_of_run(data.train_files, data.train_batch_size, trainer.total_training_steps, trainer.total_epochs)

    yield from rounding_notes("engine", config.model, config.engine, config.optim)
    yield from movement_notes("optim.lr", config.model, config.optim, trainer, updates, advice=1e-3)


def ppo_inputs(config: PPOConfig) -> Iterator[str]:
    """One line for each input that is missing or invalid. The other functions here yield such lines too."""
    data, reward = config.data, config.reward
    yield from unset_keys(config, "ppo_trainer")
    yield from _model("actor_rollout_ref.model", config.actor_rollout_ref.model)
    if config.critic.enable is True or "values" in estimator_needs(config.algorithm.adv_estimator):
        yield from _model_files(config.critic.model.path, "critic.model.path")
    yield from _reward(reward)
    yield from _agents(config.actor_rollout_ref.rollout)
    rows = None
    path, name = data.custom_cls.path, data.custom_cls.name
    if path is not None:
        # Only the class knows what its files are.
        yield from _problems(check_source, path, name, f"data.custom_cls.path={path}", "class")
    else:
        rows = yield from _prompts("data.train_files", data.train_files, data, reward, whole=data.train_max_samples < 0)
        yield from _prompts("data.val_files", data.val_files, data, reward, whole=data.val_max_samples < 0)
    if rows is not None and rows < data.train_batch_size:
        yield f"data.train_batch_size={data.train_batch_size}: data.train_files has {rows} rows; lower it, or add data"
    if data.ptx_files is not None:
        columns = [data.ptx_prompt_key, data.ptx_response_key]
        yield from _files("data.ptx_files", data.ptx_files, columns, "data.ptx_prompt_key, data.ptx_response_key")
    yield from _resume(config.trainer)


def sft_inputs(config: SFTConfig) -> Iterator[str]:
    """See ppo_inputs."""
    data = config.data
    columns = [data.prompt_key, data.response_key] if data.messages_key is None else [data.messages_key]
    columns += [] if data.tools_key is None else [data.tools_key]
    yield from unset_keys(config, "sft_trainer")
    yield from _supervised(config, columns, "data.messages_key, data.tools_key, data.prompt_key, data.response_key")


def reward_model_inputs(config: RewardModelConfig) -> Iterator[str]:
    """See ppo_inputs."""
    data = config.data
    optional = [key for key in (data.prompt_key, data.margin_key) if key is not None]
    columns = [data.chosen_key, data.rejected_key, *optional]
    yield from unset_keys(config, "reward_model_trainer")
    yield from _supervised(config, columns, "data.prompt_key, data.chosen_key, data.rejected_key, data.margin_key")


def dpo_inputs(config: DPOConfig) -> Iterator[str]:
    """See ppo_inputs."""
    data = config.data
    columns = [data.chosen_key, data.rejected_key, *([] if data.prompt_key is None else [data.prompt_key])]
    yield from unset_keys(config, "dpo_trainer")
    yield from _supervised(config, columns, "data.prompt_key, data.chosen_key, data.rejected_key")


def generation_inputs(config: GenerationConfig) -> Iterator[str]:
    """See ppo_inputs. What scoring needs is not checked: only programs that score need it."""
    yield from unset_keys(config, "generation")
    yield from _model("actor_rollout_ref.model", config.actor_rollout_ref.model)
    yield from _files("data.path", config.data.path, [config.data.prompt_key], "data.prompt_key", ["reward_model"])


def _supervised(config: SupervisedConfig, columns: Sequence[str], set_by: str) -> Iterator[str]:
    yield from _model("model", config.model)
    yield from _files("data.train_files", config.data.train_files, columns, set_by)
    # A reward model reads its validation data without validation too, for the score statistics.
    if config.data.val_files and (is_ever(config.trainer.test_freq) or isinstance(config, RewardModelConfig)):
        yield from _files("data.val_files", config.data.val_files, columns, set_by)
    yield from _resume(config.trainer)
    yield from _export(config)


def _export(config: SupervisedConfig) -> Iterator[str]:
    """The directory of the exported model, which is written after training."""
    if (target := config.trainer.export_dir) is None:
        return
    here = f"trainer.export_dir={target}"
    for key, path in (("model.path", config.model.path), ("model.lora_adapter_path", config.model.lora_adapter_path)):
        if path is not None and os.path.realpath(path) == os.path.realpath(target):
            yield f"{here}: {key} is the same directory, and its weights would be overwritten; name another directory"
            return
    yield from _problems(check_writable, Path(target), "trainer.export_dir")
    if os.path.exists(file := os.path.join(target, "adapter_config.json")):
        yield f"{here}: {file} is of an adapter, with which transformers could not load the model; name another directory"


def _model(key: str, model: TokenizedModelConfig) -> Iterator[str]:
    """The model's files, and its tokenizer if the files are there."""
    problems = list(_model_files(model.path, f"{key}.path"))
    if not problems and (model.path != UNSET or model.tokenizer_path is not None):
        problems = list(_problems(check_tokenizer, model, key))
    yield from problems


def _model_files(path: str, key: str) -> Iterator[str]:
    if path != UNSET:  # reported by unset_keys
        yield from _problems(check_files, path, key)


def _reward(reward: ModelScoringConfig) -> Iterator[str]:
    own = with_own_function(reward).custom_reward_function
    if own.path is not None and not reward.remote_urls:
        yield from _problems(check_source, own.path, own.name, f"reward.custom_reward_function.path={own.path}")
    for name, model in reward_models(reward).items():
        key, template = model_key(name, reward), model.chat_template
        if model.path is not None:
            yield from _problems(check_files, model.path, f"{key}.path")
        if template is not None and not Path(template).is_file():
            yield f"{key}.chat_template={template}: no such file; it has the Jinja template of the model's conversations"


def _agents(rollout: RolloutConfig) -> Iterator[str]:
    """Files of tools, interactions, environments and loops."""
    turns, loop, key = rollout.multi_turn, rollout.agent.default_agent_loop, "actor_rollout_ref.rollout"
    for name, path in (
        ("multi_turn.tool_config_path", turns.tool_config_path),
        ("multi_turn.interaction_config_path", turns.interaction_config_path),
        ("agent.agent_loop_config_path", rollout.agent.agent_loop_config_path),
    ):
        if path is not None and not Path(path).expanduser().is_file():
            yield f"{key}.{name}={path}: no such file"
    if turns.function_tool_path is not None:
        yield from _problems(
            check_file, turns.function_tool_path, f"{key}.multi_turn.function_tool_path={turns.function_tool_path}"
        )
    for name, code in (
        ("multi_turn.environment", turns.environment),
        ("multi_turn.format", turns.format),
        ("agent.default_agent_loop", loop),
        ("agent.program", rollout.agent.program),
    ):
        if code is not None and ":" in code:
            yield from _problems(check_source, *code.rsplit(":", 1), f"{key}.{name}={code}")
    if rollout.agent.program is not None:
        from trainer.serving.reward_server import check_installed

        yield from _problems(check_installed)


def _prompts(
    key: str, files: Sequence[str], data: PromptConfig, reward: RemoteScoringConfig, *, whole: bool
) -> Generator[str, None, int | None]:
    """Check prompt files. Returns their number of rows, None if that is unknown.

    whole: all rows are used, except those that are too long.
    """
    from trainer.data.files import STRUCTS, distinct_labels

    truth = [data.reward_fn_key, "reward_model.ground_truth"] if wants_truth(reward) else []
    rows = yield from _files(key, files, [data.prompt_key, *truth], "data.prompt_key, data.reward_fn_key", STRUCTS)
    # Only rows that are certain to be scored need a rule: not those of a subset or behind a filter.
    if rows is not None and truth and whole and not data.filter_overlong_prompts and scores_by_source(reward):

        def check_sources() -> None:
            check_data_sources(source for file in files for source in distinct_labels(file, data.reward_fn_key))

        yield from (f"{key}: {problem}" for problem in _problems(check_sources))
    return rows


def _files(
    key: str, files: Sequence[str], columns: Sequence[str], set_by: str, structs: Sequence[str] = ()
) -> Generator[str, None, int | None]:
    """Check data files. Returns their number of rows, None if there is none, or one is invalid or does not record it.

    set_by: keys that name the columns. structs: further columns, of structs or null.
    """
    from trainer.data.files import check_file  # imported late: pyarrow is slow to import

    if not files:
        yield f"{key}=[]: no data file is given; name one, or a list"
        return None
    total: int | None = 0
    for file in files:
        try:
            rows = check_file(file, columns, set_by, structs)
        except ValueError as error:
            yield f"{key}={error}"
            rows = None
        total = total + rows if total is not None and rows is not None else None
    return total


def _resume(trainer: RunConfig) -> Iterator[str]:
    place = trainer.resume_from_path
    if trainer.resume_mode == "resume_path" and place is not None and "://" not in place and not Path(place).is_dir():
        yield f"trainer.resume_from_path={place}: no such directory; it is a global_step_N of a run directory"


def _problems(check: Callable[..., object], *about: object) -> Iterator[str]:
    """The message of ``check(*about)`` if it raises."""
    try:
        check(*about)
    except (ValueError, FileNotFoundError) as error:
        yield str(error)
