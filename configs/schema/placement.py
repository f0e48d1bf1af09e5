"""Schema of the `placement` block of configs/ppo_trainer.yaml; configs/pools.py derives the pools."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Le

from configs.schema.common import Positive

Layout = Literal["colocate_all", "colocate_pairs", "split", "custom"]


@dataclass(slots=True, kw_only=True, frozen=True)
class PoolConfig:
    """Size of a pool. gpus: per node. fraction: of each GPU; other pools may use the rest."""

    nodes: Positive
    gpus: Positive
    # Fractions of all pools on a GPU must not exceed 1 in total, see configs/pools.py.
    fraction: Annotated[float, Gt(0.0), Le(1.0)]


@dataclass(slots=True, kw_only=True, frozen=True)
class PlacedRolesConfig:
    """Pool of each role."""

    actor: str | None
    ref: str | None
    critic: str | None
    reward: str | None
    rollout: str | None


@dataclass(slots=True, kw_only=True, frozen=True)
class PlacementConfig:
    layout: Layout
    pools: dict[str, PoolConfig]
    roles: PlacedRolesConfig
