"""Complete runs whose batches are generated ahead, in a pool of its own: the numbers of a loop without threads, resumed, in wall
clock, replayed, and with replicas that die.
"""

import re
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import trainer.rollout.remote_rollout as remote_rollout
from tests.faults import reward_that
from tests.runs import make_task, metrics_of, ppo_arguments, repeatable, run_ppo
from tests.threads import use_threads
from tests.trainer.ppo.test_loop_stops import events_of
from tests.trainer.ppo.test_replay import again
from tests.trainer.rollout.test_remote_rollout_runs import Killer
from trainer import main_ppo
from trainer.ppo.loop import Loop
from trainer.rollout.ahead import RolloutsAhead
from trainer.rollout.partial import TokenCounts
from trainer.rollout.remote_rollout import RolloutFlow

AHEAD = (
    "algorithm=grpo", "placement=split", "trainer.backend=ray", "trainer.n_gpus_per_node=2", "data.train_batch_size=4",
    "actor_rollout_ref.actor.use_kl_loss=false", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "algorithm.rollout_correction.rollout_is=token", "actor_rollout_ref.rollout.n=2", "data.max_response_length=24",
    "trainer.total_training_steps=5", "trainer.save_freq=1",
)  # fmt: skip
MODES = {
    "one step off": ("async_training.mode=one_step_off",),
    "staleness 2": ("async_training.mode=async", "async_training.max_staleness=2"),
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"), train_size=16, sft_size=8)


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_rollout, "STEPS", 4)


@pytest.fixture
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the pools are threads of this process or processes of Ray."""
    if request.param == "threads":
        use_threads(monkeypatch)
    return request.param


def on_threads(*parameters: Any) -> list[Any]:
    """The same on processes is soak."""
    return [
        pytest.param(parameter, workers, marks=[pytest.mark.soak] if workers == "processes" else [])
        for parameter in parameters
        for workers in ("threads", "processes")
    ]


def reference_fit(loop: Loop) -> None:
    """The loop without a thread: what is generated ahead is generated before the update, one after the other."""
    loop.begin()
    trainer, policy = loop.trainer, loop.sampler.policy
    assert isinstance(policy, RolloutsAhead)
    for step in trainer.steps():
        with trainer.phases("step"):
            batch = loop.next_batch(step)
            assert batch is not None
            if step == trainer.total_steps:
                policy.release()
            else:
                counts = TokenCounts()
                for _ in policy.generate_ahead(loop.sampler, step + 1, loop.prompts, counts):
                    pass
                trainer.metrics["rollout/recomputed_tokens"] = float(counts.recomputed)
            batch |= loop.log_probs_and_values(batch)
            batch |= loop.correction(batch)
            batch |= loop.advantages(batch)
            batch |= loop.loss_mask(batch)
            loop.response_log.record(step, batch, loop.actor)
            loop.update(step, batch)
            if loop.syncs(step):
                loop.sync_weights(step)
        loop.after(step, batch)


@pytest.mark.parametrize(
    ("mode", "workers"),
    [
        ("staleness 2", "threads"),
        ("one step off", "threads"),
        pytest.param("staleness 2", "processes", marks=pytest.mark.soak),
        pytest.param("one step off", "processes", marks=pytest.mark.soak),
    ],
    indirect=["workers"],
)
@pytest.mark.usefixtures("workers")
def test_run_has_the_numbers_of_a_sequential_loop_and_resumes_bitwise(
    mode: str, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def options(name: str) -> tuple[str, ...]:
        return (*AHEAD, *MODES[mode], f"trainer.rollout_data_dir={tmp_path / name / 'rollouts'}")

    whole = run_ppo(task, tmp_path / "whole", *options("whole"))
    staleness = [step["rollout/staleness/max"] for step in whole]
    for step in whole:
        assert sum(value for name, value in step.items() if re.fullmatch(r"rollout/staleness/\d+", name)) == pytest.approx(1)
        # Nothing is generated ahead in the last step, so no engine waits.
        assert ("perf/rollout_idle" in step) == ("timing_s/rollout_idle" in step) == (step is not whole[-1])
        if step is not whole[-1]:
            assert step["perf/rollout_idle"] == pytest.approx(step["timing_s/rollout_idle"] / step["timing_s/step"])
            assert step["perf/trainer_idle"] == pytest.approx(step["timing_s/gen"] / step["timing_s/step"])
    assert staleness[:2] == [0, 1] and max(staleness) == (1 if mode == "one step off" else 2)
    groups = []
    for step in range(1, 6):
        dump = load_file(tmp_path / "whole" / "rollouts" / f"step_{step}.safetensors")
        versions = dump["tokens.weight_version"][dump["tokens.response_mask"].bool()]
        assert step - 1 - int(versions.min()) == staleness[step - 1]
        assert mode != "one step off" or versions.unique().tolist() == [max(0, step - 2)]
        groups += dump["rows.group"].unique().tolist()
    assert len(set(groups)) == len(groups) == 20, "every prompt is trained on once"
    assert mode != "one step off" or sorted(groups) == list(range(20))

    with monkeypatch.context() as patched:
        use_threads(patched)
        patched.setattr(Loop, "fit", reference_fit)
        assert repeatable(run_ppo(task, tmp_path / "sequential", *options("sequential"))) == repeatable(whole)
    # The batch of step 4 is in the checkpoint: the weights that sampled it are gone.
    path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'whole' / 'global_step_3'}")
    assert repeatable(run_ppo(task, tmp_path / "resumed", *options("resumed"), *path)) == repeatable(whole[3:])


def versions_of(run_dir: Path, step: int) -> list[int]:
    """Weight versions of the tokens that a step trained on."""
    dump = load_file(run_dir / "rollouts" / f"step_{step}.safetensors")
    return dump["tokens.weight_version"][dump["tokens.response_mask"].bool()].unique().tolist()


def groups_of(run_dir: Path, steps: int) -> list[int]:
    dumps = (load_file(run_dir / "rollouts" / f"step_{step}.safetensors") for step in range(1, steps + 1))
    return [group for dump in dumps for group in dump["rows.group"].unique().tolist()]


@pytest.fixture
def short_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generation during an update has three ticks until the update ends, so that it interrupts responses."""
    ended, ticks = threading.Event(), Counter[int]()
    update, sync_weights, start = Loop.update, Loop.sync_weights, RolloutFlow.start

    def update_and_end(loop: Loop, *of: Any) -> None:
        update(loop, *of)
        ended.set()

    def sync_and_begin(loop: Loop, step: int) -> None:
        sync_weights(loop, step)
        ended.clear()

    def start_at_most_three(flow: RolloutFlow) -> bool:
        ticks[id(flow)] += 1
        if threading.current_thread().name == "generation ahead" and ticks[id(flow)] > 3:
            assert ended.wait(120.0)
        return start(flow)

    monkeypatch.setattr(Loop, "update", update_and_end)
    monkeypatch.setattr(Loop, "sync_weights", sync_and_begin)
    monkeypatch.setattr(RolloutFlow, "start", start_at_most_three)


@pytest.mark.usefixtures("short_updates", "workers")
@pytest.mark.parametrize(
    ("mode", "resumes", "workers"),
    [
        ("staleness 2", False, "threads"),
        *(pytest.param(mode, True, "processes", marks=pytest.mark.soak) for mode in MODES),
    ],
    indirect=["workers"],
)
def test_wall_clock_run_is_replayed_bitwise(
    mode: str, resumes: bool, task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The update of a batch with tokens of several versions, also in a resumed run. No token is staler than the bound."""
    bound = 1 if mode == "one step off" else 2

    def options(name: str) -> tuple[str, ...]:
        dumps = f"trainer.rollout_data_dir={tmp_path / name / 'rollouts'}"
        return (*AHEAD, *MODES[mode], "async_training.clock=wall", "trainer.total_training_steps=4", dumps)

    found = run_ppo(task, tmp_path / "run", *options("run"))
    assert max(step["rollout/staleness/max"] for step in found) == bound
    groups = groups_of(tmp_path / "run", 4)
    assert len(set(groups)) == len(groups) == 16, "every prompt is trained on once"
    replayed = "run"
    if resumes:
        path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'run' / 'global_step_2'}")
        found = run_ppo(task, tmp_path / "resumed", *options("resumed"), *path)
        assert [step["training/global_step"] for step in found] == [3, 4]
        assert max(step["rollout/staleness/max"] for step in found) <= bound
        replayed = "resumed"
    versions = versions_of(tmp_path / replayed, 4)
    assert len(versions) > 1 and 4 - 1 - versions[0] <= bound
    capfd.readouterr()
    assert again(task, tmp_path / replayed, options(replayed), "train", 4) == 0
    assert capfd.readouterr().out.strip().endswith("all equal")


@dataclass
class OnceDuringAnUpdate:
    """Contains the third number that is asked for by the thread that generates ahead."""

    asked: int = 0

    def __contains__(self, number: object) -> bool:
        if threading.current_thread().name != "generation ahead":
            return False
        self.asked += 1
        return self.asked == 3


@pytest.mark.soak
@pytest.mark.parametrize("clock", ["logical", "wall"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_replica_that_dies_during_an_update_is_replaced_after_it_without_a_restart(
    replicas: int, mode: str, clock: str, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, steps = tmp_path / "run", 5
    pools = {"actor": 1, "rollout": replicas}
    killer = Killer(monkeypatch, run_dir, "advance", OnceDuringAnUpdate(), "rollout" if replicas == 1 else "rollout.1")
    found = run_ppo(
        task,
        run_dir,
        *AHEAD,
        *MODES[mode],
        *(f"placement.pools.{name}={{nodes: 1, gpus: {gpus}, fraction: 1.0}}" for name, gpus in pools.items()),
        f"trainer.n_gpus_per_node={replicas + 1}",
        f"async_training.clock={clock}",
        f"trainer.rollout_data_dir={run_dir / 'rollouts'}",
        "trainer.max_restarts=1",
        "actor_rollout_ref.rollout.max_num_seqs=2",
    )
    assert len(killer.killed) == 1 and len(found) == steps
    assert max(step["rollout/staleness/max"] for step in found) <= (1 if mode == "one step off" else 2)
    groups = groups_of(run_dir, steps)
    assert len(set(groups)) == len(groups) == 4 * steps, "every prompt is trained on once"
    (step, kind, text), (_, then, replaced) = events_of(run_dir)
    assert (kind, then) == ("lost", "replaced") and step >= 1
    assert re.match(rf"replica {replicas - 1} of rollout generates nothing until .*: process {killer.killed[0]} died", text)
    assert replaced.startswith(f"replica {replicas - 1} of rollout was replaced, 1 of 1: ")
    # What the replica had is sampled by the weights after the update: directly if no other one generated it.
    assert replicas == 2 or versions_of(run_dir, step + 1)[-1] == step


@pytest.mark.soak
@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(("prox_logp", "workers"), on_threads("loglinear", "snapshot"), indirect=["workers"])
def test_run_with_another_proximal_policy_repeats_and_resumes_bitwise(prox_logp: str, task: Path, tmp_path: Path) -> None:
    """snapshot: with a sync after every second step only, which is when checkpoints are written."""
    options = (
        *AHEAD, *MODES["staleness 2"], f"async_training.prox_logp={prox_logp}", "trainer.total_training_steps=4",
        "trainer.save_freq=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.optim.lr=0.01",
    )  # fmt: skip
    if prox_logp == "snapshot":
        options = (*options, "async_training.trigger_parameter_sync_step=2")
    whole = run_ppo(task, tmp_path / "whole", *options)
    path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'whole' / 'global_step_2'}")
    resumed = run_ppo(task, tmp_path / "resumed", *options, *path)
    # Each sync verifies other lines than the one before it: which ones depends on the number of syncs of a process.
    for step in (*whole, *resumed):
        step.pop("rollout/verified_bytes", None)
    assert repeatable(resumed) == repeatable(whole[2:])
    assert ("timing_s/old_log_prob" in whole[0]) == (prox_logp == "snapshot")
    assert all(step["rollout_corr/rollout_is_mean"] > 0 for step in whole)
    if prox_logp == "snapshot":
        recomputed = run_ppo(task, tmp_path / "recomputed", *options, "async_training.prox_logp=recompute")
        same = [a == b for a, b in zip(repeatable(recomputed), repeatable(whole), strict=True)]
        assert same[0] and not same[1], "the first step's weights are those of the sync, the second step's are not"


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(("flight", "workers"), on_threads(("keep", "keep"), ("finish", "recompute")), indirect=["workers"])
def test_weights_that_are_synced_every_second_step_while_requests_run(
    flight: tuple[str, str], task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Syncs after steps 2, 3 (checkpoint), 4 and 6: a resumed run continues between two syncs."""

    def options(name: str) -> tuple[str, ...]:
        dumps = f"trainer.rollout_data_dir={tmp_path / name / 'rollouts'}"
        settings = ("mode=async", "max_staleness=4", "trigger_parameter_sync_step=2", "oversubmit=3")
        settings += (f"pause={flight[0]}", f"kv_cache={flight[1]}")
        steps = ("trainer.total_training_steps=6", "trainer.save_freq=3")
        return (*AHEAD, *(f"async_training.{setting}" for setting in settings), *steps, dumps)

    whole = run_ppo(task, tmp_path / "whole", *options("whole"))
    assert max(step["rollout/staleness/max"] for step in whole) <= 4
    assert [int(step["training/global_step"]) for step in whole if "timing_s/sync" in step] == [2, 3, 4, 6]
    assert [step["training/global_step"] for step in whole if step["timing_s/trainer_stall"] > 0] == [1, 2, 3, 4, 5, 6]
    mixed = 0
    for step in range(1, 7):
        dump = load_file(tmp_path / "whole" / "rollouts" / f"step_{step}.safetensors")
        lengths, mask = dump["lengths"].tolist(), dump["tokens.response_mask"].bool()
        columns = zip(dump["tokens.weight_version"].split(lengths), mask.split(lengths), strict=True)
        versions = [{*row[trained].tolist()} for row, trained in columns]
        assert {0, 2, 3, 4} >= set().union(*versions)
        mixed += sum(len(of_row) > 1 for of_row in versions)
    assert (mixed > 0) == (flight[0] == "keep")

    if flight[0] == "keep":
        with monkeypatch.context() as patched:
            patched.setattr(Loop, "fit", reference_fit)
            assert repeatable(run_ppo(task, tmp_path / "sequential", *options("sequential"))) == repeatable(whole)
    path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'whole' / 'global_step_3'}")
    resumed = run_ppo(task, tmp_path / "resumed", *options("resumed"), *path)
    # Each sync verifies other lines than the one before it: which ones depends on the number of syncs of a process.
    for step in (*whole, *resumed):
        step.pop("rollout/verified_bytes", None)
    assert repeatable(resumed) == repeatable(whole[3:])


@pytest.mark.parametrize(("pause", "every"), [("keep", 2), ("abort", 3)], ids=["at a sync", "between two"])
def test_stop_whose_step_is_abandoned_keeps_what_the_engines_sampled(
    pause: str, every: int, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rewards of step 3 hang when the signal comes. A checkpoint of step 2 is written, also without a sync after step 2."""
    use_threads(monkeypatch)
    monkeypatch.setattr("trainer.cluster.watchdog.HURRIED", 0.2)
    settings = ("mode=async", "max_staleness=4", f"trigger_parameter_sync_step={every}", "oversubmit=3", f"pause={pause}")
    flight = (
        *AHEAD,
        *(f"async_training.{setting}" for setting in settings),
        "trainer.total_training_steps=4",
        "trainer.save_freq=-1",
    )
    flight = (*flight, "reward.num_workers=0")
    whole = run_ppo(task, tmp_path / "whole", *flight, reward_that(tmp_path / "plain", "pass"))
    hangs = reward_that(tmp_path, "n == 19 and (os.kill(os.getpid(), signal.SIGTERM), time.sleep(100))")
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *flight, hangs)) == 143
    assert len(metrics_of(tmp_path / "run")) == 2 and (tmp_path / "run" / "global_step_2").is_dir()
    what = {2: "requests were taken from the engines", 3: "the resumed run syncs weights here"}[every]
    texts = [text for _, kind, text in events_of(tmp_path / "run") if kind == "left"]
    assert texts[0] == "step 3: a signal to stop, and the rewards did not come" and texts[1].startswith(f"{what}; a run that")
    resumed = run_ppo(task, tmp_path / "run", *flight, hangs)
    same = ("rollout/staleness/mean", "rollout/age/mean", "response_length/mean", "critic/score/mean")
    for a, b in zip(whole, resumed, strict=True):
        # Step 3 was complete at the signal; without the sync, step 4 has tokens of newer weights.
        if every == 2 or a["training/global_step"] < 4:
            assert [a[name] for name in same] == [b[name] for name in same]


@pytest.mark.usefixtures("short_updates")
def test_stop_in_wall_clock_time_keeps_the_groups_of_the_step_that_is_abandoned(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines have requests of step 2 when the batch of step 3 is completed."""
    use_threads(monkeypatch)
    monkeypatch.setattr("trainer.cluster.watchdog.HURRIED", 0.2)
    settings = ("mode=async", "clock=wall", "max_staleness=4", "trigger_parameter_sync_step=2", "oversubmit=1.5", "pause=keep")
    flight = (
        *AHEAD,
        *(f"async_training.{setting}" for setting in settings),
        "trainer.total_training_steps=4",
        "trainer.save_freq=-1",
    )
    flight = (*flight, "reward.num_workers=0", f"trainer.rollout_data_dir={tmp_path / 'run' / 'rollouts'}")
    hangs = reward_that(tmp_path, "n == 19 and (os.kill(os.getpid(), signal.SIGTERM), time.sleep(100))")
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *flight, hangs)) == 143
    assert len(metrics_of(tmp_path / "run")) == 2 and (tmp_path / "run" / "global_step_2").is_dir()
    flow = load_file(tmp_path / "run" / "global_step_2" / "flow" / "groups.safetensors")
    assert int((flow["tick"] >= 0).sum()) >= 4, "the batch of step 3 was complete"
    assert len(run_ppo(task, tmp_path / "run", *flight, hangs)) == 4
    trained = groups_of(tmp_path / "run", 4)
    assert len(trained) == len({*trained}) == 16
