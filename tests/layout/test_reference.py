"""Rows of docs/reference/metrics.md for every metric, and of docs/reference/run_directory.md for every file of a run."""

import re
from pathlib import Path

import pytest

from tests.layout.source import ROOT, parse, python_files
from tests.layout.test_readme import messages
from tests.runs import make_task, run_ppo
from trainer.run import run_dir as files_of_a_run
from trainer.run.run_dir import read_metrics

PREFIXES = (
    "actor", "critic", "train", "val", "val-core", "val-aux", "reward", "rollout", "rollout_corr", "training",
    "response_length", "prompt_length", "perf", "plan", "timing_s", "timing_per_token_ms",
)  # fmt: skip
NAME = re.compile(rf"(?:{'|'.join(PREFIXES)})/[\w…@/-]+")
SUFFIXES = ("", "/mean", "_p50")
"""Suffixes that code appends to a name: statistics of a spread, percentiles of a sample."""
# Strings of this form that are no metrics -> their meaning.
OTHER = {
    "reward/…": "a reward model's role",
    "actor/read": "a part of the start",
    "actor/check": "a part of the start",
    "rollout/end_tokens": "measured once, by an alarm",
    "val/generations": "a table of W&B",
    "val-…/…/…/mean@…": "val-core and val-aux, which have rows",
}
RUN = (
    "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", "algorithm.kl_clip=1", "critic.ppo_mini_batch_size=8",
    "algorithm.rollout_correction.rollout_is=sequence", "algorithm.rollout_correction.rollout_is_threshold=0.5_5.0",
    "algorithm.rollout_correction.rollout_is_batch_normalize=true",
    "algorithm.rollout_correction.rollout_token_veto_threshold=1e-4",
    "algorithm.rollout_correction.rollout_rs='token_k1,seq_mean_k3'",
    "algorithm.rollout_correction.rollout_rs_threshold='0.01_100,100'",
    "reward.reward_kwargs.overlong_buffer_cfg.log=true", "trainer.test_freq=1", "trainer.save_freq=1",
    "trainer.best_metric=val/accuracy", "trainer.logger=[tensorboard]",
)  # fmt: skip


def rows(page: str) -> list[str]:
    """First cells of all rows, except in tables that compare with verl, whose cells may have several names."""
    text = (ROOT / "docs/reference" / page).read_text(encoding="utf-8").partition("## Same name as in verl")[0]
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def patterns(page: str) -> re.Pattern[str]:
    """Pattern of the names in the rows; <...> matches any text."""
    parts = (".+".join(map(re.escape, re.split(r"<[^>]+>", row))) for row in rows(page))
    return re.compile("|".join(part + ".*" * part.endswith("/") for part in parts))


def in_the_code() -> set[str]:
    """Metric names and templates (with … for formatted values) among the strings of trainer/ and workers/."""
    texts = (text for path in python_files("trainer", "workers") for text in messages(parse(path)))
    return {text for text in texts if NAME.fullmatch(text) and not text.endswith("/")} - OTHER.keys()


def test_every_metric_in_the_code_has_a_row() -> None:
    known, found, named = patterns("metrics.md"), in_the_code(), tuple(rows("metrics.md"))
    fixed = sorted(name for name in found if "…" not in name)
    assert len(fixed) > 60
    assert [name for name in fixed if not any(known.fullmatch(name + suffix) for suffix in SUFFIXES)] == []
    starts = [name.partition("…")[0] for name in found - set(fixed)]
    assert [start for start in starts if not any(row.startswith(start) for row in named)] == []


def test_every_row_is_a_metric_of_the_code() -> None:
    source = "\n".join((ROOT / path).read_text() for path in python_files("trainer", "workers"))
    words = {row: re.split(r"<[^>]+>|/", row) for row in rows("metrics.md") if not row.startswith("rollout_corr/rollout_")}
    assert [row for row, parts in words.items() if any(part.strip("_@").removesuffix("_p") not in source for part in parts)] == []


def test_no_metric_has_two_rows() -> None:
    names = rows("metrics.md")
    assert len(names) == len(set(names)) > 100


def test_every_file_name_of_the_code_has_a_row() -> None:
    names = [value for name, value in vars(files_of_a_run).items() if name.isupper() and isinstance(value, str)]
    known = patterns("run_directory.md")
    named = [name for name in names if name not in ("training/global_step", "logs", "rollouts", "logs/nonfinite")]
    assert len(named) > 15
    assert [name for name in named if not known.fullmatch(name) and not known.fullmatch(f"{name}/")] == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    task = make_task(tmp_path_factory.mktemp("task"))
    directory = tmp_path_factory.mktemp("run") / "run"
    run_ppo(task, directory, *RUN, f"trainer.rollout_data_dir={directory}/rollouts")
    return directory


def test_every_metric_of_a_run_has_a_row(run: Path) -> None:
    names = {name for line in read_metrics(run) for name in line}
    known = patterns("metrics.md")
    assert len(names) > 100
    assert sorted(name for name in names if not known.fullmatch(name)) == []


def test_every_file_of_a_run_has_a_row(run: Path) -> None:
    found = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    known = patterns("run_directory.md")
    assert len(found) > 10
    assert [name for name in found if not known.fullmatch(name)] == []
