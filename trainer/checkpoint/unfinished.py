"""The last steps of a save: manifest and rename; also for a save that a killed run had written but not yet completed.

Workers write a checkpoint in the background, and the controller learns only at its next poll, possibly a whole step later, that
they have finished. A run that is killed in between has lost nothing: its next start finds in ``global_step_N.incomplete`` the
manifest without the workers' files, and one file per rank that lists those (workers/engine/saving.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from trainer.checkpoint.manifest import INCOMPLETE, MANIFEST, Checkpoint, FileEntry, Manifest, read_manifest
from trainer.run.events import Events
from trainer.run.run_dir import LATEST, fsync_directory, fsync_tree, write_atomic
from workers.engine.base import SavedFile
from workers.engine.saving import WRITTEN, declared_files

ANNOUNCED = "manifest.announced.json"


def announce(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a save that begins, without the workers' files, and which checkpoint is the latest at this time."""
    announced = {"latest": _latest(folder.parent), "manifest": asdict(manifest)}
    write_atomic(folder / ANNOUNCED, json.dumps(announced))


def make_whole(folder: Path, manifest: Manifest, written: Mapping[str, Sequence[SavedFile]]) -> Checkpoint:
    """Complete a checkpoint whose files are all in ``folder``: it exists from the rename on.

    manifest: without the files of the workers. written: these, by role.
    """
    files = manifest.files | {f"{role}/{name}": entry for role, some in written.items() for name, entry in entries(some).items()}
    manifest = replace(manifest, files=dict(sorted(files.items())))
    write_atomic(folder / MANIFEST, json.dumps(asdict(manifest), indent=1))
    # Everything is on disk before the rename, and the rename before LATEST names the step.
    fsync_tree(folder)
    final = folder.rename(folder.with_name(folder.name.removesuffix(INCOMPLETE)))
    fsync_directory(final.parent)
    write_atomic(final.parent / LATEST, str(manifest.step))
    # Last: until here a killed save can be completed again.
    remove_announcements(final)
    return Checkpoint(final, manifest)


def complete_interrupted(run_dir: Path) -> None:
    """Complete the save during which the run was killed, if all ranks had written their files; an event reports it.

    Does nothing if LATEST has changed since the save began: the user chose an earlier checkpoint.
    """
    for path in run_dir.glob(f"global_step_*/{ANNOUNCED}"):
        folder, announced = path.parent, json.loads(path.read_text(encoding="utf-8"))
        if announced["latest"] != _latest(run_dir):
            continue
        manifest = read_manifest(json.dumps(announced["manifest"]), str(folder))
        if not folder.name.endswith(INCOMPLETE):  # killed after the rename, before LATEST was written
            write_atomic(run_dir / LATEST, str(manifest.step))
            continue
        written = {role: declared_files(folder / role) for role in manifest.roles}
        known = {role: files for role, files in written.items() if files is not None}
        if len(known) == len(written):
            make_whole(folder, manifest, known)
            Events(run_dir).add(manifest.step, "checkpoint", "completed now: all files were written when the run was killed")


def remove_announcements(checkpoint: Path) -> None:
    """Remove the files that only serve to complete a save."""
    for path in [checkpoint / ANNOUNCED, *checkpoint.glob(f"*/*{WRITTEN}")]:
        path.unlink(missing_ok=True)


def entries(files: Iterable[SavedFile]) -> dict[str, FileEntry]:
    return {file.name: FileEntry(size=file.size, sha256=file.sha256) for file in files}


def _latest(run_dir: Path) -> str | None:
    return (run_dir / LATEST).read_text() if (run_dir / LATEST).exists() else None
