"""Seconds of each phase of a run's step, from its configuration and time_model.py, and when they run.

Phases of one pool follow each other; of different pools, those of one stage (forward passes, updates) run at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from configs.schema.common import FSDPConfig, MegatronConfig, ShardedConfig
from configs.schema.placement import Placement
from configs.schema.ppo import PPOConfig
from configs.validation.batches import wants_ref
from configs.validation.parallel import context_parallel_size, data_parallel_size
from configs.validation.rollout import engine_ranks, world_size
from trainer.planner import time_model
from trainer.planner.hardware import Hardware
from trainer.planner.memory_estimate import BYTES, WORK, Role, memory_roles
from trainer.planner.memory_model import Shape
from trainer.planner.time_model import Communicator, Decoder, Parts, ResponseLengths, pairs_of, pass_work
from trainer.ppo.loop import has_old_log_probs
from trainer.rollout.remote_rollout import STEPS

ACTOR = "actor_rollout_ref.actor"
GENERATE, FORWARD, UPDATE, SYNC = range(4)
ENGINE_WORK = 3e9
"""Bytes of an engine's GPU besides weights and cache: of 74.5 GB at 7B 1.2 are not (docs/performance.md); vLLM profiles more."""


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Seconds of a phase by part. stage: phases of a later stage begin when those of an earlier one have ended."""

    pool: str
    phase: str
    stage: int
    parts: Parts

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def binds(self) -> str:
        """The part that takes most."""
        return max(self.parts, key=lambda part: self.parts[part])


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """When a phase runs, in seconds from the start of the step."""

    time: PhaseTime
    start: float
    end: float


def schedule(config: PPOConfig, place: Placement, phases: list[PhaseTime]) -> list[PhaseSpan]:
    """Spans of a step. Generation ahead (async_training.mode) overlaps the rest, on GPUs of its own."""
    ahead = config.async_training.mode in ("one_step_off", "async") and "actor" not in place.pool("rollout").roles
    spans: list[PhaseSpan] = []
    began = 0.0
    for stage in (GENERATE, FORWARD, UPDATE, SYNC):
        ends: dict[str, float] = {}
        for time in (time for time in phases if time.stage == stage):
            start = ends.get(time.pool, began)
            ends[time.pool] = start + time.seconds
            spans.append(PhaseSpan(time, start, ends[time.pool]))
        if not (stage == GENERATE and ahead):
            began = max(ends.values(), default=began)
        if stage == UPDATE:
            began = max((span.end for span in spans), default=began)
    return spans


def step_seconds(spans: list[PhaseSpan]) -> float:
    return max((span.end for span in spans), default=0.0)


def phase_times(
    config: PPOConfig, place: Placement, shapes: Mapping[str, Shape], hardware: Hardware, lengths: ResponseLengths
) -> list[PhaseTime]:
    """Phases of a step, in their order. shapes: by configuration key of the roles, as for ``memory_roles``."""
    answers = generation(config, place, shapes[ACTOR], hardware, lengths)
    return [answers, *trainer_phases(config, place, shapes, hardware, lengths)]


def trainer_phases(
    config: PPOConfig,
    place: Placement,
    shapes: Mapping[str, Shape],
    hardware: Hardware,
    lengths: ResponseLengths,
    *,
    least: bool = False,
) -> list[PhaseTime]:
    """Phases of a step after generation.

    least: lower bounds over all sizes of micro-batches and parallel groups, offloads and recomputation.
    """
    roles = memory_roles(config, place, shapes)
    batch, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    found: list[PhaseTime] = []
    for key, role in roles.items():
        name = key.rpartition(".")[2]
        if key != ACTOR or has_old_log_probs(config):
            passed = PassCost(role, hardware, lengths, batch, n, head=name in ("actor", "ref"), least=least)
            found.append(PhaseTime(role.pool.name, f"{name}: {WORK.get(name, 'scores')}", FORWARD, passed.forward()))
    # With an adapter the reference is the actor without it, and has no workers of its own.
    if wants_ref(config) and "actor_rollout_ref.ref" not in roles:
        role = roles[ACTOR]
        passed = PassCost(role, hardware, lengths, batch, n, head=True, least=least)
        found.append(PhaseTime(role.pool.name, "ref: log-probs", FORWARD, passed.forward()))
    actor = config.actor_rollout_ref.actor
    learners = {"critic": config.critic, ACTOR: actor}
    for key, learner in ((key, learner) for key, learner in learners.items() if key in roles):
        size, role = learner.ppo_mini_batch_size, roles[key]
        updates = learner.ppo_epochs * -(-batch // size)
        passed = PassCost(role, hardware, lengths, size, n, head=key == ACTOR, least=least)
        parts = {part: updates * seconds for part, seconds in passed.update().items()}
        if not least:
            parts["offload"] = updates * moments_moved(role, hardware) + parts.get("offload", 0.0)
        parts["controller"] = updates * hardware.software.phase
        found.append(PhaseTime(role.pool.name, f"{key.rpartition('.')[2]}: update", UPDATE, parts))
    tokens = batch * n * (lengths.prompt + lengths.response)
    found.append(sync(config, place, roles[ACTOR], hardware))
    found.append(PhaseTime(place.pool("actor").name, "controller", SYNC, {"controller": hardware.software.token * tokens}))
    return found


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Rollout engines of a step. prompts: sampled in a step, with ``n`` responses each. max_num_seqs: what the scheduler gives a
    replica; the decoder's slots are fewer if its KV cache holds fewer."""

    decoder: Decoder
    replicas: int
    prompts: int
    n: int
    max_num_seqs: int
    balance: Literal["tokens", "static"]


def engines(config: PPOConfig, place: Placement, shape: Shape, hardware: Hardware, lengths: ResponseLengths) -> EnginePlan:
    rollout, pool = config.actor_rollout_ref.rollout, place.pool("rollout")
    ranks = engine_ranks(rollout)
    # Dynamic sampling generates rounds of gen_batch_size prompts; one is counted.
    sampled = (config.algorithm.filter_groups.enable and config.data.gen_batch_size) or config.data.train_batch_size
    group = Communicator(ranks, ranks > pool.n_gpus_per_node, hardware)
    eager = rollout.enforce_eager or hardware.device == "cpu"
    # SGLang generates between the calls too.
    steps = STEPS if rollout.name != "sglang" else 0
    adapter = config.actor_rollout_ref.model.has_adapter and rollout.lora_sync == "adapter"
    decoder = Decoder(shape, group, slots(config, shape, hardware, lengths), BYTES[rollout.dtype], steps, eager, adapter)
    return EnginePlan(decoder, max(1, world_size(pool) // ranks), sampled, rollout.n, rollout.max_num_seqs, rollout.balance)


def generation(config: PPOConfig, place: Placement, shape: Shape, hardware: Hardware, lengths: ResponseLengths) -> PhaseTime:
    """Time of the rollout engines, each with an equal share of the responses, until the last one has ended."""
    planned = engines(config, place, shape, hardware, lengths)
    rows = -(-planned.prompts * planned.n // planned.replicas)
    # A replica computes a prompt once, however many of its responses it has.
    prompts = min(rows, max(1.0, rows / planned.n))
    # All wait for the replica that has the longest response of all.
    own = lengths.responses(rows)
    longest = max(own), max(*own, lengths.longest(planned.prompts * planned.n))
    own = tuple(longest[1] if i == own.index(longest[0]) else length for i, length in enumerate(own))
    parts = planned.decoder.generate(prompts, lengths.prompt, own)
    return PhaseTime(place.pool("rollout").name, "answers", GENERATE, parts | {"controller": hardware.software.phase})


def slots(config: PPOConfig, shape: Shape, hardware: Hardware, lengths: ResponseLengths) -> int:
    """Sequences that an engine decodes at once: max_num_seqs, or those that its KV cache holds if they are fewer."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "embedded":
        return rollout.max_num_seqs
    size, ranks = BYTES[rollout.dtype], rollout.tensor_model_parallel_size
    # The rest of the engine's share holds weights, and what a step of max_num_batched_tokens and CUDA graphs take.
    cache = rollout.gpu_memory_utilization * hardware.memory - size * shape.parameters / ranks - ENGINE_WORK
    row = size * 2 * shape.keys * shape.layers * (lengths.prompt + lengths.response) / ranks
    return max(1, min(rollout.max_num_seqs, int(cache / row)))


def sync(config: PPOConfig, place: Placement, actor: Role, hardware: Hardware) -> PhaseTime:
    """Time of the weight sync, and of sleep and wake of an engine that shares the trainer's GPUs."""
    rollout, here, there = config.actor_rollout_ref.rollout, place.pool("actor"), place.pool("rollout")
    size, costs = BYTES[rollout.dtype] * actor.shape.parameters, hardware.software
    group = Communicator(world_size(here), here.nnodes > 1, hardware)
    parts = {"weights": size / costs.sync, "collectives": group.ring(size)}
    if shares_weights(config, actor):
        parts = {"weights": 0.0}
    if here is not there:
        # Each replica receives all weights once; replicas receive at the same time.
        crosses = place.pools[0].nnodes > 1 or here.first_node != there.first_node
        parts["collectives"] += size / (hardware.network if crosses else hardware.link)
    elif rollout.name == "vllm" and rollout.free_cache_engine and hardware.device == "cuda":
        parts["sleep"] = costs.sleep  # most of it is Python's garbage collection; SGLang takes 0.04 s
    return PhaseTime(here.name, "sync", SYNC, parts | {"controller": costs.phase})


def shares_weights(config: PPOConfig, actor: Role) -> bool:
    """Whether the embedded engine uses the trainer's own tensors, so that a sync copies nothing."""
    models = config.actor_rollout_ref
    alone = world_size(actor.pool) == 1 and "rollout" in actor.pool.roles and models.actor.strategy == "fsdp"
    same = models.actor.fsdp_config.model_dtype == models.rollout.dtype
    return models.rollout.name == "embedded" and alone and same and not models.model.has_adapter


def moments_moved(role: Role, hardware: Hardware) -> float:
    """Seconds to move the optimizer's state to the GPU and back, if it is offloaded."""
    sharding = role.config.sharding
    if hardware.device == "cpu" or not sharding.optimizer_offload:
        return 0.0
    if isinstance(sharding, FSDPConfig):
        setting = role.setting
        return 2 * 2 * setting.kept * role.shape.parameters / setting.gpus / hardware.host_link * setting.trained
    copies = data_parallel_size(role.config, role.pool) if sharding.use_distributed_optimizer else 1
    split = sharding.tensor_model_parallel_size * sharding.pipeline_model_parallel_size
    return 2 * 12 * role.shape.parameters / (split * copies) / hardware.host_link


@dataclass(frozen=True, slots=True)
class PassCost:
    """Passes of a role over ``prompts`` prompts with n responses each, on the GPU with the most rows.

    least: a lower bound over all settings of the role; the work of one micro-batch, divided evenly, and nothing else.
    """

    role: Role
    hardware: Hardware
    lengths: ResponseLengths
    prompts: int
    n: int
    head: bool
    least: bool = False

    def forward(self) -> Parts:
        """Seconds of a forward pass over all rows."""
        assert self.role.forwards is not None, "a role that is asked"
        return self._parts(self.role.forwards, backward=False) | {"controller": self.hardware.software.phase}

    def update(self) -> Parts:
        """Seconds of one optimizer step on the rows."""
        assert self.role.learns is not None, "a role that learns"
        return self._parts(self.role.learns, backward=True)

    def _parts(self, limit: int, *, backward: bool) -> Parts:
        config: ShardedConfig = self.role.config
        size, model = BYTES[config.sharding.dtype], self.role.model
        if self.least:
            return self._least(size, backward=backward)
        rows, tokens, pairs, micro_batches = self._rows(limit)
        recompute = backward and model is not None and model.enable_gradient_checkpointing
        work = pass_work(
            self.role.shape, rows * tokens, rows * pairs, size, micro_batches=micro_batches, backward=backward,
            recompute=recompute, frozen=bool(self.role.adapter), head=self.head, compiled=self._compiled,
        )  # fmt: skip
        passes = 1 + (1 + recompute if backward else 0)
        if isinstance(config.sharding, MegatronConfig):
            parts = self._megatron(config.sharding, work, rows * tokens, size, micro_batches, passes)
        else:
            parts = self._fsdp(config.sharding, work, rows * tokens, size, micro_batches, passes)
        moved = self.role.shape.parameters * (1 if not backward else 2) / self._shards() if config.sharding.param_offload else 0.0
        kept = self.role.setting.kept if isinstance(config.sharding, FSDPConfig) else size
        return parts | ({"offload": kept * moved / self.hardware.host_link} if self.hardware.device == "cuda" else {})

    def _least(self, size: int, *, backward: bool) -> Parts:
        rows, prompt = self.prompts * self.n / world_size(self.role.pool), self.lengths.prompt
        pairs = pairs_of(self.lengths.responses(min(256, self.prompts * self.n)), prompt) - (1 - 1 / self.n) * prompt**2 / 2
        work = pass_work(
            self.role.shape, rows * (self.lengths.response + prompt / self.n), rows * pairs, size, micro_batches=0,
            head=self.head, backward=backward, frozen=bool(self.role.adapter), compiled=self._compiled,
        )  # fmt: skip
        return work.seconds(self.hardware, size)

    @property
    def _compiled(self) -> bool:
        return isinstance(self.role.config.sharding, FSDPConfig) and self.role.setting.fused

    def _rows(self, limit: int) -> tuple[int, float, float, int]:
        """Rows of a rank, tokens and query-key pairs of one, and micro-batches of at most ``limit`` tokens."""
        prompt, shares = self.lengths.prompt, data_parallel_size(self.role.config, self.role.pool)
        rows, group = -(-self.prompts * self.n // shares), 1
        # FSDP computes a prompt once for the responses to it in a micro-batch (workers/engine/shared_prefixes.py).
        if self.role.model is not None and self.role.config.strategy == "fsdp":
            group = min(self.n, rows, max(1, int((limit - prompt) // max(1.0, self.lengths.response))))
        tokens = self.lengths.response + prompt / group
        pairs = pairs_of(self.lengths.responses(min(256, self.prompts * self.n)), prompt) - (1 - 1 / group) * prompt**2 / 2
        return rows, tokens, pairs, math.ceil(rows / max(1, limit // tokens))

    def _shards(self) -> int:
        sharding = self.role.config.sharding
        if isinstance(sharding, FSDPConfig):
            return self.role.setting.gpus
        return sharding.tensor_model_parallel_size * sharding.pipeline_model_parallel_size

    def _fsdp(
        self, sharding: FSDPConfig, work: time_model.Work, tokens: float, size: int, micro_batches: int, passes: float
    ) -> Parts:
        pool, shape, hardware = self.role.pool, self.role.shape, self.hardware
        sp, setting, backward = context_parallel_size(self.role.config), self.role.setting, passes > 1
        parts = {part: seconds / sp for part, seconds in work.kernels(hardware, size).items()}
        # On the CPU the costs of a single rank were measured together with these.
        wrapped = setting.wrapped or hardware.device == "cpu"
        parts |= work.host(hardware, sum(parts.values()), wrapped=wrapped, compiled=self._compiled)
        shards = Communicator(setting.gpus, setting.gpus > pool.n_gpus_per_node, hardware)
        copies = Communicator(world_size(pool) // setting.gpus, pool.nnodes > 1, hardware)
        parts["copies"] = wrapped * time_model.fsdp_copies(
            shape, setting.gpus, size, setting.kept, hardware, micro_batches=micro_batches, backward=backward and setting.trained,
            reshard=sharding.reshard_after_forward and backward,
        )  # fmt: skip
        found = time_model.fsdp(
            shape, shards, copies, size, sum(parts.values()), micro_batches=micro_batches,
            backward=backward and setting.trained, reshard=sharding.reshard_after_forward and backward,
        )  # fmt: skip
        exchange = Communicator(sp, sp > pool.n_gpus_per_node, hardware)
        found["collectives"] += time_model.ulysses(shape, exchange, tokens / sp, size, micro_batches=micro_batches, passes=passes)
        if backward:
            trained = shape.parameters if setting.trained else self.role.adapter / 16
            found["optimizer"] = time_model.optimizer(trained / setting.gpus, setting.kept, hardware)
            found["update"] = hardware.software.update
        return parts | found

    def _megatron(
        self, cut: MegatronConfig, work: time_model.Work, tokens: float, size: int, micro_batches: int, passes: float
    ) -> Parts:
        pool, shape, hardware = self.role.pool, self.role.shape, self.hardware
        tp, pp, cp = cut.tensor_model_parallel_size, cut.pipeline_model_parallel_size, cut.context_parallel_size
        parts = {part: seconds / (tp * pp * cp) for part, seconds in work.kernels(hardware, size).items()}
        parts |= work.host(hardware, sum(parts.values()), 1 / pp)
        group = Communicator(tp, tp > pool.n_gpus_per_node, hardware)
        parts["collectives"] = (
            time_model.tensor_parallel(shape, group, tokens / cp, size, micro_batches=micro_batches, passes=passes) / pp
        )
        parts["bubble"] = sum(parts.values()) * time_model.bubble(
            pp, cut.virtual_pipeline_model_parallel_size or 1, micro_batches
        )
        if passes > 1:
            mine = shape.parameters / (tp * pp)
            replicas = world_size(pool) // (tp * pp)
            copies = Communicator(replicas, pool.nnodes > 1 or replicas * tp * pp > pool.n_gpus_per_node, hardware)
            # Gradients are reduced in float32 and weights gathered once a step; both overlap little.
            parts["collectives"] += copies.ring(time_model.FLOAT32 * mine) + copies.ring(size * mine)
            state = mine / (replicas if cut.use_distributed_optimizer else 1)
            parts["optimizer"] = time_model.optimizer(state, time_model.FLOAT32, hardware)
            parts["update"] = hardware.software.update
        return parts
