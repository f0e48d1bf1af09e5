import contextlib
import errno
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Event, Timer
from typing import Any
from unittest.mock import Mock

import pytest

import trainer
from tests.layout.source import ROOT
from tests.trainer.checkpoints import (
    CONFIG,
    ROLES,
    content,
    equal,
    is_complete,
    models,
    names,
    responses,
    save,
    saver,
    wait_for_threads,
)
from trainer.checkpoint.manifest import read_checkpoint
from trainer.checkpoint.remote_copies import RemoteCopies
from trainer.checkpoint.resume import check_config, find_latest, resolve_resume
from trainer.run.errors import CheckFailed, NotSaved
from trainer.run.run_dir import EVENTS, read_lines, start_run

LATEST = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"
FULL = OSError(errno.ENOSPC, "No space left on device")


def resume(run_dir: Path) -> int | None:
    checkpoint = resolve_resume("auto", None, run_dir)
    return None if checkpoint is None else checkpoint.step


def events_of(run_dir: Path) -> list[tuple[int, str, str]]:
    return [(event["step"], event["kind"], event["text"]) for event in read_lines(run_dir / EVENTS)]


def checkpoints(run_dir: Path) -> set[str]:
    return {name for name in names(run_dir) if name.startswith("global_step_")}


def test_saved_checkpoint_is_found_and_complete(tmp_path: Path) -> None:
    save(tmp_path, 5, 10)
    checkpoint = find_latest(tmp_path)
    assert checkpoint is not None and checkpoint.path == tmp_path / "global_step_10" and is_complete(checkpoint.path, 10)
    manifest = checkpoint.manifest
    assert (manifest.step, manifest.world_size, manifest.roles) == (10, 2, ["actor", "critic"])
    assert manifest.state == {"kl": {"coefficient": 0.1}} and manifest.code["tandem"] == trainer.__version__
    assert check_config(manifest.config, CONFIG) == []
    assert checkpoint.role("critic") == checkpoint.path / "critic"
    with pytest.raises(ValueError, match="saved without ref: it holds actor, critic"):
        checkpoint.role("ref")
    assert checkpoint.state("kl") == manifest.state["kl"]
    with pytest.raises(ValueError, match="saved without the state of tides, by another version"):
        checkpoint.state("tides")
    assert checkpoint.state("filter_groups") == {}, "this version added it"
    files = {path.relative_to(checkpoint.path).as_posix() for path in checkpoint.path.rglob("*") if path.is_file()}
    assert files == {*manifest.files, "manifest.json"} and "critic/templates/chat.jinja" in files
    assert (tmp_path / LATEST).read_text() == "10"
    assert "s3cret" not in (checkpoint.path / "manifest.json").read_text()


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
def test_arrays_are_saved_as_they_were_when_the_save_began(background: bool, tmp_path: Path) -> None:
    saving, arrays, gate = saver(tmp_path, async_save=background), responses(2), Future[None]()
    if not background:
        gate.set_result(None)
    saving.save(2, models(2, gate=gate), {}, {}, arrays=arrays | {"nothing": {}})
    arrays["groups"]["ids"] += 100
    if background:
        gate.set_result(None)
    saving.finish()
    checkpoint = read_checkpoint(tmp_path / "global_step_2")
    assert names(checkpoint.path / "flow") == {"groups.safetensors", "nothing.safetensors"}
    assert {"flow/groups.safetensors", "flow/nothing.safetensors"} < checkpoint.manifest.files.keys()
    assert checkpoint.manifest.roles == ["actor", "critic"] and checkpoint.with_arrays() == {"groups", "nothing"}
    assert equal(checkpoint.arrays("groups"), responses(2)["groups"]) and checkpoint.arrays("nothing") == {}
    assert checkpoint.arrays("of_another_version") == {}


@pytest.mark.parametrize(("pools", "met"), [(("actor", "critic"), True), (("workers", "workers"), False)])
def test_state_is_copied_by_all_pools_at_the_same_time(pools: tuple[str, str], met: bool, tmp_path: Path) -> None:
    """Each save waits for the other. In one pool they are copied in turn."""
    saving, meets = saver(tmp_path, async_save=True), Barrier(2, timeout=20.0 if met else 0.2)
    both = {role: models(2, [role], pool=pool, meets=meets)[role] for role, pool in zip(ROLES, pools, strict=True)}
    with contextlib.nullcontext() if met else pytest.raises(BrokenBarrierError):
        saving.save(2, both, {}, {})
    saving.finish()
    assert met is (resume(tmp_path) == 2)


def test_checkpoint_without_arrays_has_no_directory_for_them(tmp_path: Path) -> None:
    save(tmp_path, 2, arrays={})
    checkpoint = read_checkpoint(tmp_path / "global_step_2")
    assert names(checkpoint.path) == {"actor", "critic", "manifest.json"} and checkpoint.with_arrays() == set()


def test_disk_that_is_full_when_the_arrays_are_written_costs_that_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 2, arrays=responses(2))
    write_bytes = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if path.parent.name == "flow":
            raise FULL
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    save(tmp_path, 4, arrays=responses(4))
    assert checkpoints(tmp_path) == {"global_step_2"} and resume(tmp_path) == 2


class Killed(BaseException):
    """A killed process: no later line runs."""


def kill_at(monkeypatch: pytest.MonkeyPatch, count: int) -> Callable[[], int]:
    """Raise Killed at the ``count``-th call that makes, syncs, renames or removes something. Returns a counter of calls."""
    calls = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == count:
                raise Killed
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "mkdir", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, counted(vars(os)[name]))
    for name in ("rename", "replace"):
        monkeypatch.setattr(pathlib.Path, name, counted(vars(pathlib.Path)[name]))
    return lambda: calls


@pytest.mark.parametrize(
    "background", [pytest.param(False, id="waiting", marks=pytest.mark.soak), pytest.param(True, id="background")]
)
def test_checkpoint_is_complete_or_absent_after_a_kill_at_any_call(background: bool, tmp_path: Path) -> None:
    outcomes = []
    for count in range(1, 200):
        run_dir = tmp_path / str(count)
        save(run_dir, 2, arrays=responses(2))
        with pytest.MonkeyPatch.context() as monkeypatch:
            saving = saver(run_dir, actor=1, critic=1, async_save=background)
            calls, written = kill_at(monkeypatch, count), models(4)
            with contextlib.suppress(Killed):
                saving.save(4, written, {}, {}, arrays=responses(4))
                saving.finish()
            wait_for_threads(written)
            if calls() < count:
                break
        checkpoint = resolve_resume("auto", None, run_dir)
        assert checkpoint is not None and is_complete(checkpoint.path, checkpoint.step)
        assert equal(checkpoint.arrays("groups"), responses(checkpoint.step)["groups"])
        outcomes.append(checkpoint.step)
        assert not [name for name in names(run_dir) if name.endswith(".incomplete")]
        for path in run_dir.glob("global_step_*"):
            assert (path / "manifest.json").exists()
        start_run(run_dir, checkpoint.step, None)
        save(run_dir, 6, actor=1, critic=1)
        assert resume(run_dir) == 6 and checkpoints(run_dir) == {"global_step_6"}
    assert calls() > 20 and outcomes == sorted(outcomes) and set(outcomes) == {2, 4}


def test_files_are_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut after the rename: every file, and every directory that names one, was synced before."""
    synced: set[str] = set()
    left: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def checked(self: Path, target: Path) -> Path:
        written = {str(self), *map(str, self.rglob("*"))}
        left.extend(written - synced - {f"{self}/manifest.json"})  # synced under the name it had first
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", checked)
    save(tmp_path, 2, arrays=responses(2))
    assert left == [] and f"{tmp_path}/global_step_2.incomplete/manifest.json.partial" in synced
    assert str(tmp_path) in synced, "the rename itself"


WRITER = """
import os, sys, time
from pathlib import Path
import torch
from tests.trainer.checkpoints import models, saver
from workers.engine import saving
from workers.engine.hf import checkpoint
from workers.engine.hf.checkpoint import Shard

saving.PIECE = checkpoint.FILE = 1000
parts = {f"tensor {i}": (torch.full((900,), float(i)), [0]) for i in range(9)}

class Slow:
    def update(self, data):
        os.write(1, b"writing\\n")  # one call a line: print from several threads mixes them
        time.sleep(60)

def write(model, folder, background):
    saving.hashlib.sha256 = lambda data: Slow()
    return Shard(parts, 0, 1).write(folder)

writer = saver(Path(sys.argv[1]), actor=1, critic=1, async_save=True)
writer.save(2, models(2), {}, {})
writer.finish_pending()
slow = models(4)
for model in slow.values():
    type(model)._write = write
writer.save(4, slow, {}, {})
os.write(1, b"training continues\\n")
time.sleep(60)
"""


def test_previous_checkpoint_survives_sigkill_while_threads_write(tmp_path: Path) -> None:
    """Several files are begun, none is complete."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(5)]
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL and "training continues\n" in lines
    half = [file.stat().st_size for file in (tmp_path / "global_step_4.incomplete").rglob("*-part-*.safetensors")]
    assert len(half) > 1 and all(size < 3600 for size in half)
    checkpoint = resolve_resume("auto", None, tmp_path)
    assert checkpoint is not None and is_complete(checkpoint.path, 2) and checkpoints(tmp_path) == {"global_step_2"}
    save(tmp_path, 4)
    assert resume(tmp_path) == 4


def test_time_of_a_save_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the metrics of the step after its completion, or at the end of the run."""
    saving = saver(tmp_path, async_save=True)
    assert saving.seconds() == 0.0 and saving.figures() == {}
    gate: Future[None] = Future()
    saving.save(2, models(2, gate=gate, seconds=4.0), {}, {})
    assert saving.figures() == {} and 0.0 < saving.seconds() < 4.0
    gate.set_result(None)
    saving.finish_pending()
    size = sum(len(content(role, rank, 2)) for role in ROLES for rank in range(2)) / 1e9
    figures = saving.figures()
    assert 0.0 < figures.pop("timing_s/save_checkpoint") < 4.0 < saving.seconds()
    assert figures == {"perf/checkpoint_gb": size, "perf/checkpoint_write_s": 4.0, "perf/checkpoint_gb_per_s": size / 4.0}
    assert saving.figures() == {}
    saving.finish()
    assert "checkpoint" not in capsys.readouterr().err
    saving.save(4, models(4, seconds=2.0), {}, {})
    saving.finish()
    assert f"; {size:.3g} GB written in 2.0 s (0.00 GB/s)" in capsys.readouterr().err


def test_synchronous_save_writes_models_one_after_the_other(tmp_path: Path) -> None:
    saving = saver(tmp_path)
    saving.save(2, models(2, seconds=4.0), {}, {})
    assert saving.figures()["perf/checkpoint_write_s"] == 8.0 and saving.seconds() < 4.0


def test_save_that_lacked_memory_for_copies_is_reported(tmp_path: Path) -> None:
    saving = saver(tmp_path, async_save=True)
    saving.save(2, models(2, waited_for="copies of 60 GB on one: no room"), {}, {})
    saving.finish()
    assert events_of(tmp_path) == [(2, "checkpoint", "written while training waited: copies of 60 GB on one: no room")]
    assert resume(tmp_path) == 2


def test_old_checkpoints_are_removed_after_the_new_one_is_complete(tmp_path: Path) -> None:
    gate: Future[None] = Future()
    save(tmp_path, 2)
    saving = saver(tmp_path, actor=1, async_save=True)
    saving.save(4, models(4, gate=gate), {}, {})
    saving.finish_pending(patient=False)
    assert is_complete(tmp_path / "global_step_2", 2) and (tmp_path / LATEST).read_text() == "2"
    gate.set_result(None)
    saving.finish()
    assert names(tmp_path / "global_step_2") == {"critic", "manifest.json"} and is_complete(tmp_path / "global_step_4", 4)


def test_each_role_keeps_its_own_number_of_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 9, 10, actor=3, critic=1)
    assert names(tmp_path) - {LATEST} == {"global_step_3", "global_step_9", "global_step_10"}
    assert names(tmp_path / "global_step_9") == {"actor", "manifest.json"}
    assert resume(tmp_path) == 10


def test_arrays_are_kept_as_long_as_the_checkpoint_can_be_resumed_from(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, arrays=responses(step), actor=2, critic=1)
    assert names(tmp_path) - {LATEST} == {"global_step_2", "global_step_3"}
    assert names(tmp_path / "global_step_2") == {"actor", "manifest.json"}
    assert names(tmp_path / "global_step_3") == {"actor", "critic", "flow", "manifest.json"}
    for score in (0.9, 0.1, 0.2):
        step += 1
        saving = saver(tmp_path, best_metric="score", actor=1, critic=1)
        saving.save(step, models(step), {}, {"score": score}, arrays=responses(step))
    assert checkpoints(tmp_path) == {"global_step_4", "global_step_6"}
    assert equal(read_checkpoint(tmp_path / "global_step_4").arrays("groups"), responses(4)["groups"]), "of the best"


def test_all_checkpoints_are_kept_without_a_limit(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, actor=None)
    assert len(list(tmp_path.glob("global_step_*/critic"))) == 4


@pytest.mark.parametrize(
    ("best_metric", "values", "best"),
    [("val/accuracy", [0.2, 0.7, 0.5, 0.7, 0.1, float("nan")], 4), ("-val/loss", [3.0, 1.5, 2.0, 4.0, 5.0, 6.0], 2)],
)
def test_best_checkpoint_is_never_removed(best_metric: str, values: list[float], best: int, tmp_path: Path) -> None:
    for step, value in enumerate(values, 1):  # a new Saver for each: the best is known from what is on disk
        saving = saver(tmp_path, best_metric=best_metric, actor=1, critic=1)
        saving.save(step, models(step), {}, {best_metric.removeprefix("-"): value, "other": 9.0})
    assert checkpoints(tmp_path) == {f"global_step_{best}", "global_step_6"}
    assert (tmp_path / BEST).read_text() == str(best) and is_complete(tmp_path / f"global_step_{best}", best)
    named = [(step, text) for step, kind, text in events_of(tmp_path) if kind == "best checkpoint"]
    assert named[-1] == (best, f"{best_metric.removeprefix('-')} = {values[best - 1]:g}: it is kept")
    assert [step for step, _ in named] == ([1, 2, 4] if best == 4 else [1, 2])


def test_missing_best_metric_is_reported_once(tmp_path: Path) -> None:
    saving = saver(tmp_path, best_metric="val/acuracy")
    for step in (1, 2):
        saving.save(step, models(step), {}, {"val/accuracy": 1.0})
    assert not (tmp_path / BEST).exists()
    assert [text for _, _, text in events_of(tmp_path)] == [
        "cannot become the best: this step did not measure trainer.best_metric=val/acuracy"
    ]


def test_rollback_before_the_best_step_resets_the_best(tmp_path: Path) -> None:
    for step, value in ((2, 0.1), (4, 0.9), (6, 0.5)):
        saver(tmp_path, best_metric="score").save(step, models(step), {}, {"score": value})
    start_run(tmp_path, 6, None)
    assert (tmp_path / BEST).read_text() == "4"
    start_run(tmp_path, 2, None)
    assert not (tmp_path / BEST).exists()
    saver(tmp_path, best_metric="score").save(3, models(3), {}, {"score": 0.05})
    assert (tmp_path / BEST).read_text() == "2"


def test_background_save_is_written_while_the_run_continues(tmp_path: Path) -> None:
    gate: Future[None] = Future()
    saving, state = saver(tmp_path, async_save=True), {"kl": {"coefficient": 0.1}}
    saving.save(2, models(2, gate=gate), state, {})
    state["kl"]["coefficient"] = 0.2
    for _ in range(3):
        saving.finish_pending(patient=False)
    assert names(tmp_path) == {"global_step_2.incomplete"}, "the ranks are still writing"
    gate.set_result(None)
    saving.save(4, models(4), state, {})
    assert resume_state(tmp_path, 2) == {"kl": {"coefficient": 0.1}}, "complete before the next one begins"
    saving.finish()
    assert (tmp_path / LATEST).read_text() == "4" and resume_state(tmp_path, 4) == {"kl": {"coefficient": 0.2}}


def written_and_not_completed(run_dir: Path) -> None:
    """A run that was killed after all ranks had written step 4, before the controller completed it."""
    save(run_dir, 2)
    written = models(4)
    saver(run_dir, actor=1, async_save=True).save(4, written, {"kl": {"coefficient": 0.2}}, {}, arrays=responses(4))
    wait_for_threads(written)
    assert "global_step_4.incomplete" in checkpoints(run_dir)


def test_written_save_of_a_killed_run_is_completed_at_the_next_start(tmp_path: Path) -> None:
    written_and_not_completed(tmp_path)
    checkpoint = resolve_resume("auto", None, tmp_path)
    assert checkpoint is not None and is_complete(checkpoint.path, 4) and (tmp_path / LATEST).read_text() == "4"
    assert resume_state(tmp_path, 4) == {"kl": {"coefficient": 0.2}}
    assert equal(checkpoint.arrays("groups"), responses(4)["groups"])
    files = {path.relative_to(checkpoint.path).as_posix() for path in checkpoint.path.rglob("*") if path.is_file()}
    assert files == {*checkpoint.manifest.files, "manifest.json"}
    assert events_of(tmp_path) == [(4, "checkpoint", "completed now: all files had been written before the interruption")]


def test_save_that_one_rank_did_not_write_is_not_completed(tmp_path: Path) -> None:
    written_and_not_completed(tmp_path)
    (tmp_path / "global_step_4.incomplete/critic/shard-00002-of-00002.written").unlink()
    assert resume(tmp_path) == 2 and checkpoints(tmp_path) == {"global_step_2"} and events_of(tmp_path) == []


@pytest.mark.parametrize("chosen", ["1", "2"])
def test_earlier_checkpoint_chosen_by_the_user_precedes_a_written_save(chosen: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    written_and_not_completed(tmp_path)
    (tmp_path / LATEST).write_text(chosen)
    assert resume(tmp_path) == (1 if chosen == "1" else 4)


def test_save_is_completed_when_the_run_ends_with_an_error(tmp_path: Path) -> None:
    written = models(2)
    with pytest.raises(RuntimeError, match="of the run"), saver(tmp_path, async_save=True) as saving:
        saving.save(2, written, {}, {})
        wait_for_threads(written)
        raise RuntimeError("of the run")
    assert checkpoints(tmp_path) == {"global_step_2"} and resume(tmp_path) == 2


def resume_state(run_dir: Path, step: int) -> dict[str, Any]:
    checkpoint = resolve_resume("resume_path", str(run_dir / f"global_step_{step}"), run_dir / "other")
    assert checkpoint is not None
    return checkpoint.manifest.state


def test_written_save_is_completed_after_the_next_step(tmp_path: Path) -> None:
    saving = saver(tmp_path, async_save=True)
    written = models(2)
    saving.save(2, written, {}, {})
    for model in written.values():
        model.saved()
    saving.finish_pending(patient=False)
    assert resume(tmp_path) == 2


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
def test_full_disk_is_reported_and_the_next_save_attempted(
    background: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saving = saver(tmp_path, actor=1, critic=1, async_save=background)
    saving.save(2, models(2), {}, {})
    saving.save(4, models(4, problem=FULL), {}, {})
    saving.finish_pending()
    assert checkpoints(tmp_path) == {"global_step_2"} and is_complete(tmp_path / "global_step_2", 2)
    no_space = "[Errno 28] No space left on device"
    message = f"not saved: {no_space}; {no_space}; the run continues, the next save is tried"
    if not background:  # the second model was not attempted
        message = f"not saved: {no_space}; the run continues, the next save is tried"
    assert events_of(tmp_path) == [(4, "checkpoint", message)] and message in capsys.readouterr().err
    saving.save(6, models(6), {}, {})
    saving.finish()
    assert checkpoints(tmp_path) == {"global_step_6"} and resume(tmp_path) == 6


@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_full_disk_of_the_controller_keeps_the_previous_checkpoint(place: str, tmp_path: Path) -> None:
    saving = saver(tmp_path)
    saving.save(2, models(2), {}, {})

    def full(*_: object, **__: object) -> None:
        raise FULL

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os if place == "fsync" else pathlib.Path, place, full)
        saving.save(4, models(4), {}, {})
    assert checkpoints(tmp_path) == {"global_step_2"} and events_of(tmp_path)[0][0] == 4
    with pytest.raises(
        NotSaved, match=r"the last checkpoint is missing: step 4: \[Errno 28\] .*; the last whole one is .*global_step_2"
    ):
        saving.finish()
    saving.save(6, models(6), {}, {})
    saving.finish()
    assert resume(tmp_path) == 6


def test_save_in_progress_is_completed_when_an_alarm_ends_the_run(tmp_path: Path) -> None:
    gate: Future[None] = Future()
    with pytest.raises(CheckFailed), saver(tmp_path, async_save=True) as saving:
        saving.save(2, models(2, gate=gate), {}, {})
        assert checkpoints(tmp_path) == {"global_step_2.incomplete"}
        gate.set_result(None)
        raise CheckFailed("an alarm")
    assert checkpoints(tmp_path) == {"global_step_2"} and resume(tmp_path) == 2


def test_end_of_a_run_without_any_checkpoint_is_an_error(tmp_path: Path) -> None:
    saving = saver(tmp_path, async_save=True)
    saving.save(4, models(4, problem=FULL), {}, {})
    with pytest.raises(NotSaved, match=r"No space left on device.*; there is none"):
        saving.finish()


def test_missing_or_invalid_run_directory_is_reported_and_later_saves_succeed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    saving = saver(run_dir)
    run_dir.rmdir()
    run_dir.write_text("a file where the directory was: nothing can be written into it")
    saving.save(2, models(2), {}, {})
    error = capsys.readouterr().err
    assert "not saved: [Errno 20] Not a directory" in error and "events.jsonl: [Errno" in error
    run_dir.unlink()
    saving.save(4, models(4), {}, {})
    assert "not saved: [Errno 2] No such file or directory" in capsys.readouterr().err
    saving.save(6, models(6), {}, {})
    saving.finish()
    assert resume(run_dir) == 6


def test_failed_removal_of_old_checkpoints_keeps_the_new_one(tmp_path: Path) -> None:
    saving = saver(tmp_path, actor=1, critic=1)
    saving.save(2, models(2), {}, {})
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "rmdir", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EBUSY, "busy")))
        saving.save(4, models(4), {}, {})
    saving.finish()
    assert "old ones were not removed: [Errno 16] busy" in events_of(tmp_path)[0][2] and resume(tmp_path) == 4


def test_copies_are_limited_to_the_requested_number_and_unlimited_by_default(tmp_path: Path) -> None:
    """The best one too; a restarted run knows which copies it wrote."""
    for keep, left in ((None, {1, 2, 3, 4}), (1, {2, 4})):
        run_dir, elsewhere = tmp_path / f"run_{keep}", tmp_path / f"copies_{keep}"
        for step, score in ((1, 0.1), (2, 0.9), (3, 0.3), (4, 0.4)):
            saving = saver(run_dir, best_metric="score", remote_dir=str(elsewhere), copies=keep, actor=2, critic=2)
            saving.save(step, models(step), {}, {"score": score})
            saving.finish()
        assert checkpoints(elsewhere) == {f"global_step_{step}" for step in left}
        assert {kind for _, kind, _ in events_of(run_dir)} == {"best checkpoint"}


def test_failed_removal_of_a_copy_is_reported_and_the_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, *words: object, **how: object) -> None:
        raise PermissionError("append only")

    saving = saver(tmp_path / "run", remote_dir=str(tmp_path / "copies"), copies=1)
    monkeypatch.setattr(type(saving.copies.fs) if saving.copies else None, "rm", refuse)
    for step in (1, 2):
        saving.save(step, models(step), {}, {})
    saving.finish()
    assert events_of(tmp_path / "run")[0][2] == f"old copies in {tmp_path}/copies were not removed: PermissionError: append only"
    assert resume(tmp_path / "copies") is None and checkpoints(tmp_path / "copies") == {"global_step_1", "global_step_2"}


def test_copy_of_a_failed_attempt_ends_before_the_next_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continued, it would take the next attempt's copies for those of a rollback and remove them."""
    first = saver(tmp_path / "run", remote_dir=str(tmp_path / "copies"), copies=2, async_save=True)
    began, resume_it, put_file = Event(), Event(), type(first.copies.fs).put_file if first.copies else None
    assert put_file is not None

    def slowly(self: Any, *words: Any, **how: Any) -> None:
        began.set()
        assert resume_it.wait(60)
        put_file(self, *words, **how)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="died"), first:
        patch.setattr(type(first.copies.fs) if first.copies else None, "put_file", slowly)
        first.save(20, models(20), {}, {})
        while not began.wait(0.01):
            first.finish_pending(patient=False)
        Timer(0.2, resume_it.set).start()
        raise RuntimeError("a worker died")
    assert first._copying is not None and first._copying[1].done() and checkpoints(tmp_path / "copies") == {"global_step_20"}
    assert RemoteCopies(str(tmp_path / "copies")).steps() == []
    with saver(tmp_path / "run", remote_dir=str(tmp_path / "copies"), copies=2) as second:
        second.save(25, models(25), {}, {})
    assert RemoteCopies(str(tmp_path / "copies")).steps() == [25]


def test_rolled_back_run_withdraws_its_later_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = saver(tmp_path / "run", remote_dir=str(tmp_path / "copies"))
    for step in (10, 20):
        saving.save(step, models(step), {}, {})
    saving.finish_pending()
    saving.go_back(10)
    assert RemoteCopies(str(tmp_path / "copies")).steps() == [10] and not (tmp_path / "run" / EVENTS).exists()
    monkeypatch.setattr(RemoteCopies, "withdraw_after", Mock(side_effect=PermissionError("append only")))
    saving.go_back(10)
    assert events_of(tmp_path / "run")[0][2].startswith(f"copies after step 10 in {tmp_path}/copies are still there")


def test_checkpoints_are_copied_and_a_failed_copy_is_reported(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    for background in (False, True):
        run_dir = tmp_path / f"run_{background}"
        saving = saver(run_dir, remote_dir=f"file://{elsewhere}/{background}", async_save=background, actor=1, critic=1)
        saving.save(2, models(2), {}, {})
        saving.save(4, models(4), {}, {})
        saving.finish()
        assert checkpoints(run_dir) == {"global_step_4"} and checkpoints(elsewhere / str(background)) == {
            "global_step_2",
            "global_step_4",
        }
        assert resume(elsewhere / str(background)) is None, "no file there names the latest: the manifests do"
    saving = saver(tmp_path / "run", remote_dir=str(elsewhere / "no"))
    (elsewhere / "no").write_text("")
    saving.save(2, models(2), {}, {})
    assert resume(tmp_path / "run") == 2 and events_of(tmp_path / "run")[0][2].startswith(f"not copied to {elsewhere}/no: ")
    with pytest.raises(NotSaved, match=r"step 2 is not copied to .*the last whole one is .*global_step_2"):
        saving.finish()
    (elsewhere / "no").unlink()
    saving.save(4, models(4), {}, {})
    saving.finish()
    assert checkpoints(elsewhere / "no") == {"global_step_4"}
