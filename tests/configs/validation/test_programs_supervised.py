"""Fine-tuning and reward models: invalid combinations of keys."""

import pytest

from configs.base.keys import ConfigError
from configs.compose import compose, compose_with_notes
from configs.schema.supervised import DPOConfig, RewardModelConfig, SFTConfig
from configs.validation.programs import check_pairs, check_sft
from tests.configs.validation.test_programs import TOO_SMALL, WORKERS, sft_lines


def reward_model_lines(*overrides: str) -> list[str]:
    try:
        return check_pairs(compose("reward_model_trainer", RewardModelConfig, overrides), ())
    except ConfigError as error:
        return [f"error: {line}" for line in str(error).splitlines()]


def dpo_lines(*overrides: str) -> list[str]:
    try:
        return check_pairs(compose("dpo_trainer", DPOConfig, overrides), ())
    except ConfigError as error:
        return [f"error: {line}" for line in str(error).splitlines()]


def test_sft_refuses_few_rows_and_long_ones() -> None:
    assert sft_lines("data.train_batch_size=7") == [f"error: data.train_batch_size=7: fewer rows than {WORKERS}"]
    (line,) = sft_lines("data.max_length=9000")
    assert line == f"error: data.max_token_len_per_gpu=8192: {TOO_SMALL.format(8192)}, data.max_length = 9000; increase it"
    assert sft_lines("data.max_length=9000", "data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=2") == []


def test_reward_model_refuses_few_pairs_and_long_ones() -> None:
    assert reward_model_lines() == reward_model_lines("recipe=sort_digits") == reward_model_lines("data.max_length=4096") == []
    assert reward_model_lines("data.train_batch_size=7") == [f"error: data.train_batch_size=7: fewer pairs than {WORKERS}"]
    (line,) = reward_model_lines("data.max_length=4097")
    assert (
        line
        == f"error: data.max_token_len_per_gpu=8192: {TOO_SMALL.format(8192)}, a pair, 2 * data.max_length = 8194; increase it"
    )
    assert reward_model_lines("data.max_length=9000", "data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=2") == []


def test_validation_of_a_reward_model_requires_files() -> None:
    assert reward_model_lines("trainer.test_freq=5", "data.val_files=held_out.parquet") == []
    assert reward_model_lines("trainer.test_freq=5") == ["error: trainer.test_freq=5: no validation data; set data.val_files"]


def test_general_checks_apply_to_reward_models() -> None:
    (line,) = reward_model_lines("trainer.backend=local")
    assert line.startswith("error: trainer.backend=local: runs a single worker")
    (note,) = reward_model_lines("trainer.best_metric=val/accuracy")
    assert note.startswith("trainer.best_metric has no effect")


def test_dpo_has_the_checks_of_pairs_and_its_own() -> None:
    assert dpo_lines() == dpo_lines("recipe=sort_digits") == dpo_lines("loss.kind=ipo", "loss.sft_coef=1") == []
    assert dpo_lines("data.train_batch_size=7") == [f"error: data.train_batch_size=7: fewer pairs than {WORKERS}"]
    assert dpo_lines("trainer.test_freq=5") == ["error: trainer.test_freq=5: no validation data; set data.val_files"]
    assert "a pair, 2 * data.max_length = 8194" in dpo_lines("data.max_length=4097")[0]
    smoothed = dpo_lines("loss.kind=ipo", "loss.label_smoothing=0.1")
    assert smoothed == ["error: loss.label_smoothing=0.1: loss.kind=ipo has no label smoothing; set 0"]
    for wrong in ("loss.beta=0", "loss.label_smoothing=0.5", "loss.sft_coef=-1", "loss.kind=hinge"):
        (line,) = dpo_lines(wrong)
        assert line.replace('"', "").startswith(f"error: {wrong}: must be"), "a bound of the schema"


@pytest.mark.parametrize(
    ("words", "unused"),
    [
        (["data.micro_batch_size_per_gpu=2", "data.use_dynamic_bsz=true"], "data.micro_batch_size_per_gpu"),
        (["data.micro_batch_size_per_gpu=2", "data.use_dynamic_bsz=false"], None),
        (["data.messages_key=messages", "data.prompt_key=question"], "data.prompt_key"),
        (["data.messages_key=messages", "data.response_key=answer"], "data.response_key"),
        (["data.prompt_key=question", "data.response_key=answer"], None),
        (["optim.lr_scheduler_type=constant", "optim.min_lr_ratio=0.1"], "optim.min_lr_ratio"),
        (["optim.lr_scheduler_type=linear", "optim.min_lr_ratio=0.1"], None),
        (["optim.lr_scheduler_type=constant", "optim.num_cycles=1"], "optim.num_cycles"),
        (["optim.lr_scheduler_type=linear", "optim.num_cycles=1"], "optim.num_cycles"),
        (["optim.lr_scheduler_type=wsd", "optim.num_cycles=1"], None),
        (["optim.lr_warmup_steps=0", "optim.lr_warmup_steps_ratio=0.2"], "optim.lr_warmup_steps_ratio"),
        (["optim.lr_warmup_steps=-1", "optim.lr_warmup_steps_ratio=0.2"], None),
    ],
)
def test_keys_that_another_key_makes_unused_are_reported(words: list[str], unused: str | None) -> None:
    config, typed, _ = compose_with_notes("sft_trainer", SFTConfig, words)
    notes = check_sft(config, typed)
    assert [note.partition(" has no effect: ")[0] for note in notes] == ([] if unused is None else [unused])
    assert check_sft(config, ()) == []


def test_betas_that_adamw_rejects_are_found_before_workers_start() -> None:
    for betas, wrong in (
        ("[1.0,0.9]", "0=1.0: must be less than 1"),
        ("[0.9,-0.1]", "1=-0.1: must be greater than or equal to 0"),
    ):
        assert dpo_lines(f"optim.betas={betas}") == [f"error: optim.betas.{wrong}"]
