"""Short paths of vLLM's scheduler and model runner against its own code: the same steps, tokens and cache blocks."""

from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any

import pytest

from tests.workers.rollout import engines
from tests.workers.rollout.engines import VOCAB, ragged_prompts
from tests.workers.rollout.vllm_workers import DEVICE, VLLM, make_small, place, start
from workers.roles.worker import Worker
from workers.rollout.base import Completion
from workers.rollout.vllm.vllm_engine import VLLMRollout

pytestmark = VLLM
BLOCK = 32
STARTED = pytest.StashKey[str]()


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(place(), DEVICE, 600.0)
    yield worker
    worker.close()


CASES = {
    "steps in flight": (True, {}),
    "steps": (False, {}),
    "little memory": (True, {"num_gpu_blocks_override": 40}),
    "long prompts": (True, {"max_num_batched_tokens": 24}),
}


@pytest.fixture(scope="module", params=CASES)
def engine(
    request: pytest.FixtureRequest, worker: Worker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VLLMRollout, Any]]:
    """On CUDA, where a process can have one engine, the first case; another with ``-k``."""
    if DEVICE == "cuda" and request.session.stash.setdefault(STARTED, request.param) != request.param:
        pytest.skip("an engine a process: choose this case with -k")
    is_ahead, settings = CASES[request.param]
    settings = {"block_size": BLOCK, "num_gpu_blocks_override": 400} | settings
    model = make_small(tmp_path_factory.mktemp("model"))
    if DEVICE == "cuda":
        engine = start(worker, model, async_scheduling=is_ahead, dtype="bfloat16", **settings)
    else:
        from vllm.platforms.cpu import CpuPlatform

        check = CpuPlatform.check_and_update_config

        def check_and_overlap(config: Any) -> None:
            check(config)
            config.scheduler_config.async_scheduling = is_ahead  # vLLM has it off on CPU

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_overlap))
            engine = start(worker, model, **settings)
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
    runner = engine._on_worker(attrgetter("model_runner"))
    prepare = runner.__dict__.pop("_prepare_input_ids")

    def undo() -> None:
        runner._prepare_input_ids = prepare
        scheduler.schedule, scheduler.update_from_output = shortened
        manager.allocate_slots, manager.cache_blocks = slots

    return undo


def state(engine: VLLMRollout) -> list[Any]:
    """Of vLLM's scheduler, and how many requests its worker knows."""
    scheduler = engine.engine.engine_core.engine_core.scheduler
    coordinator = scheduler.kv_cache_manager.coordinator
    (manager,) = coordinator.single_type_managers
    running = [
        (
            plain(request.request_id), len(manager.req_to_blocks[request.request_id]), request.num_computed_tokens,
            request.num_in_flight_tokens, request.num_output_placeholders,
        )
        for request in scheduler.running
    ]  # fmt: skip
    cached = sorted(str(key) for key in coordinator.block_pool.cached_block_hash_to_block._cache)
    known = engine._on_worker(number_of_requests)
    return [running, len(scheduler.waiting), cached, plain(scheduler.prev_step_scheduled_req_ids), known]


def step_of(step: Any) -> list[Any]:
    """What vLLM's worker gets. Of cache blocks the number: their ids depend on what came before."""
    cached = step.scheduled_cached_reqs
    return [
        plain(step.num_scheduled_tokens), step.total_num_scheduled_tokens, len(step.scheduled_new_reqs),
        plain(step.finished_req_ids), plain(step.preempted_req_ids or ()),
        plain(cached.req_ids), plain(cached.resumed_req_ids), plain(cached.all_token_ids),
        [blocks and len(blocks[0]) for blocks in cached.new_block_ids], cached.num_computed_tokens, cached.num_output_tokens,
        len(step.new_block_ids_to_zero or ()),
    ]  # fmt: skip


def plain(names: Any) -> Any:
    """vLLM's ids without what is random in them."""
    if isinstance(names, str):
        return names.split("-")[0]
    ordered = names if isinstance(names, (list, dict)) else sorted(names)
    return [plain(name) for name in ordered]


def refuses_cache(engine: VLLMRollout) -> bool:
    """With steps in flight the configuration refuses on GPUs to keep the cache of old weights."""
    return DEVICE == "cuda" and bool(engine._decoding._ahead)


def number_of_requests(worker: Any) -> int:
    return len(worker.model_runner.requests)


def history(engine: VLLMRollout, model: Any) -> list[Any]:
    """What each step leaves; then tokens, log-probs, ends, versions and counters.

    Two waves of prompts of which some are alike, more than there are slots; ends of both kinds; aborts, sleep, and new weights
    that keep the cache and that do not, while requests are in flight.
    """
    scheduler = engine.engine.engine_core.engine_core.scheduler
    found: list[Any] = []
    schedule = scheduler.schedule

    def recorded(*args: Any) -> Any:
        step = schedule(*args)
        found.append(step_of(step))
        return step

    scheduler.schedule = recorded
    engine.load_weights(model.named_parameters(), 1)
    engine.stats()
    prompts = [*ragged_prompts(10, longest=3 * BLOCK), *ragged_prompts(4, longest=100, seed=1)]
    prompts += [prompts[1][:1] * (BLOCK + 1), prompts[1][:1] * (2 * BLOCK + 1)]  # alike but for one token
    prompts += prompts
    stops = tuple(range(0, VOCAB, 25))
    waves = [
        [
            # Some end by a stop token, others when they have filled a block.
            engines.request(100 * wave + i, prompt, ignore_eos=i % 3 > 0, stop_token_ids=stops, max_tokens=30 + i)
            for i, prompt in enumerate(prompts)
        ]
        for wave in range(2)
    ]
    completions: dict[int, Completion] = {}
    engine.submit(waves[0])
    for step in range(2000):
        if step == 9:
            engine.submit(waves[1])
        if step == 20:
            ended = engine.abort([3, 101, 30, 7000])
            completions.update((completion.id, completion) for completion in ended)
            found.append([len(completion.token_ids) for completion in ended])
        if step in (31, 53):
            engine.load_weights(model.named_parameters(), step, keep_cache=step == 31 and not refuses_cache(engine))
        if step == 44:
            engine.sleep()
            engine.wake(weights=True, kv_cache=True)
            engine.load_weights(model.named_parameters(), step)
        if not engine.unfinished and step > 9:
            break
        completions.update((completion.id, completion) for completion in engine.step())
        found.append([engine.prefilled, sorted(completions), *state(engine), engine.stats()])
    found.append([(c.token_ids, c.log_probs, c.finish_reason, c.versions) for _, c in sorted(completions.items())])
    scheduler.schedule = schedule
    return found


def test_short_paths_change_nothing(engine: tuple[VLLMRollout, Any]) -> None:
    rollout, model = engine
    scheduler, decoding = rollout.engine.engine_core.engine_core.scheduler, rollout._decoding
    assert scheduler.kv_cache_manager.coordinator.block_size == BLOCK
    history(rollout, model)  # the other two begin alike: with what one has left
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
    ends = found[-1]
    assert {reason for *_, reason, _ in ends} == {"stop", "length", "abort"} and len(ends) == 64
    # Most went the short way.
    assert counted["update"] < sum(len(tokens) for tokens, *_ in ends) / 3
    assert counted["next"] > 20


def test_steps_that_go_through_vllms_own_code(engine: tuple[VLLMRollout, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the requests above do not reach: the last token of a prompt alone in a step, a request that was left out of one."""
    rollout, model = engine
    scheduler, decoding = rollout.engine.engine_core.engine_core.scheduler, rollout._decoding
    rollout.load_weights(model.named_parameters(), 1)
    rollout.submit([engines.request(i, prompt, ignore_eos=True, max_tokens=50) for i, prompt in enumerate(ragged_prompts(3))])
    for _ in range(6):
        rollout.step()
    assert decoding._is_settled()
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.running[1], "is_prefill_chunk", True)
        assert not decoding._is_settled()
    left_out = scheduler.running[1].request_id
    scheduler.prev_step_scheduled_req_ids.remove(left_out)
    assert not decoding._is_settled()
    scheduler.prev_step_scheduled_req_ids.add(left_out)
    assert decoding._is_settled()
    monkeypatch.setattr(scheduler, "_get_new_block_ids_to_zero", lambda: [7])
    assert decoding.schedule().new_block_ids_to_zero == [7]
    rollout.abort()
