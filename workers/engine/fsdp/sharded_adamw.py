"""AdamW over local shards. The update is elementwise, so it does not depend on how parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from workers.engine.base import OptimizerSpec
from workers.engine.lr_schedule import learning_rate

MOMENTS = ("exp_avg", "exp_avg_sq")
AVERAGE = "ema"


def global_norm(grads: Iterable[Tensor], device: torch.device, n_copies: int) -> Tensor:
    """L2 norm over all shards of all ranks, in float32 at least: a scalar, equal on every rank. Collective.

    n_copies: how many ranks hold each shard. All copies are in the sum, so that every rank computes the same number and takes the
    same decision.
    """
    # Squares are summed over tensors and ranks in float64, whatever the gradients' dtype.
    squares = torch.zeros((), dtype=torch.float64, device=device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        by_dtype.setdefault(grad.dtype, []).append(grad)
    for dtype, same in by_dtype.items():
        norms = torch._foreach_norm(same, 2, dtype=torch.promote_types(dtype, torch.float32))
        squares += torch.stack(norms).double().square().sum()
    dist.all_reduce(squares)
    return (squares / n_copies).sqrt()


def wide(param: Tensor) -> Tensor:
    """Detached copy or view in float32 at least."""
    return param.detach().to(torch.promote_types(param.dtype, torch.float32))


class ShardedAdamW:
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019), none on one-dimensional parameters: norms and biases.

    params: {name: local shard}, updated in place. Sharding along rows keeps the number of dimensions, so shards of 1-D parameters
    are 1-D. State is allocated at construction, so that a checkpoint can be loaded into it and its memory counted.
    """

    def __init__(self, params: Mapping[str, Tensor], spec: OptimizerSpec) -> None:
        self.spec = spec
        self.params = dict(params)
        self.steps = 0
        groups = [
            {"params": [p for p in self.params.values() if p.dim() > 1], "weight_decay": spec.weight_decay},
            {"params": [p for p in self.params.values() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        # fused: 2.1 ms for 3.3M parameters on the CPU; foreach takes 7.9 and the loop 7.2.
        self._adamw = torch.optim.AdamW([group for group in groups if group["params"]], lr=spec.lr, betas=spec.betas, fused=True)
        for param in self.params.values():
            self._adamw.state[param] = {kind: torch.zeros_like(param) for kind in MOMENTS}
            # The fused kernel reads the step count on the parameter's device.
            self._adamw.state[param]["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        self._averages = {name: wide(param).clone() for name, param in self.params.items()} if spec.ema_decay is not None else {}

    def moments(self) -> dict[tuple[str, str], Tensor]:
        """Live optimizer state: {("exp_avg" or "exp_avg_sq", name): local shard}, sharded as the parameters are.

        With ema_decay also ("ema", name): the moving average of each parameter.
        """
        moments = {(kind, name): self._adamw.state[param][kind] for name, param in self.params.items() for kind in MOMENTS}
        return moments | {(AVERAGE, name): average for name, average in self._averages.items()}

    def set_steps(self, steps: int) -> None:
        """Set the step count, also in torch's state, where it determines bias correction."""
        self.steps = steps
        for state in self._adamw.state.values():
            state["step"].fill_(steps)

    def step(self, grads: Mapping[str, Tensor], norm: float) -> float:
        """Clip to ``clip_grad`` given the global gradient norm, update, and return the learning rate that was used."""
        # The global norm is passed in: that of local shards would clip ranks differently.
        # 1e-6 as in torch.nn.utils.clip_grad_norm_.
        scale = self.spec.clip_grad / (norm + 1e-6)
        lr = learning_rate(self.spec, self.steps)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        if scale < 1.0:
            torch._foreach_mul_(list(grads.values()), scale)
        for name, grad in grads.items():
            self.params[name].grad = grad
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.steps += 1
        if self.spec.ema_decay is not None:
            self._follow(self.spec.ema_decay)
        return lr

    @torch.no_grad()
    def _follow(self, decay: float) -> None:
        """average += (1 - decay) * (parameter - average), in float32 at least; it starts at the initial parameters.

        Polyak & Juditsky 1992, doi:10.1137/0330046, with exponentially decaying weights.
        """
        for name, average in self._averages.items():
            average.lerp_(wide(self.params[name]), 1.0 - decay)
