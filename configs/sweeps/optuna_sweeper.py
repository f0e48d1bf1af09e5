"""Optuna sweeper (hydra/sweeper=optuna): each job of the sweep is a trial of a study stored in the sweep's directory."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from configs.base.keys import ConfigError
from configs.sweeps.sweep_points import INTERRUPTED

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial

JOURNAL = "optuna.journal"
SEARCHED = "searched"
"""User attribute of the study: its search space and fixed settings."""


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

        for trial in study.get_trials(states=(TrialState.RUNNING,)):
            if trial.params.keys() != space.keys():  # the process was killed while the trial was created
                study.tell(trial.number, state=TrialState.FAIL)
            # One at a time: a launch numbers its jobs consecutively, and interrupted trials may have gaps between them.
            elif not self.run(study, [trial], fixed):
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
            print(f"best: trial {best.number}, {self.settings.trainer.objective} with {', '.join(words(best))}")

    def check(self) -> None:
        """Raises ConfigError for invalid settings of the sweeper."""
        problems = [
            f"hydra.sweeper.{name}={value}: must be 1 or more"
            for name, value in (("n_trials", self.n_trials), ("n_jobs", self.n_jobs))
            if not isinstance(value, int) or value < 1
        ]
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
        storage = JournalStorage(JournalFileBackend(str(sweep_dir / JOURNAL)))
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


def words(trial: "Trial | FrozenTrial") -> list[str]:
    """Parameters of a trial as command-line overrides."""
    return [f"{key}={value}" for key, value in trial.params.items()]


def distribution(override: Override) -> "BaseDistribution":
    """Optuna's distribution for a sweep in Hydra's grammar.

    Choices 1,2,3, range(1,9,step=2), interval(0.1,0.9) and int(interval(1,9)); intervals also as tag(log, ...).
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    sweep = override.value()
    if isinstance(sweep, ChoiceSweep):
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    if isinstance(sweep, RangeSweep):
        # Only an integer range becomes an ordered distribution; a float range is a list of choices.
        values = sweep.range()
        if isinstance(values, range):
            return IntDistribution(values[0], values[-1], step=values.step)
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    assert isinstance(sweep, IntervalSweep), sweep
    low, high, log = sweep.start, sweep.end, "log" in sweep.tags
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log)
    assert low is not None and high is not None
    return FloatDistribution(low, high, log=log)
