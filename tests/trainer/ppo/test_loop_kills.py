"""Runs killed at any moment and restarted are bitwise identical to uninterrupted runs. Kills of runs on Ray are in soak."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from tests.kills import BEGIN, Kill, Outcome, run_and_kill
from tests.runs import make_task, metrics_of, ppo_arguments, repeatable, run_ppo
from tests.warm import warm_python
from trainer.checkpoint.resume import find_latest
from trainer.run.run_dir import ROLLOUTS, SAMPLES, checkpoint_steps

# Few and short responses, often equal: groups without a difference are sampled again. Epochs end during the run.
SMALL = (
    "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=3",
    "actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.actor.shuffle=true", "algorithm.filter_groups.enable=true",
    "data.max_response_length=4", "reward.shaping.normalize=running", "trainer.val_before_train=true",
    "trainer.max_actor_ckpt_to_keep=2", "trainer.max_critic_ckpt_to_keep=2",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true", "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
)  # fmt: skip
PPO = (
    "algorithm=ppo", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.kl_coef=0.05",
    "algorithm.kl_ctrl.horizon=100", "critic.normalize_targets=true",
)  # fmt: skip
GRPO = ("algorithm=grpo", "actor_rollout_ref.actor.use_kl_loss=true")
LORA = ("actor_rollout_ref.model.lora_rank=4", "critic.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=1e-2")
PARTIAL = (
    "async_training.mode=partial", "algorithm.rollout_correction.rollout_is=token", "data.max_response_length=16",
)  # fmt: skip
AHEAD = (
    "algorithm.rollout_correction.rollout_is=token", "data.max_response_length=16", "algorithm.filter_groups.enable=false",
    "placement=custom", "placement.roles.actor=actor", "placement.roles.rollout=rollout", "trainer.n_gpus_per_node=2",
    *(f"placement.pools.{pool}={{nodes: 1, gpus: 1, fraction: 1.0}}" for pool in ("actor", "rollout")),
)  # fmt: skip
MEGATRON = ("actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2")

NOT_COMPARED = ("json", "session_text", "finished_text")
"""Tensors of dumps and checkpoints: paths and options of a run, and lengths of texts with the seconds of tools."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"), train_size=24, test_size=6)


def content(run_dir: Path) -> dict[str, Any]:
    """All files of a run except wall times: metrics, responses, and every tensor of its checkpoints as bytes."""
    found: dict[str, Any] = {"metrics": repeatable(metrics_of(run_dir)), "samples": (run_dir / SAMPLES).read_bytes()}
    for path in (run_dir / ROLLOUTS).glob("*.parquet"):
        found[f"answers {path.name}"] = without_seconds(json.dumps(pq.read_table(path).to_pydict()).encode())
    latest = find_latest(run_dir)
    assert latest is not None
    found["checkpoints"] = checkpoint_steps(run_dir)
    found["state"] = latest.manifest.state
    for path in [*run_dir.glob("global_step_*/*/**/*.safetensors"), *(run_dir / ROLLOUTS).glob("*.safetensors")]:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                value = tensor.numpy().tobytes()
                if name in ("outcomes", "facts"):  # JSON texts of sessions
                    found[f"{path.relative_to(run_dir)} {name}"] = without_seconds(value)
                elif name not in NOT_COMPARED:
                    found[f"{path.relative_to(run_dir)} {name}"] = (tensor.dtype, tensor.shape, value)
    return found


def without_seconds(text: bytes) -> bytes:
    """JSON text without the seconds that tools and environments took; a resumed run may write them in another order."""
    return re.sub(rb'(, )?\\*"[^"\\]*seconds\\*": [0-9.e-]+(?(1)|(, )?)', b"", text)


def differences(mine: Path, other: Path) -> list[str]:
    a, b = content(mine), content(other)
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def check_cover(run_dir: Path) -> None:
    """The run covers the relevant events: groups were resampled, an epoch ended, checkpoints contain all trained tensors."""
    steps = metrics_of(run_dir)
    assert sum(step.get("training/filter_groups/rounds", 1.0) for step in steps) > len(steps)
    assert steps[-1]["training/epoch"] > 0
    assert len(content(run_dir)) > 100


@pytest.mark.timeout(600)
def test_two_kills_leave_the_run_bitwise_identical(task: Path, tmp_path: Path) -> None:
    kills = [Kill(2, "write", backend="local"), Kill(3, "update_actor", 0.02, backend="local")]
    options = (*SMALL, *PPO, "trainer.total_training_steps=6", "trainer.save_freq=1", "trainer.test_freq=1")
    whole = tmp_path / "whole"
    run_ppo(task, whole, *options, f"trainer.rollout_data_dir={whole / ROLLOUTS}")
    check_cover(whole)
    with warm_python(tmp_path) as python:
        assert kill_and_compare(task, tmp_path, options, kills, whole, last="local", python=python)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_kills_leave_an_adapter_run_bitwise_identical(task: Path, tmp_path: Path) -> None:
    """Adapters of actor and critic; the reference is the actor's base."""
    kills = [Kill(2, "rename", backend="local"), Kill(3, "update_actor", 0.005, backend="local")]
    options = (*SMALL, *PPO, *LORA, "trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.test_freq=1")
    whole = tmp_path / "whole"
    run_ppo(task, whole, *options, f"trainer.rollout_data_dir={whole / ROLLOUTS}")
    assert kill_and_compare(task, tmp_path, options, kills, whole)


SOAK: dict[str, tuple[tuple[str, ...], int, list[Kill]]] = {
    "ppo_begin": (PPO, 1, [
        Kill(2, "gen", 0.01), Kill(3, "reward", first="workers"), Kill(4, "update_critic", 0.02, "workers"),
        Kill(5, "save_checkpoint", 0.02), Kill(6, "testing", 0.01, "alone"),
    ]),
    "ppo_saving": (PPO, 1, [
        Kill(2, "rename"), Kill(3, "latest", first="workers"), Kill(5, "remove"), Kill(BEGIN, "sync"),
        Kill(6, "sync", "end", "workers"),
    ]),
    "grpo": (GRPO, 1, [
        Kill(3, "gen", "end"), Kill(4, "reward", "end"), Kill(5, "update_actor", 0.02, "alone"),
        Kill(6, "rename", first="workers"), Kill(8, "testing", 0.01, "workers"),
    ]),
    "ppo_two_ranks": (PPO, 2, [
        Kill(2, "gen", 0.02, "workers"), Kill(3, "update_critic", 0.02), Kill(4, "save_checkpoint", 0.02, "workers"),
        Kill(5, "sync", 0.001), Kill(6, "testing", "end"),
    ]),
    "grpo_two_ranks": (GRPO, 2, [
        Kill(2, "reward"), Kill(3, "update_actor", 0.02, "workers"), Kill(4, "sync", "end", "alone"),
        Kill(6, "remove", first="workers"), Kill(8, "latest"),
    ]),
    "ppo_megatron": ((*PPO, *MEGATRON), 2, [Kill(2, "update_critic", 0.02, "workers"), Kill(6, "save_checkpoint", 0.02)]),
}  # fmt: skip


@pytest.fixture(scope="module")
def table() -> Iterator[list[Outcome]]:
    """The outcomes of all kills of this module."""
    outcomes: list[Outcome] = []
    yield outcomes
    names = sorted({outcome.kill.phase for outcome in outcomes})
    print("\nkilled in | times | outcome | seconds from the kill to the next first step")
    for name in names:
        seconds = [outcome.seconds for outcome in outcomes if outcome.kill.phase == name]
        print(f"{name} | {len(seconds)} | bitwise identical | {', '.join(f'{one:.1f}' for one in seconds)}")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SOAK)
def test_many_kills_leave_the_run_bitwise_identical(name: str, task: Path, tmp_path: Path, table: list[Outcome]) -> None:
    """GRPO saves every second step, so that steps are repeated; rewards are scored in a separate process."""
    algorithm, ranks, kills = SOAK[name]
    every = 2 if algorithm is GRPO else 1
    options = (
        *SMALL, *algorithm, f"trainer.n_gpus_per_node={ranks}", "reward.num_workers=1", f"trainer.test_freq={every}",
        f"trainer.save_freq={every}", f"trainer.total_training_steps={max(kill.step for kill in kills) + 2}",
    )  # fmt: skip
    whole = tmp_path / "whole"
    if ranks == 1:
        run_ppo(task, whole, *options, f"trainer.rollout_data_dir={whole / ROLLOUTS}")
    else:
        run_and_kill(arguments(task, whole, options), whole, [], tmp_path / "unkilled")
    check_cover(whole)
    table += kill_and_compare(task, tmp_path, options, kills, whole)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("filtered", ["true", "false"])
def test_twelve_kills_with_responses_in_flight_leave_the_run_bitwise_identical(
    filtered: str, task: Path, tmp_path: Path, table: list[Outcome]
) -> None:
    places = ("gen", "reward", "update_actor", "sync", "save_checkpoint", "rename", "latest", "write", "gen", "old_log_prob")
    kills = [Kill(step, place, 0.01, backend="local") for step, place in enumerate(places, 2)]
    kills += [Kill(12, "gen", "end", "workers"), Kill(13, "update_actor", 0.02)]
    options = (
        *SMALL, *GRPO, *PARTIAL, f"algorithm.filter_groups.enable={filtered}", "trainer.save_freq=1", "trainer.test_freq=4",
        "reward.num_workers=1", "trainer.total_training_steps=15",
    )  # fmt: skip
    whole = tmp_path / "whole"
    run_and_kill(arguments(task, whole, options), whole, [], tmp_path / "unkilled", last="local")
    table += kill_and_compare(task, tmp_path, options, kills, whole)
    in_flight = {step["training/global_step"]: step.get("rollout/unfinished_groups", 0.0) for step in metrics_of(whole)}
    # A start resumes from the step before the kill, or from that of the kill if it came after the save.
    assert sum(in_flight[kill.step - 1] > 0 and in_flight[kill.step] > 0 for kill in kills) >= 9


def in_threads(step: int, phase: str, moment: float | Literal["end"] = 0.0) -> Kill:
    """Kill of a run whose pools are threads of the driver, which starts sooner than Ray."""
    return Kill(step, phase, moment, backend="threads")


KILLS_AHEAD: dict[str, tuple[tuple[str, ...], int, list[Kill]]] = {
    "one_step_off, critic and reference": ((*PPO, "async_training.mode=one_step_off"), 1, [
        in_threads(1, "reward"), in_threads(2, "update_critic", 0.02), Kill(3, "update_actor", 0.0, "trainer"),
        Kill(4, "sync", 0.0, "rollout"), in_threads(5, "rename"), in_threads(6, "values", 0.01), Kill(7, "gen", 0.0, "rollout"),
        in_threads(8, "latest"), Kill(10, "save_checkpoint", 0.02, "trainer"), in_threads(BEGIN, "sync", 0.01),
        in_threads(11, "ref"),
    ]),
    "async, staleness 2": (("algorithm=grpo", "async_training.mode=async"), 2, [
        *(Kill(step, place, 0.01) for step, place in enumerate(
            ("gen", "update_actor", "save_checkpoint", "old_log_prob", "sync", "latest", "update_actor"), 1
        )), Kill(8, "update_actor", "end", "workers"), Kill(9, "reward", 0.0, "alone"),
    ]),
    "async, staleness 3": ((
        "algorithm=grpo", "async_training.mode=async", "async_training.max_staleness=3", "async_training.oversubmit=3.0",
        "actor_rollout_ref.rollout.max_num_seqs=16", "data.max_response_length=24",
    ), 3, [
        Kill(1, "update_actor", 0.0, "rollout"), in_threads(2, "gen", "end"), Kill(3, "old_log_prob", 0.01, "trainer"),
        in_threads(4, "reward", "end"), Kill(5, "sync", 0.0, "trainer"), in_threads(6, "rename"),
        in_threads(8, "update_actor", 0.02), in_threads(9, "save_checkpoint", "end"), in_threads(10, "sync", "end"),
        in_threads(11, "testing", 0.01),
    ]),
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", KILLS_AHEAD)
def test_kills_while_the_next_batch_is_generated_leave_the_run_bitwise_identical(
    name: str, task: Path, tmp_path: Path, table: list[Outcome]
) -> None:
    """Thirty kills in all: of the driver, of a trainer's or an engine's worker alone, of all processes."""
    mode, staleness, kills = KILLS_AHEAD[name]
    options = (
        *SMALL, *mode[:1], *AHEAD, *mode[1:], "trainer.save_freq=1", f"trainer.test_freq={11 if staleness == 3 else 4}",
        "reward.num_workers=1", f"trainer.total_training_steps={max(kill.step for kill in kills) + 2}",
    )  # fmt: skip
    whole = tmp_path / "whole"
    with warm_python(tmp_path) as python:
        run_and_kill(arguments(task, whole, options), whole, [], tmp_path / "unkilled", last="threads", python=python)
        assert max(step.get("rollout/staleness/max", 0.0) for step in metrics_of(whole)) == staleness
        # A start without Ray does not remove what Ray has left.
        last: Literal["ray", "threads"] = "ray" if all(kill.backend == "ray" for kill in kills) else "threads"
        table += kill_and_compare(task, tmp_path, options, kills, whole, last=last, python=python)


def arguments(task: Path, run_dir: Path, options: Sequence[str]) -> list[str]:
    return ppo_arguments(task, run_dir, *options, f"trainer.rollout_data_dir={run_dir / ROLLOUTS}")


def kill_and_compare(
    task: Path, folder: Path, options: Sequence[str], kills: Sequence[Kill], whole: Path, **starts: Any
) -> list[Outcome]:
    """starts: options of run_and_kill."""
    run_dir = folder / "killed"
    outcomes = run_and_kill(arguments(task, run_dir, options), run_dir, kills, folder / "notes", **starts)
    assert differences(run_dir, whole) == []
    return outcomes
