"""Ulysses sequence parallelism (Jacobs et al. 2023, arXiv 2309.14509): the flat tokens of a micro-batch, cut over a few ranks.

Each rank has T / sp neighbouring tokens in everything that works on tokens one by one. Attention works on heads one by one:
there an all-to-all gives each rank all tokens of some heads, and another takes what came out back to the tokens' ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PretrainedConfig

from workers.engine.collectives import all_to_all, gather_alike


@dataclass(frozen=True, slots=True)
class TokenCut:
    """group: the sp ranks that share the T tokens of a micro-batch, which sp divides; rank r has the r-th run of T / sp."""

    group: dist.ProcessGroup

    @classmethod
    def over(cls, size: int, device: str) -> TokenCut | None:
        """Over so many neighbouring ranks, None for one. Collective over all."""
        world = dist.get_world_size()
        assert world % size == 0, f"{world} ranks do not fall into groups of {size}"
        if size == 1:
            return None
        return cls(init_device_mesh(device, (world // size, size), mesh_dim_names=("dp", "sp")).get_group("sp"))

    def own(self, whole: Tensor) -> Tensor:
        """(T, ...) -> (T / sp, ...), those of this rank."""
        assert len(whole) % self.group.size() == 0, f"{len(whole)} tokens do not fall into {self.group.size()} parts"
        return whole.chunk(self.group.size())[self.group.rank()]

    def own_places(self, places: Tensor, total: int) -> Tensor:
        """Places of tokens among all ``total``, int64 (N,) -> those of this rank, as places among its own (at most N,)."""
        size = total // self.group.size()
        here = places - size * self.group.rank()
        return here[(here >= 0) & (here < size)]

    def all_places(self, here: Tensor, total: int) -> Tensor:
        """The other way round."""
        return here + total // self.group.size() * self.group.rank()

    def whole(self, mine: Tensor) -> Tensor:
        """(T / sp, ...) of each rank -> (T, ...), for what every rank does alike: see gather_alike."""
        return gather_alike(mine, self.group)

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (T / sp, heads, D), k and v (T / sp, kv heads, D), of this rank's tokens -> those of all: (T, heads / sp, D), and of
        k and v the heads that these look at. One message to each rank has all three.

        kv heads that sp does not divide are repeated until it does; autograd sums what comes back.
        """
        ranks, copies = self.group.size(), lcm(k.shape[1], self.group.size()) // k.shape[1]
        k, v = (x if copies == 1 else x.repeat_interleave(copies, dim=1) for x in (k, v))
        by_rank = [x.unflatten(1, (ranks, -1)) for x in (q, k, v)]
        shapes = [x.shape[2:] for x in by_rank]
        sent = torch.cat([x.flatten(2) for x in by_rank], dim=2).transpose(0, 1)
        received = all_to_all(sent, self.group).flatten(0, 1)
        q, k, v = (x.unflatten(1, shape) for x, shape in zip(received.split([s.numel() for s in shapes], 1), shapes, strict=True))
        return q, k, v

    def to_tokens(self, out: Tensor) -> Tensor:
        """(T, heads / sp, D) -> (T / sp, heads, D)."""
        received = all_to_all(out.unflatten(0, (self.group.size(), -1)), self.group)
        return received.transpose(0, 1).flatten(1, 2)


def check_heads(model: PretrainedConfig, size: int) -> None:
    """Raises ValueError for a model whose heads ``size`` ranks cannot share. Heads of keys and values may be any number of them:
    they divide the model's heads, and so does their least common multiple with another divisor.
    """
    heads = model.get_text_config().num_attention_heads
    if heads % size:
        fit = ", ".join(str(less) for less in range(1, size) if heads % less == 0)
        raise ValueError(
            f"fsdp_config.ulysses_sequence_parallel_size={size} does not divide the model's num_attention_heads={heads} "
            f"({heads} = {heads // size} * {size} + {heads % size}); {fit} would"
        )
