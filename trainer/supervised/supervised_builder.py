"""From a configuration to a running supervised loop."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

from configs.base.locks import locked
from configs.schema.supervised import RewardModelConfig, SFTConfig
from configs.validation.programs import world_size
from trainer.checkpoint.manifest import check_weights
from trainer.checkpoint.resume import check_config
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.schedule_changes import rate_changes
from trainer.cluster.determinism import KernelWatch, worker_environment
from trainer.cluster.launch import open_backend, start_hosts
from trainer.cluster.role_builder import Training, limits, start_model
from trainer.cluster.watchdog import Watchdog
from trainer.data.chat import load_tokenizer
from trainer.data.order import DataOrder
from trainer.report.run_report import GrowingReport, finish
from trainer.resilience.alarms import sft_alarms
from trainer.resilience.restart import Lifetime, keep_going
from trainer.resilience.skipped_updates import Skips
from trainer.run.events import Events
from trainer.run.timing import Phases
from trainer.supervised.reward_model_task import RewardModelTask
from trainer.supervised.sft_task import SFT
from trainer.supervised.supervised_loop import SupervisedLoop
from trainer.supervised.task import Task
from trainer.tracking.tracker import Tracker
from workers.controller.logs import tell
from workers.roles.train_engines import check_engine
from workers.seeding import seed_of

Config = SFTConfig | RewardModelConfig


def run(config: Config, notices: Sequence[str]) -> None:
    """Train as ``config`` says, and export the model if it says so. notices: what the user was told about the configuration."""
    head = SFT.head if isinstance(config, SFTConfig) else RewardModelTask.head
    check_engine("engine", config.engine, config.model, head, config.trainer.device)
    run_dir = Path(config.trainer.default_local_dir)
    with locked(run_dir, "trainer.default_local_dir", private=True):
        life = Lifetime(config.trainer, run_dir)
        try:
            keep_going(life, lambda: attempt(config, life), hushed=not config.ray_kwargs.ray_init.get("log_to_driver"))
        finally:
            if life.started:
                finish(run_dir)


def attempt(config: Config, life: Lifetime) -> None:
    """From the last checkpoint on, in processes of its own, none of which is left."""
    trainer, run_dir, resume = config.trainer, life.run_dir, life.resume()
    if resume is not None:
        for change in check_config(resume.manifest.config, asdict(config)):
            tell(f"note: resumed with another {change}")
    with ExitStack() as stack:
        backend = stack.enter_context(open_backend(trainer, config.ray_kwargs, config.timeouts, run_dir))
        deterministic = trainer.deterministic
        environment = worker_environment(deterministic)
        hosts = start_hosts(backend, trainer, config.timeouts, deterministic=deterministic, env=environment)
        watchdog = Watchdog(asdict(config.timeouts), run_dir)
        if resume is not None:
            check_weights(resume, {"model": hosts}, watchdog)
        tokenizer = load_tokenizer(config.model)
        task: Task = SFT(config, tokenizer) if isinstance(config, SFTConfig) else RewardModelTask(config, tokenizer)
        seed = trainer.seed if config.data.seed is None else config.data.seed
        order = DataOrder(len(task), config.data.train_batch_size, seed, config.data.shuffle)
        for notice in (*task.notices, order.notice):
            if notice is not None:
                tell(f"note: {notice}")
        total_steps = trainer.total_training_steps or trainer.total_epochs * order.steps_per_epoch
        if resume is not None:
            for change in rate_changes(resume, {"optim": (config.optim, 0)}, total_steps, order.steps_per_epoch):
                tell(f"note: {change}")
        phases = Phases()
        tracker = stack.enter_context(
            closing(
                Tracker(
                    trainer.logger,
                    run_dir,
                    trainer.project_name,
                    trainer.experiment_name,
                    asdict(config),
                    resume_step=resume.step if resume is not None else None,
                    total_steps=total_steps,
                    restarted=life.restarted,
                    more=[GrowingReport(run_dir)],
                    phases=phases,
                )
            )
        )
        life.started = True
        cut = limits(
            config.engine,
            trainer,
            per_gpu=config.data.micro_batch_size_per_gpu,
            over_all=None,
            dynamic=config.data.use_dynamic_bsz,
            max_tokens=config.data.max_token_len_per_gpu,
        )
        model = start_model(
            hosts,
            "model",
            model=task.model,
            head=task.head,
            sharding=config.engine.sharding,
            device=trainer.device,
            seed=seed_of(trainer.seed, "model"),
            forward_limits=cut,
            training=Training(
                optim=config.optim,
                grad_clip=config.engine.grad_clip,
                loss=task.loss,
                limits=cut,
                budget=life.budget("model"),
                steps=total_steps,
                updates=1,
            ),
            watchdog=watchdog,
        )
        events = Events(run_dir)
        loop = SupervisedLoop(
            config=config,
            run_dir=run_dir,
            task=task,
            order=order,
            model=model,
            tracker=tracker,
            saver=Saver(
                run_dir,
                events,
                config=asdict(config),
                world_size=world_size(trainer),
                keep={"model": trainer.max_ckpt_to_keep},
                options=trainer.checkpoint,
                best_metric=trainer.best_metric,
                tokenizer=tokenizer,
            ),
            watchdog=watchdog,
            stopping=life.stopping,
            events=events,
            alarms=sft_alarms(config.alarms),
            skips=Skips(run_dir, events, asdict(config)),
            phases=phases,
            kernels=KernelWatch([hosts], events, watchdog) if trainer.deterministic else None,
            resume=resume,
            total_steps=total_steps,
        )
        with life.stopping, loop.saver:
            loop.fit()
        life.stopping.check()
        if trainer.export_dir is not None:
            model.export_hf(trainer.export_dir)
            tokenizer.save_pretrained(trainer.export_dir)
            for name, content in task.beside(model, loop.step).items():
                Path(trainer.export_dir, name).write_bytes(content)
            print(f"model: {trainer.export_dir}")
