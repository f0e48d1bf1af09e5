"""Interrupted saves that cannot be completed, and completed ones that the user or the rest of the run still has to deal with."""

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer.checkpoints import is_complete, models, names, responses, save, saver, wait_for_threads
from trainer.checkpoint import unfinished
from trainer.checkpoint.manifest import MANIFEST, read_checkpoint
from trainer.checkpoint.remote_copies import RemoteCopies
from trainer.checkpoint.resume import resolve_resume
from trainer.run.run_dir import EVENTS, LATEST, read_lines


def interrupt(run_dir: Path, step: int = 4) -> Path:
    """Write a save of ``step`` that is not completed, as a run killed before the controller's poll leaves it."""
    written = models(step)
    saver(run_dir, async_save=True).save(step, written, {}, {}, arrays=responses(step))
    wait_for_threads(written)
    return run_dir / f"global_step_{step}.incomplete"


def resumed_step(run_dir: Path) -> int | None:
    checkpoint = resolve_resume("auto", None, run_dir)
    return None if checkpoint is None else checkpoint.step


def events(run_dir: Path) -> list[str]:
    return [event["text"] for event in read_lines(run_dir / EVENTS)]


def remove_a_shard(folder: Path) -> None:
    next(folder.glob("actor/*.safetensors")).unlink()


def change_the_arrays(folder: Path) -> None:
    """Keep the size."""
    file = folder / "flow/groups.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")


def of_a_newer_version(folder: Path) -> None:
    announced = json.loads((folder / unfinished.ANNOUNCED).read_text())
    announced["manifest"]["added_since"] = announced["manifest"].pop("state")
    (folder / unfinished.ANNOUNCED).write_text(json.dumps(announced))


def with_other_lists_of_files(folder: Path) -> None:
    listed = next(folder.glob("*/*.written"))
    listed.write_text(json.dumps([file | {"added_since": 1} for file in json.loads(listed.read_text())]))


CANNOT: dict[str, tuple[Callable[[Path], None], str]] = {
    "a removal was interrupted": (remove_a_shard, "Damaged: .* is not there"),
    "the arrays are not those written": (change_the_arrays, "Damaged: .* flow/groups.safetensors is not what was written"),
    "the announcement is another version's": (of_a_newer_version, "Damaged: .* manifest.json is not whole: state"),
    "the list of files is another version's": (with_other_lists_of_files, "TypeError: .*added_since"),
}


@pytest.mark.parametrize("before", [2, None], ids=["after another", "the first"])
@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_completed_is_removed_and_reported(name: str, before: int | None, tmp_path: Path) -> None:
    spoil, reason = CANNOT[name]
    if before is not None:
        save(tmp_path, before)
    spoil(interrupt(tmp_path))
    assert resumed_step(tmp_path) == before
    assert not [left for left in names(tmp_path) if left.endswith(".incomplete")]
    (text,) = events(tmp_path)
    assert re.match(f"an interrupted save cannot be completed: {reason}", text), text


def test_a_full_disk_costs_the_interrupted_save_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 2)
    interrupt(tmp_path)

    def write_atomic(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(unfinished, "write_atomic", write_atomic)
    assert resumed_step(tmp_path) == 2 and names(tmp_path) == {"global_step_2", LATEST, EVENTS}
    assert "No space left on device" in events(tmp_path)[0]


@pytest.mark.parametrize("edited", [False, True])
def test_interrupted_after_the_rename_a_later_edit_of_the_latest_step_is_kept(
    edited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the edit, LATEST is older than the checkpoint, and is brought up to date."""
    save(tmp_path, 2)
    interrupt(tmp_path)
    monkeypatch.setattr(unfinished, "remove_announcements", lambda checkpoint: None)
    unfinished.complete_interrupted(tmp_path)
    monkeypatch.undo()
    assert (tmp_path / "global_step_4" / unfinished.ANNOUNCED).exists() and (tmp_path / LATEST).read_text() == "4"
    (tmp_path / LATEST).write_text("2")
    written = (tmp_path / "global_step_4" / MANIFEST).stat().st_mtime_ns
    os.utime(tmp_path / LATEST, ns=(written, written + 10**9 if edited else written - 10**9))
    assert resumed_step(tmp_path) == (2 if edited else 4)
    assert not (tmp_path / "global_step_4" / unfinished.ANNOUNCED).exists()


def test_announcements_that_cannot_be_removed_do_not_cost_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def remove_announcements(checkpoint: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(unfinished, "remove_announcements", remove_announcements)
    saving = saver(tmp_path, async_save=True)
    saving.save(2, models(2), {}, {})
    saving.finish()
    assert is_complete(tmp_path / "global_step_2", 2) and (tmp_path / LATEST).read_text() == "2" and saving.problem is None


@pytest.mark.parametrize("copied", [False, True])
def test_a_completed_last_save_is_copied_when_the_run_ends(copied: bool, tmp_path: Path) -> None:
    run_dir, remote = tmp_path / "run", tmp_path / "remote"
    interrupt(run_dir)
    assert resumed_step(run_dir) == 4
    copies = RemoteCopies(str(remote))
    if copied:
        copies.put(read_checkpoint(run_dir / "global_step_4"))
    before = {path: path.stat().st_mtime_ns for path in remote.rglob("*") if path.is_file()}
    saver(run_dir, remote_dir=str(remote)).finish()
    assert copies.steps() == [4]
    if copied:
        assert before == {path: path.stat().st_mtime_ns for path in remote.rglob("*") if path.is_file()}
