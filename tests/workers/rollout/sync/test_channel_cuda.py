"""Weights over NCCL, from trainers on some GPUs to engines on others. Left out where there are too few."""

from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import get_context, spawn
from transformers import AutoModelForCausalLM

from configs.schema.common import Dtype
from tests.workers.engine.toy import cut, toy_batch
from tests.workers.rollout.engines import ragged_prompts, request, spec_of
from tests.workers.rollout.vllm_workers import ACTOR_LOSS, LENGTH, actor_spec, greedy_error, make_small, prompts_of
from workers.controller.group import WorkerInfo
from workers.controller.ports import free_port
from workers.metric import plain_numbers
from workers.roles.model_role import ModelRole
from workers.roles.worker import Worker
from workers.rollout.base import Completion, RolloutSpec, Sampling

ROUNDS = 3


def main(gpu: int, trainers: int, engines: int, path: str, dtype: Dtype, ports: list[int], offers: "SimpleQueue[Any]") -> None:
    trains = gpu < trainers
    rank, count = (gpu, trainers) if trains else (gpu - trainers, engines)
    port = ports[0] if trains else ports[1]
    place = WorkerInfo(rank=rank, world_size=count, local_rank=gpu, node_rank=0, master_addr="127.0.0.1", master_port=port)
    worker = Worker(place, "cuda", 120.0)
    torch.backends.cuda.matmul.allow_tf32 = False
    spec = spec_of(
        f"{path}/model", max_model_len=LENGTH, slots=16, verify_weights="full", update_weights_bucket_megabytes=1, dtype=dtype
    )
    spec = replace(spec, device="cuda")
    if trains:
        train(worker, spec, engines, path, offers)
    else:
        worker.build_rollout_apart("rollout", spec, offers.get())
        found: list[Any] = []
        for version in range(ROUNDS):
            metrics = plain_numbers(worker.roles["rollout"].sync_weights(version))
            answers = worker.roles["rollout"].generate(prompts_of(True), Sampling(1.0, -1, 1.0, 24, stop_token_ids=(1,)))
            found.append((metrics["rollout/verified_bytes"], answers.lengths, answers.tokens))
        torch.save(found, f"{path}/{rank}.pt")
    worker.close()


def train(worker: Worker, spec: RolloutSpec, engines: int, path: str, offers: "SimpleQueue[Any]") -> None:
    worker.build_model("actor", replace(actor_spec(spec.model), device="cuda"), ACTOR_LOSS)
    meeting, actor = worker.offer_weights("actor", engines), worker.roles["actor"]
    assert isinstance(actor, ModelRole)
    for _ in range(engines if meeting is not None else 0):
        offers.put(meeting)
    mesh = actor.engine.mesh
    for version in range(ROUNDS):
        if version:
            shares, plans = cut(toy_batch([9, 5, 12, 7], seed=version), mesh.dp_size, max_rows=2)
            actor.train_step(shares[mesh.dp_rank], plans[mesh.dp_rank])
        actor.send_weights()
        actor.export_hf(f"{path}/{version}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("trainers", "engines"), [(1, 1), (2, 2)])
def test_three_rounds(trainers: int, engines: int, dtype: Dtype, tmp_path: Path) -> None:
    """Every weight verified. Greedy answers in float32 are those of the model that the trainer exports."""
    if torch.cuda.device_count() < trainers + engines:
        pytest.skip(f"needs {trainers + engines} GPUs")
    model = make_small(tmp_path / "model")
    offers = get_context("spawn").SimpleQueue()
    spawn(main, args=(trainers, engines, str(tmp_path), dtype, [free_port(), free_port()], offers), nprocs=trainers + engines)
    whole = sum(weight.numel() for weight in model.parameters()) * (4 if dtype == "float32" else 2)
    last = []
    for rank in range(engines):
        for version, (read, lengths, tokens) in enumerate(torch.load(tmp_path / f"{rank}.pt", weights_only=True)):
            assert read == whole
            columns = [tokens[name].split(lengths.tolist()) for name in ("input_ids", "rollout_log_probs")]
            last.append([ids.tolist() for ids in columns[0]])
            exported = AutoModelForCausalLM.from_pretrained(tmp_path / str(version)).eval()
            for i, (prompt, answer, log_probs) in enumerate(zip(ragged_prompts(5, longest=150), *columns, strict=True)):
                completion = Completion(i, tuple(answer.tolist()), tuple(log_probs.tolist()), "stop", (version,) * len(answer))
                if dtype == "float32":
                    assert greedy_error(exported, request(i, prompt, temperature=0.0), completion) < 1e-4
    assert last[0] != last[ROUNDS - 1], "training must have changed an answer"
