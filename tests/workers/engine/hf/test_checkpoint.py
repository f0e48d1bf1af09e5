"""A model written as its weights come, and tensors read from files of any writer."""

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.workers.engine.toy import plain_model
from workers.engine import saving
from workers.engine.hf.checkpoint import Files, Shard, save_shard, write_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [10**9, 20_000])
def test_a_model_in_as_many_files_as_it_needs(
    group: None, models: dict[str, str], tmp_path: Path, most: int, dtype: torch.dtype
) -> None:
    model = plain_model(models["qwen3"]).to(dtype)
    write_model(model, ((name, weight.detach()) for name, weight in model.named_parameters()), tmp_path / "new", most)
    files = sorted((tmp_path / "new").glob("*.safetensors"))
    if most == 20_000:
        assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
        assert all(sum(weight.nbytes for weight in load_file(file).values()) <= most for file in files)
        index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in model.parameters())
    else:
        assert [file.name for file in files] == ["model.safetensors"]
    read = plain_model(str(tmp_path / "new"), dtype)
    assert all(torch.equal(weight, read.state_dict()[name]) for name, weight in model.state_dict().items())
    found = Files(str(tmp_path / "new"), "the new one")
    assert {*found} == dict(model.named_parameters()).keys()
    assert all(torch.equal(found.read(name), weight) for name, weight in model.named_parameters())


@pytest.mark.parametrize("sizes", [(10**9, 20_000), (20_000, 10**9), (20_000, 40_000)])
def test_a_model_over_an_earlier_one_is_the_only_one(
    group: None, models: dict[str, str], tmp_path: Path, sizes: tuple[int, int]
) -> None:
    """A single file next to several, or an index without its files, would be read as the earlier model, or not at all."""
    model = plain_model(models["qwen3"])
    for most in sizes:
        with torch.no_grad():
            for weight in model.parameters():
                weight += 1.0
        write_model(model, ((name, weight.detach()) for name, weight in model.named_parameters()), tmp_path, most)
    read = plain_model(str(tmp_path))
    assert all(torch.equal(weight, read.state_dict()[name]) for name, weight in model.state_dict().items())
    found = Files(str(tmp_path), "the new one")
    assert all(torch.equal(found.read(name), weight) for name, weight in model.named_parameters())


def test_parts_of_several_ranks_are_one_tensor(tmp_path: Path) -> None:
    """Rows and columns, in whatever order the files are read; and one that is whole in one file."""
    whole = torch.arange(30.0).reshape(5, 6)
    Shard({"m": (whole[:3, :4].contiguous(), [0, 0]), "n": (torch.tensor(3), [])}, 0, 4).write(tmp_path)
    Shard({"m": (whole[3:, :4].contiguous(), [3, 0])}, 1, 4).write(tmp_path)
    Shard({"m": (whole[:, 4:].contiguous(), [0, 4])}, 2, 4).write(tmp_path)
    Shard({"m": (whole[:0], [5, 0])}, 3, 4).write(tmp_path)
    files = Files(str(tmp_path), "the checkpoint")
    assert torch.equal(files.read("m"), whole) and int(files.read("n")) == 3
    with pytest.raises(ValueError, match="the checkpoint: no o there"):
        files.read("o")


def test_a_file_is_what_safetensors_would_write_and_its_hash_needs_no_second_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that end within tensors; tensors without an element, without a dimension, and out of order."""
    tensors = {
        "b/ü": torch.randn(7, 5), "a": torch.randn(9).bfloat16(), "steps": torch.tensor(3), "none": torch.zeros(0, 4),
        "mask": torch.tensor([True, False, True]), "turned": torch.arange(6.0).reshape(2, 3).T,
    }  # fmt: skip
    metadata = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [0]}})}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "reference", metadata=metadata)
    monkeypatch.setattr(saving, "PIECE", 16)
    written = saving.write_tensors(tmp_path / "written", tensors, metadata)
    assert (tmp_path / "written").read_bytes() == (tmp_path / "reference").read_bytes()
    assert written == saving.SavedFile(name="written", size=written.size, sha256=saving.sha256_of(tmp_path / "written"))
    assert written.size == (tmp_path / "written").stat().st_size
    read = load_file(tmp_path / "written")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_a_shard_is_not_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "sha256_of", None)
    shard = Shard({"m": (torch.ones(3), [0])}, 0, 1)
    (written,) = save_shard(shard, tmp_path, None, background=False).result().files
    assert written.name == "shard-00001-of-00001.safetensors"


def test_files_that_the_index_does_not_name_are_left_alone(tmp_path: Path) -> None:
    """Some models come with the same weights once more, in another form."""
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = Files(str(tmp_path), "it")
    assert [*files] == ["a"] and torch.equal(files.read("a"), torch.ones(2))


def test_what_is_read_ahead_comes_in_order_and_is_never_far_ahead() -> None:
    begun: list[int] = []

    def read(item: int) -> int:
        begun.append(item)
        time.sleep(0.001 * (item % 3))
        return item

    taken = []
    for item in saving.read_ahead(read, range(20), 3):
        taken.append(item)
        assert len(begun) <= len(taken) + 3
    assert taken == list(range(20))
