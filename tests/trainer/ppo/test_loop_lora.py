"""A policy with a LoRA adapter: complete runs on one worker."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from configs.validation.batches import roles_of
from tests.runs import make_task, metrics_of, ppo_arguments, repeatable, run_ppo
from trainer import main_ppo
from trainer.cluster.remote import RemoteModel
from trainer.tracking.token_dump import ResponseLog
from workers.batch import Batch
from workers.plan import Limits
from workers.roles.memory_scheduler import MemoryScheduler, ResidentModel
from workers.roles.worker import Worker

LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=1e-2")
KL = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=k3")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"))


class Seen:
    """Records the calls of a run and their results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.roles: list[str] = []
        self.residents: list[str] = []
        self.references: list[tuple[Batch, Batch]] = []
        build, add, forward = Worker.build_model, MemoryScheduler.add_model, RemoteModel.forward

        def build_model(worker: Worker, role: str, *words: Any) -> Any:
            self.roles.append(role)
            return build(worker, role, *words)

        def add_model(memory_scheduler: MemoryScheduler, role: str, resident: ResidentModel) -> None:
            self.residents.append(role)
            add(memory_scheduler, role, resident)

        def recorded(model: RemoteModel, batch: Batch, outputs: Sequence[str], **how: Any) -> Batch:
            found = forward(model, batch, outputs, **how)
            if how.get("adapter") is False:
                self.references.append((batch, found))
            return found

        monkeypatch.setattr(Worker, "build_model", build_model)
        monkeypatch.setattr(MemoryScheduler, "add_model", add_model)
        monkeypatch.setattr(RemoteModel, "forward", recorded)


def test_reference_is_the_base_without_a_second_copy(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    steps = run_ppo(task, tmp_path, *LORA, *KL, "trainer.total_training_steps=3")
    assert seen.roles == seen.residents == ["actor"]
    assert steps[0]["actor/kl_loss"] == 0.0 < steps[1]["actor/kl_loss"] < steps[2]["actor/kl_loss"]
    base = AutoModelForCausalLM.from_pretrained(task / "base").eval()
    assert len(seen.references) == 3
    for batch, found in seen.references:
        columns = [batch.split_rows(name) for name in ("input_ids", "response_mask")]
        for ids, mask, actual in zip(*columns, found.split_rows("log_probs"), strict=True):
            with torch.no_grad():
                logits = base(input_ids=ids[None]).logits[0, :-1]
            log_p = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            assert ((log_p - actual[1:]) * mask[1:]).abs().max() < 1e-5


def test_reference_uses_its_own_micro_batch_keys(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Limits] = []
    plan = RemoteModel._plan
    monkeypatch.setattr(RemoteModel, "_plan", lambda self, batch, limits: asked.append(limits) or plan(self, batch, limits))
    monkeypatch.setattr(ResponseLog, "record", lambda *_: None)  # it plans micro-batches too
    rows = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=3"
    run_ppo(task, tmp_path, *LORA, *KL, rows, "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=false")
    assert [limits.max_rows for limits in asked] == [3, None] * 2, "the reference, and an update, of each step"


def test_adapter_run_has_no_reference_role() -> None:
    """A reference on Megatron that is never built takes no GPUs."""
    odd = ("actor_rollout_ref.ref.strategy=megatron", *KL)
    with_adapter, without = (compose("ppo_trainer", PPOConfig, [*odd, *lora]) for lora in (LORA, ()))
    assert "actor_rollout_ref.ref" not in roles_of(with_adapter, has_critic=False)
    assert "actor_rollout_ref.ref" in roles_of(without, has_critic=False)


def test_run_resumes_from_an_adapter_checkpoint(task: Path, tmp_path: Path) -> None:
    overrides = (*LORA, *KL, "algorithm=ppo", "critic.model.lora_rank=2", "trainer.save_freq=2")
    whole = run_ppo(task, tmp_path / "whole", *overrides, "trainer.total_training_steps=4")
    run_ppo(task, tmp_path / "broken", *overrides, "trainer.total_training_steps=2")
    resumed = run_ppo(task, tmp_path / "broken", *overrides, "trainer.total_training_steps=4")
    assert repeatable(resumed) == repeatable(whole)
    plain = run_ppo(task, tmp_path / "plain", "algorithm=ppo", "trainer.save_freq=2")
    assert len(plain) == 2
    for role in ("actor", "critic"):
        sizes = [
            sum(file.stat().st_size for file in (tmp_path / run / "global_step_2" / role).glob("*.safetensors"))
            for run in ("whole", "plain")
        ]
        assert sizes[0] < sizes[1] / 10, role


def test_bfloat16_base_is_trained_with_a_float32_adapter(task: Path, tmp_path: Path) -> None:
    """FSDP gathers frozen and trained parameters separately."""
    bfloat16 = [f"actor_rollout_ref.actor.fsdp_config.{name}=bfloat16" for name in ("model_dtype", "dtype")]
    steps = run_ppo(task, tmp_path, *LORA, *KL, *bfloat16)
    assert [step["actor/skipped_updates"] for step in steps] == [0.0, 0.0]
    assert steps[1]["actor/kl_loss"] > 0


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["actor_rollout_ref.model.target_modules=[qproj]"], "actor_rollout_ref.actor: model.target_modules: qproj is no layer"),
        (
            ["actor_rollout_ref.model.lora_adapter_path=/nowhere"],
            "model.lora_adapter_path /nowhere: no adapter_config.json there",
        ),
    ],
)
def test_invalid_adapter_keys_are_reported_before_a_worker_starts(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: list[str], output: str
) -> None:
    monkeypatch.setattr(Worker, "__init__", lambda *words, **more: pytest.fail("a worker started"))
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path / "run", *LORA, *words)) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("note")]
    assert output in line
    assert not (tmp_path / "run/metrics.jsonl").exists() or not metrics_of(tmp_path / "run")
