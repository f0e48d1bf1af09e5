"""Which roles share which GPUs: from `placement` to pools that lie on the run's nodes. Pure; docs/placement.md has pictures.

A pool is a rectangle of slots: the same GPUs on each of some nodes, side by side.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace

from configs.keys import ConfigError, did_you_mean
from configs.schema.common import WorkersConfig
from configs.schema.placement import Layout, PlacementConfig, PoolConfig

ROLES = ("actor", "ref", "critic", "reward", "rollout")
PAIRS = {"actor": ("actor", "ref", "rollout"), "critic": ("critic", "reward")}
WHOLE = "workers"
"""The pool of colocate_all."""
ROUNDING = 1e-9  # of fractions that are added up


@dataclass(frozen=True, slots=True)
class Pool:
    """GPUs that the same processes have: n_gpus_per_node of each of nnodes nodes, from (first_node, first_gpu) on.

    roles: those of the run that are here. fraction: of each GPU. sizes: what nnodes and n_gpus_per_node come from, for people.
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
        """Where it is, and who is in it."""
        last_node, last_gpu = self.first_node + self.nnodes - 1, self.first_gpu + self.n_gpus_per_node - 1
        nodes = f"node {self.first_node}" if self.nnodes == 1 else f"nodes {self.first_node}-{last_node}"
        gpus = f"GPU {self.first_gpu}" if self.n_gpus_per_node == 1 else f"GPUs {self.first_gpu}-{last_gpu}"
        part = f", {self.fraction:g} of each" if self.fraction < 1 else ""
        return f"{self.name} ({', '.join(self.roles)}): {nodes}, {gpus}{part}"


@dataclass(frozen=True, slots=True)
class Placement:
    pools: tuple[Pool, ...]

    def pool(self, role: str) -> Pool:
        """Of a role. The actor's, for one that the run has not (a reference that is the actor without its adapter)."""
        return next((pool for pool in self.pools if role in pool.roles), self.pools[0])

    @property
    def n_gpus(self) -> int:
        """GPUs that the run works on."""
        return len({slot for pool in self.pools for slot in pool.slots})


def place(config: PlacementConfig, trainer: WorkersConfig, roles: Collection[str]) -> Placement:
    """roles: those that the run has, the actor among them. The actor's pool comes first. Raises ConfigError, in one line."""
    roles = [role for role in ROLES if role in roles]
    members = _custom(config, roles) if config.layout == "custom" else _members(config, roles)
    if config.layout == "colocate_all":
        size, said = (trainer.nnodes, trainer.n_gpus_per_node), whole_in_words(trainer)
        return Placement((Pool(WHOLE, tuple(roles), *size, fraction=1.0, first_node=0, first_gpu=0, sizes=said),))
    pools = _seated(config.pools, members, trainer) if config.pools else _equal(config.layout, members, trainer)
    return Placement(tuple(sorted(pools, key=lambda pool: "actor" not in pool.roles)))


def whole_in_words(trainer: WorkersConfig) -> str:
    return f"trainer.nnodes * trainer.n_gpus_per_node = {trainer.nnodes} * {trainer.n_gpus_per_node}"


def _members(config: PlacementConfig, roles: Collection[str]) -> dict[str, tuple[str, ...]]:
    """By pool, the roles of a layout that says itself where each goes."""
    layout = config.layout
    for role, named in asdict(config.roles).items():
        if named is not None:
            raise ConfigError(
                f"placement.roles.{role}={named}: placement.layout={layout} says where each role goes; set layout=custom"
            )
    if layout == "colocate_all":
        if config.pools:
            raise ConfigError(f"placement.pools={', '.join(config.pools)}: placement.layout=colocate_all has one pool, all GPUs")
        return {WHOLE: tuple(roles)}
    of_layout = PAIRS if layout == "colocate_pairs" else {role: (role,) for role in roles}
    members = {name: tuple(role for role in pair if role in roles) for name, pair in of_layout.items()}
    if not all(members.values()):
        raise ConfigError(
            "placement.layout=colocate_pairs: the run has neither a critic nor a reward model, so that the second pair would be "
            "empty; set placement.layout=colocate_all, or split"
        )
    if config.pools and config.pools.keys() != members.keys():
        raise ConfigError(
            f"placement.pools={', '.join(config.pools)}: the pools of placement.layout={layout} are {', '.join(members)} in this "
            "run; name these, or none for equal shares"
        )
    return members


def _custom(config: PlacementConfig, roles: Collection[str]) -> dict[str, tuple[str, ...]]:
    """By pool, its roles, as `placement.roles` has them. A role that is not named is where the actor is."""
    known = ", ".join(config.pools) or "none"
    for name in config.pools:
        if not re.fullmatch(r"[\w-]+", name):
            raise ConfigError(f"placement.pools.{name}: a pool's name is a part of file names: letters, digits, _ and -")
    if config.roles.actor is None:
        raise ConfigError(f"placement.roles.actor=null: placement.layout=custom wants its pool; placement.pools has {known}")
    chosen = {role: name or config.roles.actor for role, name in asdict(config.roles).items()}
    for role, name in chosen.items():
        if name not in config.pools:
            near = did_you_mean(name, config.pools)
            raise ConfigError(f"placement.roles.{role}={name}: no such pool; placement.pools has {known}{near}")
    members = {name: tuple(role for role in roles if chosen[role] == name) for name in config.pools}
    for name, there in members.items():
        if not there:
            raise ConfigError(
                f"placement.pools.{name}: no role of this run is in it; its roles are {', '.join(roles)} (placement.roles)"
            )
    return members


def _equal(layout: Layout, members: Mapping[str, tuple[str, ...]], trainer: WorkersConfig) -> list[Pool]:
    """As many GPUs for each: whole nodes where the nodes divide, else a part of each node."""
    n, nodes, gpus = len(members), trainer.nnodes, trainer.n_gpus_per_node
    by_node = nodes % n == 0
    there = f"{nodes} node{'s' if nodes > 1 else ''}"
    if not by_node and gpus % n:
        raise ConfigError(
            f"placement.layout={layout}: {n} pools ({', '.join(members)}) get no equal shares of {whole_in_words(trainer)} GPUs: "
            f"{n} divides neither {there} ({nodes} = {nodes // n} * {n} + {nodes % n}) nor the {gpus} GPUs of a node "
            f"({gpus} = {gpus // n} * {n} + {gpus % n}); placement.pools gives each its size"
        )
    size = (nodes // n, gpus) if by_node else (nodes, gpus // n)
    said = (
        f"{nodes} nodes / {n} pools * {gpus} GPUs = {size[0]} * {gpus}"
        if by_node
        else f"{there} * {gpus} GPUs / {n} pools = {nodes} * {size[1]}"
    )
    return [
        Pool(name, roles, *size, 1.0, i * size[0] if by_node else 0, 0 if by_node else i * size[1], f"pool {name}: {said}")
        for i, (name, roles) in enumerate(members.items())
    ]


def _seated(wanted: Mapping[str, PoolConfig], members: Mapping[str, tuple[str, ...]], trainer: WorkersConfig) -> list[Pool]:
    """Each pool, in the order in which they are written, where there is first room for it."""
    nodes, gpus = trainer.nnodes, trainer.n_gpus_per_node
    total = sum(pool.nodes * pool.gpus * pool.fraction for pool in wanted.values())
    if total > nodes * gpus + ROUNDING:
        terms = " + ".join(f"{name} {_product(pool)}" for name, pool in wanted.items())
        raise ConfigError(f"placement.pools: {terms} = {total:g} GPUs, and {whole_in_words(trainer)} = {nodes * gpus} are there")
    free = {(node, gpu): 1.0 for node in range(nodes) for gpu in range(gpus)}
    pools: list[Pool] = []
    for name, size in wanted.items():
        said = f"placement.pools.{name}: nodes * gpus = {size.nodes} * {size.gpus}"
        blank = Pool(name, members[name], size.nodes, size.gpus, size.fraction, 0, 0, said)
        corners = [(node, gpu) for node in range(nodes - size.nodes + 1) for gpu in range(gpus - size.gpus + 1)]
        tried = (replace(blank, first_node=node, first_gpu=gpu) for node, gpu in corners)
        seated = next((pool for pool in tried if all(free[slot] >= size.fraction - ROUNDING for slot in pool.slots)), None)
        if seated is None:
            left = "; ".join(f"node {node}: {', '.join(f'{free[node, gpu]:g}' for gpu in range(gpus))}" for node in range(nodes))
            raise ConfigError(
                f"placement.pools.{name}: {_product(size)} (nodes * gpus * fraction): there are no {size.gpus} GPUs side by "
                f"side, {size.fraction:g} of each free, on {size.nodes} node(s); of {whole_in_words(trainer)} GPUs the pools "
                f"before it leave: {left}"
            )
        for slot in seated.slots:
            free[slot] -= size.fraction
        pools.append(seated)
    return pools


def _product(pool: PoolConfig) -> str:
    return f"{pool.nodes} * {pool.gpus} * {pool.fraction:g}"
