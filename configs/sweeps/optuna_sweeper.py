"""Optuna sweeper (hydra/sweeper=optuna): each job of the sweep is a trial of a study stored in the sweep's directory."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep, Sweep
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from configs.base.keys import ConfigError
from configs.base.locks import locked
from configs.sweeps.sweep_points import INTERRUPTED

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial

JOURNAL = "optuna.journal"
SEARCHED = "searched"
"""User attribute of the study: its search space and fixed settings."""


SEEDS = 2**31  # the number of trials is added to the seed, and NumPy takes 32 bits
MAX_FAILED_LAUNCHES = 3
"""Launches without any complete trial that end a search: the command is wrong, and not the trials."""


class OptunaSweeper(Sweeper):
    """Hydra sweeper that runs the trials of an Optuna study. A trial's number is its job's number and names its run directory.

    When a sweep is restarted, interrupted trials are resumed first; then new trials run until ``n_trials`` are complete. Failed
    trials do not count: a start begins 2 * n_trials at most, and ends early if the first launches have no result.
    """

    def __init__(self, n_trials: int, n_jobs: int, sampler: str, seed: int | None) -> None:
        self.n_trials = n_trials
        self.n_jobs = n_jobs
        self.sampler = sampler
        self.seed = seed

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.settings = config
        self.parser = OverridesParser.create(config_loader=hydra_context.config_loader)
        self.jobs = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the sweep. Raises ConfigError for errors that the user can fix."""
        self.check()
        overrides = self.parser.parse_overrides(arguments)
        space = {override.get_key_element(): distribution(override) for override in overrides if override.is_sweep_override()}
        if not space:
            raise ConfigError("hydra/sweeper=optuna: no key has a range, such as 'key=interval(0.1,0.9)' or key=choice(1,2)")
        fixed = [
            f"{override.get_key_element()}={override.get_value_element_as_str()}"
            for override in overrides
            if not override.is_sweep_override()
        ]
        sweep_dir = Path(self.settings.hydra.sweep.dir)
        sweep_dir.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.settings, sweep_dir / "multirun.yaml")
        study = self.study(sweep_dir, space, fixed)

        # Imported here: optuna is an optional dependency, and self.study reports clearly if it is missing.
        from optuna.trial import TrialState

        if OmegaConf.select(self.settings, "trainer.dry_run") is not None:
            trial = study.ask(fixed_distributions=space)
            self.jobs.launch([(*fixed, *words(trial))], initial_job_idx=0)
            study.tell(trial.number, state=TrialState.FAIL)  # the directory is the search's own if a YAML asked for this
            return

        for trial in study.get_trials(states=(TrialState.RUNNING,)):
            if trial.params.keys() != space.keys():  # the process was killed while the trial was created
                study.tell(trial.number, state=TrialState.FAIL)
            # One at a time: a launch numbers its jobs consecutively, and interrupted trials may have gaps between them.
            else:
                self.check_idle(sweep_dir / str(trial.number))
                if not self.run(study, [trial], fixed):
                    return

        def n_complete() -> int:
            return len(study.get_trials(states=(TrialState.COMPLETE,)))

        before, begun, launches = n_complete(), 0, 0
        # Trials may diverge; a command of which none succeeds is wrong.
        while (done := n_complete()) < self.n_trials and begun < 2 * self.n_trials and (done or launches < MAX_FAILED_LAUNCHES):
            trials = [study.ask(fixed_distributions=space) for _ in range(min(self.n_trials - done, self.n_jobs))]
            if not self.run(study, trials, fixed):
                return
            begun, launches = begun + len(trials), launches + 1
        if done < self.n_trials:
            print(
                f"the search ends with {done} of {self.n_trials} results: {begun - (done - before)} trials failed",
                file=sys.stderr,
            )
        if study.get_trials(states=(TrialState.COMPLETE,)):
            best = study.best_trial
            objective = f"{self.settings.trainer.objective}={best.value:.6g}"
            print(f"best: trial {best.number}, {objective} with {', '.join(words(best))}")

    def check_idle(self, run_dir: Path) -> None:
        """Raises ConfigError if a process runs in the directory: a trial that has outlived the search that started it."""
        if not run_dir.is_dir():
            return
        try:
            with locked(run_dir, "trainer.default_local_dir"):
                pass
        except ValueError as error:
            raise ConfigError(f"{error}; the same command continues the search when that trial has ended") from error

    def check(self) -> None:
        """Raises ConfigError for invalid settings of the sweeper."""
        problems = [
            f"hydra.sweeper.{name}={value}: must be 1 or more"
            for name, value in (("n_trials", self.n_trials), ("n_jobs", self.n_jobs))
            if not isinstance(value, int) or value < 1
        ]
        if self.seed is not None and not (isinstance(self.seed, int) and 0 <= self.seed < SEEDS):
            problems.append(f"hydra.sweeper.seed={self.seed}: must be a number from 0 to {SEEDS - 1}, or null")
        if self.sampler not in ("tpe", "random"):
            problems.append(f"hydra.sweeper.sampler={self.sampler}: must be one of tpe, random")
        if OmegaConf.select(self.settings, "trainer.objective") is None:
            problems.append("hydra/sweeper=optuna: an objective is required; set for example trainer.objective=val/accuracy")
        if problems:
            raise ConfigError("\n".join(problems))

    def study(self, sweep_dir: Path, space: Mapping[str, "BaseDistribution"], fixed: Sequence[str]) -> Any:
        """The study of the sweep's directory, new or existing. Raises ConfigError if it has another search space."""
        try:
            import optuna
            from optuna.distributions import distribution_to_json
            from optuna.storages import JournalStorage
            from optuna.storages.journal import JournalFileBackend
        except ImportError as error:
            raise ConfigError("hydra/sweeper=optuna: package optuna is not installed; pip install optuna") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = sweep_dir / JOURNAL
        # SweepStart excludes other searches: a lock is that of a killed one, for which Optuna would wait.
        journal.with_name(f"{JOURNAL}.lock").unlink(missing_ok=True)
        cut_torn_line(journal)
        storage = JournalStorage(JournalFileBackend(str(journal)))
        study = optuna.create_study(study_name=JOURNAL, storage=storage, direction="maximize", load_if_exists=True)
        seed = self.settings.trainer.seed if self.seed is None else self.seed
        kinds = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
        # The offset keeps a restarted sweep from sampling the parameters of its first trials again.
        study.sampler = kinds[self.sampler](seed=seed + len(study.trials))
        searched = {key: json.loads(distribution_to_json(value)) for key, value in space.items()} | {"": sorted(fixed)}
        before = study.user_attrs.get(SEARCHED)
        if before is None:
            study.set_user_attr(SEARCHED, searched)
        elif before != searched:
            differ = [key or "settings" for key in {**before, **searched} if before.get(key) != searched.get(key)]
            raise ConfigError(
                f"{sweep_dir / JOURNAL}: contains trials of a search with different {', '.join(differ)}; use the same command to "
                "continue it, or another trainer.default_local_dir for a new search"
            )
        return study

    def run(self, study: Any, trials: "Sequence[Trial | FrozenTrial]", fixed: Sequence[str]) -> bool:
        """Run the jobs of the trials and report their values to the study. Returns False if the sweep must end.

        Interrupted trials keep the state RUNNING, so that a restart of the sweep resumes them.
        """
        from optuna.trial import TrialState

        jobs = [(*fixed, *words(trial)) for trial in trials]
        values = [done.return_value for done in self.jobs.launch(jobs, initial_job_idx=trials[0].number)]
        for trial, value in zip(trials, values, strict=True):
            if value is None or (isinstance(value, float) and not math.isfinite(value)):
                study.tell(trial.number, state=TrialState.FAIL)
            elif value != INTERRUPTED:
                study.tell(trial.number, value)
        return INTERRUPTED not in values


def cut_torn_line(journal: Path) -> None:
    """Remove a last line without its end, which a full disk or a killed process leaves: Optuna would add to it."""
    if journal.exists() and (content := journal.read_bytes()) and not content.endswith(b"\n"):
        with journal.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


def words(trial: "Trial | FrozenTrial") -> list[str]:
    """Parameters of a trial as command-line overrides."""
    return [f"{key}={value}" for key, value in trial.params.items()]


def distribution(override: Override) -> "BaseDistribution":
    """Optuna's distribution for a sweep in Hydra's grammar.

    Choices 1,2,3, range(1,9,step=2), interval(0.1,0.9) and int(interval(1,9)); intervals also as tag(log, ...). Raises
    ConfigError, with the key, for anything else.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    sweep = override.value()
    typed = override.input_line
    log = isinstance(sweep, Sweep) and "log" in sweep.tags
    if log and not isinstance(sweep, IntervalSweep):
        raise ConfigError(f"{typed}: only an interval is searched on a logarithmic scale; take tag(log,interval(...))")
    if isinstance(sweep, IntervalSweep) and sweep.start is not None and sweep.end is not None:
        low, high = sweep.start, sweep.end
        if low > high or (log and low <= 0):
            raise ConfigError(f"{typed}: must go from a smaller number to a larger one{', both above 0' if log else ''}")
        if isinstance(low, int) and isinstance(high, int):
            return IntDistribution(low, high, log=log)
        return FloatDistribution(low, high, log=log)
    if isinstance(sweep, RangeSweep):
        values = list(sweep.range())
        if not values:
            raise ConfigError(f"{typed}: the range is empty")
        # Only an integer range becomes an ordered distribution; a float range is a list of choices.
        if all(isinstance(value, int) for value in values):
            return IntDistribution(min(values), max(values), step=abs(int(sweep.step)))
    if isinstance(sweep, ChoiceSweep | RangeSweep):
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    raise ConfigError(f"{typed}: must be choices, a range or an interval")
