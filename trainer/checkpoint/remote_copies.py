"""Remote copies of checkpoints: at any address that fsspec supports (s3://, gs://, hdfs://, file:// ...), or at a path.

Object stores have no atomic rename of a directory, so the manifest marks a copy as complete: it is written last, read first and
removed first. A copy without a manifest is incomplete and never used.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from fsspec.core import url_to_fs

from trainer.checkpoint.manifest import INCOMPLETE, MANIFEST, Checkpoint, Damaged, check_files, read_manifest
from trainer.run.events import Events
from trainer.run.run_dir import LATEST, REMOTE, fsync_directory, fsync_tree, redact, write_atomic


def is_url(place: str) -> bool:
    return "://" in place


class Abandoned(Exception):
    """A copy ended before it was complete, since its run has failed."""


class RemoteCopies:
    """Checkpoint copies at ``address``: one directory per checkpoint, with the same name as in the run directory.

    Credentials are left to the fsspec implementation. Raises ValueError for an address that no installed package supports.
    """

    def __init__(self, address: str) -> None:
        self.name: str = redact({"address": address})["address"]
        try:
            self.fs, self.root = url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise ValueError(f"trainer.checkpoint: {self.name}: {error}") from error

    def has(self, checkpoint: Checkpoint) -> bool:
        """Whether a complete copy of exactly this checkpoint is there. Raises what the fsspec implementation raises."""
        self.fs.invalidate_cache()
        manifest = f"{self.root}/{checkpoint.path.name}/{MANIFEST}"
        return bool(self.fs.exists(manifest)) and self.fs.cat_file(manifest) == (checkpoint.path / MANIFEST).read_bytes()

    def put(self, checkpoint: Checkpoint, abandoned: Callable[[], bool] = lambda: False) -> None:
        """Copy all files of ``checkpoint``. Raises what the fsspec implementation raises.

        abandoned: asked before each file; if it is true, Abandoned is raised and the copy remains incomplete.
        """
        run_dir = checkpoint.path.parent
        # Record the copy as this run's before the first file: drop_old can then remove it even if the copy is interrupted.
        _record(run_dir, self._written(run_dir) | {str(checkpoint.step): _hash((checkpoint.path / MANIFEST).read_bytes())}, self)
        target = f"{self.root}/{checkpoint.path.name}"
        # An older copy of the same step, of another run or of this one before a rollback. Its manifest is removed first: with the
        # old manifest next to new files an interrupted copy would look complete.
        if self.fs.exists(f"{target}/{MANIFEST}"):
            self.fs.rm_file(f"{target}/{MANIFEST}")
        for name in (*checkpoint.manifest.files, MANIFEST):
            if abandoned():
                raise Abandoned(f"the copy of step {checkpoint.step} was abandoned")
            self.fs.makedirs(f"{target}/{name}".rpartition("/")[0], exist_ok=True)
            self.fs.put_file(str(checkpoint.path / name), f"{target}/{name}")

    def withdraw_after(self, run_dir: Path, step: int) -> None:
        """Withdraw the copies after ``step`` that the run in ``run_dir`` wrote: a rollback has abandoned these steps.

        Their manifests are renamed, so that no machine resumes from them. Raises what the fsspec implementation raises.
        """
        for later, written in self._written(run_dir).items():
            manifest = f"{self.root}/global_step_{later}/{MANIFEST}"
            if int(later) > step and self.fs.exists(manifest) and _hash(self.fs.cat_file(manifest)) == written:
                self.fs.mv(manifest, f"{manifest}.abandoned")

    def drop_old(self, run_dir: Path, keep: int, *, newest: int, spare: int | None) -> None:
        """Remove old copies that the run in ``run_dir`` wrote. Raises what the fsspec implementation raises.

        Kept are the last ``keep`` copies up to step ``newest``, and the copy of step ``spare``. Copies after ``newest`` belong to
        steps abandoned by a rollback and are removed. A copy that another run has replaced is not touched: the hash of its
        manifest is not the recorded one.
        """
        written = self._written(run_dir)
        kept = {spare, *sorted(step for step in map(int, written) if step <= newest)[-keep:]}
        for step in sorted(written, key=int):
            if int(step) in kept:
                continue
            place = f"{self.root}/global_step_{step}"
            manifest = f"{place}/{MANIFEST}"
            whole = self.fs.exists(manifest)
            if not whole or _hash(self.fs.cat_file(manifest)) == written[step]:
                if whole:  # manifest first: if the removal is interrupted, the rest is an incomplete copy, which is never used
                    self.fs.rm_file(manifest)
                if self.fs.exists(place):
                    self.fs.rm(place, recursive=True)
            # Recorded after each removal, so that an interruption forgets no copy that is still there.
            written = {other: found for other, found in written.items() if other != step}
            _record(run_dir, written, self)

    def _written(self, run_dir: Path) -> dict[str, str]:
        """{step: hash of the manifest} of the copies at this address that the run in ``run_dir`` wrote or began to write."""
        return _records(run_dir).get(self.name, {})

    def steps(self) -> list[int]:
        """Steps of the copies that have a manifest, ascending."""
        # fsspec caches listings, and another machine may have written or removed copies since.
        self.fs.invalidate_cache()
        if not self.fs.exists(self.root):
            return []
        names = [str(path).rstrip("/") for path in self.fs.ls(self.root, detail=False)]
        found = [int(match[1]) for name in names if (match := re.search(r"(?:^|/)global_step_(\d+)$", name))]
        return sorted(step for step in found if self.fs.exists(f"{self.root}/global_step_{step}/{MANIFEST}"))

    def fetch_newest(self, run_dir: Path) -> Checkpoint | None:
        """Fetch the newest complete copy and make it the latest checkpoint of ``run_dir``; None if there is no copy.

        A damaged copy is reported as an event, and the previous one is tried. Raises ValueError if all are damaged.
        """
        wrong = []
        for step in reversed(self.steps()):
            try:
                checkpoint = self.fetch(f"global_step_{step}", run_dir)
            except Damaged as damage:
                wrong.append(str(damage))
                Events(run_dir).add(step, "damaged checkpoint", f"{damage}; the one before it is taken")
            else:
                write_atomic(run_dir / LATEST, str(step))
                Events(run_dir).add(step, "checkpoint", f"fetched from {self.name}")
                return checkpoint
        if wrong:
            raise ValueError(f"no checkpoint in {self.name} is whole: {'; '.join(wrong)}")
        return None

    def fetch(self, name: str, into: Path) -> Checkpoint:
        """Fetch the copy ``name`` to a directory in ``into`` and verify it. An existing directory of that name is replaced.

        Raises Damaged if the copy differs from its manifest, ValueError if ``name`` is not that of a checkpoint.
        """
        source, where = f"{self.root}/{name}", f"{self.name}/{name}"
        if not re.fullmatch(r"global_step_\d+", name):
            raise ValueError(f"{where}: a checkpoint is called global_step_<N>")
        if not self.fs.exists(f"{source}/{MANIFEST}"):
            raise Damaged(f"{where}: no {MANIFEST} in it")
        text = self.fs.cat_file(f"{source}/{MANIFEST}").decode()
        manifest = read_manifest(text, where)
        final = into / name
        partial = final.with_name(name + INCOMPLETE)
        for old in (partial, final):
            if old.exists():
                shutil.rmtree(old)
        try:
            for file in manifest.files:
                (partial / file).parent.mkdir(parents=True, exist_ok=True)
                if self.fs.exists(f"{source}/{file}"):  # check_files reports a missing one as Damaged
                    self.fs.get_file(f"{source}/{file}", str(partial / file))
            check_files(partial, manifest.files)
        except Damaged as damage:
            shutil.rmtree(partial)
            # The message names the remote copy: the local directory has just been removed.
            raise Damaged(str(damage).replace(str(partial), where)) from damage
        write_atomic(partial / MANIFEST, text)
        fsync_tree(partial)
        partial.rename(final)
        fsync_directory(into)
        return Checkpoint(final, manifest)


def _records(run_dir: Path) -> dict[str, dict[str, str]]:
    """Content of remote_copies.json: {address: {step: hash of the manifest}}."""
    path = run_dir / REMOTE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _record(run_dir: Path, written: dict[str, str], copies: RemoteCopies) -> None:
    write_atomic(run_dir / REMOTE, json.dumps(_records(run_dir) | {copies.name: written}, indent=1))


def _hash(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()
