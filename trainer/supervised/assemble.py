"""From a configuration to a running supervised loop."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from configs.checks import world_size
from configs.schema.sft import SFTConfig
from trainer.alarms import sft_alarms
from trainer.backend import open_backend, start_hosts
from trainer.checkpoint import check_config
from trainer.data.chat import load_tokenizer
from trainer.data.order import DataOrder
from trainer.data.sft import SFTDataset
from trainer.determinism import KernelWatch, worker_environment
from trainer.events import Events
from trainer.metrics import Phases
from trainer.models import Training, limits, start_model
from trainer.restart import Lifetime, keep_going
from trainer.saving import Saver
from trainer.skips import Skips
from trainer.supervised.loop import SupervisedLoop
from trainer.tracking import Tracker
from trainer.watchdog import Watchdog
from workers.engine import check_engine
from workers.engine.base import LossSpec
from workers.seeding import seed_of


def run(config: SFTConfig, notices: Sequence[str]) -> None:
    """Train as ``config`` says, and export the model if it says so. notices: what the user was told about the configuration."""
    check_engine("engine", config.engine, config.model, "lm", config.trainer.device)
    life = Lifetime(config.trainer, Path(config.trainer.default_local_dir))
    keep_going(life, lambda: attempt(config, life))


def attempt(config: SFTConfig, life: Lifetime) -> None:
    """From the last checkpoint on, in processes of its own, none of which is left."""
    trainer, run_dir, resume = config.trainer, life.run_dir, life.resume()
    if resume is not None:
        for change in check_config(resume.manifest.config, asdict(config)):
            print(f"note: resumed with another {change}", file=sys.stderr)
    with ExitStack() as stack:
        backend = stack.enter_context(open_backend(trainer, config.ray_kwargs, run_dir))
        deterministic = trainer.deterministic
        environment = worker_environment(deterministic)
        hosts = start_hosts(backend, trainer, config.timeouts, deterministic=deterministic, env=environment)
        watchdog = Watchdog(asdict(config.timeouts), run_dir)
        tokenizer = load_tokenizer(config.model)
        data = pairs(config, config.data.train_files, tokenizer)
        held_out = pairs(config, config.data.val_files, tokenizer) if trainer.test_freq > 0 else None
        seed = trainer.seed if config.data.seed is None else config.data.seed
        order = DataOrder(len(data), config.data.train_batch_size, seed, config.data.shuffle)
        for notice in (*data.notices, *(held_out.notices if held_out is not None else ()), order.notice):
            if notice is not None:
                print(f"note: {notice}", file=sys.stderr)
        total_steps = trainer.total_training_steps or trainer.total_epochs * order.steps_per_epoch
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
            model=config.model,
            head="lm",
            sharding=config.engine.sharding,
            device=trainer.device,
            seed=seed_of(trainer.seed, "model"),
            forward_limits=cut,
            training=Training(
                optim=config.optim,
                grad_clip=config.engine.grad_clip,
                loss=LossSpec("trainer.algorithms.supervised:NextTokenLoss", None),
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
            data=data,
            held_out=held_out,
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
            phases=Phases(),
            kernels=KernelWatch(hosts, events, watchdog) if trainer.deterministic else None,
            resume=resume,
            total_steps=total_steps,
        )
        with life.stopping, loop.saver:
            loop.fit()
        life.stopping.check()
        if trainer.export_dir is not None:
            model.export_hf(trainer.export_dir)
            tokenizer.save_pretrained(trainer.export_dir)
            print(f"model: {trainer.export_dir}")


def pairs(config: SFTConfig, files: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> SFTDataset:
    return SFTDataset(
        files,
        tokenizer,
        messages_key=config.data.messages_key,
        prompt_key=config.data.prompt_key,
        response_key=config.data.response_key,
        max_length=config.data.max_length,
        truncation=config.data.truncation,
        apply_chat_template_kwargs=config.data.apply_chat_template_kwargs,
    )
