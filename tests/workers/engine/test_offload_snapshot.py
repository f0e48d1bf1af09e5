"""Forward passes with the weights of a snapshot, on one rank; test_fsdp_engine.py and test_megatron_engine.py have several."""

from typing import Any

import pytest
import torch

from tests.workers.engine.fsdp.cases import assert_snapshots, exported, with_snapshots
from tests.workers.engine.toy import toy_engine
from workers.engine.offload import WeightSnapshot


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("qwen2", {}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("llama", {"lora_rank": 3, "lora_alpha": 6.0}),
    ],
    ids=["plain", "tied, bfloat16", "adapter"],
)
def test_forward_under_a_snapshot_is_bitwise_that_of_its_time(
    group: None, models: dict[str, str], model: str, changes: dict[str, Any]
) -> None:
    assert_snapshots(with_snapshots(toy_engine(models[model], **changes), offload=model == "qwen2"))


def test_only_trained_tensors_are_copied(group: None, models: dict[str, str]) -> None:
    engine = toy_engine(models["llama"], lora_rank=3, lora_alpha=6.0)
    sizes = {tensor.numel() for tensor in engine.trained_tensors()}
    assert sizes and sum(tensor.numel() for tensor in engine.trained_tensors()) == sum(
        weight.numel() for _, weight in engine.export_weights(kind="adapter")
    )


def test_present_weights_are_back_after_a_failure_and_none_are_swapped_without_a_snapshot(
    group: None, models: dict[str, str]
) -> None:
    engine = toy_engine(models["qwen2"])
    snapshot = WeightSnapshot(engine)
    with pytest.raises(AssertionError, match="no snapshot was taken"), snapshot.swapped_in():
        pass
    snapshot.take()
    with torch.no_grad():
        for tensor in engine.trained_tensors():
            tensor.add_(1.0)
    present = exported(engine)
    with pytest.raises(RuntimeError, match="in the pass"), snapshot.swapped_in():
        assert any(not torch.equal(weight, present[name]) for name, weight in exported(engine).items())
        raise RuntimeError("in the pass")
    assert all(torch.equal(weight, present[name]) for name, weight in exported(engine).items())
