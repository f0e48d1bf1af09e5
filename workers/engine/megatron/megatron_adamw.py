"""Megatron's AdamW, distributed or not, with the learning-rate schedule of all engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from workers.engine.base import OptimizerSpec
from workers.engine.lr_schedule import learning_rate

MOMENTS = ("exp_avg", "exp_avg_sq")
Kind = Literal["param", "exp_avg", "exp_avg_sq"]


class MegatronAdamW:
    """Wrapper of Megatron's optimizer with access to its state by parameter.

    The state of a parameter includes a float32 copy of it. It is complete or, with the distributed optimizer, a contiguous range
    of its elements; the other ranges are on the other ranks of the data-parallel group, which includes context ranks.
    """

    def __init__(self, model: Sequence[Any], spec: OptimizerSpec, config: TransformerConfig, *, distributed: bool) -> None:
        self.spec = spec
        self.steps = 0
        settings = OptimizerConfig(
            optimizer="adam",
            lr=spec.lr,
            min_lr=0.0,
            weight_decay=spec.weight_decay,
            adam_beta1=spec.betas[0],
            adam_beta2=spec.betas[1],
            # torch's default, with which the FSDP engine runs.
            adam_eps=1e-8,
            clip_grad=spec.clip_grad,
            params_dtype=config.params_dtype,
            bf16=config.bf16,
            use_distributed_optimizer=distributed,
        )
        self._megatron = get_megatron_optimizer(settings, list(model))
        (self._inner,) = self._megatron.chained_optimizers
        self._adamw: torch.optim.Optimizer = self._inner.optimizer
        self.group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for kept in (kept for group in self._adamw.param_groups for kept in group["params"]):
            # Allocated now, so that a checkpoint can be loaded into it; each with its own step count, which a loaded state would
            # share.
            self._adamw.state[kept] = {kind: torch.zeros_like(kept) for kind in MOMENTS} | {"step": torch.zeros(())}

    @property
    def is_distributed(self) -> bool:
        return isinstance(self._inner, DistributedOptimizer)

    def zero_grad(self) -> None:
        self._megatron.zero_grad()

    def norm(self) -> float:
        """Norm of the full gradient before clipping, equal on all ranks of a model. Collective."""
        # Megatron's own step() would prepare, clip and update at once; the engine decides in between whether all ranks may
        # update.
        self._megatron.prepare_grads()
        return float(self._megatron.get_grad_norm())

    def step(self, norm: float) -> float:
        """Clip by ``norm`` and update; returns the learning rate. Call after ``norm()``, which prepares the gradients."""
        lr = learning_rate(self.spec, self.steps)
        for group in self._megatron.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.spec.weight_decay * group["wd_mult"]  # 0 for norms and biases
        clip_grad_by_total_norm_fp32(self._inner.get_parameters(), self.spec.clip_grad, norm)
        self._megatron.step_with_ready_grads()
        self.steps += 1
        return lr

    def kept(self, param: Any, kind: Kind) -> tuple[Tensor, int] | None:
        """State of ``param`` on this rank, and the index of its first element in the parameter; None if there is none here."""
        start = 0
        if self.is_distributed:
            if param not in self._inner.model_param_group_index_map:
                return None
            group, place = self._inner.model_param_group_index_map[param]
            main = self._adamw.param_groups[group]["params"][place]
            start = self._inner._get_model_param_range_map(param)["param"].start
        else:
            main = param if param.dtype == torch.float32 else param.main_param
        return (main if kind == "param" else self._adamw.state[main][kind]), start

    def put(self, kind: Kind, param: Tensor, whole: Tensor) -> None:
        """Copy this rank's range of ``whole``, a tensor of the parameter's shape, into the state."""
        if (kept := self.kept(param, kind)) is not None:
            part, start = kept
            part.flatten().copy_(whole.flatten()[start : start + part.numel()])

    def whole(self, param: Tensor, kind: Kind, rank: int) -> Tensor | None:
        """Assemble the full state on one rank of the group; None on the others. Collective over the group."""
        kept = self.kept(param, kind)
        if not self.is_distributed:
            assert kept is not None
            return kept[0].detach() if self.group.rank() == rank else None
        together = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
        if kept is not None:
            together[kept[1] : kept[1] + kept[0].numel()] = kept[0].detach()
        if self.group.size() > 1:  # as integers, bitwise: each element has one non-zero addend, and -0.0 stays -0.0
            dist.reduce(together.view(torch.int32), dist.get_global_rank(self.group, rank), group=self.group)
        return together.view(param.shape) if self.group.rank() == rank else None

    def tensors(self) -> list[Tensor]:
        """All state that this rank holds in addition to the parameters."""
        mains = [kept for group in self._adamw.param_groups for kept in group["params"]]
        return [*mains, *(self._adamw.state[main][kind] for main in mains for kind in MOMENTS)]

    def set_steps(self, steps: int) -> None:
        """Set the step count: torch keeps it per parameter, Transformer Engine per group."""
        self.steps = steps
        for state in self._adamw.state.values():
            state["step"].fill_(steps)
        for group in self._adamw.param_groups:
            group["step"] = steps
