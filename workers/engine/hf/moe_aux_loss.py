"""Mixtures of experts: how evenly a router spreads tokens over its experts, and the auxiliary loss that makes it.

Fedus et al. 2021 (Switch Transformers, eq. 4-6), for the top k of each token as in GShard, over all layers together, as
transformers' load_balancing_loss_func has it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from workers.metric import Metric, Metrics

ROUTED = ("expert_load", "router_probs")
"""What ``measure`` tells."""


def measure(router_logits: Iterable[Tensor], top_k: int) -> tuple[Tensor, Tensor]:
    """router_logits: (T, E) of each of L layers. (L, E) each: how many of the tokens have the expert among their top k; and the
    sum over tokens of the router's probabilities, which has a gradient.
    """
    loads, probabilities = [], []
    for logits in router_logits:
        chosen = logits.detach().topk(top_k, dim=-1).indices.flatten()
        loads.append(torch.bincount(chosen, minlength=logits.shape[-1]))
        probabilities.append(logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).sum(0))
    return torch.stack(loads), torch.stack(probabilities)


def balance_loss(load: Tensor, probabilities: Tensor, tokens: int) -> Tensor:
    """load, probabilities: (L, E) of ``tokens`` tokens, see measure. E * sum over experts of the share of tokens times the mean
    probability, both over all layers: k if experts are chosen alike.
    """
    layers, experts = load.shape
    shares, means = load.sum(0) / (layers * tokens), probabilities.sum(0) / (layers * tokens)
    return experts * (shares * means).sum()


class LoadBalance:
    """Of one mini-batch. The auxiliary loss is one of each micro-batch by itself, weighted by the micro-batch's share of the
    mini-batch's tokens: its gradient is the one thing that depends on the cut.
    """

    def __init__(self, coefficient: float, top_k: int, tokens: int, device: torch.device) -> None:
        """tokens: of the rows that this rank answers for. Collective if there is a coefficient."""
        whole = torch.tensor(tokens, device=device)
        if coefficient:
            dist.all_reduce(whole)
        self._weight = coefficient / max(1, int(whole))
        self._top_k = top_k
        self._load = torch.zeros((), dtype=torch.float64, device=device)

    def take(self, load: Tensor, probabilities: Tensor, *, real: bool) -> tuple[Tensor, Metrics]:
        """Of a micro-batch, see measure: what it adds to the loss, and its metrics. real: there are rows in it, not a dummy."""
        self._load = self._load + load * real
        tokens = int(load[0].sum()) // self._top_k
        loss, counted = balance_loss(load, probabilities, tokens), tokens * real
        return self._weight * counted * loss, {"moe_aux_loss": Metric(float(loss.detach()), "mean", counted)}

    def metrics(self) -> Metrics:
        """Over the mini-batch, of all ranks. Collective.

        load_max_over_mean: tokens of a layer's busiest expert over the mean of its experts, in the worst layer. dead_experts: the
        share of experts, over all layers, that no token chose.
        """
        dist.all_reduce(self._load)
        busiest = (self._load.amax(1) / self._load.mean(1)).max()
        dead = (self._load == 0).double().mean()
        return {"moe_load_max_over_mean": Metric(float(busiest), "mean"), "moe_dead_experts": Metric(float(dead), "mean")}
