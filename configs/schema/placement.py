"""Which roles share GPUs. The YAML twin is `placement` in configs/ppo_trainer.yaml; configs/pools.py makes pools of it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Le

from configs.schema.common import Positive

Layout = Literal["colocate_all", "colocate_pairs", "split", "custom"]


@dataclass(slots=True, kw_only=True, frozen=True)
class PoolConfig:
    """gpus: on each of the nodes. fraction: of each of them, which other pools have the rest of."""

    nodes: Positive
    gpus: Positive
    fraction: Annotated[float, Gt(0.0), Le(1.0)]


@dataclass(slots=True, kw_only=True, frozen=True)
class PlacedRolesConfig:
    """The pool of each role."""

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
