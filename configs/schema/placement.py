"""The `placement` block of configs/ppo_trainer.yaml, and the pools that follow from it: roles on GPUs. See docs/placement.md.

A pool is a rectangle of GPU slots: the same consecutive GPUs on each of several consecutive nodes.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

from annotated_types import Gt, Le

from configs.base.keys import ConfigError, did_you_mean
from configs.schema.common import Positive, WorkersConfig

Layout = Literal["auto", "colocate_all", "colocate_pairs", "split", "custom"]


@dataclass(slots=True, kw_only=True, frozen=True)
class PoolConfig:
    """Size of a pool. gpus: per node. fraction: of each GPU; other pools may use the rest."""

    nodes: Positive
    gpus: Positive
    # Fractions of all pools on a GPU must not exceed 1 in total.
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

    @property
    def rule(self) -> Layout:
        """The layout by which roles are placed: with auto, the pools that the planner chose, or one pool until it has."""
        if self.layout == "auto":
            return "custom" if self.pools else "colocate_all"
        return self.layout


ROLES = ("actor", "ref", "critic", "reward", "rollout")
PAIRS = {"actor": ("actor", "ref", "rollout"), "critic": ("critic", "reward")}
WHOLE = "workers"
"""Name of the only pool of colocate_all."""
ROUNDING = 1e-9  # tolerance for sums of fractions, such as 3 * (1 / 3)


@dataclass(frozen=True, slots=True)
class Pool:
    """GPUs shared by the same worker processes: n_gpus_per_node on each of nnodes nodes, starting at (first_node, first_gpu).

    roles: roles of the run in this pool. fraction: fraction of each GPU. sizes: how nnodes and n_gpus_per_node were derived, for
    messages.
    """

    name: str
    roles: tuple[str, ...]
    nnodes: int
    n_gpus_per_node: int
    fraction: float
    first_node: int
    first_gpu: int
    sizes: str

    @property
    def slots(self) -> list[tuple[int, int]]:
        """(node, GPU) of each rank."""
        nodes, gpus = range(self.nnodes), range(self.n_gpus_per_node)
        return [(self.first_node + node, self.first_gpu + gpu) for node in nodes for gpu in gpus]

    def in_words(self) -> str:
        """Location and roles of the pool, for messages."""
        last_node, last_gpu = self.first_node + self.nnodes - 1, self.first_gpu + self.n_gpus_per_node - 1
        nodes = f"node {self.first_node}" if self.nnodes == 1 else f"nodes {self.first_node}-{last_node}"
        gpus = f"GPU {self.first_gpu}" if self.n_gpus_per_node == 1 else f"GPUs {self.first_gpu}-{last_gpu}"
        part = f", {self.fraction:g} of each" if self.fraction < 1 else ""
        return f"{self.name} ({', '.join(self.roles)}): {nodes}, {gpus}{part}"


@dataclass(frozen=True, slots=True)
class Placement:
    """The pools of a run; the actor's pool comes first."""

    pools: tuple[Pool, ...]

    def pool(self, role: str) -> Pool:
        """Pool of a role; the actor's for a role without workers (a LoRA reference is the actor with its adapter disabled)."""
        return next((pool for pool in self.pools if role in pool.roles), self.pools[0])

    @property
    def n_gpus(self) -> int:
        """Number of GPUs that the run uses."""
        # A set, because pools with fractions share slots.
        return len({slot for pool in self.pools for slot in pool.slots})


def place(config: PlacementConfig, trainer: WorkersConfig, roles: Collection[str]) -> Placement:
    """Place the pools. roles: the roles of the run, including the actor. Raises ConfigError with one line."""
    roles = [role for role in ROLES if role in roles]
    members = _custom(config, roles) if config.rule == "custom" else _members(config, roles)
    if config.rule == "colocate_all":
        size, sizes = (trainer.nnodes, trainer.n_gpus_per_node), trainer.sizes
        return Placement((Pool(WHOLE, tuple(roles), *size, fraction=1.0, first_node=0, first_gpu=0, sizes=sizes),))
    pools = _seated(config.pools, members, trainer) if config.pools else _equal(config.layout, members, trainer)
    return Placement(tuple(sorted(pools, key=lambda pool: "actor" not in pool.roles)))


def _members(config: PlacementConfig, roles: Collection[str]) -> dict[str, tuple[str, ...]]:
    """{pool: roles} of a layout with fixed pools."""
    layout = config.rule
    for role, named in asdict(config.roles).items():
        if named is not None:
            raise ConfigError(
                f"placement.roles.{role}={named}: placement.layout={layout} assigns roles itself; set layout=custom"
            )
    if layout == "colocate_all":
        if config.pools:
            raise ConfigError(f"placement.pools={', '.join(config.pools)}: placement.layout=colocate_all has one pool, all GPUs")
        return {WHOLE: tuple(roles)}
    of_layout = PAIRS if layout == "colocate_pairs" else {role: (role,) for role in roles}
    members = {name: tuple(role for role in pair if role in roles) for name, pair in of_layout.items()}
    if not all(members.values()):
        raise ConfigError(
            "placement.layout=colocate_pairs: the run has neither a critic nor a reward model, so the second pair would be "
            "empty; use placement.layout=colocate_all or split"
        )
    if config.pools and config.pools.keys() != members.keys():
        raise ConfigError(
            f"placement.pools={', '.join(config.pools)}: placement.layout={layout} has the pools {', '.join(members)} in this "
            "run; list these, or none for equal shares"
        )
    return members


def _custom(config: PlacementConfig, roles: Collection[str]) -> dict[str, tuple[str, ...]]:
    """{pool: roles} by `placement.roles`. Roles without a pool share the actor's."""
    known = ", ".join(config.pools) or "none"
    for name in config.pools:
        if not re.fullmatch(r"[\w-]+", name):
            raise ConfigError(f"placement.pools.{name}: pool names become part of file names; use letters, digits, _ and -")
    if config.roles.actor is None:
        raise ConfigError(
            f"placement.roles.actor=null: placement.layout=custom needs the actor's pool; placement.pools has {known}"
        )
    chosen = {role: name or config.roles.actor for role, name in asdict(config.roles).items()}
    for role, name in chosen.items():
        if name not in config.pools:
            near = did_you_mean(name, config.pools)
            raise ConfigError(f"placement.roles.{role}={name}: unknown pool; placement.pools has {known}{near}")
    members = {name: tuple(role for role in roles if chosen[role] == name) for name in config.pools}
    for name, there in members.items():
        if not there:
            raise ConfigError(
                f"placement.pools.{name}: no role of this run uses this pool; the roles are {', '.join(roles)} (placement.roles)"
            )
    return members


def _alternatives(layout: Layout, members: Mapping[str, tuple[str, ...]], trainer: WorkersConfig) -> str:
    """Overrides with which these roles fit, where equal pools of ``layout`` do not."""
    n, nodes, gpus = len(members), trainer.nnodes, trainer.n_gpus_per_node
    roles = {role for there in members.values() for role in there}
    pairs = [[role for role in pair if role in roles] for pair in PAIRS.values()]
    if layout == "split" and all(pairs) and (nodes % 2 == 0 or gpus % 2 == 0):
        shared = f"placement=colocate_pairs ({' | '.join(', '.join(pair) for pair in pairs)})"
    else:
        shared = "placement=colocate_all (all roles on all GPUs)"
    sizes = ", or the size of each in placement.pools" if nodes * gpus >= n else ""
    return f"use {shared}, trainer.n_gpus_per_node={gpus // n * n + n}{sizes}"


def _equal(layout: Layout, members: Mapping[str, tuple[str, ...]], trainer: WorkersConfig) -> list[Pool]:
    """Pools of equal size: whole nodes if the number of nodes is divisible, otherwise an equal part of every node."""
    n, nodes, gpus = len(members), trainer.nnodes, trainer.n_gpus_per_node
    # Whole nodes are preferred, so that a role spans as few nodes as possible.
    by_node = nodes % n == 0
    there = f"{nodes} node{'s' if nodes > 1 else ''}"
    if not by_node and gpus % n:
        raise ConfigError(
            f"placement.layout={layout}: {n} pools ({', '.join(members)}) cannot share {trainer.sizes} GPUs equally: "
            f"{n} divides neither {there} ({nodes} = {nodes // n} * {n} + {nodes % n}) nor the {gpus} GPUs of a node "
            f"({gpus} = {gpus // n} * {n} + {gpus % n}); {_alternatives(layout, members, trainer)}"
        )
    size = (nodes // n, gpus) if by_node else (nodes, gpus // n)
    sizes = (
        f"{nodes} nodes / {n} pools * {gpus} GPUs = {size[0]} * {gpus}"
        if by_node
        else f"{there} * {gpus} GPUs / {n} pools = {nodes} * {size[1]}"
    )
    return [
        Pool(name, roles, *size, 1.0, i * size[0] if by_node else 0, 0 if by_node else i * size[1], f"pool {name}: {sizes}")
        for i, (name, roles) in enumerate(members.items())
    ]


def _seated(wanted: Mapping[str, PoolConfig], members: Mapping[str, tuple[str, ...]], trainer: WorkersConfig) -> list[Pool]:
    """Pools of the given sizes, each at the first free position, in the order of `placement.pools` (first fit)."""
    nodes, gpus = trainer.nnodes, trainer.n_gpus_per_node
    total = sum(pool.nodes * pool.gpus * pool.fraction for pool in wanted.values())
    if total > nodes * gpus + ROUNDING:
        terms = " + ".join(f"{name} {_product(pool)}" for name, pool in wanted.items())
        raise ConfigError(f"placement.pools: {terms} = {total:g} GPUs, but {trainer.sizes} = {nodes * gpus}")
    # Free fraction of every GPU; pools may overlap on a GPU as long as their fractions fit.
    free = {(node, gpu): 1.0 for node in range(nodes) for gpu in range(gpus)}
    pools: list[Pool] = []
    for name, size in wanted.items():
        sizes = f"placement.pools.{name}: nodes * gpus = {size.nodes} * {size.gpus}"
        blank = Pool(name, members[name], size.nodes, size.gpus, size.fraction, 0, 0, sizes)
        corners = [(node, gpu) for node in range(nodes - size.nodes + 1) for gpu in range(gpus - size.gpus + 1)]
        tried = (replace(blank, first_node=node, first_gpu=gpu) for node, gpu in corners)
        seated = next((pool for pool in tried if all(free[slot] >= size.fraction - ROUNDING for slot in pool.slots)), None)
        if seated is None:
            left = "; ".join(f"node {node}: {', '.join(f'{free[node, gpu]:g}' for gpu in range(gpus))}" for node in range(nodes))
            raise ConfigError(
                f"placement.pools.{name}: {_product(size)} (nodes * gpus * fraction): no {size.gpus} consecutive GPUs "
                f"with {size.fraction:g} of each free on {size.nodes} node(s); of {trainer.sizes} GPUs, the previous "
                f"pools leave: {left}"
            )
        for slot in seated.slots:
            free[slot] -= size.fraction
        pools.append(seated)
    return pools


def _product(pool: PoolConfig) -> str:
    return f"{pool.nodes} * {pool.gpus} * {pool.fraction:g}"
