"""The PPO loop: what a step does, in the order in which it happens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from configs.checks import world_size
from configs.schema.ppo import PPOConfig
from trainer.algorithms.advantages import ADVANTAGES, AdvantageInputs
from trainer.algorithms.kl import KLController, reward_with_kl
from trainer.checkpoint import Checkpoint, CheckpointWriter
from trainer.data.stream import PromptStream
from trainer.metrics import Phases, data_metrics, mismatch_metrics, performance_metrics, reward_metrics
from trainer.ppo.source import Source
from trainer.ppo.update import UpdateSpec, update
from trainer.ppo.validation import Validation
from trainer.remote import RemoteModel, RemoteRollout
from trainer.tracking import Tracker
from workers.batch import Batch


@dataclass
class Loop:
    """Built by assemble.py; ``fit`` runs it. ref and critic are None where the algorithm has no use for them."""

    config: PPOConfig
    run_dir: Path
    prompts: PromptStream
    data_sources: frozenset[str]
    source: Source
    actor: RemoteModel
    ref: RemoteModel | None
    critic: RemoteModel | None
    rollout: RemoteRollout
    actor_update: UpdateSpec
    critic_update: UpdateSpec
    kl: KLController
    validation: Validation
    tracker: Tracker
    phases: Phases
    peak_flops: float | None
    resume: Checkpoint | None
    total_steps: int
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def fit(self) -> None:
        self.begin()
        for step in self.remaining_steps():
            with self.phases("step"):
                batch = self.source.collect(step, self.prompts, self.phases)  # generated, scored answers
                batch |= self.old_log_probs(batch)
                batch |= self.ref_log_probs(batch)
                batch |= self.values(batch)
                batch |= self.advantages(batch)
                self.update(step, batch)
                self.sync_weights(step)
            self.after(step, batch)

    def begin(self) -> None:
        """Take up where the checkpoint left, or look at the model as it came."""
        if self.resume is not None:
            self.load(self.resume)
        self.sync_weights(self.step)
        if self.resume is None and (self.config.trainer.val_before_train or self.config.trainer.val_only):
            self.tracker.log(self.validation.run(self.step), self.step)

    def remaining_steps(self) -> Iterator[int]:
        """Steps count from 1. A step draws the next round of prompts, or several with algorithm.filter_groups."""
        if self.config.trainer.val_only:
            return
        for step in range(self.step + 1, self.total_steps + 1):
            self.phases.seconds.clear()
            self.metrics = {"training/global_step": step, "training/epoch": self.prompts.epoch}
            yield step

    def old_log_probs(self, batch: Batch) -> Batch:
        """The policy's log-probs before the update, and how far the rollout engine's own are from them.

        With one update a step that starts from this very policy, the update's own forward gives them: nothing to do here.
        """
        if old_log_probs_come_from_update(self.config):
            return Batch(batch.lengths)
        with self.phases("old_log_prob"):
            columns = renamed(self.actor.forward(batch, ["log_probs"]), log_probs="old_log_probs")
        self.metrics |= mismatch_metrics(batch | columns)
        return columns

    def ref_log_probs(self, batch: Batch) -> Batch:
        if self.ref is None:
            return Batch(batch.lengths)
        with self.phases("ref"):
            return renamed(self.ref.forward(batch, ["log_probs"]), log_probs="ref_log_probs")

    def values(self, batch: Batch) -> Batch:
        if self.critic is None:
            return Batch(batch.lengths)
        with self.phases("values"):
            return self.critic.forward(batch, ["values"])

    def advantages(self, batch: Batch) -> Batch:
        """Advantages and returns from the scores, less the KL to the reference where the reward has one."""
        algorithm, tokens = self.config.algorithm, batch.tokens
        with self.phases("adv"):
            rewards = tokens["token_level_scores"]
            if algorithm.use_kl_in_reward:
                old, ref, mask = tokens["old_log_probs"], tokens["ref_log_probs"], tokens["response_mask"]
                rewards, kl = reward_with_kl(rewards, old, ref, mask, algorithm.kl_penalty, self.kl.coefficient)
                mean_kl = float(kl.double().sum() / mask.sum())
                self.metrics |= {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": self.kl.coefficient}
                self.kl.update(mean_kl, len(batch))
            inputs = AdvantageInputs(rewards, tokens["response_mask"], batch.lengths, batch.rows["uid"], tokens.get("values"))
            result = ADVANTAGES[algorithm.adv_estimator](inputs, algorithm)
        columns = {"token_level_rewards": rewards, "advantages": result.advantages, "returns": result.returns}
        return Batch(batch.lengths, tokens=columns)

    def update(self, step: int, batch: Batch) -> None:
        """The critic learns first; the actor waits until the critic is warm."""
        if self.critic is not None:
            with self.phases("update_critic"):
                self.metrics |= under("critic", update(self.critic, batch, self.critic_update, step))
        if step > self.config.trainer.critic_warmup:
            with self.phases("update_actor"):
                self.metrics |= under("actor", update(self.actor, batch, self.actor_update, step))

    def sync_weights(self, step: int) -> None:
        with self.phases("sync"):
            self.rollout.sync_weights(step)

    def after(self, step: int, batch: Batch) -> None:
        """Validate, log, and save: a checkpoint's step is always in the log already."""
        config, self.step = self.config.trainer, step
        is_last = step == self.total_steps
        self.metrics |= batch.meta["metrics"]
        self.metrics |= data_metrics(batch, self.config.data.max_prompt_length)
        self.metrics |= reward_metrics(batch, self.data_sources)
        if config.test_freq > 0 and (is_last or step % config.test_freq == 0):
            with self.phases("testing"):
                self.metrics |= self.validation.run(step)
        flops = {"update_actor": self.actor.take_flops()} if "update_actor" in self.phases.seconds else {}
        if self.critic is not None:
            flops["update_critic"] = self.critic.take_flops()
        self.metrics |= performance_metrics(batch, self.phases.seconds, world_size(config), flops=flops, peak=self.peak_flops)
        self.tracker.log_rollouts(batch, step)
        self.tracker.log(self.metrics, step)
        if config.save_freq > 0 and (is_last or step % config.save_freq == 0):
            self.save(step)

    def save(self, step: int) -> None:
        config = self.config.trainer
        writer = CheckpointWriter(
            self.run_dir,
            step,
            config=asdict(self.config),
            state={"kl": self.kl.state(), "data": self.prompts.state(), "reward": self.source.shaping.running.state()},
            world_size=world_size(config),
            keep={"actor": config.max_actor_ckpt_to_keep, "critic": config.max_critic_ckpt_to_keep},
        )
        with self.phases("save_checkpoint"), writer as folder:
            self.actor.save(str(folder / "actor"))
            if self.critic is not None:
                self.critic.save(str(folder / "critic"))

    def load(self, checkpoint: Checkpoint) -> None:
        self.actor.load(str(checkpoint.role("actor")))
        if self.critic is not None:
            self.critic.load(str(checkpoint.role("critic")))
        state = checkpoint.manifest.state
        self.kl.load(state["kl"])
        self.prompts.load(state["data"])
        self.source.shaping.running.load(state["reward"])
        self.step = checkpoint.step


def old_log_probs_come_from_update(config: PPOConfig) -> bool:
    """One epoch, one mini-batch, and nobody before the update who asks for them: then they are exactly the update's own."""
    actor = config.actor_rollout_ref.actor
    one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == config.data.train_batch_size
    return one_update and not config.algorithm.use_kl_in_reward


def renamed(batch: Batch, **names: str) -> Batch:
    """The same columns, some under other names."""
    return Batch(batch.lengths, tokens={names.get(name, name): column for name, column in batch.tokens.items()})


def under(role: str, metrics: dict[str, float]) -> dict[str, float]:
    """The engine's own metrics (loss, grad_norm, lr) under the role's name; a loss's metrics have theirs already."""
    return {name if "/" in name else f"{role}/{name}": value for name, value in metrics.items()}
