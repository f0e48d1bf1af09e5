"""From a command line to a checked configuration and a run: what every main_*.py shares.

Exit codes: 0; 2 for what the user can mend, with one line a problem; 1 for anything else, with the traceback; 130 for Ctrl-C.
"""

import re
import sys
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from configs.argv import normalise
from configs.compose import Tree, run_jobs
from configs.keys import CONFIG_DIR, ConfigError, described
from configs.load import load
from configs.schema.ppo import PPOConfig
from configs.schema.sft import SFTConfig

Config = TypeVar("Config", PPOConfig, SFTConfig)
FLAGS = """\
Flags
  --cfg job              print the composed configuration
  --info                 where it comes from
  --config-dir DIR       more options for groups and recipes, and with --config-name NAME a configuration of your own
  -m, --multirun         a job for each of several values, key=1,2, each with its own run directory
  trainer.dry_run=config check the configuration, and start nothing"""


@dataclass(frozen=True, slots=True)
class Program(Generic[Config]):
    """A main_*.py.

    name: the module. about: what it does. root: the YAML in configs/. often_used: keys for --help. examples: what follows the
    name on command lines. check: config and typed keys to lines for the user; raises ValueError. run: the work; loaded late.
    """

    name: str
    about: str
    root: str
    schema: type[Config]
    often_used: tuple[str, ...]
    examples: tuple[str, ...]
    check: Callable[[Config, Collection[str]], list[str]]
    run: Callable[[Config, list[str]], None]

    def main(self) -> None:
        sys.exit(self(sys.argv[1:]))

    def __call__(self, argv: list[str]) -> int:
        """The exit code. ``argv`` is without the program's name."""
        if {"--help", "-h"} & set(argv):
            print(self.help())
            return 0
        codes: list[int] = []
        try:
            command = normalise(argv, self.schema, self.root)
            run_jobs(command, self.root, lambda tree: codes.append(self.job(tree, command.typed, command.notes)))
        except ValueError as error:  # of the command line; a job's own are a job's exit code
            complain(error)
            return 2
        except KeyboardInterrupt:
            complain("interrupted")
            return 130
        return max(codes, default=0)

    def job(self, tree: Tree, typed: Collection[str], notes: Collection[str]) -> int:
        """One run, and its exit code."""
        wants_traceback = tree.get("trainer", {}).get("full_traceback") is True
        try:
            loaded = load(tree, self.schema, typed)
            config = loaded.config
            told = [*notes, *loaded.notes, *self.check(config, typed)]
            for note in told:
                print(f"note: {note}", file=sys.stderr)
            if config.trainer.dry_run == "config":
                print(f"configuration is fine: {config.trainer.nnodes * config.trainer.n_gpus_per_node} ...")
                return 0
            self.run(config, told)
        except (ValueError, FileNotFoundError) as error:
            if wants_traceback:
                traceback.print_exc()
            complain(error)
            return 2
        except Exception:
            traceback.print_exc()
            return 1
        return 0
