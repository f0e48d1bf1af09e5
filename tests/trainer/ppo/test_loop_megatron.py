"""The complete loop on Megatron: other layouts and engines resume from its checkpoints; its rollout engine has its weights."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.runs import make_task, repeatable, run_ppo
from trainer import main_export
from trainer.run.run_dir import SAMPLES

pytestmark = [  # pytest sets its own filters for each test, without those of workers.engine.megatron
    pytest.mark.filterwarnings(r"ignore:::megatron\."),
    pytest.mark.filterwarnings(r"ignore:`torch\.distributed:FutureWarning"),
]
PPO = (
    "algorithm=ppo", "algorithm.use_kl_in_reward=true", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
    "trainer.total_training_steps=3", "trainer.save_freq=1",
)  # fmt: skip
MEGATRON = "actor_rollout_ref.actor.strategy=megatron"
ON_TWO = ("trainer.backend=ray", "trainer.n_gpus_per_node=2", MEGATRON)
TP2 = (*ON_TWO, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2")
PP2 = (*ON_TWO, "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2")
Steps = Sequence[dict[str, float]]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model whose distribution over tokens is not flat: greedy responses differ, and change as it learns."""
    folder = make_task(tmp_path_factory.mktemp("sort_digits"))
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(folder / "base")
    return folder


def assert_alike(steps: Steps, others: Steps) -> None:
    """Within 1e-4 of each other; or 1e-6 where a metric is a difference of equal numbers.

    Trainer and engine differ by rounding alone, by several units of it at most: less than 1e-5 in each. The verified bytes of a
    sync depend on what is gathered for it.
    """
    assert len(steps) == len(others)
    for mine, expected in zip(repeatable(list(steps)), repeatable(list(others)), strict=True):
        rounding = {name for name in expected if name.startswith("training/rollout_") and "_diff_" in name}
        assert rounding and all(max(mine[name], expected[name]) < 1e-5 for name in rounding)
        mine, expected = (
            {name: step[name] for name in step if name != "rollout/verified_bytes" and name not in rounding}
            for step in (mine, expected)
        )
        assert mine == pytest.approx(expected, rel=1e-4, abs=1e-6)


def resumed(task: Path, run_dir: Path, source: Path, *overrides: str) -> list[dict[str, float]]:
    """The steps of a run that resumes from the first step of ``source``."""
    first = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={source}/global_step_1")
    return run_ppo(task, run_dir, *PPO, *first, *overrides)


@pytest.fixture(scope="module")
def one_worker(task: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Steps]:
    """Three steps of FSDP."""
    run_dir = tmp_path_factory.mktemp("run") / "fsdp"
    return run_dir, run_ppo(task, run_dir, *PPO)


@pytest.mark.parametrize(
    "roles",
    [
        pytest.param((MEGATRON, "critic.strategy=fsdp"), id="actor"),
        pytest.param(("critic.strategy=megatron",), id="critic", marks=pytest.mark.soak),
    ],
)
def test_each_role_may_have_its_own_engine(
    roles: Sequence[str], task: Path, one_worker: tuple[Path, Steps], tmp_path: Path
) -> None:
    assert_alike(run_ppo(task, tmp_path / "run", *PPO, *roles), one_worker[1])


def test_engines_resume_from_checkpoints_of_each_other(task: Path, one_worker: tuple[Path, Steps], tmp_path: Path) -> None:
    """With one worker each: actor, critic, optimizer moments, schedule."""
    fsdp = one_worker[1]
    assert fsdp[1]["actor/grad_norm"] > 0 and fsdp[1]["critic/grad_norm"] > 0
    megatron = resumed(task, tmp_path / "megatron", one_worker[0], MEGATRON)
    assert_alike(megatron, fsdp[1:])
    on = (*PPO, "trainer.total_training_steps=4", "trainer.resume_mode=resume_path")
    back = run_ppo(task, tmp_path / "back", *on, f"trainer.resume_from_path={tmp_path}/megatron/global_step_3")
    assert_alike(back, run_ppo(task, tmp_path / "on", *on, f"trainer.resume_from_path={one_worker[0]}/global_step_3"))


@pytest.fixture(scope="module")
def two_ranks(task: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Steps]:
    """Three steps of TP2 with a reference and a critic, validated and saved after each."""
    run_dir = tmp_path_factory.mktemp("run") / "tp2"
    return run_dir, run_ppo(task, run_dir, *PPO, *TP2, "trainer.test_freq=1", "trainer.val_before_train=true")


@pytest.mark.soak
@pytest.mark.parametrize("cut", [PP2, (), (MEGATRON,)], ids=["pp2", "fsdp", "one worker"])
def test_run_resumes_with_another_parallel_layout(
    cut: Sequence[str], task: Path, two_ranks: tuple[Path, Steps], tmp_path: Path
) -> None:
    run_dir, steps = two_ranks
    tested = ("trainer.test_freq=1", "trainer.val_before_train=true")
    assert_alike(resumed(task, tmp_path / "resumed", run_dir, *tested, *cut), steps[2:])


@pytest.mark.soak
def test_greedy_responses_after_each_sync_equal_transformers(task: Path, two_ranks: tuple[Path, Steps], tmp_path: Path) -> None:
    """Responses of validation, of the start model and of the models exported from the checkpoints."""
    run_dir, _ = two_ranks
    samples = [json.loads(line) for line in (run_dir / SAMPLES).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(task / "base")
    given = []
    for step in range(4):
        if step:
            checkpoint = f"checkpoint={run_dir}/global_step_{step}"
            assert main_export.PROGRAM([checkpoint, "role=actor", f"output={tmp_path}/{step}"]) == 0
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(step) if step else task / "base")
        here = [sample for sample in samples if sample["training/global_step"] == step]
        for sample in here:
            ids = torch.tensor([tokenizer(sample["prompt"])["input_ids"]])
            expected = model.generate(ids, do_sample=False, max_new_tokens=8, attention_mask=torch.ones_like(ids))
            assert sample["response"] == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
        given.append([sample["response"] for sample in here])
    assert [len(answers) for answers in given] == [32] * 4
    assert all(before != after for before, after in pairwise(given)), "two steps have equal responses"
