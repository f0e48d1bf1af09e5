"""Parallel sizes of the FSDP engine that do not fit the GPUs, with one line each."""

import pytest

from configs.base.keys import ConfigError
from configs.compose import compose
from configs.schema.parity import ParityConfig
from configs.schema.ppo import PPOConfig
from configs.validation.programs import check_parity, check_ppo
from tests.configs.validation.test_programs import ACTOR, REF, ppo_lines, sft_lines

FSDP = f"{ACTOR}.fsdp_config"
EIGHT = "8 workers (trainer.nnodes * trainer.n_gpus_per_node = 1 * 8)"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (f"{FSDP}.fsdp_size=3", f"{FSDP}.fsdp_size=3: does not divide {EIGHT} (8 = 2 * 3 + 2); use a divisor"),
        (f"{FSDP}.fsdp_size=16", f"{FSDP}.fsdp_size=16: does not divide {EIGHT} (8 = 0 * 16 + 8); use a divisor"),
        (f"{FSDP}.fsdp_size=0", f"{FSDP}.fsdp_size=0: must be -1 (all GPUs share one copy) or at least 1"),
    ],
)
def test_fsdp_size_must_divide_the_workers(typed: str, message: str) -> None:
    assert ppo_lines(typed) == [f"error: {message}"]


@pytest.mark.parametrize("size", [-1, 1, 2, 4, 8])
def test_divisors_of_the_workers_are_valid_fsdp_sizes(size: int) -> None:
    check_ppo(compose("ppo_trainer", PPOConfig, [f"{FSDP}.fsdp_size={size}"]), (), needs_values=True)


def test_ulysses_size_must_divide_the_workers_and_is_reported_once_for_roles_that_follow() -> None:
    size, why = "fsdp_config.ulysses_sequence_parallel_size", f"does not divide {EIGHT} (8 = 2 * 3 + 2); use a divisor"
    lines = ppo_lines(f"{ACTOR}.ulysses_sequence_parallel_size=3", f"{ACTOR}.use_kl_loss=true")
    assert lines == [f"error: {ACTOR}.{size}=3: {why}"]
    assert ppo_lines(f"{REF}.{size}=3", f"{ACTOR}.use_kl_loss=true") == [f"error: {REF}.{size}=3: {why}"]
    assert ppo_lines("critic.ulysses_sequence_parallel_size=3") == [f"error: critic.{size}=3: {why}"]
    assert sft_lines("engine.ulysses_sequence_parallel_size=3") == [f"error: engine.{size}=3: {why}"]


def test_ulysses_size_of_parity_is_checked() -> None:
    typed = ["model=m", f"{FSDP}.ulysses_sequence_parallel_size=3", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"]
    with pytest.raises(ConfigError, match=r"ulysses_sequence_parallel_size=3: does not divide"):
        check_parity(compose("parity", ParityConfig, typed), typed)


def test_ulysses_reduces_the_required_number_of_rows() -> None:
    short = ["data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4", "critic.ulysses_sequence_parallel_size=2"]
    (line,) = ppo_lines(*short)
    assert "4 * 1 = 4 sequences per step are fewer than 8 workers" in line
    check_ppo(compose("ppo_trainer", PPOConfig, [*short, f"{ACTOR}.ulysses_sequence_parallel_size=2"]), (), needs_values=True)


def test_ulysses_multiplies_the_token_cap_of_a_row() -> None:
    long = ["data.max_prompt_length=20000", f"{FSDP}.ulysses_sequence_parallel_size=2", "critic.ppo_max_token_len_per_gpu=65536"]
    check_ppo(compose("ppo_trainer", PPOConfig, long), (), needs_values=True)
    (line, *_) = ppo_lines(*long, "data.max_prompt_length=40000")
    assert "16384 * 2 (ulysses_sequence_parallel_size) = 32768 tokens" in line


def test_ulysses_on_megatron_has_no_effect() -> None:
    typed = [f"{ACTOR}.strategy=megatron", f"{ACTOR}.ulysses_sequence_parallel_size=2", "critic.strategy=fsdp"]
    notes = check_ppo(compose("ppo_trainer", PPOConfig, typed), typed, needs_values=True)
    assert [note for note in notes if "ulysses" in note] == [
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size has no effect with strategy=megatron; use "
        f"{ACTOR}.megatron.context_parallel_size"
    ]
