"""Translate what verl's one-step-off and fully-async programs spread over several keys, which no table by key can express.

Pools. verl gives trainer and engine GPUs of their own: trainer.nnodes x n_gpus_per_node and rollout.nnodes x n_gpus_per_node. Here
trainer.* is the whole machine and placement.pools divides it, so the two sizes are added: on the same nodes while these have at
most NODE GPUs, otherwise on further nodes of the same size.

Staleness. With n = trigger_parameter_sync_step batches of G groups between two syncs, verl's rollouter has at most
(1 + staleness_threshold) * n * G groups that were admitted and not trained on when the weights change. The last of them is trained
on as batch ceil((1 + staleness_threshold) * n) after that sync, by weights that are this many updates newer, minus one:
max_staleness = ceil((1 + staleness_threshold) * n) - 1, the same bound on groups in whole batches. 0 is synchronous for n = 1, and 1
is one step off, as in verl's documentation.

Batches. G is require_batches * ppo_mini_batch_size, and data.train_batch_size=0. rollout.total_rollout_steps counts groups.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any

from configs.base.keys import ConfigError

NODE = 8
"""GPUs of a node, at most."""
ROLLOUT = "actor_rollout_ref.rollout"
NODES, GPUS, HYBRID = f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node", "actor_rollout_ref.hybrid_engine"
GROUPS, TESTS, EPOCHS = f"{ROLLOUT}.total_rollout_steps", f"{ROLLOUT}.test_freq", f"{ROLLOUT}.total_epochs"
THRESHOLD, MODE = "async_training.staleness_threshold", "async_training.mode"
SYNC_EVERY, BATCHES = "async_training.trigger_parameter_sync_step", "async_training.require_batches"
BATCH, DRAWN, MINI = "data.train_batch_size", "data.gen_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
V1_MODE, V1_SYNC = "trainer.v1.trainer_mode", "trainer.v1.separate_async.parameter_sync_step"


@dataclass(slots=True)
class Translation:
    """replaces: keys that are left out. sets: keys to set instead, in any case. notes: warnings for the user."""

    replaces: set[str] = field(default_factory=set)
    sets: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def replace(self, why: str, *keys: str, **unused: Any) -> None:
        """Leave ``keys`` out."""
        self.replaces |= set(keys)
        self.notes.append(why)


def generation_ahead(typed: Collection[str], value: Callable[[str], Any]) -> Translation:
    """Translation of the keys of verl's programs that generate ahead.

    typed: keys on the command line or in the user's YAML, by their names in the schema where they have one. value: of such a key,
    None if absent. Raises ConfigError with one line for each combination that has no equivalent.
    """
    found, problems = Translation(), list[str]()
    for part in (_pools, _batches, _staleness, _lengths):
        problems += part(typed, value, found)
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def _pools(typed: Collection[str], value: Callable[[str], Any], found: Translation) -> Iterator[str]:
    nodes, hybrid = value(NODES) or 0, value(HYBRID)
    placed = [name for name in typed if name.startswith("placement.") or name == "placement"]
    if not nodes:
        if hybrid is False:
            if not placed:
                found.sets["placement.layout"] = "split"
            found.replace(f"{HYBRID}=false: {'the' if placed else 'placement.layout=split, a'} pool of the engine has its own GPUs", HYBRID)
        return
    if hybrid is True:
        yield f"{NODES}={nodes}: {HYBRID}=true, so trainer and engine share GPUs; set it to false, or leave {NODES} out"
        return
    of_trainer = (value("trainer.nnodes") or 1, value("trainer.n_gpus_per_node") or NODE)
    of_engine = (nodes, value(GPUS) or of_trainer[1])
    sizes = f"{' x '.join(map(str, of_trainer))} GPUs for the trainer, {' x '.join(map(str, of_engine))} for the engine"
    if placed:
        yield f"{NODES}={nodes}: {', '.join(sorted(placed))} places the roles as well; leave one of them out"
        return
    if not all(isinstance(number, int) for number in (*of_trainer, *of_engine)):
        yield f"{NODES}={nodes}: {sizes}: not numbers; set placement.layout=custom, placement.pools and placement.roles"
        return
    if of_trainer[0] == of_engine[0] and of_trainer[1] + of_engine[1] <= NODE:
        whole = (of_trainer[0], of_trainer[1] + of_engine[1])
    elif of_trainer[1] == of_engine[1]:
        whole = (of_trainer[0] + of_engine[0], of_trainer[1])
    else:
        yield (
            f"{NODES}={nodes}: {sizes}: neither the same nodes with at most {NODE} GPUs nor nodes of one size; set trainer.nnodes "
            "and trainer.n_gpus_per_node to the whole cluster, placement.layout=custom, placement.pools and placement.roles"
        )
        return
    pools = (f"{name}:{{nodes:{n},gpus:{gpus},fraction:1.0}}" for name, (n, gpus) in (("trainer", of_trainer), ("rollout", of_engine)))
    found.sets |= {
        "trainer.nnodes": whole[0],
        "trainer.n_gpus_per_node": whole[1],
        "placement.layout": "custom",
        "placement.pools": f"{{{','.join(pools)}}}",
        "placement.roles.actor": "trainer",
        "placement.roles.rollout": "rollout",
    }
    left_out = [name for name in (NODES, GPUS, HYBRID) if name in typed]
    found.replace(f"{', '.join(left_out)}: {sizes} = {' x '.join(map(str, whole))} GPUs, divided by placement.pools", *left_out)


def _batches(typed: Collection[str], value: Callable[[str], Any], found: Translation) -> Iterator[str]:
    if value(BATCH) != 0 or isinstance(value(BATCH), bool):
        return
    size = _batch_size(value)
    if size is None:
        yield f"{BATCH}=0: set {MINI}, the number of prompts that the trainer fetches at once, or {BATCH} itself"
        return
    found.sets[BATCH] = size
    left_out = [BATCH, *([DRAWN] if value(DRAWN) == 1 else [])]
    found.replace(f"{', '.join(left_out)}: sets {BATCH}={size}, what the trainer fetches at once ({BATCHES} * {MINI})", *left_out)


def _batch_size(value: Callable[[str], Any]) -> int | None:
    """G, the prompts of a batch; None if it is not given."""
    if value(BATCH):
        return int(value(BATCH))
    return int(value(BATCHES) or 1) * int(value(MINI)) if value(MINI) else None


def _staleness(typed: Collection[str], value: Callable[[str], Any], found: Translation) -> Iterator[str]:
    if value(V1_MODE) is not None or THRESHOLD not in typed:
        return
    threshold, n, mode = value(THRESHOLD), value(SYNC_EVERY) or 1, value(MODE)
    if not isinstance(threshold, int | float) or isinstance(threshold, bool) or threshold < 0:
        yield f"{THRESHOLD}={threshold}: a proportion of stale samples, 0 or more; or set async_training.max_staleness"
        return
    # Of the text: 0.1 as a float is more than a tenth, and 10 * 0.1 batches would be rounded up to two.
    batches = (1 + Fraction(str(threshold))) * n
    bound = ceil(batches) - 1
    if mode is False and bound > 1:
        yield (
            f"async_training.partial_rollout=false: with {THRESHOLD}={threshold} responses continue with newer weights after a "
            f"sync (max_staleness={bound}); leave it out"
        )
        return
    # partial_rollout is an alias of the mode, with true and false.
    if mode is None or isinstance(mode, bool):
        found.sets[MODE] = "async"
        found.replaces |= {MODE} & set(typed)
    if "async_training.max_staleness" not in typed:
        found.sets["async_training.max_staleness"] = bound
    sum_ = f"(1 + {threshold}) * {n}"
    rounded = "" if batches.denominator == 1 else f", rounded up from {float(batches):g}: results differ from verl's"
    found.replace(f"{THRESHOLD}={threshold} sets async_training.max_staleness={bound}: {sum_} = {ceil(batches)} batches{rounded}", THRESHOLD)


def _lengths(typed: Collection[str], value: Callable[[str], Any], found: Translation) -> Iterator[str]:
    if isinstance(groups := value(GROUPS), int):
        size = _batch_size(value)
        if size is None:
            yield f"rollout.total_rollout_steps={groups}: set trainer.total_training_steps, in batches, instead"
        else:
            if "trainer.total_training_steps" not in typed:
                found.sets["trainer.total_training_steps"] = groups // size
            found.replace(f"rollout.total_rollout_steps={groups}: {groups} prompts are {groups // size} batches of {size}", GROUPS)
    if isinstance(tests := value(TESTS), int):
        every = tests * (value(SYNC_EVERY) or 1) if tests > 0 else tests
        found.sets["trainer.test_freq"] = every
        found.replace(f"rollout.test_freq={tests} sets trainer.test_freq={every}: it counts syncs", TESTS)
    if isinstance(epochs := value(EPOCHS), int):
        found.sets["trainer.total_epochs"] = epochs
        found.replace(f"rollout.total_epochs={epochs} sets trainer.total_epochs", EPOCHS)
    if (n := value(V1_SYNC)) is not None:
        # verl's block separate_async belongs to that mode; with another it has no effect.
        if value(MODE) == "separate_async":
            found.sets[SYNC_EVERY] = n
            found.replace(f"{V1_SYNC}={n} sets {SYNC_EVERY}={n}", V1_SYNC)
