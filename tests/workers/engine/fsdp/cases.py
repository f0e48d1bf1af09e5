"""Batches, cuts and training runs that one and two ranks go through alike."""

from typing import Any

import torch
from torch import Tensor

from configs.schema.common import AggMode
from tests.workers.engine.toy import ToyLoss, cut, toy_batch
from workers.batch import Batch
from workers.engine.fsdp.fsdp_engine import FSDPEngine
from workers.engine.fsdp.sharding import local
from workers.plan import MicroBatches
from workers.roles.memory_scheduler import MemoryScheduler, ResidentModel
from workers.roles.model_role import ModelRole

MODES: tuple[AggMode, ...] = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
NORM_LENGTH = 300
CUTS: dict[str, dict[str, int]] = {
    "one": {"max_tokens": 2000},
    "by tokens": {"max_tokens": 310},
    "by row": {"max_rows": 1},
    "by rows": {"max_rows": 5},
}


def invariance_batch(mode: AggMode, dtype: torch.dtype) -> Batch:
    """Rows of 1 to 300 tokens, masks with holes, row 4 fully masked, and each mode's weights in plain code."""
    batch = toy_batch([1, 300, 2, 37, 120, 5, 64, 211, 3, 90, 17, 33], masked=[4], dtype=dtype)
    masks = batch.split_rows("response_mask")
    trained_rows = sum(1 for mask in masks if mask.sum() > 0)
    trained_tokens = sum(int(mask.sum()) for mask in masks)
    weights = []
    for mask in masks:
        for here in mask.tolist():
            match mode:
                case "token-mean":
                    weight = 1 / trained_tokens
                case "token-sum":
                    weight = 1.0
                case "seq-mean-token-sum":
                    weight = 1 / trained_rows
                case "seq-mean-token-mean":
                    weight = 1 / (trained_rows * max(1, int(mask.sum())))
                case "seq-mean-token-sum-norm":
                    weight = 1 / (trained_rows * NORM_LENGTH)
            weights.append(weight if here else 0.0)
    return batch.with_tokens(loss_weight=torch.tensor(weights, dtype=torch.float64))


def lopsided(batch: Batch, n_ranks: int) -> tuple[list[Batch], list[MicroBatches]]:
    """The first rank has one row and empty slots; with one rank, empty slots between its rows."""
    rows = list(range(len(batch)))
    if n_ranks == 1:
        return [batch], [((), tuple(rows[:7]), (), tuple(rows[7:]), ())]
    others = [*rows[:1], *rows[2:]]
    shares = [rows[1:2], *(others[i :: n_ranks - 1] for i in range(n_ranks - 1))]
    thirds = [tuple(tuple(range(len(share) * i // 3, len(share) * (i + 1) // 3)) for i in range(3)) for share in shares[1:]]
    return [batch.select(share) for share in shares], [((0,), (), ()), *thirds]


def all_cuts(batch: Batch, n_ranks: int) -> dict[str, tuple[list[Batch], list[MicroBatches]]]:
    return {name: cut(batch, n_ranks, **limits) for name, limits in CUTS.items()} | {"lopsided": lopsided(batch, n_ranks)}


def training_batch(step: int) -> Batch:
    return toy_batch([40, 3, 25, 11, 60, 18], seed=100 + step)


def train(engine: FSDPEngine, steps: range, loss: object = None) -> dict[str, Tensor]:
    """One optimizer step on each of training_batch(step): {metric: (len(steps),)}, loss being this rank's part."""
    found: dict[str, list[float]] = {"loss": [], "grad_norm": [], "lr": []}
    for step in steps:
        shares, plans = cut(training_batch(step), engine.mesh.dp_size, max_tokens=80)
        metrics = engine.train_step(shares[engine.mesh.dp_rank], plans[engine.mesh.dp_rank], loss or ToyLoss())
        for name, values in found.items():
            values.append(metrics[name].value)
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


def exported(engine: FSDPEngine) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in engine.export_weights()}


def shards(engine: FSDPEngine) -> dict[str, Tensor]:
    """Copies of all that this rank holds: parameters and optimizer state."""
    assert engine._optimizer is not None
    held = {f"{kind}.{name}": moment.clone() for (kind, name), moment in engine._optimizer.moments().items()}
    return held | {name: local(param).clone() for name, param in engine._params.items()}


def with_snapshots(engine: Any, *, offload: bool = False) -> dict[str, dict[str, Tensor]]:
    """{when: this rank's log-probs, and the weights} around updates of a role whose weights were copied before them.

    "first", "second": when each of two snapshots is taken; "old", "newer": forward passes under them, two updates after each;
    "before", "after": the present weights around the last of these.
    """
    scheduler = MemoryScheduler()
    scheduler.add_model("actor", ResidentModel(engine, param_offload=offload, optimizer_offload=offload))
    role = ModelRole("actor", engine, None, scheduler)
    shares, plans = cut(toy_batch([9, 30, 1, 14, 22, 7]), engine.mesh.dp_size, max_tokens=40)

    def state(*, snapshot: bool = False) -> dict[str, Tensor]:
        found = role.forward(shares[engine.mesh.dp_rank], plans[engine.mesh.dp_rank], ["log_probs"], True, snapshot)
        log_probs = torch.zeros(0) if found is None else found.tokens["log_probs"]
        return {"log_probs": log_probs} | ({} if snapshot else exported(engine))

    def updates(steps: range) -> None:
        scheduler.enter("train", "actor")
        train(engine, steps)

    found = {"first": state()}
    role.take_snapshot()
    updates(range(2))
    found["old"] = state(snapshot=True)
    found["second"] = state()
    role.take_snapshot()
    updates(range(2, 4))
    found["before"] = state()
    found["newer"] = state(snapshot=True)
    found["after"] = state()
    return found


def assert_snapshots(found: dict[str, dict[str, Tensor]]) -> None:
    """Of ``with_snapshots``: under a snapshot the log-probs are bitwise those of its time, and the weights are back after it."""
    for under, at in (("old", "first"), ("newer", "second")):
        assert torch.equal(found[under]["log_probs"], found[at]["log_probs"])
    assert [name for name, weight in found["before"].items() if not torch.equal(weight, found["after"][name])] == []
    # Nothing above is true because nothing has changed.
    for one, other in (("first", "second"), ("second", "before")):
        assert any(not torch.equal(weight, found[other][name]) for name, weight in found[one].items() if name != "log_probs")
        assert not len(found[one]["log_probs"]) or not torch.equal(found[one]["log_probs"], found[other]["log_probs"])
