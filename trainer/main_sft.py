"""python -m trainer.main_sft: supervised fine-tuning on answers and on conversations."""

from configs.schema.supervised import SFTConfig
from trainer.cli.preflight import check_sft_config, sft_inputs
from trainer.cli.program import Program


def run(config: SFTConfig, notices: list[str]) -> None:
    from trainer.supervised.supervised_builder import run

    run(config, notices)


PROGRAM = Program(
    name="trainer.main_sft",
    about="Trains a language model on answers that are given: the warm start of reinforcement learning.",
    root="sft_trainer",
    schema=SFTConfig,
    often_used=(
        "data.train_files",
        "data.messages_key",
        "data.prompt_key",
        "data.response_key",
        "model.path",
        "optim.lr",
        "trainer.device",
        "trainer.n_gpus_per_node",
        "trainer.total_epochs",
        "trainer.export_dir",
    ),
    examples=(
        "recipe=sort_digits trainer.export_dir=data/sort_digits/warm",
        "data.train_files=chats.parquet data.messages_key=messages model.path=Qwen/Qwen3-0.6B trainer.n_gpus_per_node=4",
    ),
    check=check_sft_config,
    run=run,
    inputs=sft_inputs,
)

main = PROGRAM.main

if __name__ == "__main__":
    main()
