"""Workers with a trained actor and a colocated vLLM engine, as in a run."""

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.schema.common import ModelConfig, Sharding
from tests.tiny import fsdp_config
from tests.workers.engine.toy import ToyLoss
from tests.workers.rollout.engines import (
    load_unspoiled,
    log_prob_error,
    make_model,
    one_off,
    ragged_prompts,
    request,
    spec_of,
    spoil_loading,
)
from workers.batch import Batch
from workers.controller.group import WorkerInfo
from workers.controller.ports import free_port
from workers.engine.base import EngineSpec, LossSpec, OptimizerSpec
from workers.roles.memory_scheduler import MemoryScheduler
from workers.roles.rollout_engines import make_rollout
from workers.roles.rollout_role import RolloutRole
from workers.roles.worker import Worker
from workers.rollout.base import Completion, Request, Rollout
from workers.rollout.sync.weight_sync import WeightSync
from workers.rollout.verification import WeightMismatch
from workers.rollout.vllm.vllm_engine import VLLMRollout

# vLLM's attention on CPU wants heads of 32 at least.
SIZES: dict[str, object] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
                            "intermediate_size": 96}  # fmt: skip
LENGTH = 256
DEVICE: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
CPU_BUILD = pytest.mark.skipif(DEVICE == "cuda", reason="of vLLM's CPU build alone")
VLLM = pytest.mark.skipif(DEVICE == "cuda" and find_spec("vllm") is None, reason="scripts/setup_env.sh installs no vLLM on a GPU")
"""For one module alone: on CUDA a process can have one engine with vLLM's sleep mode, and no other after it."""

FSDP = fsdp_config()
ACTOR_LOSS = LossSpec("tests.workers.rollout.vllm_workers:toy_loss", None)


def toy_loss(config: None) -> ToyLoss:
    return ToyLoss()


def place() -> WorkerInfo:
    return WorkerInfo(rank=0, world_size=1, local_rank=0, node_rank=0, master_addr="127.0.0.1", master_port=free_port())


def make_small(path: Path, architecture: str = "qwen2", **changes: object) -> PreTrainedModel:
    return make_model(path, architecture, **(SIZES | changes))


def actor_spec(model: ModelConfig, sharding: Sharding = FSDP) -> EngineSpec:
    return EngineSpec(
        model=model,
        head="lm",
        sharding=sharding,
        optimizer=OptimizerSpec(
            lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0, schedule="constant", warmup_steps=0, total_steps=10,
            min_lr_ratio=0.0, num_cycles=0.5, clip_grad=1.0,
        ),
        device="cpu",
        seed=0,
    )  # fmt: skip


def prompts_of(greedy: bool) -> Batch:
    """Five, as a role gets them."""
    rows = [torch.tensor(prompt) for prompt in ragged_prompts(5, longest=150)]
    return Batch(
        torch.tensor([len(row) for row in rows]),
        tokens={"input_ids": torch.cat(rows)},
        rows={"seed": torch.arange(len(rows)) + 40, "greedy": torch.full((len(rows),), greedy)},
    )


def greedy_errors(model: PreTrainedModel, engine: Rollout, prompts: Sequence[tuple[int, ...]]) -> list[float]:
    """Greedy answers must be those of transformers' generate, token by token. The largest log-prob difference of each."""
    requests = [request(i, prompt, temperature=0.0) for i, prompt in enumerate(prompts)]
    return [greedy_error(model, *pair) for pair in zip(requests, engine.generate(requests), strict=True)]


def greedy_error(model: PreTrainedModel, asked: Request, completion: Completion) -> float:
    ids = torch.tensor([asked.prompt_ids])
    expected = model.generate(
        ids, do_sample=False, max_new_tokens=asked.sampling.max_tokens, attention_mask=torch.ones_like(ids), eos_token_id=1
    )
    assert list(completion.token_ids) == expected[0, ids.shape[1] :].tolist()
    return log_prob_error(model, asked, completion)


class SpoilingWorker(Worker):
    """A worker whose engine can lose a number on the way, and make room for another."""

    def start_over(self) -> None:
        """As new, with the process group it has."""
        for role in self.roles.values():
            if isinstance(role, RolloutRole):
                role.rollout.close()
        self.roles.clear()
        self.memory_scheduler = MemoryScheduler()
        gc.collect()

    def sync_spoiled(self, name: str, place: int) -> str:
        """One sync in which ``place`` of the tensor ``name`` arrives as another number: what the run would have ended with."""
        role = self.roles["rollout"]
        assert isinstance(role, RolloutRole)
        spoil_loading(role.rollout, one_off(name, place))
        config = replace(role.sync.config, verify_weights="full")
        sync = WeightSync(role.rollout, role.sync.source, config, self.info.rank)
        try:
            RolloutRole(role.rollout, role.source, self.memory_scheduler, sync, role.during).sync_weights(7)
        except WeightMismatch as error:
            return str(error)
        finally:
            load_unspoiled(role.rollout)
        return ""

    def signal_at(self, count: int, number: int) -> None:
        """From now on rank 0's process gets this signal when this number of tensors has passed in a sync."""
        if self.info.rank != 0:
            return

        def watched(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            for i, pair in enumerate(weights):
                if i == count:
                    os.kill(os.getpid(), number)
                yield pair

        for role in self.roles.values():
            if isinstance(role, RolloutRole):
                load = role.rollout.load_weights
                role.rollout.load_weights = lambda weights, version, load=load: load(watched(weights), version)
            else:
                export = role.engine.export_weights
                role.engine.export_weights = lambda export=export, **words: watched(export(**words))


def start(worker: Worker, model: PreTrainedModel, **settings: Any) -> VLLMRollout:
    """An engine without weights. On CUDA without graphs, which take a minute to make, and one step at a time, for steps are
    counted."""
    quick = {"gpu_memory_utilization": 0.05, "enforce_eager": True, "async_scheduling": False} if DEVICE == "cuda" else {}
    spec = spec_of(model.config._name_or_path, name="vllm", **({"max_model_len": LENGTH, "slots": 16} | quick | settings))
    spec = replace(spec, device=DEVICE)
    engine = make_rollout(spec, worker.info)
    assert isinstance(engine, VLLMRollout)
    return engine
