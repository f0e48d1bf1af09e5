"""What ranks write: the same bytes whether training waits or not, and read by any number of ranks, or by none."""

import errno
import json
import shutil
import socket
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.full_disk import small_files
from tests.workers.engine.fsdp.cases import exported, train
from tests.workers.engine.fsdp.test_fsdp_engine_checkpoint import assert_same_bits
from tests.workers.engine.toy import toy_engine
from trainer.checkpoint.export import check, export
from workers.engine import staging
from workers.engine.base import SavedFile
from workers.engine.fsdp.fsdp_engine import FSDPEngine
from workers.engine.fsdp.sharding import parts
from workers.engine.hf.checkpoint import Files, Shard, saved_tensors
from workers.engine.saving import WRITTEN, declared_files, sha256_of
from workers.host_memory import Memory

TwoRanks = tuple[Path, list[dict[str, Any]]]


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix != WRITTEN}


def test_in_the_background_the_same_bytes_are_written(two_ranks: TwoRanks) -> None:
    """The background's were written while the ranks trained on."""
    path, ranks = two_ranks
    assert contents(path / "background") == contents(path / "checkpoint")
    files = [rank["checkpoint"]["files"] for rank in ranks]
    declared = declared_files(path / "background")
    assert declared is not None and {file.name: file.sha256 for file in declared} == files[0] | files[1]
    assert declared_files(path / "checkpoint") is None, "a save that training waits for declares nothing"
    assert set(files[0]) == {"shard-00001-of-00002.safetensors", "config.json", "generation_config.json"}
    assert set(files[1]) == {"shard-00002-of-00002.safetensors"}
    assert {name: sha256_of(path / "checkpoint" / name) for name in files[0] | files[1]} == files[0] | files[1]


def test_each_tensor_is_written_once_and_moments_are_where_their_weights_are(two_ranks: TwoRanks) -> None:
    first, second = (load_file(path) for path in sorted((two_ranks[0] / "checkpoint").glob("*.safetensors")))
    assert first.keys() - second.keys() == {"optimizer.steps"} and not second.keys() - first.keys()
    whole = saved_tensors(str(two_ranks[0] / "checkpoint"))
    for name in second:
        assert len(first[name]) + len(second[name]) == len(whole[name]), name
        if name.startswith("model."):
            for moment in ("exp_avg", "exp_avg_sq"):
                assert second[f"optimizer.{moment}.{name.removeprefix('model.')}"].shape == second[name].shape


def test_what_is_trained_meanwhile_is_not_written(
    group: None, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread comes to write only when two more steps are done."""
    engine, trained, write = toy_engine(models["qwen2"]), Event(), Shard.write
    train(engine, range(1))
    engine.save(str(tmp_path / "waiting")).result()

    def late(self: Shard, directory: Path) -> list[SavedFile]:
        assert trained.wait(60)
        return write(self, directory)

    monkeypatch.setattr(Shard, "write", late)
    saving = engine.save(str(tmp_path / "background"), background=True)
    train(engine, range(1, 3))
    assert not saving.done()
    trained.set()
    saving.result()
    assert contents(tmp_path / "background") == contents(tmp_path / "waiting")


def test_an_offloaded_state_is_copied_too(group: None, models: dict[str, str], tmp_path: Path) -> None:
    """Moments on the host change in the next step as those of a device do; saves follow one another."""
    engine = toy_engine(models["qwen2"], optimizer_offload=True)
    for step in range(2):
        train(engine, range(step, step + 1))
        engine.save(str(tmp_path / f"waiting {step}")).result()
        saving = engine.save(str(tmp_path / f"background {step}"), background=True)
        train(engine, range(step + 1, step + 2))
        saving.result()
        assert contents(tmp_path / f"background {step}") == contents(tmp_path / f"waiting {step}")
    assert contents(tmp_path / "background 0") != contents(tmp_path / "background 1")


def test_without_memory_for_the_copies_training_waits(
    group: None, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is reason why; the next save is in the background again."""
    engine = toy_engine(models["qwen2"])
    train(engine, range(1))
    with monkeypatch.context() as short:
        short.setattr(staging, "host_memory", lambda: Memory(int(1.1e9), int(1e10), "machine"))
        short.setattr(staging, "copied", None)
        short.setattr(Shard, "bytes", 200_000_000)
        saving = engine.save(str(tmp_path / "short"), background=True)
        assert saving.done()
    reason = f"copies of 0.2 GB on {socket.gethostname()}: the machine's memory has room for 0.1 GB"
    reason += ", in addition to 10% that stay free"
    assert saving.result().waited_for == reason
    again = engine.save(str(tmp_path / "again"), background=True).result()
    assert again.waited_for is None and again.seconds > 0
    assert contents(tmp_path / "short") == contents(tmp_path / "again")


def test_a_shard_of_several_files_is_read_by_other_ranks_too(
    group: None, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file whole tensors, at most FILE bytes of them; torch's reader and this project's assemble them."""
    engine, other = (toy_engine(models["qwen2"]) for _ in range(2))
    train(engine, range(2))
    monkeypatch.setattr("workers.engine.hf.checkpoint.FILE", 20_000)
    saved = engine.save(str(tmp_path), background=True).result()
    files = [file for file in saved.files if file.name.endswith(".safetensors")]
    assert len(files) > 5 and files[0].name == "shard-00001-of-00001-part-00001.safetensors"
    held = [load_file(tmp_path / file.name) for file in files]
    assert all(len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 20_000 for tensors in held)
    assert {file.name: file.sha256 for file in files} == {file.name: sha256_of(tmp_path / file.name) for file in files}
    state = {name: tensor.clone() for name, tensor in engine._checkpoint_state().items()}
    assert sum(len(tensors) for tensors in held) == len(state)
    other.load(str(tmp_path))
    assert_same_bits(other._checkpoint_state(), state)
    found = Files(str(tmp_path), "it")
    assert_same_bits({name: found.read(name) for name in found}, state)


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
def test_a_disk_that_takes_no_more_is_an_error_that_leaves_the_training_alone(
    background: bool, group: None, models: dict[str, str], tmp_path: Path
) -> None:
    engine, other = toy_engine(models["qwen2"]), toy_engine(models["qwen2"])
    with small_files(20_000):
        error = engine.save(str(tmp_path / "full"), background=background).exception()
    assert isinstance(error, OSError) and "shard-00001-of-00001.safetensors" in str(error) and "File too large" in str(error)
    gone = engine.save(str(tmp_path / "nowhere/deeper"), background=background).exception()
    assert isinstance(gone, OSError) and gone.errno == errno.ENOENT
    (tmp_path / "file").write_text("")
    assert isinstance(engine.save(str(tmp_path / "file"), background=background).exception(), FileExistsError)
    train(engine, range(2)), train(other, range(2))
    engine.save(str(tmp_path / "next"), background=background).result()
    assert_same_bits(exported(engine), exported(other))
    other.load(str(tmp_path / "next"))


def test_torchs_own_reader_reads_a_shard(tmp_path: Path) -> None:
    state = {"matrix": torch.arange(12.0).reshape(4, 3), "count": torch.tensor(7)}
    Shard(parts(state, 0, (0, 1)), 0, 1).write(tmp_path)
    empty = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(empty, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert_same_bits(empty, state)


def test_two_ranks_shards_become_one_model_directory(two_ranks: TwoRanks, tmp_path: Path) -> None:
    path, (first, _) = two_ranks
    export(path / "checkpoint", tmp_path, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_bits(dict(model.named_parameters()), first["checkpoint"]["saved"])


def test_a_model_that_came_in_bfloat16_goes_out_in_it(group: None, models: dict[str, str], tmp_path: Path) -> None:
    """Trained in float32; and its embeddings are tied: written once, there twice."""
    engine: FSDPEngine = toy_engine(models["qwen3"])
    train(engine, range(3))
    engine.save(str(tmp_path / "saved")).result()
    (tmp_path / "model").mkdir()
    export(tmp_path / "saved", tmp_path / "model", trust_remote_code=False)
    check(tmp_path / "model", trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16 and model.lm_head.weight is model.model.embed_tokens.weight
    expected = {name: weight.bfloat16() for name, weight in exported(engine).items()}
    assert_same_bits(dict(model.named_parameters()), expected)
    engine.export_hf(str(tmp_path / "export_hf"))
    assert contents(tmp_path / "model") == contents(tmp_path / "export_hf")


@pytest.mark.parametrize("ending", [{}, {"do_sample": False}], ids=["unset", "greedy"])
def test_sampling_settings_that_transformers_calls_invalid_are_kept(
    group: None, models: dict[str, str], tmp_path: Path, ending: dict[str, bool]
) -> None:
    """By a checkpoint, its export, and the engine's own: transformers refuses to save temperature without do_sample=true."""
    settings = {"temperature": 0.9, "top_p": 0.6, "eos_token_id": [1, 2]} | ending
    shutil.copytree(models["qwen2"], tmp_path / "base")
    (tmp_path / "base/generation_config.json").write_text(json.dumps(settings))
    engine: FSDPEngine = toy_engine(str(tmp_path / "base"))
    engine.save(str(tmp_path / "saved")).result()
    (tmp_path / "model").mkdir()
    export(tmp_path / "saved", tmp_path / "model", trust_remote_code=False)
    engine.export_hf(str(tmp_path / "export_hf"))
    for name in ("saved", "model", "export_hf"):
        written = json.loads((tmp_path / name / "generation_config.json").read_text())
        written.pop("transformers_version")
        assert written == settings, name
