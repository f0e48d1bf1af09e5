"""Build the PPO loop from a configuration: workers, models, data, rewards, loggers.

Order of the start: everything that can fail without a process is checked first; then workers start in the background while the
controller reads the data; models are built next, and the rollout engine last, since it takes its weights from the actor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from configs.schema.common import ModelConfig, ShardedConfig, steps_between
from configs.schema.placement import Placement
from configs.schema.ppo import ActorConfig, CriticConfig, PPOConfig, wants_truth
from configs.validation.batches import cuts, roles_of, wants_ref
from configs.validation.placement import placement_of
from configs.validation.rollout import engine_ranks
from trainer import harness
from trainer.agents.sessions.agent_kit import AgentSetup
from trainer.agents.sessions.pool import AgentPool
from trainer.agents.sessions.session_flow import AgentSessions
from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.kl import KLController
from trainer.algorithms.losses.actor_loss import ActorLoss, ActorLossConfig
from trainer.algorithms.moments import RunningMoments
from trainer.checkpoint.resume import Checkpoint, rate_changes
from trainer.cluster.concurrency import Together, phases_of
from trainer.cluster.launch import RunWorkers, open_backend, start_pools
from trainer.cluster.remote import BaseModel, RemoteModel
from trainer.cluster.role_builder import Training, limits, start_model, value_head
from trainer.cluster.watchdog import Watchdog
from trainer.data.chat import can_be_sent, load_tokenizer
from trainer.data.dataset import PromptDataset, PromptStream
from trainer.data.encoding import encode
from trainer.data.files import first_value
from trainer.data.ptx_stream import ptx_stream
from trainer.ppo.loop import Loop, has_old_log_probs, old_log_probs_come_from_update
from trainer.ppo.update import UpdateSpec
from trainer.resilience.alarms import END_TOKENS, ppo_alarms
from trainer.resilience.restart import Figures, RunLifecycle
from trainer.resilience.rollback import Rollbacks
from trainer.rewards.models.reward_builder import check_reward_models, start_reward_models
from trainer.rewards.models.reward_models import RewardModels
from trainer.rewards.remote.remote_rewards import needs_data_sources, open_rewards
from trainer.rewards.rules.reward_registry import check_data_sources
from trainer.rewards.scoring import Failures, Rewards
from trainer.rewards.shaping import Shaping
from trainer.rollout.ahead import RolloutsAhead, SyncSchedule
from trainer.rollout.buffer import GroupBuffer
from trainer.rollout.partial import FilteredPartialRollouts, PartialRollouts
from trainer.rollout.policies import FilteredRounds, OneRound
from trainer.rollout.remote_rollout import RemoteRollout
from trainer.rollout.rollout_builder import end_tokens, rollout_spec, sampling, validation_sampling
from trainer.rollout.sampler import BatchPolicy, Sampler
from trainer.rollout.validation import Validation
from trainer.run.events import Events
from trainer.run.logger import Logger
from trainer.run.run_dir import GLOBAL_STEP, checkpoint_steps, read_metrics
from trainer.run.timing import Start
from trainer.tracking.token_dump import ResponseLog
from trainer.tracking.tracker import Tracker, check_loggers
from workers.controller.logs import announce
from workers.engine.base import Head, LossSpec
from workers.engine.hf.hf_model import vocab_size
from workers.model_path import read_ahead
from workers.roles.rollout_engines import check_installed
from workers.roles.train_engines import check_engine, check_shared_heads, check_split
from workers.rollout.base import Sampling
from workers.seeding import seed_of

ACTOR_LOSS, ACTOR_AND_PTX_LOSS = (
    "trainer.algorithms.losses.actor_loss:ActorLoss",
    "trainer.algorithms.losses.ptx_loss:ActorAndPtxLoss",
)


def run(config: PPOConfig, notices: Sequence[str], loggers: Sequence[Logger] = (), figures: Figures | None = None) -> None:
    """Train, and write the final report.

    notices: warnings about the configuration. loggers: in addition to trainer.logger. figures: see harness.run.
    """
    check_installed(config.actor_rollout_ref.rollout.name)
    harness.run(config, lambda lifecycle: attempt(config, lifecycle), loggers, figures)


def attempt(config: PPOConfig, lifecycle: RunLifecycle) -> None:
    """Run once, from the last checkpoint if there is one, in new worker processes; all of them have ended on return."""
    resume = harness.resume_from(config, lifecycle, in_flight=continues_groups(config))
    # The saver is left first: it completes a pending checkpoint while the workers that write it still exist.
    with opened(Assembly, config, lifecycle, resume) as loop, lifecycle.stopping, loop.trainer.saver:
        loop.fit()
    lifecycle.stopping.check()


@contextmanager
def opened(assembly: type[Assembly], config: PPOConfig, lifecycle: RunLifecycle, resume: Checkpoint | None) -> Iterator[Loop]:
    """Yield the loop; workers, scorers and loggers end with the block. resume: checkpoint to load, None for a new run."""
    start = Start()
    check_records(config, lifecycle.run_dir, resume)
    # Fills the page cache in the background while the checks run and processes start; workers then read weights from memory.
    for path in dict.fromkeys((config.actor_rollout_ref.model.path, config.critic.model.path)):
        read_ahead(path)
    check_engines(config)
    tokenizer = reader(config)
    start.ended("checks")
    with ExitStack() as stack:
        rewards = stack.enter_context(open_rewards(config.reward))
        rewards.start()
        agents = assembly.agents(config, tokenizer, stack)
        backend = stack.enter_context(open_backend(config.trainer, config.ray_kwargs, config.timeouts, lifecycle.run_dir))
        start.ended("backend")
        place = placement_of(config, has_critic=wants_critic(config))
        rollout = config.actor_rollout_ref.rollout
        workers = start_pools(
            backend,
            config.trainer,
            place,
            config.timeouts,
            engine=rollout.name,
            engine_ranks=engine_ranks(rollout),
            replacement=lifecycle.replacement,
        )
        parts = assembly(config, place, workers, lifecycle, tokenizer)
        rewards.wait_ready()
        if agents is not None:
            agents.pool.wait_ready()
        tracker = harness.open_tracker(
            config,
            lifecycle,
            resume,
            workers.of_role,
            parts.watchdog,
            parts.phases,
            parts.total_steps,
            shown_samples=config.trainer.log_val_generations,
            rollout_dir=config.trainer.rollout_data_dir,
        )
        stack.callback(tracker.close)
        start.ended("data")
        loop = parts.loop(rewards, resume, tracker, start, agents)
        # Only now does the run directory belong to this run: an earlier failure leaves no status and no report in it.
        lifecycle.started = True
        yield loop


def continues_groups(config: PPOConfig) -> bool:
    """Whether the run continues responses that are in flight in a checkpoint."""
    flight = config.async_training
    return flight.mode in ("partial", "one_step_off") or (flight.mode == "async" and flight.max_staleness > 0)


def check_records(config: PPOConfig, run_dir: Path, resume: Checkpoint | None) -> None:
    """Raise ValueError if validating a checkpoint alone would cut what the run has recorded since: no step repeats it."""
    if not config.trainer.val_only or resume is None or not harness.is_own(resume, run_dir):
        return
    last = max([*checkpoint_steps(run_dir), *(int(entry[GLOBAL_STEP]) for entry in read_metrics(run_dir))])
    if last > resume.step:
        raise ValueError(
            f"trainer.val_only=true: step {resume.step} would be validated, and {run_dir} has records up to step {last}, which "
            "would be cut; name another trainer.default_local_dir, with trainer.resume_mode=resume_path "
            f"trainer.resume_from_path={resume.path}"
        )


def check_engines(config: PPOConfig) -> None:
    """Check loggers, training engines and reward models. Raises what check_engine and check_reward_models raise."""
    check_loggers(config.trainer.logger)
    for key, role, model, head in sharded_roles(config):
        check_engine(key, role, model, head, config.trainer.device)
    check_replicas(config)
    check_reward_models(config.reward, config.trainer)


def check_splits(config: PPOConfig) -> None:
    """Check that each role's GPUs, and an engine's, divide its model, on GPUs of another machine too. Raises ConfigError."""
    for key, role, model, head in sharded_roles(config):
        check_split(key, role, model, head)
    check_replicas(config)


def check_replicas(config: PPOConfig) -> None:
    """Check that the GPUs of a replica of the rollout engine divide the model's heads. Raises ConfigError."""
    name, actor = "actor_rollout_ref.rollout.tensor_model_parallel_size", config.actor_rollout_ref
    check_shared_heads(name, engine_ranks(actor.rollout), actor.model, "lm")


def sharded_roles(config: PPOConfig) -> Iterator[tuple[str, ShardedConfig, ModelConfig, Head]]:
    """(key, role, model, head) of actor, reference and critic."""
    for key, role in roles_of(config, has_critic=wants_critic(config)).items():
        if role is config.critic:
            yield key, config.critic, config.critic.model, "value"
        elif key.startswith("actor_rollout_ref."):
            yield key, role, config.actor_rollout_ref.model, "lm"


def reader(config: PPOConfig) -> Tokenizer:
    """Load the tokenizer, and check that the model is supported and the first row of each split can be encoded.

    Raises ValueError, one line.
    """
    vocab_size(config.actor_rollout_ref.model)
    tokenizer, data = load_tokenizer(config.actor_rollout_ref.model), config.data
    # One row per split only: a fast check for errors that affect all rows. The data is read while the workers start.
    splits = [("data.train_files", data.train_files[0]), ("data.val_files", data.val_files[0])]
    for key, name in splits if data.custom_cls.path is None else ():
        try:
            encode(tokenizer, [first_value(name, data.prompt_key)], data.apply_chat_template_kwargs)
        except ValueError as error:
            raise ValueError(f"{key}={name}, row 0: {error}") from error
    return tokenizer


def wants_critic(config: PPOConfig) -> bool:
    """Whether the run has a critic: requested by critic.enable, or needed by the advantage estimator."""
    return config.critic.enable is True or "values" in ADVANTAGES.needs(config.algorithm.adv_estimator)


class Assembly:
    """Builds the parts of a loop, each from its part of the configuration.

    place: pool of each role. Subclasses replace parts (trainer/ppo/replay.py); a dry run builds no models and passes no worker
    groups.
    """

    def __init__(
        self,
        config: PPOConfig,
        place: Placement,
        workers: RunWorkers,
        lifecycle: RunLifecycle,
        tokenizer: Tokenizer,
    ) -> None:
        self.config = config
        self.place = place
        self.workers = workers
        self.lifecycle = lifecycle
        self.watchdog = Watchdog(asdict(config.timeouts), lifecycle.run_dir)
        self.tokenizer = tokenizer
        self.phases = phases_of(place)
        # {key of a role and prefix of its keys: limits}, such as critic.forward_.
        self.limits = {f"{cut.key}.{cut.kind}": limits(cut) for cut in cuts(config, place, has_critic=wants_critic(config))}
        data, seed, scored = config.data, config.trainer.seed, wants_truth(config.reward)
        self.data = PromptDataset(data.train_files, tokenizer, data, max_samples=data.train_max_samples, seed=seed, scored=scored)
        self.held_out = PromptDataset(data.val_files, tokenizer, data, max_samples=data.val_max_samples, seed=seed, scored=scored)
        self.order, self.total_steps = harness.data_order(config, len(self.data))
        actor = config.actor_rollout_ref.actor
        self.ptx = ptx_stream(data, actor.ptx_coef, actor.ptx_ratio, tokenizer, self.order.seed)
        vocabulary = vocab_size(config.actor_rollout_ref.model)
        for prompts in (self.data, self.held_out):
            prompts.check_tokens(vocabulary)
        if self.ptx is not None:
            self.ptx.data.check_tokens(vocabulary, "actor_rollout_ref.model")
        if needs_data_sources(config.reward):
            check_data_sources(self.data.data_sources | self.held_out.data_sources)
        texts = () if self.ptx is None else self.ptx.data.notices
        announce((*self.data.notices, *self.held_out.notices, *texts, self.stream().order.notice))

    @staticmethod
    def agents(config: PPOConfig, tokenizer: Tokenizer, stack: ExitStack) -> AgentSessions | None:
        """Start the agent processes, which load tools and environments while workers start; None for responses of one turn."""
        rollout, data = config.actor_rollout_ref.rollout, config.data
        if not rollout.multi_turn.enable:
            return None
        run: dict[str, Any] = {}
        if rollout.agent.agent_loop_config_path is not None:
            run = asdict(config)
            run["actor_rollout_ref"]["rollout"] |= {
                "prompt_length": data.max_prompt_length, "response_length": data.max_response_length
            }  # fmt: skip
        setup = AgentSetup(tokenizer, data.apply_chat_template_kwargs, rollout.multi_turn, rollout.agent, run)
        pool = stack.enter_context(AgentPool(setup))
        in_step = config.async_training.clock == "logical"
        return AgentSessions(
            pool,
            max_prompt=data.max_prompt_length,
            max_tokens=data.max_response_length,
            max_length=rollout.max_model_len or data.max_prompt_length + data.max_response_length,
            in_step=in_step,
        )

    def loop(
        self, rewards: Rewards, resume: Checkpoint | None, tracker: Tracker, start: Start, agents: AgentSessions | None = None
    ) -> Loop:
        """Build models and rollout engine, and assemble the loop."""
        config, options, val = self.config, self.config.trainer, self.config.actor_rollout_ref.rollout.val_kwargs
        together = Together(self.workers.of_role, self.place.n_gpus)
        actor, ref, critic = self.trained_and_reference(together)
        start.ended("models")
        if critic is not None and resume is None:
            announce([value_head(config.critic.model)])
        announce(self.rate_changes(resume))
        # After the models: the engine is created next to the actor, or connects to the pool that has it.
        rollout = self.rollout()
        start.ended("engine")
        prompts = self.stream()
        policy = self.batch_policy(prompts, agents)
        sampler = Sampler(
            rollout,
            rewards,
            self.tokenizer,
            self.watchdog,
            n=config.actor_rollout_ref.rollout.n,
            sampling=self.sampling(),
            seed=config.trainer.seed,
            policy=policy,
            with_baselines=self.wants_baselines,
            reward=config.reward,
            shaping=Shaping(config.reward.shaping, RunningMoments()),
            models=self.reward_models(),
            rollbacks=Rollbacks(),
            failures=Failures(Events(self.lifecycle.run_dir)),
            agents=agents,
        )
        start.ended("rewards")
        self.phases.progress["reward"] = lambda: rewards.progress
        # A signal to stop shortens the time limit of scoring that is under way.
        self.lifecycle.stopping.hurry = self.watchdog.hurry
        kl, returns = KLController.start(config.algorithm.kl_ctrl), RunningMoments()
        trainer = harness.build_trainer(
            config,
            self.lifecycle,
            groups=self.workers.groups,
            n_gpus=self.place.n_gpus,
            tokenizer=self.tokenizer,
            tracker=tracker,
            watchdog=self.watchdog,
            phases=self.phases,
            alarms=ppo_alarms(config),
            models={"actor": actor} | ({"critic": critic} if critic is not None else {}),
            keep={"actor": options.max_actor_ckpt_to_keep, "critic": options.max_critic_ckpt_to_keep},
            resume=resume,
            total_steps=self.total_steps,
            save_every=steps_between(options.save_freq),
            # The names are keys in the manifests of checkpoints.
            stateful={
                "kl": kl,
                "returns": returns,
                "data": prompts,
                **({} if self.ptx is None else {"ptx": self.ptx}),
                "reward": sampler.shaping.running,
                **({} if sampler.models is None else {"reward_models": sampler.models}),
                "rollbacks": sampler.rollbacks,
                **({"filter_groups": policy} if isinstance(policy, FilteredRounds) else {}),
            },
            arrays={"groups": policy.buffer} if isinstance(policy, PartialRollouts) else {},
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
                n=val.n,
                sampling=validation_sampling(self.sampling(), val),
                batch_size=config.data.val_batch_size,
            ),
            # Without old log-probs in the batch, the log runs a forward pass over the few responses that it keeps.
            response_log=ResponseLog(
                self.lifecycle.run_dir, self.tokenizer, self.total_steps, forwards=not has_old_log_probs(config)
            ),
        )

    @property
    def wants_ref(self) -> bool:
        return wants_ref(self.config)

    @property
    def wants_critic(self) -> bool:
        return wants_critic(self.config)

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
        if not self.wants_ref or "ref" in built:
            return built["actor"], built.get("ref"), built.get("critic")
        return built["actor"], BaseModel(built["actor"], self.limits["actor_rollout_ref.ref.log_prob_"]), built.get("critic")

    def actor(self) -> RemoteModel:
        models, loss = self.config.actor_rollout_ref, ACTOR_LOSS if self.ptx is None else ACTOR_AND_PTX_LOSS
        training = self._training(
            "actor", models.actor, LossSpec(loss, self.actor_loss()), self.actor_update(), "actor_rollout_ref.actor.ppo_"
        )
        return self._model("actor", models.model, "lm", models.actor, "actor_rollout_ref.rollout.log_prob_", training)

    def ref(self) -> RemoteModel:
        """The reference: the actor's initial weights, never trained. Not built under LoRA (see trained_and_reference)."""
        models = self.config.actor_rollout_ref
        return self._model("ref", models.model, "lm", models.ref, "actor_rollout_ref.ref.log_prob_", None)

    def critic(self) -> RemoteModel:
        critic = self.config.critic
        loss = LossSpec("trainer.algorithms.losses.value_losses:CriticLoss", critic)
        training = self._training("critic", critic, loss, self.critic_update(), "critic.ppo_")
        return self._model("critic", critic.model, "value", critic, "critic.forward_", training)

    def _model(
        self, role: str, model: ModelConfig, head: Head, sharded: ShardedConfig, forward: str, training: Training | None
    ) -> RemoteModel:
        """Build a role on its workers. forward: key of the limits of its forward passes."""
        return start_model(
            self.workers.of_role[role],
            role,
            model=model,
            head=head,
            sharding=sharded.sharding,
            device=self.config.trainer.device,
            seed=seed_of(self.config.trainer.seed, role),
            forward_limits=self.limits[forward],
            training=training,
            watchdog=self.watchdog,
        )

    def _training(self, role: str, config: ActorConfig | CriticConfig, loss: LossSpec, update: UpdateSpec, key: str) -> Training:
        """How a role is trained. key: of the limits of its updates."""
        return Training(
            optim=config.optim,
            grad_clip=config.grad_clip,
            loss=loss,
            ema_decay=config.ema_decay if isinstance(config, ActorConfig) else None,
            limits=self.limits[key],
            budget=self.lifecycle.budget(role),
            steps=self.total_steps,
            updates=update.updates_a_step(self.config.data.train_batch_size),
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
            needs_trajectory=loss.config.needs_trajectory,
            interpolates=loss.config.interpolates,
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

    def rate_changes(self, resume: Checkpoint | None) -> Iterator[str]:
        """Warnings about learning rate schedules that a different number of steps changes in a resumed run."""
        if resume is not None:
            actor, critic = self.config.actor_rollout_ref.actor, self.config.critic
            optims = {"actor_rollout_ref.actor.optim": (actor.optim, self.config.trainer.critic_warmup)}
            optims |= {"critic.optim": (critic.optim, 0)} if self.wants_critic else {}
            yield from rate_changes(resume, optims, self.total_steps, self.order.steps_per_epoch)

    def rollout(self) -> RemoteRollout:
        models = self.config.actor_rollout_ref
        workers, replicas = self.workers.of_role, self.workers.replicas
        engines = len(replicas.groups) if replicas else workers["rollout"].world_size // engine_ranks(models.rollout)
        tokenizer = self.tokenizer if self.replicas_decode(engines) else None
        on = (self.config.trainer.device, self.lifecycle.run_dir)
        spec = rollout_spec(models.model, models.rollout, self.config.data, *on, tokenizer)
        return RemoteRollout(replicas or workers["rollout"], spec, "actor", self.watchdog, trainers=workers["actor"])

    def replicas_decode(self, engines: int) -> bool:
        """Whether rollout engines decode their responses.

        The controller decodes for one engine while that runs its next steps; for many it would be late. It also decodes sessions
        of agents, whose rows it joins.
        """
        return engines > 1 and not self.config.actor_rollout_ref.rollout.multi_turn.enable and can_be_sent(self.tokenizer)

    def sampling(self) -> Sampling:
        models = self.config.actor_rollout_ref
        return sampling(models.rollout, self.tokenizer, models.model, self.config.data)

    def batch_policy(self, prompts: PromptStream, agents: AgentSessions | None = None) -> BatchPolicy:
        config, groups, filters = self.config, self.config.data.train_batch_size, self.config.algorithm.filter_groups
        flight = config.async_training
        buffer = GroupBuffer(config.actor_rollout_ref.rollout.n + self.wants_baselines, prompts.prompt, agents)
        schedule = SyncSchedule(
            every=flight.trigger_parameter_sync_step,
            save_every=steps_between(config.trainer.save_freq),
            test_every=config.trainer.test_freq,
            pause=flight.pause,
            keeps_cache=flight.kv_cache == "keep",
        )
        options: dict[str, Any] = {"oversubmit": flight.oversubmit, "schedule": schedule, "clock": flight.clock}
        if staleness := {"one_step_off": schedule.every, "async": flight.max_staleness}.get(flight.mode or "", 0):
            return RolloutsAhead(buffer, groups=groups, max_staleness=staleness, **options)
        if flight.mode == "partial":
            options = {"oversubmit": flight.oversubmit, "max_age": flight.max_age}
            if filters.enable:
                # A prompt in flight is not drawn again, so a batch needs as many prompts.
                size, count = prompts.order.batch_size, prompts.rounds_per_epoch
                if size * count < groups:
                    raise ValueError(
                        f"data.gen_batch_size={size}: an epoch has {count} * {size} = {size * count} prompts, and a batch with "
                        f"async_training.mode=partial needs data.train_batch_size={groups} at the same time; use null"
                    )
                return FilteredPartialRollouts(buffer, filters, groups=groups, **options)
            return PartialRollouts(buffer, groups=groups, **options)
        if filters.enable:
            return FilteredRounds(filters, groups)
        return OneRound()

    @property
    def wants_baselines(self) -> bool:
        """Whether the advantage estimator needs a greedy response to each prompt."""
        return "baselines" in ADVANTAGES.needs(self.config.algorithm.adv_estimator)

    def stream(self) -> PromptStream:
        """Training prompts. With algorithm.filter_groups, a round may differ in size from a batch (data.gen_batch_size)."""
        gen_batch_size = self.config.data.gen_batch_size or self.order.batch_size
        return PromptStream(self.data, replace(self.order, batch_size=gen_batch_size))

    def reward_models(self) -> RewardModels | None:
        config, on = self.config, (self.workers.of_role["reward"], self.place.pool("reward"), self.config.trainer, self.watchdog)
        return start_reward_models(config.reward, *on, self.tokenizer, config.data.apply_chat_template_kwargs)
