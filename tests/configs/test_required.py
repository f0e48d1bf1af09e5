"""Required keys have no default, and the keys that refer to them follow."""

from pathlib import Path
from typing import Any

import pytest

from configs.argv import normalise
from configs.base.keys import CONFIG_DIR, described
from configs.compose import compose, run_jobs
from configs.required import REQUIRED, UNSET, unset_keys, without_marks
from configs.schema.generation import GenerationConfig
from configs.schema.parity import ParityConfig
from configs.schema.ppo import PPOConfig
from configs.schema.serve import ServeConfig
from configs.schema.serve_reward import ServeRewardConfig
from configs.schema.supervised import DPOConfig, RewardModelConfig, SFTConfig

ROOTS: dict[str, tuple[Any, str]] = {
    "ppo_trainer": (PPOConfig, "actor_rollout_ref.model.path"),
    "sft_trainer": (SFTConfig, "model.path"),
    "reward_model_trainer": (RewardModelConfig, "model.path"),
    "dpo_trainer": (DPOConfig, "model.path"),
    "generation": (GenerationConfig, "actor_rollout_ref.model.path"),
    "parity": (ParityConfig, "model"),
    "serve": (ServeConfig, "model"),
    "serve_reward": (ServeRewardConfig, "judge_engine.model.path"),
}


@pytest.mark.parametrize("root", ROOTS)
def test_required_key_is_reported_until_it_is_set(root: str) -> None:
    schema, key = ROOTS[root]
    words = ["judge_engine.enable=true"] if root == "serve_reward" else []
    (line,) = unset_keys(compose(root, schema, words), root)
    assert line.startswith(f"{key}: must be set, for example {key}=Qwen/Qwen3-0.6B (")
    assert list(unset_keys(compose(root, schema, [*words, f"{key}=a"]), root)) == []


def test_every_program_with_a_required_key_is_in_this_table() -> None:
    marked = {path.stem for path in CONFIG_DIR.glob("*.yaml") if any(leaf.value == REQUIRED for leaf in described(path).values())}
    assert marked == ROOTS.keys()


def test_key_of_a_disabled_block_is_not_required() -> None:
    assert list(unset_keys(compose("serve_reward", ServeRewardConfig), "serve_reward")) == []


def test_longer_name_of_a_key_is_enough() -> None:
    assert list(unset_keys(compose("parity", ParityConfig, ["actor_rollout_ref.model.path=a"]), "parity")) == []


def test_critic_starts_from_the_policys_model() -> None:
    unset, followed, own = (
        compose("ppo_trainer", PPOConfig, words)
        for words in ([], ["actor_rollout_ref.model.path=a"], ["actor_rollout_ref.model.path=a", "critic.model.path=b"])
    )
    assert unset.actor_rollout_ref.model.path == unset.critic.model.path == UNSET
    assert followed.critic.model.path == "a" and own.critic.model.path == "b"


def test_critic_without_a_model_of_its_own_undoes_that_of_a_yaml(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ncritic: {model: {path: b}}\n")
    words = [f"--config-dir={tmp_path}", "--config-name=mine", "actor_rollout_ref.model.path=a"]
    found: list[str] = []

    def job(tree: Any, point: Any) -> float:
        found.append(tree.critic.model.path)
        return 0.0

    for more in ([], ["critic.model.path=null"]):
        run_jobs(normalise([*words, *more], PPOConfig, "ppo_trainer"), "ppo_trainer", job)
    assert found == ["b", "a"]


def test_marks_outside_of_text_keys_remain() -> None:
    tree = {"trainer": {"seed": REQUIRED, "project_name": REQUIRED}, "other": REQUIRED}
    assert without_marks(tree, PPOConfig) == {"trainer": {"seed": REQUIRED, "project_name": UNSET}, "other": REQUIRED}
