"""Composition with Hydra: a normalized command line to composed trees, one per job. No other module runs Hydra."""

import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager, redirect_stdout
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.argv import CommandLine, normalise, shown
from configs.base.keys import ConfigError, did_you_mean
from configs.base.secrets import hidden_lines
from configs.compat.translate import written
from configs.load import load
from configs.sweeps.slurm import slurm_walltime
from configs.sweeps.sweep_points import Point, Result, SweepInUse, SweepStart, Value, read_results, swept

Config = TypeVar("Config")
SHOWING = {"--cfg", "-c", "--info", "-i"}  # flags that print the configuration, and with it any secrets
DRY_RUNS = {"trainer.dry_run=config", "trainer.dry_run=full"}
SLURM = "hydra/launcher=submitit_slurm"
JOB_NUMBER = "${hydra:job.num}"
Tree = DictConfig  # composed but not validated; only configs.load reads it

# trainer.default_local_dir is the run directory, so Hydra must not create one of its own, nor configure logging. These settings
# precede the user's overrides, which therefore take precedence.
SETTINGS = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra.job.name=tandem",
    "hydra.sweep.dir=${trainer.default_local_dir}",
    "hydra.sweep.subdir=.",
    "+hydra.callbacks.sweep_start._target_=configs.sweeps.sweep_points.SweepStart",
)


def compose(root: str, schema: type[Config], overrides: Sequence[str] = ()) -> Config:
    """The configuration of a command line, for example compose("ppo_trainer", PPOConfig, ["recipe=quickstart"]).

    The only flag of Hydra that has an effect is --config-name with the name of a built-in configuration.
    """
    return compose_with_notes(root, schema, overrides)[0]


def compose_with_notes(
    root: str, schema: type[Config], overrides: Sequence[str] = ()
) -> tuple[Config, frozenset[str], list[str]]:
    """The configuration of a command line, the keys on it, and the warnings for the user."""
    command = normalise(overrides, schema, root)
    loaded = load(_tree_of(command, root), schema, command.typed, command.foreign)
    return loaded.config, command.typed, [*command.notes, *loaded.notes]


def _tree_of(command: CommandLine, root: str) -> Tree:
    """The composed tree, without Hydra's job settings; --config-name is the only flag that has an effect."""
    name = dict(pairwise(command.flags)).get("--config-name", root)
    with _one_line_errors(), hydra.initialize_config_module("configs", version_base="1.3"):
        return hydra.compose(name, list(command.overrides))


def run_jobs(command: CommandLine, root: str, job: Callable[[Tree, Point | None], Value]) -> list[Result]:
    """Run the command line with Hydra: the job once, once per trial of a sweep, or print the configuration (--cfg, --info).

    In a sweep every job has its own trainer.default_local_dir, trainer.checkpoint.remote_dir, trainer.export_dir and
    trainer.rollout_data_dir, and its return value goes to the sweeper. ``job`` must not raise an Exception. Returns the results
    of a sweep's jobs, by number. Raises ConfigError.
    """
    # The common case skips hydra.main, which composes the configuration twice.
    if not command.flags and not any("hydra" in text for text in command.overrides):
        job(_tree_of(command, root), None)
        return []

    def task(tree: Tree) -> Value:
        _hide_secrets_in_files()
        if HydraConfig.get().mode != RunMode.MULTIRUN:
            return job(tree, None)
        # Each trial needs its own run directory, unless the user's overrides already make them distinct.
        number, distinct = HydraConfig.get().job.num, _sweeps_over_directories(command)
        unresolved: Any = OmegaConf.to_container(tree.trainer)
        if not distinct:
            tree.trainer.default_local_dir = f"{tree.trainer.default_local_dir}/{number}"
        checkpoint = tree.trainer.get("checkpoint", {})
        remote = checkpoint.get("remote_dir")
        if remote is not None and not (distinct and "${" in unresolved["checkpoint"]["remote_dir"]):
            checkpoint.remote_dir = f"{remote}/{number}"
        for name in ("export_dir", "rollout_data_dir"):
            path = tree.trainer.get(name)
            # Below the job's own directory, or made of its number, it is distinct already.
            own = path is None or "${hydra:job" in unresolved[name] or path.startswith(f"{tree.trainer.default_local_dir}/")
            if not own:
                tree.trainer[name] = f"{path}/{number}"
        launcher = HydraConfig.get().launcher
        # Only Slurm launchers have signal_delay_s: derive the walltime, so that the run saves before Slurm ends the job.
        if "signal_delay_s" in launcher and tree.trainer.get("walltime", "") is None:
            tree.trainer.walltime = slurm_walltime(launcher.timeout_min, launcher.signal_delay_s)
        return job(tree, _point(command))

    if SLURM in command.overrides and shutil.which("srun") is None:
        raise ConfigError(f"{SLURM}: srun is not available on this machine; use a login node, or hydra/launcher=submitit_local")
    SweepStart.directory = None
    with ExitStack() as stack:
        SweepStart.held = stack
        stack.enter_context(_one_line_errors())
        settings, overrides = list(SETTINGS), command.overrides
        # A dry run must not leave files, but a sweep writes multirun.yaml: redirect it to a temporary directory.
        if DRY_RUNS & {*overrides}:
            settings.append(f"hydra.sweep.dir={stack.enter_context(TemporaryDirectory())}")
            overrides = _in_this_process(overrides, root, {*command.flags})
        else:
            settings += _sweep_dir_of_jobs(overrides)
        if SLURM in overrides:
            settings.append("hydra.launcher._target_=hydra_plugins.tandem_launchers.SlurmLauncher")
        if SHOWING & {*command.flags}:
            stack.enter_context(_without_secrets())
        stack.enter_context(_hydra_sees([*command.flags, *settings, *overrides]))
        hydra.main(config_path="pkg://configs", config_name=root, version_base="1.3")(task)()
        return [] if SweepStart.directory is None else read_results(SweepStart.directory)


def _in_this_process(overrides: Sequence[str], root: str, flags: AbstractSet[str]) -> tuple[str, ...]:
    """The overrides with Hydra's own launcher: others would submit jobs. Settings of those are checked. Raises ConfigError."""
    of_launcher = [text for text in overrides if re.match(r"\+*hydra[/.]launcher", text)]
    # Not if the user has launchers or settings of them in YAML files.
    if not flags & {"--config-dir", "--config-path", "--config-name"} and any("hydra/launcher=" in text for text in of_launcher):
        with hydra.initialize_config_module("configs", version_base="1.3"):
            launcher = hydra.compose(root, of_launcher, return_hydra_config=True).hydra.launcher
        if "signal_delay_s" in launcher and not any(text.startswith("trainer.walltime=") for text in overrides):
            slurm_walltime(launcher.timeout_min, launcher.signal_delay_s)
    return *(text for text in overrides if text not in of_launcher), "hydra/launcher=basic"


def _sweep_dir_of_jobs(overrides: Sequence[str]) -> list[str]:
    """Hydra's setting of the sweep's directory where run directories have their job's number, which a sweep has not.

    It is x for x_7, and runs/sweep for runs/7.
    """
    typed = [text.partition("=")[2].strip("'\"") for text in overrides if text.startswith("trainer.default_local_dir=")]
    if not typed or JOB_NUMBER not in typed[0] or any(text.startswith("hydra.sweep.dir=") for text in overrides):
        return []
    folder, slash, name = typed[0].partition(JOB_NUMBER)[0].rpartition("/")
    return [f"hydra.sweep.dir={written(folder + slash + (name.rstrip('_-.') or 'sweep'))}"]


def _point(command: CommandLine) -> Point:
    settings = HydraConfig.get()
    return Point(
        settings.job.num,
        swept(command.overrides, settings.overrides.task),
        Path(settings.sweep.dir),
        alone="signal_delay_s" in settings.launcher,
        requeued=bool(settings.launcher.get("max_num_timeout")),
    )


def _hide_secrets_in_files() -> None:
    """Remove secrets from the files that Hydra writes before a job: multirun.yaml, and .hydra/ if hydra.output_subdir is set."""
    settings = HydraConfig.get()
    files = [Path(settings.sweep.dir, "multirun.yaml")] if settings.mode == RunMode.MULTIRUN else []
    if settings.output_subdir is not None:
        files += Path(settings.runtime.output_dir, settings.output_subdir).glob("*.yaml")
    for file in files:
        file.write_text(hidden_lines(file.read_text()))


def _sweeps_over_directories(command: CommandLine) -> bool:
    typed = [text for text in command.overrides if text.startswith("trainer.default_local_dir=")]
    return any("${hydra:job" in text or OverridesParser.create().parse_override(text).is_sweep_override() for text in typed)


@contextmanager
def _without_secrets() -> Iterator[None]:
    """Buffer the output of the block, and print it afterwards without the secrets of the user's YAML."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        print(hidden_lines(printed.getvalue()), end="")


@contextmanager
def _hydra_sees(argv: Sequence[str]) -> Iterator[None]:
    """Replace sys.argv, which hydra.main reads, and set HYDRA_FULL_ERROR, without which it prints errors and exits itself."""
    argv_before, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = [sys.argv[0], *argv], "1"
    try:
        yield
    finally:
        sys.argv = argv_before
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Convert errors of Hydra, OmegaConf and YAML to a ConfigError with one line."""
    try:
        yield
    except ConfigError:
        raise
    except SweepInUse as error:
        raise ConfigError(str(error)) from error
    except MissingConfigException as error:
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        options = error.options or []
        if group and options:
            raise ConfigError(
                f"{shown(group)}={option}: unknown option; known: {', '.join(options)}{did_you_mean(option, options)}"
            ) from error
        if not group and option:
            raise ConfigError(
                f"--config-name={option}: unknown configuration; set --config-dir=DIR to the directory of your own"
            ) from error
        raise ConfigError(" ".join(str(error).split())) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{' '.join(str(error).split())}: fix the YAML syntax") from error
    except OverrideParseException as error:
        raise ConfigError(f"{error.override}: cannot be parsed; put the value in quotes, key=\"'value'\"") from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        # Hydra wraps OmegaConf's errors and drops the key, which the cause still has.
        cause = error.__cause__
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            raise ConfigError(f"{cause.full_key}: {str(cause).splitlines()[0]}") from error
        raise ConfigError(" ".join(str(error).split())) from error
