"""Validate configurations of trainer.main_sft and trainer.main_reward_model; see configs/validation/programs.py."""

from collections.abc import Collection, Iterator

from configs.base.keys import ConfigError
from configs.schema.common import is_ever
from configs.schema.supervised import RewardModelConfig, SFTConfig, SupervisedConfig
from configs.validation.batches import shares_in_words, supervised_cut
from configs.validation.megatron import megatron_notes, megatron_problems, repeat_problems
from configs.validation.model import activation_problems, lora_notes, lora_problems, precision_problems
from configs.validation.parallel import data_parallel_size, parallel_notes, parallel_problems
from configs.validation.programs import run_notes, run_problems
from configs.validation.stability import sft_alarm_problems


def check_sft(config: SFTConfig, typed: Collection[str]) -> list[str]:
    """Validate an SFT configuration; see configs.validation.programs.check_ppo."""
    longest = config.data.max_length
    return _checked(config, typed, list(_problems(config, "rows", longest, f"data.max_length = {longest}")))


def check_reward_model(config: RewardModelConfig, typed: Collection[str]) -> list[str]:
    """Validate a reward-model configuration; see configs.validation.programs.check_ppo."""
    # Both responses of a pair must be in the same micro-batch, because the loss compares their scores.
    data, trainer, longest = config.data, config.trainer, 2 * config.data.max_length
    problems = list(_problems(config, "pairs", longest, f"a pair, 2 * data.max_length = {longest}"))
    if is_ever(trainer.test_freq) and not data.val_files:
        problems.append(f"trainer.test_freq={trainer.test_freq}: no validation data; set data.val_files")
    return _checked(config, typed, problems)


def _problems(config: SupervisedConfig, units: str, longest: int, longest_in_words: str) -> Iterator[str]:
    """Problems of both programs. units: what data.train_batch_size counts. longest: maximum tokens of one unit."""
    data, engine, trainer = config.data, config.engine, config.trainer
    roles, shares = {"engine": engine}, data_parallel_size(engine, trainer)
    yield from run_problems(trainer)
    yield from parallel_problems(roles, trainer)
    yield from megatron_problems(roles, trainer)
    yield from repeat_problems(roles, trainer)
    yield from lora_problems({"model": (config.model, engine)})
    yield from precision_problems({"model": (config.model, engine)})
    yield from activation_problems("model", config.model, engine)
    yield from sft_alarm_problems(config.alarms)
    if data.train_batch_size < shares:
        yield f"data.train_batch_size={data.train_batch_size}: fewer {units} than {shares_in_words(shares, trainer)}"
    yield from supervised_cut(config).problems(longest, longest_in_words)


def _checked(config: SupervisedConfig, typed: Collection[str], problems: list[str]) -> list[str]:
    if problems:
        raise ConfigError("\n".join(problems))
    roles = {"engine": config.engine}
    return [
        *run_notes(config.trainer),
        *parallel_notes(roles),
        *megatron_notes(roles),
        *lora_notes("model", config.model, typed),
    ]
