"""python -m trainer.main_parity: compare rollout engines with each other and with the trainer."""

from configs.required import unset_keys
from configs.schema.parity import ParityConfig
from configs.validation.programs import check_parity
from trainer.cli.program import Program


def run(config: ParityConfig, notices: list[str]) -> None:
    from trainer.parity.run_parity import run

    run(config, notices)


PROGRAM = Program(
    name="trainer.main_parity",
    about=(
        "Answers the same prompts with each engine, greedily and sampled, and gives every answer to the trainer: tokens,\n"
        "log-probs, how answers end, lengths, speed, cache hits and memory, in a table, as JSON and as a page with plots.\n"
        "Exit status 3 if one of bounds.* is passed."
    ),
    root="parity",
    schema=ParityConfig,
    often_used=(
        "model",
        "engines",
        "data.files",
        "data.max_samples",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.rollout.temperature",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "bounds.token_agreement",
        "trainer.device",
        "trainer.n_gpus_per_node",
    ),
    examples=(
        "model=Qwen/Qwen3-0.6B engines=[embedded,vllm] data.files=gsm8k/test.parquet",
        "model=checkpoint engines=[vllm] data.files=prompts.jsonl trainer.n_gpus_per_node=2 actor_rollout_ref.rollout.n=4",
    ),
    check=check_parity,
    run=run,
    inputs=lambda config: unset_keys(config, "parity"),
)

main = PROGRAM.main

if __name__ == "__main__":
    main()
