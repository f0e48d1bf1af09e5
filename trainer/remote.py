"""What the controller holds of a role: calls that cut a batch by plan, send the shares, and join the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from trainer.budget import Budget
from workers.batch import Batch
from workers.controller.dispatch import Mesh, Sharded
from workers.controller.group import PhaseTimeout, WorkerError, WorkerGroup
from workers.engine.base import EngineSpec, LossSpec
from workers.metric import Metric, Metrics, join_metrics
from workers.plan import Limits, Plan, make_plan
from workers.rollout.base import RolloutSpec, Sampling

PHASES = {"start": "engine start", "generate": "generation", "sync": "weight sync"}


class RemoteModel:
    """A model role on every worker of a group."""

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
    ) -> None:
        """forward_limits, train_limits: how large a micro-batch may be; budget: of train steps, since memory ran out.
        attention_cost: see plan.row_costs."""
        self.group = group
        self.role = role
        self.forward_limits = forward_limits
        self.train_limits = train_limits
        self.budget = budget
        self.attention_cost = attention_cost
        self._flops = 0.0
        self.mesh = mesh_of(group.call("build_model", role, spec, loss).result())
        group.register_mesh(role, self.mesh)

    def forward(self, batch: Batch, outputs: Sequence[str]) -> Batch:
        """Columns ``outputs`` for every row of ``batch``, without gradient; see TrainEngine.forward."""
        plan = self._plan(batch, self.forward_limits)
        needed = batch.only(tokens=["input_ids", "response_mask"])
        return plan.collect(self._call("forward", plan, needed, list(outputs)))

    def train_step(self, mini_batch: Batch, columns: Sequence[str]) -> Metrics:
        """One optimizer step on a global mini-batch that carries loss_weight; ``columns``: what the loss reads.

        If memory runs out, the budget is halved. A rank that is alone repeats the step, and the metric out_of_memory says how
        often; among several, which may hang in a collective by then, it leaves as WorkerError, its kind OutOfMemory.
        """
        needed = mini_batch.only(tokens=["input_ids", "response_mask", "loss_weight", *columns])
        lengths, repeats = mini_batch.lengths.tolist(), 0
        while True:
            plan = self._plan(mini_batch, self.budget.limits(self.train_limits, lengths))
            try:
                metrics = join_metrics(self._call("train_step", plan, needed))
                break
            except WorkerError as error:
                if error.kind not in ("OutOfMemory", "RepeatableOutOfMemory"):
                    raise
                self.budget.halve(self.train_limits, plan, lengths, error.message.partition(": ")[2])
                if error.kind == "OutOfMemory":
                    raise
                repeats += 1
        if repeats:
            metrics["out_of_memory"] = Metric.sum(repeats)
        flops = metrics.pop("flops")
        assert isinstance(flops, Metric), "a number"
        self._flops += flops.value
        return metrics

    def take_flops(self) -> float:
        """Model FLOPs of the train steps since the last call, over all ranks."""
        flops, self._flops = self._flops, 0.0
        return flops

    def save(self, path: str) -> None:
        self.group.call("run", self.role, "save", path).result()

    def load(self, path: str) -> None:
        self.group.call("run", self.role, "load", path).result()

    def export_hf(self, path: str) -> None:
        self.group.call("run", self.role, "export_hf", path).result()

    def _plan(self, batch: Batch, limits: Limits) -> Plan:
        n_shards = len(self.mesh.answers)
        return make_plan(batch.lengths.tolist(), n_shards, limits, attention_cost=self.attention_cost)

    def _call(self, method: str, plan: Plan, batch: Batch, *args: Any) -> list[Any]:
        shares, cuts = Sharded(plan.split(batch)), Sharded(plan.micro_batches)
        return self.group.call("run", self.role, method, shares, cuts, *args, mesh=self.role).result()


class RemoteRollout:
    """The rollout role on every worker of a group."""

    def __init__(self, group: WorkerGroup, spec: RolloutSpec, source: str) -> None:
        """source: the model role whose weights the engines generate with. Limits are spec.rollout.timeouts."""
        self.group = group
        self.engine = spec.rollout.name
        self.timeouts = spec.rollout.timeouts
        self.mesh = mesh_of(self._call("start", self.timeouts.start, "build_rollout", "rollout", spec, source))
        group.register_mesh("rollout", self.mesh)

    def sync_weights(self, version: int) -> Metrics:
        """Every engine has the source's weights when this returns; completions bear ``version`` from now on."""
        return join_metrics(self._call("sync", self.timeouts.sync, "run", "rollout", "sync_weights", version))

    def generate(self, prompts: Batch, sampling: Sampling, group_size: int) -> Batch:
        """An answer to each row of ``prompts``, in order; see RolloutRole.generate.

        group_size: so many consecutive rows bear the same prompt; they go to one engine, which reads the prompt once.
        """
        n_engines = len(self.mesh.answers)
        shares = tuple(
            tuple(row for row in range(len(prompts)) if row // group_size % n_engines == engine) for engine in range(n_engines)
        )
        plan = Plan(shares=shares, micro_batches=tuple(() for _ in shares))
        what = ("run", "rollout", "generate", Sharded(plan.split(prompts)), sampling)
        return plan.collect(self._call("generate", self.timeouts.generate, *what, mesh="rollout"))

    def _call(
        self, phase: Literal["start", "generate", "sync"], seconds: float, method: str, *args: Any, mesh: str | None = None
    ) -> list[Any]:
        """The result of a call. Raises WorkerError and PhaseTimeout, with the phase and the engine in the user's words.

        The group has no other call under way: the phase's time is its own.
        """
        words = f"{PHASES[phase]} (rollout engine {self.engine})"
        try:
            return self.group.call(method, *args, mesh=mesh, timeout=seconds).result()
        except WorkerError as error:
            error.method = words
            raise
        except PhaseTimeout as error:
            error.method = f"{words}, limited by actor_rollout_ref.rollout.timeouts.{phase},"
            raise

    def stats(self) -> dict[str, float]:
        """The engines' counters since the last call, added up; see Rollout.stats."""
        parts = self.group.call("run", "rollout", "stats", mesh="rollout").result()
        return {name: sum(part[name] for part in parts) for name in parts[0]}


def mesh_of(places: Sequence[tuple[int, bool]]) -> Mesh:
    """places: for every rank, which share of the data it works on, and whether it answers for that share."""
    n_shards = max(shard for shard, _ in places) + 1
    answers = tuple(places.index((shard, True)) for shard in range(n_shards))
    return Mesh(shard_of_rank=tuple(shard for shard, _ in places), answers=answers)
