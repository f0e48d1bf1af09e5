"""recipe=calculator learns to call its tool, on every rollout engine."""

from pathlib import Path
from typing import Any

import pytest

from data_preprocess import calculator, tiny_model
from tests.layout.source import ROOT
from tests.runs import metrics_of
from tests.workers.rollout.vllm_workers import CPU_BUILD
from trainer import main_ppo, main_sft

WORDS = ("calculator", '{"name": "calculator", "arguments": {"expression": "', '"}}')
HEADS = ("--num_attention_heads=3", "--num_key_value_heads=1")  # of 32 numbers: on CPU vLLM has attention for no smaller ones


def base(folder: Path, *heads: str) -> None:
    """Data and a tiny model as in scripts/calculator.sh."""
    calculator.main([f"--local_save_dir={folder}", "--train_size=480"])
    alphabet = ("--tools", "--alphabet=0123456789+", "--words", *WORDS)
    tiny_model.main([f"--save_dir={folder / 'base'}", "--seed=1", *heads, *alphabet])


def fine_tune(folder: Path, rows: Path, model: str, to: str, *words: str) -> None:
    """The recipe's fine-tuning with other settings, of ``model`` in the folder to the model ``to``."""
    own = (
        f"data.train_files={rows}/sft.parquet", f"model.path={folder}/{model}", f"trainer.export_dir={folder}/{to}",
        f"trainer.default_local_dir={folder}/sft_{to}", "trainer.backend=local",
    )  # fmt: skip
    assert main_sft.PROGRAM(["recipe=calculator", *own, *words]) == 0


def train(warm: Path, run: Path, steps: int, *words: str) -> list[dict[str, Any]]:
    """Metrics of the recipe's steps, with validation before and after them."""
    own = (
        f"data.train_files={warm}/train.parquet", f"data.val_files={warm}/test.parquet",
        f"actor_rollout_ref.model.path={warm}/warm", f"trainer.default_local_dir={run}", "trainer.backend=local",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={ROOT}/trainer/agents/native/calculator.py",
        "trainer.logger=[]", f"trainer.total_training_steps={steps}", f"trainer.test_freq={steps}", "reward.num_workers=0",
    )  # fmt: skip
    assert main_ppo.PROGRAM(["recipe=calculator", *own, *words]) == 0
    return metrics_of(run)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calculator")
    base(folder, *HEADS)
    fine_tune(folder, folder, "base", "warm")
    return folder


def test_twelve_steps_after_a_short_warm_start_teach_to_call_the_tool(tmp_path: Path) -> None:
    base(tmp_path)
    # Where all conversations have calls, copying the numbers is learned in a tenth of the recipe's tokens.
    calculator.main([f"--local_save_dir={tmp_path / 'calls'}", "--train_size=480", "--called=1"])
    fine_tune(tmp_path, tmp_path / "calls", "base", "copies", "data.train_batch_size=32", "trainer.total_training_steps=150")
    seldom = ("data.train_batch_size=32", "trainer.total_training_steps=60", "optim.lr=2e-3", "optim.lr_warmup_steps=5")
    fine_tune(tmp_path, tmp_path, "copies", "warm", *seldom)

    before, *steps = train(tmp_path, tmp_path / "run", 12, "data.val_max_samples=128")
    calls = [step["agents/calls/ok"] for step in steps]
    assert calls[0] < 0.5 and calls[-1] > 0.75, calls
    rewards = [step["critic/rewards/mean"] for step in steps]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3, rewards
    assert before["val/accuracy"] < 0.3 and steps[-1]["val/accuracy"] > before["val/accuracy"] + 0.15


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["embedded", pytest.param("vllm", marks=CPU_BUILD), pytest.param("sglang", marks=CPU_BUILD)])
def test_recipe_reaches_09_on_every_engine(engine: str, warm: Path, tmp_path: Path) -> None:
    """Held-out accuracy, in half of the recipe's steps."""
    parallel = () if engine == "embedded" else ("actor_rollout_ref.rollout.tensor_model_parallel_size=1",)
    first, *_, last = train(warm, tmp_path, 30, f"rollout={engine}", *parallel)
    print(f"{engine}: {first['val/accuracy']:.3f} -> {last['val/accuracy']:.3f}")
    assert 0.1 < first["val/accuracy"] < 0.5 and last["val/accuracy"] >= 0.9
