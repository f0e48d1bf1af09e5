"""Rules of configs/openrlhf.yaml for the placement of models on GPUs."""

from collections.abc import Iterator, Mapping
from typing import Any

from configs.base.keys import ConfigError
from configs.compat.openrlhf.arguments import Arguments
from configs.compat.openrlhf.entries import Entry, implied, mapped

ROLLOUT = "actor_rollout_ref.rollout"
NODE = 8  # GPUs per node, unless a flag requests more
SIZES = [f"{role}_{size}" for role in ("actor", "ref", "critic", "reward") for size in ("num_nodes", "num_gpus_per_node")]
TOGETHER = ("colocate_all_models", "colocate_actor_ref", "colocate_critic_reward")


def models(arguments: Arguments) -> list[str]:
    """Models of the run, the actor first. Under LoRA the reference is the actor without its adapter, not a separate model."""
    has = {
        "actor": True,
        "ref": arguments.number("init_kl_coef") > 0 and arguments.count("lora_rank") == 0,
        "critic": arguments.text("advantage_estimator") == "gae",
        "reward": arguments.has("reward_pretrain") and not arguments.has("remote_rm_url"),
    }
    return [role for role, there in has.items() if there]


def placement(arguments: Arguments) -> Iterator[Entry]:
    """Nodes, GPUs and pools. Raises ConfigError if colocated models have different sizes or engines do not fit."""
    here = models(arguments)
    absent = [name for name in SIZES if name.split("_")[0] not in here and arguments.has(name)]
    if absent:
        yield implied(absent, "the run has no such model")
    used = tuple(name for name in SIZES if name.split("_")[0] in here)
    engines = arguments.count("vllm_num_engines") if arguments.text("vllm_num_engines") else 0
    if arguments.has("colocate_all_models"):
        yield _one_pool(arguments, used, engines)
        return
    pools, roles, said = _pools(arguments, here, engines)
    size = _nodes(list(pools.values()))
    settings: dict[str, Any] = {"trainer.nnodes": size[0], "trainer.n_gpus_per_node": size[1]}
    if len(pools) > 1:
        written = {name: {"nodes": nodes, "gpus": gpus, "fraction": 1.0} for name, (nodes, gpus) in pools.items()}
        chosen = {f"placement.roles.{role}": pool for role, pool in roles.items()}
        settings |= {"placement.layout": "custom", "placement.pools": written, **chosen}
    total = " + ".join(f"{name} {nodes} * {gpus}" for name, (nodes, gpus) in pools.items())
    fit = f"{total} = {sum(nodes * gpus for nodes, gpus in pools.values())} GPUs, on {size[0]} * {size[1]}"
    yield mapped((*TOGETHER[1:], *used), settings, "; ".join([*said, fit]))


def sleep(arguments: Arguments) -> Iterator[Entry]:
    """Sleep mode of the rollout engine, which needs it only if it shares GPUs."""
    key = f"{ROLLOUT}.free_cache_engine"
    if arguments.has("colocate_all_models"):
        yield mapped(("vllm_enable_sleep",), {key: arguments.has("vllm_enable_sleep")})
    elif arguments.has("vllm_enable_sleep"):
        yield implied(("vllm_enable_sleep",), "an engine with GPUs of its own does not sleep")


def _one_pool(arguments: Arguments, used: tuple[str, ...], engines: int) -> Entry:
    nodes, gpus = _size(arguments, "actor")
    cut = arguments.count("vllm_tensor_parallel_size")
    if engines and engines * cut != nodes * gpus:
        raise ConfigError(
            f"--{arguments.spelt('colocate_all_models')}: the engines have the actor's GPUs, and {engines} engines * {cut} = "
            f"{engines * cut} are not {nodes} nodes * {gpus} = {nodes * gpus}"
        )
    settings = {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": gpus, "placement.layout": "colocate_all"}
    return mapped((*TOGETHER, *used), settings, "all models and the engine share the actor's GPUs")


def _pools(arguments: Arguments, here: list[str], engines: int) -> tuple[dict[str, tuple[int, int]], dict[str, str], list[str]]:
    """({pool: (nodes, GPUs per node)}, {role: pool}, remarks)."""
    pools: dict[str, tuple[int, int]] = {}
    roles: dict[str, str] = {}
    told = []
    shared = {"ref": ("actor", "colocate_actor_ref"), "reward": ("critic", "colocate_critic_reward")}
    for role in here:
        # A role shares another's pool only if that role exists and the flag for it is set.
        host, flag = shared.get(role, ("", ""))
        if host not in pools or not arguments.has(flag):
            pools[role], roles[role] = _size(arguments, role), role
            continue
        if _size(arguments, role) != pools[host]:
            asked = " and ".join(
                f"{name} {nodes} * {gpus}" for name, (nodes, gpus) in ((host, pools[host]), (role, _size(arguments, role)))
            )
            raise ConfigError(f"--{arguments.spelt(flag)}: these models have the same GPUs, and {asked} (nodes * GPUs) are not")
        roles[role] = host
    if engines:
        pools["rollout"] = _of_engines(arguments, engines, max(NODE, *(gpus for _, gpus in pools.values())))
        roles["rollout"] = "rollout"
        cut = arguments.count("vllm_tensor_parallel_size")
        told.append(f"{engines} engine{'s' if engines > 1 else ''} * {cut} = {engines * cut} GPUs, apart from the models")
    return pools, roles, told


def _of_engines(arguments: Arguments, engines: int, node: int) -> tuple[int, int]:
    """(nodes, GPUs per node) for the engines: the fewest nodes with the same number of whole engines on each."""
    cut = arguments.count("vllm_tensor_parallel_size")
    for nodes in range(1, engines + 1):
        if engines % nodes == 0 and engines // nodes * cut <= node:
            return nodes, engines // nodes * cut
    raise ConfigError(
        f"--{arguments.spelt('vllm_tensor_parallel_size')} {cut}: an engine is on one node, and {cut} GPUs are more than {node}"
    )


def _nodes(sizes: list[tuple[int, int]]) -> tuple[int, int]:
    """(nodes, GPUs per node) that hold all pools: one node if possible; otherwise each pool follows the one before it.

    A pool that fits into the GPUs left on the last node shares that node; any other pool starts on new nodes.
    """
    total = sum(gpus for _, gpus in sizes)
    if len(sizes) == 1 or (all(nodes == 1 for nodes, _ in sizes) and total <= NODE):
        return sizes[0][0], total
    node = max(NODE, *(gpus for _, gpus in sizes))
    count = left = 0
    for nodes, gpus in sizes:
        if nodes == 1 and gpus <= left:
            left -= gpus
        else:
            count, left = count + nodes, node - gpus
    return count, node


def _size(arguments: Arguments, role: str) -> tuple[int, int]:
    """(nodes, GPUs per node) of a role."""
    return arguments.count(f"{role}_num_nodes"), arguments.count(f"{role}_num_gpus_per_node")


def useless(arguments: Arguments) -> Mapping[str, str]:
    """{prefix of keys: reason why the run does not use them}."""
    here = models(arguments)
    reasons = {
        "ref": ("actor_rollout_ref.ref.", "there is no reference in this run"),
        "critic": (
            "critic.",
            f"--{arguments.spelt('advantage_estimator')} {arguments.text('advantage_estimator')} has no critic",
        ),
        "reward": ("reward.reward_model.", "the run's own GPUs have no reward model"),
    }
    return dict(reason for role, reason in reasons.items() if role not in here)
