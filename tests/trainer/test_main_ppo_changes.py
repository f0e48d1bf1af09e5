"""For forty leaves of trainer.main_ppo, chosen by a seed: another value changes an observable result."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, reduce
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from configs.base.keys import keys_of
from configs.compose import compose
from configs.schema.placement import ROLES
from configs.schema.ppo import PPOConfig
from configs.validation.placement import placement_of
from data_preprocess import tiny_model
from tests.runs import make_task, ppo_arguments
from tests.trainer.rewards.server import Reply, Server
from tests.workers.engine.toy import one_rank
from tests.workers.rollout.engines import request
from trainer.algorithms.losses.actor_loss import ActorLoss, entropy_mask
from trainer.cluster.launch import RunWorkers
from trainer.ppo.loop import Loop
from trainer.ppo.ppo_builder import Assembly, reader, wants_critic
from trainer.ppo.update import update
from trainer.resilience.alarms import Alarm, react
from trainer.resilience.restart import RunLifecycle
from trainer.rewards.models.reward_models import ServedModel
from trainer.rewards.remote.remote_rewards import open_rewards
from trainer.rewards.scoring import Response
from trainer.rollout.partial import PartialRollouts
from trainer.run.errors import CheckFailed
from trainer.run.timing import Start
from workers.batch import Batch
from workers.controller.group import Limit
from workers.controller.rpc import Call, Sharded
from workers.engine.base import TrainEngine
from workers.metric import Metric, plain_numbers
from workers.roles.train_engines import make_engine
from workers.rollout.base import Sampling
from workers.rollout.vllm import vllm_engine

SEED, DRAWN = 10, 40
ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
BASE = (
    f"{MODEL}.enable_gradient_checkpointing=false", "critic.model.enable_gradient_checkpointing=false", "data.train_batch_size=8",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
)  # fmt: skip


def drawn() -> list[str]:
    """Each leaf has a random number by the seed and its name; those with the smallest are chosen. New leaves change no other."""
    return sorted(keys_of(PPOConfig).leaves, key=lambda leaf: Random(f"{SEED} {leaf}").random())[:DRAWN]


class EndedCall(SimpleNamespace):
    """A future that is done."""

    __hash__ = object.__hash__


@dataclass
class FakeWorkers:
    """Stand-in for workers. calls: method and arguments of each, and the limit in seconds."""

    world_size: int
    name: str = "workers"
    calls: list[tuple[tuple[Any, ...], float]] = field(default_factory=list)

    def register_mesh(self, name: str, mesh: Any) -> None:
        pass

    def call(self, call: Call[Any], *, mesh: str | None = None, replica: int | None = None, phase: str, limit: Limit) -> Any:
        words = (*(("run", call.role) if call.role else ()), call.method, *call.args)
        self.calls.append((words, limit.seconds))
        shares = [word for word in words if isinstance(word, Sharded)]
        replies: list[Any] = [None] * self.world_size
        if words[0].startswith("build_"):
            replies = [(rank, True) for rank in range(self.world_size)]
        elif "train_step" in words:
            replies = [{"flops": Metric.sum(0.0), "skipped_updates": Metric.max(0.0)}] * self.world_size
        elif "sync_weights" in words:
            replies = [{}] * self.world_size
        elif "advance" in words:
            replies = [call.args[0]]
        elif shares:
            replies = list(shares[0])
        return EndedCall(result=lambda: replies, ended=True, begun=0.0, replies=SimpleNamespace(ended={0: 0.0}))

    def asked(self, method: str) -> list[tuple[Any, ...]]:
        """The arguments of each call of ``method``."""
        return [words[words.index(method) + 1 :] for words, _ in self.calls if method in words]


class Trial:
    """The parts that a run would build from a configuration, as far as they are observed."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.workers = FakeWorkers(config.trainer.nnodes * config.trainer.n_gpus_per_node)

    @cached_property
    def assembly(self) -> Assembly:
        config = self.config
        workers = RunWorkers(dict.fromkeys(ROLES, cast(Any, self.workers)), None)
        lifecycle = RunLifecycle(config.trainer, Path(config.trainer.default_local_dir))
        return Assembly(config, placement_of(config, has_critic=wants_critic(config)), workers, lifecycle, reader(config))

    @cached_property
    def loop(self) -> Loop:
        unused: Any = None
        return self.assembly.loop(unused, None, unused, Start())

    def engine(self, role: str) -> tuple[TrainEngine, Any]:
        """The engine that workers are to build, and its loss."""
        getattr(self.assembly, role)()
        _, spec, loss = self.workers.asked("build_model")[-1]
        return make_engine(spec), loss and loss.resolve()


def step_batch() -> Batch:
    """Eight prompts of two tokens, two responses each."""
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, 9, (16,), generator=draw)
    batch = Batch(lengths, meta={"temperature": 1.0})
    total = batch.total_tokens
    mask = (batch.positions() > 1).float()
    noise = {name: torch.randn(total, generator=draw) * mask for name in ("advantages", "values", "returns")}
    log_probs = {name: -torch.rand(total, generator=draw) * 3 for name in ("log_probs", "old_log_probs", "ref_log_probs")}
    ids = torch.randint(3, 12, (total,), generator=draw)
    batch = batch.with_tokens(
        input_ids=ids,
        response_mask=mask,
        entropy_mask=entropy_mask(mask),
        rollout_log_probs=log_probs["old_log_probs"],
        **noise,
        **log_probs,
    )
    group = torch.arange(16) // 2
    return batch.with_rows(uid=group, group=group, prompt_length=torch.full((16,), 2), finished=torch.ones(16))


# Observations. Each follows from the configuration: computed numbers, requests, samples, events or errors.


def losses(trial: Trial) -> Any:
    """Token losses of the actor's loss."""
    loss, batch = ActorLoss(trial.assembly.actor_loss()), step_batch()
    if loss.needs_preparation:
        batch, _ = loss.prepare(batch, torch.Generator().manual_seed(0))
    batch = batch.with_tokens(loss_weight=batch.tokens["response_mask"])
    return loss(dict.fromkeys(loss.needs, batch.tokens["log_probs"]), batch)[0].tolist()


@cache
def updates(role: str) -> Callable[[Trial], Any]:
    """For each mini-batch: its micro-batches, its token weights, and the limit of the call in seconds."""

    def look(trial: Trial) -> Any:
        model, spec = getattr(trial.assembly, role)(), getattr(trial.assembly, f"{role}_update")()
        update(model, step_batch(), spec, 1, lambda batch, metrics: None)
        made = [(words, seconds) for words, seconds in trial.workers.calls if "train_step" in words]
        return [
            (words[4], seconds, [(part.lengths.tolist(), part.tokens["loss_weight"].tolist()) for part in words[3]])
            for words, seconds in made
        ]

    return look


@cache
def forwards(role: str) -> Callable[[Trial], Any]:
    """The micro-batches of a step's forward."""

    def look(trial: Trial) -> Any:
        actor = trial.assembly.actor()
        model = trial.assembly.ref() if role == "ref" else actor
        model.forward(step_batch(), ["log_probs"])
        ((_, cuts, *_),) = trial.workers.asked("forward")
        return cuts

    return look


def log_probs(trial: Trial) -> Any:
    """Log-probs of the actor's engine."""
    engine, _ = trial.engine("actor")
    found = engine.forward(step_batch(), (tuple(range(16)),), {"log_probs"})
    assert found is not None
    return found.tokens["log_probs"].tolist()


@cache
def learning(role: str) -> Callable[[Trial], Any]:
    """The metrics of two train steps on the role's engine; how often they compute a layer's MLP; then a sum of the weights."""

    def look(trial: Trial) -> Any:
        engine, loss = trial.engine(role)
        computed = []
        for name, module in engine._model.named_modules():  # type: ignore[attr-defined]
            if name.endswith("layers.0.mlp.gate_proj"):
                module.register_forward_hook(lambda *words: computed.append(1))
        batch = step_batch()
        batch = batch.with_tokens(loss_weight=batch.tokens["response_mask"] / 64)
        metrics = [plain_numbers(engine.train_step(batch, (tuple(range(16)),), loss)) for _ in range(2)]
        return metrics, len(computed), sum(float(tensor.double().square().sum()) for _, tensor in engine.export_weights())

    return look


def rollout_arguments(trial: Trial) -> Any:
    """The arguments of vLLM's engine."""
    trial.assembly.rollout()
    _, spec, _ = trial.workers.asked("build_rollout")[0]
    return vllm_engine.engine_arguments(spec)


def calls_when_a_model_has_worked(trial: Trial) -> Any:
    """The calls that workers get when responses are generated after another model had the GPUs."""
    rollout = trial.assembly.rollout()
    rollout.rest(rollout.groups[0])
    rollout.generate(step_batch(), Sampling(1.0, -1, 1.0, 4, (1,)), 2)
    return [words[:3] for words, _ in trial.workers.calls if words[0] == "run"]


def prompts(trial: Trial) -> Any:
    return [trial.assembly.data[i].text for i in range(len(trial.assembly.data))]


def validation_asks(trial: Trial) -> Any:
    """The number of prompts of the first call, and the sampling arguments."""
    found = []

    def answer(prompts: Any, n: int, sampling: Sampling, *rest: Any, **more: Any) -> Any:
        found.append((len(prompts), n, vllm_engine.sampling_arguments(request(0, (2,), **dataclasses.asdict(sampling)), 64)))
        raise CheckFailed("seen")

    trial.loop.sampler.generate_and_score = answer  # type: ignore[method-assign]
    with pytest.raises(CheckFailed, match="seen"):
        trial.loop.validation.run(0)
    return found


def reaction(trial: Trial) -> Any:
    """The reaction to a step in which every metric is bad, and its events."""
    bad = {"actor/entropy": 0.5, "actor/ppo_kl": 9.0, "training/rollout_log_probs_diff_mean": 9.0}
    bad |= {"response_length/clip_ratio": 0.5, "training/zero_signal_groups": 1.0, "rollout/staleness/mean": 0.5}
    output: list[Any] = []
    events: Any = SimpleNamespace(add=lambda *words: output.append(words))
    try:
        return react(trial.loop.trainer.health.alarms.evaluate(1, bad), events, 1), output
    except CheckFailed as error:
        return str(error)


def rolled_back(trial: Trial) -> Any:
    with pytest.raises(CheckFailed) as error:
        trial.loop.roll_back(Alarm("rollback", "too high", 0))
    return str(error.value)


def coefficient(trial: Trial) -> Any:
    """Coefficient of the KL in the reward, after a step far from the reference."""
    trial.loop.kl.update(9.0, 8)
    return trial.loop.kl.coefficient


def round_of_prompts(trial: Trial) -> Any:
    return [prompt.prompt_ids for prompt in trial.assembly.stream().draw()]


def flight(trial: Trial) -> Any:
    """Number of groups in flight, and whether replicas wait for each other."""
    policy = trial.assembly.batch_policy(trial.assembly.stream())
    assert isinstance(policy, PartialRollouts)
    return policy.in_flight, policy.in_step


def texts(trial: Trial) -> Any:
    """Texts of the auxiliary file."""
    assert trial.assembly.ptx is not None
    batch = trial.assembly.ptx.extend(step_batch().with_tokens(loss_weight=torch.ones(int(step_batch().lengths.sum()))))
    return batch.tokens["input_ids"].tolist()


def servers_score(trial: Trial) -> Any:
    """Scores of the reward model's server."""
    models = trial.assembly.reward_models()
    assert models is not None and isinstance(models.models[0].scorer, ServedModel)
    return models.models[0].scorer.servers.score([Response("sort_digits", "12", "12", {}, True, "", "<eos>")])


def score(trial: Trial) -> Any:
    with open_rewards(trial.config.reward) as rewards:
        return rewards.score([Response("mine", "#### 12", "12", {}, True, "", "<eos>")])


def seconds_to_load(trial: Trial) -> Any:
    trial.assembly.actor().load("somewhere")
    ((_, seconds),) = [(words, seconds) for words, seconds in trial.workers.calls if "load" in words]
    return seconds


def roles_updated(trial: Trial) -> Any:
    """The roles that are updated in the first step."""
    learnt: list[str] = []

    def together(parts: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        learnt.extend(parts)
        return {}

    trial.loop.together = together  # type: ignore[assignment]
    trial.loop.update(1, step_batch())
    return learnt


@dataclass(frozen=True)
class Row:
    """other: a different value of the leaf. look: the observation that changes. base: other leaves that the row needs, with their
    values. In both {task}, {first} and {second} stand for the entries of ``names``.
    """

    other: Any
    look: Callable[[Trial], Any]
    base: Mapping[str, Any] = field(default_factory=dict)


PPO = {"algorithm.adv_estimator": "gae"}
CLASSES = """
class Front:
    text = "12="

    def __init__(self, **of_the_run):
        pass

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return {"prompt": self.text, "data_source": "sort", "reward_model": {"ground_truth": "12"}}


class Back(Front):
    text = "21="
"""
VLLM = {f"{ROLLOUT}.name": "vllm"}
TWO_EPOCHS = {f"{ACTOR}.ppo_epochs": 2}
SERVED = {"reward.reward_model.enable": True, "reward.reward_model.urls": ["{first}"]}
PTX = {"data.ptx_files": ["{task}/sft.parquet"], "data.ptx_max_length": 32, "data.ptx_truncation": "right"}
ALARM = {"patience": 1, "bound": 0.1, "action": "warn"}
RINGING = ("entropy", "mismatch", "policy_kl", "staleness", "truncated", "zero_signal")
ALARMS = {f"alarms.{name}.{key}": value for name in RINGING for key, value in ALARM.items()}
RULE = {"reward.custom_reward_function.path": None, "reward.scorer": "exact_match"}
ROWS: Mapping[str, Row] = {
    f"{ACTOR}.clip_ratio_low": Row(0.9, losses, TWO_EPOCHS),
    f"{ACTOR}.fsdp_config.dtype": Row("bfloat16", log_probs),
    f"{ACTOR}.loss_agg_mode": Row("seq-mean-token-mean", updates("actor")),
    f"{ACTOR}.optim.betas": Row((0.5, 0.6), learning("actor")),
    f"{ACTOR}.policy_loss.kl_cov_ratio": Row(0.5, losses, {**TWO_EPOCHS, f"{ACTOR}.policy_loss.loss_mode": "kl_cov"}),
    f"{ACTOR}.ppo_mini_batch_size": Row(4, updates("actor")),
    f"{ACTOR}.use_dynamic_bsz": Row(True, updates("actor"), {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1}),
    f"{MODEL}.enable_gradient_checkpointing": Row(True, learning("actor")),
    f"{MODEL}.path": Row("{task}/other", log_probs),
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": Row(32, forwards("ref"), {f"{ACTOR}.use_kl_loss": True}),
    f"{ROLLOUT}.enforce_eager": Row(True, rollout_arguments, VLLM),
    f"{ROLLOUT}.free_cache_engine": Row(False, calls_when_a_model_has_worked),
    f"{ROLLOUT}.log_prob_micro_batch_size": Row(2, forwards("actor")),
    f"{ROLLOUT}.max_model_len": Row(50, rollout_arguments, VLLM),
    f"{ROLLOUT}.val_kwargs.do_sample": Row(True, validation_asks, {f"{ROLLOUT}.val_kwargs.temperature": 0.7}),
    f"{ROLLOUT}.val_kwargs.top_k": Row(3, validation_asks),
    "alarms.entropy.bound": Row(0.9, reaction, ALARMS),
    "alarms.max_rollbacks": Row(0, rolled_back),
    "alarms.mismatch.action": Row("stop", reaction, ALARMS),
    "alarms.policy_kl.action": Row("rollback", reaction, ALARMS),
    "alarms.staleness.bound": Row(0.9, reaction, ALARMS),
    "alarms.truncated.bound": Row(0.9, reaction, ALARMS),
    "alarms.zero_signal.action": Row("stop", reaction, ALARMS),
    "algorithm.kl_ctrl.type": Row("adaptive", coefficient),
    "async_training.clock": Row("wall", flight, {"async_training.mode": "one_step_off"}),
    "async_training.oversubmit": Row(2.0, flight, {"async_training.mode": "partial"}),
    "critic.model.lora_alpha": Row(64.0, learning("critic"), {**PPO, "critic.model.lora_rank": 2}),
    "critic.model.tiled_mlp.num_shards": Row(2, learning("critic"), {**PPO, "critic.model.tiled_mlp.enabled": True}),
    "critic.optim.lr_warmup_steps": Row(9, learning("critic"), {**PPO, "critic.optim.lr_warmup_steps": 0}),
    "critic.optim.lr_warmup_steps_ratio": Row(1.0, learning("critic"), {**PPO, "critic.optim.lr_warmup_steps": -1}),
    "critic.ppo_max_token_len_per_gpu": Row(32, updates("critic"), PPO),
    "critic.ppo_mini_batch_size": Row(4, updates("critic"), PPO),
    "data.custom_cls.name": Row("Back", prompts, {"data.custom_cls.path": "{task}/classes.py", "data.custom_cls.name": "Front"}),
    "data.gen_batch_size": Row(4, round_of_prompts, {"algorithm.filter_groups.enable": True}),
    "data.ptx_max_length": Row(9, texts, PTX),
    "reward.reward_model.urls": Row(["{second}"], servers_score, SERVED),
    "reward.scorer": Row("gsm8k", score, RULE),
    "timeouts.load": Row(7.0, seconds_to_load),
    "timeouts.update": Row(7.0, updates("actor")),
    "trainer.critic_warmup": Row(5, roles_updated, PPO),
}


class Rewards(Server):
    """Gives every response the same reward."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def reply_to(self, n: int, body: Any) -> Reply:
        return 200, {"rewards": [self.value] * len(body["query"])}, 0.0


@pytest.fixture(scope="module")
def names(no_process_left_behind: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """The names of the table: a task and two reward servers. A process group of this process alone is open meanwhile."""
    task = make_task(tmp_path_factory.mktemp("task"), train_size=16, test_size=4, sft_size=16)
    tiny_model.main([f"--save_dir={task / 'other'}", "--seed=2"])
    (task / "run").mkdir()
    (task / "classes.py").write_text(CLASSES)
    with one_rank(task), Rewards(1.0) as first, Rewards(2.0) as second, first.listening(), second.listening():
        yield {"task": str(task)} | {
            name: f"http://127.0.0.1:{server.server_port}" for name, server in {"first": first, "second": second}.items()
        }


@pytest.fixture(scope="module")
def base(names: Mapping[str, str]) -> PPOConfig:
    task = Path(names["task"])
    return compose("ppo_trainer", PPOConfig, ppo_arguments(task, task / "run", *BASE))


def with_leaf(node: Any, leaf: str, value: Any, names: Mapping[str, str]) -> Any:
    """A copy in which only this leaf differs: leaves that follow it keep their values."""
    name, _, below = leaf.partition(".")
    if below:
        return dataclasses.replace(node, **{name: with_leaf(getattr(node, name), below, value, names)})
    texts = [text.format(**names) for text in value] if isinstance(value, list) else value
    return dataclasses.replace(node, **{name: texts.format(**names) if isinstance(texts, str) else texts})


def test_table_has_the_leaves_chosen_by_the_seed() -> None:
    assert sorted(ROWS) == sorted(drawn())


@pytest.fixture(scope="module")
def plain(names: Mapping[str, str], base: PPOConfig) -> Callable[[Row], tuple[PPOConfig, Any]]:
    """The starting configuration of a row and its observation, which is the same when repeated."""
    seen: dict[Any, tuple[PPOConfig, Any]] = {}

    def of(row: Row) -> tuple[PPOConfig, Any]:
        key = row.look, repr(row.base)
        if key not in seen:
            config = reduce(lambda config, item: with_leaf(config, *item, names), row.base.items(), base)
            seen[key] = config, row.look(Trial(config))
            assert row.look(Trial(config)) == seen[key][1], "the observation is not repeatable"
        return seen[key]

    return of


@pytest.mark.parametrize("leaf", ROWS)
def test_other_value_of_a_leaf_changes_its_observation(
    leaf: str, names: Mapping[str, str], plain: Callable[[Row], tuple[PPOConfig, Any]]
) -> None:
    row = ROWS[leaf]
    config, before = plain(row)
    changed = with_leaf(config, leaf, row.other, names)
    assert changed != config, "the value of the table is the default"
    assert row.look(Trial(changed)) != before
