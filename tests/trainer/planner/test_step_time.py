"""Phases of a step: which there are, and which way each key moves them."""

import pytest

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from configs.validation.placement import placement_of
from scripts.bench.shapes import SHAPES
from trainer.planner.hardware import load_hardware
from trainer.planner.memory_model import Shape
from trainer.planner.step_time import PhaseTime, phase_times, schedule, step_seconds
from trainer.planner.time_model import ResponseLengths

ULYSSES = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
SHAPE = Shape.of(SHAPES["7b"])
MEGATRON = (f"{ACTOR}.strategy=megatron", "critic.strategy=megatron")


def planned(*overrides: str, algorithm: str = "ppo", hardware: str = "H100") -> tuple[dict[str, PhaseTime], float]:
    """Phases by name, and seconds of the step: a critic and a reference of 7B on eight GPUs."""
    words = (
        f"algorithm={algorithm}", f"{ACTOR}.use_kl_loss=true", "rollout=vllm", f"{ROLLOUT}.tensor_model_parallel_size=1",
        "data.train_batch_size=256", f"{ACTOR}.ppo_mini_batch_size=128", "data.max_prompt_length=512",
        "data.max_response_length=1024", *overrides,
    )  # fmt: skip
    config = compose("ppo_trainer", PPOConfig, words)
    has_critic = algorithm == "ppo"
    shapes = {key: SHAPE for key in (ACTOR, *([] if config.actor_rollout_ref.model.has_adapter else [REF]))}
    shapes |= {"critic": SHAPE} if has_critic else {}
    place = placement_of(config, has_critic=has_critic)
    phases = phase_times(config, place, shapes, load_hardware(hardware), ResponseLengths(256, 700, 1024))
    return {phase.phase: phase for phase in phases}, step_seconds(schedule(config, place, phases))


def seconds(*overrides: str, algorithm: str = "ppo") -> dict[str, float]:
    return {name: phase.seconds for name, phase in planned(*overrides, algorithm=algorithm)[0].items()}


def test_step_has_every_phase_and_is_their_sum_on_the_same_gpus() -> None:
    phases, step = planned()
    assert [*phases] == [
        "answers", "actor: log-probs", "ref: log-probs", "critic: values", "critic: update", "actor: update", "sync", "controller"
    ]  # fmt: skip
    assert step == pytest.approx(sum(phase.seconds for phase in phases.values()))
    one_update = seconds(f"{ACTOR}.ppo_mini_batch_size=256", algorithm="grpo")
    assert "actor: log-probs" not in one_update, "they come from the update"
    assert "ref: log-probs" in seconds("actor_rollout_ref.model.lora_rank=8", algorithm="grpo"), "the actor without its adapter"


def test_an_adapter_that_the_engine_applies_costs_generation() -> None:
    merged, applied = (
        seconds("actor_rollout_ref.model.lora_rank=8", f"actor_rollout_ref.rollout.lora_sync={sync}", algorithm="grpo")["answers"]
        for sync in ("merged", "adapter")
    )
    assert applied > 1.2 * merged


def test_roles_in_pools_of_their_own_work_at_the_same_time() -> None:
    phases, step = planned("placement=split", "trainer.nnodes=4")
    assert step < sum(phase.seconds for phase in phases.values())
    forwards = [phase.seconds for name, phase in phases.items() if name.endswith(("log-probs", "values"))]
    updates = [phase.seconds for name, phase in phases.items() if name.endswith("update")]
    rest = sum(phases[name].seconds for name in ("answers", "sync"))
    # The reference and critic have pools too, and the controller's work follows the sync in the actor's pool.
    assert step == pytest.approx(rest + max(forwards) + max(updates) + phases["controller"].seconds)


def test_generation_ahead_hides_the_shorter_of_both() -> None:
    words = ("placement=split", "trainer.nnodes=3", f"{ACTOR}.use_kl_loss=false")
    phases, waits = planned(*words, algorithm="grpo")
    _, ahead = planned(*words, "async_training.mode=one_step_off", algorithm="grpo")
    generation = phases["answers"].seconds
    assert ahead == pytest.approx(max(generation, waits - generation - tail(phases)) + tail(phases))


def tail(phases: dict[str, PhaseTime]) -> float:
    return phases["sync"].seconds + phases["controller"].seconds


@pytest.mark.parametrize(
    ("words", "phase", "longer"),
    [
        ((f"{ROLLOUT}.n=4",), "answers", True),
        (("trainer.nnodes=2",), "actor: update", False),
        ((f"{ACTOR}.ppo_max_token_len_per_gpu=1536",), "actor: update", True),
        (("actor_rollout_ref.model.enable_gradient_checkpointing=false",), "actor: update", False),
        ((f"{ACTOR}.fsdp_config.optimizer_offload=true",), "actor: update", True),
        ((f"{REF}.fsdp_config.param_offload=true",), "ref: log-probs", True),
        ((f"{ACTOR}.ppo_epochs=2",), "actor: update", True),
        (("actor_rollout_ref.model.lora_rank=8",), "actor: update", False),
        ((f"{ROLLOUT}.enforce_eager=true",), "answers", True),
        ((f"{ROLLOUT}.free_cache_engine=false",), "sync", False),
        ((*MEGATRON, f"{ACTOR}.megatron.pipeline_model_parallel_size=8"), "actor: update", True),
        ((*MEGATRON, f"{ACTOR}.megatron.tensor_model_parallel_size=4"), "actor: update", True),
        (
            (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=4", f"{ACTOR}.ppo_max_token_len_per_gpu=1536"),
            "actor: update",
            True,
        ),
    ],
)
def test_key_moves_its_phase(words: tuple[str, ...], phase: str, longer: bool) -> None:
    algorithm = "grpo" if "lora" in words[0] else "ppo"
    base = seconds(*(MEGATRON if words[0] in MEGATRON else ()), algorithm=algorithm)
    assert (seconds(*words, algorithm=algorithm)[phase] > base[phase]) == longer


def test_full_kv_cache_limits_the_sequences_of_an_engine() -> None:
    small = seconds(f"{ROLLOUT}.gpu_memory_utilization=0.3", f"{ROLLOUT}.n=8", f"{ROLLOUT}.max_num_seqs=1024")["answers"]
    assert small > seconds(f"{ROLLOUT}.gpu_memory_utilization=0.9", f"{ROLLOUT}.n=8", f"{ROLLOUT}.max_num_seqs=1024")["answers"]


def test_shared_prompts_are_computed_once_by_fsdp() -> None:
    alone, grouped = seconds(f"{ROLLOUT}.n=1")["ref: log-probs"], seconds(f"{ROLLOUT}.n=8")["ref: log-probs"]
    assert grouped < 8 * 0.9 * alone


def test_sync_of_an_embedded_engine_that_shares_the_weights_moves_nothing() -> None:
    words = ("rollout=embedded", "trainer.n_gpus_per_node=1", f"{ROLLOUT}.dtype=float32")
    assert planned(*words)[0]["sync"].parts["weights"] == 0.0
    assert planned("rollout=embedded", "trainer.n_gpus_per_node=2", f"{ROLLOUT}.dtype=float32")[0]["sync"].parts["weights"] > 0
