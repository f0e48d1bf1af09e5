"""Runs in two processes: everything that needs two ranks, once. The tests look at what is written here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from configs.schema.common import AggMode, TiledMLPConfig
from scripts.bench.memory import Alive
from tests.tiny import save_tiny_model
from tests.workers.engine.fsdp.cases import (
    MODES,
    all_cuts,
    exported,
    invariance_batch,
    shards,
    train,
    training_batch,
    with_snapshots,
)
from tests.workers.engine.fsdp.pairs import pair_batch, pair_cuts, reward_loss, save_reward_model
from tests.workers.engine.toy import Shifted, ToyLoss, ValueLoss, cut, gradients, toy_batch, toy_engine
from workers.engine.fsdp import units
from workers.engine.fsdp.sharding import full, local
from workers.metric import plain_numbers

REDUCED = ("each", "last")
"""In which micro-batches gradients cross ranks."""
QUICK: tuple[AggMode, ...] = ("token-mean", "seq-mean-token-mean")
"""Modes outside soak on two ranks; on one rank, test_fsdp_engine_invariance.py has all."""
LARGER: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": 61,
    "tie_word_embeddings": False,
}


def main(rank: int, directory: str, models: dict[str, str]) -> None:
    torch.set_num_threads(1)
    path = Path(directory)
    dist.init_process_group("gloo", init_method=f"file://{path / 'rendezvous_of_two'}", rank=rank, world_size=2)
    checks = (
        invariance, accumulation, grouped, memory, parity, checkpoint, from_one_rank, value_head, options, export, skipping, lora,
        reward_head, experts, snapshots,
    )  # fmt: skip
    found: dict[str, Any] = {check.__name__: check(rank, path, models) for check in checks}
    torch.save(found, path / f"rank_{rank}.pt")
    dist.destroy_process_group()


def invariance(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    return gradients_of(rank, models, torch.float64, QUICK) | gradients_of(rank, models, torch.float32, MODES[:1])


def gradients_of(rank: int, models: dict[str, str], dtype: torch.dtype, modes: Sequence[AggMode]) -> dict[str, Any]:
    found = {}
    engine = toy_engine(models["qwen2"], dtype=str(dtype).removeprefix("torch."))
    for mode in modes:
        for name, (shares, plans) in all_cuts(invariance_batch(mode, dtype), 2).items():
            grads = gradients(engine, shares[rank], plans[rank], ToyLoss())
            found[f"{dtype} {mode} {name}"] = grads if rank == 0 else {}
    return found


def soak(rank: int, directory: str, models: dict[str, str]) -> None:
    """What ``invariance`` leaves out."""
    torch.set_num_threads(1)
    path = Path(directory)
    dist.init_process_group("gloo", init_method=f"file://{path / 'rendezvous'}", rank=rank, world_size=2)
    others = [mode for mode in MODES if mode not in QUICK]
    found = gradients_of(rank, models, torch.float64, others) | gradients_of(rank, models, torch.float32, MODES[1:])
    torch.save(found, path / f"soak_{rank}.pt")
    dist.destroy_process_group()


def accumulation(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    """Gradients of a batch in eight micro-batches, reduced in each or in the last one, and in one; by dtype of the parameters."""
    batch, found = toy_batch([31, 7, 64, 12, 90, 5, 41, 28, 77, 50, 16, 33, 8, 60, 21, 45]), {}
    for kept in ("float64", "float32", "bfloat16"):
        for name in ("one", *REDUCED):
            changes = {"model_dtype": kept, "use_no_sync_for_gradient_accumulation": name == "last"}
            engine = toy_engine(models["qwen2"], dtype="float64" if kept == "float64" else "float32", **changes)
            shares, plans = cut(batch, 2, max_tokens=2000) if name == "one" else cut(batch, 2, max_rows=1)
            assert len(plans[rank]) == (1 if name == "one" else 8)
            found[f"{kept} {name}"] = gradients(engine, shares[rank], plans[rank], ToyLoss())
    return found


def grouped(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    """Gradients with units of one, two and all five layers."""
    if rank == 0:
        save_tiny_model(path / "deep", num_hidden_layers=5)
    dist.barrier()
    layer = toy_engine(str(path / "deep"), optimizer=None)._model.hf.base_model.layers[0]
    parameters, found = sum(param.numel() for param in layer.parameters()), {}
    shares, plans = cut(toy_batch([31, 7, 64, 12, 90, 5], dtype=torch.float64), 2, max_tokens=100)
    for name, changes in {
        "plain": {},
        "recomputed": {"enable_gradient_checkpointing": True},
        "gathered": {"reshard_after_forward": False},
    }.items():
        for layers in (1, 2, 5):
            with mock.patch.object(units, "UNIT_PARAMETERS", layers * parameters):
                engine = toy_engine(str(path / "deep"), dtype="float64", **changes)
            found[f"{name} {layers}"] = gradients(engine, shares[rank], plans[rank], ToyLoss())
    return found


@mock.patch.object(units, "UNIT_PARAMETERS", 1)
def memory(rank: int, path: Path, models: dict[str, str]) -> dict[str, int]:
    """Bytes of tensors at the fullest moment of a train step of two micro-batches, of a model that is larger than its rows.

    Each layer is a unit of FSDP, as in models of 3B and more.
    """
    if rank == 0:
        save_tiny_model(path / "larger", **LARGER)
    dist.barrier()
    found = {}
    for name in REDUCED:
        changes: dict[str, Any] = {"use_no_sync_for_gradient_accumulation": name == "last", "enable_gradient_checkpointing": True}
        engine = toy_engine(str(path / "larger"), dtype="bfloat16", model_dtype="float32", **changes)
        batch, plan = toy_batch([256, 256]), ((0,), (1,))
        engine.train_step(toy_batch([8, 8]), plan, ToyLoss())  # what is made once is made
        assert engine._optimizer is not None
        kept = [*(local(param) for param in engine._params.values()), *engine._optimizer.moments().values()]
        with Alive(kept) as alive:
            engine.train_step(batch, plan, ToyLoss())
        found[name] = alive.most
    return found


def parity(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    engine = toy_engine(models["qwen2"])
    assert (engine.mesh.dp_rank, engine.mesh.dp_size, engine.live_weights()) == (rank, 2, None)
    metrics = train(engine, range(5))
    engine.export_hf(str(path / "hf"))
    return {"metrics": metrics, "weights": exported(engine)}


def checkpoint(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    engine = toy_engine(models["qwen2"])
    train(engine, range(2))
    engine.save(str(path / "checkpoint"))
    saving = engine.save(str(path / "background"), background=True)
    saved = exported(engine)
    metrics, uninterrupted = train(engine, range(2, 4)), shards(engine)
    weights = exported(engine)
    dist.barrier()
    files = {file.name: file.sha256 for file in saving.result().files}
    resumed = toy_engine(models["qwen2"])
    resumed.load(str(path / "checkpoint"))
    again = train(resumed, range(2, 4))
    engine.load(str(path / "checkpoint"))  # back, over later state
    back = train(engine, range(2, 4))
    return {
        "saved": saved,
        "weights": weights,
        "metrics": [metrics, again, back],
        "files": files,
        "shards": [uninterrupted, shards(resumed), shards(engine)],
    }


def from_one_rank(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    """What was saved by one rank, before these two were started."""
    engine = toy_engine(models["qwen2"])
    engine.load(str(path / "one_rank"))
    before = torch.load(path / "one_rank.pt", weights_only=True)
    return before | {"loaded": exported(engine), "grad_norm": train(engine, range(2, 4))["grad_norm"]}


def value_head(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    """Its weight has one row: the second rank holds none of it."""
    engine = toy_engine(models["qwen2"], "value")
    metrics = train(engine, range(3), ValueLoss())
    engine.save(str(path / "critic"))
    dist.barrier()  # each rank returns when its own file is there
    resumed = toy_engine(models["qwen2"], "value")
    resumed.load(str(path / "critic"))
    weights, resumed_weights = exported(engine), exported(resumed)
    shares, plans = cut(toy_batch([9, 30, 1, 14]), 2, max_rows=1)
    values = resumed.forward(shares[rank], plans[rank], {"values"})
    assert values is not None
    return {
        "metrics": metrics,
        "weights": weights,
        "resumed": resumed_weights,
        "values": values.tokens["values"],
        "last_value": values.rows["last_value"],
    }


def reward_head(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    """Gradients of pairs: {dtype: {cut: gradients}}."""
    if rank == 0:
        save_reward_model(path / "scorer", models["qwen2"])
    dist.barrier()
    found: dict[str, Any] = {}
    for dtype in (torch.float64, torch.float32):
        engine = toy_engine(str(path / "scorer"), "reward", dtype=str(dtype).removeprefix("torch."))
        found[str(dtype)] = {
            name: gradients(engine, shares[rank], plans[rank], reward_loss())
            for name, (shares, plans) in pair_cuts(pair_batch(), 2).items()
        }
        engine = toy_engine(
            str(path / "scorer"), "reward", dtype=str(dtype).removeprefix("torch."), ulysses_sequence_parallel_size=2
        )
        (share,), (plan,) = pair_cuts(pair_batch(), 1)["with empty slots"]
        found[str(dtype)]["ulysses"] = gradients(engine, share, plan, reward_loss())
    return found


def options(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    """Trains with every option that must change nothing: {option: weights}; and with parameters that stay gathered."""
    found: dict[str, Any] = {}
    for name, changes in {
        "plain": {},
        "recomputed": {"enable_gradient_checkpointing": True},
        "gathered": {"reshard_after_forward": False},
        "offloaded": {"optimizer_offload": True},
        "inputs offloaded": {"enable_gradient_checkpointing": True, "enable_activation_offload": True},
        "in pieces": {"enable_gradient_checkpointing": True, "tiled_mlp": TiledMLPConfig(enabled=True, num_shards=4)},
    }.items():
        engine = toy_engine(models["qwen3"], **changes)
        train(engine, range(2))
        found[name] = exported(engine)
        if name == "gathered":
            shares, plans = cut(toy_batch([9, 30, 1, 14]), 2, max_rows=1)
            arguments = shares[rank], plans[rank], {"log_probs"}
            engine.save(str(path / "gathered"))
            before = engine.forward(*arguments)
            train(engine, range(2))
            engine.forward(*arguments)
            engine.load(str(path / "gathered"))
            after = engine.forward(*arguments)
            assert before is not None and after is not None
            found["forward before and after a load"] = [before.tokens["log_probs"], after.tokens["log_probs"]]
    return found


def export(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    """The vocabulary is odd, and a value head has one row: shards of unlike size, and none."""
    found: dict[str, Any] = {}
    for head in ("lm", "value"):
        engine = toy_engine(models["qwen2"], head)
        found[head] = {
            "plain": {name: weight.detach().full_tensor() for name, weight in engine._params.items()},
            "one by one": dict(engine.export_weights()),
            "cast": dict(engine.export_weights(dtype=torch.bfloat16)),
            "not cast": dict(engine.export_weights(dtype=torch.float64)),
        }
    return found


def lora(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    """An adapter that is off at first, trained, saved and loaded again."""
    changes: dict[str, Any] = {"lora_rank": 3, "lora_alpha": 6.0}
    engine = toy_engine(models["qwen3"], **changes)
    shares, plans = cut(toy_batch([9, 30, 1, 14]), 2, max_rows=1)
    engine.forward(shares[rank], plans[rank], {"log_probs"}, adapter=False)
    metrics = train(engine, range(3))
    engine.save(str(path / "lora"))
    dist.barrier()  # each rank returns when its own file is there
    resumed = toy_engine(models["qwen3"], **changes)
    resumed.load(str(path / "lora"))
    cut_tokens = toy_engine(models["qwen3"], ulysses_sequence_parallel_size=2, **changes)
    cut_tokens.load(str(path / "lora"))
    batch = training_batch(5)
    cut_tokens.accumulate(batch, cut(batch, max_tokens=80)[1][0], ToyLoss())
    assert cut_tokens._adapter is not None
    grads = {name: full(weight.grad).clone() for name, weight in cut_tokens._adapter.own.items() if weight.grad is not None}
    return {
        "gradients of cut tokens": grads,
        "grad_norm": metrics["grad_norm"],
        "merged": exported(engine),
        "full": {name: weight.clone() for name, weight in engine.export_weights(kind="full")},
        "adapter": {name: weight.clone() for name, weight in engine.export_weights(kind="adapter")},
        "resumed": {name: weight.clone() for name, weight in resumed.export_weights(kind="adapter")},
    }


def skipping(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    """Of three updates the second is broken on rank 1 alone: a loss that is NaN there, with its gradient or without."""
    found: dict[str, Any] = {}
    for kind in ("gradient", "loss alone"):
        engine = toy_engine(models["qwen2"])
        skipped = []
        for step in range(3):
            shares, plans = cut(training_batch(step), 2, max_tokens=80)
            share, broken_here = shares[rank], rank == 1
            before = exported(engine)
            loss: ToyLoss = ToyLoss()
            if step == 1 and broken_here:
                loss = Shifted(torch.nan)
                if kind == "gradient":
                    loss, share = ToyLoss(), share.with_tokens(advantages=torch.full((share.total_tokens,), torch.nan))
            skipped.append(plain_numbers(engine.train_step(share, plans[rank], loss))["skipped_updates"])
            if step == 1:
                found[kind] = {"before": before, "after the skip": exported(engine), "broken here": broken_here}
        found[kind] |= {"skipped": skipped, "weights": exported(engine)}
    return found


def snapshots(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    # bfloat16 compute, and parameters that stay gathered after the forward pass: a stale copy of them would be noticed.
    engine = toy_engine(models["qwen3"], reshard_after_forward=False)
    return with_snapshots(engine, offload=True)


def experts(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype in (torch.float64, torch.float32):
        engine = toy_engine(models["experts"], dtype=str(dtype).removeprefix("torch."))
        for name, (shares, plans) in all_cuts(invariance_batch("token-mean", dtype), 2).items():
            grads = gradients(engine, shares[rank], plans[rank], ToyLoss())
            found[f"{dtype} {name}"] = grads if rank == 0 else {}
    found["balance"] = plain_numbers(engine.accumulate(shares[rank], plans[rank], ToyLoss()))
    engine.move(grads="cpu")
    cut_in_two = toy_engine(models["experts"], ulysses_sequence_parallel_size=2, router_aux_loss_coef=0.5)
    (share,), (plan,) = cut(training_batch(0), 1, max_tokens=80)
    found["ulysses"] = gradients(cut_in_two, share, plan, ToyLoss())
    found["ulysses metrics"] = plain_numbers(cut_in_two.accumulate(share, plan, ToyLoss()))
    engine = toy_engine(models["experts"])
    train(engine, range(2))
    engine.save(str(path / "experts")).result()
    found["saved"], found["metrics"] = exported(engine), train(engine, range(2, 4))
    return found
