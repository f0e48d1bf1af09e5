"""Notes about learning rates: what they claim of rounding and of Adam, and where they appear."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.argv import groups_of
from configs.base.keys import CONFIG_DIR
from configs.compose import compose
from configs.schema.ppo import PPOConfig
from configs.schema.supervised import DPOConfig, RewardModelConfig, SFTConfig
from tests.layout.test_experiments import EXPERIMENTS, started_by
from trainer.cli.learning_notes import updates_of_run
from trainer.cli.preflight import check_pairs_config, check_ppo_config, check_sft_config
from workers.engine.base import OptimizerSpec
from workers.engine.fsdp.sharded_adamw import ShardedAdamW

PROGRAMS: dict[str, tuple[Any, Any]] = {
    "ppo_trainer": (PPOConfig, check_ppo_config),
    "sft_trainer": (SFTConfig, check_sft_config),
    "reward_model_trainer": (RewardModelConfig, check_pairs_config),
    "dpo_trainer": (DPOConfig, check_pairs_config),
}
ACTOR = "actor_rollout_ref.actor"
SUPERVISED = ("sft_trainer", "reward_model_trainer", "dpo_trainer")
RATES = {"ppo_trainer": f"{ACTOR}.optim.lr", **dict.fromkeys(SUPERVISED, "optim.lr")}
ROLES = {"ppo_trainer": ACTOR, **dict.fromkeys(SUPERVISED, "engine")}
MODELS = {"ppo_trainer": "actor_rollout_ref.model", **dict.fromkeys(SUPERVISED, "model")}


def notes_of(root: str, words: Sequence[str]) -> list[str]:
    schema, check = PROGRAMS[root]
    notes: list[str] = check(compose(root, schema, words), frozenset())
    return [note for note in notes if "it will learn little" in note or "rounded away" in note]


def tiny(folder: Path, **fields: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 96, "initializer_range": 0.02} | fields))
    return str(folder)


@given(st.floats(1e-8, 1.0), st.floats(0.0, 0.999), st.booleans())
def test_bfloat16_loses_steps_below_a_512th_of_a_weight(size: float, fraction: float, up: bool) -> None:
    weight = torch.tensor(size).bfloat16()
    step = fraction * weight.float() / 2**9 * (1 if up else -1)
    assert (weight.float() + step).bfloat16() == weight


def test_adam_moves_no_weight_further_than_the_note_says() -> None:
    """Constant gradients move weights most; with bfloat16 parameters none beyond 512 lr moves at all."""
    lr, updates = 1e-6, 30
    drawn = 0.02 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        weights = drawn.to(dtype)
        before = weights.clone()
        optimizer = ShardedAdamW(
            {"w": weights}, OptimizerSpec(lr, (0.9, 0.999), 0.0, "constant", 0, updates, 0.0, 0.5, clip_grad=1e9)
        )
        for _ in range(updates):
            optimizer.step({"w": torch.ones_like(weights)}, 1.0)
        moved = (weights - before).abs()
        if dtype is torch.float32:
            assert 0.9 * lr * updates < moved.max() < 1.01 * lr * updates
        else:
            assert not moved[before.abs() > 512 * lr].any() and (before.abs() > 512 * lr).float().mean() > 0.95


@pytest.mark.parametrize("root", PROGRAMS)
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["lr=3e-5", "dtype=bfloat16"], True),
        (["lr=4e-5", "dtype=bfloat16"], False),
        (["lr=0", "dtype=bfloat16"], False),
        (["lr=1e-6", "dtype=float32"], False),
        (["lr=1e-6", "dtype=bfloat16", "lora_rank=4"], False),
        (["lr=1e-6", "dtype=bfloat16", "strategy=megatron"], False),
    ],
)
def test_updates_that_are_rounded_away_are_noted(root: str, changes: list[str], expected: bool) -> None:
    """lr * 512 is compared with 0.02: the bound is 3.9e-5."""
    names = {
        "lr": RATES[root], "dtype": f"{ROLES[root]}.fsdp_config.model_dtype", "lora_rank": f"{MODELS[root]}.lora_rank",
        "strategy": f"{ROLES[root]}.strategy",
    }  # fmt: skip
    words = [f"{names[word.partition('=')[0]]}={word.partition('=')[2]}" for word in changes]
    notes = notes_of(root, words)
    assert len(notes) == expected
    for note in notes:
        assert note.startswith(f"{ROLES[root]}.fsdp_config.model_dtype=bfloat16: ")
        assert note.endswith(f"set {ROLES[root]}.fsdp_config.model_dtype=float32, the default")


def test_critic_has_a_note_of_its_own() -> None:
    words = [f"{ACTOR}.fsdp_config.model_dtype=bfloat16", "critic.fsdp_config.model_dtype=bfloat16"]
    assert [note.partition(":")[0] for note in notes_of("ppo_trainer", [*words, "algorithm=ppo"])] == [
        f"{ACTOR}.fsdp_config.model_dtype=bfloat16", "critic.fsdp_config.model_dtype=bfloat16",
    ]  # fmt: skip
    assert len(notes_of("ppo_trainer", [*words, "algorithm=grpo"])) == 1


@pytest.mark.parametrize("root", PROGRAMS)
@pytest.mark.parametrize(
    ("lr", "steps", "changes", "fields", "expected"),
    [
        (1e-6, 150, [], {}, True),
        (1e-6, 2, [], {}, True),
        (1e-6, 1999, [], {}, True),
        (1e-6, 2001, [], {}, False),
        (1.1e-5, 2, [], {}, False),  # a trial of a few steps
        (3e-4, 2, [], {}, False),
        (0, 150, [], {}, False),
        (1e-6, 150, [], {"hidden_size": 512}, False),
        (1e-6, 150, [], {"initializer_range": 0.001}, False),
        (1e-6, 150, [], {"hidden_size": None}, False),
        (1e-6, 150, ["trainer.device=cuda"], {}, False),
        (1e-6, 150, ["lora_rank=4"], {}, False),
    ],
)
def test_tiny_model_that_hardly_moves_is_noted(
    root: str, lr: float, steps: int, changes: list[str], fields: dict[str, Any], expected: bool, tmp_path: Path
) -> None:
    model = tiny(tmp_path / "model", **fields)
    words = [f"{MODELS[root]}.path={model}", f"{RATES[root]}={lr}", f"trainer.total_training_steps={steps}", "trainer.device=cpu"]
    if root == "ppo_trainer":
        words += ["data.train_batch_size=32", f"{ACTOR}.ppo_mini_batch_size=32"]
    words += [word if "." in word.partition("=")[0] else f"{MODELS[root]}.{word}" for word in changes]
    notes = notes_of(root, words)
    assert len(notes) == expected
    for note in notes:
        assert note.startswith(f"{RATES[root]}={lr:g}: {steps} updates move a weight by {lr * steps:.2g} at most, ")
        _, _, advice = note.rpartition("set for example ")
        assert notes_of(root, [*words, advice]) == []


def test_updates_are_those_of_the_whole_run(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": list(range(70))}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"x": 1}\n')
    file, lines, gone = (str(tmp_path / name) for name in ("a.parquet", "b.jsonl", "gone.parquet"))
    assert updates_of_run([file, file], 32, None, 3, 2) == 4 * 3 * 2
    assert updates_of_run([gone], 32, 5, 3, 2) == 10
    assert updates_of_run([file, lines], 32, None, 3) is None and updates_of_run([gone], 32, None, 3) is None


def test_epochs_and_mini_batches_count(tmp_path: Path) -> None:
    """70 rows are 2 steps of 32; with 4 mini-batches and 2 epochs over each batch these are 16 updates a pass."""
    pq.write_table(pa.table({"prompt": ["a"] * 70}), tmp_path / "a.parquet")
    words = [
        f"actor_rollout_ref.model.path={tiny(tmp_path / 'model')}", "trainer.device=cpu",
        f"data.train_files={tmp_path}/a.parquet", "data.train_batch_size=32", f"{ACTOR}.ppo_mini_batch_size=8",
        f"{ACTOR}.ppo_epochs=2",
    ]  # fmt: skip
    (note,) = notes_of("ppo_trainer", [*words, "trainer.total_epochs=100"])
    assert note.startswith(f"{ACTOR}.optim.lr=1e-06: 1600 updates move a weight by 0.0016 at most, ")
    assert notes_of("ppo_trainer", [*words, "trainer.total_epochs=130"]) == []
    assert notes_of("ppo_trainer", [*words, "data.custom_cls.path=a.py", "data.custom_cls.name=A"]) == [], "rows are unknown"


RECIPES = [
    (root, f"recipe={path.stem}")
    for root in PROGRAMS
    for group in groups_of(root)
    if group.endswith("recipe")
    for path in sorted((CONFIG_DIR / group).glob("*.yaml"))
]


@pytest.mark.parametrize(("root", "recipe"), RECIPES)
def test_no_recipe_is_noted(root: str, recipe: str, tmp_path: Path) -> None:
    """Also as if its model were tiny."""
    assert notes_of(root, [recipe]) == notes_of(root, [recipe, f"{MODELS[root]}.path={tiny(tmp_path / 'model')}"]) == []


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if not name.startswith("sweep_")])
def test_no_experiment_is_noted(name: str) -> None:
    _, _, *words = started_by(name)
    assert notes_of("ppo_trainer", words) == []
