"""Checkpoint manifest: contents, sizes and hashes of a checkpoint's files, and their verification.

global_step_N/  manifest.json
  actor/  shard-00001-of-00008.safetensors ...  config.json  generation_config.json  tokenizer.json ...
  critic/ ...
  flow/   <component>.safetensors ...: arrays of the controller's state, if it has any

A checkpoint may come from a failing disk or an interrupted copy, so every file is compared with the manifest before it is used.
Hashing the weights is the expensive part. On resume the workers do it in parallel (``check_weights``), and the controller hashes
only the small files and flow/.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load
from torch import Tensor

from workers.controller.rpc import worker_call
from workers.engine.saving import hashes_of

if TYPE_CHECKING:
    from trainer.cluster.watchdog import Watchdog
    from workers.controller.group import WorkerGroup

MANIFEST = "manifest.json"
INCOMPLETE = ".incomplete"
WEIGHTS = ".safetensors"
FLOW = "flow"
"""Directory of the controller's arrays. It is not a role: no worker writes or reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint. size: bytes. sha256: hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Content of manifest.json.

    step: global_step, the number of completed training steps. roles: models that were saved, each in a directory of its name.
    world_size: number of ranks that wrote it. code: version and commit of the program that wrote it. config: resolved
    configuration of the run, without secrets. state: state of the controller as JSON (KL coefficient, position in the data, ...).
    metrics: value of trainer.best_metric, if it was measured at this step. files: all files except the manifest, by path within
    the checkpoint.
    """

    step: int
    roles: list[str]
    world_size: int
    code: dict[str, str | None]
    config: dict[str, Any]
    state: dict[str, Any]
    metrics: dict[str, float]
    files: dict[str, FileEntry]


ADDED_STATE = frozenset({"filter_groups", "training_data"})
"""Components that checkpoints of earlier versions lack. An empty state restores their defaults."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint directory with its manifest, which has been read."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    def role(self, name: str) -> Path:
        """Directory from which the role ``name`` is loaded. Raises ValueError if the checkpoint was saved without it."""
        if name not in self.manifest.roles:
            raise ValueError(f"{self.path} was saved without {name}: it holds {', '.join(self.manifest.roles)}")
        return self.path / name

    def state(self, name: str) -> dict[str, Any]:
        """State of the controller's component ``name``; empty for one of ADDED_STATE that the checkpoint was saved without.

        Raises ValueError if it was saved without another one.
        """
        if name not in self.manifest.state:
            if name in ADDED_STATE:
                return {}
            raise ValueError(f"{self.path} was saved without the state of {name}, by another version: see code in its {MANIFEST}")
        return dict(self.manifest.state[name])

    def arrays(self, name: str) -> dict[str, Tensor]:
        """Arrays of the controller's component ``name``; empty if the checkpoint was saved without that component."""
        file = arrays_file(name)
        return load((self.path / file).read_bytes()) if file in self.manifest.files else {}

    def with_arrays(self) -> set[str]:
        """Names of the components whose arrays the checkpoint has."""
        return {PurePosixPath(file).stem for file in self.manifest.files if file.startswith(f"{FLOW}/")}


class Damaged(ValueError):
    """A checkpoint differs from its manifest; the message names the file and the difference."""


def read_manifest(text: str | bytes, where: str) -> Manifest:
    """Parse a manifest, as text or in UTF-8. Raises Damaged if it is invalid or names a path outside the checkpoint.

    where: place that the message names.
    """
    try:
        manifest = TypeAdapter(Manifest).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise Damaged(f"{where}: {MANIFEST} is not whole: {key + ': ' if key else ''}{first['msg']}") from error
    # Fetching a copy creates files by these names, and the copy may come from anywhere: reject absolute paths and "..".
    outside = [name for name in (*manifest.roles, *manifest.files) if _leads_out(name)]
    if outside:
        raise Damaged(f"{where}: {MANIFEST} names {outside[0]!r}, which is not inside the checkpoint")
    return manifest


def read_checkpoint(path: Path, roles: Iterable[str] | None = None, *, weights: bool = True) -> Checkpoint:
    """Read the checkpoint at ``path`` and verify every file of ``roles`` (None: every file). Raises Damaged.

    weights: whether to hash the weights as well. If false, only their names and sizes are compared here, and ``check_weights``
    hashes them on the workers.
    """
    if not (path / MANIFEST).is_file():
        raise Damaged(f"{path}: no {MANIFEST} in it")
    manifest = read_manifest((path / MANIFEST).read_bytes(), str(path))
    folders = [*manifest.roles, FLOW] if roles is None else list(roles)
    # An old checkpoint may have lost a role: actor and critic are kept for different numbers of checkpoints.
    if gone := [role for role in folders if role != FLOW and not (path / role).exists()]:
        raise Damaged(
            f"{path}: of {', '.join(manifest.roles)} it has lost {', '.join(gone)} "
            "(see trainer.max_actor_ckpt_to_keep and its like)"
        )
    wanted = {name: entry for name, entry in manifest.files.items() if "/" not in name or name.split("/")[0] in folders}
    check_files(path, wanted, weights=weights)
    return Checkpoint(path, manifest)


def check_files(path: Path, files: Mapping[str, FileEntry], *, weights: bool = True) -> None:
    """Compare the sizes, then the hashes of ``files`` below ``path``. Raises Damaged. weights: see read_checkpoint."""
    # Sizes first: they need no reading, and an incomplete file is found at once.
    for name, entry in files.items():
        if not (path / name).is_file():
            raise Damaged(f"{path}: {name} is not there")
        if (size := (path / name).stat().st_size) != entry.size:
            raise Damaged(f"{path}: {name} has {size:,} bytes, {MANIFEST} says {entry.size:,}")
    for folder in {(path / name).parent for name in files}:
        for found in folder.glob("*.safetensors"):  # the loader reads every shard in the folder, so a foreign one must not pass
            if (name := found.relative_to(path).as_posix()) not in files:
                raise Damaged(f"{path}: {name} is not of this checkpoint: {MANIFEST} does not name it")
    compare_hashes(path, files, hashes_of(path, [name for name in files if weights or not _is_weights(name)]))


def check_weights(checkpoint: Checkpoint, groups: Mapping[str, WorkerGroup], watchdog: Watchdog) -> None:
    """Hash the weights on the workers and compare with the manifest. Raises Damaged, and PhaseTimeout after ``timeouts.load``.

    groups: {role: workers that will load it}. Each rank reads a part of the files. If as many ranks load as have written, that
    part is the rank's own shard, and the load that follows finds it in the page cache.
    """
    from workers.roles.worker import Worker  # imported late: it loads transformers

    for role in checkpoint.manifest.roles:
        names = sorted(name for name in checkpoint.manifest.files if name.startswith(f"{role}/") and name.endswith(WEIGHTS))
        hashing = worker_call(Worker.hash_files, checkpoint.path, names)
        for found in watchdog.call(groups[role], "load", f"check of {role}", hashing):
            compare_hashes(checkpoint.path, checkpoint.manifest.files, found)


def compare_hashes(path: Path, files: Mapping[str, FileEntry], hashes: Mapping[str, str]) -> None:
    """Raise Damaged for the first of ``hashes`` (hexadecimal, by file) that differs from its entry in ``files``."""
    for name, sha256 in hashes.items():
        if sha256 != files[name].sha256:
            raise Damaged(f"{path}: {name} is not what was written: its sha256 is {sha256[:12]}…, not {files[name].sha256[:12]}…")


def best_step(manifests: Mapping[int, Manifest], best_metric: str) -> int | None:
    """Step with the largest ``best_metric`` (smallest, if the name starts with a minus); the latest one among equals.

    None if no manifest has the metric.
    """
    name, sign = best_metric.removeprefix("-"), -1.0 if best_metric.startswith("-") else 1.0
    measured = [(sign * manifest.metrics[name], step) for step, manifest in manifests.items() if name in manifest.metrics]
    return max(measured)[1] if measured else None


def arrays_file(name: str) -> str:
    """Path, within a checkpoint, of the arrays of the controller's component ``name``."""
    return f"{FLOW}/{name}.safetensors"


def _is_weights(name: str) -> bool:
    return name.endswith(WEIGHTS) and not name.startswith(f"{FLOW}/")


def _leads_out(name: str) -> bool:
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or not path.parts
