"""Select the checkpoint from which a run resumes, and check that its configuration allows it.

<run_dir>/global_step_N/{actor,critic,flow}/...  manifest.json   latest_checkpointed_iteration.txt

trainer/checkpoint/saver.py writes them. A damaged checkpoint is skipped in favour of the previous one, unless the user named it.

A learning-rate schedule that depends on the total number of steps moves when that number changes. The rate of the next step is
therefore computed under the old and under the new number, and the two are compared (``rate_changes``).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Protocol

from configs.schema.common import OptimConfig
from trainer.algorithms.known import estimator_needs
from trainer.checkpoint.manifest import FLOW, INCOMPLETE, MANIFEST, Checkpoint, Damaged, read_checkpoint
from trainer.checkpoint.remote_copies import RemoteCopies, is_url
from trainer.checkpoint.training_data import TrainingData
from trainer.checkpoint.unfinished import complete_interrupted, remove_announcements
from trainer.cluster.role_builder import optimizer_spec, schedule_length
from trainer.run.events import Events
from trainer.run.run_dir import LATEST, checkpoint_dir, checkpoint_steps, leaves_of, redact
from workers.engine.lr_schedule import learning_rate

__all__ = ["Checkpoint", "Stateful", "check_config", "find_latest", "resolve_resume"]

FETCHED = "fetched"

# Keys that a resumed run may change. A name that ends in a dot stands for all keys below it, a leading star for any prefix. Keys
# of the first block do not affect training, or only its length. Keys of the second block control how the same work is split over
# devices and kept in memory: results are equal up to rounding, because checkpoints are independent of the number of ranks.
SAFE_TO_CHANGE = (
    "trainer.total_epochs", "trainer.total_training_steps", "*optim.total_training_steps", "trainer.logger",
    "trainer.project_name", "trainer.experiment_name",
    "trainer.default_local_dir", "trainer.log_val_generations", "trainer.rollout_data_dir", "trainer.test_freq",
    "trainer.save_freq", "trainer.val_before_train", "trainer.val_only", "trainer.max_actor_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep", "trainer.max_ckpt_to_keep", "trainer.export_dir", "trainer.resume_mode",
    "trainer.resume_from_path", "trainer.checkpoint.", "trainer.best_metric",
    "trainer.objective", "trainer.max_restarts", "trainer.walltime", "trainer.watch.",
    "trainer.dry_run", "trainer.full_traceback", "trainer.private",
    "trainer.stop_at_probability", "data.val_files", "data.val_max_samples",
    "data.val_batch_size", "data.filter_overlong_prompts_workers", "reward.num_workers",
    "reward.remote.", "reward.remote_urls", "*.urls",
    "actor_rollout_ref.rollout.val_kwargs.", "timeouts.",
    "algorithm.rollout_correction.mismatch_bound", "async_training.", "alarms.", "ray_kwargs.", "trainer.replay.",

    "placement.", "trainer.backend", "trainer.nnodes", "trainer.n_gpus_per_node",
    "*.use_dynamic_bsz", "*.log_prob_use_dynamic_bsz", "*.rollout.balance",
    "*.ppo_micro_batch_size", "*.ppo_micro_batch_size_per_gpu", "*.ppo_max_token_len_per_gpu", "*.log_prob_micro_batch_size",
    "*.log_prob_micro_batch_size_per_gpu", "*.log_prob_max_token_len_per_gpu", "*.forward_micro_batch_size",
    "*.forward_micro_batch_size_per_gpu", "*.forward_max_token_len_per_gpu",
    "data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu", "*.enable_gradient_checkpointing",
    "*.enable_activation_offload", "*.tiled_mlp.enabled", "*.tiled_mlp.num_shards",
    "*.reshard_after_forward", "*.use_no_sync_for_gradient_accumulation", "*.use_torch_compile",
    "*.param_offload", "*.grad_offload", "*.optimizer_offload", "*.strategy",
    "*.megatron.tensor_model_parallel_size", "*.megatron.pipeline_model_parallel_size",
    "*.megatron.virtual_pipeline_model_parallel_size", "*.megatron.context_parallel_size", "*.megatron.sequence_parallel",
    "*.megatron.use_distributed_optimizer", "*.fsdp_size", "*.ulysses_sequence_parallel_size",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.gpu_memory_utilization", "actor_rollout_ref.rollout.free_cache_engine",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes", "actor_rollout_ref.rollout.verify_weights",
    "actor_rollout_ref.rollout.multi_turn.tool_timeout", "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.agent.memory_limit_mb", "trainer.deterministic",
)  # fmt: skip
ADDED = {
    "trainer.stop_at_probability": "null",
    "trainer.private": "false",
    "reward.timeout_score": "null",
    "data.tools_key": "null",
    "data.custom_cls.path": "null", "data.custom_cls.name": "null",
    "algorithm.gamma_over": '"token"',
    "async_training.mode": "null", "async_training.oversubmit": "1.5", "async_training.max_age": "4",
    "async_training.max_staleness": "2", "async_training.clock": '"logical"', "async_training.prox_logp": '"recompute"',
    "async_training.trigger_parameter_sync_step": "1", "async_training.pause": '"abort"',
    "async_training.kv_cache": '"recompute"',
    "actor_rollout_ref.rollout.multi_turn.enable": "false",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "null",
    "actor_rollout_ref.rollout.multi_turn.max_user_turns": "null",
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls": "1",
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": "256",
    "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side": '"middle"',
    "actor_rollout_ref.rollout.multi_turn.format": '"hermes"',
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "null",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path": "null",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path": "null",
    "actor_rollout_ref.rollout.multi_turn.environment": "null",
    "actor_rollout_ref.rollout.multi_turn.on_break": '"split"',
    "actor_rollout_ref.rollout.agent.default_agent_loop": "null",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path": "null", "actor_rollout_ref.rollout.agent.program": "null",
}  # fmt: skip
"""{key: JSON value} of keys that checkpoints of earlier versions lack; the value reproduces the behaviour of those versions."""


class Stateful(Protocol):
    """A component of the controller whose state, as plain JSON, is saved in checkpoints."""

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...


def find_latest(run_dir: Path, tell: Callable[[int, str], None] | None = None, *, weights: bool = True) -> Checkpoint | None:
    """The checkpoint that latest_checkpointed_iteration.txt names, or the last undamaged one before it; None without that file.

    The file may be edited to resume from an earlier step. tell: called with the step and the damage of each damaged checkpoint;
    None: the damage becomes an event of the run. weights: see read_checkpoint.
    Raises ValueError if the file names a step that does not exist, or if all checkpoints are damaged.
    """
    if not (run_dir / LATEST).exists():
        return None
    text = (run_dir / LATEST).read_text(errors="replace").strip()
    present = checkpoint_steps(run_dir)
    if not text.isdigit() or int(text) not in present:
        raise ValueError(
            f"{run_dir / LATEST} names step {text!r}, but the checkpoints there are of steps {present}: "
            "write one of these into the file, or start anew with trainer.resume_mode=disable"
        )
    wrong = []
    for step in reversed([step for step in present if step <= int(text)]):
        try:
            return read_checkpoint(checkpoint_dir(run_dir, step), weights=weights)
        except Damaged as damage:
            wrong.append(str(damage))
            if tell is None:
                Events(run_dir).add(step, "damaged checkpoint", f"{damage}; the one before it is taken")
            else:
                tell(step, str(damage))
    # Checkpoints exist but none is usable. Starting from step 0 silently would hide that the training was lost.
    raise ValueError(f"no checkpoint up to step {text} is whole: {'; '.join(wrong)}. trainer.resume_mode=disable starts anew")


def find_up_to(run_dir: Path, step: int, check: Callable[[Checkpoint], None]) -> Checkpoint | None:
    """The newest usable checkpoint of ``step`` or earlier, None if there is none; for rollbacks.

    check: raises Damaged for a checkpoint whose weights are damaged. Damage becomes an event, and an earlier one is tried.
    """
    for earlier in reversed(checkpoint_steps(run_dir)):
        if earlier <= step:
            try:
                checkpoint = read_checkpoint(checkpoint_dir(run_dir, earlier), weights=False)
                check(checkpoint)
                return checkpoint
            except Damaged as error:
                Events(run_dir).add(earlier, "damaged checkpoint", f"{error}; an earlier one is taken")
    return None


def resolve_resume(
    resume_mode: str, resume_from_path: str | None, run_dir: Path, remote_dir: str | None = None, *, weights: bool = True
) -> Checkpoint | None:
    """The checkpoint from which a run in ``run_dir`` resumes, None for a new run. Completes or removes an interrupted save.

    resume_mode: auto, disable or resume_path. remote_dir: address of remote copies; with auto, the newest complete one is fetched
    if ``run_dir`` has no checkpoint. weights: see read_checkpoint. Raises ValueError with advice if the checkpoint is unusable.
    """
    # Opened also when it is not needed: an address that no package supports is refused before training starts.
    copies = RemoteCopies(remote_dir) if remote_dir is not None else None
    if run_dir.exists():
        if resume_mode == "auto":
            complete_interrupted(run_dir)
        _remove_leftovers(run_dir)
    if resume_mode == "disable":
        return None
    if resume_mode == "auto":
        found = find_latest(run_dir, weights=weights) if run_dir.exists() else None
        return copies.fetch_newest(run_dir) if found is None and copies is not None else found
    assert resume_mode == "resume_path", resume_mode
    if resume_from_path is None:
        raise ValueError("trainer.resume_mode=resume_path needs trainer.resume_from_path=<run directory>/global_step_<N>")
    return _from_path(resume_from_path, run_dir, weights=weights)


def check_in_flight(checkpoint: Checkpoint, *, continued: bool, train_files: Sequence[str]) -> None:
    """Check that nothing that is in flight in ``checkpoint`` is lost, or trained with other prompts. Raises ValueError.

    continued: the run continues it. train_files: its data, of which the prompts in flight are rows.
    """
    state = checkpoint.manifest.state
    groups = sum(len(checkpoint.arrays(name).get("ordinal", ())) for name in checkpoint.with_arrays())
    taken = state.get("data", {}).get("taken", 0)
    if continued:
        if groups and TrainingData(train_files).differs(state.get("training_data", {})):
            raise ValueError(
                f"{checkpoint.path} has {groups} groups of responses in flight, to prompts of data.train_files, which has other "
                "content than at the checkpoint: put the data back, or start anew with trainer.resume_mode=disable"
            )
    elif groups or taken:
        what = f"{groups} groups of responses in flight" if groups else f"{taken} prompts taken from a round of the data"
        raise ValueError(
            f"{checkpoint.path} has {what}, which this run would lose: resume it with the async_training settings that it was "
            "saved with, or start anew with trainer.resume_mode=disable"
        )


def complete_checkpoint(resume_mode: str, resume_from_path: str | None, run_dir: Path) -> Checkpoint | None:
    """What resolve_resume would find locally, without removing, fetching or writing anything; None for a remote address.

    Raises ValueError like resolve_resume.
    """
    if resume_mode == "auto" and run_dir.exists():
        # Without events: a dry run does not write into the directory of a run.
        return find_latest(run_dir, tell=lambda step, damage: None)
    if resume_mode == "resume_path" and resume_from_path is not None and not is_url(resume_from_path):
        return _from_path(resume_from_path, run_dir, weights=True)
    return None


def _from_path(place: str, run_dir: Path, *, weights: bool) -> Checkpoint:
    """As _named, with Damaged turned into a ValueError: the user named this checkpoint, so no other one is tried."""
    try:
        return _named(place, run_dir, weights=weights)
    except Damaged as damage:
        raise ValueError(f"trainer.resume_from_path: {damage}; take another one") from damage


def _named(place: str, run_dir: Path, *, weights: bool) -> Checkpoint:
    """The checkpoint at a path or an address; from an address it is fetched first. Raises ValueError, or its subclass Damaged."""
    if is_url(place):
        address, _, name = place.rstrip("/").rpartition("/")
        return RemoteCopies(address).fetch(name, run_dir / FETCHED)
    path = Path(place).expanduser()
    if not path.is_dir():
        raise ValueError(f"trainer.resume_from_path={path}: there is no such directory")
    if path.name.endswith(INCOMPLETE):
        raise ValueError(f"trainer.resume_from_path={path}: this checkpoint was never finished; take an earlier one")
    if not (path / MANIFEST).exists():
        inside = [checkpoint_dir(path, step).name for step in checkpoint_steps(path)]
        advice = f"name one of those in it: {', '.join(inside)}" if inside else "give a checkpoint, a directory global_step_<N>"
        raise ValueError(f"trainer.resume_from_path={path}: no {MANIFEST} in it; {advice}")
    return read_checkpoint(path, weights=weights)


def check_config(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """List the keys that differ, each as "key: old -> new". Raises ValueError naming all of those not in SAFE_TO_CHANGE.

    saved: ``Checkpoint.manifest.config``. current: the resolved configuration of the run.
    """
    # The saved configuration holds no secrets, so those of the current one are masked too; leaves are compared as JSON, in which
    # a tuple equals the list it was saved as.
    old, new = leaves_of(redact(saved)), leaves_of(redact(current))
    changed = {
        key: f"{key}: {old.get(key, '(not set)')} -> {new.get(key, '(not set)')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and (key in old or key not in ADDED or new[key] != ADDED[key])
    }
    if not has_critic(current):
        changed.pop("critic.model.path", None)  # names no model; its default has changed
    refused = [change for key, change in changed.items() if not _is_safe(key)]
    if refused:
        raise ValueError(
            "cannot resume with another configuration: " + "; ".join(refused) + ". Put the old values back, or start anew with "
            "trainer.resume_mode=disable. May change: how long to train, logging, validation, checkpoints, cut of the work."
        )
    return list(changed.values())


def has_critic(config: Mapping[str, Any]) -> bool:
    """Whether a run with this configuration trains a critic."""
    enable = config.get("critic", {}).get("enable")
    return bool(enable) or "values" in estimator_needs(config.get("algorithm", {}).get("adv_estimator", "gae"))


def _is_safe(key: str) -> bool:
    return any(
        key == safe or (safe.endswith(".") and key.startswith(safe)) or (safe.startswith("*") and key.endswith(safe[1:]))
        for safe in SAFE_TO_CHANGE
    )


def _remove_leftovers(run_dir: Path) -> None:
    """Remove directories that were being written or removed when the run was killed."""
    for pattern in ("global_step_*", "global_step_*/*"):
        for path in run_dir.glob(pattern):
            if path.name.endswith(INCOMPLETE) and path.is_dir():
                shutil.rmtree(path)
    for step in checkpoint_steps(run_dir):
        path = checkpoint_dir(run_dir, step)
        remove_announcements(path)
        # A checkpoint without any role: its last one was removed, and a kill came before its own removal (saver._drop_old).
        if not any(child.is_dir() and child.name != FLOW for child in path.iterdir()):
            shutil.rmtree(path)


def rate_changes(
    resume: Checkpoint, optims: Mapping[str, tuple[OptimConfig, int]], steps: int, steps_per_epoch: int
) -> Iterator[str]:
    """Yield one line per role whose learning rate changes at the resumed step.

    optims: {configuration key: (optimizer, number of initial steps in which the role is not updated)}. steps: of the run, under
    the current configuration. steps_per_epoch: to derive the old number of steps, if it was given in epochs.
    """
    trainer = resume.manifest.config["trainer"]
    steps_before = trainer["total_training_steps"] or trainer["total_epochs"] * steps_per_epoch
    for key, (now, waits) in optims.items():
        saved = reduce(getitem, key.split("."), resume.manifest.config)
        # All other settings of the optimizer are those of the current run: check_config refuses a change of them.
        before = replace(now, total_training_steps=saved["total_training_steps"])
        old, new = (_rate(optim, run, resume.step - waits) for optim, run in ((before, steps_before), (now, steps)))
        if old != new:
            length = schedule_length(before, steps_before)
            jump = f"the learning rate of step {resume.step + 1} goes from {old:.3g} to {new:.3g}"
            yield (
                f"{key}: the schedule had {length} training steps and has {schedule_length(now, steps)}: {jump}; "
                f"{key}.total_training_steps={length} keeps the old schedule"
            )


def _rate(optim: OptimConfig, steps: int, done: int) -> float:
    """Learning rate of the training step after ``done`` steps, in a run of ``steps``."""
    return learning_rate(optimizer_spec(optim, steps), max(0, done))
