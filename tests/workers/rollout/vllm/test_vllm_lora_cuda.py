"""vLLM on a GPU with a LoRA adapter that comes alone. Left out where there is no GPU, or no vLLM."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.multiprocessing import spawn
from transformers import AutoModelForCausalLM

from tests.tiny import model_config
from tests.workers.rollout.adapters import AdapterSource
from tests.workers.rollout.engines import ragged_prompts, spec_of
from tests.workers.rollout.vllm_workers import DEVICE, greedy_errors, make_small, place, start
from workers.roles.worker import Worker
from workers.rollout.sync.weight_sync import WeightSync

pytestmark = pytest.mark.skipif(DEVICE == "cpu" or find_spec("vllm") is None, reason="needs a GPU, and vLLM")
SIZES = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 4096}
WAYS: dict[str, dict[str, Any]] = {
    "one kernel after the other": {},
    "compiled, in graphs": {"enforce_eager": False, "cudagraph_capture_sizes": [1, 4, 8]},
}


def main(rank: int, path: str, way: str) -> None:
    lora: dict[str, Any] = {"lora_rank": 8, "lora_alpha": 32.0}
    worker = Worker(place(), DEVICE, 600.0)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    source = AdapterSource(model, model_config(path, **lora), DEVICE)
    engine = start(worker, model, lora=lora, lora_sync="adapter", **WAYS[way])
    config = replace(spec_of(path, name="vllm", lora_sync="adapter").rollout, verify_weights="full")
    sync = WeightSync(engine, cast(Any, source), config, rank=0)
    engine.sleep()
    prompts = ragged_prompts(7)
    weights = sum(weight.nbytes for weight in model.parameters())
    for version in range(3):
        source.change(version)
        asleep = free_bytes()
        engine.wake(weights=True, kv_cache=False)
        assert asleep - free_bytes() >= 0.9 * weights, f"round {version}: the weights were on the GPU while the engine slept"
        sync(version)
        engine.wake(weights=False, kv_cache=True)
        assert max(greedy_errors(source.merged(), engine, prompts)) < 1e-4
        with pytest.raises(AssertionError):
            greedy_errors(model, engine, prompts)
        engine.sleep()
    assert source.given == ["full", "full", "adapter", "adapter", "adapter"], "the base weights came once, and were verified"
    engine.close()
    worker.close()


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("way", WAYS)
def test_three_rounds(way: str, tmp_path: Path) -> None:
    """Of a new adapter, sleep and sync. Greedy answers are those of the merged model. A process each: it can have one engine."""
    make_small(tmp_path, **SIZES)
    spawn(main, args=(str(tmp_path), way), nprocs=1)
