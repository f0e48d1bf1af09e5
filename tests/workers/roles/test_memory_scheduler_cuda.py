"""An engine wakes after an update that left nearly all of the GPU in torch's cache. Needs a GPU and the engine."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.multiprocessing import spawn

from tests.tiny import fsdp_config
from tests.workers.rollout.engines import request, spec_of
from tests.workers.rollout.vllm_workers import ACTOR_LOSS, actor_spec, make_small, place
from workers.batch import Batch
from workers.roles.model_role import ModelRole
from workers.roles.rollout_role import RolloutRole
from workers.roles.worker import Worker

SHARE = 0.9
"""Of the GPU, the engine's."""
LENGTH = 4096
WIDE: dict[str, object] = {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2 * LENGTH,
}
PROMPT = (5, 6, 7)
QUICK: dict[str, dict[str, Any]] = {
    "vllm": {"gpu_memory_utilization": SHARE, "enforce_eager": True},
    "sglang": {"attention_backend": "triton", "sampling_backend": "pytorch", "cuda_graph_backend_prefill": "disabled"},
}
"""Of the engine's own arguments: it starts sooner, and needs none of the packages that it can do without."""


def main(rank: int, path: str, name: Literal["vllm", "sglang"]) -> None:
    worker = Worker(place(), "cuda", 60.0)
    sharding = fsdp_config("bfloat16", model_dtype="float32", param_offload=True, optimizer_offload=True)
    rollout = spec_of(f"{path}/model", name=name, max_model_len=1024, slots=16, dtype="bfloat16", **QUICK[name])
    rollout = replace(rollout, device="cuda", rollout=replace(rollout.rollout, gpu_memory_utilization=SHARE))
    worker.build_model("actor", replace(actor_spec(rollout.model, sharding), device="cuda"), ACTOR_LOSS)
    worker.build_rollout("rollout", rollout, "actor")
    actor, engine = worker.roles["actor"], worker.roles["rollout"]
    assert isinstance(actor, ModelRole) and isinstance(engine, RolloutRole)
    engine.sync_weights(0)
    worker.memory_scheduler.enter("generate")
    engine.rollout.submit([request(i, PROMPT, max_tokens=900, ignore_eos=True, seed=i) for i in range(8)])
    if name == "vllm":  # SGLang's step waits until a response has ended
        for _ in range(10):
            engine.rollout.step()
    found: dict[str, Any] = {"unfinished": engine.rollout.unfinished, "total": torch.cuda.get_device_properties(0).total_memory}
    rows = 8
    actor.train_step(batch(rows), (tuple(range(rows)),))
    while torch.cuda.mem_get_info()[0] > 0.7 * found["total"]:
        rows *= 2
        actor.train_step(batch(rows), (tuple(range(rows)),))
    found["free"] = torch.cuda.mem_get_info()[0]
    found["metrics"] = sorted(engine.sync_weights(1))
    worker.memory_scheduler.enter("generate")
    found["free in generation"] = torch.cuda.mem_get_info()[0]
    (last,) = [c for c in engine.rollout.generate([request(9, PROMPT, max_tokens=8, ignore_eos=True, seed=9)]) if c.id == 9]
    found["tokens"], found["version"] = len(last.token_ids), last.versions[-1]
    found["resumed"] = [len(completion.token_ids) for completion in engine.rollout.abort()]
    torch.save(found, f"{path}/found.pt")
    worker.close()


def batch(rows: int) -> Batch:
    total = rows * LENGTH
    mask = torch.ones(total, dtype=torch.int64)
    columns = {
        "input_ids": torch.arange(total) % 61,
        "response_mask": mask,
        "loss_weight": mask / total,
        "advantages": torch.ones(total),
        "old_log_probs": torch.full((total,), -4.0),
    }
    return Batch(lengths=torch.full((rows,), LENGTH), meta={"temperature": 1.0}).with_tokens(**columns)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory of a GPU")
@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_an_engine_wakes_after_an_update_that_reserves_more_than_it_leaves(tmp_path: Path, name: str) -> None:
    """Requests that are unfinished when the engine falls asleep continue after it has woken."""
    if find_spec(name) is None:
        pytest.skip(f"no {name} here")
    make_small(tmp_path / "model", **WIDE)
    spawn(main, args=(str(tmp_path), name), nprocs=1)
    found = torch.load(tmp_path / "found.pt")
    assert found["unfinished"] == 8
    assert found["free"] < SHARE * found["total"], "without a release the engine would have room"
    assert found["free in generation"] < (1 - SHARE) * found["total"] + 2e9, "the engine has all that is its own"
    assert (found["tokens"], found["version"]) == (8, 1)
    assert all(length > 8 for length in found["resumed"]), found["resumed"]
    assert {"timing_s/engine_sleep", "timing_s/engine_wake", "timing_s/release_memory", "timing_s/gc"} <= set(found["metrics"])
