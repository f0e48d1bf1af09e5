"""python -m trainer.main_eval: evaluate the responses in a file."""

from collections.abc import Collection

from configs.schema.evaluation import EvaluationConfig
from configs.validation.programs import check_evaluation
from trainer.cli.program import Program


def check(config: EvaluationConfig, typed: Collection[str]) -> list[str]:
    from trainer.evaluation.votes import vote_function
    from trainer.rewards.rules.reward_registry import with_own_function

    vote_function(config.metrics.vote)
    with_own_function(config.reward)
    return check_evaluation(config, typed)


def run(config: EvaluationConfig, notices: list[str]) -> None:
    from trainer.evaluation.evaluate import run

    run(config, notices)


PROGRAM = Program(
    name="trainer.main_eval",
    about=(
        "Scores responses, n for each prompt, written by trainer.main_generation or another program, and reports\n"
        "mean@k, pass@k and maj@k with 95 % intervals, for each data source: a table on the console, and JSON."
    ),
    root="evaluation",
    schema=EvaluationConfig,
    often_used=(
        "data.path",
        "data.response_key",
        "data.score_key",
        "data.output_path",
        "metrics.k",
        "metrics.pass_score",
        "metrics.vote",
        "reward.scorer",
        "reward.custom_reward_function.path",
    ),
    examples=(
        "data.path=generated/answers data.score_key=scores metrics.k=[1,8]",
        "data.path=answers.parquet reward.scorer=math metrics.vote=boxed",
    ),
    check=check,
    run=run,
)

main = PROGRAM.main

if __name__ == "__main__":
    main()
