"""Write checkpoints atomically and in the background, and keep training when the disk fails.

A run may be killed, or lose power, at any time during a save, and must find a complete checkpoint afterwards. The order of
writes guarantees that:

1. Workers and controller write all files to ``global_step_N.incomplete``, the manifest last, and fsync them.
2. The directory is renamed to ``global_step_N``. From this moment the checkpoint exists.
3. latest_checkpointed_iteration.txt is replaced, then best_checkpointed_iteration.txt.
4. Only now are old checkpoints removed and the remote copy started.

Directories with an incomplete name are leftovers of a killed run; the next start completes them or removes them.

With async_save training waits only until the state is copied to host memory (12 bytes per parameter in float32, over all
ranks), by all pools at the same time. Threads on the workers write while the next steps run, and the controller performs steps 2
to 4 when it next polls them. If the run is killed between the last written byte and that poll, its next start performs steps 2
and 3 (see unfinished.py). One save is in progress at a time. An OSError abandons the save, is reported as an event, and the next
save is tried as usual; only the last save of a run makes the run fail.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configs.schema.common import CheckpointConfig
from trainer.checkpoint.manifest import (
    FLOW,
    INCOMPLETE,
    MANIFEST,
    Checkpoint,
    Damaged,
    Manifest,
    arrays_file,
    best_step,
    read_checkpoint,
    read_manifest,
)
from trainer.checkpoint.remote_copies import RemoteCopies
from trainer.checkpoint.unfinished import announce, complete_interrupted, entries, make_whole, with_files
from trainer.cluster.concurrency import Together
from trainer.cluster.remote import RemoteModel, SaveFailed
from trainer.run.errors import CheckFailed, NotSaved
from trainer.run.events import Events
from trainer.run.provenance import code_version, command_line
from trainer.run.run_dir import BEST, LATEST, checkpoint_dir, checkpoint_steps, redact, write_atomic
from workers.controller.group import PhaseTimeout
from workers.controller.logs import tell
from workers.engine.base import Saved
from workers.engine.saving import in_background, saved_files
from workers.host_memory import GB

COPY_SECONDS = 300.0  # limit for the file of a remote copy that is being written when an attempt fails


@dataclass(frozen=True, slots=True)
class Pending:
    """A checkpoint that is being written.

    folder: its directory, under the incomplete name. models: by role, which write into it. manifest: without their files.
    started: time.monotonic() at the start of the save. waited: seconds for which training waited.
    """

    folder: Path
    models: Mapping[str, RemoteModel]
    manifest: Manifest
    started: float
    waited: float

    @property
    def step(self) -> int:
        return self.manifest.step


class Saver:
    """Writes the checkpoints of a run and removes old ones.

    A disk error is reported as an event and does not stop training. ``finish``, which the end of a ``with saver`` calls, raises
    NotSaved if the last checkpoint is missing.

    keep: {role: number of newest checkpoints that keep it}; None: all. best_metric: see configs/ppo_trainer.yaml.
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
        self._abandoned = Event()  # set when no more files are to be copied
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
        arrays: Mapping[str, Mapping[str, Tensor]] | None = None,
        extra_files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write a checkpoint of ``step``, with each model in a directory of its name. Waits for the previous save first.

        state: of the controller's components. metrics: of the step. arrays: of those components whose state has tensors, by
        component. extra_files: {name: content} saved with each model in addition to the tokenizer.
        With async_save it returns when the state of all models is copied to host memory.
        """
        started = time.monotonic()
        # First: a copy of the arrays, which training modifies.
        flow = {arrays_file(name): _serialized(tensors) for name, tensors in (arrays or {}).items()}
        # Workers write one save at a time, see ModelRole.save.
        self.finish_pending()
        folder = _incomplete(checkpoint_dir(self.run_dir, step))
        with self._disk_may_fail(step, folder):
            if folder.exists():  # left by a failed save of this step
                shutil.rmtree(folder)
            folder.mkdir()
            controller_files = self._tokenizer_files | dict(extra_files or {})
            for role in models:
                _write(controller_files, folder / role)
            _write(flow, folder)
            names = [f"{role}/{name}" for role in models for name in controller_files] + [*flow]
            manifest = Manifest(
                step=step,
                roles=sorted(models),
                world_size=self.world_size,
                code=code_version() | {"command": command_line()},
                config=self.config,
                state=json.loads(json.dumps(state)),  # a deep copy: in the background training modifies the state meanwhile
                metrics=self._measured(step, metrics),
                files=entries(saved_files(folder, names)),
            )
            if self.background:
                # Before the workers write: the next start completes only a save that was announced.
                announce(folder, manifest)
                pools = Together({role: model.group for role, model in models.items()}, self.world_size)
                pools({role: partial(model.save, str(folder / role), background=True) for role, model in models.items()})
            else:
                # Each model is written before the next one starts.
                for role, model in models.items():
                    model.save(str(folder / role))
                    model.saved()
            self._pending = Pending(folder, models, manifest, started, time.monotonic() - started)
        if not self.background:
            self.finish_pending()

    def finish_pending(self, *, patient: bool = True) -> None:
        """Complete the pending checkpoint, and report the result of a remote copy.

        patient: wait for both. Otherwise return at once if they are not ready; the loop calls it in this way after every step.
        """
        if self._pending is not None:
            pending = self._pending
            with self._disk_may_fail(pending.step, pending.folder):
                saved = self._written(pending, patient=patient)
                if saved is not None:
                    self._pending = None
                    files = {role: one.files for role, one in saved.items()}
                    checkpoint = make_whole(pending.folder, with_files(pending.manifest, files))
                    # A complete checkpoint makes up for an earlier failure: only the last save of a run makes it fail.
                    self.problem = None
                    self._record(pending, [*saved.values()])
                    self._completed(checkpoint)
        if self._copying is not None and (patient or self._copying[1].done()):
            self._report_copy(*self._copying)
            self._copying = None

    def has(self, step: int) -> bool:
        """Whether a checkpoint of this step exists or is being written."""
        being_made = self._pending is not None and self._pending.step == step
        return being_made or checkpoint_dir(self.run_dir, step).exists()

    def seconds(self) -> float:
        """Longest time so far from the start of a save until everything is on disk; 0 before the first save."""
        # A save in progress counts with its time so far: it may already be longer than all before it.
        under_way = 0.0 if self._pending is None else time.monotonic() - self._pending.started
        return max(self._longest, under_way)

    def figures(self) -> dict[str, float]:
        """Metrics of the last completed checkpoint, returned once, for the metrics line of the current step."""
        self.finish_pending(patient=False)
        figures, self._figures = self._figures, {}
        return figures

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Complete the pending save after a normal end, or after CheckFailed: a run that an alarm stops keeps what it saved.

        After any other exception the workers may be gone: the save is completed only if they had written all files. A remote copy
        ends after the file that is being copied: a restart writes copies of its own, and this one would remove them as older.
        """
        if kind is None:
            self.finish()
        elif issubclass(kind, CheckFailed):
            self.finish_pending()
        else:
            if self._pending is not None:
                with suppress(OSError):  # must not replace the exception of the run; the next start tries again
                    complete_interrupted(self.run_dir)
            self._abandoned.set()
            # Not if the user ends the program: with it the thread ends.
            if self._copying is not None and issubclass(kind, Exception):
                step, copy = self._copying
                if wait([copy], COPY_SECONDS).not_done:
                    self.events.add(step, "checkpoint", f"its copy has not ended within {COPY_SECONDS:.0f} s")

    def go_back(self, step: int) -> None:
        """Withdraw remote copies after ``step``, to which the run was rolled back. A failure is reported as an event."""
        if self.copies is None:
            return
        try:
            self.copies.withdraw_after(self.run_dir, step)
        except Exception as error:  # each fsspec implementation has exception types of its own
            where = f"copies after step {step} in {self.copies.name} are still there"
            self.events.add(step, "checkpoint", f"{where}, though the run was rolled back: {type(error).__name__}: {error}")

    def finish(self) -> None:
        """Complete the last save and print its figures. Raises NotSaved if it, or its remote copy, failed."""
        self.finish_pending()
        self._copy_last()
        if self._figures:
            waited, size, seconds, speed = self._figures.values()
            tell(f"last checkpoint: training waited {waited:.1f} s; {size:.3g} GB written in {seconds:.1f} s ({speed:.2f} GB/s)")
        if self.problem is not None:
            last = (self.run_dir / LATEST).read_text() if (self.run_dir / LATEST).exists() else None
            found = f"the last whole one is {checkpoint_dir(self.run_dir, int(last))}" if last else "there is none"
            raise NotSaved(f"the last checkpoint is missing: {self.problem}; {found}")

    def _written(self, pending: Pending, *, patient: bool) -> dict[str, Saved] | None:
        """What each role wrote; None while one is still writing. Raises SaveFailed when all have ended and one has failed."""
        saved: dict[str, Saved] = {}
        problems: list[str] = []
        for role, model in pending.models.items():
            try:
                found = model.saved(patient=patient)
            except SaveFailed as error:  # raised below, when no role writes into the folder any more: it is then removed
                problems.append(str(error))
                continue
            if found is None:
                return None
            saved[role] = found
        if problems:
            raise SaveFailed("; ".join(problems))
        return saved

    def _record(self, pending: Pending, saved: Sequence[Saved]) -> None:
        """Record size and time of a save as metrics."""
        size = sum(one.bytes for one in saved) / GB
        # Background saves of several models overlap, so the slowest one counts; in the foreground they follow one another.
        seconds = (max if self.background else sum)(one.seconds for one in saved)
        self._figures = {
            "timing_s/save_checkpoint": pending.waited,
            "perf/checkpoint_gb": size,
            "perf/checkpoint_write_s": seconds,
            "perf/checkpoint_gb_per_s": size / seconds,
        }
        # In the foreground the time of waiting contains that of writing.
        self._longest = max(self._longest, pending.waited + (seconds if self.background else 0.0))
        for reason in dict.fromkeys(one.waited_for for one in saved if one.waited_for is not None):
            self.events.add(pending.step, "checkpoint", f"written while training waited: {reason}")

    def _completed(self, checkpoint: Checkpoint) -> None:
        """Update the best checkpoint, remove old ones and start the remote copy.

        The new checkpoint is complete already: a failure in here does not affect it, and is reported as an event.
        """
        best = None
        try:
            best = self._name_best()
            for role, keep in self.keep.items():
                if keep is not None:
                    _drop_old(self.run_dir, role, keep, spare=best)
        except OSError as error:
            self.events.add(checkpoint.step, "checkpoint", f"old ones were not removed: {error}")
        # At most one copy at a time: save() settles the previous one first.
        if self.copies is not None:
            self._copying = checkpoint.step, in_background(partial(self._copy, self.copies, checkpoint, best))

    def _copy_last(self) -> None:
        """Copy the latest checkpoint if it has no copy, and wait: the run was killed before that, in or after its last save."""
        latest = self.run_dir / LATEST
        if self.copies is None or self.problem is not None or not latest.exists():
            return
        checkpoint = read_checkpoint(checkpoint_dir(self.run_dir, int(latest.read_text())), weights=False)
        self._copying = checkpoint.step, in_background(partial(self._copy_if_missing, self.copies, checkpoint))
        self.finish_pending()

    def _copy_if_missing(self, copies: RemoteCopies, checkpoint: Checkpoint) -> Exception | None:
        return None if copies.has(checkpoint) else self._copy(copies, checkpoint, self._name_best())

    def _copy(self, copies: RemoteCopies, checkpoint: Checkpoint, best: int | None) -> Exception | None:
        """Copy the checkpoint and remove old copies. Runs in a thread, so that a slow remote does not delay training.

        Returns the exception that prevented the removal, if any; raises the one that prevented the copy.
        """
        copies.put(checkpoint, self._abandoned.is_set)
        if self.copies_kept is not None:
            try:
                copies.drop_old(self.run_dir, self.copies_kept, newest=checkpoint.step, spare=best)
            except Exception as error:  # each fsspec implementation has exception types of its own
                return error
        return None

    def _report_copy(self, step: int, copy: Future[Exception | None]) -> None:
        """Report a failed copy, which is a problem if it is the last one, or a failed removal, which is not."""
        assert self.copies is not None
        if (error := copy.exception()) is not None:
            self.problem = f"step {step} is not copied to {self.copies.name}: {type(error).__name__}: {error}"
            self.events.add(step, "checkpoint", f"not copied to {self.copies.name}: {type(error).__name__}: {error}")
        elif (left := copy.result()) is not None:
            self.events.add(
                step, "checkpoint", f"old copies in {self.copies.name} were not removed: {type(left).__name__}: {left}"
            )

    def _measured(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """The value of best_metric, if this step measured it and it is finite. A step without it is reported once."""
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
        """Update best_checkpointed_iteration.txt, with an event if the best checkpoint has changed. Returns its step."""
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
        """On OSError, abandon the save: remove its files, report an event, and remember the problem for ``finish``."""
        try:
            yield
        except PhaseTimeout:  # a TimeoutError and thus an OSError, but not an error of the disk
            raise
        except OSError as error:
            self._pending = None
            shutil.rmtree(folder, ignore_errors=True)
            self.problem = f"step {step}: {error}"
            self.events.add(step, "checkpoint", f"not saved: {error}; the run continues, the next save is tried")

    @cached_property
    def _tokenizer_files(self) -> dict[str, bytes]:
        """{path below the role's directory: content} of the tokenizer, which never changes during a run."""
        with TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
            return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def _write(files: Mapping[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _serialized(tensors: Mapping[str, Tensor]) -> bytes:
    """Content of a safetensors file."""
    # Copies: the format's writer refuses tensors that share memory or are not contiguous, such as columns of one batch.
    return save({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()})


def _incomplete(path: Path) -> Path:
    return path.with_name(path.name + INCOMPLETE)


def _manifests(run_dir: Path) -> dict[int, Manifest]:
    """{step: manifest} of the checkpoints that still have all their roles. Unreadable ones are skipped."""
    found = {}
    for step in checkpoint_steps(run_dir):
        path = checkpoint_dir(run_dir, step)
        try:
            manifest = read_manifest((path / MANIFEST).read_bytes(), str(path))
        except (FileNotFoundError, Damaged):  # a resume from it reports the damage
            continue
        if all((path / role).exists() for role in manifest.roles):
            found[step] = manifest
    return found


def _drop_old(run_dir: Path, role: str, keep: int, *, spare: int | None) -> None:
    """Remove ``role`` from all checkpoints that have it, except the ``keep`` newest and that of step ``spare``.

    A checkpoint that has lost its last role is removed altogether. The arrays of the controller are removed with the first role:
    only a run that resumes reads them, and it needs all roles.
    """
    holding = [step for step in checkpoint_steps(run_dir) if (checkpoint_dir(run_dir, step) / role).exists()]
    for step in holding[:-keep]:
        if step != spare:
            checkpoint = checkpoint_dir(run_dir, step)
            _remove(checkpoint / role)
            if (checkpoint / FLOW).exists():
                _remove(checkpoint / FLOW)
            if not any(child.is_dir() for child in checkpoint.iterdir()):
                _remove(checkpoint)


def _remove(path: Path) -> None:
    """Remove a directory; it is renamed first, so that a partly removed directory never looks complete."""
    leaving = path.rename(_incomplete(path))
    shutil.rmtree(leaving)
