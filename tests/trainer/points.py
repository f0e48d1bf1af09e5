"""A program for sweeps whose trials cost nothing, and whose loss is the learning rate. Each needs trainer.seed starts:
all but the last end because of the walltime, those of project SIGNALLED because of SIGTERM."""

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

import yaml

from configs.schema.supervised import SFTConfig
from trainer.cli.program import Program
from trainer.run.errors import Stopped
from trainer.run.run_dir import CONFIG, METRICS, json_line, redact, write_atomic
from trainer.run.run_status import write_outcome

STARTS = "starts"
SIGNALLED = "signalled"


def check(config: SFTConfig, typed: Collection[str]) -> list[str]:
    return []


def run(config: SFTConfig, output: list[str]) -> None:
    run_dir = Path(config.trainer.default_local_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_atomic(run_dir / CONFIG, yaml.safe_dump(redact(asdict(config))))
    with (run_dir / STARTS).open("a") as starts:
        print(config.trainer.walltime, file=starts)
    if len((run_dir / STARTS).read_text().splitlines()) < config.trainer.seed:
        write_outcome(run_dir, "interrupted", 1.0)
        code = 143 if config.trainer.project_name == SIGNALLED else 0
        raise Stopped(code, "SIGTERM" if code else "another step does not fit into trainer.walltime")
    (run_dir / METRICS).write_text(json_line({"train/loss": config.optim.lr}))
    write_outcome(run_dir, "finished", 1.0)


PROGRAM = Program(
    name="tests.trainer.points", about="", root="sft_trainer", schema=SFTConfig, often_used=(), examples=(),
    check=check, run=run,
)  # fmt: skip

if __name__ == "__main__":
    PROGRAM.main()
