"""The same engine on a GPU: other attention kernels, real moves. Left out where there is no GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema.common import TiledMLPConfig
from tests.tiny import save_tiny_model
from tests.workers.engine.fsdp.cases import exported, invariance_batch, shards, train
from tests.workers.engine.test_shared_prefixes import ONE_CUT, SEVERAL, both, cuts_of, grouped, row_by_row, tree_and_rows
from tests.workers.engine.toy import ToyLoss, cut, distance, gradients, one_rank, toy_batch, toy_engine
from tests.workers.forests import batch_of, conversation, forest
from workers.determinism import deterministic_kernels
from workers.engine.hf import packed_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LENGTHS = [40, 3, 25, 11, 60, 18, 300, 1]
MIXED = {"dtype": "bfloat16", "model_dtype": "float32", "device": "cuda"}


@pytest.fixture(autouse=True)
def nccl(tmp_path: Path) -> Iterator[None]:
    torch.cuda.set_device(0)
    with one_rank(tmp_path, "cpu:gloo,cuda:nccl"):
        yield


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose second layer sees four tokens."""
    layers = ["full_attention", "sliding_attention"]
    sizes = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "layer_types": layers}
    return save_tiny_model(tmp_path_factory.mktemp("window"), "qwen2", **sizes)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.05)])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "window"])
def test_gradients_and_log_probs_are_those_of_the_cpu(
    models: dict[str, str], window: str, monkeypatch: pytest.MonkeyPatch, architecture: str, dtype: str, bound: float
) -> None:
    calls: list[int] = []
    varlen = packed_attention.varlen
    monkeypatch.setattr(packed_attention, "varlen", lambda *args, **kwargs: calls.append(1) or varlen(*args, **kwargs))
    path = (models | {"window": window})[architecture]
    (share,), (plan,) = cut(toy_batch(LENGTHS), 1, max_tokens=310)
    exact, gpu = toy_engine(path), toy_engine(path, **(MIXED | {"dtype": dtype}))
    assert distance(gradients(gpu, share, plan, ToyLoss()), gradients(exact, share, plan, ToyLoss())) < bound
    found = [engine.forward(share, plan, {"log_probs", "entropy"}) for engine in (exact, gpu)]
    for name in ("log_probs", "entropy"):
        actual, expected = (batch.tokens[name] for batch in found if batch is not None)
        assert (actual - expected).abs().max() < 5 * bound
    assert bool(calls) == (dtype == "bfloat16"), "one kernel for all rows, where it can"


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.05)])
@pytest.mark.parametrize("architecture", ["qwen2", "window"])
def test_prompts_that_are_computed_once(models: dict[str, str], window: str, architecture: str, dtype: str, bound: float) -> None:
    path, batch = (models | {"window": window})[architecture], grouped(torch.float32)
    exact, gpu = toy_engine(path), toy_engine(path, **(MIXED | {"dtype": dtype}))
    for plan in (ONE_CUT, SEVERAL):
        shared, whole = (gradients(gpu, part, plan, ToyLoss()) for part in both(batch))
        assert distance(shared, whole) < bound
        assert distance(shared, gradients(exact, both(batch)[1], plan, ToyLoss())) < bound


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.05)])
@pytest.mark.parametrize("architecture", ["qwen2", "window"])
def test_prefixes_that_are_computed_once(
    models: dict[str, str], window: str, architecture: str, dtype: str, bound: float
) -> None:
    """Turns that are rows, rows of several turns, branches: against one row at a time, on the GPU and on the CPU."""
    path = (models | {"window": window})[architecture]
    exact, gpu = toy_engine(path), toy_engine(path, **(MIXED | {"dtype": dtype}))
    tree, rows = tree_and_rows(forest(2, n_groups=4))
    single = row_by_row(rows)
    expected, alone = gradients(exact, rows, single, ToyLoss()), exact.forward(rows, single, {"log_probs", "entropy"})
    for plan in cuts_of(tree):
        found = gradients(gpu, tree, plan, ToyLoss())
        assert distance(found, gradients(gpu, rows, single, ToyLoss())) < bound
        assert distance(found, expected) < bound
        outputs = gpu.forward(tree, plan, {"log_probs", "entropy"})
        assert outputs is not None and alone is not None
        for name, column in alone.tokens.items():
            assert (outputs.tokens[name] - column).abs().max() < 5 * bound


def test_deterministic_kernels_give_bitwise_identical_gradients_of_shared_prefixes(models: dict[str, str]) -> None:
    """Eight conversations of four rows: many gradients of keys are added to those of one prompt."""
    draw, turns = torch.Generator().manual_seed(0), range(4)
    prompt = torch.randint(61, (300,), generator=draw).tolist()
    spoken = [[(torch.randint(61, (100,), generator=draw).tolist(), [1] * 20) for _ in turns] for _ in range(8)]
    tree, _ = tree_and_rows(batch_of([row for turns in spoken for row in conversation(0, prompt, turns, parts=True)]))
    engine = toy_engine(models["qwen2"], **MIXED)
    with deterministic_kernels() as kernels:
        first, *others = (gradients(engine, tree, (tuple(range(32)),), ToyLoss()) for _ in range(4))
    assert all(torch.equal(grad, first[name]) for other in others for name, grad in other.items())
    assert kernels == set()


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.3)])
def test_experts(models: dict[str, str], dtype: str, bound: float) -> None:
    """In bfloat16 a token near a tie may go to other experts than on the CPU."""
    (share,), (plan,) = cut(invariance_batch("token-mean", torch.float32), 1, max_tokens=310)
    exact, gpu = toy_engine(models["experts"]), toy_engine(models["experts"], **(MIXED | {"dtype": dtype}))
    assert distance(gradients(gpu, share, plan, ToyLoss()), gradients(exact, share, plan, ToyLoss())) < bound
    assert torch.isfinite(train(gpu, range(2))["grad_norm"]).all()


@pytest.mark.parametrize(
    ("architecture", "changes", "bound"),
    [
        ("qwen2", {}, 0.05),
        ("qwen2", {"enable_gradient_checkpointing": True, "enable_activation_offload": True}, 0.05),
        ("llama", {"tiled_mlp": TiledMLPConfig(enabled=True, num_shards=4)}, 0.05),
        ("qwen3", {"lora_rank": 3}, 0.05),
        ("qwen3", {"model_dtype": "bfloat16"}, 0.05),
        ("window", {}, 0.05),
        ("experts", {}, 0.3),
    ],
)
def test_compiled_layers(models: dict[str, str], window: str, architecture: str, changes: dict[str, Any], bound: float) -> None:
    """Generated kernels: gradients of plain layers, for micro-batches of several sizes, and the same bits twice."""
    path, options = (models | {"window": window})[architecture], MIXED | changes
    plain, compiled = toy_engine(path, **options), toy_engine(path, **options, use_torch_compile=True)
    for lengths in (LENGTHS, [7, 7, 7, 50], [333]):
        (share,), (plan,) = cut(toy_batch(lengths), 1, max_tokens=340)
        found, again, expected = (gradients(engine, share, plan, ToyLoss()) for engine in (compiled, compiled, plain))
        assert distance(found, expected) < bound
        if architecture != "experts":
            assert distance(found, again) < 1e-3
        outputs = [engine.forward(share, plan, {"log_probs"}) for engine in (compiled, plain)]
        actual, expected_log_probs = (batch.tokens["log_probs"] for batch in outputs if batch is not None)
        assert (actual - expected_log_probs).abs().max() < 5 * bound


def test_compiled_layers_are_deterministic_if_that_is_requested(models: dict[str, str]) -> None:
    (share,), (plan,) = cut(toy_batch([1000] * 8), 1, max_tokens=8000)
    with deterministic_kernels() as kernels:
        engine = toy_engine(models["qwen2"], use_torch_compile=True, **MIXED)
        first, *others = (gradients(engine, share, plan, ToyLoss()) for _ in range(4))
    assert all(torch.equal(grad, first[name]) for other in others for name, grad in other.items())
    assert kernels == set()


def test_offloading_frees_memory_and_restores_bitwise(models: dict[str, str]) -> None:
    engine = toy_engine(models["qwen2"], **MIXED)
    train(engine, range(2))
    before, taken = shards(engine), torch.cuda.memory_allocated()
    engine.move(params="cpu", grads="cpu", optimizer="cpu")
    assert taken - torch.cuda.memory_allocated() >= sum(tensor.nbytes for tensor in before.values())
    engine.move(params="device", optimizer="device")
    assert torch.cuda.memory_allocated() == taken
    assert all(torch.equal(tensor, before[name]) for name, tensor in shards(engine).items())


def test_offloaded_and_resumed_is_bitwise_identical(models: dict[str, str], tmp_path: Path) -> None:
    engine, offloaded = toy_engine(models["qwen2"], **MIXED), toy_engine(models["qwen2"], optimizer_offload=True, **MIXED)
    train(engine, range(2))
    engine.save(str(tmp_path / "checkpoint"))
    train(engine, range(2, 4))
    offloaded.load(str(tmp_path / "checkpoint"))
    train(offloaded, range(2, 4))
    weights = exported(offloaded)
    assert all(torch.equal(weight, weights[name]) for name, weight in exported(engine).items())


def test_deterministic_kernels_give_bitwise_identical_gradients(models: dict[str, str]) -> None:
    """Long rows: there FlashAttention adds up from several blocks, in arbitrary order without deterministic kernels."""
    (share,), (plan,) = cut(toy_batch([1000] * 8), 1, max_tokens=8000)
    engine = toy_engine(models["qwen2"], **MIXED)
    with deterministic_kernels() as kernels:
        first, *others = (gradients(engine, share, plan, ToyLoss()) for _ in range(4))
    assert all(torch.equal(grad, first[name]) for other in others for name, grad in other.items())
    assert kernels == set()


def test_a_float32_adapter_on_a_bfloat16_base(models: dict[str, str]) -> None:
    """Both rest on the host between steps, as the optimizer does: the same bits as on the device."""
    lora: dict[str, Any] = {"lora_rank": 3, "lora_alpha": 6.0}
    here, there = (
        toy_engine(models["qwen2"], dtype="bfloat16", device="cuda", param_offload=away, optimizer_offload=away, **lora)
        for away in (False, True)
    )
    base = {name: weight.clone() for name, weight in there.export_weights(kind="full")}
    norms = {
        name: train(engine, range(3))["grad_norm"]
        for name, engine in (("here", here), ("exact", toy_engine(models["qwen2"], **lora)))
    }
    for step in range(3):
        there.move(params="cpu", grads="cpu", optimizer="cpu")
        there.move(params="device", optimizer="device")
        assert train(there, range(step, step + 1))["grad_norm"] == norms["here"][step]
    torch.testing.assert_close(norms["here"], norms["exact"], rtol=0.1, atol=0)
    adapter = dict(there.export_weights(kind="adapter"))
    assert {weight.dtype for weight in adapter.values()} == {torch.float32}
    assert {weight.dtype for weight in base.values()} == {torch.bfloat16}
    assert all(torch.equal(weight, adapter[name]) for name, weight in here.export_weights(kind="adapter"))
    assert all(torch.equal(weight, base[name]) for name, weight in there.export_weights(kind="full"))


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.05)])
@pytest.mark.parametrize(
    "changes",
    [{"enable_activation_offload": True}, {"tiled_mlp": TiledMLPConfig(enabled=True, num_shards=4)}],
    ids=["inputs on the host", "mlp in pieces"],
)
def test_what_long_rows_cost_less_with_gives_the_same_gradient(
    models: dict[str, str], changes: dict[str, Any], dtype: str, bound: float
) -> None:
    (share,), (plan,) = cut(toy_batch(LENGTHS), 1, max_tokens=310)
    plain, less = (
        toy_engine(models["qwen2"], enable_gradient_checkpointing=True, **(MIXED | {"dtype": dtype} | more))
        for more in ({}, changes)
    )
    assert distance(gradients(less, share, plan, ToyLoss()), gradients(plain, share, plan, ToyLoss())) < bound
