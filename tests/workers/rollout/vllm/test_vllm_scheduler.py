"""Short paths of vLLM's scheduler against its own code: the same steps, tokens and cache blocks, one step at a time and with steps
under way."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.workers.rollout import engines
from tests.workers.rollout.engines import VOCAB, ragged_prompts
from tests.workers.rollout.vllm_workers import CPU_BUILD, make_small, place, start
from workers.roles.worker import Worker
from workers.rollout.base import Completion
from workers.rollout.vllm.vllm_engine import VLLMRollout

pytestmark = CPU_BUILD
BLOCK = 32


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(place(), "cpu", 600.0)
    yield worker
    worker.close()


@pytest.fixture(scope="module", params=[(False, 400), (True, 400), (True, 14)], ids=["steps", "steps under way", "little memory"])
def engine(
    request: pytest.FixtureRequest, worker: Worker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VLLMRollout, Any]]:
    from vllm.platforms.cpu import CpuPlatform

    is_ahead, blocks = request.param
    check = CpuPlatform.check_and_update_config

    def check_and_overlap(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = is_ahead  # vLLM has it off on CPU

    model = make_small(tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_overlap))
        engine = start(worker, model, block_size=BLOCK, num_gpu_blocks_override=blocks)
    yield engine, model
    engine.close()


def use_own_code(engine: VLLMRollout) -> Callable[[], None]:
    """vLLM's own methods; returns what undoes it."""
    scheduler = engine.engine.engine_core.engine_core.scheduler
    manager, shortened = scheduler.kv_cache_manager, (scheduler.schedule, scheduler.update_from_output)
    slots = manager.allocate_slots, manager.cache_blocks
    assert shortened[1] == engine._decoding.update_from_output
    del manager.allocate_slots, manager.cache_blocks, scheduler.update_from_output
    scheduler.schedule = partial(engine._scheduled, partial(type(scheduler).schedule, scheduler))

    def undo() -> None:
        scheduler.schedule, scheduler.update_from_output = shortened
        manager.allocate_slots, manager.cache_blocks = slots

    return undo


def history(engine: VLLMRollout, model: Any) -> list[Any]:
    """After each step: new tokens, ends, blocks of each request, counters; then tokens, log-probs and hashes of cached blocks.

    Two waves of prompts of which some are alike, more than there are slots; ends of both kinds; aborts, sleep, and new weights
    that keep the cache and that do not, while requests are under way.
    """
    scheduler = engine.engine.engine_core.engine_core.scheduler
    coordinator = scheduler.kv_cache_manager.coordinator
    engine.load_weights(model.named_parameters(), 1)
    engine.stats()
    prompts = [*ragged_prompts(10, longest=3 * BLOCK), *ragged_prompts(4, longest=100, seed=1)]
    prompts += prompts
    waves = [
        [
            # A third of the tokens that are likely ends some; others end when they have filled a block.
            engines.request(100 * wave + i, prompt, ignore_eos=i % 3 > 0, stop_token_ids=tuple(range(0, VOCAB, 25)), max_tokens=30 + i)
            for i, prompt in enumerate(prompts)
        ]
        for wave in range(2)
    ]
    found: list[Any] = []
    completions: dict[int, Completion] = {}
    engine.submit(waves[0])
    for step in range(2000):
        if step == 9:
            engine.submit(waves[1])
        if step == 20:
            ended = engine.abort([3, 101, 27, 7000])
            completions.update((completion.id, completion) for completion in ended)
            found.append([len(completion.token_ids) for completion in ended])
        if step in (31, 53):
            engine.load_weights(model.named_parameters(), step, keep_cache=step == 31)
        if step == 44:
            engine.sleep()
            engine.wake(weights=True, kv_cache=True)
            engine.load_weights(model.named_parameters(), step)
        if not engine.unfinished and step > 9:
            break
        completions.update((completion.id, completion) for completion in engine.step())
        tables = coordinator.single_type_managers[0].req_to_blocks
        counts = sorted((int(name.split("-")[0]), len(table)) for name, table in tables.items())
        found.append([engine.prefilled, sorted(completions), counts, len(scheduler.running), len(scheduler.waiting)])
    cached = sorted(str(key) for key in coordinator.block_pool.cached_block_hash_to_block._cache)
    found.append([(c.token_ids, c.log_probs, c.finish_reason, c.versions) for _, c in sorted(completions.items())])
    return [*found, engine.stats(), cached]


def test_short_paths_change_nothing(engine: tuple[VLLMRollout, Any]) -> None:
    rollout, model = engine
    scheduler, decoding = rollout.engine.engine_core.engine_core.scheduler, rollout._decoding
    assert scheduler.kv_cache_manager.coordinator.block_size == BLOCK
    counted = {"schedule": 0, "update": 0, "next": 0}

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            counted[name] += len(args[0].num_scheduled_tokens) if name == "update" else 1
            return method(*args)

        return call

    decoding._schedule, decoding._update = counting("schedule", decoding._schedule), counting("update", decoding._update)
    decoding._next_step = counting("next", decoding._next_step)  # type: ignore[method-assign]
    found = history(rollout, model)
    undo = use_own_code(rollout)
    expected = history(rollout, model)
    undo()
    assert found == expected
    *_, ends, stats, cached = found
    assert {reason for *_, reason, _ in ends} == {"stop", "length", "abort"} and len(ends) == 56 and cached
    # Most went the short way.
    assert counted["update"] < stats["response_tokens"] / 5
    if scheduler.kv_cache_manager.block_pool.num_gpu_blocks > 100:
        assert counted["schedule"] < counted["next"]
