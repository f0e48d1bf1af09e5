"""python -m trainer.main_ppo: reinforcement learning with PPO, GRPO and their kin."""

from configs.schema.ppo import PPOConfig
from trainer.cli.auto_placement import plan_error, planned
from trainer.cli.preflight import check_ppo_config, ppo_inputs
from trainer.cli.program import Program


def run(config: PPOConfig, notices: list[str]) -> None:
    if config.trainer.replay.mode is not None:
        from trainer.ppo.replay import replay

        replay(config)
        return
    from trainer.ppo.ppo_builder import run

    run(config, notices, figures=plan_error(config))


def plan(config: PPOConfig) -> None:
    from trainer.planner.dry_run import dry_run

    dry_run(config)


PROGRAM = Program(
    name="trainer.main_ppo",
    about=(
        "Trains a language model with reinforcement learning. Generation and training share the GPUs; with trainer.device=cpu "
        "all of it runs on a laptop."
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
        "recipe=quickstart trainer.seed=2",
        "algorithm=grpo actor_rollout_ref.rollout.n=8 actor_rollout_ref.model.path=Qwen/Qwen3-0.6B trainer.n_gpus_per_node=4",
        "--multirun recipe=quickstart trainer.seed=1,2,3",
    ),
    check=check_ppo_config,
    run=run,
    inputs=ppo_inputs,
    plan=plan,
    settle=planned,
)

main = PROGRAM.main

if __name__ == "__main__":
    main()
