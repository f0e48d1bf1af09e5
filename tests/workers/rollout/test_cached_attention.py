import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_config
from tests.workers.rollout.test_kv_cache import make_cache, put, states
from workers.rollout.cached_attention import CACHED_ATTENTION, StepAttention, probe_cache_shape


class Layer(nn.Module):
    layer_idx = 1


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 250), max_size=6),
    prompt_lengths=st.lists(st.integers(1, 70), max_size=2),
    window=st.sampled_from([None, 1, 20]),
    stale=st.sampled_from([1e6, -1e6]),
)
def test_attention_is_that_of_each_row_alone(
    lengths: list[int], prompt_lengths: list[int], window: int | None, stale: float
) -> None:
    if not lengths + prompt_lengths:
        return
    prompt_lengths = sorted(prompt_lengths, reverse=True)
    cache, generator = make_cache(), torch.Generator().manual_seed(0)
    n, total = len(lengths), len(lengths) + len(prompt_lengths)
    cache.reserve(total, max(*lengths, *prompt_lengths, 0, 0) + 1, kept=0, expected_rows=total)
    for pool in cache.pools:
        pool.fill_(stale)  # what earlier rows left behind must not be seen
    before = [states(length, generator) for length in lengths]
    for row, (key, value) in enumerate(before):
        put(cache, row, key, value)
    tokens = [1] * n + prompt_lengths
    query, key, value = (
        torch.randn(1, heads, sum(tokens), dim, generator=generator, dtype=torch.float64)
        for heads, dim in ((4, 4), (2, 4), (2, 6))
    )
    attention = StepAttention(cache, np.array(lengths, dtype=np.int64), prompt_lengths)
    out = attention.attend(Layer(), query, key, value, None, scaling=0.3, sliding_window=window)
    assert out.shape == (1, sum(tokens), 4, 6)
    for row, part in enumerate(zip(*(x[0].split(tokens, dim=1) for x in (query, key, value)), out[0].split(tokens), strict=True)):
        q, k, v, got = part
        if row < n:
            k = torch.cat([before[row][0][1].transpose(0, 1), k], dim=1)
            v = torch.cat([before[row][1][1].transpose(0, 1), v], dim=1)
        k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        i, j = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None], torch.arange(k.shape[1])
        seen = (j <= i) & (j > i - (window or 10**6))
        scores = (q @ k.transpose(1, 2) * 0.3).masked_fill(~seen, float("-inf"))
        assert torch.allclose(got, (scores.softmax(-1) @ v).transpose(0, 1), atol=1e-6)  # scores' softmax is in float32


def test_chunks_are_read_by_the_rows_that_reach_them() -> None:
    cache = make_cache()
    cache.reserve(5, 201, kept=0, expected_rows=5)
    sorted_rows = StepAttention(cache, np.array([200, 130, 70, 10, 10]), [])
    assert [(span.rows, span.start, span.stop) for span in sorted_rows.spans] == [
        (5, 0, 64),
        (3, 64, 128),
        (2, 128, 192),
        (1, 192, 208),
    ]
    assert sorted_rows.excess == 0
    assert StepAttention(cache, np.array([10, 130, 70, 10, 200]), []).excess == 3 + 1 + 2 + 3


def test_the_probe_leaves_the_experts_as_they_were() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    model.set_attn_implementation(CACHED_ATTENTION)
    model.set_experts_implementation("grouped_mm")
    before = model.get_experts_implementation()
    assert probe_cache_shape(model).layers == model.config.num_hidden_layers
    assert model.get_experts_implementation() == before
