"""Replay a single recorded step: sample its responses again, or repeat its update from the recorded batch.

Problem: inspect one step without repeating the run up to it. Idea: trainer.rollout_data_dir dumps each step's batch. With the
weights of the preceding step it determines the step, since seeds depend on step, prompt and sample, not on earlier steps.
mode=rollout samples and scores again; mode=train repeats the forward passes and the update. Both run the normal loop with some
parts replaced, and the results are compared. Cost: a checkpoint of the preceding step must exist (not for step 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.base.locks import locked
from configs.schema.alarms import AlarmConfig
from configs.schema.ppo import PPOConfig
from trainer.agents.sessions.recorded_sessions import RecordedAgents, RecordedSessions
from trainer.agents.sessions.session_flow import AgentSessions
from trainer.checkpoint.manifest import arrays_file
from trainer.checkpoint.resume import Checkpoint, check_config, check_in_flight, resolve_resume
from trainer.cluster.remote import RemoteModel
from trainer.data.dataset import PromptStream
from trainer.ppo.loop import Loop
from trainer.ppo.ppo_builder import Assembly, continues_groups, opened
from trainer.ppo.replay_diff import MOST_LINES, Difference, compare_answers, compare_metrics, replayed, table, untimed
from trainer.resilience.restart import RunLifecycle
from trainer.rollout.policies import OneRound
from trainer.rollout.remote_rollout import RemoteRollout
from trainer.rollout.sampler import Overlap, Sampler
from trainer.run.errors import CheckFailed
from trainer.run.run_dir import GLOBAL_STEP, METRICS, checkpoint_dir, checkpoint_steps, read_metrics
from trainer.run.timing import Phases
from trainer.tracking.batch_file import load_batch, load_sessions
from trainer.tracking.formatting import table_console
from trainer.tracking.token_dump import ResponseLog
from workers.batch import Batch
from workers.controller.logs import announce
from workers.metric import Metrics
from workers.roles.rollout_engines import check_installed

OWN_KEYS = ("trainer.replay.", "trainer.resume_")  # of the replay itself: they always differ from the recorded ones


def replay(config: PPOConfig) -> None:
    """Replay the step that trainer.replay names, in ``<run directory>/replay_<mode>_<step>``; the run's files are not changed.

    Raises CheckFailed, with a line for each difference beyond the bound, and ValueError if dump, weights or metrics are missing.
    """
    asked = config.trainer.replay
    assert asked.mode is not None and asked.path is not None, "see configs.validation.programs"
    batch, facts = load_batch(dump_file(asked.path))
    if "group" not in batch.rows:
        # A dump of an earlier version: no data row was twice in a batch, so its number identifies the group.
        batch = batch.with_rows(group=batch.rows["uid"])
    step = int(facts["step"])
    # A separate directory: the replay writes metrics and dumps too, and the run's files must stay as they are.
    directory = Path(config.trainer.default_local_dir) / f"replay_{asked.mode}_{step}"
    changes = (change for change in check_config(facts["config"], asdict(config)) if not change.startswith(OWN_KEYS))
    announce(f"replayed with another {change}" for change in changes)
    with locked(directory, "trainer.default_local_dir"):
        repeat(config, batch, facts, directory)


def repeat(config: PPOConfig, batch: Batch, facts: Mapping[str, Any], directory: Path) -> None:
    """Run the step in ``directory`` and report the differences. batch, facts: contents of the dump. Raises like ``replay``."""
    asked, step = config.trainer.replay, int(facts["step"])
    weights = weights_before(step, facts, config, directory)
    if weights is not None:
        with_state(weights, facts.get("state", {}))  # dumps of earlier versions have none
        if asked.mode == "rollout":
            check_in_flight(weights, continued=continues_groups(config), train_files=config.data.train_files)
    one_step = of_one_step(config, directory)
    lifecycle = RunLifecycle(one_step.trainer, directory)
    if asked.mode == "rollout":
        check_installed(config.actor_rollout_ref.rollout.name)
        with opened(RolloutReplay, one_step, lifecycle, weights) as loop:
            again = replay_rollout(loop, step)
        found = compare_answers(batch, again, asked.bound)
        found += compare_metrics(untimed(batch.meta["metrics"]), untimed(again.meta["metrics"]), asked.bound)
        compared = f"{len(batch)} answers, {batch.total_tokens:,} tokens"
    else:
        logged = logged_metrics(Path(config.trainer.default_local_dir), step)
        # Without the saver: a replay saves nothing.
        with opened(TrainingReplay, one_step, lifecycle, weights) as loop, lifecycle.stopping:
            metrics = replay_training(loop, batch, step)
        found = compare_metrics(replayed(logged), replayed(metrics), asked.bound)
        compared = f"{len(replayed(logged))} metrics of {len(batch)} answers"
    report_differences(f"{asked.mode} of step {step} again: {compared}", found, asked.bound)


def with_state(weights: Checkpoint, state: Mapping[str, Any]) -> None:
    """Give the checkpoint the ``state`` of components with which the dumped step began: a rollback may be between them."""
    found = weights.manifest
    if "rollbacks" in state and state["rollbacks"] != found.state.get("rollbacks"):
        for name in weights.with_arrays():  # what was in flight was discarded
            del found.files[arrays_file(name)]
    found.state.update(state)


def dump_file(path: str) -> Path:
    """Path of a dump. Raises ValueError, which lists the existing dumps, if there is no such file."""
    file = Path(path).expanduser()
    if not file.is_file():
        directory = file if file.is_dir() else file.parent
        there = sorted(directory.glob("step_*.safetensors"), key=lambda found: (len(found.name), found.name))
        known = f"{there[0].name} to {there[-1].name}, {len(there)} files" if there else "no step_N.safetensors"
        raise ValueError(
            f"trainer.replay.path={path}: no such file; {directory} has {known} (trainer.rollout_data_dir writes them)"
        )
    return file


def weights_before(step: int, facts: Mapping[str, Any], config: PPOConfig, directory: Path) -> Checkpoint | None:
    """Checkpoint of the preceding step; None: the initial model. Raises ValueError, which lists the checkpoints, if missing."""
    trainer, before = config.trainer, int(facts["weights_of_step"])
    run_dir = Path(trainer.default_local_dir)
    if trainer.resume_mode == "resume_path":
        checkpoint = resolve_resume("resume_path", trainer.resume_from_path, directory)
        if checkpoint is None or checkpoint.step != before:
            raise ValueError(
                f"trainer.resume_from_path={trainer.resume_from_path}: step {step} wants the weights of step {before}"
            )
        return checkpoint
    if checkpoint_dir(run_dir, before).is_dir():
        return resolve_resume("resume_path", str(checkpoint_dir(run_dir, before)), directory)
    if before == 0:
        return None
    there = checkpoint_steps(run_dir) if run_dir.is_dir() else []
    raise ValueError(
        f"step {step} began with the weights of step {before}, in a process that started from {facts['begun_with']}; {run_dir} "
        f"has checkpoints of steps {there}: replay one of steps {[1, *(saved + 1 for saved in there)]}, or name it by "
        "trainer.resume_mode=resume_path trainer.resume_from_path=..."
    )


def of_one_step(config: PPOConfig, directory: Path) -> PPOConfig:
    """The run's configuration without validation, checkpoints, loggers and alarms. mode=rollout dumps the new responses."""
    trainer = replace(
        config.trainer,
        default_local_dir=str(directory),
        logger=[],
        rollout_data_dir=str(directory / "rollouts") if config.trainer.replay.mode == "rollout" else None,
        val_before_train=False,
        val_only=False,
        test_freq=-1,
        save_freq=-1,
    )
    quiet: dict[str, Any] = {
        name: alarm | {"action": "off"} for name, alarm in asdict(config.alarms).items() if isinstance(alarm, dict)
    }
    # Alarms are off: one that fired in the recorded step would end the replay before its metrics are compared.
    quiet = {name: AlarmConfig(**alarm) for name, alarm in quiet.items()}
    return replace(config, trainer=trainer, alarms=replace(config.alarms, **quiet))


class RolloutReplay(Assembly):
    """Loop parts for mode=rollout: actor and rollout engine, without reference and critic."""

    wants_ref = False
    wants_critic = False

    @staticmethod
    def agents(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, stack: ExitStack) -> AgentSessions | None:
        """The recorded conversations instead of agent processes. Raises ValueError, one line, if the dump has none."""
        if not config.actor_rollout_ref.rollout.multi_turn.enable:
            return None
        path, data = config.trainer.replay.path, config.data
        assert path is not None, "see replay"
        record = load_sessions(dump_file(path))
        if record is None:
            raise ValueError(
                f"trainer.replay.mode=rollout: {path} has no record of its conversations (async_training.mode is set, or an "
                "earlier version wrote it), and a replay calls no tools; use trainer.replay.mode=train"
            )
        agents = RecordedAgents(record)
        return RecordedSessions(agents, max_prompt=data.max_prompt_length, max_tokens=data.max_response_length)


def replay_rollout(loop: Loop, step: int) -> Batch:
    """Sample the step again, including groups that algorithm.filter_groups drops; return the batch that is kept."""
    loop.begin()
    batch = loop.next_batch(step)
    assert batch is not None, "only a run that listens to signals leaves a step"
    return batch


class TrainingReplay(Assembly):
    """Loop parts for mode=train: all but rollout engine, reward models and agents."""

    @staticmethod
    def agents(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, stack: ExitStack) -> None:
        return None

    def reward_models(self) -> None:
        return None

    def rollout(self) -> RemoteRollout:
        return NoRollout()


def replay_training(loop: Loop, batch: Batch, step: int) -> dict[str, float]:
    """Run the step on the recorded batch; return its metrics."""
    loop.sampler, loop.response_log = RecordedSampler(batch, loop.sampler), NoResponseLog()
    loop.trainer.total_steps = step
    loop.fit()
    return loop.trainer.metrics


class NoResponseLog(ResponseLog):
    """ResponseLog that writes nothing: the dump has no prompt texts, and the run has already logged its responses."""

    def __init__(self) -> None:
        pass

    def record(self, step: int, batch: Batch, actor: RemoteModel) -> None:
        pass


class NoRollout(RemoteRollout):
    """Stands in for the rollout engine: nothing is generated, so weights are not synced, and it has no workers."""

    def __init__(self) -> None:
        self.version, self.groups = 0, []

    def sync_weights(self, version: int, *, release: Callable[[], object] = lambda: None, keep_cache: bool = False) -> Metrics:
        self.version = version
        return {}


class RecordedSampler(Sampler):
    """Returns a recorded batch instead of sampling."""

    def __init__(self, batch: Batch, sampler: Sampler) -> None:
        """sampler: the sampler that is replaced. Its rollbacks, restored from a checkpoint, enter the seeds of updates."""
        self.batch = batch
        self.policy = OneRound()  # nothing is generated ahead
        self.rollbacks = sampler.rollbacks
        # Loop.scoring_overlaps is false without them, so that the forward passes run in phases of their own.
        self.models = None
        self.left_out, self.sessions = [], []

    def next_batch(self, step: int, prompts: PromptStream, phases: Phases, overlap: Overlap | None = None) -> Batch:
        return self.batch


def logged_metrics(run_dir: Path, step: int) -> dict[str, float]:
    """The run's metrics of ``step``. Raises ValueError if the step is not in metrics.jsonl."""
    logged: dict[int, dict[str, float]] = {}
    for entry in read_metrics(run_dir):  # a step has a second line if its checkpoint was validated (trainer.val_only)
        logged.setdefault(int(entry[GLOBAL_STEP]), {}).update(entry)
    if step not in logged:
        raise ValueError(f"{run_dir / METRICS} has no step {step} to compare with; it has {sorted(logged)}")
    return logged[step]


def report_differences(title: str, found: list[Difference], bound: float) -> None:
    """Print the table of differences. Raises CheckFailed if one is beyond the bound."""
    console = table_console()
    if found:
        console.print(table(title, found))
    else:
        console.print(f"{title}: all equal")
    beyond = [difference for difference in found if difference.beyond]
    if beyond:
        more = [f"and {len(beyond) - MOST_LINES} more"] if len(beyond) > MOST_LINES else []
        raise CheckFailed("\n".join([*map(str, beyond[:MOST_LINES]), *more]))
    if found:
        console.print(f"within trainer.replay.bound={bound:g}")
