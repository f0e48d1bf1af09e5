"""Build and run the supervised loop from a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.schema.common import steps_between
from configs.schema.supervised import DPOConfig, RewardModelConfig, SFTConfig, SupervisedConfig
from configs.validation.batches import supervised_cut
from configs.validation.rollout import world_size
from trainer import harness
from trainer.checkpoint.resume import rate_changes
from trainer.cluster.determinism import worker_environment
from trainer.cluster.launch import open_backend, start_workers
from trainer.cluster.role_builder import Training, limits, start_model
from trainer.cluster.watchdog import Watchdog
from trainer.data.chat import load_tokenizer
from trainer.resilience.alarms import sft_alarms
from trainer.resilience.restart import RunLifecycle
from trainer.run.run_status import record_export
from trainer.run.timing import Phases
from trainer.supervised.dpo_task import DPOTask
from trainer.supervised.supervised_loop import SupervisedLoop
from trainer.supervised.tasks import RewardModelTask, SFTTask, Task
from workers.controller.logs import announce, tell
from workers.roles.train_engines import check_engine
from workers.seeding import seed_of

TASKS: dict[type[SupervisedConfig], Any] = {SFTConfig: SFTTask, RewardModelConfig: RewardModelTask, DPOConfig: DPOTask}


def run(config: SupervisedConfig, notices: Sequence[str]) -> None:
    """Train, and export the model if trainer.export_dir is set. notices: warnings about the configuration."""
    check_engine("engine", config.engine, config.model, TASKS[type(config)].head, config.trainer.device)
    harness.run(config, lambda lifecycle: attempt(config, lifecycle))


def attempt(config: SupervisedConfig, lifecycle: RunLifecycle) -> None:
    """Run once, from the last checkpoint if there is one, in new worker processes; all of them have ended on return."""
    trainer, run_dir, resume = config.trainer, lifecycle.run_dir, harness.resume_from(config, lifecycle)
    # Lines for the user: the parts of the start take seconds each, and with trainer.logger=[] nothing else is printed.
    tell(f"starting {world_size(trainer)} worker{'s' if world_size(trainer) > 1 else ''} on {trainer.device}")
    with ExitStack() as stack:
        backend = stack.enter_context(open_backend(trainer, config.ray_kwargs, config.timeouts, run_dir))
        environment = worker_environment(trainer.deterministic)
        workers = start_workers(backend, trainer, config.timeouts, deterministic=trainer.deterministic, env=environment)
        watchdog, phases = Watchdog(asdict(config.timeouts), run_dir), Phases()
        lifecycle.stopping.hurry = watchdog.hurry
        tell(f"tokenizing {', '.join(config.data.train_files)}")
        tokenizer = load_tokenizer(config.model)
        task: Task = TASKS[type(config)](config, tokenizer)
        order, total_steps = harness.data_order(config, len(task))
        announce((*task.notices, order.notice))
        if resume is not None:
            announce(rate_changes(resume, {"optim": (config.optim, 0)}, total_steps, order.steps_per_epoch))
        tracker = harness.open_tracker(config, lifecycle, resume, {"model": workers}, watchdog, phases, total_steps)
        stack.callback(tracker.close)
        # From here on the run directory belongs to this run: an earlier failure leaves no status and no report in it.
        lifecycle.started = True
        cut = limits(supervised_cut(config))
        tell(f"loading {task.model.path}")
        model = start_model(
            workers,
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
                budget=lifecycle.budget("model"),
                steps=total_steps,
                updates=1,  # optimizer steps per training step
            ),
            watchdog=watchdog,
        )
        run_trainer = harness.build_trainer(
            config,
            lifecycle,
            groups=lambda: [workers],
            n_gpus=world_size(trainer),
            tokenizer=tokenizer,
            tracker=tracker,
            watchdog=watchdog,
            phases=phases,
            alarms=sft_alarms(config.alarms),
            models={"model": model},
            keep={"model": trainer.max_ckpt_to_keep},
            resume=resume,
            total_steps=total_steps,
            save_every=steps_between(trainer.save_freq, order.steps_per_epoch),
            extra_files=lambda step: task.extra_files(model, step),
        )
        loop = SupervisedLoop(config, run_trainer, task, order, model)
        steps = f"{total_steps} step{'s' if total_steps > 1 else ''}"
        units = "rows" if task.unit is None else "pairs"
        tell(f"training {steps}, each on {config.data.train_batch_size} of {len(task)} {units}")
        # The saver completes a pending checkpoint here, while the workers that write it still exist.
        with lifecycle.stopping, run_trainer.saver:
            loop.fit()
        lifecycle.stopping.check()
        # An interrupted run does not get here: check() raises, and an unfinished model is not exported.
        if trainer.export_dir is not None:
            model.export_hf(trainer.export_dir)
            tokenizer.save_pretrained(trainer.export_dir)
            for name, content in task.extra_files(model, run_trainer.step).items():
                Path(trainer.export_dir, name).write_bytes(content)
            print(f"model: {trainer.export_dir}")
        record_export(run_dir, trainer.export_dir)
