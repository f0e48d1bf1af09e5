"""python -m trainer.main_dpo: direct preference optimisation, from pairs of responses of which one was preferred."""

from configs.schema.supervised import DPOConfig
from trainer.cli.preflight import check_pairs_config, dpo_inputs
from trainer.cli.program import Program


def run(config: DPOConfig, notices: list[str]) -> None:
    from trainer.supervised.supervised_builder import run

    run(config, notices)


PROGRAM = Program(
    name="trainer.main_dpo",
    about=(
        "Trains a language model on pairs of responses of which one was preferred, without a reward model (direct preference\n"
        "optimisation). The reference is the model that training starts from."
    ),
    root="dpo_trainer",
    schema=DPOConfig,
    often_used=(
        "data.train_files",
        "data.val_files",
        "data.prompt_key",
        "data.chosen_key",
        "data.rejected_key",
        "loss.beta",
        "model.path",
        "optim.lr",
        "trainer.device",
        "trainer.export_dir",
    ),
    examples=(
        "recipe=sort_digits trainer.export_dir=data/sort_digits/preferred",
        "data.train_files=pairs.parquet model.path=Qwen/Qwen3-0.6B optim.lr=1e-6 trainer.n_gpus_per_node=4",
        "data.train_files=pairs.parquet data.val_files=held_out.parquet trainer.test_freq=50 loss.kind=ipo loss.beta=0.1",
    ),
    check=check_pairs_config,
    run=run,
    inputs=dpo_inputs,
)

main = PROGRAM.main

if __name__ == "__main__":
    main()
