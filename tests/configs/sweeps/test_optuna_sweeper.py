"""hydra/sweeper=optuna: real studies over a cheap objective: search, interruption, resume and errors."""

import math
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import RandomSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study
from optuna.trial import TrialState

from configs.argv import normalise
from configs.base.keys import ConfigError
from configs.compose import run_jobs
from configs.load import load
from configs.schema.supervised import SFTConfig
from configs.sweeps.optuna_sweeper import JOURNAL, OptunaSweeper, distribution
from configs.sweeps.sweep_points import INTERRUPTED, Point, Value

ROOT = Path(__file__).parents[3]
ROOT_NAME = "sft_trainer"
SEARCH = ("optim.lr=tag(log,interval(1e-6,1e-2))", "optim.lr_warmup_steps=range(0,50)")


class Search:
    """Search over two keys; the objective has one maximum, at lr=1e-4 and lr_warmup_steps=20."""

    def __init__(self) -> None:
        self.jobs: list[tuple[int, str, float, int]] = []
        self.special: dict[int, Any] = {}

    def __call__(self, *words: str) -> None:
        command = normalise(
            ["-m", "hydra/sweeper=optuna", "trainer.objective=x", "trainer.default_local_dir=s", *words], SFTConfig, ROOT_NAME
        )
        run_jobs(command, ROOT_NAME, self.job)

    def job(self, tree: Any, point: Point | None) -> Value:
        config = load(tree, SFTConfig).config
        assert point is not None and all(word.split("=")[0] in ("optim.lr", "optim.lr_warmup_steps") for word in point.overrides)
        self.jobs.append((point.number, config.trainer.default_local_dir, config.optim.lr, config.optim.lr_warmup_steps))
        special = self.special.get(point.number)
        if isinstance(special, BaseException):
            raise special
        if point.number in self.special:
            return special
        return -((math.log10(config.optim.lr) + 4) ** 2) - ((config.optim.lr_warmup_steps - 20) / 25) ** 2


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Search:
    monkeypatch.chdir(tmp_path)
    return Search()


def study() -> Study:
    return Study(JOURNAL, JournalStorage(JournalFileBackend(f"s/{JOURNAL}")))


def test_search_improves_over_its_random_start(search: Search, capsys: pytest.CaptureFixture[str]) -> None:
    search(*SEARCH, "hydra.sweeper.n_trials=20")
    assert [(number, run_dir) for number, run_dir, *_ in search.jobs] == [(i, f"s/{i}") for i in range(20)]
    assert all(1e-6 <= lr <= 1e-2 and 0 <= warmup < 50 for *_, lr, warmup in search.jobs)
    values = [trial.value for trial in study().trials if trial.value is not None]
    assert median(values[12:]) > median(values[:10]) + 0.3, "later trials are better than the first ones, which are random"
    best = max(study().trials, key=lambda trial: trial.value or -math.inf)
    line = capsys.readouterr().out.splitlines()[-1]
    assert (
        line.startswith(f"best: trial {best.number}, x={best.value:.6g} with optim.lr=")
        and best.value is not None
        and best.value > -0.1
    )


def test_restarted_search_resumes_with_the_killed_trial(search: Search) -> None:
    search.special = {2: KeyboardInterrupt(), 4: INTERRUPTED, 5: None, 6: float("inf")}
    with pytest.raises(KeyboardInterrupt):
        search(*SEARCH, "hydra.sweeper.n_trials=6")
    killed = search.jobs[-1]
    del search.special[2]
    search.jobs = []
    search(*SEARCH, "hydra.sweeper.n_trials=6")
    assert search.jobs[0] == killed, "the same trial, in the same directory"
    assert [number for number, *_ in search.jobs] == [2, 3, 4], "an interrupted trial ends the sweep"
    del search.special[4]
    search.jobs = []
    search(*SEARCH, "hydra.sweeper.n_trials=6")
    assert [number for number, *_ in search.jobs] == [4, 5, 6, 7], "n_trials counts the existing trials, and no failed ones"
    states = [trial.state for trial in study().trials]
    assert states == [TrialState.COMPLETE] * 5 + [TrialState.FAIL] * 2 + [TrialState.COMPLETE]
    search(*SEARCH, "hydra.sweeper.n_trials=7")
    assert [number for number, *_ in search.jobs] == [4, 5, 6, 7, 8]
    assert len({job[2:] for job in search.jobs}) == 5, "all trials have different values"


def test_a_trial_killed_before_it_had_values_is_failed(search: Search, capsys: pytest.CaptureFixture[str]) -> None:
    search.special = dict.fromkeys(range(6))
    search(*SEARCH, "hydra.sweeper.n_trials=5", "hydra.sweeper.n_jobs=2")
    out, err = capsys.readouterr()
    assert "best: " not in out and err.endswith("the search ends with 0 of 5 results: 6 trials failed\n")
    study().ask()
    search(*SEARCH, "hydra.sweeper.n_trials=1")
    assert [number for number, *_ in search.jobs] == [*range(6), 7]
    assert [trial.state for trial in study().trials] == [TrialState.FAIL] * 7 + [TrialState.COMPLETE]


def test_trials_that_diverge_do_not_end_a_search(search: Search, capsys: pytest.CaptureFixture[str]) -> None:
    search.special = dict.fromkeys((1, 2, 3, 4, 5, *range(8, 99)), math.nan)
    search(*SEARCH, "hydra.sweeper.n_trials=3")
    assert [number for number, *_ in search.jobs] == [*range(6)], "twice as many at most"
    assert capsys.readouterr().err.endswith("the search ends with 1 of 3 results: 5 trials failed\n")
    search(*SEARCH, "hydra.sweeper.n_trials=3")
    assert [number for number, *_ in search.jobs] == [*range(8)] and len(study().best_trials) == 1
    search(*SEARCH, "hydra.sweeper.n_trials=4")
    assert capsys.readouterr().err.endswith("the search ends with 3 of 4 results: 8 trials failed\n"), "of this start"


def test_the_same_seed_gives_the_same_trials(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    class Random(RandomSampler):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            seeds.append(seed)

    monkeypatch.setattr("optuna.samplers.RandomSampler", Random)
    search(*SEARCH, "hydra.sweeper.n_trials=4", "hydra.sweeper.sampler=random")
    assert len(seeds) == 1, "a single sampler"
    first, search.jobs = [job[2:] for job in search.jobs], []
    search(*SEARCH, "hydra.sweeper.n_trials=4", "hydra.sweeper.sampler=random", "trainer.default_local_dir=t")
    assert [job[2:] for job in search.jobs] == first
    search.jobs = []
    search(*SEARCH, "hydra.sweeper.n_trials=4", "hydra.sweeper.seed=9", "trainer.default_local_dir=u")
    assert [job[2:] for job in search.jobs] != first


def test_concurrent_trials_have_different_numbers(search: Search) -> None:
    search(*SEARCH, "hydra.sweeper.n_trials=5", "hydra.sweeper.n_jobs=2")
    assert [number for number, *_ in search.jobs] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*SEARCH, "trainer.objective=null"), "an objective is required; set for example trainer.objective="),
        ((*SEARCH, "hydra.sweeper.n_trials=0"), "hydra.sweeper.n_trials=0: must be 1 or more"),
        ((*SEARCH, "hydra.sweeper.sampler=grid"), "hydra.sweeper.sampler=grid: must be one of tpe, random"),
        (("optim.lr=0.1",), "no key has a range"),
    ],
)
def test_an_impossible_search_is_an_error_of_one_line(search: Search, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        search(*words)
    assert message in str(caught.value) and "\n" not in str(caught.value) and search.jobs == []


def test_a_different_search_in_the_same_directory_is_refused(search: Search) -> None:
    search(*SEARCH, "hydra.sweeper.n_trials=1")
    for words, key in ((("optim.lr=interval(0.1,0.2)", SEARCH[1]), "optim.lr"), ((*SEARCH, "trainer.seed=7"), "settings")):
        with pytest.raises(ConfigError) as caught:
            search(*words, "hydra.sweeper.n_trials=2")
        assert str(caught.value).startswith(f"s/{JOURNAL}: contains trials of a search with different {key}; ")
    assert len(search.jobs) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,2", CategoricalDistribution(["1", "2"])),
        ("choice(a,true)", CategoricalDistribution(["a", "True"])),
        ("range(1,8,step=3)", IntDistribution(1, 7, step=3)),
        ("range(9,1,step=-2)", IntDistribution(3, 9, step=2)),
        ("range(0.0,0.3,step=0.1)", CategoricalDistribution(["0.0", "0.1", "0.2"])),
        ("interval(1,9)", FloatDistribution(1.0, 9.0)),
        ("int(interval(1,9))", IntDistribution(1, 9)),
        ("interval(0.1,0.9)", FloatDistribution(0.1, 0.9)),
        ("tag(log,interval(1e-6,1e-2))", FloatDistribution(1e-6, 1e-2, log=True)),
    ],
)
def test_sweep_syntax_of_hydra_becomes_distributions(text: str, expected: Any) -> None:
    assert distribution(OverridesParser.create().parse_override(f"key={text}")) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("range(5,5)", "the range is empty"),
        ("glob(*)", "must be choices, a range or an interval"),
        ("interval(9,1)", "must go from a smaller number to a larger one$"),
        ("tag(log,interval(0,1))", "to a larger one, both above 0"),
        ("tag(log,choice(1,2))", "only an interval is searched on a logarithmic scale"),
    ],
)
def test_what_cannot_be_searched_is_one_line_with_its_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^key={re.escape(text)}: .*{message}"):
        distribution(OverridesParser.create().parse_override(f"key={text}"))


def test_a_killed_searchs_lock_and_torn_line_are_removed(search: Search) -> None:
    """Optuna would wait for the lock without end, and add to the line; the trial whose result is lost runs again."""
    search(*SEARCH, "hydra.sweeper.n_trials=3")
    journal = Path("s", JOURNAL)
    Path("s", f"{JOURNAL}.lock").symlink_to(Path("s", JOURNAL))
    content = journal.read_bytes()
    journal.write_bytes(content[:-20])
    search.jobs.clear()
    search(*SEARCH, "hydra.sweeper.n_trials=3")
    assert [number for number, *_ in search.jobs] == [2]
    assert [trial.state for trial in study().trials] == [TrialState.COMPLETE] * 3


def test_a_trial_that_has_outlived_its_search_is_not_failed(search: Search) -> None:
    search.special = {1: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        search(*SEARCH, "hydra.sweeper.n_trials=2")
    search.special.clear()
    holder = "import sys, time; from pathlib import Path; from configs.base.locks import locked\n"
    holder += "with locked(Path('s/1'), 'x'): print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)}) as process:
        assert process.stdout is not None and process.stdout.readline()
        with pytest.raises(ConfigError, match=r"s/1: in use by process \d+ .* when that trial has ended"):
            search(*SEARCH, "hydra.sweeper.n_trials=2")
        process.kill()
    assert study().trials[1].state == TrialState.RUNNING
    search(*SEARCH, "hydra.sweeper.n_trials=2")
    assert [trial.state for trial in study().trials] == [TrialState.COMPLETE] * 2


def test_a_dry_run_tries_one_trial_and_reports_no_result(search: Search, capsys: pytest.CaptureFixture[str]) -> None:
    search.special = {0: None}
    search(*SEARCH, "trainer.dry_run=config")
    assert [number for number, *_ in search.jobs] == [0] and "result" not in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["abc", "1.5", "-1", "99999999999"])
def test_a_wrong_seed_is_one_line(search: Search, seed: str) -> None:
    with pytest.raises(ConfigError, match=f"^hydra.sweeper.seed={seed}: must be a number from 0 to"):
        search(*SEARCH, f"hydra.sweeper.seed={seed}")


def test_yaml_of_the_sweeper_has_every_argument() -> None:
    from inspect import signature

    from omegaconf import OmegaConf

    from configs.base.keys import CONFIG_DIR

    keys = {str(key) for key in OmegaConf.load(CONFIG_DIR / "hydra/sweeper/optuna.yaml")} - {"_target_"}
    assert keys == set(signature(OptunaSweeper).parameters)
