"""PPO loop: the phases of a training step, in the order in which they run.

A step generates and scores responses, computes log-probs and values, derives advantages and masks, updates critic and actor, and
syncs the actor's weights to the rollout engine. Each phase reads columns of the batch and adds its own. Phases that only wait for
workers run concurrently where their roles are in different pools (see ``together``). GRPO and the other estimators without a
critic run through the same loop; a role that the algorithm does not need is None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

from configs.schema.ppo import PPOConfig
from trainer.agents.sessions.recorded_sessions import record_of
from trainer.algorithms import kl
from trainer.algorithms.advantages import ADVANTAGES, estimated
from trainer.algorithms.correction import is_enabled, mismatch, rollout_correction
from trainer.algorithms.kl import KLController, apply_kl_penalty
from trainer.algorithms.losses.actor_loss import entropy_mask
from trainer.algorithms.moments import RunningMoments, whitened
from trainer.algorithms.trajectories import Trajectories
from trainer.checkpoint.manifest import check_weights
from trainer.checkpoint.resume import find_up_to
from trainer.cluster.concurrency import Together
from trainer.cluster.remote import BaseModel, RemoteModel
from trainer.cluster.watchdog import LeftUndone
from trainer.data.dataset import PromptStream
from trainer.data.ptx_stream import PtxStream
from trainer.harness import Trainer
from trainer.ppo.batch_columns import advantage_inputs, renamed, sampled_columns
from trainer.ppo.update import UpdateSpec, update
from trainer.resilience.alarms import Alarm
from trainer.resilience.rollback import Rollbacks
from trainer.rewards.models.local_model import LocalModel
from trainer.rollout.ahead import RolloutsAhead
from trainer.rollout.remote_rollout import RemoteRollout
from trainer.rollout.sampler import Sampler, ScoredResponses
from trainer.rollout.validation import Validation
from trainer.run.errors import CheckFailed
from trainer.run.run_dir import START, write_atomic
from trainer.run.timing import Start, sentence
from trainer.tracking.metrics import data_metrics, idle_metrics, peak_flops, performance_metrics, reward_metrics
from trainer.tracking.token_dump import ResponseLog
from workers.batch import Batch
from workers.controller.logs import tell
from workers.controller.rpc import worker_call
from workers.metric import plain_numbers
from workers.roles.worker import Worker


@dataclass
class Loop:
    """Training loop; built by ppo_builder.py, run by ``fit``. ref and critic are None if the algorithm does not use them.

    updates: update settings of each trained role. answers: log of a few responses per step for the report. returns: running
    moments of the returns, used if critic.normalize_targets.
    """

    config: PPOConfig
    trainer: Trainer
    together: Together
    start: Start
    prompts: PromptStream
    sampler: Sampler
    actor: RemoteModel
    ref: RemoteModel | BaseModel | None
    critic: RemoteModel | None
    rollout: RemoteRollout
    updates: Mapping[str, UpdateSpec]
    kl: KLController
    returns: RunningMoments
    validation: Validation
    response_log: ResponseLog

    def fit(self) -> None:
        """Run all remaining steps."""
        self.begin()
        for step in self.trainer.steps(self.prepare_stop, self.steps_between_stops):
            with self.trainer.phases("step"):
                batch = self.next_batch(step)  # generated and scored responses
                # Not completed, hence not counted: steps() ends with a checkpoint of the step before.
                if batch is None:
                    continue
                with self.generating_next(step):
                    batch |= self.log_probs_and_values(batch)
                    batch |= self.correction(batch)  # mismatch between rollout engine and trainer
                    # Before loss_mask replaces response_mask: advantages are computed over complete responses.
                    batch |= self.advantages(batch)
                    batch |= self.loss_mask(batch)
                    # Before the update: it may run a forward pass with the weights that generated the responses.
                    self.response_log.record(step, batch, self.actor)
                    self.update(step, batch)
                if self.syncs(step):
                    self.sync_weights(step)
            self.after(step, batch)

    def begin(self) -> None:
        """Restore the checkpoint, or validate the initial model; with trainer.val_only also the restored one."""
        trainer, config = self.trainer, self.config.trainer
        trainer.begin()
        if trainer.resume is not None:
            self.start.ended("load")
        # After loading: the engine must generate with the checkpoint's weights.
        self.sync_weights(trainer.step)
        self.report_start()
        if config.val_only or (trainer.resume is None and config.val_before_train):
            measured = self.validation.run(trainer.step)
            trainer.tracker.log(measured, trainer.step)
            if trainer.resume is None:
                trainer.health.check(0, measured)
        # No step remains: steps() ends at once.
        if config.val_only:
            trainer.total_steps = trainer.step

    def report_start(self) -> None:
        """Print how long the start took, and write the seconds of each part to logs/start.json."""
        self.start.ended("sync")
        trainer = self.trainer
        # Colocated roles share one worker group, which is asked once.
        groups = dict.fromkeys([*self.together.workers.values(), *self.rollout.groups])
        asking = worker_call(Worker.start_times)
        asked = (trainer.watchdog.call(group, "ask", "times of the start", asking) for group in groups)
        seconds = self.start.seconds([times for of_group in asked for times in of_group])
        path = trainer.lifecycle.run_dir / START
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, json.dumps({name: round(spent, 3) for name, spent in seconds.items()}))
        tell(f"start: {sentence(seconds)}")

    def next_batch(self, step: int) -> Batch | None:
        """Generate and score the step's batch: one round of prompts, or several with algorithm.filter_groups.

        Returns None if the run was asked to stop while scoring takes too long; the state is then that of the previous step.
        """
        trainer = self.trainer
        trainer.metrics |= {"training/global_step": step, "training/epoch": self.prompts.epoch} | self.rollbacks.metrics()
        # Sampling advances the prompt stream, the running moments of reward models and the groups in flight. An abandoned step
        # restores all of them, so that the checkpoint written on exit belongs to the last complete step.
        parts = {name: part for name, part in trainer.stateful.items() if name in ("data", "reward_models", "filter_groups")}
        before = {name: part.state() for name, part in parts.items()}
        # After a rollback these are not the checkpoint's.
        began = {name: part.state() for name, part in trainer.stateful.items() if name in ("data", "ptx", "rollbacks")}
        arrays = {name: has_arrays.arrays() for name, has_arrays in trainer.arrays.items()}
        if keeps_requests := self.ahead is not None and self.ahead.keeps_requests:
            # The arrays lack what the engines have sampled. Groups leave the buffer when they are scored, so that it is complete
            # with this, and belongs to the position in the data.
            arrays.clear()
            before.pop("data")
        overlap, version = self.score_overlapped if self.scoring_overlaps else None, self.rollout.version
        try:
            batch = self.sampler.next_batch(step, self.prompts, trainer.phases, overlap)
            if self.rollout.version != version:  # synced, see RolloutsAhead.batch
                self.take_snapshot()
        except LeftUndone:
            # Before the groups are restored, which know only the requests of earlier steps.
            if self.ahead is not None and not keeps_requests:
                self.ahead.release()
            for name, state in before.items():
                parts[name].load(state)
            for name, tensors in arrays.items():
                trainer.arrays[name].load_arrays(tensors)
            trainer.events.add(trainer.step, "left", f"step {step}: a signal to stop, and the rewards did not come")
            return None
        started_from = self.config.actor_rollout_ref.model.path if trainer.resume is None else str(trainer.resume.path)
        # Dumped when it arrives: a step that fails in its update can be replayed. Conversations that are in flight over steps are
        # not those of this step, and only its update is replayed.
        record = None if self.config.async_training.mode else record_of(self.sampler.sessions)
        trainer.tracker.log_rollouts(sampled_columns(batch), step, started_from, began, self.sampler.left_out, record)
        return batch

    def generating_next(self, step: int) -> AbstractContextManager[None]:
        """Generate the batch of the next step during the block, if ``async_training.mode`` says so and there is a next step."""
        policy, trainer = self.ahead, self.trainer
        if policy is None:
            return nullcontext()
        # Nothing would train on a batch after the last step; its checkpoint holds what the engines have.
        if step == trainer.total_steps:
            policy.release()
            return nullcontext()
        return policy.generating(self.sampler, step + 1, self.prompts, trainer.phases, trainer.metrics)

    @property
    def ahead(self) -> RolloutsAhead | None:
        """How batches are generated ahead; None: they are not."""
        return self.sampler.policy if isinstance(self.sampler.policy, RolloutsAhead) else None

    def syncs(self, step: int) -> bool:
        """Whether weights are synced after ``step``."""
        return self.ahead is None or step == self.trainer.total_steps or self.ahead.schedule.syncs(step)

    @property
    def steps_between_stops(self) -> int:
        return 1 if self.ahead is None else self.ahead.schedule.every

    def prepare_stop(self, step: int, last: bool) -> bool:
        """Prepare for a checkpoint of ``step``. Returns False without a sync after ``step``, unless it is the last chance: the
        engines' weights are not the checkpoint's, so a resumed run would generate with others than the uninterrupted one.
        """
        syncs = self.syncs(step)
        if not syncs and not last:
            return False
        if self.ahead is not None and (self.ahead.keeps_requests or not syncs):
            what = "requests were taken from the engines" if syncs else "the resumed run syncs weights here"
            bits = " in the last bits" if syncs and self.config.async_training.kv_cache == "recompute" else ""
            self.trainer.events.add(step, "left", f"{what}; a run that does not stop here has other numbers{bits}")
            self.ahead.release()
        return True

    @property
    def rollbacks(self) -> Rollbacks:
        return self.sampler.rollbacks

    @property
    def scoring_overlaps(self) -> bool:
        """Whether reward models score the responses while the other models compute log-probs and values.

        True if all reward models run locally in a pool without the actor, and no response is dropped because of its score.
        """
        scorers = self.sampler.models
        if scorers is None or scorers.group is self.actor.group or self.sampler.selects_groups:
            return False
        # Servers are excluded: Watchdog.own, which limits their time, works in the main thread only; Together uses threads.
        return all(isinstance(model.scorer, LocalModel) for model in scorers.models)

    def log_probs_and_values(self, batch: Batch) -> Batch:
        """Actor and reference log-probs and critic values, computed concurrently across pools.

        Returns no columns if they were already computed while the responses were scored.
        """
        if self.scoring_overlaps:
            return Batch(batch.lengths)
        return reduce(Batch.union, self.together(self.forwards(batch)).values())

    def score_overlapped(self, batch: Batch, judge: Callable[[], ScoredResponses]) -> tuple[ScoredResponses, Batch]:
        """Run ``judge`` concurrently with the forward passes; return its result and the columns of log_probs_and_values."""
        found = self.together({"reward": judge, **self.forwards(batch)})
        return found.pop("reward"), reduce(Batch.union, found.values())

    def forwards(self, batch: Batch) -> dict[str, Callable[[], Any]]:
        """Forward passes over ``batch`` by role, as thunks for ``together``."""
        parts = {"actor": self.old_log_probs, "ref": self.ref_log_probs, "critic": self.values}
        return {role: partial(part, batch) for role, part in parts.items()}

    def old_log_probs(self, batch: Batch) -> Batch:
        """Log-probs of the policy before the update, and the columns that the estimator and the KL in the reward need.

        Bypass mode uses the rollout engine's log-probs. Returns no columns if the forward pass of the single update serves as the
        old policy (see old_log_probs_come_from_update). async_training.prox_logp: snapshot takes the weights of the last sync,
        loglinear returns the staleness of each token in steps, with which the update interpolates (proximal.py).
        """
        algorithm, prox_logp = self.config.algorithm, self.config.async_training.prox_logp
        if algorithm.rollout_correction.bypass_mode:
            return Batch(batch.lengths, tokens={"old_log_probs": batch.tokens["rollout_log_probs"]})
        if prox_logp == "loglinear":
            return Batch(batch.lengths, tokens={"staleness": self.trainer.step - batch.tokens["weight_version"]})
        if old_log_probs_come_from_update(self.config):
            return Batch(batch.lengths)
        outputs = {"log_probs"} | (ADVANTAGES.needs(algorithm.adv_estimator) & {"sum_pi_squared"})
        if algorithm.use_kl_in_reward:
            outputs |= {kl.columns(algorithm.kl_penalty)}
        with self.trainer.phases("old_log_prob"):
            # Without an update since the sync both are the same weights.
            is_older = prox_logp == "snapshot" and self.rollout.version != self.trainer.step
            forward = partial(self.actor.forward, snapshot=True) if is_older else self.actor.forward
            found = forward(batch, sorted(outputs))
        return renamed(found, log_probs="old_log_probs", all_log_probs="old_all_log_probs")

    def correction(self, batch: Batch) -> Batch:
        """Measure the mismatch of rollout engine and trainer; compute importance weights and rejected tokens if configured.

        Returns tokens kept_mask and is_weights, both (T,). Without old log-probs before the update, or in bypass mode, the actor
        loss does all of this instead.
        """
        config, tokens = self.config.algorithm.rollout_correction, batch.tokens
        if config.bypass_mode or "old_log_probs" not in tokens:
            return Batch(batch.lengths)
        # Of tokens that the weights of the old log-probs sampled: others differ because the policy has changed. A replayed batch
        # of an earlier program has no versions.
        versions = tokens.get("weight_version")
        version = self.rollout.version if self.config.async_training.prox_logp == "snapshot" else self.trainer.step
        fresh = tokens["response_mask"] if versions is None else tokens["response_mask"] * (versions == version)
        if fresh.any():
            self.trainer.metrics |= plain_numbers(mismatch(tokens["old_log_probs"], tokens["rollout_log_probs"], fresh))
        if not is_enabled(config):
            return Batch(batch.lengths)
        trajectories = Trajectories.of(batch)
        columns = ("old_log_probs", "rollout_log_probs", "response_mask")
        old, rollout, mask = (trajectories.gather(tokens[name]) for name in columns)
        found = rollout_correction(old, rollout, mask, trajectories.lengths, config)
        self.trainer.metrics |= found.metrics
        weights = {} if found.weights is None else {"is_weights": found.weights}
        return trajectories.split_columns({"kept_mask": found.mask} | weights)

    def ref_log_probs(self, batch: Batch) -> Batch:
        """Reference columns that the KL penalties of loss and reward need; no columns without a reference."""
        if self.ref is None:
            return Batch(batch.lengths)
        actor, algorithm = self.config.actor_rollout_ref.actor, self.config.algorithm
        outputs = {kl.columns(actor.kl_loss_type)} if actor.use_kl_loss else set()
        outputs |= {kl.columns(algorithm.kl_penalty)} if algorithm.use_kl_in_reward else set()
        with self.trainer.phases("ref"):
            found = self.ref.forward(batch, sorted(outputs))
        return renamed(found, log_probs="ref_log_probs", all_log_probs="ref_all_log_probs")

    def values(self, batch: Batch) -> Batch:
        """Critic values in units of the reward: tokens values (T,), rows last_value (B,); no columns without a critic."""
        if self.critic is None:
            return Batch(batch.lengths)
        with self.trainer.phases("values"):
            found = self.critic.forward(batch, ["values"])
        if self.config.critic.normalize_targets:
            # The head predicts normalised returns; see targets.
            found.tokens["values"] = found.tokens["values"] * self.returns.std + self.returns.mean
            found.rows["last_value"] = found.rows["last_value"] * self.returns.std + self.returns.mean
        return found

    def advantages(self, batch: Batch) -> Batch:
        """Advantages and returns from the token rewards, after the KL penalty if algorithm.use_kl_in_reward."""
        algorithm = self.config.algorithm
        with self.trainer.phases("adv"):
            trajectories = Trajectories.of(batch)
            whole = trajectories.joined(batch)
            rewards = whole.tokens["token_level_scores"]
            if algorithm.use_kl_in_reward:
                rewards, penalty = apply_kl_penalty(whole, rewards, algorithm, self.kl)
                self.trainer.metrics |= penalty
            result = estimated(advantage_inputs(whole, rewards, algorithm), algorithm)
            advantages, over = result.advantages, algorithm.whiten_advantages
            if over is not None:
                advantages = whitened(advantages, whole.tokens["response_mask"], whole.lengths, whole.rows["group"], over)
        columns = {"token_level_rewards": rewards, "advantages": advantages, "returns": result.returns}
        return trajectories.split_columns(columns)

    def loss_mask(self, batch: Batch) -> Batch:
        """Restrict response_mask to the tokens that the losses train on; sampled_mask keeps what it was. Add entropy_mask.

        Excludes rejected tokens, and truncated responses if algorithm.truncated_answers=mask. Advantages were computed over the
        complete responses, so the reward of a rejected token still reaches the tokens before it.
        """
        trajectories = Trajectories.of(batch)
        whole = trajectories.joined(batch)
        sampled = whole.tokens["response_mask"]
        mask = whole.tokens.get("kept_mask", sampled)
        if self.config.algorithm.truncated_answers == "mask":
            mask = mask * whole.rows["finished"].bool()[whole.segment_ids()]
        columns = {"response_mask": mask, "sampled_mask": sampled, "entropy_mask": entropy_mask(mask)}
        return trajectories.split_columns(columns)

    def update(self, step: int, batch: Batch) -> None:
        """Update critic and actor; the actor is frozen for the first trainer.critic_warmup steps."""
        parts: dict[str, Callable[[], dict[str, float]]] = {}
        if self.critic is not None:
            parts["critic"] = partial(self.learn, "critic", self.critic, self.targets(batch), step)
        if step > self.config.trainer.critic_warmup:
            parts["actor"] = partial(self.learn, "actor", self.actor, batch, step)
        for metrics in self.together(parts).values():
            self.trainer.metrics |= metrics
        if self.critic is not None and self.config.critic.normalize_targets:
            # After the update: the values in this batch were rescaled with the previous moments, and targets must invert those.
            self.returns.update(batch.tokens["returns"][batch.tokens["response_mask"].bool()])

    def learn(self, role: str, model: RemoteModel, batch: Batch, step: int) -> dict[str, float]:
        """Run the role's updates of the step and return its metrics. Records skipped updates and micro-batch back-off."""
        spec = self.updates[role]
        # A rollback repeats step numbers. The number of rollbacks enters the seed, so that random choices are not repeated.
        spec = replace(spec, seed=self.rollbacks.seed(spec.seed))
        with self.trainer.phases(f"update_{role}"):
            metrics = update(model, batch, spec, step, partial(self.trainer.health.skipped_updates.record, role, step))
        model.budget.tell(self.trainer.events, step)
        return under(role, metrics)

    def targets(self, batch: Batch) -> Batch:
        """Batch with values and returns in the units of the critic's head: normalised if critic.normalize_targets."""
        if not self.config.critic.normalize_targets:
            return batch
        columns = {name: (batch.tokens[name] - self.returns.mean) / self.returns.std for name in ("values", "returns")}
        return batch.with_tokens(**columns)

    def sync_weights(self, step: int) -> None:
        """Transfer the actor's weights to the rollout engine; sampled tokens record ``step`` as their weight_version."""
        policy = self.ahead
        with self.trainer.phases("sync"):
            if policy is None:
                metrics = self.rollout.sync_weights(step)
            else:
                keep_cache = policy.keeps_requests and policy.schedule.keeps_cache
                metrics = self.rollout.sync_weights(step, release=policy.release, keep_cache=keep_cache)
            self.trainer.metrics |= plain_numbers(metrics)
            self.take_snapshot()

    def take_snapshot(self) -> None:
        """Copy the actor's weights, which the engine has now, if they make the old log-probs until the next sync."""
        if self.config.async_training.prox_logp == "snapshot":
            self.actor.take_snapshot()

    def after(self, step: int, batch: Batch) -> None:
        """Collect metrics, validate, log and save. A diverged run is stopped or rolled back here."""
        trainer, config = self.trainer, self.config
        trainer.metrics |= batch.meta["metrics"]
        trainer.metrics |= data_metrics(batch, config.data.max_prompt_length)
        trainer.metrics |= reward_metrics(batch, self.prompts.data.data_sources)
        if trainer.is_due(step, config.trainer.test_freq):
            self.validate(step)
        if self.ahead is not None:
            seconds = trainer.phases.seconds
            trainer.metrics["timing_s/trainer_stall"] = seconds.get("gen", 0.0) + seconds.get("sync", 0.0)
        trainer.metrics |= self.performance(batch)
        alarm = trainer.complete(step)
        # Diverged weights are not saved: a rollback replaces them with those of an earlier checkpoint.
        if alarm is not None:
            self.roll_back(alarm)
        else:
            trainer.save_if_due()

    def validate(self, step: int) -> None:
        """Add validation metrics; omits them if the run was asked to stop while scoring takes too long."""
        try:
            with self.trainer.phases("testing"):
                self.trainer.metrics |= self.validation.run(step)
        except LeftUndone:
            self.trainer.events.add(step, "left", "validation: a signal to stop, and the rewards did not come")

    def performance(self, batch: Batch) -> dict[str, float]:
        """Times, throughput and MFU. The MFU of a model trained in a pool of its own counts that pool's GPUs only."""
        seconds = self.trainer.phases.seconds
        flops = {f"update_{role}": model.take_flops() for role, model in self.trainer.models.items()}
        # A model that was not updated in this step (critic warm-up) has no phase and no MFU.
        flops = {phase: count for phase, count in flops.items() if phase in seconds}
        idle = self.trainer.metrics.get("timing_s/rollout_idle")
        gpus = {f"update_{role}": model.group.world_size for role, model in self.trainer.models.items()}
        return performance_metrics(
            batch,
            seconds,
            self.together.n_gpus,
            flops=flops,
            peak=peak_flops(self.config.trainer.device),
            gpus_of={phase: gpus[phase] for phase in flops},
        ) | ({} if idle is None else idle_metrics(seconds, idle))

    def roll_back(self, alarm: Alarm) -> None:
        """Continue from the last checkpoint before divergence, with fresh prompts and seeds, in the same workers.

        The data streams keep their positions and responses in flight are discarded, so no prompt of the discarded steps is
        repeated. A run that is killed before its next checkpoint resumes from the one rolled back to, with no record of the
        rollback: it repeats the same steps, the same alarm and the same rollback, bitwise. Raises CheckFailed if the run cannot
        be rolled back.
        """
        trainer, most = self.trainer, self.config.alarms.max_rollbacks
        if self.rollbacks.count >= most:
            raise CheckFailed(
                f"stopped at step {trainer.step}: an alarm asks for a rollback, alarms.max_rollbacks={most}: {alarm.text}"
            )
        # A checkpoint that is still being written in the background may be the newest healthy one.
        trainer.saver.finish_pending()
        groups = {role: model.group for role, model in trainer.models.items()}
        check = partial(check_weights, groups=groups, watchdog=trainer.watchdog)
        checkpoint = find_up_to(trainer.lifecycle.run_dir, alarm.healthy_until, check)
        if checkpoint is None:
            raise CheckFailed(
                f"stopped at step {trainer.step}: an alarm asks for a rollback, and there is no checkpoint of step "
                f"{max(alarm.healthy_until, 0)} or before (trainer.save_freq, trainer.max_actor_ckpt_to_keep): {alarm.text}"
            )
        # Read before load(), which restores the streams' positions and the number of rollbacks along with all other state.
        left, count = trainer.step, self.rollbacks.count + 1
        if self.ahead is not None:
            self.ahead.release()
        streams = [part for part in trainer.stateful.values() if isinstance(part, PromptStream | PtxStream)]
        positions = [(stream, stream.state()) for stream in streams]
        trainer.load(checkpoint)
        # The discarded steps have trained on responses that were in flight at the checkpoint.
        for has_arrays in trainer.arrays.values():
            has_arrays.load_arrays({})
        self.rollbacks.count = count
        for stream, position in positions:
            stream.load(position)
        aside = trainer.tracker.go_back(checkpoint.step)
        trainer.saver.go_back(checkpoint.step)
        trainer.events.add(
            left,
            "rollback",
            f"{count} of at most {most}: back to the checkpoint of step {checkpoint.step}, the last from before the alarm's "
            f"steps ({alarm.healthy_until + 1} to {left}); on with other data and draws. What came after it is in {aside.name}/",
        )
        # The engine still has the diverged weights.
        self.sync_weights(checkpoint.step)


def old_log_probs_come_from_update(config: PPOConfig) -> bool:
    """Whether the update's own forward pass provides the old log-probs, which saves a separate pass.

    True with one epoch of one mini-batch, where both use the same weights, if no phase before the update reads the log-probs.
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == config.data.train_batch_size
    asked_for = algorithm.use_kl_in_reward or "sum_pi_squared" in ADVANTAGES.needs(algorithm.adv_estimator)
    correction = algorithm.rollout_correction
    return one_update and not asked_for and not correction.bypass_mode and not is_enabled(correction)


def has_old_log_probs(config: PPOConfig) -> bool:
    """Whether the batch contains old log-probs computed by the trainer before the update."""
    interpolated = config.async_training.prox_logp == "loglinear"
    return not (config.algorithm.rollout_correction.bypass_mode or interpolated or old_log_probs_come_from_update(config))


def under(role: str, metrics: dict[str, float]) -> dict[str, float]:
    """Prefix the engine's metrics (loss, grad_norm, lr) with the role; metrics of a loss function have a prefix already."""
    return {name if "/" in name else f"{role}/{name}": value for name, value in metrics.items()}
