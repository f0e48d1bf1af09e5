"""Ulysses sequence parallelism (Jacobs et al. 2023, arXiv 2309.14509): the flat tokens of a micro-batch, split over sp ranks.

Each rank holds T / sp consecutive tokens wherever tokens are independent of each other. In attention heads are independent: an
all-to-all gives each rank all tokens of some heads, and a second one returns the outputs to the ranks of their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PretrainedConfig

from workers.engine.collectives import all_to_all, gather_replicated, sum_replicated


@dataclass(frozen=True, slots=True)
class TokenSharding:
    """Split of the flat tokens of a micro-batch over ranks.

    group: the sp ranks that hold the T tokens together; sp divides T, and rank r holds the r-th run of T / sp tokens.
    """

    group: dist.ProcessGroup

    @classmethod
    def over(cls, size: int, device: str) -> TokenSharding | None:
        """Create groups of ``size`` consecutive ranks; None for size 1. Collective over all ranks."""
        world = dist.get_world_size()
        assert world % size == 0, f"{world} ranks do not fall into groups of {size}"
        if size == 1:
            return None
        return cls(init_device_mesh(device, (world // size, size), mesh_dim_names=("dp", "sp")).get_group("sp"))

    def own(self, whole: Tensor) -> Tensor:
        """Slice of this rank: (T, ...) -> (T / sp, ...)."""
        assert len(whole) % self.group.size() == 0, f"{len(whole)} tokens do not fall into {self.group.size()} parts"
        return whole.chunk(self.group.size())[self.group.rank()]

    def own_places(self, places: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Indices among all ``total`` tokens (N,) -> which are this rank's, bool (N,), and these as indices into its slice."""
        size = total // self.group.size()
        here = places - size * self.group.rank()
        mine = (here >= 0) & (here < size)
        return mine, here[mine]

    def whole(self, mine: Tensor) -> Tensor:
        """All-gather (T / sp, ...) -> (T, ...), for results that all ranks use identically: see gather_replicated."""
        return gather_replicated(mine, self.group)

    def sum(self, parts: Tensor) -> Tensor:
        """Sum over the ranks, of the same shape, for results that all ranks use identically: see sum_replicated."""
        return sum_replicated(parts, self.group)

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Redistribute q (T / sp, heads, D), k and v (T / sp, kv heads, D) from tokens to heads.

        Returns q (T, heads / sp, D) and the k and v heads that these query heads attend to. One message per pair of ranks carries
        all three. If sp does not divide the kv heads, they are repeated until it does; autograd sums the gradients of the copies.
        """
        ranks, copies = self.group.size(), lcm(k.shape[1], self.group.size()) // k.shape[1]
        # Neighbouring copies (interleave, not tile): consecutive query heads share a kv head, also after the split.
        k, v = (x if copies == 1 else x.repeat_interleave(copies, dim=1) for x in (k, v))
        by_rank = [x.unflatten(1, (ranks, -1)) for x in (q, k, v)]
        shapes = [x.shape[2:] for x in by_rank]
        sent = torch.cat([x.flatten(2) for x in by_rank], dim=2).transpose(0, 1)
        received = all_to_all(sent, self.group).flatten(0, 1)
        q, k, v = (x.unflatten(1, shape) for x, shape in zip(received.split([s.numel() for s in shapes], 1), shapes, strict=True))
        return q, k, v

    def to_tokens(self, out: Tensor) -> Tensor:
        """Redistribute attention outputs from heads to tokens: (T, heads / sp, D) -> (T / sp, heads, D)."""
        received = all_to_all(out.unflatten(0, (self.group.size(), -1)), self.group)
        return received.transpose(0, 1).flatten(1, 2)


def check_heads(model: PretrainedConfig, size: int, key: str = "fsdp_config.ulysses_sequence_parallel_size") -> None:
    """Raise ValueError if ``size``, the value of ``key``, does not divide the model's attention heads.

    Any number of kv heads is possible: it divides the number of heads, and so does its least common multiple with another
    divisor.
    """
    heads = model.get_text_config().num_attention_heads
    if heads % size:
        fit = ", ".join(str(less) for less in range(1, size) if heads % less == 0)
        raise ValueError(
            f"{key}={size} does not divide the model's num_attention_heads={heads} "
            f"({heads} = {heads // size} * {size} + {heads % size}); {fit} would"
        )
