"""Compare runs: differences of their configurations, their curves, and their final metrics.

Runs whose configurations differ in seeds only form a group. Its curve is their mean, with a band from the smallest to the largest
value.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.report.charts import Chart, Curve, draw, smooth
from trainer.report.page import render
from trainer.report.run_report import CURVES, CurveSpec, Series, series_of
from trainer.run.run_dir import CONFIG, GLOBAL_STEP, METRICS, leaves_of, read_config, read_metrics, write_atomic
from trainer.run.run_status import NOT_THE_RUN, Outcome, read_outcome
from trainer.tracking.formatting import number

NAMES = (
    *NOT_THE_RUN,
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.rollout_data_dir",
    "trainer.log_val_generations",
)
"""Keys that name or locate a run, ignored when configurations are compared."""
MOST_IN_LABEL = 3
TABLE_METRICS = 4
NOT_SET = "(not set)"
PNG_CHARTS, PNG_COLUMNS = 6, 3
PNG_COLORS = ("#3b6fd8", "#e0792f", "#2a9d74", "#a45bd0", "#d1495b", "#c9a227", "#3aa6b9", "#7a8699", "#b86b8f", "#9aa5b1")


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run that takes part in the comparison.

    config: {dotted key: value as JSON}, without NAMES. steps: its last step. outcome: None if it is running or was killed.
    """

    run_dir: Path
    config: dict[str, str]
    series: Series
    steps: int
    outcome: Outcome | None

    def settings(self) -> dict[str, str]:
        """The configuration without seeds; equal for all runs of a group."""
        return {key: value for key, value in self.config.items() if not is_seed(key)}


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in seeds at most."""

    label: str
    runs: list[ComparedRun]


@dataclass(frozen=True, slots=True)
class Final:
    """Last value of a metric: mean, minimum and maximum over the runs of a group."""

    mean: float
    low: float
    high: float


def is_seed(key: str) -> bool:
    """Whether the last part of the dotted key is ``seed``."""
    return key.rpartition(".")[2] == "seed"


def find_runs(directories: Sequence[Path]) -> list[ComparedRun]:
    """Read the runs in ``directories``; each is a run directory, or contains those of a sweep.

    Raises ValueError for a directory that is neither, or if no run has completed a step.
    """
    found: dict[Path, None] = {}
    for directory in directories:
        inside = [directory] if (directory / METRICS).exists() else sorted(path.parent for path in directory.glob(f"*/{METRICS}"))
        if not inside:
            what = f"neither it nor a directory in it has a {METRICS}" if directory.is_dir() else "there is no such directory"
            raise ValueError(f"{directory}: {what}; name run directories, or a sweep's")
        # By length first, so that 10 follows 9.
        inside = [path for path in inside if path.resolve() not in {other.resolve() for other in found}]
        found |= dict.fromkeys(sorted(inside, key=lambda path: (len(path.name), path.name)))
    runs = [read_run(path) for path in found]
    if not any(run.series for run in runs):
        raise ValueError(f"{', '.join(map(str, directories))}: no step is in any {METRICS} yet")
    return runs


def read_run(run_dir: Path) -> ComparedRun:
    """Read one run directory. Raises ValueError if its configuration is missing."""
    if not (run_dir / CONFIG).exists():
        raise ValueError(f"{run_dir}: it has {METRICS}, but no {CONFIG}: was it copied in part?")
    leaves = leaves_of(read_config(run_dir))
    config = {key: value for key, value in leaves.items() if not _is_name(key)}
    steps = read_metrics(run_dir)
    return ComparedRun(run_dir, config, series_of(steps), int(steps[-1][GLOBAL_STEP]) if steps else 0, read_outcome(run_dir))


def groups_of(runs: Sequence[ComparedRun]) -> list[Group]:
    """Group runs by their settings, in order of the first run of each group.

    Labels are the settings that differ between groups, or the directory of the first run if these are many or not unique.
    """
    together: dict[tuple[tuple[str, str], ...], list[ComparedRun]] = {}
    for run in runs:
        together.setdefault(tuple(sorted(run.settings().items())), []).append(run)
    members = list(together.values())
    keys = differing([group[0].settings() for group in members])
    # Settings of any member will do: within a group they are equal.
    labels = [_label(group[0], keys) for group in members]
    if len({*labels}) < len(labels):
        labels = [str(group[0].run_dir) for group in members]
    return [Group(label, group) for label, group in zip(labels, members, strict=True)]


def differing(configs: Sequence[dict[str, str]]) -> list[str]:
    """Keys whose values are not the same in all of ``configs``, sorted; a missing key counts as a value."""
    keys = sorted({key for config in configs for key in config})
    return [key for key in keys if len({config.get(key) for config in configs}) > 1]


def mean_curve(group: Group, metric: str) -> Curve:
    """Mean of ``metric`` over the runs of a group, with a band if there are several.

    Only steps at which every run has a finite value: otherwise the mean would jump where a run lacks a value.
    """
    values: list[dict[float, float]] = [
        {step: value for step, value in zip(*run.series.get(metric, ([], [])), strict=True) if math.isfinite(value)}
        for run in group.runs
    ]
    steps = sorted(set(values[0]).intersection(*values[1:]))
    columns = [[mine[step] for mine in values] for step in steps]
    several = len(group.runs) > 1
    return Curve(
        label_with_seeds(group),
        steps,
        [sum(column) / len(column) for column in columns],
        low=[min(column) for column in columns] if several else None,
        high=[max(column) for column in columns] if several else None,
    )


def label_with_seeds(group: Group) -> str:
    """Label with the number of seeds, or of runs if some of them have the same seeds."""
    if len(group.runs) == 1:
        return group.label
    different = {tuple(sorted(run.config.items())) for run in group.runs}
    return f"{group.label} · {len(group.runs)} {'seeds' if len(different) == len(group.runs) else 'runs'}"


def final_of(group: Group, metric: str) -> Final | None:
    """Final value of ``metric`` over the group, None if no run measured it."""
    last = [run.series[metric][1][-1] for run in group.runs if metric in run.series]
    return Final(sum(last) / len(last), min(last), max(last)) if last else None


def metrics_shown(runs: Sequence[ComparedRun]) -> Iterator[tuple[str, str, CurveSpec]]:
    """Yield (title, metric, specification) of the report's curves that any run has; accuracy also by data source, if several."""
    names = sorted({name for run in runs for name in run.series})
    by_source = [name for name in names if name.startswith("val-core/")]
    for spec in CURVES:
        for metric, label in spec.metrics:
            if metric in names:
                yield (spec.title if len(spec.metrics) == 1 else f"{spec.title}, {label}"), metric, spec
        if spec is CURVES[0] and len(by_source) > 1:
            yield from ((name.split("/", 1)[1], name, spec) for name in by_source)


def curves_of(groups: Sequence[Group], metric: str, spec: CurveSpec) -> list[Curve]:
    """Curves of the groups that measured ``metric``; empty if all values are 0 and the specification hides those."""
    # The colour is the group's index and not the curve's: a group keeps it in charts where another group is missing.
    curves = []
    for place, group in enumerate(groups):
        curve = mean_curve(group, metric)
        if curve.steps:
            curves.append(
                Curve(curve.label, curve.steps, curve.values, curve.low, curve.high, spec.exact, spec.dots, color=place)
            )
    return curves if any(spec.zero or value for curve in curves for value in curve.values) else []


def charts_of(groups: Sequence[Group]) -> list[Chart]:
    charts = []
    for title, metric, spec in metrics_shown([run for group in groups for run in group.runs]):
        if curves := curves_of(groups, metric, spec):
            charts.append(draw(title, metric, curves, at_least=spec.at_least))
    return charts


def default_path(directories: Sequence[Path]) -> Path:
    """Default path of a comparison: in a sweep's directory, or next to the runs."""
    if len(directories) == 1 and not (directories[0] / METRICS).exists():
        return directories[0] / "comparison"
    return Path(os.path.commonpath([directory.absolute().parent for directory in directories])) / "comparison"


def table(groups: Sequence[Group]) -> list[str]:
    """One line per group below a heading: steps and the first metrics of the page, the last values of each."""
    shown = list(metrics_shown([run for group in groups for run in group.runs]))[:TABLE_METRICS]
    rows = [("run", "steps", *(title for title, _, _ in shown))]
    for group in groups:
        finals = [final_of(group, metric) for _, metric, _ in shown]
        steps = sorted({run.steps for run in group.runs})
        rows.append((label_with_seeds(group), "-".join(map(str, steps[:: max(1, len(steps) - 1)])), *map(final_in_words, finals)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{word:<{width}}" for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def final_in_words(final: Final | None) -> str:
    if final is None:
        return "-"
    mean, low, high = (number(value) for value in (final.mean, final.low, final.high))
    return mean if final.low == final.high else f"{mean} ({low} to {high})"


def write_comparison(groups: Sequence[Group], out: Path) -> list[Path]:
    """Write ``out``.html, a single self-contained file, and ``out``.png. Returns both paths."""
    runs = [run for group in groups for run in group.runs]
    settings = [group.runs[0].settings() for group in groups]
    names = list(dict.fromkeys(name for run in runs for name in run.series))
    shown = [(title, metric) for title, metric, _ in metrics_shown(runs)]
    page = render(
        "report/compare.html.j2",
        groups=groups,
        labels=[label_with_seeds(group) for group in groups],
        runs=runs,
        differences=[(key, [_shown(config.get(key)) for config in settings]) for key in differing(settings)],
        seeds=[[_seeds(run, group) for run in group.runs] for group in groups],
        charts=charts_of(groups),
        finals=[(title, metric, [final_of(group, metric) for group in groups]) for title, metric in shown],
        all_finals=[(name, [final_of(group, name) for group in groups]) for name in sorted(names)],
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    paths = [out.with_name(f"{out.name}.{ending}") for ending in ("html", "png")]
    write_atomic(paths[0], page)
    write_png(groups, paths[1])
    return paths


def write_png(groups: Sequence[Group], path: Path) -> None:
    """Draw the first PNG_CHARTS charts of the page as a picture."""
    # Imported here: only this function needs matplotlib. Agg needs no display.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    runs = [run for group in groups for run in group.runs]
    drawn = [(title, spec, curves) for title, metric, spec in metrics_shown(runs) if (curves := curves_of(groups, metric, spec))][
        :PNG_CHARTS
    ]
    style: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
    columns = min(PNG_COLUMNS, len(drawn)) or 1
    rows = -(-len(drawn) // columns) or 1
    with plt.rc_context(style | {"font.size": 9}):
        figure, grid = plt.subplots(rows, columns, figsize=(3.9 * columns, 2.7 * rows + 0.5), layout="constrained", squeeze=False)
        lines: dict[str, Any] = {}
        for axes, (title, spec, curves) in zip(grid.flat, drawn, strict=False):
            axes.set_title(title, loc="left", fontweight="bold")
            axes.set_xlabel("step")
            for curve in curves:
                assert curve.color is not None
                color = PNG_COLORS[curve.color % len(PNG_COLORS)]
                values = list(curve.values) if spec.exact else smooth(curve.values)
                (line,) = axes.plot(
                    curve.steps, values, color=color, linewidth=1.5, marker="o" if spec.dots else None, markersize=3
                )
                if curve.low is not None and curve.high is not None:
                    axes.fill_between(curve.steps, curve.low, curve.high, color=color, alpha=0.15, linewidth=0)
                # One legend for all charts: a group has the same colour in each of them.
                lines.setdefault(curve.label.replace("$", r"\$"), line)  # else matplotlib reads $...$ as a formula
        # The grid is rectangular; its last places may be empty.
        for axes in grid.flat[len(drawn) :]:
            axes.set_visible(False)
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=min(len(lines), 3) or 1, frameon=False)
        figure.savefig(path, dpi=160)
        plt.close(figure)


def _is_name(key: str) -> bool:
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in NAMES)


def _label(run: ComparedRun, keys: Sequence[str]) -> str:
    if not 0 < len(keys) <= MOST_IN_LABEL:
        return str(run.run_dir)
    return ", ".join(f"{key.rpartition('.')[2]}={_shown(run.config.get(key))}" for key in keys)


def _seeds(run: ComparedRun, group: Group) -> str:
    """The seeds of ``run`` that differ within the group, or its trainer.seed if none do."""
    keys = differing([other.config for other in group.runs]) or ["trainer.seed"]
    return ", ".join(f"{key}={_shown(run.config.get(key))}" for key in keys)


def _shown(value: str | None) -> str:
    """A JSON value as a user would type it on the command line."""
    if value is None:
        return NOT_SET
    plain = json.loads(value)
    return plain if isinstance(plain, str) else number(plain) if isinstance(plain, float) else value
