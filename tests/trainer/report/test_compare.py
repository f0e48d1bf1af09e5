"""Comparison of runs: groups of seeds, differences, curves, the page and the picture."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from trainer.main_compare import compare
from trainer.report.compare import (
    ComparedRun,
    Group,
    charts_of,
    curves_of,
    differing,
    final_of,
    find_runs,
    groups_of,
    label_with_seeds,
    mean_curve,
    metrics_shown,
)
from trainer.run.run_dir import CONFIG, GLOBAL_STEP, METRICS, json_line

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
    """Two learning rates; two seeds of the first one."""
    write_run(tmp_path / "sweep/0", scores(0.1, 0.5, 0.9), "trainer.seed=1")
    write_run(tmp_path / "sweep/1", scores(0.3, 0.7), "trainer.seed=2", "data.seed=5")
    write_run(tmp_path / "sweep/2", scores(0.2, 0.2, 0.2), "actor_rollout_ref.actor.optim.lr=0.5")
    return tmp_path / "sweep"


def test_runs_that_differ_only_in_seeds_are_one_group(sweep: Path) -> None:
    first, second = groups_of(find_runs([sweep]))
    assert [run.run_dir.name for run in first.runs] == ["0", "1"] and [run.run_dir.name for run in second.runs] == ["2"]
    assert (first.label, second.label) == ("lr=3e-4", "lr=0.5")
    assert differing([group.runs[0].settings() for group in (first, second)]) == ["actor_rollout_ref.actor.optim.lr"]


def test_runs_with_the_same_seed_are_not_counted_as_seeds(sweep: Path) -> None:
    write_run(sweep / "3", scores(0.2, 0.4), "trainer.seed=1")
    assert [label_with_seeds(group) for group in groups_of(find_runs([sweep]))] == ["lr=3e-4 · 3 runs", "lr=0.5"]


def test_curve_of_a_group_is_the_mean_with_its_range(sweep: Path) -> None:
    first, second = groups_of(find_runs([sweep]))
    curve = mean_curve(first, "critic/score/mean")
    assert (curve.label, curve.steps) == ("lr=3e-4 · 2 seeds", [1, 2]), "the steps that both seeds have"
    assert curve.values == pytest.approx([0.2, 0.6]) and (curve.low, curve.high) == ([0.1, 0.5], [0.3, 0.7])
    alone = mean_curve(second, "critic/score/mean")
    assert (alone.values, alone.low, alone.high) == ([0.2, 0.2, 0.2], None, None)
    last = final_of(first, "critic/score/mean")
    assert last is not None and (last.mean, last.low, last.high) == (pytest.approx(0.8), 0.7, 0.9)
    assert final_of(first, "actor/kl_loss") is None and mean_curve(first, "actor/kl_loss").steps == []


@given(st.lists(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=6), min_size=1, max_size=4))
def test_mean_lies_in_its_band_at_steps_where_all_are_finite(columns: list[list[float]]) -> None:
    runs = [
        ComparedRun(Path(str(i)), {}, {"m": ([*range(len(ys))], ys)} if ys else {}, len(ys), None) for i, ys in enumerate(columns)
    ]
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


def test_group_has_the_same_color_in_every_chart(tmp_path: Path) -> None:
    write_run(tmp_path / "a", scores(0.1, 0.2))
    write_run(tmp_path / "b", [{"critic/score/mean": 0.3, "critic/vf_loss": 1.0}], "algorithm=ppo")
    charts = {chart.title: chart for chart in charts_of(groups_of(find_runs([tmp_path])))}
    assert [line.color for line in charts["Score"].lines] == [0, 1]
    assert [line.color for line in charts["Value loss"].lines] == [1]


def test_page_and_picture_show_the_groups(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = sweep.parent / "there/it is"
    fill, bands = Axes.fill_between, list[Any]()
    monkeypatch.setattr(Axes, "fill_between", lambda axes, *args, **how: (bands.append(args), fill(axes, *args, **how))[1])
    assert compare([str(sweep), f"out={out}.html"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"comparison: {out}.html {out}.png"
    assert lines[0].split("  ")[0] == "run" and len(lines) == 3 and "2 seeds" in lines[1] and " to " in lines[1]
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
    assert "trainer.seed=1" in page and "data.seed=5, trainer.seed=2" in page and "http://" not in page and "https://" not in page
    picture = out.with_name("it is.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000 and len(bands) == 2
    assert int.from_bytes(picture[16:20]) == 2 * 624, "two charts side by side"


def test_comparison_is_written_next_to_the_runs(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for directories in ([sweep], [sweep / "0", sweep / "1"], [sweep / "0"]):
        assert compare([str(directory) for directory in directories]) == 0
        assert capsys.readouterr().out.splitlines()[-1].startswith(f"comparison: {sweep}/comparison.html")
        for ending in ("html", "png"):
            (sweep / f"comparison.{ending}").unlink()


def test_equal_runs_are_labelled_by_directory(tmp_path: Path) -> None:
    write_run(tmp_path / "9", scores(0.1), "trainer.experiment_name=a")
    write_run(tmp_path / "10", scores(0.1), "trainer.experiment_name=b", "trainer.logger=[]")
    (group,) = groups_of(find_runs([tmp_path, tmp_path / "10"]))
    assert len(group.runs) == 2 and group.label == str(tmp_path / "9"), "point 9 comes before point 10"
    assert compare([str(tmp_path), f"out={tmp_path}/c.png"]) == 0
    assert "<td>none</td>" in (tmp_path / "c.html").read_text()


def test_a_run_counts_once_whatever_its_path(sweep: Path) -> None:
    (sweep / "again").symlink_to("0")
    assert [run.run_dir.name for run in find_runs([sweep / "0", sweep / "again", sweep / "1/../0"])] == ["0"]


def test_a_formula_in_a_label_is_text(tmp_path: Path) -> None:
    write_run(tmp_path / "a", scores(0.1, 0.2), "reward.judge.prompt='in $\\boxed{}$.'")
    write_run(tmp_path / "b", scores(0.2, 0.3), "reward.judge.prompt='Answer:'")
    assert compare([str(tmp_path / "a"), str(tmp_path / "b"), f"out={tmp_path}/c.png"]) == 0
    assert (tmp_path / "c.png").exists()


def plain(name: str, config: dict[str, str], **series: list[float]) -> ComparedRun:
    """config: as JSON. series: one value per step, from 1."""
    named = {metric.replace("__", "/"): ([*range(1, len(ys) + 1)], ys) for metric, ys in series.items()}
    return ComparedRun(Path(name), config, named, 2, None)


def test_labels_are_settings_if_few_and_distinct() -> None:
    few = [plain(str(i), {"a.x": str(i), "b.y": '"s"', "c.z": f"{i}.5"}) for i in (1, 2)]
    assert [group.label for group in groups_of(few)] == ["x=1, z=1.5", "x=2, z=2.5"]
    many = [plain(str(i), {key: str(i) for key in "abcd"}) for i in (1, 2)]
    assert [group.label for group in groups_of(many)] == ["1", "2"]
    alike = [plain(str(i), {"a.x": f"0.{'3' * i}"}) for i in (12, 13)]
    assert [group.label for group in groups_of(alike)] == ["12", "13"], "the rounded values are equal"


def test_charts_exclude_single_sources_and_zero_curves() -> None:
    """One chart per data source if there are several; none of a metric that is always zero, unless zero is informative."""
    zeros, ones = [0.0, 0.0], [1.0, 1.0]
    one = plain("a", {}, **{"val-core__a__acc": ones, "actor__grad_norm": zeros})
    two = plain("b", {"x": "1"}, **{"val-core__a__acc": zeros, "val-core__b__acc": ones})
    assert [title for title, *_ in metrics_shown([one]) if "acc" in title] == []
    assert [title for title, *_ in metrics_shown([one, two]) if "acc" in title] == ["a/acc", "b/acc"]
    ((_, metric, spec),) = [shown for shown in metrics_shown([one]) if shown[1] == "actor/grad_norm"]
    assert not spec.zero and curves_of(groups_of([one]), metric, spec) == []
    assert len(curves_of(groups_of([one]), metric, replace(spec, zero=True))) == 1


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


def test_invalid_arguments_are_one_line_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in broken(tmp_path).values():
        assert compare([str(word) for word in words]) == 2
        err = capsys.readouterr().err
        assert message in err and err.startswith("error: ") and err.count("\n") == 1
    assert compare([]) == 2 and compare(["--help"]) == 0 and "out=PATH" in capsys.readouterr().out
