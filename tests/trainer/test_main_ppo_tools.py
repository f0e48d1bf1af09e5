"""recipe=calculator learns to call its tool: in a short form, and on every rollout engine."""

from pathlib import Path

import pytest

from data_preprocess import calculator, tiny_model
from tests.layout.source import ROOT
from tests.runs import metrics_of
from tests.workers.rollout.vllm_workers import CPU_BUILD
from trainer import main_ppo, main_sft

WORDS = ("calculator", '{"name": "calculator", "arguments": {"expression": "', '"}}')
HEADS = ("--num_attention_heads=3", "--num_key_value_heads=1")  # of 32 numbers: on CPU vLLM has attention for no smaller ones


def warm_start(folder: Path, *overrides: str) -> Path:
    """Data, a tiny model and its fine-tuning as in scripts/calculator.sh."""
    calculator.main([f"--local_save_dir={folder}", "--train_size=480"])
    alphabet = ("--tools", "--alphabet=0123456789+", "--words", *WORDS)
    tiny_model.main([f"--save_dir={folder / 'base'}", "--seed=1", *HEADS, *alphabet])
    words = (
        f"data.train_files={folder}/sft.parquet", f"model.path={folder}/base", f"trainer.export_dir={folder}/warm",
        f"trainer.default_local_dir={folder}/sft", "trainer.backend=local", *overrides,
    )  # fmt: skip
    assert main_sft.PROGRAM(["sft_recipe=calculator", *words]) == 0
    return folder


def accuracies(task: Path, run_dir: Path, steps: int, *overrides: str) -> tuple[float, float]:
    """Held-out accuracy before and after this many steps of the recipe."""
    words = (
        f"data.train_files={task}/train.parquet", f"data.val_files={task}/test.parquet",
        f"actor_rollout_ref.model.path={task}/warm", f"trainer.default_local_dir={run_dir}", "trainer.backend=local",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={ROOT}/trainer/agents/native/calculator.py",
        "trainer.logger=[]", f"trainer.total_training_steps={steps}", f"trainer.test_freq={steps}", "reward.num_workers=0",
    )  # fmt: skip
    assert main_ppo.PROGRAM(["recipe=calculator", *words, *overrides]) == 0
    first, *_, last = metrics_of(run_dir)
    return first["val/accuracy"], last["val/accuracy"]


@pytest.mark.timeout(600)
def test_calls_are_learned_from_a_short_warm_start(tmp_path: Path) -> None:
    task = warm_start(tmp_path, "data.train_batch_size=64", "trainer.total_training_steps=300")
    before, after = accuracies(task, tmp_path / "run", 12)
    print(f"{before:.3f} -> {after:.3f}")
    assert after > before + 0.1


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm_start(tmp_path_factory.mktemp("calculator"))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["embedded", pytest.param("vllm", marks=CPU_BUILD), pytest.param("sglang", marks=CPU_BUILD)])
def test_recipe_reaches_09_on_every_engine(engine: str, warm: Path, tmp_path: Path) -> None:
    options = ("actor_rollout_ref.rollout.tensor_model_parallel_size=1",) if engine != "embedded" else ()
    before, after = accuracies(warm, tmp_path / "run", 30, f"rollout={engine}", *options)
    print(f"{engine}: {before:.3f} -> {after:.3f}")
    assert 0.1 < before < 0.5 and after >= 0.9
