"""Sizes above an unambiguous limit are reduced, with a note."""

import pytest

from configs.compose import compose_with_notes
from configs.schema.common import ShardedConfig
from configs.schema.generation import GenerationConfig
from configs.schema.ppo import PPOConfig

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
MINI = "ppo_mini_batch_size"


@pytest.mark.parametrize(
    ("actor", "critic", "reduced"), [(64, 64, []), (256, None, [ACTOR]), (32, 128, ["critic"]), (256, 128, [ACTOR, "critic"])]
)
def test_a_mini_batch_is_reduced_to_the_batch(actor: int, critic: int | None, reduced: list[str]) -> None:
    words = ["data.train_batch_size=64", f"{ACTOR}.{MINI}={actor}", *([f"critic.{MINI}={critic}"] if critic else [])]
    config, _, notes = compose_with_notes("ppo_trainer", PPOConfig, words)
    held = config.actor_rollout_ref.actor.ppo_mini_batch_size, config.critic.ppo_mini_batch_size
    assert held == (min(actor, 64), min(critic or actor, 64))
    sizes = {ACTOR: actor, "critic": critic}
    assert notes == [
        f"{role}.{MINI}={sizes[role]}: larger than data.train_batch_size=64; one update uses the whole batch" for role in reduced
    ]


@pytest.mark.parametrize(("longest", "prompt"), [(30, 20), (29, 20), (21, 20), (20, 19), (2, 1)])
@pytest.mark.parametrize(("root", "schema"), [("ppo_trainer", PPOConfig), ("generation", GenerationConfig)])
def test_max_model_len_truncates_responses_and_reduces_prompts(root: str, schema: type, longest: int, prompt: int) -> None:
    words = ["data.max_prompt_length=20", "data.max_response_length=10", f"{ROLLOUT}.max_model_len={longest}"]
    config, _, notes = compose_with_notes(root, schema, words)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (prompt, 10)
    key = f"{ROLLOUT}.max_model_len={longest}"
    sizes = "data.max_prompt_length + data.max_response_length = 20 + 10"
    short = f"{key}: less than {sizes}; responses are truncated at this total length"
    cut = f"{key}: data.max_prompt_length=20 is reduced to {prompt} tokens"
    assert notes == [short] * (longest < 30) + [cut] * (prompt < 20)


def test_roles_that_share_gpus_are_split_like_the_actor() -> None:
    words = [f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=4"]
    words += [f"{REF}.megatron.tensor_model_parallel_size=2", "critic.megatron.pipeline_model_parallel_size=2"]
    config, _, notes = compose_with_notes("ppo_trainer", PPOConfig, words)
    cuts = {(role.megatron.tensor_model_parallel_size, role.megatron.pipeline_model_parallel_size) for role in roles(config)}
    assert cuts == {(4, 1)}
    alike = "models that share GPUs must be split the same way, and the actor uses"
    assert notes == [
        f"{REF}.megatron.tensor_model_parallel_size=2: {alike} 4",
        f"critic.megatron.pipeline_model_parallel_size=2: {alike} 1",
    ]
    apart, _, notes = compose_with_notes("ppo_trainer", PPOConfig, [*words, "placement.layout=split"])
    assert notes == [] and apart.critic.megatron.pipeline_model_parallel_size == 2
    on_fsdp, _, notes = compose_with_notes("ppo_trainer", PPOConfig, [*words, f"{REF}.strategy=fsdp", "critic.strategy=fsdp"])
    assert notes == [] and on_fsdp.actor_rollout_ref.ref.megatron.tensor_model_parallel_size == 2


def roles(config: PPOConfig) -> list[ShardedConfig]:
    return [config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic]


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (["trainer.n_gpus_per_node=1"], 1),
        (["trainer.n_gpus_per_node=4"], 2),
        (["trainer.n_gpus_per_node=3", "actor_rollout_ref.rollout.name=sglang"], 1),
        (["trainer.n_gpus_per_node=1", "trainer.nnodes=2"], 2),
        (["trainer.n_gpus_per_node=1", "trainer.nnodes=2", "actor_rollout_ref.rollout.name=sglang"], 1),
        (["trainer.n_gpus_per_node=2", "placement=split"], 1),
        (["trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.name=embedded"], 2),
    ],
)
def test_a_tensor_parallel_size_that_was_not_typed_divides_the_gpus(words: list[str], size: int) -> None:
    plain = ["algorithm=grpo", "rollout=vllm", "data.train_batch_size=24", "actor_rollout_ref.actor.ppo_mini_batch_size=24"]
    config, _, notes = compose_with_notes("ppo_trainer", PPOConfig, [*plain, *words])
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == size
    reduced = [note for note in notes if note.startswith("actor_rollout_ref.rollout.tensor_model_parallel_size=2: the default")]
    assert len(reduced) == (size == 1)


def test_a_tensor_parallel_size_that_was_typed_stays() -> None:
    typed = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    config, _, _ = compose_with_notes("ppo_trainer", PPOConfig, ["rollout=vllm", "trainer.n_gpus_per_node=1", typed])
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 2, "which the validation refuses"


def test_a_remote_directory_equal_to_the_run_directory_is_removed() -> None:
    words = ["trainer.default_local_dir=runs/a", "trainer.checkpoint.remote_dir=runs/../runs/a"]
    config, _, notes = compose_with_notes("ppo_trainer", PPOConfig, words)
    assert config.trainer.checkpoint.remote_dir is None
    assert notes == ["trainer.checkpoint.remote_dir=runs/../runs/a: is the run directory; no copies are made"]
