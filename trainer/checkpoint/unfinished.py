"""The last steps of a save: manifest and rename; also for a save that a killed run had written but not yet completed.

Workers write a checkpoint in the background, and the controller learns only at its next poll, possibly a whole step later, that
they have finished. A run that is killed in between has lost nothing: its next start finds in ``global_step_N.incomplete`` the
manifest without the workers' files, and one file per rank that lists those (workers/engine/saving.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from trainer.checkpoint.manifest import INCOMPLETE, MANIFEST, Checkpoint, FileEntry, Manifest, check_files, read_manifest
from trainer.run.events import Events
from trainer.run.run_dir import LATEST, fsync_directory, fsync_tree, write_atomic
from workers.engine.base import SavedFile
from workers.engine.saving import WRITTEN, declared_files

ANNOUNCED = "manifest.announced.json"


def announce(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a save that begins, without the workers' files, and which checkpoint is the latest at this time."""
    announced = {"latest": _latest(folder.parent), "manifest": asdict(manifest)}
    write_atomic(folder / ANNOUNCED, json.dumps(announced))


def with_files(manifest: Manifest, written: Mapping[str, Sequence[SavedFile]]) -> Manifest:
    """Add the files that the workers wrote, by role."""
    files = manifest.files | {f"{role}/{name}": entry for role, some in written.items() for name, entry in entries(some).items()}
    return replace(manifest, files=dict(sorted(files.items())))


def make_whole(folder: Path, manifest: Manifest) -> Checkpoint:
    """Complete a checkpoint whose files, which ``manifest`` names, are all in ``folder``: it exists from the rename on."""
    write_atomic(folder / MANIFEST, json.dumps(asdict(manifest), indent=1))
    # Everything is on disk before the rename, and the rename before LATEST names the step.
    fsync_tree(folder)
    final = folder.rename(folder.with_name(folder.name.removesuffix(INCOMPLETE)))
    fsync_directory(final.parent)
    write_atomic(final.parent / LATEST, str(manifest.step))
    # Last: until here a killed save can be completed again. The checkpoint is complete, whether they can be removed or not.
    with suppress(OSError):
        remove_announcements(final)
    return Checkpoint(final, manifest)


def complete_interrupted(run_dir: Path) -> None:
    """Complete the save during which the run was interrupted, if all ranks had written their files.

    An event reports it, or the reason why it is not possible; the caller removes what stays incomplete. Does nothing if LATEST
    has changed since the save began: the user chose an earlier checkpoint.
    """
    for path in run_dir.glob(f"global_step_*/{ANNOUNCED}"):
        step = int(path.parent.name.removesuffix(INCOMPLETE).rpartition("_")[2])
        try:
            if _complete(path, run_dir):
                Events(run_dir).add(step, "checkpoint", "completed now: all files had been written before the interruption")
        # A full disk, a missing file, or an announcement of another version of this code: as if the save had been interrupted
        # earlier. The checkpoints before it must remain usable.
        except (OSError, ValueError, LookupError, TypeError) as error:
            Events(run_dir).add(step, "checkpoint", f"an interrupted save cannot be completed: {type(error).__name__}: {error}")


def _complete(path: Path, run_dir: Path) -> bool:
    """Complete the save that the file ``path`` announced. Returns whether it was written and incomplete until now."""
    folder, announced = path.parent, json.loads(path.read_text(encoding="utf-8"))
    if announced["latest"] != _latest(run_dir):
        return False
    if not folder.name.endswith(INCOMPLETE):
        # Interrupted after the rename. A LATEST newer than the manifest was written by this save, and then edited by the user
        # back to what it was when the save began.
        latest = run_dir / LATEST
        if not latest.exists() or latest.stat().st_mtime_ns < (folder / MANIFEST).stat().st_mtime_ns:
            write_atomic(latest, folder.name.rpartition("_")[2])
        return False
    manifest = read_manifest(json.dumps(announced["manifest"]), str(folder))
    written = {role: declared_files(folder / role) for role in manifest.roles}
    known = {role: files for role, files in written.items() if files is not None}
    if len(known) < len(written):
        return False
    manifest = with_files(manifest, known)
    # An interrupted removal of the folder may have taken files, and left those that declare them.
    check_files(folder, manifest.files, weights=False)
    make_whole(folder, manifest)
    return True


def remove_announcements(checkpoint: Path) -> None:
    """Remove the files that only serve to complete a save."""
    for path in [checkpoint / ANNOUNCED, *checkpoint.glob(f"*/*{WRITTEN}")]:
        path.unlink(missing_ok=True)


def entries(files: Iterable[SavedFile]) -> dict[str, FileEntry]:
    return {file.name: FileEntry(size=file.size, sha256=file.sha256) for file in files}


def _latest(run_dir: Path) -> str | None:
    return (run_dir / LATEST).read_text() if (run_dir / LATEST).exists() else None
