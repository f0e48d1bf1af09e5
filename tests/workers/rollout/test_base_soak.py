"""Every engine over a long time, seen from outside: memory that comes back, and none that is lost. Long: scripts/test.sh soak."""

from pathlib import Path

import pytest

from tests.tiny import save_tiny_model
from tests.workers.rollout.engine_process import EngineProcess
from tests.workers.rollout.vllm_workers import CPU_BUILD, SIZES
from workers.roles.rollout_engines import ENGINES

pytestmark = [CPU_BUILD, pytest.mark.soak]

# 85.6 million parameters, and 24,576 bytes of keys and values a token.
LARGE: dict[str, object] = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
                            "intermediate_size": 2304, "vocab_size": 4096}  # fmt: skip
ROWS, LENGTH = 42, 1024


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_sleep_gives_back_nine_tenths_of_what_the_engine_held(engine: str, tmp_path: Path) -> None:
    """SGLang gives nothing back on CPU: it has no such thing there."""
    save_tiny_model(tmp_path, **LARGE)
    with EngineProcess(tmp_path, name=engine, slots=ROWS, max_model_len=LENGTH) as process:
        rounds = []
        for version in range(2):
            process.call("wake")
            process.call("load", version)
            cache_bytes = process.call("fill", ROWS, LENGTH - 4)
            awake = process.rss()
            process.call("sleep")
            rounds.append((awake, process.rss()))
        held = (tmp_path / "model.safetensors").stat().st_size + cache_bytes
        print(f"{engine}: holds {held / 1e6:.0f} MB;", *(f"{a / 1e6:.0f} -> {b / 1e6:.0f} MB" for a, b in rounds))
        assert cache_bytes >= 1e9
        assert all(awake - asleep >= 0.9 * held for awake, asleep in rounds)
        assert rounds[-1][1] < 1.02 * rounds[0][1]


@pytest.mark.parametrize("engine", ENGINES)
def test_fifty_rounds_of_sleep_wake_and_sync_leak_nothing(engine: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, **SIZES)
    with EngineProcess(tmp_path, name=engine, slots=16, max_model_len=256) as process:
        sizes = []
        for version in range(55):
            process.call("sleep")
            process.call("wake")
            process.call("load", version)
            assert process.call("greedy") < 1e-4
            sizes.append(process.rss())
        print(f"{engine}: {sizes[4] / 1e6:.1f} MB after 5 rounds, {sizes[-1] / 1e6:.1f} MB after 55")
        assert sizes[-1] < 1.02 * sizes[4]
