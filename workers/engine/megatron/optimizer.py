"""Megatron's AdamW, distributed or not, under our schedule."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from configs.schema.common import MegatronConfig
from workers.engine.base import OptimizerSpec
from workers.engine.fsdp.optimizer import learning_rate


class MegatronAdamW:
    def __init__(self, model: Sequence[Any], spec: OptimizerSpec, config: TransformerConfig, megatron: MegatronConfig) -> None:
        self.spec = spec
        self.steps = 0
        settings = OptimizerConfig(
            optimizer="adam",
            lr=spec.lr,
            min_lr=0.0,
            weight_decay=spec.weight_decay,
            adam_beta1=spec.betas[0],
            adam_beta2=spec.betas[1],
            adam_eps=1e-8,
            clip_grad=spec.clip_grad,
            params_dtype=config.params_dtype,
            bf16=config.bf16,
            fp16=config.fp16,
            use_distributed_optimizer=megatron.use_distributed_optimizer,
        )
        self._megatron = get_megatron_optimizer(settings, list(model))

    def zero_grad(self) -> None:
        self._megatron.zero_grad()

    def norm(self) -> float:
        """Of the whole gradient, before clipping; equal on every rank. Collective."""
        self._megatron.prepare_grads()
        return float(self._megatron.get_grad_norm())

    def step(self) -> float:
        """After ``norm``: clip and update; the learning rate used."""
        lr = learning_rate(self.spec, self.steps)
        for group in self._megatron.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.spec.weight_decay * group["wd_mult"]
        self._megatron.clip_grad_norm(self.spec.clip_grad)
        self._megatron.step_with_ready_grads()
        self.steps += 1
        return lr
