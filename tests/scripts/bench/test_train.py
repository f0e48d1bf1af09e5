import json
import sys
from argparse import Namespace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.bench import train
from scripts.bench.shapes import SHAPES, qwen2
from scripts.bench.train import PROMPT, Products, ragged
from workers.engine.fsdp import fsdp_engine as fsdp


def quick(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """The JSON report, and the table on stderr."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--quick", *words])
    train.main()
    output = capsys.readouterr()
    return json.loads(output.out), output.err


def test_quick_run_is_compared_with_products_of_the_same_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report, table = quick(monkeypatch, capsys)
    case = report["cases"]["3m float32"]
    assert case["parameters"] == 3385600 and case["tokens"] == 512
    assert case["padding_waste"] == 0 and case["padded_waste"] > 0.3
    parts = case["parts"]
    assert set(parts) == {"forward", "f+b", "update"} and all(part in table for part in parts)
    for part in parts.values():
        assert 0.1 < part["of_gemm"] < 1.3, "an engine does not beat its own products by much, nor is it ten times as slow"
        assert len(part["of_gemm_all"]) == 2 and part["of_peak"] is None
    # 2 FLOPs per token and parameter of a product (3.27M of the 3.39M), and 4 % more for attention.
    forward = parts["forward"]["flops_per_second"] * 512 / parts["forward"]["tokens_per_second"]
    assert forward == pytest.approx(2 * 3.27e6 * 512, rel=0.06)
    assert parts["update"]["cpu_seconds"] >= parts["f+b"]["cpu_seconds"] > parts["forward"]["cpu_seconds"]


def test_padding_is_reported_as_waste(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    padded = partial(fsdp.flat_rows, padding=88)
    monkeypatch.setattr(fsdp, "flat_rows", lambda rows, padding: padded(rows))
    report, _ = quick(monkeypatch, capsys)
    assert report["cases"]["3m float32"]["padding_waste"] == pytest.approx(88 / 600)


@pytest.mark.parametrize("shape", ["3m", "84m", "tiny"])
def test_products_match_the_weight_matrices_of_the_model(shape: str) -> None:
    sizes, products = SHAPES[shape], Products(Namespace(tokens=256, device="cpu"), shape, "float32")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(qwen2(shape))
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    embedding = 0 if sizes["tie_word_embeddings"] else sizes["vocab_size"] * sizes["hidden_size"]
    assert products.flops == 2 * 256 * (matrices - embedding)
    seconds, both = products.seconds()
    assert 0 < seconds < both


def test_ragged_rows_fill_the_micro_batch() -> None:
    rows = ragged(4096, 256)
    assert sum(rows) == 4096 and max(rows) <= PROMPT + 256 and len(set(rows)) > 20
    assert rows == ragged(4096, 256)
    assert 60 < sum(rows[:-1]) / len(rows[:-1]) < 100  # 17, and a quarter of 256, less the truncated tokens


def test_shared_prompts_take_less_time_than_whole_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "GROUPS", 2)
    report, table = quick(monkeypatch, capsys, "--groups", "64x8")
    case = report["cases"]["64x8"]
    assert case["tokens"] == 16 * 72 and case["computed"] == 2 * 64 + 16 * 8
    assert 0.1 < case["f+b"]["of_whole"] < 0.8 and 0.1 < case["log-probs"]["of_whole"] < 0.8
    assert "| 64x8 | 1152 | 256 |" in table


def test_turns_of_conversations_are_compared_with_shared_prompts_and_whole_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "N", 3)
    report, table = quick(monkeypatch, capsys, "--turns", "40x8x4")
    rows = [40 + 8 + 12 * part for part in range(4)]
    tree, prompts = (report["cases"][f"40x8x4 {side}"] for side in ("tree", "prompts"))
    assert tree["tokens"] == prompts["tokens"] == 3 * sum(rows)
    assert tree["computed"] == 40 + 3 * (rows[-1] - 40) and prompts["computed"] == 40 + 3 * (sum(rows) - 4 * 40)
    assert 0.1 < tree["f+b"]["of_whole"] < 0.8 and 0.1 < tree["log-probs"]["of_whole"] < 0.8
    assert f"| 40x8x4 tree | {3 * sum(rows)} | 172 |" in table
