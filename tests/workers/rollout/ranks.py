"""An actor, with FSDP2 shards by default, and a rollout engine, colocated on two ranks or in other processes, on Ray."""

from collections.abc import Collection
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM

from configs.schema.common import Dtype, Sharding
from tests.trainer.watchdogs import watchdog
from tests.workers.engine.toy import toy_batch
from tests.workers.rollout.engines import ragged_prompts, request, spec_of
from tests.workers.rollout.vllm_workers import ACTOR_LOSS, FSDP, LENGTH, SpoilingWorker, actor_spec, greedy_error, make_small
from trainer.cluster.oom_backoff import Budget
from trainer.cluster.remote import RemoteModel
from trainer.rollout.remote_rollout import RemoteRollout
from workers.batch import Batch
from workers.controller.group import WorkerGroup
from workers.controller.ray.ray_backend import RayBackend
from workers.controller.resource_pool import ResourcePool
from workers.controller.rpc import role_call, worker_call
from workers.plan import Limits
from workers.roles.model_role import ModelRole
from workers.rollout.base import Completion, Sampling

TEMPERATURE, GROUP = 0.7, 2


def start_workers(backend: RayBackend, name: str = "workers", count: int = 2, collective: float = 600.0) -> WorkerGroup:
    """For one run after the other."""
    pool = ResourcePool((count,), "cpu", name)
    return backend.start_group(name, pool, "tests.workers.rollout.vllm_workers:SpoilingWorker", "cpu", collective)


class Run:
    def __init__(
        self,
        group: WorkerGroup,
        path: Path,
        engine: Literal["embedded", "vllm", "sglang"],
        tensor_model_parallel_size: int,
        *,
        verify_weights: Literal["sample", "full"],
        dtype: Dtype = "float32",
        sharding: Sharding = FSDP,
        lora: dict[str, object] | None = None,
        lora_sync: Literal["merged", "adapter"] = "adapter",
        bucket: int = 64,
        trainers: WorkerGroup | None = None,
        **changes: object,
    ) -> None:
        """lora: an adapter, synchronised alone by default. bucket: megabytes. trainers: the group that
        has the actor, if the engine is apart from it. changes: of the model's configuration."""
        self.size, self.path = tensor_model_parallel_size, path
        make_small(path, **changes)
        patient = watchdog(path)
        rollout = spec_of(
            str(path), name=engine, max_model_len=LENGTH, slots=16, tensor_model_parallel_size=tensor_model_parallel_size,
            verify_weights=verify_weights, dtype=dtype, lora=lora, lora_sync=lora_sync if lora else "merged",
            update_weights_bucket_megabytes=bucket,
        )  # fmt: skip
        limits = Limits(max_tokens=LENGTH)
        self.actor = RemoteModel(
            trainers or group, "actor", actor_spec(rollout.model, sharding), ACTOR_LOSS, forward_limits=limits,
            train_limits=limits, budget=Budget("actor"), attention_cost=0.0, watchdog=patient,
        )  # fmt: skip
        self.rollout = RemoteRollout(group, rollout, "actor", patient, trainers=trainers)
        self.groups = [group] if trainers is None else [group, trainers]

    def sync_spoiled(self, name: str, place: int) -> list[str]:
        """See SpoilingWorker."""
        spoiled = self.groups[0].call(worker_call(SpoilingWorker.sync_spoiled, name, place))
        for trainers in self.groups[1:]:
            trainers.call(role_call("actor", ModelRole.send_weights)).result()
        return spoiled.result()

    def answers(self, *, greedy: bool) -> tuple[Batch, Batch]:
        """Prompts, each twice in a row, and what came."""
        rows = [torch.tensor(prompt) for prompt in ragged_prompts(5, longest=150) for _ in range(GROUP)]
        prompts = Batch(
            torch.tensor([len(row) for row in rows]),
            tokens={"input_ids": torch.cat(rows)},
            rows={"seed": torch.arange(len(rows)) + 40, "greedy": torch.full((len(rows),), greedy)},
        )
        sampling = Sampling(TEMPERATURE, -1, 1.0, 24, stop_token_ids=(1,))
        return prompts, self.rollout.generate(prompts, sampling, GROUP)

    def trainers_log_probs(self, prompts: Batch, answers: Batch) -> torch.Tensor:
        pairs = list(zip(prompts.split_rows("input_ids"), answers.split_rows("input_ids"), strict=True))
        whole = Batch(
            prompts.lengths + answers.lengths,
            tokens={
                "input_ids": torch.cat([torch.cat(pair) for pair in pairs]),
                "response_mask": torch.cat([torch.cat([torch.zeros_like(p), torch.ones_like(a)]) for p, a in pairs]).bool(),
            },
            meta={"temperature": TEMPERATURE},
        )
        log_probs = self.actor.forward(whole, ["log_probs"]).tokens["log_probs"]
        return log_probs[whole.tokens["response_mask"]]

    def mismatch(self, prompts: Batch, answers: Batch) -> float:
        """The largest difference between the engine's log-probs and the trainer's; NaN if one of them is none."""
        return float((self.trainers_log_probs(prompts, answers) - answers.tokens["rollout_log_probs"]).abs().max())

    def check_rounds(self, exports: Path) -> None:
        """Three rounds of training, sleep and sync. Greedy answers are those of the model that the trainer exports; sampled
        log-probs are the trainer's."""
        for version in range(3):
            if version:
                self.actor.train_step(toy_batch([9, 5, 12, 7], seed=version), ["advantages", "old_log_probs"])
            self.rollout.sync_weights(version)
            prompts, answers = self.answers(greedy=True)
            sampled_prompts, sampled = self.answers(greedy=False)
            assert self.mismatch(sampled_prompts, sampled) < 1e-4
            assert len({tuple(row.tolist()) for row in sampled.split_rows("input_ids")}) > len(sampled) / 2
            assert set(answers.tokens["weight_version"].tolist()) == {version}
            self.actor.export_hf(str(exports / str(version)))
            model = AutoModelForCausalLM.from_pretrained(exports / str(version)).eval()
            columns = [batch.split_rows(name) for batch, name in
                       ((prompts, "input_ids"), (answers, "input_ids"), (answers, "rollout_log_probs"))]  # fmt: skip
            for i, (prompt, answer, log_probs) in enumerate(zip(*columns, strict=True)):
                completion = Completion(i, tuple(answer.tolist()), tuple(log_probs.tolist()), "stop", (version,) * len(answer))
                assert greedy_error(model, request(i, prompt.tolist(), temperature=0.0), completion) < 1e-4

    def check_mesh(self) -> None:
        """The rollout's mesh is its own."""
        wanted = {1: ((0, 1), (0, 1)), 2: ((0, 0), (0,))}[self.size]
        (mesh,) = self.rollout.meshes
        assert (mesh.shard_of_rank, mesh.output_ranks) == wanted
        assert self.actor.mesh.shard_of_rank == (0, 1), "the trainer's is another"


class Groups:
    """Two ranks for engines, and ranks for a trainer apart from them, each for one run after the other."""

    def __init__(self, backend: RayBackend) -> None:
        self.backend = backend
        self._started: dict[str, WorkerGroup] = {}

    @property
    def engines(self) -> WorkerGroup:
        if "engines" not in self._started:
            self._started["engines"] = start_workers(self.backend, "engines")
        return self._started["engines"]

    def trainers(self, count: int, kind: str = "fsdp") -> WorkerGroup:
        """One group at a time in addition to the engines: they take turns on few processors."""
        name = f"{kind}-{count}"
        if name not in self._started:
            self.shutdown(set(self._started) - {"engines"})
            self._started[name] = start_workers(self.backend, name, count)
        return self._started[name]

    def start_over(self) -> None:
        """Close what the previous run has left."""
        for group in self._started.values():
            group.call(worker_call(SpoilingWorker.start_over)).result()
            group._meshes.clear()

    def shutdown(self, names: Collection[str] | None = None) -> None:
        """End all groups, or those with these names; the next use starts them again."""
        for name in list(self._started) if names is None else names:
            self._started.pop(name).shutdown()
