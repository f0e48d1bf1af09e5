"""A run in the default directory of earlier versions is continued there."""

from pathlib import Path
from typing import Any

import pytest

from configs.compose import compose_with_notes
from configs.schema.generation import GenerationConfig
from configs.schema.ppo import PPOConfig
from configs.schema.supervised import DPOConfig, RewardModelConfig, SFTConfig
from trainer import main_ppo
from trainer.cli.earlier_runs import NAMES, in_earlier_directory
from trainer.run.run_dir import LATEST

SCHEMAS: dict[str, Any] = {
    "ppo_trainer": PPOConfig,
    "sft_trainer": SFTConfig,
    "reward_model_trainer": RewardModelConfig,
    "dpo_trainer": DPOConfig,
}


def directory_of(root: str, *words: str) -> tuple[str, list[str]]:
    config, typed, _ = compose_with_notes(root, SCHEMAS[root], words)
    config, notes = in_earlier_directory(config, root, typed)
    return config.trainer.default_local_dir, notes


def make_run(place: str) -> None:
    Path(place).mkdir(parents=True)
    Path(place, LATEST).write_text("4")


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("root", "words", "before", "now"),
    [
        ("ppo_trainer", [], "checkpoints/verl_examples/gsm8k", "runs/ppo"),
        ("sft_trainer", [], "checkpoints/gsm8k-sft/test", "runs/sft"),
        ("reward_model_trainer", [], "checkpoints/reward-model/test", "runs/reward_model"),
        ("ppo_trainer", ["recipe=gsm8k_0.5b"], "checkpoints/gsm8k/qwen2.5-0.5b", "runs/qwen2.5-0.5b"),
        ("ppo_trainer", ["trainer.experiment_name=a"], "checkpoints/verl_examples/a", "runs/a"),
        ("ppo_trainer", ["trainer.project_name=p", "trainer.experiment_name=a"], "checkpoints/p/a", "runs/a"),
        ("sft_trainer", ["trainer.project_name=p"], "checkpoints/p/test", "runs/sft"),
    ],
)
def test_run_of_an_earlier_version_is_continued_unless_there_is_a_newer_one(
    root: str, words: list[str], before: str, now: str
) -> None:
    assert directory_of(root, *words) == (now, [])
    Path(before).mkdir(parents=True)
    assert directory_of(root, *words) == (now, []), "it has no checkpoint"
    Path(before, LATEST).write_text("4")
    directory, (note,) = directory_of(root, *words)
    assert directory == before
    assert note.startswith(f"trainer.default_local_dir={before}: ") and f"trainer.default_local_dir={now} starts in" in note
    assert directory_of(root, *words, "trainer.resume_mode=disable") == (now, [])
    assert directory_of(root, *words, f"trainer.default_local_dir={now}") == (now, [])
    Path(now).mkdir(parents=True)
    assert directory_of(root, *words) == (now, [])


def test_directory_that_is_no_default_stays() -> None:
    make_run("checkpoints/quickstart/sort_digits")
    assert directory_of("ppo_trainer", "recipe=quickstart") == ("runs/quickstart", [])


def test_trial_of_a_sweep_is_continued_in_its_own_directory() -> None:
    config, typed, _ = compose_with_notes("ppo_trainer", PPOConfig, ["trainer.default_local_dir=runs/ppo/3"])
    make_run("checkpoints/verl_examples/gsm8k/3")
    moved, _ = in_earlier_directory(config, "ppo_trainer", typed - {"trainer.default_local_dir"})
    assert moved.trainer.default_local_dir == "checkpoints/verl_examples/gsm8k/3"


def test_other_programs_have_no_run() -> None:
    config, typed, _ = compose_with_notes("generation", GenerationConfig)
    assert in_earlier_directory(config, "generation", typed) == (config, [])


@pytest.mark.parametrize("root", NAMES)
def test_default_names_are_those_of_the_root_yaml(root: str) -> None:
    config, _, _ = compose_with_notes(root, SCHEMAS[root])
    assert (config.trainer.project_name, config.trainer.experiment_name) == ("tandem", NAMES[root][0])


def test_program_without_an_earlier_version_starts_in_its_directory() -> None:
    make_run("checkpoints/tandem/dpo")
    assert directory_of("dpo_trainer") == ("runs/dpo", [])


def test_program_reports_where_it_continues(capsys: pytest.CaptureFixture[str]) -> None:
    make_run("checkpoints/verl_examples/gsm8k")
    assert main_ppo.PROGRAM(["actor_rollout_ref.model.path=a", "trainer.dry_run=config"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("run directory checkpoints/verl_examples/gsm8k\n")
    assert err.startswith("note: trainer.default_local_dir=checkpoints/verl_examples/gsm8k: a run of an earlier version ")
