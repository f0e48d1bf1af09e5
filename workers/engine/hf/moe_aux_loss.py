"""Mixture of experts: load-balance statistics of routers and the auxiliary loss that balances them.

Fedus et al. 2021 (Switch Transformers, eq. 4-6), for the top k experts of each token as in GShard, over all layers together, as
in transformers' load_balancing_loss_func.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from workers.metric import Metric, Metrics

ROUTED = ("expert_load", "router_probs")
"""Names of the outputs of ``measure``."""


def measure(router_logits: Iterable[Tensor], top_k: int) -> tuple[Tensor, Tensor]:
    """Router statistics. router_logits: (T, E) of each of L layers. Returns two tensors (L, E).

    The first counts the tokens that have the expert among their top k. The second is the sum over tokens of the router's
    probabilities, with gradient.
    """
    loads, probabilities = [], []
    for logits in router_logits:
        chosen = logits.detach().topk(top_k, dim=-1).indices.flatten()
        loads.append(torch.bincount(chosen, minlength=logits.shape[-1]))
        probabilities.append(logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).sum(0))
    return torch.stack(loads), torch.stack(probabilities)


def balance_loss(load: Tensor, probabilities: Tensor, tokens: int) -> Tensor:
    """E * sum over experts of (share of tokens) * (mean probability), both over all layers; k for uniform routing.

    load, probabilities: (L, E) of ``tokens`` tokens, see measure.
    """
    layers, experts = load.shape
    shares, means = load.sum(0) / (layers * tokens), probabilities.sum(0) / (layers * tokens)
    # Only the mean probabilities have a gradient: a share counts tokens and is not differentiable.
    return experts * (shares * means).sum()


class LoadBalance:
    """Load balance of one mini-batch.

    The auxiliary loss is computed per micro-batch and weighted by the micro-batch's share of the mini-batch's tokens. It is a
    product of two means, so, unlike every other loss, its gradient depends on how the mini-batch is split.
    """

    def __init__(self, coefficient: float, top_k: int, tokens: int, device: torch.device) -> None:
        """tokens: of the rows that this rank is the output rank of. Collective if ``coefficient`` is not 0."""
        whole = torch.tensor(tokens, device=device)
        if coefficient:
            dist.all_reduce(whole)
        self._weight = coefficient / max(1, int(whole))
        self._top_k = top_k
        self._load = torch.zeros((), dtype=torch.float64, device=device)

    def take(self, load: Tensor, probabilities: Tensor, *, real: bool) -> tuple[Tensor, Metrics]:
        """Add a micro-batch, see measure; returns its term of the loss and its metrics. real: it has rows, it is no dummy."""
        # A dummy row passes the routers too. It is multiplied by 0 instead of skipped, so that every rank runs the same backward.
        self._load = self._load + load * real
        tokens = int(load[0].sum()) // self._top_k
        loss, counted = balance_loss(load, probabilities, tokens), tokens * real
        return self._weight * counted * loss, {"moe_aux_loss": Metric(loss.detach().double(), "mean", counted)}

    def metrics(self) -> Metrics:
        """Metrics over the mini-batch and all ranks. Collective.

        load_max_over_mean: tokens of a layer's busiest expert over the mean of its experts, in the worst layer. dead_experts: the
        fraction of experts, over all layers, that no token chose.
        """
        dist.all_reduce(self._load)
        busiest = (self._load.amax(1) / self._load.mean(1)).max()
        dead = (self._load == 0).double().mean()
        return {"moe_load_max_over_mean": Metric(float(busiest), "mean"), "moe_dead_experts": Metric(float(dead), "mean")}
