"""Complete runs with partial rollouts on the quick start's task; the embedded engine, a tick of four steps."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import trainer.rollout.remote_rollout as remote_rollout
from data_preprocess import tiny_model
from tests.runs import make_task, ppo_arguments, repeatable, run_ppo
from tests.workers.rollout.vllm_workers import CPU_BUILD
from trainer import main_ppo

PARTIAL = (
    "algorithm=grpo", "async_training.mode=partial", "algorithm.rollout_correction.rollout_is=token", "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2", "data.max_response_length=24",
    "trainer.total_training_steps=5", "trainer.save_freq=1", "async_training.max_age=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads of size 32: vLLM has no smaller ones on CPU."""
    folder = make_task(tmp_path_factory.mktemp("sort_digits"), train_size=16, sft_size=8)
    shutil.rmtree(folder / "base")
    tiny_model.main([f"--save_dir={folder / 'base'}", "--num_attention_heads=3", "--num_key_value_heads=1"])
    return folder


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_rollout, "STEPS", 4)


ENGINES = {
    "embedded": (), "two ranks": ("trainer.n_gpus_per_node=2", "trainer.backend=ray"),
    "vllm": ("rollout=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"),
    "sglang": ("rollout=sglang", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"),
}  # fmt: skip


def versions(dump: dict[str, Tensor]) -> list[int]:
    return dump["tokens.weight_version"][dump["tokens.response_mask"].bool()].tolist()


@pytest.mark.parametrize(
    "engine",
    ["embedded", pytest.param("two ranks", marks=pytest.mark.soak), pytest.param("vllm", marks=[CPU_BUILD, pytest.mark.soak])],
)
def test_run_with_responses_in_flight_resumes_bitwise(engine: str, task: Path, tmp_path: Path) -> None:
    def dumps(name: str) -> tuple[str, ...]:
        return (*PARTIAL, *ENGINES[engine], f"trainer.rollout_data_dir={tmp_path / name / 'rollouts'}")

    whole = run_ppo(task, tmp_path / "whole", *dumps("whole"))
    assert any(step["rollout/stale_tokens"] > 0 for step in whole[1:]) and whole[0]["rollout/stale_tokens"] == 0
    assert max(step["rollout/age/max"] for step in whole) >= 1
    assert max(step["training/rollout_log_probs_diff_max"] for step in whole) < 1e-5, "of tokens that older weights sampled"
    recomputed = [step["timing_s/recompute"] for step in whole if step["rollout/recomputed_tokens"] > 0]
    assert recomputed and sum("timing_s/recompute" in step for step in whole) == len(recomputed)
    assert 0 <= max(recomputed) < max(step["timing_s/gen"] for step in whole)
    dump = load_file(tmp_path / "whole" / "rollouts" / "step_3.safetensors")
    of_row = torch.repeat_interleave(torch.arange(len(dump["lengths"])), dump["lengths"])[dump["tokens.response_mask"].bool()]
    sampled_by = {(row, version) for row, version in zip(of_row.tolist(), versions(dump), strict=True)}
    assert len(sampled_by) > len(dump["lengths"]), "a response has tokens of several versions"
    run_ppo(task, tmp_path / "broken", *dumps("broken"), "trainer.total_training_steps=2")
    assert repeatable(run_ppo(task, tmp_path / "broken", *dumps("broken"))) == repeatable(whole)


def test_resume_that_would_lose_responses_is_refused_before_any_record_is_cut(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run was interrupted after a step without a checkpoint, whose metrics a resumed run replaces."""
    run_ppo(task, tmp_path, *PARTIAL, "trainer.total_training_steps=3")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    before = (tmp_path / "metrics.jsonl").read_text()
    capsys.readouterr()
    for words in (("trainer.dry_run=full",), ()):
        arguments = ppo_arguments(task, tmp_path, *PARTIAL, "async_training.mode=null", *words)
        assert main_ppo.PROGRAM(arguments) == 2
        assert "groups of responses in flight, which this run would lose: resume it" in capsys.readouterr().err
        assert (tmp_path / "metrics.jsonl").read_text() == before
    assert main_ppo.PROGRAM(ppo_arguments(task, tmp_path, *PARTIAL, "trainer.total_training_steps=4")) == 0


@pytest.mark.soak
@CPU_BUILD
def test_run_on_sglang_trains_each_group_once_and_in_time(task: Path, tmp_path: Path) -> None:
    """SGLang keeps its own time: which responses are in flight differs from run to run."""
    steps = run_ppo(task, tmp_path / "run", *PARTIAL, *ENGINES["sglang"], f"trainer.rollout_data_dir={tmp_path / 'rollouts'}")
    groups = [
        load_file(tmp_path / "rollouts" / f"step_{step}.safetensors")["rows.group"].unique().tolist() for step in range(1, 6)
    ]
    assert [len(of_step) for of_step in groups] == [4] * 5 and len({group for of_step in groups for group in of_step}) == 20
    assert max(step["rollout/age/max"] for step in steps) in (1, 2) and max(step["rollout/stale_tokens"] for step in steps) > 0
    # Absent if a step has no token of the present weights.
    assert max(step.get("training/rollout_log_probs_diff_max", 0.0) for step in steps) < 1e-5


def test_run_with_dynamic_sampling_and_groups_that_wait_resumes_bitwise(task: Path, tmp_path: Path) -> None:
    """Responses are right or wrong by their length. The run ends where complete and unfinished groups are left."""
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return float(len(solution_str) % 2)\n"
    )
    options = (
        *PARTIAL, "algorithm.filter_groups.enable=true", "async_training.oversubmit=3.0",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
    )  # fmt: skip

    def dumps(name: str) -> tuple[str, ...]:
        return (*options, f"trainer.rollout_data_dir={tmp_path / name / 'rollouts'}")

    whole = run_ppo(task, tmp_path / "whole", *dumps("whole"))
    for step, metrics in enumerate(whole, 1):
        dump = load_file(tmp_path / "whole" / "rollouts" / f"step_{step}.safetensors")
        assert len(dump["rows.group"]) == 8 and len(dump["rows.group"].unique()) == 4 == len(dump["rows.uid"].unique())
        assert sorted(dump["rows.score"].tolist()) == [0.0] * 4 + [1.0] * 4
        dropped = sum(metrics[f"training/filter_groups/dropped_{verdict}"] for verdict in ("low", "high", "failed"))
        assert metrics["training/filter_groups/groups"] - dropped - metrics["training/filter_groups/surplus"] == 4
        assert metrics["rollout/age/max"] <= 2
    for step in (1, 4):
        assert whole[step - 1]["training/filter_groups/surplus"] > 0 < whole[step - 1]["rollout/unfinished_groups"]
        run_ppo(task, tmp_path / "broken", *dumps("broken"), f"trainer.total_training_steps={step}")
    assert max(step["rollout/age/max"] for step in whole) >= 1
    assert repeatable(run_ppo(task, tmp_path / "broken", *dumps("broken"))) == repeatable(whole)
