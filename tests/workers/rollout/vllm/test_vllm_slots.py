"""Cache blocks of requests: the same with and without the calls that are skipped, one step at a time and with steps under way."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.workers.rollout import engines
from tests.workers.rollout.engines import ragged_prompts
from tests.workers.rollout.vllm_workers import CPU_BUILD, make_small, place, start
from workers.roles.worker import Worker
from workers.rollout.vllm.vllm_engine import VLLMRollout

pytestmark = CPU_BUILD
BLOCK = 32


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(place(), "cpu", 600.0)
    yield worker
    worker.close()


@pytest.fixture(params=[False, True], ids=["steps", "steps under way"])
def engine(
    request: pytest.FixtureRequest, worker: Worker, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[VLLMRollout]:
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_overlap(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = request.param  # vLLM has it off on CPU

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_overlap))
    model = make_small(tmp_path_factory.mktemp("model"))
    engine = start(worker, model, block_size=BLOCK)
    engine.load_weights(model.named_parameters(), 1)
    yield engine
    engine.close()


def generated(engine: VLLMRollout, scheduler: Any) -> list[Any]:
    """Tokens of all responses, blocks that their requests have after each step, and hashes of cached blocks at the end."""
    assert engine.engine.reset_prefix_cache()
    prompts = [*ragged_prompts(10, longest=3 * BLOCK), *ragged_prompts(4, longest=200, seed=1)]
    # Of all lengths: some end when they have filled a block.
    requests = [engines.request(i, prompt, ignore_eos=True, max_tokens=60 + i) for i, prompt in enumerate([*prompts, *prompts])]
    engine.stats()
    engine.submit(requests)
    tokens, blocks, prefilled = {}, [], 0
    coordinator = scheduler.kv_cache_manager.coordinator
    while engine.unfinished:
        tokens.update((completion.id, completion.token_ids) for completion in engine.step())
        prefilled += engine.prefilled or 0
        tables = coordinator.single_type_managers[0].req_to_blocks
        names = sorted(tables, key=lambda name: int(name.split("-")[0]))
        blocks.append([len(tables[name]) for name in names])
    stats = engine.stats()
    assert prefilled == stats["prompt_tokens"] - stats["cached_tokens"] - len(requests), "the last token of each decodes"
    cached = sorted(str(key) for key in coordinator.block_pool.cached_block_hash_to_block._cache)
    return [tokens, blocks, len(cached), cached]


def test_skipped_calls_change_no_block(engine: VLLMRollout) -> None:
    scheduler = engine.engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    coordinator, calls = manager.coordinator, []
    assert coordinator.block_size == BLOCK
    cache = coordinator.cache_blocks
    coordinator.cache_blocks = lambda *args: (calls.append(args), cache(*args))
    found, n_skipping = generated(engine, scheduler), len(calls)
    assert {"allocate_slots", "cache_blocks"} <= vars(manager).keys()
    del manager.allocate_slots, manager.cache_blocks  # vLLM's own methods again
    calls.clear()
    expected = generated(engine, scheduler)
    assert found == expected and expected[2] > 50
    assert n_skipping < len(calls) / 5
