"""python -m trainer.main_export: a checkpoint's model as a Hugging Face directory."""

from collections.abc import Collection

from configs.schema.evaluation import ExportConfig
from trainer.cli.program import Program


def check(config: ExportConfig, typed: Collection[str]) -> list[str]:
    return []


def run(config: ExportConfig, notices: list[str]) -> None:
    from trainer.checkpoint.export import run

    run(config)


PROGRAM = Program(
    name="trainer.main_export",
    about=(
        "Makes a Hugging Face directory (safetensors, configuration, tokenizer) from a checkpoint, whatever number of workers\n"
        "wrote it; of a LoRA adapter a directory of peft's, or with merge=true the whole model. Needs no GPU and the memory of\n"
        "one copy of the weights; what it has made, it loads once with transformers."
    ),
    root="export",
    schema=ExportConfig,
    often_used=("checkpoint", "output", "role", "hub"),
    examples=(
        "checkpoint=runs/first/global_step_100 output=model",
        "checkpoint=runs/first output=model",
        "checkpoint=s3://bucket/runs/first output=critic role=critic",
        "checkpoint=runs/lora output=model merge=true",
        "checkpoint=runs/first output=model hub=OWNER/NAME",
    ),
    check=check,
    run=run,
)

main = PROGRAM.main

if __name__ == "__main__":
    main()
