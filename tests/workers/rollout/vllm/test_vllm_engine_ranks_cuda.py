"""vLLM over two GPUs with an actor that is sharded otherwise, as on two CPU ranks. Left out where there are no two GPUs."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import spawn
from transformers import AutoModelForCausalLM

from configs.schema.common import Sharding
from tests.workers.engine.megatron.cases import megatron_config
from tests.workers.engine.toy import cut, toy_batch
from tests.workers.rollout.engines import ragged_prompts, request, spec_of
from tests.workers.rollout.vllm_workers import ACTOR_LOSS, FSDP, LENGTH, actor_spec, greedy_error, make_small, prompts_of
from workers.batch import Batch
from workers.controller.group import WorkerInfo
from workers.controller.ports import free_port
from workers.roles.model_role import ModelRole
from workers.roles.rollout_role import RolloutRole
from workers.roles.worker import Worker
from workers.rollout.base import Completion, Sampling

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2 or find_spec("vllm") is None, reason="needs two GPUs, and vLLM")
SHARDINGS: dict[str, Sharding] = {
    "fsdp": FSDP,
    "megatron tp2": megatron_config(tp=2, sequence_parallel=True, param_offload=True, grad_offload=True, optimizer_offload=True),
    "megatron pp2": megatron_config(pp=2),
}
TEMPERATURE = 0.7


def main(rank: int, path: str, port: int, name: str) -> None:
    place = WorkerInfo(rank=rank, world_size=2, local_rank=rank, node_rank=0, master_addr="127.0.0.1", master_port=port)
    worker = Worker(place, "cuda", 600.0)
    torch.backends.cuda.matmul.allow_tf32 = False
    quick: dict[str, Any] = {"gpu_memory_utilization": 0.05, "enforce_eager": True}  # no graphs, which take a minute to make
    rollout = spec_of(
        f"{path}/model", name="vllm", max_model_len=LENGTH, slots=16, tensor_model_parallel_size=2, verify_weights="full", **quick
    )
    worker.build_model("actor", replace(actor_spec(rollout.model, SHARDINGS[name]), device="cuda"), ACTOR_LOSS)
    worker.build_rollout("rollout", replace(rollout, device="cuda"), "actor")
    actor, engine = worker.roles["actor"], worker.roles["rollout"]
    assert isinstance(actor, ModelRole) and isinstance(engine, RolloutRole)
    mesh = actor.engine.mesh
    found: dict[str, Any] = {"greedy": [], "apart": []}
    for version in range(3):
        if version:
            shares, plans = cut(toy_batch([9, 5, 12, 7], seed=version), mesh.dp_size, max_rows=2)
            worker.roles["actor"].train_step(shares[mesh.dp_rank], plans[mesh.dp_rank])
        worker.roles["rollout"].sync_weights(version)
        for greedy in (True, False):
            prompts = prompts_of(greedy)
            answers = worker.roles["rollout"].generate(prompts, Sampling(TEMPERATURE, -1, 1.0, 24, stop_token_ids=(1,)))
            if greedy:
                found["greedy"].append((answers.lengths, answers.tokens))
            else:
                found["apart"].append(mismatch(actor, prompts, answers))
        worker.memory_scheduler.enter("train", "actor")
        actor.export_hf(f"{path}/{version}")
    torch.save(found, f"{path}/{rank}.pt")
    worker.close()


def mismatch(actor: ModelRole, prompts: Batch, answers: Batch) -> float:
    """Of this rank's share: the largest difference of the engine's log-probs to the trainer's; -1 if another rank answers."""
    columns = [batch.split_rows("input_ids") for batch in (prompts, answers)]
    drawn = answers.split_rows("rollout_log_probs")
    rows = list(zip(*columns, drawn, strict=True))
    whole = Batch(
        prompts.lengths + answers.lengths,
        tokens={
            "input_ids": torch.cat([torch.cat([prompt, answer]) for prompt, answer, _ in rows]),
            "response_mask": torch.cat([torch.cat([torch.zeros_like(p), torch.ones_like(a)]) for p, a, _ in rows]),
            "drawn": torch.cat([torch.cat([torch.zeros(len(prompt)), values]) for prompt, _, values in rows]),
        },
        meta={"temperature": TEMPERATURE},
    )
    mesh = actor.engine.mesh
    shares, plans = cut(whole, mesh.dp_size, max_tokens=LENGTH)
    share = shares[mesh.dp_rank]
    found = actor.forward(share, plans[mesh.dp_rank], ["log_probs"], True)
    return -1.0 if found is None else float((found.tokens["log_probs"] - share.tokens["drawn"]).abs().max())


@pytest.mark.parametrize("name", SHARDINGS)
def test_three_rounds(name: str, tmp_path: Path) -> None:
    """Of training, sleep and sync, every weight verified. Greedy answers are those of the model that the trainer exports."""
    make_small(tmp_path / "model", tie_word_embeddings=name == "megatron pp2")
    spawn(main, args=(str(tmp_path), free_port(), name), nprocs=2)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    apart = [[value for value in rank["apart"] if value >= 0] for rank in found]
    assert sum(map(len, apart)) == (6 if name == "fsdp" else 3) and max(max(values, default=0.0) for values in apart) < 1e-4
    for version, (lengths, tokens) in enumerate(found[0]["greedy"]):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(version)).eval()
        columns = [tokens[name].split(lengths.tolist()) for name in ("input_ids", "rollout_log_probs")]
        for i, (prompt, answer, log_probs) in enumerate(zip(ragged_prompts(5, longest=150), *columns, strict=True)):
            completion = Completion(i, tuple(answer.tolist()), tuple(log_probs.tolist()), "stop", (version,) * len(answer))
            assert greedy_error(model, request(i, prompt, temperature=0.0), completion) < 1e-4
    last = [torch.cat([tokens["input_ids"] for _, tokens in found[0]["greedy"][version : version + 1]]) for version in (0, 2)]
    assert last[0].tolist() != last[1].tolist(), "training must have changed an answer"
