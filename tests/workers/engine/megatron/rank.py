"""Runs in each of several processes: everything that needs this number of ranks, once. The tests read what is written here."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.trainer.algorithms.parts import in_parts
from tests.trainer.algorithms.plain import defaults
from tests.workers.engine.fsdp.cases import all_cuts, exported, invariance_batch, train, training_batch, with_snapshots
from tests.workers.engine.megatron.cases import answers, gradient, megatron_engine, ranks, trained, trained_critic
from tests.workers.engine.strike import strike
from tests.workers.engine.toy import Shifted, ToyLoss, cut, toy_batch, toy_engine
from trainer.algorithms.losses.actor_loss import ActorLoss, ActorLossConfig
from workers.engine.out_of_memory import RepeatableOutOfMemory
from workers.metric import plain_numbers
from workers.plan import Limits, SharedRows

Changes = dict[str, Any]

SIZES = (1, 2, 4)
TRAINED: dict[int, dict[str, tuple[str, Changes]]] = {
    1: {"one": ("qwen2", {})},
    2: {
        "tp2 sp recomputed": ("qwen2", {"tp": 2, "sequence_parallel": True, "recompute": True}),
        "tp2 qwen3": ("qwen3", {"tp": 2, "sequence_parallel": True}),
        "pp2 tied": ("tied", {"pp": 2}),
        "pp2 vpp2": ("tied", {"pp": 2, "vpp": 2}),
        "pp2 llama": ("llama", {"pp": 2, "recompute": True}),
        "dp2 distributed": ("qwen2", {"use_distributed_optimizer": True}),
        "cp2": ("qwen2", {"cp": 2}),
    },
    4: {
        "tp2 pp2 sp": ("tied", {"tp": 2, "pp": 2, "sequence_parallel": True, "use_distributed_optimizer": True}),
    },
}
SOAK: dict[str, tuple[str, Changes]] = {  # with those above, every pair of ways to cut; four ranks each
    "dp4": ("qwen2", {}),
    "tp2 dp2": ("qwen2", {"tp": 2}),
    "pp2 dp2 untied": ("qwen2", {"pp": 2}),
    "tp2 dp2 sp": ("qwen3", {"tp": 2, "sequence_parallel": True, "use_distributed_optimizer": True}),
    "tp2 cp2 sp": ("qwen2", {"tp": 2, "cp": 2, "sequence_parallel": True, "recompute": True, "use_distributed_optimizer": True}),
    "pp2 dp2": ("tied", {"pp": 2, "recompute": True, "use_distributed_optimizer": True}),
    "pp2 cp2": ("tied", {"pp": 2, "cp": 2}),
    "cp2 dp2": ("llama", {"cp": 2, "use_distributed_optimizer": True}),
    "pp2 vpp2 tp2 sp": ("qwen3", {"pp": 2, "vpp": 2, "tp": 2, "sequence_parallel": True}),
    "pp2 vpp2 dp2": ("tied", {"pp": 2, "vpp": 2, "recompute": True, "use_distributed_optimizer": True}),
    "pp2 vpp2 cp2": ("qwen2", {"pp": 2, "vpp": 2, "cp": 2}),
}
CRITICS: dict[int, dict[str, Changes]] = {
    2: {"tp2 sp": {"tp": 2, "sequence_parallel": True}, "pp2": {"pp": 2}, "cp2": {"cp": 2, "use_distributed_optimizer": True}},
}


# Each layout resumes what the previous one saved.
RESHARDED: tuple[tuple[str, Changes | None], ...] = (
    ("tp2 sp", {"tp": 2, "sequence_parallel": True}),
    ("pp2", {"pp": 2}),
    ("fsdp", None),
    ("dp2 distributed", {"use_distributed_optimizer": True}),
    ("cp2 distributed", {"cp": 2, "use_distributed_optimizer": True}),
)
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
FUSED = {"bias_activation_fusion": True, "bias_dropout_fusion": True, "deallocate_pipeline_outputs": True}
UNEVEN = {"num_layers_in_first_pipeline_stage": 1}
INVARIANT: dict[int, dict[str, Changes]] = {
    1: {
        "one": {},
        "one, some parts recomputed": {"override_transformer_config": SELECTIVE},
        "one, some layers recomputed, fused": {"override_transformer_config": BLOCK | FUSED},
    },
    2: {
        "tp2": {"tp": 2},
        "pp2": {"pp": 2},
        "pp2 uneven, fused": {"pp": 2, "override_transformer_config": UNEVEN | FUSED},
        "pp2 vpp2": {"pp": 2, "vpp": 2},
        "dp2": {},
        "cp2": {"cp": 2},
    },
}


def soak(rank: int, directory: str, models: dict[str, str]) -> None:
    torch.set_num_threads(1)
    path = Path(directory)
    found: dict[str, Any] = {}
    for name, (model, changes) in SOAK.items():
        with ranks(path, f"soak {name}", rank, 4):
            found[name] = trained(models[model], **changes)
    torch.save(found, path / f"soak_{rank}.pt")


def main(rank: int, size: int, directory: str, models: dict[str, str]) -> None:
    torch.set_num_threads(1)
    path = Path(directory)
    found: dict[str, Any] = {}
    for name, (model, changes) in TRAINED.get(size, {}).items():
        with ranks(path, name, rank, size):
            found[name] = trained(models[model], **changes)
    for name, changes in CRITICS.get(size, {}).items():
        with ranks(path, f"critic {name}", rank, size):
            found[f"critic {name}"] = trained_critic(models["qwen2"], **changes)
    for name, changes in INVARIANT.get(size, {}).items():
        with ranks(path, f"invariance {name}", rank, size):
            found[f"invariance {name}"] = invariance(models["qwen2"], changes)
    for check in {1: (out_of_memory, refusals), 2: (resharding, half_precision, skipping, snapshots)}.get(size, ()):
        found[check.__name__] = check(rank, size, path, models)
    torch.save(found, path / f"{size}_{rank}.pt")


def invariance(model: str, changes: Changes) -> dict[str, Any]:
    """{how it is cut into micro-batches: this rank's parts of the gradient}; parts: of trajectories as several rows, GSPO"""
    engine = megatron_engine(model, **changes)
    batch = invariance_batch("token-mean", torch.float32)
    found = {name: gradient(engine, shares, plans) for name, (shares, plans) in all_cuts(batch, engine.mesh.dp_size).items()}
    parts = in_parts(batch, seed=4)
    parts = parts.with_tokens(loss_weight=parts.tokens["loss_weight"] * parts.tokens["response_mask"])
    rows = SharedRows(parts.lengths.tolist(), [()] * len(parts), parts.rows["trajectory"].tolist())
    plan = rows.plan(engine.mesh.dp_size, Limits(max_tokens=max(rows.unit_tokens())))
    return found | {"parts": gradient(engine, plan.split(parts), plan.micro_batches, sequence_loss())}


def sequence_loss() -> ActorLoss:
    """GSPO, whose ratio is over the trained tokens of a trajectory."""
    config = defaults()
    models = config.actor_rollout_ref
    actor = replace(models.actor, policy_loss=replace(models.actor.policy_loss, loss_mode="gspo"))
    config = replace(config, actor_rollout_ref=replace(models, actor=actor))
    return ActorLoss(ActorLossConfig.of(config, old_log_probs_from_update=False))


def resharding(rank: int, size: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    before: str | None = None
    for i, (name, changes) in enumerate(RESHARDED):
        with ranks(path, f"resharding {name}", rank, size):
            engine = toy_engine(models["qwen2"]) if changes is None else megatron_engine(models["qwen2"], **changes)
            if before is not None:
                engine.load(str(path / before))
            loaded = exported(engine)
            train(engine, range(i, i + 1))
            saving = engine.save(str(path / name), background=True)
            saved, uninterrupted = exported(engine), train(engine, range(i + 1, i + 3))
            weights = exported(engine)
            files = {file.name: file.sha256 for file in saving.result().files}
            dist.barrier()
            engine.load(str(path / name))  # back, over later state
            engine.save(str(path / f"{name} again")).result()
            again = {file.name: file.read_bytes() for file in (path / f"{name} again").glob(f"shard-{rank + 1:05d}*.safetensors")}
            assert again == {file.name: file.read_bytes() for file in (path / name).glob(f"shard-{rank + 1:05d}*.safetensors")}
            found[name] = {
                "loaded": loaded,
                "saved": saved,
                "files": files,
                "metrics": [uninterrupted, train(engine, range(i + 1, i + 3))],
                "weights": [weights, exported(engine)],
            }
            dist.barrier()
        before = name
    return found


def half_precision(rank: int, size: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    """In bfloat16 the optimizer's float32 copies are what is loaded and saved."""
    found: dict[str, Any] = {}
    for name, changes in {"tp2": {"tp": 2}, "distributed": {"use_distributed_optimizer": True}}.items():
        with ranks(path, f"half {name}", rank, size):
            engine = megatron_engine(models["three"], dtype="bfloat16", **changes)
            start = answers(engine, training_batch(0), {"log_probs"}, max_tokens=80)
            engine.save(str(path / f"half {name} 0")).result()
            train(engine, range(2))
            engine.save(str(path / f"half {name}")).result()
            saved, metrics, weights = exported(engine), train(engine, range(2, 4)), exported(engine)
            dist.barrier()
            resumed = megatron_engine(models["three"], dtype="bfloat16", **changes)
            resumed.load(str(path / f"half {name}"))
            again = train(resumed, range(2, 4))
            found[name] = {"answers": start, "saved": saved, "metrics": [metrics, again], "weights": [weights, exported(resumed)]}
            dist.barrier()
    return found


def skipping(rank: int, size: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    """Of three updates the second is broken: on one data-parallel rank, or on the last stage alone."""
    found: dict[str, Any] = {}
    for name, changes in {"gradient": {"use_distributed_optimizer": True}, "loss alone": {"pp": 2}}.items():
        with ranks(path, f"skipping {name}", rank, size):
            engine = megatron_engine(models["qwen2"], **changes)
            reported = []
            for step in range(3):
                shares, plans = cut(training_batch(step), engine.mesh.dp_size, max_tokens=80)
                share, before = shares[engine.mesh.dp_rank], exported(engine)
                loss: ToyLoss = ToyLoss()
                if step == 1 and name == "loss alone":
                    loss = Shifted(torch.nan)
                if step == 1 and name == "gradient" and rank == 1:
                    share = share.with_tokens(advantages=torch.full((share.total_tokens,), torch.nan))
                reported.append(plain_numbers(engine.train_step(share, plans[engine.mesh.dp_rank], loss)))
                if step == 1:
                    found[name] = {"before": before, "after": exported(engine)}
            found[name] |= {"step_metrics": reported, "weights": exported(engine)}
    return found


def snapshots(rank: int, size: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, changes in {"distributed": {"use_distributed_optimizer": True}, "pp2 tied": {"pp": 2}}.items():
        with ranks(path, f"snapshots {name}", rank, size):
            found[name] = with_snapshots(megatron_engine(models["tied"], **changes))
    return found


def out_of_memory(rank: int, size: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    """In the second of three micro-batches, in its backward: the same step gives the same gradient afterwards."""
    with ranks(path, "out of memory", rank, size):
        engine = megatron_engine(models["qwen2"])
        batch = toy_batch([9, 30, 1, 14, 22, 7])
        shares, plans = cut(batch, max_tokens=40)
        expected = gradient(engine, shares, plans)
        hook = strike(engine._chunks[0].decoder.layers[0].mlp, 2, "backward")
        try:
            engine.train_step(shares[0], plans[0], ToyLoss())
            message = ""
        except RepeatableOutOfMemory as error:
            message = str(error)
        hook.remove()
        return {"message": message, "gradients": [expected, gradient(engine, shares, plans)], "parts": len(plans[0])}


def refusals(rank: int, size: int, path: Path, models: dict[str, str]) -> dict[str, Any]:
    """{problem: error message}"""

    def complaint(make: Callable[[], object]) -> str:
        try:
            make()
        except (ValueError, FileNotFoundError) as error:
            return str(error)
        return ""

    found = {}
    with ranks(path, "refusals", rank, size):
        engine = megatron_engine(models["qwen2"])
        found["another cut"] = complaint(lambda: megatron_engine(models["qwen2"], pp=2))
        found["weights that it does not know"] = complaint(lambda: megatron_engine(models["strange"]))
        found["a weight that is missing"] = complaint(lambda: megatron_engine(models["incomplete"]))
        found["no checkpoint"] = complaint(lambda: engine.load(str(path)))
        engine.save(str(path / "of qwen2")).result()
        megatron_engine(models["qwen2"], optimizer=None).save(str(path / "of a reference")).result()
        found["no optimizer there"] = complaint(lambda: engine.load(str(path / "of a reference")))
        found["another model's"] = complaint(lambda: megatron_engine(models["qwen3"]).load(str(path / "of qwen2")))
        found["an actor's"] = complaint(lambda: megatron_engine(models["qwen2"], "value").load(str(path / "of qwen2")))
        found["of another size"] = complaint(lambda: megatron_engine(models["wide"]).load(str(path / "of qwen2")))
        found["unknown field"] = complaint(lambda: megatron_engine(models["qwen2"], override_transformer_config={"bias": 1}))
    return found
