"""Compiled layers and heads: the same numbers, and graphs that serve every micro-batch.

The graphs are captured as on a GPU, and run by torch's own kernels: no C++ compiler is needed. Code that is really generated is a
soak test.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention

from configs.schema.common import TiledMLPConfig
from tests.tiny import save_tiny_model
from tests.workers.engine.fsdp.cases import shards, train
from tests.workers.engine.test_shared_prefixes import ONE_CUT, SEVERAL, grouped
from tests.workers.engine.toy import ToyLoss, ValueLoss, cut, distance, gradients, toy_batch, toy_engine
from workers.batch import Batch
from workers.engine.hf import packed_attention
from workers.engine.logprob import _compiled
from workers.plan import MicroBatches

LENGTHS = [4, 30, 1, 17, 30, 2]
ON_HOST = {"enable_gradient_checkpointing": True, "enable_activation_offload": True}
TILED = {"tiled_mlp": TiledMLPConfig(enabled=True, num_shards=4)}


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Graphs are captured anew in each test, and, but for one, not translated to C++."""
    _compiled.cache_clear()
    torch.compiler.reset()
    counters.clear()
    if request.node.originalname != "test_generated_code_gives_the_same_gradient":
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    yield
    _compiled.cache_clear()
    torch.compiler.reset()


def pair(make: Callable[..., Any], **options: Any) -> tuple[Any, Any]:
    return make(**options), make(**options, use_torch_compile=True)


@pytest.mark.parametrize(
    ("model", "head", "options"),
    [
        pytest.param("qwen2", "lm", {}, id="kept", marks=pytest.mark.soak),
        pytest.param("llama", "lm", TILED, id="tiled", marks=pytest.mark.soak),
        pytest.param("window", "lm", {"enable_gradient_checkpointing": True}, id="recomputed"),
        pytest.param("qwen3", "value", ON_HOST, id="on the host", marks=pytest.mark.soak),
    ],
)
def test_gradients_are_equal(group: None, models: dict[str, str], model: str, head: str, options: dict[str, Any]) -> None:
    (share,), (plan,) = cut(toy_batch(LENGTHS, dtype=torch.float64), 1, max_tokens=50)
    loss = ToyLoss() if head == "lm" else ValueLoss()
    plain, compiled = pair(partial(toy_engine, models[model], head, dtype="float64"), **options)
    assert len(plan) > 1
    assert distance(gradients(compiled, share, plan, loss), gradients(plain, share, plan, loss)) < 1e-12
    assert counters["stats"]["unique_graphs"] > 0


def test_layers_share_graphs_that_serve_every_micro_batch(group: None, models: dict[str, str]) -> None:
    """Under FSDP's hooks, which gather and cast parameters: bfloat16 computed from float32."""
    options = {"dtype": "bfloat16", "model_dtype": "float32", "enable_gradient_checkpointing": True}
    plain, compiled = pair(partial(toy_engine, models["qwen2"]), **options)
    graphs = []
    for lengths in ([40, 3, 25, 11, 60, 18], [7, 7, 7, 50], [33], [20, 19, 18, 17, 16, 15, 14]):
        (share,), (plan,) = cut(toy_batch(lengths), 1, max_tokens=80)
        for engine in (plain, compiled):
            engine.train_step(share, plan, ToyLoss())
        graphs.append(counters["stats"]["unique_graphs"])
    # Of a layer: up to attention (norm; projections and rotary embedding) and after it (projection; the rest). The first layer of
    # FSDP's unit has two of its own: its input is a view. Of the head: two.
    assert 0 < graphs[0] <= 10 and graphs[-1] == graphs[0]
    apart = max(float((weight - shards(plain)[name]).abs().max()) for name, weight in shards(compiled).items())
    assert apart < 1e-3


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param("qwen2", {}, id="norms"),
        pytest.param("llama", TILED, id="tiled", marks=pytest.mark.soak),
        pytest.param("qwen3", {"lora_rank": 2}, id="adapter", marks=pytest.mark.soak),
        pytest.param("qwen3_moe", {}, id="experts", marks=pytest.mark.soak),
    ],
)
def test_deep_models_have_the_graphs_of_one_layer(group: None, tmp_path: Path, model: str, options: dict[str, Any]) -> None:
    """A graph that holds for one layer alone would meet torch's limit at the ninth, and later layers would run uncompiled."""
    graphs = []
    for layers in (2, 12):
        torch.compiler.reset()
        counters.clear()
        path = save_tiny_model(tmp_path / str(layers), model, num_hidden_layers=layers)
        engine = toy_engine(path, use_torch_compile=True, **options)
        (share,), (plan,) = cut(toy_batch(LENGTHS), 1, max_tokens=50)
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            engine.train_step(share, plan, ToyLoss())
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[1]


def kernel(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, most: int, longest: int, *, scale: float, **options: object
) -> Tensor:
    """In place of the CUDA kernel, with the same signature: a mask over all pairs. It reads the longest lengths, as that does."""
    assert options == {"window_size": (-1, 0), "enable_gqa": True} and scale == q.shape[-1] ** -0.5
    at, to = torch.arange(len(q)), torch.arange(len(k))
    of, other = (torch.searchsorted(ends, places, right=True) for ends, places in ((queries, at), (keys, to)))
    ahead = (keys[of] - 1 - (queries[of] - 1 - at))[:, None] - to  # the last query of a row is aligned with its last key
    seen = (of[:, None] == other) & (ahead >= 0) & (ahead < longest) & (queries[of] - at <= most)[:, None]
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True).transpose(0, 1)


@pytest.fixture
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of all rows is one call, as on CUDA."""
    monkeypatch.setattr(packed_attention, "_has_kernel", lambda q: True)
    monkeypatch.setattr(packed_attention, "varlen_attn", kernel)


def test_the_kernel_for_all_rows_is_part_of_a_layers_graph(group: None, models: dict[str, str], one_kernel: None) -> None:
    """Rows of any number and length have one graph of a layer, rows that share prefixes another, and the head has two."""
    plain, compiled = pair(partial(toy_engine, models["qwen2"], dtype="float64"))

    def compare(share: Batch, plan: MicroBatches) -> None:
        found = [gradients(engine, share, plan, ToyLoss()) for engine in (plain, compiled)]
        assert distance(*found) < 1e-12

    for lengths in (LENGTHS, [7, 7, 7, 50], [33], [20, 19, 18, 17, 16, 15, 14]):
        (share,), (plan,) = cut(toy_batch(lengths, dtype=torch.float64), 1, max_tokens=80)
        compare(share, plan)
    assert counters["stats"]["unique_graphs"] == 3 and not counters["graph_break"]
    compare(grouped(), ONE_CUT)
    compare(grouped(), SEVERAL)
    assert counters["stats"]["unique_graphs"] == 4 and not counters["graph_break"]


def test_rows_that_share_nothing_have_the_graph_of_those_that_do(group: None, models: dict[str, str], one_kernel: None) -> None:
    """So have dummy rows. Their graph would be compiled in the first step in which a micro-batch has none that share."""
    plain, compiled = pair(partial(toy_engine, models["qwen2"], dtype="float64"))
    graphs = []
    for plan in (ONE_CUT, SEVERAL, ((2, 0, 5), (1, 3, 4, 6), (), (7,), (8,))):
        assert distance(*(gradients(engine, grouped(), plan, ToyLoss()) for engine in (plain, compiled))) < 1e-12
        whole, found = (engine.forward(grouped(), plan, {"log_probs"}) for engine in (plain, compiled))
        torch.testing.assert_close(found.tokens["log_probs"], whole.tokens["log_probs"], rtol=0, atol=1e-6)
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[-1]


@pytest.mark.soak
def test_generated_code_gives_the_same_gradient(group: None, models: dict[str, str]) -> None:
    (share,), (plan,) = cut(toy_batch(LENGTHS), 1, max_tokens=50)
    plain, compiled = pair(partial(toy_engine, models["qwen3"]), enable_gradient_checkpointing=True)
    assert distance(gradients(compiled, share, plan, ToyLoss()), gradients(plain, share, plan, ToyLoss())) < 1e-5


@pytest.mark.soak
def test_experts(group: None, models: dict[str, str]) -> None:
    (share,), (plan,) = cut(toy_batch(LENGTHS, dtype=torch.float64), 1, max_tokens=50)
    plain, compiled = pair(partial(toy_engine, models["experts"], dtype="float64"))
    assert distance(gradients(compiled, share, plan, ToyLoss()), gradients(plain, share, plan, ToyLoss())) < 1e-10


@pytest.mark.soak
def test_adapter_is_switched_off_for_the_reference(group: None, models: dict[str, str]) -> None:
    batch = toy_batch(LENGTHS, dtype=torch.float64)
    (share,), (plan,) = cut(batch, 1, max_tokens=50)
    found = []
    for engine in pair(partial(toy_engine, models["qwen2"], dtype="float64"), lora_rank=2):
        before = engine.forward(share, plan, {"log_probs"})
        train(engine, range(3))
        found.append([engine.forward(share, plan, {"log_probs"}, adapter=adapter) for adapter in (True, False)] + [before])
    for plain, compiled in zip(*found, strict=True):
        assert torch.allclose(compiled.tokens["log_probs"], plain.tokens["log_probs"], atol=1e-10)
    trained, base, before = (one.tokens["log_probs"] for one in found[1])
    assert torch.allclose(base, before, atol=1e-10) and not torch.allclose(trained, base, atol=1e-4)
