"""Where vLLM keeps weights, and what can be seen of them, with real engines; two ranks: tests/workers/rollout/test_ranks.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema.common import Dtype
from tests.workers.rollout.engines import ModelSource, load_unspoiled, one_off, spec_of, spoil_loading, weight_sync
from tests.workers.rollout.vllm_workers import CPU_BUILD, make_small, place, start
from workers.metric import plain_numbers
from workers.roles.worker import Worker
from workers.rollout.sync.weight_sync import WeightSync
from workers.rollout.verification import TURNS, WeightMismatch

pytestmark = CPU_BUILD


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(place(), "cpu", 600.0)
    yield worker
    worker.close()


class Case:
    """An engine, and the trainer's model."""

    def __init__(self, worker: Worker, path: Path, architecture: str, tied: bool, dtype: Dtype) -> None:
        self.dtype = dtype
        self.model = make_small(path, architecture, tie_word_embeddings=tied)
        self.names = list(dict(self.model.named_parameters()))
        self.engine = start(worker, self.model, dtype=dtype)

    def sync(self, mode: Any) -> WeightSync:
        return weight_sync(self.engine, ModelSource(self.model), spec_of("somewhere", name="vllm", dtype=self.dtype), mode)

    def nbytes(self) -> int:
        """Of all places: vLLM's packed head is another copy of a tied embedding."""
        embedding = self.model.get_input_embeddings().weight.numel()
        numbers = sum(weight.numel() for weight in self.model.parameters()) + embedding * self.model.config.tie_word_embeddings
        return numbers * torch.finfo(getattr(torch, self.dtype)).bits // 8


@pytest.fixture(
    scope="module",
    params=[
        ("qwen2", False, "float32"),
        ("qwen3", True, "bfloat16"),
        pytest.param(("llama", True, "float32"), marks=pytest.mark.soak),
    ],
    ids=lambda param: "-".join(map(str, param)),
)
def shared(request: pytest.FixtureRequest, worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    case = Case(worker, tmp_path_factory.mktemp("model"), *request.param)
    yield case
    case.engine.close()


@pytest.fixture
def case(shared: Case) -> Iterator[Case]:
    yield shared
    load_unspoiled(shared.engine)


def test_every_byte_is_read_in_64_samples_or_at_once(case: Case) -> None:
    sampling, reading_all = case.sync("sample"), case.sync("full")
    read = sum(plain_numbers(sampling(version)[1])["rollout/verified_bytes"] for version in range(3, 3 + TURNS))
    assert read == case.nbytes() == plain_numbers(reading_all(0)[1])["rollout/verified_bytes"]
    case.engine.sleep()
    case.engine.wake(weights=True, kv_cache=True)
    assert plain_numbers(reading_all(1)[1])["rollout/verified_bytes"] == case.nbytes()


def test_one_number_that_is_off_anywhere_ends_the_run_if_all_is_read(case: Case) -> None:
    """First and last of each tensor: of each part of what is fused, packed or padded."""
    for version, name in enumerate(case.names):
        for index in (0, -1):
            spoil_loading(case.engine, one_off(name, index))
            with pytest.raises(WeightMismatch) as error:
                case.sync("full")(version)
            places = 2 if case.model.config.tie_word_embeddings and "embed_tokens" in name else 1
            line = f"{name} in vllm on rank 0 is not the trainer's, weights of version {version}: {places} of "
            assert str(error.value).startswith(line)


@pytest.mark.parametrize(
    "part",
    [
        "embed_tokens.weight", "v_proj.weight", "down_proj.weight",
        *(pytest.param(part, marks=pytest.mark.soak) for part in ("q_proj.weight", "up_proj.weight", "model.norm.weight")),
    ],
)  # fmt: skip
def test_one_number_that_is_off_is_found_by_64_samples(case: Case, part: str) -> None:
    (name, *_) = (name for name in case.names if name.endswith(part))
    spoil_loading(case.engine, one_off(name, 77 % case.model.get_parameter(name).numel()))
    sync = case.sync("sample")
    found = []
    for version in range(TURNS):
        try:
            sync(version)
        except WeightMismatch as error:
            assert str(error).startswith(f"{name} in vllm on rank 0")
            found.append(version)
    assert len(found) == (2 if case.model.config.tie_word_embeddings and part == "embed_tokens.weight" else 1)


def probed(case: Case, *, exact: bool) -> Any:
    """The packed layer that holds layer 1's gate and up."""
    name = "model.layers.1.mlp.up_proj.weight"
    (held,) = (held for held in case.engine.held_weights(exact=exact) if name in held.names)
    assert held.names == ("model.layers.1.mlp.gate_proj.weight", name)
    return held


def test_an_exact_probe_reads_each_number_bitwise(case: Case) -> None:
    case.sync("off")(0)
    held = probed(case, exact=True)
    assert (held.lines, held.line_bytes) == (64, 2 * 96 * torch.finfo(getattr(torch, case.dtype)).bits // 8)
    for name, lines in zip(held.names, held.read(5, 64), strict=True):
        weight = case.model.get_parameter(name).to(lines.dtype)
        assert torch.equal(lines, weight[:, 5:].T)


def test_a_sampled_probe_sees_more_than_twice_what_rounding_may_do(case: Case) -> None:
    """The bound in docs/rollout.md. Rounding alone never shows: test_every_byte_is_read reads all in 64 samples."""
    case.sync("off")(0)
    held, (_, name) = probed(case, exact=False), probed(case, exact=False).names
    weight = case.model.get_parameter(name).detach()
    want, slack = held.expected(1, weight, 0, held.lines)
    assert slack.max() < (5e-6 if case.dtype == "float32" else 0.02) * weight.abs().max()
    seen = []
    for row, column in [(0, 0), (41, 30), (95, 63), (17, 62), (60, 13)]:
        line = column // 4
        place, by = row * weight.shape[1] + column, 2.05 * float(slack[line, row])
        spoil_loading(case.engine, one_off(name, place, by))
        taken = weight[row, column].add(by).to(getattr(torch, case.dtype)) - weight[row, column].to(getattr(torch, case.dtype))
        case.sync("off")(1)
        got = held.read(line, line + 1)[1][0, row].double()
        off = abs(got - want[line, row]) > slack[line, row]
        assert off or abs(taken) <= 2 * slack[line, row], "what a cast makes smaller may hide"
        seen.append(bool(off))
    assert sum(seen) >= 3


def test_inputs_that_are_exchanged_show(case: Case) -> None:
    """Neighbours are summed with unlike factors, so that their sum distinguishes them."""
    name = "model.layers.0.self_attn.q_proj.weight"

    def exchange(of: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, [1, 0, *range(2, tensor.shape[1])]] if of == name else tensor

    spoil_loading(case.engine, exchange)
    sync = case.sync("sample")
    with pytest.raises(WeightMismatch, match=name):
        for version in range(TURNS):
            sync(version)


def test_weights_without_a_known_place_are_reported(case: Case) -> None:
    held = case.engine.held_weights(exact=False)
    case.engine.held_weights = lambda *, exact: [one for one in held if "model.norm.weight" not in one.names]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"keeps model.norm.weight \(1 in all\)"):
        case.sync("sample")(0)
    del case.engine.held_weights


# On two ranks and more, without engines


def layer_of(kind: type, **sizes: Any) -> Any:
    layer = object.__new__(kind)
    vars(layer).update(sizes)
    return layer


@pytest.mark.parametrize("rank", range(4))
def test_ranks_that_share_a_head_of_keys_and_values_hold_the_same_rows(rank: int) -> None:
    """8 heads over 4 ranks, 2 heads of keys and values: each is held twice."""
    from vllm.model_executor.layers.linear import QKVParallelLinear

    from workers.rollout.vllm.vllm_weights import parts_of

    sizes = {"num_heads": 2, "num_kv_heads": 1, "num_kv_head_replicas": 2, "total_num_heads": 8, "total_num_kv_heads": 2}
    layer = layer_of(QKVParallelLinear, head_size=32, v_head_size=16, tp_rank=rank, tp_size=4, **sizes)
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    parts = parts_of("model.layers.0.self_attn.qkv_proj", "weight", layer, fused, {})
    found = [(part.name.split(".")[-2], part.row, part.rows, part.start, part.size) for part in parts]
    share = rank // 2
    assert found == [("q_proj", 0, 64, rank * 64, 64), ("k_proj", 64, 32, share * 32, 32), ("v_proj", 96, 16, share * 16, 16)]
    together = parts_of("model.qkv_proj", "weight", layer, {"qkv_proj": ["qkv_proj"]}, {})
    starts = [rank * 64, 256 + share * 32, 256 + 64 + share * 16]
    assert [(part.name, part.start) for part in together] == [("model.qkv_proj.weight", start) for start in starts]
