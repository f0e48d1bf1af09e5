"""The methods of the experiment scripts, run for one step on the quick start's task with everything else small."""

import math
from pathlib import Path

import pytest

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from tests.experiments import EXPERIMENTS, started_by
from tests.reward_models import make_reward_model
from tests.runs import make_task, metrics_of
from trainer import main_ppo

# The learning of the recipe is in tests/trainer/test_main_ppo_gsm8k.py; one worker has nothing to split.
METHODS = [
    name
    for name in EXPERIMENTS
    if name not in ("run_qwen2.5-0.5b_grpo_vllm.sh", "run_qwen2.5-72b_grpo_megatron_split.sh") and name.startswith("run_")
]
REPEATS = {"run_qwen2-7b_ppo_sglang.sh", "run_qwen2.5-7b_grpo_vllm.sh", "run_qwen2.5-7b_gspo_vllm.sh"}
"""The first on another engine than run_qwen2-7b_ppo_vllm_sleep.sh, which has its method, and offloads; GRPO is the method of most
tests' runs, and GSPO that of one in tests/trainer/ppo/test_loop_algorithms.py."""
BATCH = 16
pytestmark = [  # pytest sets its own filters for each test, without those of workers.engine.megatron
    pytest.mark.filterwarnings(r"ignore:::megatron\."),
    pytest.mark.filterwarnings(r"ignore:`torch\.distributed:FutureWarning"),
]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.mark.parametrize(
    "name", [name if name not in REPEATS else pytest.param(name, marks=pytest.mark.soak) for name in METHODS]
)
def test_method_of_the_script_trains_a_step(name: str, task: Path, tmp_path: Path) -> None:
    _, _, *words = started_by(name)
    config = compose("ppo_trainer", PPOConfig, words)
    updates = config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size
    small = [
        f"data.train_files={task}/train.parquet", f"data.val_files={task}/test.parquet",
        f"actor_rollout_ref.model.path={task}/base", f"critic.model.path={task}/base",
        f"reward.custom_reward_function.path={task}/reward.py", "reward.num_workers=0",
        "data.max_prompt_length=8", "data.max_response_length=8", f"data.train_batch_size={BATCH}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH // updates}", "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0", "rollout=embedded", "trainer.device=cpu", "trainer.backend=local",
        "trainer.n_gpus_per_node=1", "trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.test_freq=-1",
        "trainer.save_freq=-1", "trainer.logger=[]", f"trainer.default_local_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    if config.actor_rollout_ref.actor.strategy == "megatron":
        small.append("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1")
    if config.reward.reward_model.enable:
        model = make_reward_model(tmp_path / "judge", seed=3, own_words=True)
        small += ["placement=colocate_all", f"reward.reward_model.path={model}"]
    if config.algorithm.filter_groups.enable:
        small += [f"data.gen_batch_size={2 * BATCH}", "reward.reward_kwargs.overlong_buffer_cfg.len=2"]
    assert main_ppo.PROGRAM([*words, *small]) == 0
    (step,) = metrics_of(tmp_path / "run")
    assert all(math.isfinite(value) for value in step.values()) and step["actor/grad_norm"] > 0
    assert ("actor/kl_loss" in step) == config.actor_rollout_ref.actor.use_kl_loss
    assert ("actor/reward_kl_penalty" in step) == config.algorithm.use_kl_in_reward
    assert ("critic/vf_loss" in step) == (config.algorithm.adv_estimator == "gae")
    assert ("reward/reward_model/mean" in step) == config.reward.reward_model.enable
    assert ("training/filter_groups/rounds" in step) == config.algorithm.filter_groups.enable
