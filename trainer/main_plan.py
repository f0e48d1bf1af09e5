"""python -m trainer.main_plan: memory, time and better settings of a run, before it is started and on GPUs that are not at hand.

    python -m trainer.main_plan OVERRIDES OF main_ppo ... cluster=2x8xH100 [lengths=FILE|MEAN:MAX] [plans=5] [output=DIR]
        [simulate=100] [failure_hours=12 [save_seconds=5] [restart_seconds=180]]

cluster: nodes x GPUs of a node x a file of configs/hardware, or the path of one. lengths: metrics.jsonl of an earlier run, or
mean and maximum of responses; without it all are as long as they may be. simulate: steps with sampled lengths. failure_hours:
hours between failures of any node, for the goodput by checkpoint interval. Writes plan.json and plan.html into output, if given.
"""

import sys
from collections.abc import Sequence

from configs.compose import compose_with_notes
from configs.schema.ppo import PPOConfig
from trainer.cli.preflight import check_ppo_config, ppo_inputs
from trainer.cli.program import complain


def composed(words: Sequence[str]) -> PPOConfig:
    """The configuration of a command line, checked as main_ppo checks it. Raises ConfigError."""
    config, typed, _ = compose_with_notes("ppo_trainer", PPOConfig, words)
    check_ppo_config(config, typed)
    return config


def main(argv: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else list(argv)
    if {"--help", "-h"} & {*words}:
        print(__doc__)
        return
    # Imported late: torch is slow to import.
    from trainer.planner.plan_program import plan

    try:
        plan(words, composed, ppo_inputs)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(complain(*str(error).splitlines()))


if __name__ == "__main__":
    main()
