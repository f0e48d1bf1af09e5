"""Weights by rows, from the files of a saved model, and errors for files that are wrong."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import Chunk, WeightConverter

from tests import tiny
from tests.tiny import save_tiny_model
from workers.engine import stored_weights
from workers.engine.hf.hf_model import empty_model, model_config
from workers.engine.stored_weights import StoredWeights, weight_files


def stored(path: str) -> StoredWeights:
    model = tiny.model_config(path)
    return StoredWeights(
        empty_model(model, model_config(model, "lm"), "lm", torch.float32).hf, weight_files(model), "model.path=m"
    )


def change(path: str, **weights: Tensor | None) -> None:
    """Write the model's file again; None: without it."""
    file = Path(path) / "model.safetensors"
    changed: dict[str, Any] = load_file(file) | {name.replace("__", "."): weight for name, weight in weights.items()}
    save_file({name: weight for name, weight in changed.items() if weight is not None}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("piece", [8, 64, 2**25])
def test_any_range_of_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(stored_weights, "PIECE", piece)
    path = save_tiny_model(tmp_path, "qwen3_moe", dtype=torch.bfloat16, num_experts=4)
    weights, names = stored(path), ("model.layers.1.mlp.experts.gate_up_proj", "model.norm.weight")
    files = load_file(tmp_path / "model.safetensors")
    experts = (files[f"model.layers.1.mlp.experts.{i}.{part}_proj.weight"] for i in range(4) for part in ("gate", "up"))
    whole = [torch.cat([*experts]).flatten(), files["model.norm.weight"]]
    for start, count in ((0, 32), (5, 20), (31, 1), (7, 0)):
        places = ((start + 1000) * 2, count * 99), (start, count)  # the first goes over several experts
        targets = [torch.full((size,), torch.nan) for _, size in places]
        weights.fill({name: (target, at) for name, target, (at, _) in zip(names, targets, places, strict=True)})
        for mine, all_, (at, size) in zip(targets, whole, places, strict=True):
            assert torch.equal(mine, all_[at : at + size].float())


def test_the_kernel_may_give_less_than_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, preadv = save_tiny_model(tmp_path), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, begin: preadv(file, [views[0][:100]], begin))
    head = torch.empty(61, 32)
    stored(path).fill({"lm_head.weight": (head, 0)})
    assert torch.equal(head, load_file(tmp_path / "model.safetensors")["lm_head.weight"])


def test_experts_are_read_in_the_order_of_the_model(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3_moe", num_experts=12)  # 10 comes before 2 by the letter
    name, last = "model.layers.0.mlp.experts.down_proj", torch.empty(32, 32)
    stored(path).fill({name: (last, 10 * 32 * 32)})
    assert torch.equal(last, load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.experts.10.down_proj.weight"])


def test_what_is_converted_otherwise_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with two of the model's tensors in one."""
    path = save_tiny_model(tmp_path)
    names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
    parts = [load_file(tmp_path / "model.safetensors")[name] for name in names]
    change(
        path, **dict.fromkeys(name.replace(".", "__") for name in names), model__layers__0__mlp__fused__weight=torch.cat(parts)
    )
    assert stored(path).missing == names
    targets = [f"mlp.{part}_proj.weight" for part in ("gate", "up")]
    converter = WeightConverter("mlp.fused.weight", targets, [Chunk(dim=0)])
    monkeypatch.setattr(stored_weights, "get_model_conversion_mapping", lambda hf: [converter])
    weights = stored(path)
    rows = [torch.empty(3, 32) for _ in names]
    weights.fill({name: (mine, 64) for name, mine in zip(names, rows, strict=True)})
    assert weights.missing == [] and weights.conversions == [converter]
    assert all(torch.equal(mine, part[2:5]) for mine, part in zip(rows, parts, strict=True))


@pytest.mark.parametrize("kept", ["model__embed_tokens__weight", "lm_head__weight"])
def test_of_tied_names_either_may_be_in_the_file(tmp_path: Path, kept: str) -> None:
    path = save_tiny_model(tmp_path, tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change(path, model__embed_tokens__weight=None)
    change(path, **{kept: embedding})
    row, weights = torch.empty(32), stored(path)
    weights.fill({"model.embed_tokens.weight": (row, 3 * 32)})
    assert weights.missing == [] and torch.equal(row, embedding[3])


@pytest.mark.parametrize("piece", [64, 2**25])
def test_two_values_of_a_tied_weight_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(stored_weights, "PIECE", piece)
    path = save_tiny_model(tmp_path, tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    stored(path).check_ties()
    embedding[0, 0] = torch.nan
    change(path, model__embed_tokens__weight=embedding, lm_head__weight=embedding.clone())
    stored(path).check_ties()
    change(path, lm_head__weight=embedding.double())
    stored(path).check_ties()
    embedding[60, 31] += 1
    change(path, lm_head__weight=embedding)
    with pytest.raises(
        ValueError, match=r"^model\.path=m: model\.embed_tokens\.weight and lm_head\.weight differ there, [^\n]+$"
    ):
        stored(path).check_ties()


def test_a_weight_of_another_shape(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    change(path, model__norm__weight=torch.zeros(31))
    with pytest.raises(
        ValueError, match=r"^model\.path=m: model\.norm\.weight is \(31,\) there and \(32,\) in this model; take the"
    ):
        stored(path)


def test_a_type_that_no_weight_has(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    change(path, model__norm__weight=torch.zeros(32, dtype=torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"model\.norm\.weight is stored as F8_E4M3; known types are F64, F32"):
        stored(path)


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    weights, file = stored(path), tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    names = dict(weights._blocks)
    with pytest.raises(ValueError, match=r"model\.safetensors ends before byte [\d,]+; copy or download it again"):
        weights.fill({name: (torch.empty(one.numel), 0) for name, (one,) in names.items()})
