"""Build the PPO loop from a configuration: workers, models, data, rewards, loggers.

Order of the start: everything that can fail without a process is checked first; then workers start in the background while the
controller reads the data; models are built next, and the rollout engine last, since it takes its weights from the actor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from configs.pools import Placement
from configs.reward_sources import wants_truth
from configs.schema.ppo import ActorConfig, CriticConfig, PPOConfig
from configs.validation.batches import wants_ref
from configs.validation.placement import placement_of
from trainer import harness
from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.kl import KLController
from trainer.algorithms.losses.actor_loss import ActorLoss, ActorLossConfig
from trainer.algorithms.moments import RunningMoments
from trainer.checkpoint.manifest import check_weights
from trainer.checkpoint.resume import Checkpoint, Stateful
from trainer.checkpoint.schedule_changes import rate_changes
from trainer.cluster.concurrency import Together, phases_of
from trainer.cluster.launch import open_backend, start_pools
from trainer.cluster.remote import BaseModel, RemoteModel, RemoteRollout
from trainer.cluster.role_builder import Training, limits, start_model, value_head
from trainer.cluster.watchdog import Watchdog
from trainer.data.dataset import PromptDataset
from trainer.data.order import DataOrder
from trainer.data.ptx_stream import ptx_stream
from trainer.data.stream import PromptStream
from trainer.harness import Trainer
from trainer.ppo.engine_checks import check_engines, reader, wants_critic
from trainer.ppo.loop import Loop, has_old_log_probs, old_log_probs_come_from_update
from trainer.ppo.update import UpdateSpec
from trainer.resilience.alarms import END_TOKENS, ppo_alarms
from trainer.resilience.restart import RunLifecycle
from trainer.resilience.rollback import Rollbacks
from trainer.rewards.failures import Failures
from trainer.rewards.models.reward_builder import start_reward_models
from trainer.rewards.models.reward_models import RewardModels
from trainer.rewards.remote.remote_rewards import needs_data_sources, open_rewards
from trainer.rewards.rules.reward_registry import check_data_sources
from trainer.rewards.scoring import Rewards
from trainer.rewards.shaping import Shaping
from trainer.rollout.rollout_builder import end_tokens, rollout_spec, sampling, validation_sampling
from trainer.rollout.sampler import Sampler
from trainer.rollout.validation import Validation
from trainer.run.events import Events
from trainer.run.logger import Logger
from trainer.run.start_times import Start
from trainer.tracking.token_dump import ResponseLog
from trainer.tracking.tracker import Tracker
from workers.controller.group import WorkerGroup
from workers.controller.logs import tell
from workers.engine.base import LossSpec
from workers.engine.hf.hf_model import vocab_size
from workers.model_path import read_ahead
from workers.plan import Limits
from workers.roles.rollout_engines import check_installed
from workers.rollout.base import Sampling
from workers.seeding import seed_of

ACTOR_LOSS, ACTOR_AND_PTX_LOSS = (
    "trainer.algorithms.losses.actor_loss:ActorLoss",
    "trainer.algorithms.losses.ptx_loss:ActorAndPtxLoss",
)


def run(config: PPOConfig, notices: Sequence[str], loggers: Sequence[Logger] = ()) -> None:
    """Train, and write the final report. notices: warnings about the configuration. loggers: in addition to trainer.logger."""
    check_installed(config.actor_rollout_ref.rollout.name)
    harness.run(config, lambda lifecycle: attempt(config, lifecycle), loggers)


def attempt(config: PPOConfig, lifecycle: RunLifecycle) -> None:
    """Run once, from the last checkpoint if there is one, in new worker processes; all of them have ended on return."""
    resume = harness.resume_from(config, lifecycle)
    with opened(Assembly, config, lifecycle, resume) as loop, lifecycle.stopping, loop.trainer.saver:
        loop.fit()
    lifecycle.stopping.check()


@contextmanager
def opened(assembly: type[Assembly], config: PPOConfig, lifecycle: RunLifecycle, resume: Checkpoint | None) -> Iterator[Loop]:
    """Yield the loop; workers, scorers and loggers end with the block. resume: checkpoint to load, None for a new run."""
    start = Start()
    # Fills the page cache in the background while the checks run and processes start; workers then read weights from memory.
    for path in dict.fromkeys((config.actor_rollout_ref.model.path, config.critic.model.path)):
        read_ahead(path)
    check_engines(config)
    tokenizer = reader(config)
    start.ended("checks")
    with ExitStack() as stack:
        rewards = stack.enter_context(open_rewards(config.reward))
        rewards.start()
        backend = stack.enter_context(open_backend(config.trainer, config.ray_kwargs, config.timeouts, lifecycle.run_dir))
        start.ended("backend")
        place = placement_of(config, has_critic=wants_critic(config))
        hosts = start_pools(backend, config.trainer, place, config.timeouts, engine=config.actor_rollout_ref.rollout.name)
        parts = assembly(config, place, hosts, lifecycle, tokenizer)
        # Before the tracker, which truncates the records of the run directory to the resumed step: a damaged checkpoint is found
        # while the directory is still unchanged.
        if resume is not None:
            check_weights(resume, hosts, parts.watchdog)
        rewards.wait_ready()
        tracker = harness.open_tracker(
            config,
            lifecycle,
            resume,
            parts.phases,
            parts.total_steps,
            shown_samples=config.trainer.log_val_generations,
            rollout_dir=config.trainer.rollout_data_dir,
        )
        stack.callback(tracker.close)
        start.ended("data")
        loop = parts.loop(rewards, resume, tracker, start)
        # Only now does the run directory belong to this run: an earlier failure leaves no status and no report in it.
        lifecycle.started = True
        yield loop


class Assembly:
    """Builds the parts of a loop, each from its part of the configuration.

    place: pool of each role. hosts: worker group of each role. Subclasses replace parts (trainer/ppo/replay.py); a dry run
    builds no models and passes no worker groups.
    """

    def __init__(
        self, config: PPOConfig, place: Placement, hosts: Mapping[str, WorkerGroup], lifecycle: RunLifecycle, tokenizer: Tokenizer
    ) -> None:
        self.config = config
        self.place = place
        self.hosts = hosts
        self.lifecycle = lifecycle
        self.watchdog = Watchdog(asdict(config.timeouts), lifecycle.run_dir)
        self.tokenizer = tokenizer
        self.phases = phases_of(place)
        self.data, self.held_out = self.prompts()
        # data.seed changes the order of the data alone; sampling and initialisation keep trainer.seed.
        seed = config.trainer.seed if config.data.seed is None else config.data.seed
        self.order = DataOrder(len(self.data), config.data.train_batch_size, seed, config.data.shuffle)
        actor = config.actor_rollout_ref.actor
        self.ptx = ptx_stream(config.data, actor.ptx_coef, actor.ptx_ratio, self.tokenizer, seed)
        for prompts in (self.data, self.held_out):
            prompts.check_tokens(vocab_size(config.actor_rollout_ref.model))
        if needs_data_sources(config.reward):
            check_data_sources(self.data.data_sources | self.held_out.data_sources)
        texts = () if self.ptx is None else self.ptx.data.notices
        for notice in (*self.data.notices, *self.held_out.notices, *texts, self.stream().order.notice):
            if notice is not None:
                tell(f"note: {notice}")
        self.total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * self.order.steps_per_epoch

    def loop(self, rewards: Rewards, resume: Checkpoint | None, tracker: Tracker, start: Start) -> Loop:
        """Build models and rollout engine, and assemble the loop."""
        config, rollout_config = self.config, self.config.actor_rollout_ref.rollout
        together = Together(self.hosts, self.place.n_gpus)
        actor, ref, critic = self.trained_and_reference(together)
        start.ended("models")
        if critic is not None and resume is None:
            tell(f"note: {value_head(config.critic.model)}")
        for change in self.rate_changes(resume):
            tell(f"note: {change}")
        # After the models: the engine is created next to the actor, or connects to the pool that has it.
        rollout = self.rollout()
        start.ended("engine")
        sampler = self.sampler(rollout, rewards, Events(self.lifecycle.run_dir))
        start.ended("rewards")
        self.phases.progress["reward"] = lambda: rewards.progress
        # A signal to stop shortens the time limit of scoring that is under way.
        self.lifecycle.stopping.hurry = self.watchdog.hurry
        prompts, kl, returns = self.stream(), KLController.start(config.algorithm.kl_ctrl), RunningMoments()
        trainer = self.trainer(
            tracker,
            resume,
            models={"actor": actor} | ({"critic": critic} if critic is not None else {}),
            stateful={
                "kl": kl,
                "returns": returns,
                "data": prompts,
                **({} if self.ptx is None else {"ptx": self.ptx}),
                "reward": sampler.shaping.running,
                **({} if sampler.models is None else {"reward_models": sampler.models}),
                "rollbacks": sampler.rollbacks,
            },
        )
        # Step 0, before anything is generated: without a stop token no response can terminate.
        if resume is None:
            tokens = end_tokens(self.sampling(), config.actor_rollout_ref.model)
            trainer.health.check(0, {END_TOKENS: float(tokens)})
        return Loop(
            config=config,
            trainer=trainer,
            together=together,
            start=start,
            prompts=prompts,
            sampler=sampler,
            actor=actor,
            ref=ref,
            critic=critic,
            rollout=rollout,
            updates={"actor": self.actor_update(), "critic": self.critic_update()},
            kl=kl,
            returns=returns,
            validation=Validation(
                self.held_out,
                sampler,
                tracker,
                n=rollout_config.val_kwargs.n,
                sampling=validation_sampling(self.sampling(), rollout_config.val_kwargs),
                batch_size=config.data.val_batch_size,
            ),
            # Without old log-probs in the batch, the log runs a forward pass over the few responses that it keeps.
            response_log=ResponseLog(
                self.lifecycle.run_dir, self.tokenizer, self.total_steps, forwards=not has_old_log_probs(config)
            ),
        )

    def trainer(
        self,
        tracker: Tracker,
        resume: Checkpoint | None,
        models: Mapping[str, RemoteModel],
        stateful: Mapping[str, Stateful],
    ) -> Trainer:
        options = self.config.trainer
        return harness.build_trainer(
            self.config,
            self.lifecycle,
            groups=self.hosts.values(),
            n_gpus=self.place.n_gpus,
            tokenizer=self.tokenizer,
            tracker=tracker,
            watchdog=self.watchdog,
            phases=self.phases,
            alarms=ppo_alarms(self.config),
            models=models,
            keep={"actor": options.max_actor_ckpt_to_keep, "critic": options.max_critic_ckpt_to_keep},
            resume=resume,
            total_steps=self.total_steps,
            save_every=options.save_freq,
            stateful=stateful,
        )

    def trained_and_reference(self, together: Together) -> tuple[RemoteModel, RemoteModel | BaseModel | None, RemoteModel | None]:
        """Build actor, reference and critic; models in different pools are built concurrently.

        Under LoRA the reference is the actor with its adapter disabled: no second copy of the weights.
        """
        parts: dict[str, Callable[[], RemoteModel]] = {"actor": self.actor}
        if self.wants_ref and not self.config.actor_rollout_ref.model.has_adapter:
            parts["ref"] = self.ref
        if self.wants_critic:
            parts["critic"] = self.critic
        built = together(parts)
        base = BaseModel(built["actor"], self.ref_limits()) if self.wants_ref and "ref" not in built else None
        return built["actor"], built.get("ref", base), built.get("critic")

    def rate_changes(self, resume: Checkpoint | None) -> Iterator[str]:
        """Warnings about learning rate schedules that a different number of steps changes in a resumed run."""
        if resume is not None:
            actor, critic = self.config.actor_rollout_ref.actor, self.config.critic
            optims = {"actor_rollout_ref.actor.optim": (actor.optim, self.config.trainer.critic_warmup)}
            optims |= {"critic.optim": (critic.optim, 0)} if self.wants_critic else {}
            yield from rate_changes(resume, optims, self.total_steps, self.order.steps_per_epoch)

    @property
    def wants_ref(self) -> bool:
        return wants_ref(self.config)

    @property
    def wants_critic(self) -> bool:
        return wants_critic(self.config)

    def stream(self) -> PromptStream:
        """Training prompts. With algorithm.filter_groups, a round may differ in size from a batch (data.gen_batch_size)."""
        gen_batch_size = self.config.data.gen_batch_size or self.order.batch_size
        return PromptStream(self.data, replace(self.order, batch_size=gen_batch_size))

    def sampler(self, rollout: RemoteRollout, rewards: Rewards, events: Events) -> Sampler:
        config = self.config
        return Sampler(
            rollout,
            rewards,
            self.tokenizer,
            self.watchdog,
            n=config.actor_rollout_ref.rollout.n,
            sampling=self.sampling(),
            seed=config.trainer.seed,
            groups=config.data.train_batch_size,
            filter_groups=config.algorithm.filter_groups,
            with_baselines="baselines" in ADVANTAGES.needs(config.algorithm.adv_estimator),
            reward=config.reward,
            shaping=Shaping(config.reward.shaping, RunningMoments()),
            models=self.reward_models(),
            rollbacks=Rollbacks(),
            failures=Failures(events),
        )

    def reward_models(self) -> RewardModels | None:
        config = self.config
        kwargs = config.data.apply_chat_template_kwargs
        hosts, workers = self.hosts["reward"], self.place.pool("reward")
        return start_reward_models(config.reward, hosts, workers, config.trainer, self.watchdog, self.tokenizer, kwargs)

    def prompts(self) -> tuple[PromptDataset, PromptDataset]:
        data, seed, scored = self.config.data, self.config.trainer.seed, wants_truth(self.config.reward)
        return (
            PromptDataset(data.train_files, self.tokenizer, data, max_samples=data.train_max_samples, seed=seed, scored=scored),
            PromptDataset(data.val_files, self.tokenizer, data, max_samples=data.val_max_samples, seed=seed, scored=scored),
        )

    def actor(self) -> RemoteModel:
        models = self.config.actor_rollout_ref
        actor, rollout = models.actor, models.rollout
        return start_model(
            self.hosts["actor"],
            "actor",
            model=models.model,
            head="lm",
            sharding=actor.sharding,
            device=self.config.trainer.device,
            seed=seed_of(self.config.trainer.seed, "actor"),
            # verl's keys: the limits of the actor's log-prob pass are in the rollout block.
            forward_limits=limits(
                actor,
                self.place.pool("actor"),
                per_gpu=rollout.log_prob_micro_batch_size_per_gpu,
                over_all=rollout.log_prob_micro_batch_size,
                dynamic=rollout.log_prob_use_dynamic_bsz,
                max_tokens=rollout.log_prob_max_token_len_per_gpu,
            ),
            training=Training(
                optim=actor.optim,
                grad_clip=actor.grad_clip,
                loss=LossSpec(ACTOR_LOSS if self.ptx is None else ACTOR_AND_PTX_LOSS, self.actor_loss()),
                ema_decay=actor.ema_decay,
                limits=limits(
                    actor,
                    self.place.pool("actor"),
                    per_gpu=actor.ppo_micro_batch_size_per_gpu,
                    over_all=actor.ppo_micro_batch_size,
                    dynamic=actor.use_dynamic_bsz,
                    max_tokens=actor.ppo_max_token_len_per_gpu,
                ),
                budget=self.lifecycle.budget("actor"),
                steps=self.total_steps,
                updates=self.actor_update().updates_a_step(self.config.data.train_batch_size),
            ),
            watchdog=self.watchdog,
        )

    def ref_limits(self) -> Limits:
        models, ref = self.config.actor_rollout_ref, self.config.actor_rollout_ref.ref
        return limits(
            models.actor if models.model.has_adapter else ref,
            self.place.pool("ref"),
            per_gpu=ref.log_prob_micro_batch_size_per_gpu,
            over_all=ref.log_prob_micro_batch_size,
            dynamic=ref.log_prob_use_dynamic_bsz,
            max_tokens=ref.log_prob_max_token_len_per_gpu,
        )

    def ref(self) -> RemoteModel:
        """The reference: the actor's initial weights, never trained. Not built under LoRA (see trained_and_reference)."""
        models, ref = self.config.actor_rollout_ref, self.config.actor_rollout_ref.ref
        return start_model(
            self.hosts["ref"],
            "ref",
            model=models.model,
            head="lm",
            sharding=ref.sharding,
            device=self.config.trainer.device,
            seed=seed_of(self.config.trainer.seed, "ref"),
            forward_limits=self.ref_limits(),
            training=None,
            watchdog=self.watchdog,
        )

    def critic(self) -> RemoteModel:
        critic = self.config.critic
        return start_model(
            self.hosts["critic"],
            "critic",
            model=critic.model,
            head="value",
            sharding=critic.sharding,
            device=self.config.trainer.device,
            seed=seed_of(self.config.trainer.seed, "critic"),
            forward_limits=limits(
                critic,
                self.place.pool("critic"),
                per_gpu=critic.forward_micro_batch_size_per_gpu,
                over_all=critic.forward_micro_batch_size,
                dynamic=critic.use_dynamic_bsz,
                max_tokens=critic.forward_max_token_len_per_gpu,
            ),
            training=Training(
                optim=critic.optim,
                grad_clip=critic.grad_clip,
                loss=LossSpec("trainer.algorithms.losses.value_losses:CriticLoss", critic),
                limits=limits(
                    critic,
                    self.place.pool("critic"),
                    per_gpu=critic.ppo_micro_batch_size_per_gpu,
                    over_all=critic.ppo_micro_batch_size,
                    dynamic=critic.use_dynamic_bsz,
                    max_tokens=critic.ppo_max_token_len_per_gpu,
                ),
                budget=self.lifecycle.budget("critic"),
                steps=self.total_steps,
                updates=self.critic_update().updates_a_step(self.config.data.train_batch_size),
            ),
            watchdog=self.watchdog,
        )

    def actor_loss(self) -> ActorLossConfig:
        return ActorLossConfig.of(self.config, old_log_probs_from_update=old_log_probs_come_from_update(self.config))

    def actor_update(self) -> UpdateSpec:
        # The workers build their own copy of the loss; this one only reports which columns it reads and prepares.
        loss = ActorLoss(self.actor_loss())
        return self._update(
            "actor",
            self.config.actor_rollout_ref.actor,
            columns=loss.columns if self.ptx is None else (*loss.columns, "ptx"),
            prepare=loss.prepare if loss.needs_preparation else None,
            extend=self.ptx.extend if self.ptx is not None else None,
        )

    def critic_update(self) -> UpdateSpec:
        return self._update("critic", self.config.critic, columns=("values", "returns"))

    def _update(self, name: str, role: ActorConfig | CriticConfig, **own: Any) -> UpdateSpec:
        return UpdateSpec(
            epochs=role.ppo_epochs,
            groups=role.ppo_mini_batch_size,
            shuffle=role.shuffle,
            agg_mode=role.loss_agg_mode,
            norm_length=role.loss_scale_factor or self.config.data.max_response_length,
            seed=seed_of(self.config.trainer.seed, f"{name}_update"),
            **own,
        )

    def rollout(self) -> RemoteRollout:
        models = self.config.actor_rollout_ref
        spec = rollout_spec(models.model, models.rollout, self.config.data, self.config.trainer.device, self.lifecycle.run_dir)
        return RemoteRollout(self.hosts["rollout"], spec, "actor", self.watchdog, trainers=self.hosts["actor"])

    def sampling(self) -> Sampling:
        models = self.config.actor_rollout_ref
        return sampling(models.rollout, self.tokenizer, models.model, self.config.data)
