"""Runs beside each other: groups of seeds, differences, curves, and the page and the picture of all that."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from trainer.compare import Group, Run, charts_of, differing, final_of, find_runs, groups_of, mean_curve, write_comparison
from trainer.main_compare import compare
from trainer.run_dir import CONFIG, GLOBAL_STEP, METRICS, json_line

Metrics = dict[str, float]


def write_run(run_dir: Path, steps: list[Metrics], *words: str) -> Path:
    run_dir.mkdir(parents=True)
    config = compose("ppo_trainer", PPOConfig, ["recipe=quickstart", f"trainer.default_local_dir={run_dir}", *words])
    (run_dir / CONFIG).write_text(yaml.safe_dump(asdict(config)))
    lines = [json_line({GLOBAL_STEP: step, **metrics}) for step, metrics in enumerate(steps, 1)]
    (run_dir / METRICS).write_text("".join(lines))
    return run_dir


def scores(*values: float) -> list[Metrics]:
    return [{"critic/score/mean": value, "val/accuracy": value / 2} for value in values]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two learning rates, and of the first two seeds."""
    write_run(tmp_path / "sweep/0", scores(0.1, 0.5, 0.9), "trainer.seed=1")
    write_run(tmp_path / "sweep/1", scores(0.3, 0.7), "trainer.seed=2")
    write_run(tmp_path / "sweep/2", scores(0.2, 0.2, 0.2), "actor_rollout_ref.actor.optim.lr=0.5")
    return tmp_path / "sweep"


def test_runs_that_differ_in_seeds_alone_are_one_group(sweep: Path) -> None:
    first, second = groups_of(find_runs([sweep]))
    assert [run.run_dir.name for run in first.runs] == ["0", "1"] and [run.run_dir.name for run in second.runs] == ["2"]
    assert (first.label, second.label) == ("lr=3e-4", "lr=0.5")
    assert differing([group.runs[0].settings() for group in (first, second)]) == ["actor_rollout_ref.actor.optim.lr"]


def test_a_groups_curve_is_the_mean_within_least_and_largest(sweep: Path) -> None:
    first, second = groups_of(find_runs([sweep]))
    curve = mean_curve(first, "critic/score/mean")
    assert (curve.label, curve.steps) == ("lr=3e-4 · 2 seeds", [1, 2]), "where both have got to"
    assert curve.values == pytest.approx([0.2, 0.6]) and (curve.low, curve.high) == ([0.1, 0.5], [0.3, 0.7])
    alone = mean_curve(second, "critic/score/mean")
    assert (alone.values, alone.low, alone.high) == ([0.2, 0.2, 0.2], None, None)
    last = final_of(first, "critic/score/mean")
    assert last is not None and (last.mean, last.low, last.high) == (pytest.approx(0.8), 0.7, 0.9)
    assert final_of(first, "actor/kl_loss") is None and mean_curve(first, "actor/kl_loss").steps == []


@given(st.lists(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=6), min_size=1, max_size=4))
def test_the_mean_lies_in_its_band_and_only_where_all_are_finite(columns: list[list[float]]) -> None:
    runs = [Run(Path(str(i)), {}, {"m": ([*range(len(ys))], ys)} if ys else {}, len(ys), None) for i, ys in enumerate(columns)]
    curve = mean_curve(Group("g", runs), "m")
    shortest = min(map(len, columns))
    assert curve.steps == [i for i in range(shortest) if all(math.isfinite(ys[i]) for ys in columns)]
    for i, step in enumerate(curve.steps):
        here = [ys[int(step)] for ys in columns]
        if len(runs) > 1 and math.isfinite(curve.values[i]):
            assert curve.low is not None and curve.high is not None
            assert curve.low[i] == min(here) and curve.high[i] == max(here)
            room = 1e-9 * max(abs(min(here)), abs(max(here)))
            assert min(here) - room <= curve.values[i] <= max(here) + room


def test_a_group_has_its_color_in_every_chart(tmp_path: Path) -> None:
    write_run(tmp_path / "a", scores(0.1, 0.2))
    write_run(tmp_path / "b", [{"critic/score/mean": 0.3, "critic/vf_loss": 1.0}], "algorithm=ppo")
    charts = {chart.title: chart for chart in charts_of(groups_of(find_runs([tmp_path])))}
    assert [line.color for line in charts["Score"].lines] == [0, 1]
    assert [line.color for line in charts["Value loss"].lines] == [1]


def test_the_page_and_the_picture(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = sweep.parent / "there/it is"
    assert compare([str(sweep), f"out={out}.html"]) == 0
    assert capsys.readouterr().out == f"comparison: {out}.html {out}.png\n"
    page = out.with_name("it is.html").read_text()
    assert (
        "actor_rollout_ref.actor.optim.lr" in page
        and "trainer.default_local_dir" not in page
        and "trainer.project_name" not in page
    )
    assert page.count('class="band"') == 2 and page.count('class="curve"') == 4, (
        "score and accuracy, two groups, one of two seeds"
    )
    assert all(f"<td>{sweep / str(i)}</td>" in page for i in range(3)) and "not yet, or killed" in page
    assert "trainer.seed=1" in page and "http://" not in page and "https://" not in page
    picture = out.with_name("it is.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


def test_equal_runs_have_no_differences_and_directories_for_labels(tmp_path: Path) -> None:
    write_run(tmp_path / "a", scores(0.1), "trainer.experiment_name=a")
    write_run(tmp_path / "b", scores(0.1), "trainer.experiment_name=b", "trainer.logger=[]")
    (group,) = groups_of(find_runs([tmp_path / "a", tmp_path / "b", tmp_path]))
    assert len(group.runs) == 2 and group.label == str(tmp_path / "a")
    html, _ = write_comparison([tmp_path], tmp_path / "c")
    assert "<td>none</td>" in html.read_text()


def broken(tmp_path: Path) -> dict[str, tuple[list[Any], str]]:
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / METRICS).write_text(json_line({GLOBAL_STEP: 1}))
    write_run(tmp_path / "begun", [])
    write_run(tmp_path / "torn", scores(1.0))
    (tmp_path / "torn" / METRICS).write_text("{\n")
    return {
        "missing": ([tmp_path / "missing"], "missing: there is no such directory; name run directories, or a sweep's"),
        "empty": ([tmp_path / "empty"], "empty: neither it nor a directory in it has a metrics.jsonl"),
        "half": ([tmp_path / "half"], "half: it has metrics.jsonl, but no config.yaml"),
        "begun": ([tmp_path / "begun"], "no step is in any metrics.jsonl yet"),
        "torn": ([tmp_path / "torn"], "metrics.jsonl, line 1 is not JSON"),
        "flag": (["--out", "x"], "--out: there is no such flag; run directories, and out=PATH"),
        "nothing": (["out=x"], "out=x: there is nothing to compare"),
        "folder": ([tmp_path / "torn", "out=x/"], "out=x/: must be a file's path"),
    }


def test_what_is_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in broken(tmp_path).values():
        assert compare([str(word) for word in words]) == 2
        err = capsys.readouterr().err
        assert said in err and err.startswith("error: ") and err.count("\n") == 1
    assert compare([]) == 2 and compare(["--help"]) == 0 and "out=PATH" in capsys.readouterr().out
