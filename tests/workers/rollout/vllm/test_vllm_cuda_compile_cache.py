"""Engines that compile, one process after the other, each on another GPU, with one compile cache. Left out without two GPUs."""

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import spawn
from transformers import AutoModelForCausalLM

from tests.workers.rollout.engines import ragged_prompts, request, spec_of
from tests.workers.rollout.vllm_workers import LENGTH, make_small
from workers.controller.group import WorkerInfo
from workers.controller.ports import free_port
from workers.roles.rollout_engines import make_rollout
from workers.roles.worker import Worker

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2 or find_spec("vllm") is None, reason="needs two GPUs, and vLLM")


def main(rank: int, folder: str, gpu: int) -> None:
    os.environ["VLLM_CACHE_ROOT"] = f"{folder}/cache"
    place = WorkerInfo(rank=0, world_size=1, local_rank=gpu, node_rank=0, master_addr="127.0.0.1", master_port=free_port())
    worker = Worker(place, "cuda", 600.0)
    spec = spec_of(
        f"{folder}/model", name="vllm", max_model_len=LENGTH, slots=16, dtype="bfloat16",
        gpu_memory_utilization=0.05,
    )  # fmt: skip
    rollout = make_rollout(replace(spec, device="cuda"), worker.info)
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.bfloat16).to(gpu)
    rollout.load_weights(iter(rollout.to_engine_names(model.named_parameters())), version=1)
    answers = rollout.generate([request(i, ids, temperature=0.0) for i, ids in enumerate(ragged_prompts(5, longest=150))])
    torch.save([answer.token_ids for answer in answers], f"{folder}/{gpu}.pt")
    rollout.close()
    worker.close()


def test_engines_on_several_gpus_have_one_compile_cache(tmp_path: Path) -> None:
    make_small(tmp_path / "model")
    for gpu in (1, 0, 1):  # compiles, must compile too, loads what the first compiled
        spawn(main, args=(str(tmp_path), gpu), nprocs=1)
    answers = [torch.load(tmp_path / f"{gpu}.pt") for gpu in (0, 1)]
    assert answers[0] == answers[1] and all(answers[0])
