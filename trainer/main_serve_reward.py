"""python -m trainer.main_serve_reward: serve a scorer over HTTP."""

from collections.abc import Collection

from configs.required import unset_keys
from configs.schema.serve_reward import ServeRewardConfig
from configs.validation.programs import check_serve_reward
from trainer.cli.program import Program


def check(config: ServeRewardConfig, typed: Collection[str]) -> list[str]:
    from trainer.rewards.rules.reward_registry import with_own_function

    with_own_function(config.reward)
    return check_serve_reward(config)


def run(config: ServeRewardConfig, notices: list[str]) -> None:
    from trainer.serving.reward_server import run

    run(config)


PROGRAM = Program(
    name="trainer.main_serve_reward",
    about=(
        "Serves a scorer over HTTP, to trainers that name it in reward.remote_urls, or as OpenRLHF's --remote_rm_url:\n"
        "POST /get_reward with JSON, GET /health. It listens on this machine alone, unless server.host says otherwise."
    ),
    root="serve_reward",
    schema=ServeRewardConfig,
    often_used=(
        "reward.scorer",
        "reward.custom_reward_function.path",
        "reward.num_workers",
        "reward.timeout",
        "model.path",
        "judge_engine.enable",
        "judge_engine.model.path",
        "server.host",
        "server.port",
        "server.token_env",
    ),
    examples=(
        "reward.scorer=gsm8k",
        "reward.scorer=my_rewards.py:helpful server.port=0",
        "judge_engine.enable=true judge_engine.model.path=Qwen/Qwen3-4B judge_engine.rollout.name=vllm "
        "judge_engine.rollout.tensor_model_parallel_size=1",
    ),
    check=check,
    run=run,
    inputs=lambda config: unset_keys(config, "serve_reward"),
)

main = PROGRAM.main

if __name__ == "__main__":
    main()
