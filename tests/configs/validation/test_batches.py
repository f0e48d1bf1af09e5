"""Limits of micro-batches and of data-parallel shards, by GPUs and by tokens."""

from dataclasses import replace

import pytest

from configs.compose import compose
from configs.schema.common import Strategy
from configs.schema.ppo import PPOConfig
from configs.validation.batches import micro_batch_limits
from tests.configs.validation.test_programs import ACTOR, LONGEST, REF, ROLLOUT, ppo_lines, sft_lines

MEGATRON = f"{ACTOR}.strategy=megatron"
TP2, PP2, CP2 = (f"{ACTOR}.megatron.{name}_parallel_size=2" for name in ("tensor_model", "pipeline_model", "context"))
DEFAULTS = compose("ppo_trainer", PPOConfig)


def limits(
    per_gpu: int | None,
    over_all: int | None,
    dynamic: bool,
    *,
    gpus: int = 2,
    strategy: Strategy = "fsdp",
    ulysses: int = 1,
    **sizes: int,
) -> tuple[int | None, int | None]:
    actor = DEFAULTS.actor_rollout_ref.actor
    fsdp = replace(actor.fsdp_config, ulysses_sequence_parallel_size=ulysses)
    role = replace(actor, strategy=strategy, fsdp_config=fsdp, megatron=replace(actor.megatron, **sizes))  # type: ignore[arg-type] # sizes are numbers
    return micro_batch_limits(per_gpu, over_all, dynamic, 100, role, replace(DEFAULTS.trainer, n_gpus_per_node=gpus))


@pytest.mark.parametrize(
    ("per_gpu", "over_all", "dynamic", "expected"),
    [
        (None, None, False, (100, None)),
        (None, None, True, (100, None)),
        (4, None, True, (100, None)),
        (4, None, False, (None, 4)),
        (4, 6, False, (None, 4)),
        (None, 16, False, (None, 8)),
        (None, 2, False, (None, 1)),
        (None, 1, False, (None, 1)),
    ],
)
def test_micro_batch_limits_follow_from_the_keys(
    per_gpu: int | None, over_all: int | None, dynamic: bool, expected: tuple[int | None, int | None]
) -> None:
    assert limits(per_gpu, over_all, dynamic) == expected


def test_a_total_count_must_be_divisible_by_the_data_parallel_size() -> None:
    with pytest.raises(ValueError, match=r"5 / 2 = 2\.5"):
        limits(None, 5, False)


def test_ranks_of_one_model_copy_count_once() -> None:
    four = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    assert limits(None, 16, False, gpus=8, strategy="megatron", **four) == (None, 8)
    assert limits(None, 16, False, gpus=8, strategy="fsdp", **four) == (None, 2)
    assert limits(4, None, False, gpus=8, strategy="megatron", **four) == (None, 4)
    with pytest.raises(ValueError, match=r"5 / 4 = 1\.25"):
        limits(None, 5, False, gpus=8, strategy="megatron", context_parallel_size=2)


def test_ulysses_multiplies_tokens_and_divides_the_data_parallel_size() -> None:
    assert limits(None, None, True, ulysses=2) == (200, None)
    assert limits(None, 16, False, gpus=8, ulysses=2) == (None, 4)
    assert limits(4, None, False, gpus=8, ulysses=2) == (None, 4)
    with pytest.raises(ValueError, match=r"5 / 4 = 1\.25"):
        limits(None, 5, False, gpus=8, ulysses=2)
    assert limits(None, None, True, strategy="megatron", ulysses=2) == (100, None)


def test_context_parallelism_multiplies_the_tokens_of_a_micro_batch() -> None:
    assert limits(None, None, True, strategy="megatron", context_parallel_size=2) == (200, None)
    assert limits(None, None, True, strategy="megatron", tensor_model_parallel_size=2) == (100, None)
    assert limits(None, None, True, strategy="fsdp", context_parallel_size=2) == (100, None)


def test_token_cap_is_multiplied_by_the_gpus_of_a_micro_batch() -> None:
    """The longest row has 1,024 tokens."""
    short = (f"{ACTOR}.ppo_max_token_len_per_gpu=512", f"{ROLLOUT}.log_prob_max_token_len_per_gpu=512")
    assert len(ppo_lines(*short, MEGATRON, needs_values=False)) == 2
    assert ppo_lines(*short, MEGATRON, CP2, needs_values=False) == []
    (line,) = ppo_lines(f"{ACTOR}.ppo_max_token_len_per_gpu=511", *short[1:], MEGATRON, CP2, needs_values=False)
    assert line == (
        f"error: {ACTOR}.ppo_max_token_len_per_gpu=511: a micro-batch of 511 * 2 (context_parallel_size) = 1022 tokens cannot "
        f"hold the longest row, {LONGEST}; increase it"
    )


def test_fewer_rows_than_data_parallel_ranks_are_refused() -> None:
    few = ("data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=2", "critic.ppo_mini_batch_size=2")
    assert len(ppo_lines(*few)) == 1
    assert ppo_lines(*few, MEGATRON, TP2, PP2) == []
    (line,) = ppo_lines(*few, MEGATRON, TP2)
    assert line == (
        f"error: data.train_batch_size=2: data.train_batch_size * {ROLLOUT}.n = 2 * 1 = 2 sequences per step are fewer than the "
        "data-parallel size 4 = 8 workers (trainer.nnodes * trainer.n_gpus_per_node = 1 * 8) / 2; increase it"
    )
    (line,) = ppo_lines(*few, MEGATRON, TP2, PP2, f"{REF}.strategy=fsdp", f"{ACTOR}.use_kl_loss=true")
    assert "are fewer than 8 workers" in line, "the reference takes rows on every worker"


def test_rows_and_lengths_of_supervised_training_are_checked() -> None:
    four = ("data.train_batch_size=4", "engine.strategy=megatron")
    assert sft_lines(*four, "engine.megatron.tensor_model_parallel_size=2") == []
    (line,) = sft_lines(*four)
    assert line.startswith("error: data.train_batch_size=4: fewer rows than 8 workers")
    long = ("engine.strategy=megatron", "data.max_length=16384", "engine.megatron.context_parallel_size")
    assert sft_lines(*long[:2], f"{long[2]}=2") == []
    assert len(sft_lines(*long[:2])) == 1
