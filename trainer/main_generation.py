"""python -m trainer.main_generation: answers to a file of prompts, and the best of them."""

from collections.abc import Collection

from configs.schema.generation import GenerationConfig
from configs.validation.programs import check_generation
from trainer.cli.preflight import generation_inputs
from trainer.cli.program import Program


def check(config: GenerationConfig, typed: Collection[str]) -> list[str]:
    from trainer.rewards.rules.reward_registry import with_own_function

    with_own_function(config.reward)
    return check_generation(config, typed)


def run(config: GenerationConfig, notices: list[str]) -> None:
    from trainer.generation.generate import run

    run(config, notices)


PROGRAM = Program(
    name="trainer.main_generation",
    about=(
        "Generates n responses to each prompt, in shards. A run that was killed resumes with the shards that are\n"
        "missing, and ends with the same bytes. Responses can be scored, and the best or the accepted ones written to a file."
    ),
    root="generation",
    schema=GenerationConfig,
    often_used=(
        "data.path",
        "data.output_path",
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.rollout.name",
        "actor_rollout_ref.rollout.n",
        "selection.best_of_n",
        "selection.sft",
        "reward.scorer",
        "trainer.device",
        "trainer.n_gpus_per_node",
    ),
    examples=(
        "data.path=prompts.jsonl actor_rollout_ref.model.path=Qwen/Qwen3-0.6B actor_rollout_ref.rollout.n=4",
        "data.path=gsm8k/train.parquet actor_rollout_ref.rollout.n=8 selection.sft=accepted.parquet selection.max_per_prompt=2",
    ),
    check=check,
    run=run,
    inputs=generation_inputs,
)

main = PROGRAM.main

if __name__ == "__main__":
    main()
