"""Batches that are generated ahead, and partial rollouts, with every other feature of a run. Pools are threads of this process.

For each of them: the numbers of a loop that generates and trains one after the other, and of a run that was resumed.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import trainer.rollout.remote_rollout as remote_rollout
from data_preprocess import tiny_model
from tests.faults import loss_that
from tests.reward_models import make_reward_model
from tests.runs import make_task, repeatable, run_ppo
from tests.threads import use_threads
from tests.trainer.ppo.test_loop_stops import events_of
from tests.trainer.rewards.server import Reply, Server
from tests.trainer.rollout.test_ahead_runs import reference_fit
from trainer.harness import Trainer
from trainer.ppo.loop import Loop
from trainer.resilience.alarms import Alarm
from trainer.rollout.sampler import Sampler
from workers.batch import Batch

ACTOR = "actor_rollout_ref.actor"
SMALL = (
    "algorithm=grpo", "data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2",
    "data.max_response_length=24", "trainer.total_training_steps=4", "trainer.save_freq=2",
    "algorithm.rollout_correction.rollout_is=token", "trainer.backend=ray", "placement=custom",
)  # fmt: skip
MODES = {
    "partial": ("async_training.mode=partial", "async_training.max_age=2"),
    "one_step_off": ("async_training.mode=one_step_off",),
    "async": ("async_training.mode=async", "async_training.max_staleness=2"),
}
BOUND = {"partial": 2, "one_step_off": 1, "async": 2}
PPO = ("algorithm=ppo", "critic.normalize_targets=true", "critic.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2")
KL = (
    f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.05", "algorithm.kl_ctrl.horizon=100",
)  # fmt: skip
LORA = ("actor_rollout_ref.model.lora_rank=4", f"{ACTOR}.optim.lr=1e-2")
MODEL = "reward.models.judge={{path: {task}/judge, weight: 0.5, normalize: running}}"
Steps = Sequence[dict[str, float]]


def pools(**roles: str) -> tuple[str, ...]:
    """The actor and the engine in pools of their own; ``roles`` in others, or in one of these."""
    of_role = {"actor": "actor", "rollout": "rollout"} | roles
    names = dict.fromkeys(of_role.values())
    return (
        f"trainer.n_gpus_per_node={len(names)}", *(f"placement.roles.{role}={name}" for role, name in of_role.items()),
        *(f"placement.pools.{name}={{nodes: 1, gpus: 1, fraction: 1.0}}" for name in names),
    )  # fmt: skip


@dataclass(frozen=True)
class Feature:
    """options: in which {task} and {url} are replaced. holds: of the metrics of a run, that the feature was at work."""

    options: tuple[str, ...]
    holds: Callable[[Steps], bool]
    places: tuple[str, ...] = pools()


def moves(name: str) -> Callable[[Steps], bool]:
    """Whether a metric is there in each step, and changes."""
    return lambda steps: len({step[name] for step in steps}) > 1


FEATURES = {
    "LoRA": Feature((*LORA, *KL), moves("actor/kl_loss")),
    "critic": Feature(PPO, moves("critic/vf_loss")),
    "reference": Feature(KL, moves("actor/reward_kl_penalty")),
    "critic and reference apart": Feature((*PPO, *KL), moves("critic/vf_loss"), pools(critic="value", ref="value")),
    "reward model apart": Feature((MODEL,), moves("reward/judge/mean"), pools(reward="reward")),
    "reward model with the trainer": Feature((MODEL,), moves("reward/judge/mean"), pools(reward="actor")),
    "reward model on a server": Feature(("reward.models.judge={{urls: ['{url}']}}",), moves("reward/judge/mean")),
    "greedy baselines": Feature(("algorithm.adv_estimator=remax",), moves("actor/grad_norm")),
    "megatron": Feature((f"{ACTOR}.strategy=megatron",), moves("actor/grad_norm")),
    "two replicas": Feature(
        ("trainer.n_gpus_per_node=3", "placement.pools.rollout.gpus=2", "actor_rollout_ref.rollout.max_num_seqs=4"),
        moves("actor/grad_norm"),
    ),
}
VLLM = ("rollout=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")
SGLANG = ("rollout=sglang", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")
ADAPTER = ("actor_rollout_ref.rollout.lora_sync=adapter", "actor_rollout_ref.model.lora_alpha=32")
FEATURES |= {
    "vLLM": Feature(VLLM, moves("actor/grad_norm")),
    "LoRA, the adapter alone to vLLM": Feature((*VLLM, *LORA, *ADAPTER), moves("actor/grad_norm")),
}
QUICK = {("critic and reference apart", "async")}
ASYNC_IS_QUICK = [*(pytest.param(mode, marks=pytest.mark.soak) for mode in ("partial", "one_step_off")), "async"]


class Sevens(Server):
    """A reward model: the number of sevens in the conversation."""

    def reply_to(self, n: int, body: Any) -> Reply:
        return 200, {"rewards": [float(text.count("7")) for text in body["query"]]}, 0.0


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_task(tmp_path_factory.mktemp("sort_digits"), train_size=32, sft_size=8)
    # Heads of size 32: vLLM has no smaller ones on CPU.
    shutil.rmtree(folder / "base")
    tiny_model.main([f"--save_dir={folder / 'base'}", "--num_attention_heads=3", "--num_key_value_heads=1"])
    make_reward_model(folder / "judge", seed=1)
    return folder


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = Sevens()
    with server.listening():
        yield f"http://127.0.0.1:{server.server_port}/"


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
    monkeypatch.setattr(remote_rollout, "STEPS", 4)


def run(task: Path, run_dir: Path, *options: str) -> list[dict[str, float]]:
    return run_ppo(task, run_dir, *SMALL, *options, f"trainer.rollout_data_dir={run_dir / 'rollouts'}")


def sequential(task: Path, run_dir: Path, *options: str) -> list[dict[str, float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "fit", reference_fit)
        return run(task, run_dir, *options)


def resumed(task: Path, run_dir: Path, whole: Path, *options: str) -> list[dict[str, float]]:
    """From the checkpoint of step 2 of the run in ``whole``."""
    path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole / 'global_step_2'}")
    return run(task, run_dir, *options, *path)


def groups_and_staleness(run_dir: Path) -> tuple[list[list[int]], list[int]]:
    """By step: ordinals of the prompts, and the greatest staleness of a token."""
    groups, staleness = [], []
    for step in range(1, 1 + len(list((run_dir / "rollouts").glob("*.safetensors")))):
        dump = load_file(run_dir / "rollouts" / f"step_{step}.safetensors")
        groups.append(dump["rows.group"].unique().tolist())
        versions = dump["tokens.weight_version"][dump["tokens.response_mask"].bool()]
        staleness.append(step - 1 - int(versions.min()))
    return groups, staleness


@pytest.mark.parametrize(
    ("feature", "mode"),
    [
        pytest.param(feature, mode, marks=[] if (feature, mode) in QUICK else pytest.mark.soak)
        for feature in FEATURES
        for mode in MODES
    ],
)
@pytest.mark.filterwarnings(r"ignore:::megatron\.")
@pytest.mark.filterwarnings(r"ignore:`torch\.distributed:FutureWarning")
def test_feature_has_the_numbers_of_a_sequential_loop_and_resumes_bitwise(
    feature: str, mode: str, task: Path, url: str, tmp_path: Path
) -> None:
    one = FEATURES[feature]
    options = (*(word.format(task=task, url=url) for word in one.options), *one.places, *MODES[mode])
    if feature == "two replicas":  # its sizes replace those of the pools
        options = (*one.places, *one.options, *MODES[mode])
    whole = run(task, tmp_path / "whole", *options)
    assert len(whole) == 4 and one.holds(whole[1:])
    groups, staleness = groups_and_staleness(tmp_path / "whole")
    assert [len(of_step) for of_step in groups] == [4] * 4 and len({group for of_step in groups for group in of_step}) == 16
    assert 1 <= max(staleness) <= BOUND[mode]
    if mode != "partial":
        assert staleness == [step["rollout/staleness/max"] for step in whole]
        assert repeatable(sequential(task, tmp_path / "sequential", *options)) == repeatable(whole)
    assert repeatable(resumed(task, tmp_path / "resumed", tmp_path / "whole", *options)) == repeatable(whole[2:])


@pytest.mark.soak
def test_bound_of_one_is_one_step_off_and_bound_of_zero_is_synchronous(task: Path, tmp_path: Path) -> None:
    def steps(mode: str, *options: str) -> list[dict[str, float]]:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        return repeatable(run(task, folder, *pools(), f"async_training.mode={mode}", *options))

    assert steps("async", "async_training.max_staleness=1") == steps("one_step_off")
    assert steps("async", "async_training.max_staleness=0") == steps("null")


@pytest.mark.parametrize("mode", [*(pytest.param(mode, marks=pytest.mark.soak) for mode in ("partial", "one_step_off")), "async"])
def test_validation_between_the_steps_changes_nothing_and_sees_the_weights_of_the_step(
    mode: str, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, seen = Sampler.generate_and_score, list[tuple[int, list[int]]]()

    def recorded(sampler: Sampler, *words: Any, step: int, **options: Any) -> Batch:
        batch = generate(sampler, *words, step=step, **options)
        seen.append((step, batch.tokens["weight_version"][batch.tokens["response_mask"].bool()].unique().tolist()))
        return batch

    monkeypatch.setattr(Sampler, "generate_and_score", recorded)
    options = (*pools(), *MODES[mode], "actor_rollout_ref.rollout.val_kwargs.do_sample=true")
    validated = run(task, tmp_path / "validated", *options, "trainer.test_freq=1", "trainer.val_before_train=true")
    assert seen == [(step, [step]) for step in range(5)]
    tested = {name for name in validated[-1] if name.startswith("val")}
    found = [{name: value for name, value in step.items() if name not in tested} for step in repeatable(validated[1:])]
    assert len(tested) > 2 and found == repeatable(run(task, tmp_path / "plain", *options))


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["partial", "one_step_off", "async"])
def test_run_restarts_after_a_failed_update_with_the_same_numbers(mode: str, task: Path, tmp_path: Path) -> None:
    options = (*pools(), *MODES[mode], "trainer.checkpoint.async_save=false")
    whole = run(task, tmp_path / "whole", *options, loss_that(tmp_path / "loss", "pass"))
    fault = loss_that(tmp_path / "fault", "if n == 4: raise RuntimeError('a bolt fell off')")
    steps = run(task, tmp_path / "run", *options, fault, "trainer.max_restarts=1")
    assert repeatable(steps) == repeatable(whole)
    ((step, kind, text),) = events_of(tmp_path / "run")
    assert (step, kind) == (3, "restart") and text.endswith("a bolt fell off; it resumes from step 2")


@pytest.mark.parametrize("mode", ASYNC_IS_QUICK)
def test_rollback_trains_on_no_prompt_of_the_discarded_steps(
    mode: str, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Responses that were in flight at the checkpoint are prompts of the discarded step."""
    complete, seen = Trainer.complete, list[list[int]]()

    def complete_or_alarm(trainer: Trainer, step: int) -> Alarm | None:
        found = complete(trainer, step)
        seen.append(groups_and_staleness(tmp_path)[0][step - 1])
        return Alarm("rollback", "the policy collapsed", 2) if len(seen) == 3 else found

    monkeypatch.setattr(Trainer, "complete", complete_or_alarm)
    steps = run(task, tmp_path, *pools(), *MODES[mode], "trainer.total_training_steps=5")
    assert [step["training/global_step"] for step in steps] == [1, 2, 3, 4, 5]
    assert [step.get("training/rollbacks", 0.0) for step in steps] == [0, 0, 1, 1, 1]
    trained = [group for of_step in seen for group in of_step]
    assert len(seen) == 6 and len(set(trained)) == len(trained) == 24, "no prompt is trained on twice"
    _, staleness = groups_and_staleness(tmp_path)
    assert staleness[2] == 0, "of the restored weights"
    assert max(staleness) <= BOUND[mode]
