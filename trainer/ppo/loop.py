"""The PPO loop: what a step does, in the order in which it happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

from configs.checks import world_size
from configs.pools import Placement
from configs.schema.ppo import PPOConfig
from trainer.alarms import END_TOKENS, Alarms, react
from trainer.algorithms import kl
from trainer.algorithms.actor_loss import entropy_mask
from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.correction import is_enabled, mismatch, rollout_correction
from trainer.algorithms.kl import KLController, apply_kl_penalty
from trainer.algorithms.moments import RunningMoments
from trainer.algorithms.whitening import whitened
from trainer.answers import AnswerLog
from trainer.checkpoint import Checkpoint, Stateful
from trainer.data.ptx import PtxStream
from trainer.data.stream import PromptStream
from trainer.determinism import KernelWatch
from trainer.events import Events
from trainer.metrics import Phases, data_metrics, performance_metrics, reward_metrics
from trainer.ppo.columns import advantage_inputs, as_drawn, renamed
from trainer.ppo.rollback import Rollbacks, roll_back
from trainer.ppo.source import Judged, Source
from trainer.ppo.together import Together
from trainer.ppo.update import UpdateSpec, update
from trainer.ppo.validation import Validation
from trainer.remote import BaseModel, RemoteModel, RemoteRollout
from trainer.rewards.local_model import LocalModel
from trainer.saving import Saver
from trainer.skips import Skips
from trainer.start import Start, sentence
from trainer.stopping import Stopping
from trainer.tracking import Tracker
from trainer.watchdog import LeftUndone, Watchdog
from workers.batch import Batch
from workers.metric import plain_numbers


@dataclass
class Loop:
    """Built by assemble.py; ``fit`` runs it. ref, critic and ptx are None where the algorithm has no use for them. end_tokens: of
    those that end an answer, how many the policy can write."""

    config: PPOConfig
    run_dir: Path
    place: Placement
    together: Together
    prompts: PromptStream
    ptx: PtxStream | None
    data_sources: frozenset[str]
    source: Source
    actor: RemoteModel
    ref: RemoteModel | BaseModel | None
    critic: RemoteModel | None
    rollout: RemoteRollout
    actor_update: UpdateSpec
    critic_update: UpdateSpec
    kl: KLController
    returns: RunningMoments
    validation: Validation
    tracker: Tracker
    answers: AnswerLog
    events: Events
    saver: Saver
    watchdog: Watchdog
    stopping: Stopping
    alarms: Alarms
    skips: Skips
    rollbacks: Rollbacks
    kernels: KernelWatch | None
    phases: Phases
    peak_flops: float | None
    resume: Checkpoint | None
    total_steps: int
    end_tokens: int
    start: Start
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def fit(self) -> None:
        self.begin()
        for step in self.remaining_steps():
            with self.phases("step"):
                batch = self.collect(step)  # generated, scored answers
                if batch is None:
                    continue
                batch |= self.log_probs_and_values(batch)
                batch |= self.correction(batch)  # where the rollout engine was not quite the policy
                batch |= self.advantages(batch)
                batch |= self.loss_mask(batch)
                self.answers.keep(step, batch, self.actor)  # a few, for the report
                self.update(step, batch)
                self.sync_weights(step)
            self.after(step, batch)

    def begin(self) -> None:
        """Take up where the checkpoint left, or look at the model as it came."""
        if self.resume is not None:
            self.load(self.resume)
            self.start.ended("load")
        self.sync_weights(self.step)
        self.tell_start()
        if self.resume is None:
            react(self.alarms.see(0, {END_TOKENS: float(self.end_tokens)}), self.events, 0)
        if self.resume is None and (self.config.trainer.val_before_train or self.config.trainer.val_only):
            measured = self.validation.run(self.step)
            self.tracker.log(measured, self.step)
            react(self.alarms.see(0, measured), self.events, 0)

    def tell_start(self) -> None:
        """To the events, once all of it is over."""
        self.start.ended("sync")
        roles = [
            role for role in (self.actor, self.ref, self.critic, self.rollout) if isinstance(role, RemoteModel | RemoteRollout)
        ]
        groups = {role.group.name: role.group for role in roles}.values()
        asked = (self.watchdog.call(group, "ask", "times of the start", "start_times") for group in groups)
        seconds = self.start.seconds([times for of_group in asked for times in of_group])
        self.events.add(self.step, "start", sentence(seconds), seconds)

    def remaining_steps(self) -> Iterator[int]:
        """Steps count from 1. A step draws the next round of prompts, or several with algorithm.filter_groups. After a rollback
        steps come again, with other prompts. A run that has to stop is saved before it does."""
        if self.config.trainer.val_only:
            return
        while self.step < self.total_steps:
            if self.stopping.is_due(self.step, self.phases.seconds, self.events):
                if self.step and not self.saver.has(self.step):
                    self.save(self.step)
                return
            self.phases.clear()
            self.watchdog.step = step = self.step + 1
            before = self.metrics
            self.metrics = {"training/global_step": step, "training/epoch": self.prompts.epoch} | self.rollbacks.metrics()
            yield step
            if self.step < step:  # it was left, and the one before is saved
                self.metrics = before

    def collect(self, step: int) -> Batch | None:
        """The step's batch, kept as it came if trainer.rollout_data_dir says where. None if the run is to stop and the rewards do
        not come: then the state is that of the step before."""
        parts = self.stateful()
        before = {name: parts[name].state() for name in ("data", "reward_models") if name in parts}
        try:
            batch = self.source.collect(step, self.prompts, self.phases, self.score_beside if self.scoring_overlaps else None)
        except LeftUndone:
            for name, state in before.items():
                parts[name].load(state)
            self.events.add(self.step, "left", f"step {step}: a signal to stop, and the rewards did not come")
            return None
        begun_with = self.config.actor_rollout_ref.model.path if self.resume is None else str(self.resume.path)
        self.tracker.log_rollouts(as_drawn(batch), step, begun_with, self.source.left_out)
        return batch

    @property
    def scoring_overlaps(self) -> bool:
        """Reward models on GPUs of their own score the answers while the other models make log-probs and values of them. Servers
        are asked from the main thread: Watchdog.own."""
        scorers = self.source.models
        if scorers is None or scorers.group is self.actor.group or self.source.chooses:
            return False
        return all(isinstance(model.scorer, LocalModel) for model in scorers.models)

    def log_probs_and_values(self, batch: Batch) -> Batch:
        """What each model makes of the answers; those in different pools work at the same time. Nothing if they did so early."""
        if self.scoring_overlaps:
            return Batch(batch.lengths)
        return reduce(Batch.union, self.together(self.forwards(batch)).values())

    def score_beside(self, batch: Batch, judge: Callable[[], Judged]) -> tuple[Judged, Batch]:
        """What ``judge`` returns, and log_probs_and_values of the same answers."""
        found = self.together({"reward": judge, **self.forwards(batch)})
        return found.pop("reward"), reduce(Batch.union, found.values())

    def forwards(self, batch: Batch) -> dict[str, Callable[[], Any]]:
        """By role."""
        parts = {"actor": self.old_log_probs, "ref": self.ref_log_probs, "critic": self.values}
        return {role: partial(part, batch) for role, part in parts.items()}

    def old_log_probs(self, batch: Batch) -> Batch:
        """The policy's log-probs before the update.

        With one update a step that starts from this very policy, the update's own forward gives them: nothing to do here.
        In bypass mode they are the rollout engine's own.
        """
        algorithm = self.config.algorithm
        if algorithm.rollout_correction.bypass_mode:
            return Batch(batch.lengths, tokens={"old_log_probs": batch.tokens["rollout_log_probs"]})
        if old_log_probs_come_from_update(self.config):
            return Batch(batch.lengths)
        outputs = {"log_probs"} | (ADVANTAGES.needs(algorithm.adv_estimator) & {"sum_pi_squared"})
        if algorithm.use_kl_in_reward:
            outputs |= {kl.columns(algorithm.kl_penalty)}
        with self.phases("old_log_prob"):
            found = self.actor.forward(batch, sorted(outputs))
        return renamed(found, log_probs="old_log_probs", all_log_probs="old_all_log_probs")

    def correction(self, batch: Batch) -> Batch:
        """How far the rollout engine's log-probs are from the policy's; importance weights of the tokens' loss, and which tokens
        are rejected. Where the policy's are not made before the update, it sees to this."""
        config, tokens = self.config.algorithm.rollout_correction, batch.tokens
        if config.bypass_mode or "old_log_probs" not in tokens:
            return Batch(batch.lengths)
        gap = mismatch(tokens["old_log_probs"], tokens["rollout_log_probs"], tokens["response_mask"])
        self.metrics |= plain_numbers(gap)
        if not is_enabled(config):
            return Batch(batch.lengths)
        found = rollout_correction(
            tokens["old_log_probs"], tokens["rollout_log_probs"], tokens["response_mask"], batch.lengths, config
        )
        self.metrics |= found.metrics
        weights = {} if found.weights is None else {"is_weights": found.weights}
        return Batch(batch.lengths, tokens={"kept_mask": found.mask} | weights)

    def ref_log_probs(self, batch: Batch) -> Batch:
        if self.ref is None:
            return Batch(batch.lengths)
        actor, algorithm = self.config.actor_rollout_ref.actor, self.config.algorithm
        outputs = {kl.columns(actor.kl_loss_type)} if actor.use_kl_loss else set()
        outputs |= {kl.columns(algorithm.kl_penalty)} if algorithm.use_kl_in_reward else set()
        with self.phases("ref"):
            found = self.ref.forward(batch, sorted(outputs))
        return renamed(found, log_probs="ref_log_probs", all_log_probs="ref_all_log_probs")

    def values(self, batch: Batch) -> Batch:
        if self.critic is None:
            return Batch(batch.lengths)
        with self.phases("values"):
            found = self.critic.forward(batch, ["values"])
        if self.config.critic.normalize_targets:
            found.tokens["values"] = found.tokens["values"] * self.returns.std + self.returns.mean
            found.rows["last_value"] = found.rows["last_value"] * self.returns.std + self.returns.mean
        return found

    def advantages(self, batch: Batch) -> Batch:
        """Advantages and returns from the scores, less the KL to the reference where the reward has one."""
        algorithm, tokens = self.config.algorithm, batch.tokens
        with self.phases("adv"):
            rewards = tokens["token_level_scores"]
            if algorithm.use_kl_in_reward:
                rewards, penalty = apply_kl_penalty(batch, rewards, algorithm, self.kl)
                self.metrics |= penalty
            result = ADVANTAGES[algorithm.adv_estimator](advantage_inputs(batch, rewards, algorithm), algorithm)
            advantages, over = result.advantages, algorithm.whiten_advantages
            if over is not None:
                advantages = whitened(advantages, tokens["response_mask"], batch.lengths, batch.rows["uid"], over)
        columns = {"token_level_rewards": rewards, "advantages": advantages, "returns": result.returns}
        return Batch(batch.lengths, tokens=columns)

    def loss_mask(self, batch: Batch) -> Batch:
        """From here on response_mask is what the losses see: without rejected tokens, and without cut answers if they are masked.

        Advantages were taken over the whole answers: a reward at a rejected token is not lost.
        """
        mask = batch.tokens.get("kept_mask", batch.tokens["response_mask"])
        if self.config.algorithm.truncated_answers == "mask":
            mask = mask * batch.rows["finished"].bool()[batch.segment_ids()]
        return Batch(batch.lengths, tokens={"response_mask": mask, "entropy_mask": entropy_mask(mask)})

    def update(self, step: int, batch: Batch) -> None:
        """Critic and actor learn; the actor waits until the critic is warm."""
        parts: dict[str, Callable[[], dict[str, float]]] = {}
        if self.critic is not None:
            parts["critic"] = partial(self.learn, "critic", self.critic, self.targets(batch), self.critic_update, step)
        if step > self.config.trainer.critic_warmup:
            parts["actor"] = partial(self.learn, "actor", self.actor, batch, self.actor_update, step)
        for metrics in self.together(parts).values():
            self.metrics |= metrics
        if self.critic is not None and self.config.critic.normalize_targets:  # these values were made with the old ones
            self.returns.see(batch.tokens["returns"][batch.tokens["response_mask"].bool()])

    def learn(self, role: str, model: RemoteModel, batch: Batch, spec: UpdateSpec, step: int) -> dict[str, float]:
        """The role's updates of the step, to its metrics; those that are skipped are kept and told."""
        spec = replace(spec, seed=self.rollbacks.seed(spec.seed))
        with self.phases(f"update_{role}"):
            metrics = update(model, batch, spec, step, partial(self.skips.see, role, step))
        model.budget.tell(self.events, step)
        return under(role, metrics)

    def targets(self, batch: Batch) -> Batch:
        """Values and returns in the units of the critic's head."""
        if not self.config.critic.normalize_targets:
            return batch
        columns = {name: (batch.tokens[name] - self.returns.mean) / self.returns.std for name in ("values", "returns")}
        return batch.with_tokens(**columns)

    def sync_weights(self, step: int) -> None:
        with self.phases("sync"):
            self.metrics |= plain_numbers(self.rollout.sync_weights(step))

    def after(self, step: int, batch: Batch) -> None:
        """Validate, log, and save: a checkpoint's step is always in the log already. A sick run stops here, or goes back."""
        config, self.step = self.config.trainer, step
        is_last = step == self.total_steps
        self.metrics |= batch.meta["metrics"] | self.skips.tell(step)
        if self.kernels is not None:
            self.kernels.look(step)
        self.metrics |= data_metrics(batch, self.config.data.max_prompt_length)
        self.metrics |= reward_metrics(batch, self.data_sources)
        if config.test_freq > 0 and (is_last or step % config.test_freq == 0):
            try:
                with self.phases("testing"):
                    self.metrics |= self.validation.run(step)
            except LeftUndone:
                self.events.add(step, "left", "validation: a signal to stop, and the rewards did not come")
        flops = {"update_actor": self.actor.take_flops()} if "update_actor" in self.phases.seconds else {}
        if self.critic is not None:
            flops["update_critic"] = self.critic.take_flops()
        at_work = {phase: world_size(self.place.pool(phase.removeprefix("update_"))) for phase in flops}
        self.metrics |= performance_metrics(
            batch, self.phases.seconds, self.place.n_gpus, flops=flops, peak=self.peak_flops, gpus_of=at_work
        )
        self.tracker.log(self.metrics, step)
        alarm = react(self.alarms.see(step, self.metrics), self.events, step)
        if alarm is not None:
            return roll_back(self, alarm)
        if config.save_freq > 0 and (is_last or step % config.save_freq == 0):
            self.save(step)
        self.saver.settle(patient=False)
        self.tracker.log_spans(self.phases.spans, self.watchdog.take_calls(), step)

    def save(self, step: int) -> None:
        state = {name: part.state() for name, part in self.stateful().items()}
        with self.phases("save_checkpoint"):
            self.saver.save(step, self.models(), state, self.metrics)

    def models(self) -> dict[str, RemoteModel]:
        """Those that learn, by their name in a checkpoint."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})

    def stateful(self) -> dict[str, Stateful]:
        """What the controller remembers from step to step."""
        budgets = {f"{role.role}_budget": role.budget for role in (self.actor, self.critic) if role is not None}
        return {
            "kl": self.kl,
            "returns": self.returns,
            "data": self.prompts,
            **({} if self.ptx is None else {"ptx": self.ptx}),
            "reward": self.source.shaping.running,
            **({} if self.source.models is None else {"reward_models": self.source.models}),
            "alarms": self.alarms,
            "skips": self.skips,
            "rollbacks": self.rollbacks,
            **budgets,
        }

    def load(self, checkpoint: Checkpoint) -> None:
        for role, model in self.models().items():
            model.load(str(checkpoint.role(role)))
        for name, part in self.stateful().items():
            part.load(checkpoint.state(name))
        self.step = self.watchdog.step = checkpoint.step


def old_log_probs_come_from_update(config: PPOConfig) -> bool:
    """One epoch, one mini-batch, and nobody before the update who asks for them: then they are exactly the update's own."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == config.data.train_batch_size
    asked_for = algorithm.use_kl_in_reward or "sum_pi_squared" in ADVANTAGES.needs(algorithm.adv_estimator)
    correction = algorithm.rollout_correction
    return one_update and not asked_for and not correction.bypass_mode and not is_enabled(correction)


def has_old_log_probs(config: PPOConfig) -> bool:
    """Whether the batch has the policy's own before the update."""
    return not (config.algorithm.rollout_correction.bypass_mode or old_log_probs_come_from_update(config))


def under(role: str, metrics: dict[str, float]) -> dict[str, float]:
    """The engine's own metrics (loss, grad_norm, lr) under the role's name; a loss's metrics have theirs already."""
    return {name if "/" in name else f"{role}/{name}": value for name, value in metrics.items()}
