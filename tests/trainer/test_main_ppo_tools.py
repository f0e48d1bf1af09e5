"""recipe=calculator learns to call its tool, on every rollout engine."""

from pathlib import Path

import pytest

from data_preprocess import calculator, tiny_model
from tests.layout.source import ROOT
from tests.runs import metrics_of
from tests.workers.rollout.vllm_workers import CPU_BUILD
from trainer import main_ppo, main_sft

WORDS = ("calculator", '{"name": "calculator", "arguments": {"expression": "', '"}}')
HEADS = ("--num_attention_heads=3", "--num_key_value_heads=1")  # of 32 numbers: on CPU vLLM has attention for no smaller ones


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a tiny model and its fine-tuning as in scripts/calculator.sh."""
    folder = tmp_path_factory.mktemp("calculator")
    calculator.main([f"--local_save_dir={folder}", "--train_size=480"])
    alphabet = ("--tools", "--alphabet=0123456789+", "--words", *WORDS)
    tiny_model.main([f"--save_dir={folder / 'base'}", "--seed=1", *HEADS, *alphabet])
    words = (
        f"data.train_files={folder}/sft.parquet", f"model.path={folder}/base", f"trainer.export_dir={folder}/warm",
        f"trainer.default_local_dir={folder}/sft", "trainer.backend=local",
    )  # fmt: skip
    assert main_sft.PROGRAM(["sft_recipe=calculator", *words]) == 0
    return folder


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["embedded", pytest.param("vllm", marks=CPU_BUILD), pytest.param("sglang", marks=CPU_BUILD)])
def test_recipe_reaches_09_on_every_engine(engine: str, warm: Path, tmp_path: Path) -> None:
    """Held-out accuracy, in half of the recipe's steps."""
    words = [
        f"data.train_files={warm}/train.parquet", f"data.val_files={warm}/test.parquet", f"rollout={engine}",
        f"actor_rollout_ref.model.path={warm}/warm", f"trainer.default_local_dir={tmp_path}", "trainer.backend=local",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={ROOT}/trainer/agents/native/calculator.py",
        "trainer.logger=[]", "trainer.total_training_steps=30", "trainer.test_freq=30", "reward.num_workers=0",
    ]  # fmt: skip
    if engine != "embedded":
        words.append("actor_rollout_ref.rollout.tensor_model_parallel_size=1")
    assert main_ppo.PROGRAM(["recipe=calculator", *words]) == 0
    first, *_, last = metrics_of(tmp_path)
    print(f"{engine}: {first['val/accuracy']:.3f} -> {last['val/accuracy']:.3f}")
    assert 0.1 < first["val/accuracy"] < 0.5 and last["val/accuracy"] >= 0.9
