"""Every leaf of trainer.main_ppo is read by a run, or by a function that a run calls with its configuration."""

import asyncio
import json
import os
import pickle
import socket
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.base.keys import CONFIG_DIR, described, keys_of
from configs.compose import compose
from configs.schema.ppo import PPOConfig
from configs.validation.programs import check_ppo
from tests.reads import recorded
from tests.reward_models import make_reward_model
from tests.runs import make_task, ppo_arguments, run_ppo
from tests.trainer.agents.sessions.scripted import call, converse, script, setup, task
from tests.trainer.algorithms.losses.test_actor_loss import micro_batch
from tests.trainer.algorithms.padded import advantages
from tests.trainer.rewards.server import Reply, Server
from tests.workers.rollout.sglang.test_sglang_engine_arguments import Recorder
from tests.workers.rollout.vllm_workers import place
from trainer import main_ppo
from trainer.agents.sessions import process
from trainer.agents.sessions.agent_loop import AgentLoops
from trainer.agents.sessions.pool import AgentPool
from trainer.agents.sessions.protocol import Finished, Journal
from trainer.algorithms.losses.actor_loss import ActorLoss, ActorLossConfig
from trainer.cluster.launch import open_backend
from trainer.resilience.alarms import END_TOKENS, ppo_alarms
from trainer.resilience.restart import RunLifecycle
from trainer.rewards.pool import worker
from trainer.rewards.remote.remote_rewards import open_rewards
from trainer.rewards.rules.reward_registry import compute_score
from trainer.rewards.sandbox.forkserver import close_fork_servers
from trainer.rewards.scoring import Response
from trainer.rollout.group_filtering import Tally
from trainer.rollout.rollout_builder import rollout_spec
from workers.controller.group import WorkerError
from workers.controller.ray import ray_backend
from workers.rollout.sglang import sglang_engine
from workers.rollout.vllm import vllm_engine

ACTOR, MODEL, ROLLOUT, OVERLONG = (
    "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout", "reward.reward_kwargs.overlong_buffer_cfg",
)  # fmt: skip
pytestmark = [  # as in tests/trainer/ppo/test_loop_megatron.py
    pytest.mark.filterwarnings(r"ignore:::megatron\."),
    pytest.mark.filterwarnings(r"ignore:`torch\.distributed:FutureWarning"),
]

PPO = (
    "algorithm=ppo", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_clip=1",
    "trainer.save_freq=1", "trainer.test_freq=2", "trainer.log_val_generations=1", "trainer.logger=[console]",
    "trainer.total_training_steps=null", "trainer.total_epochs=2", "data.train_max_samples=8", "data.truncation=left",
    "data.max_prompt_length=6", "data.ptx_max_length=32", f"{ACTOR}.ema_decay=0.75", f"{ACTOR}.calculate_entropy=true",
    f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.optim.lr_warmup_steps=-1", "critic.optim.lr_warmup_steps=-1",
    f"{MODEL}.tiled_mlp.enabled=true", "critic.model.tiled_mlp.enabled=true", "critic.model.lora_rank=2",
    f"{ACTOR}.fsdp_config.dtype=bfloat16", f"{ROLLOUT}.val_kwargs.do_sample=true",
    f"{ROLLOUT}.n=2",
)  # fmt: skip
"""With a critic, a reference, a fine-tuning file, checkpoints, validation and a dump, on FSDP."""
GRPO = (
    "trainer.total_training_steps=1", "trainer.deterministic=true", "data.filter_overlong_prompts=true", f"{MODEL}.lora_rank=2",
    "algorithm.filter_groups.enable=true", f"{OVERLONG}.enable=true", f"{OVERLONG}.len=2", "reward.missing_eos_penalty=0.5",
    "reward.shaping.clip=[-1,9]", "reward.shaping.normalize=running", f"{ACTOR}.use_kl_loss=true",
    "algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=0.5_2", f"{ACTOR}.policy_loss.loss_mode=clip_cov",
    f"{ACTOR}.optim.lr_scheduler_type=cosine", "reward.reward_model.enable=true", f"{ROLLOUT}.n=2",
)  # fmt: skip
"""With an adapter, a reward model, group filtering, corrections and reward shaping."""
MEGATRON = (
    "algorithm=ppo", f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.param_offload=true", "reward.reward_model.enable=true",
    f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.calculate_entropy=true", "algorithm.rollout_correction.bypass_mode=true",
    "async_training.mode=partial",
    "trainer.total_training_steps=1", "trainer.save_freq=5", "alarms.entropy.bound=99", "alarms.entropy.patience=1",
    "alarms.entropy.action=rollback", "alarms.max_rollbacks=0", f"{ROLLOUT}.n=2",
)  # fmt: skip
"""Every role on Megatron, with partial rollouts; ends when an alarm requests a rollback although none is allowed."""
FOLLOWED = {
    f"{ACTOR}.clip_ratio": (0.3, {f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"}),
    "algorithm.rollout_correction.mismatch_bound": (0.3, {"alarms.mismatch.bound"}),
}
"""A different value, and the leaves that have it as default."""


class JudgeAndRewards(Server):
    """A judge, and a reward server."""

    def reply_to(self, n: int, body: Any) -> Reply:
        if "temperature" in body:
            return 200, {"choices": [{"message": {"content": "Score: 1"}}]}, 0.0
        return 200, {"rewards": [1.0] * len(body["query"])}, 0.0


def config_of(*overrides: str) -> PPOConfig:
    return compose("ppo_trainer", PPOConfig, overrides)


def build_engines(model: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sglang_engine, "Client", Recorder)
    for name in ("vllm", "sglang"):
        config = config_of(f"{ROLLOUT}.name={name}", f"{MODEL}.path={model}", f"{ROLLOUT}.tensor_model_parallel_size=1")
        models = config.actor_rollout_ref
        spec = rollout_spec(models.model, models.rollout, config.data, "cpu")
        if name == "vllm":
            assert vllm_engine.engine_arguments(spec)["model"] == str(model)
        else:
            assert sglang_engine.SGLangRollout(spec, place()).bucket_bytes > 0


def compute_losses() -> None:
    for mode in ("kl_cov", "clip_cov", "vanilla"):
        loss = ActorLoss(ActorLossConfig.of(config_of(f"{ACTOR}.policy_loss.loss_mode={mode}"), old_log_probs_from_update=False))
        x = torch.linspace(-2, -1, 8)
        batch = micro_batch(old_log_probs=x, advantages=x.flip(0), log_probs=x + 0.5)
        if loss.needs_preparation:
            batch, _ = loss.prepare(batch, torch.Generator())
        assert loss(dict.fromkeys(loss.needs, batch.tokens["log_probs"]), batch)[0].isfinite().all()


def evaluate_groups() -> None:
    """GDPO's advantages of two rewards; and a batch that is not full at the maximum number of rounds."""
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    named: dict[str, Any] = {"rewards": {"a": one, "b": other}, "gdpo_reward_weights": [3, 1]}
    found, _ = advantages("gdpo", torch.eye(2), torch.ones(2, 2), [0, 0], **named)
    assert (found[0] > 0).all() and (found[1] < 0).all(), "the first reward has more weight"
    filtering = config_of("algorithm.filter_groups.max_num_gen_batches=1").algorithm.filter_groups
    tally = Tally(filtering, wanted=2, rounds_per_epoch=9)
    tally.add(["kept"], [1.0])
    with pytest.raises(ValueError, match="max_num_gen_batches=1 is reached"):
        tally.check_another(step=1)


def score_responses() -> None:
    with JudgeAndRewards() as server, server.listening():
        url = f"http://127.0.0.1:{server.server_port}"
        servers = (f"reward.judge.url={url}", "reward.judge.model=x", f"reward.remote_urls=[{url}]")
        reward = config_of("reward.num_workers=0", *servers).reward
        for source, answer, truth in (
            ("openai/gsm8k", "#### 4", "4"),
            ("math_dapo", "Answer: 4", "4"),
            ("judge", "4", "4"),
            ("codeforces", "print(4)", json.dumps({"inputs": [""], "outputs": ["4"]})),
        ):
            found = compute_score(source, answer, truth, {"question": "2 + 2"}, reward)
            assert (found["score"] if isinstance(found, dict) else found) == 1.0
        assert open_rewards(replace(reward, remote_urls=[])).score([Response("judge", "4", "4", {"question": "?"}, True, "", "")])
        with open_rewards(reward) as rewards:
            assert [score.value for score in rewards.score([Response("mine", "4", "4", {}, True, "", "")])] == [1.0]


def start_scoring_process(patch: pytest.MonkeyPatch) -> None:
    """In this process, so that its limits are recorded and not set."""
    limits: list[int] = []
    patch.setattr(worker, "limit_memory", limits.append)
    patch.setattr(worker, "die_with_parent", lambda parent: None)
    actual, expected = socket.socketpair()
    actual.sendall(pickle.dumps((config_of("reward.memory_limit_mb=3").reward, 1)))
    actual.shutdown(socket.SHUT_WR)
    worker.main(expected.detach(), os.getpid())
    assert limits == [3 << 20] and actual.recv(6) == b"false\n"
    actual.close()


def hold_conversation(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A session in this process; and the start of an agent process, which ends because a file is missing."""
    given = setup(folder, "tools")
    assert AgentPool(given).deaths == 0
    assert isinstance(converse(AgentLoops(given), Journal(task()), script({0: [call("add", a=1, b=2), "3"]})), Finished)
    limits: list[int] = []
    patch.setattr(process, "limit_memory", limits.append)
    actual, expected = socket.socketpair()
    actual.sendall(process.packed(setup(folder, environment="missing.py:Class")))
    marks = os.memfd_create("marks")
    os.ftruncate(marks, process.Marks.SIZE)
    with actual, asyncio.Runner() as runner:
        runner.run(process._serve(expected, process.Marks(marks)))
        assert limits and b"missing.py" in actual.recv(4096)
    os.close(marks)


def evaluate_alarms() -> None:
    """Metrics are usual for ten steps, then all diverge."""
    output = "{bound:0.5,action:warn,patience:1}"
    names = [key.split(".")[1] for key in keys_of(PPOConfig).leaves if key.startswith("alarms.") and key.endswith(".bound")]
    alarms = ppo_alarms(config_of(*(f"alarms.{name}={output}" for name in names)))
    usual = {
        "critic/score/mean": 1.0, "critic/score/max": 1.0, "critic/score/min": 0.0, "actor/entropy": 1.0, "actor/ppo_kl": 0.0,
        "actor/kl_loss": 0.0, "training/rollout_log_probs_diff_mean": 0.0, "actor/grad_norm": 1.0, "response_length/mean": 1.0,
        "response_length/clip_ratio": 0.0, "reward/failed_share": 0.0, "training/zero_signal_groups": 0.0, END_TOKENS: 1.0,
        "val/accuracy": 1.0, "val/accuracy_std": 0.0, "val/accuracy_min": 0.0, "val/problems": 9.0, "rollout/staleness/mean": 0.0,
        "perf/rollout_idle": 0.0, "perf/trainer_idle": 0.0,
    }  # fmt: skip
    odd = {name: 9.0 for name in usual} | {"actor/entropy": 0.1, "critic/score/mean": -90.0, "training/skipped_in_a_row": 9.0}
    odd |= {"val/accuracy": 0.1, "val/accuracy_std": 0.0, END_TOKENS: 0.0}
    assert [alarm for step in range(1, 11) for alarm in alarms.evaluate(step, usual)] == []
    rung = {
        alarm.text.partition(":")[0] for step in range(11, 30) for alarm in alarms.evaluate(step, odd | {"critic/score/max": 1.0})
    }
    rung |= {alarm.text.partition(":")[0] for alarm in alarms.evaluate(30, {"critic/score/mean": 0.0, "actor/grad_norm": 0.0})}
    assert rung == set(names)


def fail_a_worker(run_dir: Path) -> None:
    with pytest.raises(WorkerError):
        RunLifecycle(config_of("trainer.max_restarts=0").trainer, run_dir).handle_failure(WorkerError(0, "update", "killed"))


def join_ray(run_dir: Path, patch: pytest.MonkeyPatch) -> None:
    """Up to the calls of Ray itself."""
    asked: list[dict[str, Any]] = []
    patch.setattr(ray_backend, "RayBackend", lambda **arguments: asked.append(arguments))
    config = config_of("trainer.device=cpu")
    open_backend(config.trainer, config.ray_kwargs, config.timeouts, run_dir)
    assert asked[0]["join_seconds"] == config.timeouts.join


def code_of(task: Path, run_dir: Path, *overrides: str) -> int:
    return main_ppo.PROGRAM(ppo_arguments(task, run_dir, *overrides))


@pytest.fixture(scope="module")
def read(no_process_left_behind: None, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Leaves that are read, with their first reader."""
    folder = tmp_path_factory.mktemp("reads")
    data = make_task(folder / "task", train_size=32, test_size=4, sft_size=32)
    judge = f"reward.reward_model.path={make_reward_model(folder / 'judge', seed=1)}"
    first = (*PPO, f"data.ptx_files={data}/sft.parquet", f"trainer.rollout_data_dir={folder}/dump")
    with pytest.MonkeyPatch.context() as patch, recorded() as reads:
        run_ppo(data, folder / "first", *first)
        again = ("trainer.replay.mode=train", f"trainer.replay.path={folder}/dump/step_2.safetensors")
        assert code_of(data, folder / "first", *first, *again) == 0
        run_ppo(data, folder / "second", *GRPO, judge)
        assert code_of(data, folder / "third", *MEGATRON, judge) == 3
        for part in (compute_losses, evaluate_groups, score_responses, evaluate_alarms):
            part()
        build_engines(data / "base", patch)
        start_scoring_process(patch)
        hold_conversation(folder, patch)
        fail_a_worker(folder / "fourth")
        join_ray(folder / "fifth", patch)
    close_fork_servers()
    return reads.leaves


def test_read_of_a_leaf_counts_and_a_dump_of_the_tree_does_not() -> None:
    with recorded() as reads:
        config = config_of()
        check_ppo(config, (), needs_values=True)
        assert asdict(config) and repr(config) and config == replace(config, data=replace(config.data))
        copy = pickle.loads(pickle.dumps(replace(config.critic.optim, weight_decay=0.5)))
        assert reads.leaves == {}
        assert copy.weight_decay == 0.5 and asdict(config.timeouts)["save"] > 0
        assert reads.leaves.keys() == {"critic.optim.weight_decay", "timeouts.save"}
        assert config.actor_rollout_ref.ref.sharding is config.actor_rollout_ref.ref.fsdp_config
        assert reads.leaves.keys() == {"critic.optim.weight_decay", "timeouts.save", "actor_rollout_ref.ref.strategy"}
        assert config.actor_rollout_ref.ref.fsdp_config.dtype and "actor_rollout_ref.ref.fsdp_config" in reads.leaves
        assert set(reads.leaves.values()) == {__name__}, "the reader must be the module that uses the property"
    assert config.actor_rollout_ref.actor.ppo_epochs and len(reads.leaves) == 4, "reads after the block do not count"


def test_every_leaf_is_read(read: Mapping[str, str]) -> None:
    """Except leaves that others interpolate: their value is read through those."""
    written, leaves = described(CONFIG_DIR / "ppo_trainer.yaml"), keys_of(PPOConfig).leaves
    assert {reader.partition(".")[0] for reader in read.values()} == {"trainer", "workers"}, "a test must not count as reader"
    assert leaves.keys() - read.keys() == FOLLOWED.keys()
    for leaf, (value, followers) in FOLLOWED.items():
        plain, changed = (flat(config_of(*typed)) for typed in ((), (f"{leaf}={value}",)))
        assert {key for key in leaves if plain[key] != changed[key]} == {leaf, *followers}
        assert all(written[key].value.startswith("${") and key in read for key in followers)


def flat(config: PPOConfig) -> dict[str, Any]:
    """The configuration by leaf."""
    return {leaf: reduce(getattr, leaf.split("."), config) for leaf in keys_of(PPOConfig).leaves}
