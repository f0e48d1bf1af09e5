"""Conversion of a role's configuration to the specification of its engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformers import AutoConfig

from configs.schema.common import ModelConfig, OptimConfig, ShardedConfig, Sharding
from configs.validation.batches import micro_batch_limits
from configs.validation.rollout import Workers
from trainer.cluster.oom_backoff import Budget
from trainer.cluster.remote import RemoteModel
from trainer.cluster.watchdog import Watchdog
from workers.controller.group import WorkerGroup
from workers.engine.base import EngineSpec, Head, LossSpec, OptimizerSpec
from workers.plan import Limits


@dataclass(frozen=True, slots=True)
class Training:
    """How a role is trained.

    limits: of micro-batches, as configured. budget: back-off after memory ran out. steps: training steps of the run. updates:
    optimizer steps in each of them. ema_decay: see OptimizerSpec.
    """

    optim: OptimConfig
    grad_clip: float
    loss: LossSpec
    limits: Limits
    budget: Budget
    steps: int
    updates: int
    ema_decay: float | None = None

    @property
    def optimizer(self) -> OptimizerSpec:
        return optimizer_spec(self.optim, self.steps, self.updates, clip_grad=self.grad_clip, ema_decay=self.ema_decay)


def optimizer_spec(
    optim: OptimConfig, steps: int, updates: int = 1, *, clip_grad: float = 0.0, ema_decay: float | None = None
) -> OptimizerSpec:
    """Optimizer of an engine. steps: training steps of the run. updates: optimizer steps in each.

    The keys of the schedule count training steps, the engine optimizer steps.
    """
    steps = schedule_length(optim, steps)
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * steps)
    return OptimizerSpec(
        lr=optim.lr,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        schedule=optim.lr_scheduler_type,
        warmup_steps=warmup * updates,
        total_steps=steps * updates,
        min_lr_ratio=optim.min_lr_ratio,
        num_cycles=optim.num_cycles,
        clip_grad=clip_grad,
        ema_decay=ema_decay,
    )


def schedule_length(optim: OptimConfig, steps: int) -> int:
    """Length of the learning-rate schedule in training steps. steps: of the run."""
    return optim.total_training_steps if optim.total_training_steps > 0 else steps


def start_model(
    workers: WorkerGroup,
    role: str,
    *,
    model: ModelConfig,
    head: Head,
    sharding: Sharding,
    device: Literal["cpu", "cuda"],
    seed: int,
    forward_limits: Limits,
    training: Training | None,
    watchdog: Watchdog,
) -> RemoteModel:
    """Build a role on every worker. training: None for a role that is never trained (a reference)."""
    spec = EngineSpec(
        model=model,
        head=head,
        sharding=sharding,
        optimizer=training.optimizer if training is not None else None,
        device=device,
        seed=seed,
    )
    return RemoteModel(
        workers,
        role,
        spec,
        training.loss if training is not None else None,
        forward_limits=forward_limits,
        train_limits=training.limits if training is not None else forward_limits,
        budget=training.budget if training is not None else Budget(role),
        # 2 H FLOPs of a pair of tokens over 24 H^2 of a token, see plan.row_costs.
        attention_cost=1.0 / (12.0 * hidden_size(model)),
        watchdog=watchdog,
    )


def hidden_size(model: ModelConfig) -> int:
    """Hidden size H of the language model."""
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    return int(config.get_text_config().hidden_size)


def value_head(model: ModelConfig) -> str:
    """For the user: how the critic's values are initialised.

    The head of a classifier has the same name as a value head, whatever it was trained for.
    """
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    architecture = (config.architectures or [config.model_type])[0]
    anew = "with a new head: its values are 0 (verl draws one at random)"
    begins = "with that model's own head" if "Classification" in architecture else anew
    return f"critic.model.path={model.path}: {architecture}; the critic begins {begins}"


def limits(
    role: ShardedConfig,
    workers: Workers,
    *,
    per_gpu: int | None,
    over_all: int | None,
    dynamic: bool,
    max_tokens: int,
) -> Limits:
    """Micro-batch limits of a role, see configs.validation.batches.micro_batch_limits. workers: of the role."""
    tokens, rows = micro_batch_limits(per_gpu, over_all, dynamic, max_tokens, role, workers)
    return Limits(max_tokens=tokens, max_rows=rows)
