"""placement=auto: run with the planner's fastest settings on this machine, and compare its times with the measured ones.

The settings become part of the run's configuration, so that a resume finds them in the checkpoint and does not plan again:
lengths of responses are known better by then, and another plan would change the last bits.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.base.keys import CONFIG_DIR, ConfigError
from configs.clamp import within_bounds
from configs.schema.placement import PlacedRolesConfig, Placement, PoolConfig
from configs.schema.ppo import PPOConfig
from configs.validation.placement import placement_of
from trainer.cli.preflight import check_ppo_config
from trainer.run.run_dir import CONFIG, METRICS, leaves, read_config
from trainer.run.run_status import earlier_outcome
from workers.controller.logs import announce
from workers.host_memory import host_memory

if TYPE_CHECKING:
    from trainer.planner.hardware import GpuCluster
    from trainer.planner.search import Overrides, RankedPlan
    from trainer.planner.time_model import ResponseLengths

STEPS = 5
"""Steps after which predicted and measured times are compared; the first of them, which warms up, is left out."""
PHASES = {  # timing_s/<name>: phases of the planner
    "gen": ("answers",),
    "old_log_prob": ("actor: log-probs",),
    "ref": ("ref: log-probs",),
    "values": ("critic: values",),
    "update_critic": ("critic: update",),
    "update_actor": ("actor: update",),
    "sync": ("sync",),
}
RATES = {  # part of a phase: the rates of configs/hardware that decide it
    "products": "products", "bubble": "products", "attention": "attention", "elementwise": "streaming", "copies": "streaming",
    "optimizer": "streaming", "launches": "layer", "batches": "batch", "update": "update", "collectives": "link and latency",
    "offload": "host_link", "decode": "decode, decode_row and decode_layer", "prefill": "products", "calls": "turn",
    "weights": "sync", "sleep": "sleep", "controller": "phase and token",
}  # fmt: skip


def planned(config: PPOConfig, typed: Collection[str]) -> tuple[PPOConfig, list[str]]:
    """The configuration with the settings of the fastest plan, and a note that lists them; unchanged unless placement=auto.

    A run that resumes gets the settings that are stored with it. typed: keys on the command line, which stay as they are.
    Raises ConfigError, one line, if nothing can be planned, or if no plan fits.
    """
    placement = config.placement
    if placement.layout != "auto":
        return config, []
    if own := sorted(key for key in typed if key.startswith(("placement.pools", "placement.roles"))):
        raise ConfigError(f"{own[0]}: placement.layout=auto chooses the pools itself; set layout=custom, or leave it out")
    if placement.pools:  # planned before
        return config, []
    if (stored := stored_settings(config, typed)) is not None:
        return stored, ["placement=auto: the settings of the run that is resumed; nothing is planned again"]
    try:
        best = best_plan(config, typed)
    except FileNotFoundError as error:
        raise ConfigError(f"placement=auto: {error}") from error
    from trainer.planner.search import as_words

    place, cluster = best.place, best.cluster
    sets = " ".join(as_words(best.overrides)) or "nothing that is not given"
    return with_pools(best.config, place), [
        f"placement=auto: {best.seconds:.3g} s a step predicted on {cluster.nodes} x {cluster.gpus} {cluster.hardware.name}; "
        f"sets {sets}"
    ]


def best_plan(config: PPOConfig, typed: Collection[str]) -> RankedPlan:
    """The fastest plan on all GPUs of the command. Raises ConfigError if there is none."""
    from trainer.planner.search import MARGIN, RankedPlan, accepted, alternatives, replaced
    from trainer.ppo.ppo_builder import check_splits

    base = replaced(config, {"placement.layout": "colocate_all"})
    shapes = model_shapes(config)
    # All GPUs are used: fewer would leave some of them idle, which the user has not asked for.
    fixed = {*typed, "trainer.nnodes", "trainer.n_gpus_per_node"} - {"placement.layout"}

    def checked(overrides: Overrides) -> PPOConfig:
        found, _ = within_bounds(replaced(base, overrides), {*typed, *overrides})
        check_ppo_config(found, typed)
        check_splits(found)
        return found

    given = RankedPlan(base, cluster_of(config), shapes, lengths_of(config), {}, frozenset(fixed))
    found = alternatives(given, 1, checked)
    if given.fits and accepted(given, checked) and not (found and found[0].seconds < given.seconds):
        found = [given]
    if not found:
        most = max(use.bytes or 0.0 for use in given.uses)
        raise ConfigError(
            f"placement=auto: no plan fits {MARGIN:.0%} of {given.cluster.hardware.memory / 1e9:.3g} GB; one pool with the other "
            f"settings as given takes {most / 1e9:.0f} GB of a GPU: take more GPUs or shorter responses"
        )
    return replace(found[0], config=checked(found[0].overrides))


def model_shapes(config: PPOConfig) -> Mapping[str, Any]:
    """Shape of each role's model. Raises ConfigError for one that the planner does not cover."""
    from trainer.planner.dry_run import measured

    shapes = {key: model.shape for key, model in measured(config).items()}
    for key, shape in shapes.items():
        if shape is None or shape.experts:
            raise ConfigError(
                f"placement=auto: the planner covers dense decoders, and the model of {key} is none; set placement=colocate_all "
                "or another one of docs/placement.md"
            )
    return shapes


def cluster_of(config: PPOConfig) -> GpuCluster:
    """The run's GPUs with the rates of this machine's. Raises ConfigError for a GPU that configs/hardware does not have."""
    from trainer.planner.hardware import GpuCluster, load_hardware
    from trainer.tracking.metrics import gpu_names

    trainer = config.trainer
    if trainer.device == "cpu":
        hardware = load_hardware("cpu")
        memory = host_memory().total / trainer.n_gpus_per_node
        return GpuCluster(trainer.nnodes, trainer.n_gpus_per_node, replace(hardware, memory=memory))
    known = sorted(path.stem for path in (CONFIG_DIR / "hardware").glob("*.yaml") if path.stem != "cpu")
    names = gpu_names()
    name = next((stem for stem in known if names and stem in names[0].lower()), None)
    if name is None:
        raise ConfigError(
            f"placement=auto: the rates of this machine's GPU ({names[0] if names else 'none found'}) are not known; known: "
            f"{', '.join(known)}. Measure them (scripts/bench/calibrate.py), or set placement=colocate_all"
        )
    hardware = load_hardware(name)
    # Some GPUs are sold with less memory than the file says: A100-SXM4-40GB.
    if (size := re.search(r"(\d+)GB", names[0])) is not None:
        hardware = replace(hardware, memory=min(hardware.memory, 0.99 * 2**30 * int(size[1])))
    return GpuCluster(trainer.nnodes, trainer.n_gpus_per_node, hardware)


def lengths_of(config: PPOConfig) -> ResponseLengths:
    """Lengths from the metrics of an earlier run in the run directory; otherwise the longest that are allowed."""
    from trainer.planner.plan_program import lengths_of as planned_lengths

    run_dir = Path(config.trainer.default_local_dir)
    try:
        return planned_lengths(str(run_dir / METRICS), config)
    except ValueError:  # there is none, or with longer responses than this run may have
        return planned_lengths(None, config)


def with_pools(config: PPOConfig, place: Placement) -> PPOConfig:
    """The configuration with placement.layout=auto and the pools of ``place``, in the order in which they are placed."""
    seated = sorted(place.pools, key=lambda pool: (pool.first_node, pool.first_gpu))
    pools = {pool.name: PoolConfig(nodes=pool.nnodes, gpus=pool.n_gpus_per_node, fraction=pool.fraction) for pool in seated}
    roles = dict.fromkeys(asdict(config.placement.roles)) | {role: pool.name for pool in seated for role in pool.roles}
    return replace(config, placement=replace(config.placement, layout="auto", pools=pools, roles=PlacedRolesConfig(**roles)))


def stored_settings(config: PPOConfig, typed: Collection[str]) -> PPOConfig | None:
    """The configuration with the plan of the run that is resumed; None if none is, or if it was planned for other GPUs."""
    from trainer.checkpoint.manifest import read_checkpoint
    from trainer.checkpoint.remote_copies import is_url
    from trainer.checkpoint.resume import find_latest

    trainer, run_dir = config.trainer, Path(config.trainer.default_local_dir)
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path and not is_url(trainer.resume_from_path):
        checkpoint = read_checkpoint(Path(trainer.resume_from_path), weights=False)
        return with_settings_of(checkpoint.manifest.config, config, typed)
    if trainer.resume_mode != "auto":
        return None
    latest = find_latest(run_dir, tell=lambda step, damage: None, weights=False)
    if latest is not None:
        return with_settings_of(latest.manifest.config, config, typed)
    if not (run_dir / CONFIG).exists():
        return None
    # Stopped before its first checkpoint: the same run starts again, and has the same numbers with the same plan.
    stored = with_settings_of(read_config(run_dir), config, typed)
    try:
        return stored if stored is not None and earlier_outcome(run_dir, asdict(stored)) is not None else None
    except ValueError:  # another configuration
        return None


def with_settings_of(before: Mapping[str, Any], config: PPOConfig, typed: Collection[str]) -> PPOConfig | None:
    """The configuration with the settings of a plan that a run has stored; None if the run had none, or other GPUs."""
    from trainer.planner.search import SETTINGS, replaced

    placement, values, now = before["placement"], leaves(before), leaves(asdict(config))
    if placement["layout"] != "auto" or not placement["pools"]:
        return None
    if any(values[key] != now[key] for key in ("trainer.nnodes", "trainer.n_gpus_per_node", "trainer.device")):
        return None
    settings = {key: values[key] for key in now if key.endswith(SETTINGS) and key not in typed and key in values}
    pools = {name: PoolConfig(**pool) for name, pool in placement["pools"].items()}
    chosen = replace(config.placement, pools=pools, roles=PlacedRolesConfig(**placement["roles"]))
    return replace(replaced(config, settings), placement=chosen)


def plan_error(config: PPOConfig) -> Callable[[int, Mapping[str, float]], dict[str, float]] | None:
    """Comparison of predicted and measured times for the steps of a planned run; None for a run with another placement."""
    return PlanError(config) if config.placement.layout == "auto" else None


class PlanError:
    """Compares the time model, for the lengths that the run has had, with the steps that it has taken.

    Called with a step and its metrics. The fifth call returns the metric plan/error and prints a note.
    """

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self._steps: list[Mapping[str, float]] = []

    def __call__(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        if len(self._steps) == STEPS:
            return {}
        self._steps.append(dict(metrics))
        return self.compared() if len(self._steps) == STEPS else {}

    def compared(self) -> dict[str, float]:
        """plan/error: predicted over measured seconds of a step, less 1."""
        from trainer.planner.step_time import phase_times, schedule, step_seconds
        from trainer.planner.time_model import ResponseLengths
        from trainer.ppo.ppo_builder import wants_critic

        def median(key: str) -> float:
            return statistics.median(step.get(key, 0.0) for step in self._steps[1:])

        config, hardware = self.config, cluster_of(self.config).hardware
        lengths = ResponseLengths(
            median("prompt_length/mean"), median("response_length/mean"), round(median("response_length/max"))
        )
        place = placement_of(config, has_critic=wants_critic(config))
        phases = phase_times(config, place, model_shapes(config), hardware, lengths)
        whole, measured = step_seconds(schedule(config, place, phases)), median("timing_s/step")
        seconds = {
            name: (median(f"timing_s/{name}"), sum(phase.seconds for phase in phases if phase.phase in of))
            for name, of in PHASES.items()
        }
        worst = max(seconds, key=lambda name: abs(seconds[name][1] - seconds[name][0]))
        parts = [phase.binds for phase in phases if phase.phase in PHASES[worst] and phase.parts]
        rates = RATES.get(parts[0], parts[0]) if parts else "phase"
        announce(
            [
                f"plan: a step took {measured:.3g} s, {whole:.3g} s predicted ({whole / measured - 1:+.0%}); largest error: "
                f"timing_s/{worst} {seconds[worst][0]:.3g} s, {seconds[worst][1]:.3g} s predicted. To plan better, measure "
                f"{rates} of configs/hardware/{hardware.name}.yaml on this machine (scripts/bench/calibrate.py)"
            ]
        )
        return {"plan/error": whole / measured - 1}
