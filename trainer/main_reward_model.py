"""python -m trainer.main_reward_model: a model that scores answers, from pairs of which one was preferred."""

from configs.schema.supervised import RewardModelConfig
from trainer.cli.preflight import check_pairs_config, reward_model_inputs
from trainer.cli.program import Program


def run(config: RewardModelConfig, notices: list[str]) -> None:
    from trainer.supervised.supervised_builder import run

    run(config, notices)


PROGRAM = Program(
    name="trainer.main_reward_model",
    about=(
        "Trains a model that scores answers, on pairs of which one was preferred (Bradley-Terry). What it exports is a\n"
        "classifier with one label for transformers, together with the mean and the standard deviation of its scores."
    ),
    root="reward_model_trainer",
    schema=RewardModelConfig,
    often_used=(
        "data.train_files",
        "data.val_files",
        "data.prompt_key",
        "data.chosen_key",
        "data.rejected_key",
        "model.path",
        "optim.lr",
        "trainer.device",
        "trainer.n_gpus_per_node",
        "trainer.export_dir",
    ),
    examples=(
        "recipe=sort_digits trainer.export_dir=data/sort_digits/reward",
        "data.train_files=pairs.parquet model.path=Qwen/Qwen3-0.6B optim.lr=1e-5 trainer.n_gpus_per_node=4",
        "data.train_files=pairs.parquet data.prompt_key=null data.val_files=held_out.parquet trainer.test_freq=50",
    ),
    check=check_pairs_config,
    run=run,
    inputs=reward_model_inputs,
)

main = PROGRAM.main

if __name__ == "__main__":
    main()
