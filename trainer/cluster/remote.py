"""The controller's handles of roles: split a batch by plan, send the shards to the workers, join the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

from trainer.cluster.oom_backoff import Budget
from trainer.cluster.watchdog import Watchdog
from workers.batch import Batch
from workers.controller.group import WorkerError, WorkerGroup
from workers.controller.rpc import Call, Mesh, role_call, sharded, worker_call
from workers.engine.base import EngineSpec, LossSpec, Saved
from workers.metric import Metric, Metrics, join_metrics
from workers.plan import Limits, Plan, SharedRows
from workers.prefixes import PREFIX_ENDS, chains_by_group, prefix_ends
from workers.roles.model_role import ModelRole

SHARING = {"prompt_length", PREFIX_ENDS}
"""Row columns with which engines share prefixes, see EngineSpec.shares_prefixes."""
R = TypeVar("R")


class SaveFailed(OSError):
    """Ranks could not write a checkpoint; has the message of each."""


class RemoteModel:
    """A model role on all workers of a group."""

    def __init__(
        self,
        group: WorkerGroup,
        role: str,
        spec: EngineSpec,
        loss: LossSpec | None,
        *,
        forward_limits: Limits,
        train_limits: Limits,
        budget: Budget,
        attention_cost: float,
        watchdog: Watchdog,
    ) -> None:
        """forward_limits, train_limits: largest micro-batch. budget: back-off of train steps after memory ran out.

        attention_cost: see plan.row_costs.
        """
        self.group = group
        self.watchdog = watchdog
        self.role = role
        self.forward_limits = forward_limits
        self.train_limits = train_limits
        self.budget = budget
        self.attention_cost = attention_cost
        self._shares_prefixes = spec.shares_prefixes
        self._flops = self._gpu_memory = 0.0
        from workers.roles.worker import Worker  # imported late, here and below: it loads transformers

        building = worker_call(Worker.build_model, role, spec, loss)
        self.mesh = mesh_of(watchdog.call(group, "start", f"start of {role}", building))
        group.register_mesh(role, self.mesh)

    def forward(
        self,
        batch: Batch,
        outputs: Sequence[str],
        *,
        limits: Limits | None = None,
        adapter: bool = True,
        snapshot: bool = False,
    ) -> Batch:
        """Columns ``outputs`` for every row of ``batch``, without gradient; see TrainEngine.forward.

        limits: largest micro-batch; None: forward_limits. adapter: False switches the LoRA adapter off. snapshot: with the
        weights of the last ``take_snapshot``.
        """
        batch, shared = self._with_prefixes(batch)
        plan = self._plan(shared, limits or self.forward_limits)
        # Other columns would travel to every rank without being read.
        needed = batch.only(tokens=["input_ids", "response_mask"], rows=sorted(SHARING & batch.rows.keys()))
        cuts = sharded(plan.micro_batches)
        call = role_call(self.role, ModelRole.forward, sharded(plan.split(needed)), cuts, list(outputs), adapter, snapshot)
        # The ranks that answer are those whose engine returns a batch, see Worker.build_model.
        return plan.collect(cast(list[Batch], self._call("forward", plan, needed, call)))

    def train_step(
        self, mini_batch: Batch, columns: Sequence[str], *, rows: Sequence[str] = (), units: str | None = None
    ) -> Metrics:
        """One optimizer step on a global mini-batch, which has the token column loss_weight.

        columns, rows: token and row columns that the loss reads. units: a row column; rows with equal values form a unit, which
        stays in one micro-batch. Limits in rows, and the budget, count units. Raises ValueError if a unit exceeds the limit in
        tokens.

        If memory runs out, the budget is halved. A rank that is alone repeats the step, and the metric out_of_memory counts
        the repetitions. Several ranks may hang in a collective by then: WorkerError of kind OutOfMemory is raised.
        """
        mini_batch, shared = self._with_prefixes(mini_batch)
        shared = shared if units is None else replace(shared, units=mini_batch.rows[units].tolist())
        sizes = shared.unit_tokens()
        sharing = sorted(SHARING & mini_batch.rows.keys())
        needed = mini_batch.only(tokens=["input_ids", "response_mask", "loss_weight", *columns], rows=[*rows, *sharing])
        repeats = 0
        while True:
            plan = self._plan(shared, self.budget.limits(self.train_limits, sizes))
            try:
                cuts = sharded(plan.micro_batches)
                call = role_call(self.role, ModelRole.train_step, sharded(plan.split(needed)), cuts)
                metrics = join_metrics(self._call("update", plan, needed, call))
                break
            except WorkerError as error:
                if error.kind not in ("OutOfMemory", "RepeatableOutOfMemory"):
                    raise
                message = error.message.partition(": ")[2]
                self.budget.halve(self.train_limits, shared.sizes(plan), max(sizes), message)
                # Only after halving: the budget outlives a restart.
                if error.kind == "OutOfMemory":
                    raise
                repeats += 1
        if repeats:
            metrics["out_of_memory"] = Metric.sum(repeats)
        # Not metrics of the update: performance_metrics makes the MFU of the FLOPs.
        flops, memory = metrics.pop("flops"), metrics.pop("gpu_memory", Metric.max(0.0))
        assert isinstance(flops, Metric) and isinstance(memory, Metric), "numbers"
        self._flops += float(flops.value)
        self._gpu_memory = max(self._gpu_memory, float(memory.value))
        return metrics

    def take_flops(self) -> float:
        """Model FLOPs of the train steps since the last call, summed over all ranks."""
        flops, self._flops = self._flops, 0.0
        return flops

    def take_gpu_memory(self) -> float:
        """Bytes in use on the fullest GPU during the train steps since the last call; 0 without GPUs or steps."""
        memory, self._gpu_memory = self._gpu_memory, 0.0
        return memory

    def take_snapshot(self) -> None:
        """Copy the trained weights to the host, for ``forward``; the copy replaces an earlier one."""
        call = role_call(self.role, ModelRole.take_snapshot)
        self.watchdog.call(self.group, "sync", f"snapshot of {self.role}", call)

    def save(self, path: str, *, background: bool = False) -> None:
        """Write a checkpoint to the directory ``path``; ``saved`` returns the outcome.

        background: return as soon as the state is copied to the host.
        """
        self._save(role_call(self.role, ModelRole.save, path, background))

    def saved(self, *, patient: bool = True) -> Saved | None:
        """What the ranks wrote in the last ``save``; None if a rank is still writing and ``patient`` is false.

        Raises SaveFailed when all ranks have ended and at least one could not write.
        """
        answers = self._save(role_call(self.role, ModelRole.saved, patient))
        if any(answer is None for answer in answers):
            return None
        if problems := dict.fromkeys(answer for answer in answers if isinstance(answer, str)):
            raise SaveFailed("; ".join(problems))
        return Saved.join([answer for answer in answers if isinstance(answer, Saved)])

    def _save(self, call: Call[R]) -> list[R]:
        return self.watchdog.call(self.group, "save", f"save of {self.role}", call)

    def load(self, path: str) -> None:
        self.watchdog.call(self.group, "load", f"load of {self.role}", role_call(self.role, ModelRole.load, path))

    def export_hf(self, path: str) -> None:
        self.watchdog.call(self.group, "save", f"export of {self.role}", role_call(self.role, ModelRole.export_hf, path))

    def _with_prefixes(self, batch: Batch) -> tuple[Batch, SharedRows]:
        """The batch with the column PREFIX_ENDS if its rows share prefixes and the engine does, and its rows for planning."""
        lengths = batch.lengths.tolist()
        if not self._shares_prefixes or not {"group", "prompt_length"} <= batch.rows.keys():
            return batch, SharedRows(lengths, [()] * len(lengths))
        chains = chains_by_group(batch)
        return batch.with_rows(**{PREFIX_ENDS: prefix_ends(chains)}), SharedRows(lengths, chains)

    def _plan(self, rows: SharedRows, limits: Limits) -> Plan:
        return rows.plan(len(self.mesh.output_ranks), limits, attention_cost=self.attention_cost)

    def _call(self, phase: str, plan: Plan, batch: Batch, call: Call[R]) -> list[R]:
        work = partial(work_by_rank, plan, batch.lengths.tolist(), self.mesh)
        return self.watchdog.call(self.group, phase, f"{phase} of {self.role}", call, mesh=self.role, work=work)


class BaseModel:
    """A model role with its LoRA adapter off, used as another model: the reference of a policy that is an adapter."""

    def __init__(self, model: RemoteModel, limits: Limits) -> None:
        """limits: largest micro-batch."""
        self._model = model
        self._limits = limits

    def forward(self, batch: Batch, outputs: Sequence[str]) -> Batch:
        """See RemoteModel.forward."""
        return self._model.forward(batch, outputs, limits=self._limits, adapter=False)


def work_by_rank(plan: Plan, lengths: Sequence[int], mesh: Mesh) -> list[str]:
    """For the user: what each rank was given of a batch. lengths: tokens of each row."""
    by_shard = []
    for rows, cuts in zip(plan.shards, plan.micro_batches, strict=True):
        mine = [lengths[row] for row in rows]
        cut = f", {len(cuts)} micro-batches" if cuts else ""
        by_shard.append(f"{len(mine)} rows, {sum(mine)} tokens{cut}, longest row {max(mine, default=0)}")
    return [by_shard[shard] for shard in mesh.shard_of_rank]


def mesh_of(places: Sequence[tuple[int, bool]]) -> Mesh:
    """Mesh of a role. places: by rank, (data-parallel shard, whether it returns the results of that shard)."""
    n_shards = max(shard for shard, _ in places) + 1
    output_ranks = tuple(places.index((shard, True)) for shard in range(n_shards))
    return Mesh(shard_of_rank=tuple(shard for shard, _ in places), output_ranks=output_ranks)
