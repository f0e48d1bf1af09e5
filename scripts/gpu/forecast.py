"""GPU memory that trainer.main_ppo would use with these arguments, by the planner's model, as JSON in $GPU_ROW_FORECAST.

With $GPU_ROW_HARDWARE, a file of configs/hardware, also the seconds of each phase; responses are as long as they may be.
The configuration is checked as the program checks it; a problem is a line on stderr, and the exit code is 2. Nothing is started.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from configs.base.keys import ConfigError
from configs.compose import compose_with_notes
from configs.schema.ppo import PPOConfig
from configs.validation.placement import placement_of
from trainer.cli.preflight import check_ppo_config, ppo_inputs
from trainer.planner.dry_run import doubts, measured, uses_of
from trainer.planner.hardware import load_hardware
from trainer.planner.step_time import phase_times, schedule, step_seconds
from trainer.planner.time_model import ResponseLengths
from trainer.ppo.ppo_builder import wants_critic
from workers.rollout.base import Sampling

PROMPT = 306  # mean tokens of make.py's prompts


def main() -> None:
    try:
        config, typed, _ = compose_with_notes("ppo_trainer", PPOConfig, sys.argv[1:])
        check_ppo_config(config, typed)
        if problems := [*ppo_inputs(config)]:
            raise ConfigError("\n".join(problems))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    place, models = placement_of(config, has_critic=wants_critic(config)), measured(config)
    asked = Sampling(1.0, -1, 1.0, config.data.max_response_length, stop_token_ids=(1,), ignore_eos=True)
    found = {
        "uses": [asdict(use) for use in uses_of(config, place, models)],
        "doubts": [*doubts(config, place, models, asked)],
        "parameters": {key: model.parameters for key, model in models.items()},
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    shapes = {key: model.shape for key, model in models.items() if model.shape is not None}
    if (name := os.environ.get("GPU_ROW_HARDWARE")) and shapes.keys() == models.keys():
        lengths = ResponseLengths(min(PROMPT, config.data.max_prompt_length), *2 * [config.data.max_response_length])
        phases = phase_times(config, place, shapes, load_hardware(name), lengths)
        found["times"] = {phase.phase: phase.parts for phase in phases}
        found["step"] = step_seconds(schedule(config, place, phases))
    Path(os.environ["GPU_ROW_FORECAST"]).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
