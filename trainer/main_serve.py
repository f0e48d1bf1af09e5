"""python -m trainer.main_serve: serve a model, checkpoint or adapter over HTTP."""

from collections.abc import Collection

from configs.required import unset_keys
from configs.schema.serve import ServeConfig
from configs.validation.programs import check_serve
from trainer.cli.program import Program


def check(config: ServeConfig, typed: Collection[str]) -> list[str]:
    return check_serve(config, typed)


def run(config: ServeConfig, notices: list[str]) -> None:
    from trainer.serving.model_server import run

    run(config)


PROGRAM = Program(
    name="trainer.main_serve",
    about=(
        "Serves a model to clients of OpenAI and Anthropic, and a page to chat with it. It listens on this machine alone unless\n"
        "server.host says otherwise, and requires a token: that of TANDEM_API_KEY, or one that is made and printed."
    ),
    root="serve",
    schema=ServeConfig,
    often_used=(
        "model",
        "actor_rollout_ref.rollout.name",
        "port",
        "server.host",
        "multi_turn.format",
        "actor_rollout_ref.rollout.max_model_len",
        "trainer.device",
    ),
    examples=(
        "model=runs/first rollout=embedded trainer.device=cpu",
        "model=Qwen/Qwen3-4B rollout=vllm port=8001 server.host=0.0.0.0",
    ),
    check=check,
    run=run,
    inputs=lambda config: unset_keys(config, "serve"),
)

main = PROGRAM.main

if __name__ == "__main__":
    main()
