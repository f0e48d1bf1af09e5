"""The table of names, and layouts as exact inverses, for every number of ranks that the engine allows."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.tiny import tiny_config
from workers.engine.megatron.weights import Columns, HeadGroups, Layout, Replicated, RowsOfEach, Vocabulary, WeightMapping, table

Ranks = st.sampled_from([1, 2, 4])


def check(layout: Layout, hf_names: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """Cut, then put together again: by ``join``, and by where each part says that it begins. Returns the parts."""
    parts = [layout.shard(hf_names, rank, ranks) for rank in range(ranks)]
    assert len({part.shape for part in parts}) == 1, "collectives want equal shapes"
    line = WeightMapping("param", tuple(str(i) for i in range(len(hf_names))), layout)
    for joined, tensor in zip(line.join(parts), hf_names, strict=True):
        assert torch.equal(joined, tensor)
    wholes = [torch.full_like(tensor, -1) for tensor in hf_names]
    for rank, part in enumerate(parts):
        for whole, (piece, start) in zip(wholes, layout.unshard(part, rank, ranks), strict=True):
            place = [slice(None)] * whole.dim()
            if layout.dim is not None:
                place[layout.dim] = slice(start, start + piece.shape[layout.dim])
            whole[tuple(place)] = piece
    assert all(torch.equal(whole, tensor) for whole, tensor in zip(wholes, hf_names, strict=True))
    return parts


def numbered(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Tensors of these shapes, no number twice."""
    ends = torch.tensor([0, *(torch.Size(shape).numel() for shape in shapes)]).cumsum(0).tolist()
    return [torch.arange(begin, end).view(shape) for shape, begin, end in zip(shapes, ends[:-1], ends[1:], strict=True)]


@given(Ranks, st.integers(1, 3))
def test_matrices(ranks: int, each: int) -> None:
    check(Replicated(), numbered((3, 2)), ranks)
    check(Columns(), numbered((3, ranks * each)), ranks)
    check(RowsOfEach(), numbered((ranks * each, 2), (ranks * each, 2)), ranks)


@given(Ranks, st.integers(1, 20))
def test_a_vocabulary_is_padded_with_zeros_to_even_parts(ranks: int, size: int) -> None:
    parts = check(Vocabulary(size), numbered((size, 2)), ranks)
    assert torch.cat(parts)[size:].abs().sum() == 0


@given(Ranks, st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_heads_stay_with_the_keys_that_they_read(ranks: int, each: int, queries: int, dim: int, is_bias: bool) -> None:
    groups = ranks * each
    rest = () if is_bias else (2,)
    hf_names = numbered((groups * queries * dim, *rest), (groups * dim, *rest), (groups * dim, *rest))
    parts = check(HeadGroups(groups, dim), hf_names, ranks)
    q, k, v = (tensor.unflatten(0, (groups, -1)) for tensor in hf_names)
    for group, param in enumerate(torch.cat(parts).unflatten(0, (groups, -1))):
        assert torch.equal(param, torch.cat([q[group], k[group], v[group]]))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_the_table_has_every_weight_of_transformers_model_and_no_other(architecture: str, tied: bool) -> None:
    config = tiny_config(architecture, tie_word_embeddings=tied)
    with torch.device("meta"):
        names = {name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()}
    lines = table(config, "lm")
    assert {name for line in lines for name in line.hf_names} == names
    assert len({line.param for line in lines}) == len(lines)
    config = tiny_config(architecture, num_labels=1)
    with torch.device("meta"):
        names = {name for name, _ in AutoModelForTokenClassification.from_config(config).named_parameters()}
    assert {name for line in table(config, "value") for name in line.hf_names} == names
