"""python -m trainer.main_ppo: reinforcement learning with PPO, GRPO and their kin."""

from collections.abc import Collection

from configs.schema.ppo import PPOConfig
from configs.validation.programs import check_ppo
from trainer.algorithms.correction_rules import rejection_rules, weight_bounds
from trainer.algorithms.known import check_policy_loss, estimator_needs
from trainer.cli.preflight import ppo_inputs
from trainer.cli.program import Program


def check(config: PPOConfig, typed: Collection[str]) -> list[str]:
    from trainer.rewards.rules.reward_registry import with_own_function

    algorithm = config.algorithm
    check_policy_loss(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    weight_bounds(algorithm.rollout_correction.rollout_is_threshold)
    rejection_rules(algorithm.rollout_correction)
    with_own_function(config.reward)
    return check_ppo(config, typed, needs_values="values" in estimator_needs(algorithm.adv_estimator))


def run(config: PPOConfig, notices: list[str]) -> None:
    if config.trainer.replay.mode is not None:
        from trainer.ppo.replay import replay

        replay(config)
        return
    from trainer.ppo.ppo_builder import run

    run(config, notices)


def plan(config: PPOConfig) -> None:
    from trainer.planner.dry_run import dry_run

    dry_run(config)


PROGRAM = Program(
    name="trainer.main_ppo",
    about=(
        "Trains a language model with reinforcement learning: it answers prompts, the answers are scored, and it learns from\n"
        "the scores. Generation and training share the GPUs, in tandem; with trainer.device=cpu all of it runs on a laptop."
    ),
    root="ppo_trainer",
    schema=PPOConfig,
    often_used=(
        "data.train_files",
        "data.val_files",
        "data.train_batch_size",
        "data.max_response_length",
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.actor.optim.lr",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.rollout.n",
        "trainer.n_gpus_per_node",
        "trainer.total_epochs",
    ),
    examples=(
        "recipe=quickstart trainer.default_local_dir=runs/first",
        "algorithm=grpo actor_rollout_ref.rollout.n=8 actor_rollout_ref.model.path=Qwen/Qwen3-0.6B trainer.n_gpus_per_node=4",
        "--multirun recipe=quickstart actor_rollout_ref.actor.optim.lr=1e-4,3e-4",
    ),
    check=check,
    run=run,
    inputs=ppo_inputs,
    plan=plan,
)

main = PROGRAM.main

if __name__ == "__main__":
    main()
