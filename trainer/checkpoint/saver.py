"""Writing checkpoints: a directory that is whole or absent, and a run that outlives a disk that is full.

All is written under ``global_step_N.incomplete``, brought to disk, and renamed: the rename is the moment at which the
checkpoint exists. Then the small files that name the latest and the best one move, and only then do old ones go, and a copy is
sent where one is wanted. What a killed run left under an incomplete name is removed when the next one starts.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.schema.common import CheckpointConfig
from trainer.checkpoint.manifest import (
    INCOMPLETE,
    MANIFEST,
    Checkpoint,
    Damaged,
    FileEntry,
    Manifest,
    best_step,
    code_version,
    read_manifest,
)
from trainer.checkpoint.remote_copies import RemoteCopies
from trainer.cluster.remote import RemoteModel, SaveFailed
from trainer.run.errors import Found, NotSaved
from trainer.run.events import Events
from trainer.run.run_dir import BEST, LATEST, checkpoint_dir, checkpoint_steps, fsync_directory, fsync_tree, redact, write_atomic
from workers.controller.group import PhaseTimeout
from workers.controller.logs import tell
from workers.engine.base import Saved
from workers.engine.saving import in_background, saved_files
from workers.host_memory import GB


@dataclass(frozen=True, slots=True)
class Pending:
    """A checkpoint in the making: its directory under the incomplete name, and who writes into it.

    extra_files: files in each role that are not the workers'. started: by time.monotonic(). waited: seconds that training
    waited.
    """

    folder: Path
    step: int
    models: Mapping[str, RemoteModel]
    state: dict[str, Any]
    metrics: dict[str, float]
    extra_files: tuple[str, ...]
    started: float
    waited: float


class Saver:
    """Saves a run's checkpoints. What goes wrong with a disk is told, and the next save tried; ``finish`` knows of the last one,
    and comes at the end of a ``with saver``.

    keep: how many checkpoints of each role stay, the newest; None: all. best_metric: see configs/ppo_trainer.yaml.
    """

    def __init__(
        self,
        run_dir: Path,
        events: Events,
        *,
        config: Mapping[str, Any],
        world_size: int,
        keep: Mapping[str, int | None],
        options: CheckpointConfig,
        best_metric: str | None,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.run_dir = run_dir
        self.events = events
        self.config = redact(config)
        self.world_size = world_size
        self.keep = keep
        self.background = options.async_save
        self.copies = RemoteCopies(options.remote_dir) if options.remote_dir is not None else None
        self.best_metric = best_metric
        self.tokenizer = tokenizer
        self.problem: str | None = None
        self._pending: Pending | None = None
        self.copies_kept = options.max_remote_ckpt_to_keep
        self._copying: tuple[int, Future[Exception | None]] | None = None
        self._unmeasured = False
        self._longest = 0.0
        self._figures: dict[str, float] = {}

    def save(
        self,
        step: int,
        models: Mapping[str, RemoteModel],
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
        *,
        extra_files: Mapping[str, bytes] | None = None,
    ) -> None:
        """A checkpoint after ``step``, each model in a directory of its name. One at a time: it waits for the one before.

        state: the controller's. metrics: the step's. extra_files: files that go with each model, besides the tokenizer's. With
        async_save it returns when the models' state is copied to the host.
        """
        started = time.monotonic()
        self.settle()
        folder = _incomplete(checkpoint_dir(self.run_dir, step))
        with self._disk_may_fail(step, folder):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
            controller_files = self._tokenizer_files | dict(extra_files or {})
            for role in models:
                _write(controller_files, folder / role)
            for role, model in models.items():
                model.save(str(folder / role), background=self.background)
                if not self.background:
                    model.saved()
            plain_state = json.loads(json.dumps(state))  # as it is now: in the background the run goes on
            chosen_by, waited = self._measured(step, metrics), time.monotonic() - started
            self._pending = Pending(folder, step, models, plain_state, chosen_by, tuple(controller_files), started, waited)
        if not self.background:
            self.settle()

    def settle(self, *, patient: bool = True) -> None:
        """Complete what the workers have written since, and see to its copy. Not patient: what is ready; for after every step."""
        if self._pending is not None:
            pending = self._pending
            with self._disk_may_fail(pending.step, pending.folder):
                saved = self._written(pending, patient=patient)
                if saved is not None:
                    self._pending = None
                    checkpoint = self._make_whole(pending, saved)
                    self._record(pending, [*saved.values()])
                    self._completed(checkpoint)
        if self._copying is not None and (patient or self._copying[1].done()):
            self._tell_of_copy(*self._copying)
            self._copying = None

    def has(self, step: int) -> bool:
        """Whether a checkpoint of this step is there, or in the making."""
        being_made = self._pending is not None and self._pending.step == step
        return being_made or checkpoint_dir(self.run_dir, step).exists()

    def seconds(self) -> float:
        """The longest time from a save's begin until all is on disk, so far; 0 before the first."""
        under_way = 0.0 if self._pending is None else time.monotonic() - self._pending.started
        return max(self._longest, under_way)

    def figures(self) -> dict[str, float]:
        """Metrics of the last checkpoint that has become complete, once: for the line of the step that runs meanwhile."""
        self.settle(patient=False)
        figures, self._figures = self._figures, {}
        return figures

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """A run that ends for what it found ends with what it saved; where workers are gone, so is what they were writing."""
        if kind is None:
            self.finish()
        elif issubclass(kind, Found):
            self.settle()

    def finish(self) -> None:
        """To be called at the end of a run. Raises NotSaved if the last checkpoint is not where it should be."""
        self.settle()
        if self._figures:
            waited, size, seconds, speed = self._figures.values()
            tell(f"last checkpoint: training waited {waited:.1f} s; {size:.3g} GB written in {seconds:.1f} s ({speed:.2f} GB/s)")
        if self.problem is not None:
            last = (self.run_dir / LATEST).read_text() if (self.run_dir / LATEST).exists() else None
            found = f"the last whole one is {checkpoint_dir(self.run_dir, int(last))}" if last else "there is none"
            raise NotSaved(f"the last checkpoint is missing: {self.problem}; {found}")

    def _written(self, pending: Pending, *, patient: bool) -> dict[str, Saved] | None:
        """By role, what it wrote; None while one is still at it. Raises SaveFailed when all have ended and one could not."""
        saved: dict[str, Saved] = {}
        problems: list[str] = []
        for role, model in pending.models.items():
            try:
                found = model.saved(patient=patient)
            except SaveFailed as error:
                problems.append(str(error))
                continue
            if found is None:
                return None
            saved[role] = found
        if problems:
            raise SaveFailed("; ".join(problems))
        return saved

    def _record(self, pending: Pending, saved: Sequence[Saved]) -> None:
        """What it took. Models are written at the same time in the background, and one after the other where training waits."""
        size = sum(one.bytes for one in saved) / GB
        seconds = (max if self.background else sum)(one.seconds for one in saved)
        self._figures = {
            "timing_s/save_checkpoint": pending.waited,
            "perf/checkpoint_gb": size,
            "perf/checkpoint_write_s": seconds,
            "perf/checkpoint_gb_per_s": size / seconds,
        }
        self._longest = max(self._longest, pending.waited + (seconds if self.background else 0.0))
        for reason in dict.fromkeys(one.waited_for for one in saved if one.waited_for is not None):
            self.events.add(pending.step, "checkpoint", f"written while training waited: {reason}")

    def _make_whole(self, pending: Pending, saved: Mapping[str, Saved]) -> Checkpoint:
        controller_files = [f"{role}/{name}" for role in pending.models for name in pending.extra_files]
        files = {
            file.name: FileEntry(size=file.size, sha256=file.sha256) for file in saved_files(pending.folder, controller_files)
        }
        for role, one in saved.items():
            files |= {f"{role}/{file.name}": FileEntry(size=file.size, sha256=file.sha256) for file in one.files}
        manifest = Manifest(
            step=pending.step,
            roles=sorted(pending.models),
            world_size=self.world_size,
            code=code_version(),
            config=self.config,
            state=pending.state,
            metrics=pending.metrics,
            files=dict(sorted(files.items())),
        )
        write_atomic(pending.folder / MANIFEST, json.dumps(asdict(manifest), indent=1))
        fsync_tree(pending.folder)
        final = pending.folder.rename(checkpoint_dir(self.run_dir, pending.step))
        fsync_directory(self.run_dir)
        write_atomic(self.run_dir / LATEST, str(pending.step))
        self.problem = None
        return Checkpoint(final, manifest)

    def _completed(self, checkpoint: Checkpoint) -> None:
        """What follows from there being a new one. The new one is whole already, whatever fails here."""
        best = None
        try:
            best = self._name_best()
            for role, keep in self.keep.items():
                if keep is not None:
                    _drop_old(self.run_dir, role, keep, spare=best)
        except OSError as error:
            self.events.add(checkpoint.step, "checkpoint", f"old ones were not removed: {error}")
        if self.copies is not None:
            self._copying = checkpoint.step, in_background(partial(self._copy, self.copies, checkpoint, best))

    def _copy(self, copies: RemoteCopies, checkpoint: Checkpoint, best: int | None) -> Exception | None:
        """Copy it, and remove old copies. Returns what prevented the removal; raises what prevented the copy."""
        copies.put(checkpoint)
        if self.copies_kept is not None:
            try:
                copies.drop_old(self.run_dir, self.copies_kept, newest=checkpoint.step, spare=best)
            except Exception as error:  # an implementation's own
                return error
        return None

    def _tell_of_copy(self, step: int, copy: Future[Exception | None]) -> None:
        assert self.copies is not None
        if (error := copy.exception()) is not None:
            self.problem = f"step {step} is not copied to {self.copies.name}: {type(error).__name__}: {error}"
            self.events.add(step, "checkpoint", f"not copied to {self.copies.name}: {type(error).__name__}: {error}")
        elif (left := copy.result()) is not None:
            self.events.add(
                step, "checkpoint", f"old copies in {self.copies.name} were not removed: {type(left).__name__}: {left}"
            )

    def _measured(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metric that chooses the best, if this step has it."""
        if self.best_metric is None:
            return {}
        name = self.best_metric.removeprefix("-")
        if name in metrics:
            return {name: metrics[name]} if math.isfinite(metrics[name]) else {}
        if not self._unmeasured:
            self._unmeasured = True
            self.events.add(step, "checkpoint", f"cannot become the best: this step did not measure trainer.best_metric={name}")
        return {}

    def _name_best(self) -> int | None:
        """best_checkpointed_iteration.txt, and an event when another one is the best. Returns its step."""
        if self.best_metric is None:
            return None
        manifests = _manifests(self.run_dir)
        best = best_step(manifests, self.best_metric)
        named = (self.run_dir / BEST).read_text() if (self.run_dir / BEST).exists() else None
        if best is not None and str(best) != named:
            write_atomic(self.run_dir / BEST, str(best))
            name = self.best_metric.removeprefix("-")
            self.events.add(best, "best checkpoint", f"{name} = {manifests[best].metrics[name]:.6g}: it is kept")
        return best

    @contextmanager
    def _disk_may_fail(self, step: int, folder: Path) -> Iterator[None]:
        """OSError: told, remembered, and what was written removed."""
        try:
            yield
        except PhaseTimeout:  # an OSError too, and not the disk's
            raise
        except OSError as error:
            self._pending = None
            shutil.rmtree(folder, ignore_errors=True)
            self.problem = f"step {step}: {error}"
            self.events.add(step, "checkpoint", f"not saved: {error}; the run goes on, the next save is tried")

    @cached_property
    def _tokenizer_files(self) -> dict[str, bytes]:
        """{path below the role's directory: content}: they never change."""
        with TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
            return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def _write(files: Mapping[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _incomplete(path: Path) -> Path:
    return path.with_name(path.name + INCOMPLETE)


def _manifests(run_dir: Path) -> dict[int, Manifest]:
    """Of the checkpoints that have all their roles, by step."""
    found = {}
    for step in checkpoint_steps(run_dir):
        path = checkpoint_dir(run_dir, step)
        try:
            manifest = read_manifest((path / MANIFEST).read_text(encoding="utf-8"), str(path))
        except (FileNotFoundError, Damaged):  # whoever resumes from it is told
            continue
        if all((path / role).exists() for role in manifest.roles):
            found[step] = manifest
    return found


def _drop_old(run_dir: Path, role: str, keep: int, *, spare: int | None) -> None:
    """Remove ``role`` from all but the ``keep`` newest checkpoints that have it, and ``spare``; one without roles goes too."""
    holding = [step for step in checkpoint_steps(run_dir) if (checkpoint_dir(run_dir, step) / role).exists()]
    for step in holding[:-keep]:
        if step != spare:
            checkpoint = checkpoint_dir(run_dir, step)
            _remove(checkpoint / role)
            if not any(child.is_dir() for child in checkpoint.iterdir()):
                _remove(checkpoint)


def _remove(path: Path) -> None:
    """Take the name away first: a half-removed directory never looks like a whole one."""
    leaving = path.rename(_incomplete(path))
    shutil.rmtree(leaving)
