"""The estimate of a worker's memory: the effect of each key."""

import pytest
import torch
import transformers

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from configs.validation.placement import placement_of
from scripts.bench.shapes import SHAPES
from tests.tiny import tiny_config
from trainer.planner import memory_estimate
from trainer.planner.memory_estimate import ASLEEP, NCCL, PROCESS, RUNTIME, Use, estimate, keys_per_token, memory_roles, shape_of
from trainer.planner.memory_model import Setting, Shape, attention_kept, columns, gathering, in_layer
from workers.engine.shared_prefixes import SharedPrefixes
from workers.prefixes import Chain

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
SHAPE = Shape.of(SHAPES["7b"])


def uses(*overrides: str, gpu: float | None = 80e9) -> dict[str, Use]:
    """By pool and phase, for PPO with a reference and a critic of 7B."""
    words = ("algorithm=ppo", f"{ACTOR}.use_kl_loss=true", "rollout=vllm", *overrides)
    config = compose("ppo_trainer", PPOConfig, words)
    shapes = {key: SHAPE for key in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")}
    found = estimate(config, placement_of(config, has_critic=True), shapes, gpu)
    return {f"{use.pool} {use.phase}": use for use in found}


def gigabytes(*overrides: str, gpu: float | None = 80e9) -> dict[str, float]:
    """GB by phase."""
    return {phase: -1.0 if use.bytes is None else use.bytes / 1e9 for phase, use in uses(*overrides, gpu=gpu).items()}


def test_estimate_has_every_phase_of_every_role() -> None:
    assert [*gigabytes()] == [
        "workers answers", "workers actor: log-probs", "workers actor: update", "workers ref: log-probs",
        "workers critic: values", "workers critic: update",
    ]  # fmt: skip
    apart = gigabytes("placement=split", "trainer.nnodes=4")
    assert {phase.split()[0] for phase in apart} == {"actor", "ref", "critic", "rollout"}


def test_resident_models_count_in_phases_of_other_roles() -> None:
    """Weights and optimizer moments of the actor, 12 bytes a parameter over 8 GPUs, are added to every other phase."""
    words = [f"{ACTOR}.fsdp_config.{part}_offload=true" for part in ("param", "optimizer")]
    words += [f"{other}.fsdp_config.{part}_offload=false" for other in (REF, "critic") for part in ("param", "optimizer")]
    with_all, offloaded = gigabytes(), gigabytes(*words)
    resting = 12 * SHAPE.parameters / 8 / 1e9
    for phase in ("answers", "critic: values", "critic: update"):
        assert with_all[f"workers {phase}"] - offloaded[f"workers {phase}"] == pytest.approx(resting)
    assert with_all["workers actor: update"] > offloaded["workers actor: update"]


def test_engine_has_its_fraction_and_a_remainder_while_asleep() -> None:
    base, more = gigabytes(), gigabytes(f"{ROLLOUT}.gpu_memory_utilization=0.7")
    assert more["workers answers"] - base["workers answers"] == pytest.approx(0.2 * 80)
    apart = gigabytes("rollout=embedded")
    assert base["workers actor: update"] - apart["workers actor: update"] == pytest.approx(ASLEEP / 1e9)
    assert gigabytes(gpu=None)["workers answers"] == -1.0
    free = base["workers answers"] - 0.5 * 80
    assert gigabytes("rollout=sglang")["workers answers"] == pytest.approx(free + 0.5 * (80 - free))


@pytest.mark.parametrize(("gpus", "more"), [(1, RUNTIME), (8, RUNTIME + NCCL)])
def test_process_on_a_gpu_has_a_context_and_with_peers_communicators(gpus: int, more: float) -> None:
    words = ("rollout=embedded", f"trainer.n_gpus_per_node={gpus}")
    on_gpu, on_cpu = gigabytes(*words), gigabytes(*words, "trainer.device=cpu")
    # In an update the CPU's kernels keep more.
    same = [phase for phase in on_cpu if not phase.endswith("update")]
    more = (more - PROCESS) / 1e9
    assert {phase: on_gpu[phase] - on_cpu[phase] for phase in same} == pytest.approx(dict.fromkeys(same, more))


def test_caches_of_all_roles_that_worked_before_are_in_use_on_a_gpu() -> None:
    cached = {phase: use.cached for phase, use in uses().items() if use.cached}
    gathers = 3 * gathering(SHAPE, Setting(gpus=8))
    assert [*cached] == ["workers actor: update", "workers critic: update"]
    of_actor, of_critic = cached.values()
    assert of_actor > of_critic > gathers, "the critic learns before the actor"
    more = {phase: use.cached for phase, use in uses(f"{REF}.fsdp_config.fsdp_size=1").items() if use.cached}
    assert more == {phase: pytest.approx(in_use - gathers / 3) for phase, in_use in cached.items()}, "nothing to gather"
    assert not any(use.cached for use in uses("rollout=embedded", "trainer.device=cpu").values())


@pytest.mark.parametrize(
    ("word", "phase"),
    [
        ("trainer.nnodes=2", "workers actor: update"),
        (f"{ACTOR}.ppo_max_token_len_per_gpu=2048", "workers actor: update"),
        (f"{ROLLOUT}.log_prob_max_token_len_per_gpu=2048", "workers actor: log-probs"),
        (f"{ACTOR}.fsdp_config.model_dtype=bfloat16", "workers actor: update"),
        ("actor_rollout_ref.model.lora_rank=8", "workers actor: update"),
        ("actor_rollout_ref.model.enable_activation_offload=true", "workers actor: update"),
        ("data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=8", "workers actor: update"),
    ],
)
def test_key_reduces_the_memory_of_its_phase(word: str, phase: str) -> None:
    assert gigabytes(*word.split())[phase] < gigabytes()[phase]


def test_megatron_memory_is_divided_by_its_parallel_sizes() -> None:
    """18 bytes a parameter, 12 of them of the distributed optimizer; the last of two stages has the head and half the layers."""
    words = (f"{ACTOR}.strategy=megatron", "placement=split", "trainer.nnodes=4", f"{ACTOR}.megatron.sequence_parallel=false")
    whole = gigabytes(*words)["actor actor: update"]
    cut = gigabytes(*words, f"{ACTOR}.megatron.pipeline_model_parallel_size=2")["actor actor: update"]
    kept = SHAPE.parameters / 1e9
    stage = (SHAPE.layers / 2 * SHAPE.layer_parameters + (SHAPE.vocabulary + 1) * SHAPE.hidden) / 1e9
    assert whole - cut == pytest.approx((6 + 12 / 8) * kept - (6 + 12 / 4) * stage)


def test_shape_is_recognized_by_its_parameter_count() -> None:
    dense = tiny_config(hidden_size=64, vocab_size=97)
    model = transformers.AutoModelForCausalLM.from_config(dense)
    count = sum(parameter.numel() for parameter in model.parameters())
    shape = shape_of(dense, count)
    assert shape is not None and shape.parameters == count and not shape.tied
    assert shape_of(dense, 2 * count) is None
    experts = tiny_config("qwen3_moe")
    count = sum(parameter.numel() for parameter in transformers.AutoModelForCausalLM.from_config(experts).parameters())
    assert shape_of(experts, count) is None


@pytest.mark.parametrize(
    ("prompt", "response", "n", "together"), [(256, 64, 8, 8), (128, 128, 4, 4), (100, 50, 8, 3), (100, 50, 1, 1)]
)
def test_keys_per_token_are_those_of_a_micro_batch_of_longest_rows(prompt: int, response: int, n: int, together: int) -> None:
    """Of 8 responses of 50 tokens to a prompt of 100, three fit into 250 to 299 tokens."""
    tokens = prompt + together * response + response - 1
    chain: Chain = ((0, prompt),)
    shared = SharedPrefixes.of([prompt + response] * together, [chain] * together, torch.device("cpu"))
    expected = 1.0 if shared is None else len(shared.seen) / len(shared.computed)
    assert keys_per_token(prompt, response, n, tokens) == expected
    more, one = Setting(seen=expected), Setting()
    assert attention_kept(SHAPE, more) - attention_kept(SHAPE, one) == pytest.approx(4 * SHAPE.keys * (expected - 1))
    assert columns(SHAPE, more) == expected * columns(SHAPE, one)
    assert in_layer(SHAPE, more, tokens, 1)["norms, attention"] >= in_layer(SHAPE, one, tokens, 1)["norms, attention"]


def test_keys_of_shared_prompts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (f"{ROLLOUT}.n=8", "data.max_prompt_length=8192", "data.max_response_length=64")
    counted = gigabytes(*words)
    monkeypatch.setattr(memory_estimate, "keys_per_token", lambda *lengths: 1.0)
    assert counted["workers actor: update"] > gigabytes(*words)["workers actor: update"]


def test_arriving_weights_are_a_bucket_from_another_pool_and_a_tensor_in_the_trainers_own() -> None:
    embedded = ("rollout=embedded", f"{ROLLOUT}.dtype=bfloat16", "trainer.device=cpu")
    colocated = gigabytes(*embedded)
    largest = max(SHAPE.vocabulary, SHAPE.intermediate) * SHAPE.hidden
    assert colocated["workers sync"] - colocated["workers answers"] == pytest.approx((4 + 2) * largest / 1e9)
    alone = gigabytes("rollout=embedded", f"{ROLLOUT}.dtype=float32", "trainer.n_gpus_per_node=1", "trainer.device=cpu")
    assert "workers sync" not in alone, "the engine uses the trainer's own tensors"
    # Pools of actor, reference, critic and engine, two GPUs each; of two buckets in flight none is larger than the weights.
    for megabytes, bucket in ((500, 500 * 2**20), (10**6, 2 * SHAPE.parameters)):
        apart = gigabytes(*embedded, "placement=split", f"{ROLLOUT}.update_weights_bucket_megabytes={megabytes}")
        assert apart["rollout sync"] - apart["rollout answers"] == pytest.approx(bucket / 1e9)


def test_a_role_computes_prompts_once_and_knows_its_device() -> None:
    small = ("data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4", f"{ROLLOUT}.n=8", "trainer.n_gpus_per_node=1")
    lengths = ("data.max_prompt_length=100", "data.max_response_length=50", f"{ACTOR}.ppo_max_token_len_per_gpu=100000")
    for device, strategy, tokens in (("cpu", "fsdp", 4 * 100 + 32 * 50), ("cuda", "megatron", 32 * 150)):
        words = (
            "algorithm=grpo",
            "rollout=embedded",
            *small,
            *lengths,
            f"{ACTOR}.strategy={strategy}",
            f"trainer.device={device}",
        )
        config = compose("ppo_trainer", PPOConfig, words)
        shapes = dict.fromkeys((ACTOR, REF), SHAPE)
        role = memory_roles(config, placement_of(config, has_critic=False), shapes)[ACTOR]
        assert role.learns == tokens and role.setting.cuda == (device == "cuda")
