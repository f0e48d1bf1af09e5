import uuid
from pathlib import Path

import fsspec
import pytest

from tests.trainer.checkpoints import equal, is_complete, names, responses, save
from trainer.checkpoint.manifest import MANIFEST, Damaged, read_checkpoint
from trainer.checkpoint.remote_copies import Abandoned, RemoteCopies
from trainer.checkpoint.resume import find_latest
from trainer.run.run_dir import EVENTS, checkpoint_dir, read_lines


@pytest.fixture(params=["path", "file", "memory", "local"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    places = {"path": "", "file": "file://", "local": "local://"}
    return f"memory://{uuid.uuid4().hex}/runs" if request.param == "memory" else f"{places[request.param]}{tmp_path}/remote/runs"


def put(address: str, run_dir: Path, *steps: int) -> RemoteCopies:
    copies = RemoteCopies(address)
    for step in steps:
        save(run_dir, step, arrays=responses(step))
        copies.put(read_checkpoint(checkpoint_dir(run_dir, step)))
    return copies


def test_copied_and_fetched_checkpoint_equals_a_local_one(address: str, tmp_path: Path) -> None:
    assert RemoteCopies(address).steps() == [] and RemoteCopies(address).fetch_newest(tmp_path / "empty") is None
    copies = put(address, tmp_path / "run", 2, 10)
    assert copies.steps() == [2, 10]
    fetched = copies.fetch_newest(tmp_path / "new")
    assert fetched is not None and fetched.path == tmp_path / "new/global_step_10" and is_complete(fetched.path, 10)
    assert find_latest(tmp_path / "new") == fetched, "equal to a checkpoint that was saved here"
    assert fetched.manifest == read_checkpoint(tmp_path / "run/global_step_10").manifest
    assert equal(fetched.arrays("groups"), responses(10)["groups"])


def test_incomplete_copy_is_never_fetched(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks at the k-th file: until the manifest is written, the previous copy is the newest."""
    copies = put(address, tmp_path / "run", 2)
    save(tmp_path / "run", 4)
    newer = read_checkpoint(tmp_path / "run/global_step_4")
    put_file, kind = type(copies.fs).put_file, type(copies.fs)
    for k in range(len(newer.manifest.files) + 1):
        left = k

        def breaks(self: object, *args: object, **kwargs: object) -> None:
            nonlocal left
            if left == 0:
                raise ConnectionError("broken pipe")
            left -= 1
            put_file(self, *args, **kwargs)

        monkeypatch.setattr(kind, "put_file", breaks)
        with pytest.raises(ConnectionError):
            copies.put(newer)
        monkeypatch.undo()
        assert RemoteCopies(address).steps() == [2]
    copies.put(newer)
    assert copies.steps() == [2, 4]
    monkeypatch.setattr(kind, "put_file", breaks)
    with pytest.raises(ConnectionError):
        copies.put(newer)  # over a complete one: its manifest goes first
    monkeypatch.undo()
    assert copies.steps() == [2]


def test_damaged_copy_is_reported_and_the_previous_one_fetched(address: str, tmp_path: Path) -> None:
    copies = put(address, tmp_path / "run", 2, 4)
    shard = f"{copies.root}/global_step_4/actor/shard-0.safetensors"
    copies.fs.pipe_file(shard, b"x" * copies.fs.info(shard)["size"])
    fetched = copies.fetch_newest(tmp_path / "new")
    assert fetched is not None and fetched.step == 2
    event, _ = read_lines(tmp_path / "new" / EVENTS)
    assert f"{address}/global_step_4: actor/shard-0.safetensors is not what was written" in event["text"]
    assert names(tmp_path / "new") == {"global_step_2", "latest_checkpointed_iteration.txt", EVENTS}
    copies.fs.rm_file(f"{copies.root}/global_step_2/critic/shard-1.safetensors")
    with pytest.raises(
        ValueError, match=r"no checkpoint in .* is whole: .*; .*global_step_2: critic/shard-1.safetensors is not there"
    ):
        copies.fetch_newest(tmp_path / "third")


def test_missing_or_misnamed_copy_is_an_error(address: str, tmp_path: Path) -> None:
    copies = put(address, tmp_path / "run", 2)
    with pytest.raises(Damaged, match=f"global_step_3: no {MANIFEST} in it"):
        copies.fetch("global_step_3", tmp_path)
    with pytest.raises(ValueError, match="a checkpoint is called global_step_<N>"):
        copies.fetch("..", tmp_path / "run")
    assert fsspec.filesystem("file").exists(str(tmp_path / "run/global_step_2"))


def test_cleanup_removes_only_copies_of_this_run(address: str, tmp_path: Path) -> None:
    """The newest and the best stay; so do another run's, also under a step number that this run had written."""
    put(address, tmp_path / "other", 1, 4)
    copies = put(address, tmp_path / "run", 2, 3, 5, 6, 8)
    save(tmp_path / "other", 3, actor=3)
    (tmp_path / "other/global_step_3" / MANIFEST).write_text((tmp_path / "other/global_step_3" / MANIFEST).read_text() + "\n")
    copies.put(read_checkpoint(tmp_path / "other/global_step_3"))
    copies.drop_old(tmp_path / "run", keep=2, newest=10**9, spare=5)
    assert RemoteCopies(address).steps() == [1, 3, 4, 5, 6, 8]
    assert not copies.fs.exists(f"{copies.root}/global_step_2"), "no file of it is left"
    copies.drop_old(tmp_path / "run", keep=1, newest=10**9, spare=None)
    assert RemoteCopies(address).steps() == [1, 3, 4, 8]


def test_copies_of_abandoned_steps_are_removed_after_a_rollback(address: str, tmp_path: Path) -> None:
    copies = put(address, tmp_path / "run", 20, 30, 40)
    put(address, tmp_path / "run", 25)
    copies.drop_old(tmp_path / "run", keep=2, newest=25, spare=None)
    assert RemoteCopies(address).steps() == [20, 25]


def test_copies_of_abandoned_steps_are_not_fetched_after_a_rollback(address: str, tmp_path: Path) -> None:
    """Nor are those of another run withdrawn."""
    put(address, tmp_path / "other", 45)
    copies = put(address, tmp_path / "run", 20, 30, 40)
    copies.withdraw_after(tmp_path / "run", 20)
    assert RemoteCopies(address).steps() == [20, 45]
    put(address, tmp_path / "run", 30)
    assert RemoteCopies(address).steps() == [20, 30, 45], "the run has come to this step again"
    copies.drop_old(tmp_path / "run", keep=2, newest=30, spare=None)
    assert not copies.fs.exists(f"{copies.root}/global_step_40")


def test_an_abandoned_copy_is_incomplete(address: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 2)
    asked = iter([False, False, True])
    with pytest.raises(Abandoned, match="step 2"):
        RemoteCopies(address).put(read_checkpoint(tmp_path / "run/global_step_2"), lambda: next(asked))
    assert RemoteCopies(address).steps() == [] and next(asked, None) is None


def test_partially_written_or_removed_copies_are_removed(address: str, tmp_path: Path) -> None:
    copies = put(address, tmp_path / "run", 2, 4)
    copies.fs.rm_file(f"{copies.root}/global_step_2/{MANIFEST}")
    for _ in range(2):
        RemoteCopies(address).drop_old(tmp_path / "run", keep=1, newest=10**9, spare=None)
        assert not copies.fs.exists(f"{copies.root}/global_step_2") and RemoteCopies(address).steps() == [4]
