import json
import sys
from typing import Any

import pytest
import torch

from scripts.bench import memory
from scripts.bench.memory import Alive, needed
from scripts.bench.shapes import SHAPES
from trainer.planner.memory_model import Setting, Shape


def quick(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["memory.py", "--quick"])
    memory.main()
    output = capsys.readouterr()
    assert "of what it must have" in output.err
    report: dict[str, Any] = json.loads(output.out)
    return report


def test_update_with_a_large_vocabulary_stays_near_the_minimum(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FSDP and the embedded rollout engine in one worker, 151,936 tokens in the vocabulary, 1,024 packed tokens."""
    report = quick(monkeypatch, capsys)
    phases, update = report["phases"], report["update"]
    assert list(phases) == ["sync", "generate", "log-probs", "update", "rest"]
    whole, chunk = 1024 * 151936 * 4, 256 * 151936 * 4
    assert update["tokens_by_vocabulary"] == whole and update["chunk"] == chunk
    for phase in ("log-probs", "update"):
        assert phases[phase]["largest tensor"] == chunk, f"{phase} has logits of more than a chunk"
    assert update["of_must"] <= 1.15
    # Parameters and moments, 117 MB, and less than 1 MB in addition: nothing else stays.
    kept = update["must"]["parameters"] + update["must"]["moments"]
    for phase, taken in phases.items():
        assert kept <= taken["after"] < kept + 1e6, phase
        assert taken["peak"] >= taken["after"]
    # Forward: a chunk's logits. Backward: a chunk and the weight's gradient, a quarter of a chunk.
    for phase, chunks in (("log-probs", 1.0), ("update", 1.25)):
        assert kept + chunks * chunk <= phases[phase]["peak"] < kept + (chunks + 0.1) * chunk, phase
    assert kept < phases["generate"]["peak"] < kept + 64e6


def test_minimum_memory_of_an_update_matches_hand_computed_sizes() -> None:
    """0.5B in float32: 494M parameters, and a chunk of 256 positions."""
    parts = needed(Shape.of(SHAPES["0.5b"]), Setting(compute=4), 1000)
    assert parts["parameters"] == parts["gradients"] == parts["moments"] / 2 == 4 * 494_032_768
    assert parts["layer inputs"] == 4 * 24 * 896 * 1000
    assert parts["head's chunk"] == 3 * 4 * 256 * 151936 and parts["head's gradient"] == 4 * 896 * 151936


def test_live_tensors_are_counted_once_and_until_freed() -> None:
    """Views share their storage; meta tensors have none."""
    base = torch.zeros(1000)
    with Alive([base]) as alive:
        view = base[:10]
        assert alive.now == 4000
        more = torch.zeros(500)
        del more
        assert alive.now == 4000 and alive.most == 6000 and alive.largest == 4000
        with torch.device("meta"):
            torch.zeros(10**6)
        assert alive.most == 6000 and len(view) == 10
