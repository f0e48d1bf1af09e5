"""Translate what verl's one-step-off and fully-async programs spread over several keys, which no table by key can express.

Pools. verl gives trainer and engine GPUs of their own: trainer.nnodes x n_gpus_per_node and rollout.nnodes x n_gpus_per_node.
Here trainer.* is the whole cluster and placement.pools divides it, so the two sizes are added: on the same nodes while these have
at most NODE GPUs, otherwise on further nodes of the same size.

Staleness. With n = trigger_parameter_sync_step batches of G groups between two syncs, verl's rollouter has at most
(1 + staleness_threshold) * n * G groups that were admitted and not trained on when the weights change. The last of them is in
batch ceil((1 + staleness_threshold) * n) after that sync, so the weights before its update are newer by one version less:
max_staleness = ceil((1 + staleness_threshold) * n) - 1, the same bound on groups in whole batches. For n = 1 a threshold of 0 is
synchronous and 1 is one step off, as in verl's documentation. With n > 1 it is at least n: here the batch after a sync was
generated before it.

Batches. G is require_batches * ppo_mini_batch_size, and data.train_batch_size=0. rollout.total_rollout_steps counts groups.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any

from configs.base.keys import Keys

NODE = 8
"""GPUs of a node, at most."""
ROLLOUT = "actor_rollout_ref.rollout"
NODES, GPUS, HYBRID = f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node", "actor_rollout_ref.hybrid_engine"
GROUPS, TESTS, EPOCHS = f"{ROLLOUT}.total_rollout_steps", f"{ROLLOUT}.test_freq", f"{ROLLOUT}.total_epochs"
THRESHOLD, MODE = "async_training.staleness_threshold", "async_training.mode"
SYNC_EVERY, BATCHES = "async_training.trigger_parameter_sync_step", "async_training.require_batches"
BATCH, DRAWN, MINI = "data.train_batch_size", "data.gen_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
V1_SYNC = "trainer.v1.separate_async.parameter_sync_step"


Value = Callable[[str], Any]


@dataclass(slots=True)
class Translation:
    """replaces: keys that are left out. sets: keys to set instead, in any case. notes: warnings for the user.

    problems: a line for each combination that has no equivalent; the keys are in ``replaces`` then too.
    """

    replaces: set[str] = field(default_factory=set)
    sets: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def replace(self, note: str, *keys: str) -> None:
        """Leave ``keys`` out, with a warning."""
        self.replaces |= set(keys)
        self.notes.append(note)


def generation_ahead(typed: Collection[str], value: Value, keys: Keys) -> Translation:
    """Translation of the keys of verl's programs that generate ahead.

    typed: keys on the command line or in the user's YAML, by their names in the schema where they have one. value: of any key,
    None if absent. keys: of the program.
    """
    found = Translation()
    if keys.knows(MODE):
        for part, read in (
            (_pools, (NODES, GPUS, HYBRID)),
            (_batches, (BATCHES,)),
            (_staleness, (THRESHOLD,)),
            (_lengths, (GROUPS,)),
        ):
            if problems := list(part(typed, value, found)):
                found.problems += problems
                found.replaces |= set(read)
    # A key of verl's that no part of this program reads is left to the tables.
    found.sets = {name: new for name, new in found.sets.items() if keys.knows(name)}
    return found


def _whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _pools(typed: Collection[str], value: Value, found: Translation) -> Iterator[str]:
    nodes, hybrid = value(NODES), value(HYBRID)
    placed = sorted(name for name in typed if name.partition(".")[0] == "placement")
    is_placed = bool(placed) or value("placement.layout") not in (None, "colocate_all")
    if not nodes:
        if hybrid is False:
            if not is_placed:
                found.sets["placement.layout"] = "split"
            layout = "placement.* gives" if is_placed else "placement.layout=split gives"
            found.replace(f"{HYBRID}=false: {layout} the engine GPUs of its own", HYBRID)
        return
    of_trainer = (value("trainer.nnodes") or 1, value("trainer.n_gpus_per_node") or NODE)
    of_engine = (nodes, value(GPUS) or of_trainer[1])
    if not all(map(_whole, (*of_trainer, *of_engine))):
        remedy = "set placement.layout=custom, placement.pools and placement.roles"
        yield f"{NODES}={nodes}: sizes of the pools must be numbers; {remedy}"
        return
    if hybrid is True:
        yield f"{NODES}={nodes}: with {HYBRID}=true trainer and engine share GPUs; set it to false, or leave {NODES} out"
        return
    if is_placed:
        yield f"{NODES}={nodes}: {', '.join(placed) or 'placement.layout'} places the roles too; leave one of them out"
        return
    # Only the keys of a command line are known before it is composed, not those of its recipe.
    is_typed = bool(value("trainer.n_gpus_per_node"))
    assumed = "" if is_typed else " (type trainer.n_gpus_per_node if it is another number: a recipe's value is not read here)"
    sizes = f"{_product(of_trainer)} GPUs for the trainer{assumed}, {_product(of_engine)} for the engine"
    if of_trainer[0] == of_engine[0] and of_trainer[1] + of_engine[1] <= NODE:
        cluster = (of_trainer[0], of_trainer[1] + of_engine[1])
    elif of_trainer[1] == of_engine[1]:
        cluster = (of_trainer[0] + of_engine[0], of_trainer[1])
    else:
        yield (
            f"{NODES}={nodes}: {sizes}: neither the same nodes with at most {NODE} GPUs nor nodes of one size; set "
            "trainer.nnodes and trainer.n_gpus_per_node to the whole cluster, placement.layout=custom, placement.pools and "
            "placement.roles"
        )
        return
    found.sets |= {
        "trainer.nnodes": cluster[0],
        "trainer.n_gpus_per_node": cluster[1],
        "placement.layout": "custom",
        "placement.pools": {
            "trainer": {"nodes": of_trainer[0], "gpus": of_trainer[1], "fraction": 1.0},
            "rollout": {"nodes": of_engine[0], "gpus": of_engine[1], "fraction": 1.0},
        },
        "placement.roles.actor": "trainer",
        "placement.roles.rollout": "rollout",
    }
    left_out = [name for name in (NODES, GPUS, HYBRID) if name in typed]
    found.replace(f"{', '.join(left_out)}: {sizes}: {_product(cluster)} GPUs, which placement.pools divides", *left_out)


def _product(size: tuple[int, int]) -> str:
    return f"{size[0]} * {size[1]}"


def _batches(typed: Collection[str], value: Value, found: Translation) -> Iterator[str]:
    batch, several = value(BATCH), value(BATCHES)
    is_open = _whole(batch) and batch == 0
    if not is_open and BATCHES not in typed:
        return
    mini = value(MINI)
    size = int((several or 1) * mini) if _whole(several or 1) and _whole(mini) else None
    if size is None or not size:
        given = f"{BATCHES}={several}" if BATCHES in typed else f"{BATCH}=0"
        yield f"{given}: set {BATCH} to the number of prompts that a step trains on ({BATCHES} * {MINI})"
        return
    if BATCH in typed and not is_open and batch != size:
        yield f"{BATCHES}={several}: {several} * {MINI}={mini} are {size} prompts of a step, and {BATCH}={batch}; leave one out"
        return
    found.sets[BATCH] = size
    # Prompts are drawn one at a time anyway.
    read = ((BATCHES, BATCHES in typed), (BATCH, is_open), (DRAWN, value(DRAWN) == 1))
    left_out = [name for name, is_read in read if is_read]
    found.replace(f"{', '.join(left_out)}: sets {BATCH}={size}, {BATCHES} * {MINI}", *left_out)


def _batch_size(value: Value) -> int | None:
    """G, the prompts of a batch; None if it is not given."""
    batch, several, mini = value(BATCH), value(BATCHES) or 1, value(MINI)
    if _whole(batch) and batch:
        return int(batch)
    return int(several * mini) if _whole(several) and _whole(mini) else None


def _staleness(typed: Collection[str], value: Value, found: Translation) -> Iterator[str]:
    if THRESHOLD not in typed:
        return
    threshold, n, mode = value(THRESHOLD), value(SYNC_EVERY) or 1, value(MODE)
    if not isinstance(threshold, int | float) or isinstance(threshold, bool) or threshold < 0 or not _whole(n):
        yield f"{THRESHOLD}={threshold}: must be a proportion of stale samples, 0 or more; or set async_training.max_staleness"
        return
    # Fraction of the text: the float 0.1 is more than a tenth, and 10 * (1 + 0.1) batches would be rounded up to 12.
    batches = (1 + Fraction(str(threshold))) * n
    bound = ceil(batches) - 1
    # Generation is one step ahead, so tokens are n versions old with any threshold; n = 1 and 0 is synchronous.
    bound = max(bound, n) if n > 1 else bound
    if mode is False and bound > 1:
        yield (
            f"{THRESHOLD}={threshold}: with async_training.partial_rollout=false; responses continue with newer weights after a "
            f"sync (max_staleness={bound}); leave it out"
        )
        return
    # partial_rollout is an alias of the mode, with true and false.
    if mode is None or isinstance(mode, bool):
        found.sets[MODE] = "async"
        found.replaces |= {MODE} & set(typed)
    if "async_training.max_staleness" not in typed:
        found.sets["async_training.max_staleness"] = bound
    rounded = "" if batches.denominator == 1 else f", rounded up from {float(batches):g}: more groups may be stale than in verl"
    found.replace(
        f"{THRESHOLD}={threshold} sets async_training.max_staleness={bound}: (1 + {threshold}) * {n} = {ceil(batches)} batches "
        f"between two syncs{rounded}",
        THRESHOLD,
    )


def _lengths(typed: Collection[str], value: Value, found: Translation) -> Iterator[str]:
    groups, tests, epochs, n = (value(name) for name in (GROUPS, TESTS, EPOCHS, V1_SYNC))
    if _whole(groups):
        size = _batch_size(value)
        if size is None:
            yield f"{GROUPS}={groups}: set trainer.total_training_steps, the number of batches, instead"
        elif groups < size and "trainer.total_training_steps" not in typed:
            yield f"{GROUPS}={groups}: fewer prompts than a batch of {size} has; use at least {size}, or leave it out"
        else:
            if "trainer.total_training_steps" not in typed:
                found.sets["trainer.total_training_steps"] = groups // size
            found.replace(f"{GROUPS}={groups}: {groups} prompts are {groups // size} batches of {size}", GROUPS)
    if _whole(tests) and not _whole(value(SYNC_EVERY) or 1):
        yield f"{TESTS}={tests} counts syncs, and {SYNC_EVERY} is no number: set trainer.test_freq, in steps, instead"
    elif _whole(tests):
        found.sets["trainer.test_freq"] = tests * (value(SYNC_EVERY) or 1) if tests > 0 else tests
        found.replace(f"{TESTS}={tests} sets trainer.test_freq={found.sets['trainer.test_freq']}: it counts syncs", TESTS)
    if _whole(epochs):
        found.sets["trainer.total_epochs"] = epochs
        found.replace(f"{EPOCHS}={epochs} sets trainer.total_epochs={epochs}", EPOCHS)
    # verl reads the block separate_async in that mode only.
    if _whole(n) and value(MODE) == "separate_async":
        found.sets[SYNC_EVERY] = n
        found.replace(f"{V1_SYNC}={n} sets {SYNC_EVERY}={n}", V1_SYNC)
