"""Search for the fastest settings of a run on a cluster that fit its memory.

Candidates are pairs of a rollout's and the trainers' settings on the same GPUs. A step never takes less time if one of them takes
more, so pairs are visited in the order of their times, and the search ends with the last plan that is asked for: most pairs are
never checked for memory. Candidates also use a part of the cluster, so that more GPUs never make the best plan slower; parts
whose least possible time is more than that of the plans found are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import product
from operator import attrgetter
from typing import Any, TypeVar

from configs.base.keys import ConfigError
from configs.schema.placement import Placement
from configs.schema.ppo import PPOConfig
from configs.validation.batches import roles_of
from configs.validation.placement import placement_of
from trainer.planner.hardware import GpuCluster
from trainer.planner.memory_estimate import Use, estimate
from trainer.planner.memory_model import Shape
from trainer.planner.step_time import ACTOR, PhaseSpan, PhaseTime, generation, schedule, step_seconds, trainer_phases
from trainer.planner.time_model import ResponseLengths
from trainer.ppo.ppo_builder import wants_critic

T = TypeVar("T")
U = TypeVar("U")
Overrides = dict[str, Any]
Checked = Callable[[Overrides], PPOConfig]
"""The checked configuration of the command with further overrides; raises ConfigError."""
ROLLOUT = "actor_rollout_ref.rollout"
MARGIN = 0.95
"""Fraction of a GPU that a plan may use: torch's allocator fragments (docs/performance.md)."""
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Values of gpu_memory_utilization."""
LAYOUTS = ("colocate_all", "colocate_pairs", "split")
"""Placements that need no sizes of pools."""
TUNED = ("max_token_len_per_gpu", "gpu_memory_utilization", "_offload")
"""Ends of keys by which two plans of a list do not differ alone."""
SETTINGS = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "gpu_memory_utilization", "fsdp_size",
    "ulysses_sequence_parallel_size", "max_token_len_per_gpu", "enable_gradient_checkpointing", "_offload",
)  # fmt: skip
"""Ends of the keys that a plan sets besides the size of the cluster and the placement."""


def best_pairs(
    first: Sequence[T],
    second: Sequence[U],
    cost: Callable[[T, U], float],
    fits: Callable[[T, U], bool],
    possible: Callable[[T], bool] = lambda _: True,
) -> Iterator[tuple[float, T, U]]:
    """Yield the pairs that fit, in the order of their costs.

    ``cost`` does not decrease along ``second``. possible: whether one of ``first`` fits any of ``second``.
    """
    if not second:
        return
    queue = [(cost(one, second[0]), i, 0) for i, one in enumerate(first)]
    heapify(queue)
    while queue:
        seconds, i, j = heappop(queue)
        if j == 0 and not possible(first[i]):
            continue
        if j + 1 < len(second):
            heappush(queue, (cost(first[i], second[j + 1]), i, j + 1))
        if fits(first[i], second[j]):
            yield seconds, first[i], second[j]


@dataclass(frozen=True)
class RankedPlan:
    """A configuration on a cluster, with its predicted memory and time.

    overrides: those that differ from the given command. fixed: keys that no plan changes.
    """

    config: PPOConfig
    cluster: GpuCluster
    shapes: Mapping[str, Shape]
    lengths: ResponseLengths
    overrides: Overrides
    fixed: frozenset[str] = frozenset()

    @cached_property
    def place(self) -> Placement:
        return placement_of(self.config, has_critic="critic" in self.shapes)

    @cached_property
    def generation(self) -> PhaseTime:
        return generation(self.config, self.place, self.shapes[ACTOR], self.cluster.hardware, self.lengths)

    @cached_property
    def others(self) -> list[PhaseTime]:
        """Phases after generation: none of them depends on ``rollout_options``."""
        return trainer_phases(self.config, self.place, self.shapes, self.cluster.hardware, self.lengths)

    @property
    def phases(self) -> list[PhaseTime]:
        return [self.generation, *self.others]

    @cached_property
    def spans(self) -> list[PhaseSpan]:
        return schedule(self.config, self.place, self.phases)

    @property
    def seconds(self) -> float:
        return step_seconds(self.spans)

    @cached_property
    def uses(self) -> list[Use]:
        return list(estimate(self.config, self.place, self.shapes, self.cluster.hardware.memory))

    @property
    def fits(self) -> bool:
        return self.fits_within(self.uses)

    def fits_within(self, uses: Sequence[Use]) -> bool:
        return all((use.bytes or 0.0) <= MARGIN * self.cluster.hardware.memory for use in uses)

    def having(self, overrides: Overrides) -> RankedPlan:
        """The plan with other settings, without the checks of a command line: see ``accepted``."""
        return replace(self, config=replaced(self.config, overrides), overrides=self.overrides | overrides)


def replaced(config: Any, overrides: Overrides) -> Any:
    """The configuration with these values by key."""
    for key, value in overrides.items():
        name, _, rest = key.partition(".")
        config = replace(config, **{name: replaced(value_of(config, name), {rest: value}) if rest else value})
    return config


def as_words(overrides: Overrides) -> list[str]:
    """Overrides as on a command line."""
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in overrides.items()]


def accepted(plan: RankedPlan, checked: Checked) -> bool:
    """Whether the plan's command line is valid and its configuration has the predicted time."""
    try:
        again = replace(plan, config=checked(plan.overrides))
        return again.fits and abs(again.seconds - plan.seconds) <= 1e-6 * plan.seconds
    except ConfigError:
        return False


def alternatives(plan: RankedPlan, count: int, checked: Checked) -> list[RankedPlan]:
    """The fastest plans whose command lines are valid, in the order of their times."""
    found: list[RankedPlan] = []
    for _, candidate in ranked(plan):
        if len(found) == count:
            break
        if not any(untuned(candidate) == untuned(other) for other in found) and accepted(candidate, checked):
            found.append(candidate)
    return found


def placements(plan: RankedPlan, checked: Checked) -> list[RankedPlan]:
    """The command on all GPUs in each placement that is valid and fits, with no other override, fastest first."""
    found = []
    for layout in dict.fromkeys((plan.config.placement.rule, *LAYOUTS)):
        placed = changed(plan, {"placement.layout": layout})
        try:
            # Composed, not replaced: sizes that were not typed are clamped to the pools, as they would be in the run.
            candidate = replace(plan, config=checked(placed), overrides=placed)
        except ConfigError:
            continue
        if candidate.fits:
            found.append(candidate)
    return sorted(found, key=lambda candidate: candidate.seconds)


def untuned(plan: RankedPlan) -> Overrides:
    return {key: value for key, value in plan.overrides.items() if not key.endswith(TUNED)}


def ranked(plan: RankedPlan) -> Iterator[tuple[float, RankedPlan]]:
    """Candidates that fit, in the order of their times: of all numbers of GPUs and placements, merged."""
    queue: list[tuple[float, int, RankedPlan | None, Iterator[tuple[float, RankedPlan]]]] = []
    for i, base in enumerate(bases(plan)):
        # None: the base waits with a lower bound of its candidates, which are not computed unless it is the least of all.
        queue.append((bound(base), i, None, candidates(base)))
    heapify(queue)
    while queue:
        seconds, i, candidate, pairs = heappop(queue)
        if candidate is not None:
            yield seconds, candidate
        if (following := next(pairs, None)) is not None:
            heappush(queue, (following[0], i, following[1], pairs))


def bases(plan: RankedPlan) -> Iterator[RankedPlan]:
    """The plan on each number of nodes and of their GPUs, and in each placement."""
    cluster, layouts = plan.cluster, {plan.config.placement.layout, "colocate_all", "split"} - {"auto"}
    for nodes, gpus, layout in product(counts(cluster.nodes), counts(cluster.gpus), sorted(layouts)):
        size = {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": gpus, "placement.layout": layout}
        changes = {key: value for key, value in size.items() if value_of(plan.config, key) != value}
        if changes.keys() & plan.fixed:
            continue
        base = plan.having(changes)
        try:
            base.place  # noqa: B018  # raises if the pools do not fit
        except ConfigError:
            continue
        yield base


def bound(base: RankedPlan) -> float:
    """Seconds that no candidate on the GPUs of ``base`` falls below."""
    # The largest share of the GPU has room for the most sequences.
    options = [base.having(options) for options in rollout_options(base, shares=SHARES[-1:])]
    answers = min((option.generation for option in options), key=lambda time: time.seconds)
    rest = trainer_phases(base.config, base.place, base.shapes, base.cluster.hardware, base.lengths, least=True)
    return step_seconds(schedule(base.config, base.place, [answers, *rest]))


def candidates(base: RankedPlan) -> Iterator[tuple[float, RankedPlan]]:
    """Candidates on the GPUs of ``base`` that fit, in the order of their times."""
    rollouts = sorted((base.having(options) for options in rollout_options(base)), key=lambda one: one.generation.seconds)
    trainers = [base.having(options) for options in train_options(base)]

    def joined(trainer: RankedPlan, rollout: RankedPlan) -> RankedPlan:
        return trainer.having({key: value for key, value in rollout.overrides.items() if key not in base.overrides})

    def cost(trainer: RankedPlan, rollout: RankedPlan) -> float:
        return step_seconds(schedule(base.config, base.place, [rollout.generation, *trainer.others]))

    def fits(trainer: RankedPlan, rollout: RankedPlan) -> bool:
        return joined(trainer, rollout).fits

    def possible(trainer: RankedPlan) -> bool:
        return trainer.fits_within([use for use in trainer.uses if use.phase != "answers"])

    for seconds, trainer, rollout in best_pairs(trainers, rollouts, cost, fits, possible):
        yield seconds, joined(trainer, rollout)


def rollout_options(plan: RankedPlan, shares: Sequence[float] = SHARES) -> Iterator[Overrides]:
    """Tensor parallel sizes (with them the number of replicas) and shares of the GPU of an engine."""
    rollout, pool = plan.config.actor_rollout_ref.rollout, plan.place.pool("rollout")
    if rollout.name == "embedded":
        yield {}
        return
    heads = plan.shapes[ACTOR].kv_heads
    sizes = [size for size in powers(pool.n_gpus_per_node) if pool.n_gpus_per_node % size == 0 and heads % size == 0]
    for size, share in product(sizes, shares):
        yield changed(plan, {f"{ROLLOUT}.tensor_model_parallel_size": size, f"{ROLLOUT}.gpu_memory_utilization": share})


def train_options(plan: RankedPlan) -> Iterator[Overrides]:
    """Settings of actor, reference and critic, which all get the same ones."""
    config, data = plan.config, plan.config.data
    longest = data.max_prompt_length + data.max_response_length
    pool, shape = plan.place.pool("actor"), plan.shapes[ACTOR]
    gpus, node = pool.nnodes * pool.n_gpus_per_node, pool.n_gpus_per_node
    keys = [key for key in roles_of(config, has_critic=wants_critic(config)) if key in (ACTOR, "actor_rollout_ref.ref", "critic")]
    models = ["actor_rollout_ref.model", *(["critic.model"] if "critic" in keys else [])]
    offloads = ((False, False), (False, True), (True, True)) if plan.cluster.hardware.device == "cuda" else ((False, False),)
    splits = [(sp, 0) for sp in powers(node) if shape.heads % sp == 0 and node % sp == 0]
    if config.actor_rollout_ref.actor.strategy == "megatron":
        stages = [pp for pp in powers(gpus) if shape.layers % pp == 0]
        splits = [(tp, pp) for tp in powers(node) for pp in stages if shape.kv_heads % tp == 0 and gpus % (tp * pp) == 0]
    for (split, stages_), (params, optimizer), recompute, times in product(splits, offloads, (True, False), (1, 2, 4, 8, 16)):
        if stages_ and not recompute:  # memory_estimate.py assumes that Megatron recomputes
            continue
        ranks = split if not stages_ else 1
        tokens = {f"{key}.ppo_max_token_len_per_gpu": -(-longest * times // ranks) for key in keys if not key.endswith(".ref")}
        tokens |= {f"{key}.forward_max_token_len_per_gpu": -(-longest * times // ranks) for key in keys if key == "critic"}
        others = [ROLLOUT, *(key for key in keys if key.endswith(".ref"))]
        tokens |= {f"{key}.log_prob_max_token_len_per_gpu": -(-longest * times // ranks) for key in others}
        common = tokens | {f"{model}.enable_gradient_checkpointing": recompute for model in models}
        if stages_:
            values: Overrides = {"tensor_model_parallel_size": split, "pipeline_model_parallel_size": stages_}
            values |= {"param_offload": params, "optimizer_offload": optimizer, "grad_offload": params}
            yield changed(plan, common | {f"{key}.megatron.{name}": value for key in keys for name, value in values.items()})
            continue
        shards = {-1, *(size for size in (node, node // 2) if 0 < size < gpus and gpus % size == 0 and size % split == 0)}
        for size in sorted(shards):
            values = {"fsdp_size": size, "ulysses_sequence_parallel_size": split}
            values |= {"param_offload": params, "optimizer_offload": optimizer}
            yield changed(plan, common | {f"{key}.fsdp_config.{name}": value for key in keys for name, value in values.items()})


def changed(plan: RankedPlan, overrides: Overrides) -> Overrides:
    """Those overrides that change the plan's configuration, without fixed keys."""
    return {key: value for key, value in overrides.items() if key not in plan.fixed and value_of(plan.config, key) != value}


def value_of(config: Any, key: str) -> Any:
    return attrgetter(key)(config)


def powers(most: int) -> list[int]:
    """Powers of two below ``most``, and ``most``."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]


def counts(most: int) -> list[int]:
    """Numbers of nodes, or of GPUs of a node, up to ``most``: all up to 16, then those with four significant binary digits.

    A larger cluster has all the numbers of a smaller one.
    """
    return [count for count in range(1, most + 1) if count % (1 << max(0, count.bit_length() - 4)) == 0]
