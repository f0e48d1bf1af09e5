"""Two ranks read a model: each no more than its rows, in the stored type, and what they hold is what one rank would have read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from tests.tiny import save_tiny_model
from tests.workers.engine.forks import fork_ranks
from tests.workers.engine.toy import toy_engine
from workers.engine import stored_weights
from workers.engine.fsdp.fsdp_engine import FSDPEngine
from workers.engine.fsdp.sharding import local, offsets
from workers.engine.hf.hf_model import PackedModel, auto_class
from workers.engine.hf.hf_model import model_config as hf_config


class Case(NamedTuple):
    """kept: the parameters' type. model: what differs from the tiny model, and in which type it is stored."""

    kept: str
    model: dict[str, Any]
    head: str = "lm"
    lora_rank: int = 0


# The vocabulary of 61 is odd; 3 x 8 rows of keys and a hidden size of 24 leave no rank a power of two.
ODD = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 37}
CASES = {
    "bfloat16, tied": Case("float32", {"dtype": torch.bfloat16, "tie_word_embeddings": True}),
    "bfloat16, untied, uneven": Case("float32", {"dtype": torch.bfloat16, **ODD}),
    "float32, tied, uneven": Case("bfloat16", {"tie_word_embeddings": True, **ODD}),
    "float32, untied": Case("float32", {}),
    "as stored": Case("bfloat16", {"dtype": torch.bfloat16}),
    "experts": Case("float32", {"architecture": "qwen3_moe", "dtype": torch.bfloat16, "num_experts": 5}),
    "a new head": Case("float32", {"dtype": torch.bfloat16}, head="value"),
    "an adapter": Case("bfloat16", {"dtype": torch.bfloat16}, lora_rank=3),
    "an adapter and a new head": Case("float32", {}, head="value", lora_rank=3),
}


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of weights that are read in here, by read."""
    read, counts = stored_weights.read_bytes, list[int]()

    def counting(file: int, buffer: Any, begin: int, path: Path) -> None:
        counts.append(len(buffer))
        read(file, buffer, begin, path)

    with mock.patch.object(stored_weights, "read_bytes", counting):
        yield counts


def read_by_one(engine: FSDPEngine) -> dict[str, Tensor]:
    """By the model's name, what transformers' own loader and peft make of the files."""
    spec, dtype = engine.spec, engine._model.hf.dtype
    config = hf_config(spec.model, spec.head)
    with torch.random.fork_rng():
        hf = auto_class(config, spec.head).from_pretrained(spec.model.path, config=config, dtype=dtype)
    packed = PackedModel(hf, spec.head)
    if spec.head != "lm":
        for param in packed.value_head.parameters():
            torch.nn.init.zeros_(param)
    if spec.model.has_adapter:
        from workers.engine.fsdp.lora import inject

        inject(packed, spec.model, trained=True, seed=spec.seed)
    return {**dict(hf.named_parameters()), **dict(hf.named_buffers())}


def main(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    path = Path(directory)
    dist.init_process_group("gloo", init_method=f"file://{path / 'rendezvous'}", rank=rank, world_size=2)
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        with counted() as counts:
            engine = toy_engine(str(path / name), case.head, dtype=case.kept, lora_rank=case.lora_rank)
        held = {**dict(engine._model.hf.named_parameters()), **dict(engine._model.hf.named_buffers())}
        whole = read_by_one(engine)
        assert held.keys() == whole.keys()
        stored, different = 0, []
        for of, tensor in held.items():
            expected: Tensor = whole[of].detach()
            if isinstance(tensor, DTensor):
                expected = local(distribute_tensor(expected, tensor.device_mesh, tensor.placements))
                start, stop = offsets(tensor)[0], offsets(tensor)[0] + len(expected)
                assert torch.equal(expected, whole[of].detach()[start:stop])
                if ".lora_" not in of and "score" not in of:
                    stored += expected.numel() * case.model.get("dtype", torch.float32).itemsize
            if local(tensor).dtype != expected.dtype or not torch.equal(local(tensor), expected):
                different.append(of)
        found[name] = {"different": different, "read": sum(counts), "largest": max(counts), "share": stored}
    torch.save(found, path / f"rank_{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("reads")
    for name, case in CASES.items():
        folder = save_tiny_model(path / name, **case.model)
        if "tied" in name:  # in several files
            AutoModelForCausalLM.from_pretrained(folder, dtype="auto").save_pretrained(folder, max_shard_size="20KB")
            (path / name / "model.safetensors").unlink()
            assert len([*(path / name).glob("*.safetensors")]) > 1
    fork_ranks(main, (str(path),), nprocs=2)
    return [torch.load(path / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_a_rank_reads_its_rows_and_no_more(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        assert found[name]["read"] == found[name]["share"] > 0
    shares = [found[name]["read"] for found in ranks]
    assert max(shares) < 0.6 * sum(shares)


@pytest.mark.parametrize("name", CASES)
def test_the_shards_are_those_of_a_whole_read(ranks: list[dict[str, Any]], name: str) -> None:
    assert [found[name]["different"] for found in ranks] == [[], []]
