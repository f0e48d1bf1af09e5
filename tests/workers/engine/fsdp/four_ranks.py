"""Runs in four processes, once: resumes what two have saved, and shards tokens and copies. The tests read what is written."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from tests.workers.engine.fsdp.cases import all_cuts, exported, invariance_batch, lopsided, train, training_batch
from tests.workers.engine.toy import Shifted, ToyLoss, ValueLoss, cut, exact_norm, gradients, toy_batch, toy_engine
from tests.workers.forests import forest
from workers.batch import Batch
from workers.engine.fsdp.fsdp_engine import FSDPEngine
from workers.engine.hf.packed_attention import PackedRows, packed_attention
from workers.engine.ulysses import TokenSharding
from workers.metric import plain_numbers
from workers.plan import Limits, SharedRows
from workers.prefixes import PREFIX_ENDS, chains_by_group, prefix_ends

STEPS = range(2, 4)
CUTS: dict[str, dict[str, int]] = {
    "ulysses 2": {"ulysses_sequence_parallel_size": 2},
    "ulysses 4": {"ulysses_sequence_parallel_size": 4},
    "hsdp 2x2": {"fsdp_size": 2},
    "hsdp 2x2 ulysses 2": {"fsdp_size": 2, "ulysses_sequence_parallel_size": 2},
    "hsdp 4x1 ulysses 4": {"fsdp_size": 1, "ulysses_sequence_parallel_size": 4},
}
QUICK = tuple(name for name in CUTS if name != "ulysses 2")
"""Outside soak, in float64: ``parity`` trains in float32, and ``answers`` has two ranks of Ulysses."""
OUTPUTS = {"log_probs", "entropy", "sampled_entropy", "sum_pi_squared", "top_log_probs", "all_log_probs"}
KV_HEADS = (1, 2, 4)


def main(rank: int, directory: str, models: dict[str, str]) -> None:
    path = Path(directory)
    dist.init_process_group("gloo", init_method=f"file://{path / 'rendezvous_of_four'}", rank=rank, world_size=4)
    checks = (from_two_ranks, invariance, sliding_window, parity, answers, critic, skipping, attention, prefixes)
    found: dict[str, Any] = {check.__name__: check(rank, path, models) for check in checks}
    torch.save(found, path / f"four_{rank}.pt")
    dist.destroy_process_group()


def from_two_ranks(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    found = {}
    for name, changes in {"fsdp": {}, "hsdp 2x2 ulysses 2": CUTS["hsdp 2x2 ulysses 2"]}.items():
        engine = toy_engine(models["qwen2"], **changes)
        engine.load(str(path / "checkpoint"))
        loaded, metrics = exported(engine), train(engine, STEPS)
        assert engine._optimizer is not None and engine._optimizer.steps == STEPS.stop
        engine.save(str(path / f"of four, {name}")).result()
        found[name] = {"loaded": loaded, "grad_norm": metrics["grad_norm"], "weights": exported(engine)}
    return found


def invariance(rank: int, path: Path, models: dict[str, str]) -> dict[str, dict[str, Tensor]]:
    return gradients_of(rank, models, torch.float64, QUICK)


def gradients_of(rank: int, models: dict[str, str], dtype: torch.dtype, names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    found = {}
    batch = invariance_batch("token-mean", dtype)
    for name in names:
        engine = toy_engine(models["qwen2"], dtype=str(dtype).removeprefix("torch."), **CUTS[name])
        for by, (shares, plans) in all_cuts(batch, engine.mesh.dp_size).items():
            grads = gradients(engine, shares[engine.mesh.dp_rank], plans[engine.mesh.dp_rank], ToyLoss())
            found[f"{dtype} {name} {by}"] = grads if rank == 0 else {}
    return found


def soak(rank: int, directory: str, models: dict[str, str]) -> None:
    """What ``invariance`` leaves out."""
    torch.set_num_threads(1)
    path = Path(directory)
    dist.init_process_group("gloo", init_method=f"file://{path / 'rendezvous'}", rank=rank, world_size=4)
    found = gradients_of(rank, models, torch.float64, [name for name in CUTS if name not in QUICK])
    found |= gradients_of(rank, models, torch.float32, CUTS)
    torch.save(found, path / f"soak_{rank}.pt")
    dist.destroy_process_group()


def sliding_window(rank: int, path: Path, models: dict[str, str]) -> dict[str, Tensor]:
    """And one head of keys and values over four ranks."""
    engine = toy_engine(models["window"], **CUTS["ulysses 4"])
    (share,), (plan,) = lopsided(invariance_batch("token-mean", torch.float32), 1)
    return gradients(engine, share, plan, ToyLoss())


def parity(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("ulysses 4", "hsdp 2x2 ulysses 2"):
        engine = toy_engine(models["qwen2"], enable_gradient_checkpointing=True, **CUTS[name])
        assert engine.live_weights() is None
        metrics = train(engine, range(5))
        found[name] = {"metrics": metrics, "weights": exported(engine), "is_output_rank": engine.mesh.is_output_rank}
    engine.export_hf(str(path / "hf of four"))
    return found


def answered(engine: FSDPEngine, batch: Batch, outputs: set[str], **limits: int) -> dict[str, Tensor] | None:
    """This rank's rows and its answers."""
    shares, plans = cut(batch, engine.mesh.dp_size, **limits)
    share = shares[engine.mesh.dp_rank]
    answer = engine.forward(share, plans[engine.mesh.dp_rank], outputs)
    return None if answer is None else {**share.tokens, "lengths": share.lengths, **answer.tokens, **answer.rows}


def answers(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    found = {}
    for name in ("ulysses 2", "ulysses 4"):
        engine = toy_engine(models["qwen3"], optimizer=None, **CUTS[name])
        found[name] = answered(engine, training_batch(0), OUTPUTS, max_tokens=80)
        found[f"{name}, one row"] = answered(engine, toy_batch([5]), {"log_probs"}, max_rows=1)
    return found


def critic(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    """Its head has one row, and so three ranks without a part of it."""
    engine = toy_engine(models["qwen2"], "value", **CUTS["ulysses 4"])
    metrics = train(engine, range(3), ValueLoss())
    values = answered(engine, toy_batch([9, 30, 1, 14]), {"values"}, max_rows=2)
    return {"metrics": metrics, "weights": exported(engine), "answers": values}


def skipping(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    """Of two updates the first has a loss that is NaN in the last rank's share alone, with a gradient that is finite."""
    engine, skipped = toy_engine(models["qwen2"], **CUTS["hsdp 2x2"]), []
    for step, loss in enumerate((Shifted(torch.nan) if rank == 3 else ToyLoss(), ToyLoss())):
        shares, plans = cut(training_batch(step), 4, max_tokens=80)
        skipped.append(plain_numbers(engine.train_step(shares[rank], plans[rank], loss))["skipped_updates"])
    return {"skipped": skipped, "weights": exported(engine)}


def attention(rank: int, path: Path, models: dict[str, str]) -> dict[str, float]:
    """The largest difference from all tokens on one rank, of outputs and gradients."""
    token_cut, found = TokenSharding.over(4, "cpu"), {}
    assert token_cut is not None
    lengths, mine = [7, 3, 5, 1], slice(4 * rank, 4 * rank + 4)
    attend = partial(packed_attention, torch.nn.Module(), attention_mask=None, scaling=0.3)
    for kv_heads in KV_HEADS:
        draw = torch.Generator().manual_seed(kv_heads)
        shapes = [(1, heads, 16, 8) for heads in (8, kv_heads, kv_heads, 8)]
        *states, direction = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
        direction = direction.transpose(1, 2)
        for window in (None, 4):
            whole = [state.clone().requires_grad_() for state in states]
            part = [state[:, :, mine].clone().requires_grad_() for state in states]
            expected, _ = attend(*whole, packed_rows=PackedRows.of(lengths, torch.device("cpu")), sliding_window=window)
            rows = PackedRows.of(lengths, torch.device("cpu"), cut=token_cut)
            actual, _ = attend(*part, packed_rows=rows, sliding_window=window)
            expected.backward(direction)
            actual.backward(direction[:, mine])
            pairs = [(actual, expected[:, mine]), *((p.grad, w.grad[:, :, mine]) for p, w in zip(part, whole, strict=True))]
            found[f"{kv_heads} {window}"] = max(float((a - b).abs().max()) for a, b in pairs)
    return found


def prefixes(rank: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    """Gradients and outputs of rows whose common prefixes are computed once, and tokens per rank of all first layers."""
    found: dict[str, Any] = {}
    for dtype in ("float64", "float32"):
        batch = forest(2, n_groups=4, dtype=getattr(torch, dtype))
        chains = chains_by_group(batch)
        batch = Batch(batch.lengths, batch.tokens, {PREFIX_ENDS: prefix_ends(chains)}, meta=batch.meta)
        for name in ("ulysses 2", "ulysses 4"):
            with mock.patch.object(Qwen2RMSNorm, "forward", exact_norm):
                engine, tokens = toy_engine(models["window"], dtype=dtype, model_dtype=dtype, **CUTS[name]), []
                embedding = engine._model.hf.get_input_embeddings()
                embedding.register_forward_hook(lambda module, args, out, tokens=tokens: tokens.append(args[0].numel()))
                plan = SharedRows(batch.lengths.tolist(), chains).plan(engine.mesh.dp_size, Limits(max_tokens=60))
                share, mine = plan.split(batch)[engine.mesh.dp_rank], plan.micro_batches[engine.mesh.dp_rank]
                grads = gradients(engine, share, mine, ToyLoss())
                planned = [
                    SharedRows(batch.lengths.tolist(), chains).computed(part) for part in plan.rows_by_rank()[engine.mesh.dp_rank]
                ]
                outputs = engine.forward(share, mine, {"log_probs", "entropy"})
                critic = toy_engine(models["window"], "value", dtype=dtype, model_dtype=dtype, **CUTS[name])
                torch.nn.init.constant_(critic._model.value_head.weight, 0.1)
                values = critic.forward(share, mine, {"values"})
            found[f"{dtype} {name}"] = {
                "gradients": grads if rank == 0 else {}, "tokens": tokens[: len(planned)], "planned": planned,
                "shares": plan.shards[engine.mesh.dp_rank],
                "outputs": None if outputs is None or values is None else outputs.tokens | values.tokens | values.rows,
            }  # fmt: skip
    return found
