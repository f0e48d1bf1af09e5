"""One vLLM engine over its life: requests that come and go, weights, sleep."""

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from tests.workers.rollout.contract import (
    REFUSED,
    check_continuation,
    check_endings,
    check_new_tokens,
    check_refusal,
    check_seeds,
    check_weights_in_flight,
    check_weights_that_do_not_fit,
    check_what_sleeps,
    drawn_by_embedded,
    weights_of,
)
from tests.workers.rollout.engines import log_prob_error, ragged_prompts, request
from tests.workers.rollout.vllm_workers import DEVICE, VLLM, make_small, place, start
from workers.roles.worker import Worker
from workers.rollout.base import Completion, Request
from workers.rollout.vllm.vllm_engine import VLLMRollout

pytestmark = VLLM


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(place(), DEVICE, 600.0)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return make_small(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(worker: Worker, model: PreTrainedModel) -> Iterator[VLLMRollout]:
    engine = start(worker, model)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: VLLMRollout, model: PreTrainedModel) -> VLLMRollout:
    """Awake, with the weights of ``model``, version 1, and nothing to do."""
    shared.wake(weights=True, kv_cache=True)
    shared.abort()
    shared.load_weights(model.named_parameters(), 1)
    shared.stats()
    return shared


def test_no_other_process_inspects_the_model(shared: VLLMRollout, model: PreTrainedModel) -> None:
    from vllm import ModelRegistry
    from vllm.model_executor.models.registry import _RegisteredModel  # inspected as it was registered

    (architecture,) = model.config.architectures
    assert isinstance(ModelRegistry.models[architecture], _RegisteredModel)


def test_log_probs_are_of_the_whole_vocabulary_at_the_temperature(engine: VLLMRollout, model: PreTrainedModel) -> None:
    settings = [{}, {"temperature": 0.7}, {"temperature": 1.5, "top_k": 5}, {"top_p": 0.8}, {"temperature": 0.0}]
    requests = [request(i, prompt, **settings[i % 5]) for i, prompt in enumerate(ragged_prompts(15))]
    for batch in (requests, requests[:1], requests[4:5]):
        for asked, completion in zip(batch, engine.generate(batch), strict=True):
            assert log_prob_error(model, asked, completion) < 1e-5


def test_a_seed_fixes_a_response_in_any_batch(engine: VLLMRollout) -> None:
    check_seeds(engine)


def test_prompts_that_enter_over_several_steps_change_no_draw(engine: VLLMRollout) -> None:
    prompts = [[2 + (i * j) % 50 for j in range(200)] for i in range(1, 17)]  # together more than max_num_batched_tokens
    requests = [request(i, prompt, max_tokens=6, ignore_eos=True) for i, prompt in enumerate(prompts)]
    together = engine.generate(requests)
    alone = [engine.generate([asked])[0] for asked in requests]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


def test_draws_are_the_embedded_engines(engine: VLLMRollout, model: PreTrainedModel) -> None:
    """Also of prompts that enter over several steps, of answers that new weights interrupt, and with no row cut or every one."""
    asked, expected = drawn_by_embedded(model)
    for some in (asked, asked[::5], asked[1::5]):
        assert [c.token_ids for c in engine.generate(some)] == [expected[request.id] for request in some]
    engine.submit(asked[:16])
    for _ in range(10):
        assert engine.step() == []
    engine.load_weights(model.named_parameters(), 2)
    ended = [completion for _ in range(15) for completion in engine.step()]
    assert engine.unfinished == 0
    assert {completion.id: completion.token_ids for completion in ended} == {i: expected[i] for i in range(16)}


def test_draws_follow_top_k(engine: VLLMRollout, model: PreTrainedModel) -> None:
    greedy = engine.generate([request(0, (2, 3, 4), temperature=0.0)])[0]
    narrow = engine.generate([request(0, (2, 3, 4), temperature=2.0, top_k=1)])[0]
    assert narrow.token_ids == greedy.token_ids


@pytest.mark.parametrize("keep_cache", [False, True])
def test_weights_change_while_requests_run(engine: VLLMRollout, model: PreTrainedModel, keep_cache: bool) -> None:
    check_weights_in_flight(engine, model, keep_cache=keep_cache)


@pytest.mark.parametrize(("bad", "message"), REFUSED)
def test_what_submit_refuses(engine: VLLMRollout, bad: Request, message: str) -> None:
    check_refusal(engine, bad, message)


def test_why_an_answer_ends(engine: VLLMRollout) -> None:
    check_endings(engine)


def test_continued_response_equals_the_uninterrupted_one(engine: VLLMRollout) -> None:
    check_continuation(engine, temperature=1.0)


def test_abort_gives_what_there_is(engine: VLLMRollout) -> None:
    requests = [request(i, (2 + i, 3, 4), ignore_eos=True, max_tokens=20) for i in range(6)]
    expected = engine.generate(requests)
    engine.submit(requests)
    for _ in range(4):
        assert engine.step() == []
    (one,) = engine.abort([4, 99])
    assert (one.id, one.finish_reason) == (4, "abort")
    n = len(one.token_ids)
    assert 1 <= n <= 4
    assert (one.token_ids, one.log_probs) == (expected[4].token_ids[:n], expected[4].log_probs[:n])
    assert engine.unfinished == 5
    assert [completion.id for completion in engine.abort()] == [0, 1, 2, 3, 5]
    assert engine.unfinished == 0 and engine.step() == []
    assert [c.token_ids for c in engine.generate(requests)] == [c.token_ids for c in expected], "ids are free again"


def test_new_tokens_are_returned_once_with_their_version(engine: VLLMRollout, model: PreTrainedModel) -> None:
    assert check_new_tokens(engine, lambda version: engine.load_weights(model.named_parameters(), version)) == {5, 6, 7}


def test_running_responses_continue_with_new_weights(engine: VLLMRollout, model: PreTrainedModel) -> None:
    requests = [request(i, prompt, ignore_eos=True, max_tokens=12) for i, prompt in enumerate(ragged_prompts(5))]
    expected = engine.generate(requests)
    engine.submit(requests)
    done: dict[int, Completion] = {}
    for step in range(40):
        if step == 5:
            engine.load_weights(model.named_parameters(), version=2)
        if step == 8:
            engine.sleep()
            engine.wake(weights=True, kv_cache=True)
            engine.load_weights(model.named_parameters(), version=3)
        done.update((completion.id, completion) for completion in engine.step())
    assert engine.unfinished == 0
    for wanted in expected:
        got = done[wanted.id]
        assert (got.token_ids, got.finish_reason, got.versions[-1]) == (wanted.token_ids, "length", 3)
        assert torch.allclose(torch.tensor(got.log_probs), torch.tensor(wanted.log_probs), atol=1e-5)


def test_stats_count_and_start_again(engine: VLLMRollout) -> None:
    engine.generate([request(i, (2, 3, 4), ignore_eos=True, max_tokens=5) for i in range(2)])
    first, second = engine.stats(), engine.stats()
    assert (first["prompt_tokens"], first["response_tokens"], first["decode_steps"]) == (6, 10, 5)
    assert first["cache_bytes"] > 0 and second["response_tokens"] == second["decode_steps"] == 0
    assert first["cached_tokens"] == second["cached_tokens"] == 0  # shorter than a block


def test_stats_tell_what_the_prefix_cache_had(engine: VLLMRollout) -> None:
    prompt = tuple(2 + i % 50 for i in range(150))
    engine.generate([request(0, prompt, max_tokens=2)])
    engine.stats()
    engine.generate([request(1, prompt, max_tokens=2)])
    assert engine.stats()["cached_tokens"] == 128  # a whole block of vLLM's on CPU


def test_weights_that_do_not_fit_are_named(engine: VLLMRollout, model: PreTrainedModel) -> None:
    check_weights_that_do_not_fit(engine, model)


def test_loading_leaves_the_trainers_tensors_alone(engine: VLLMRollout, model: PreTrainedModel) -> None:
    originals = weights_of(model)
    engine.load_weights(((name, weight * 2) for name, weight in originals.items()), 2)
    engine.sleep()
    assert all(torch.equal(weight, originals[name]) for name, weight in model.named_parameters())
    assert all(weight.requires_grad for weight in model.parameters())


def test_step_says_what_sleeps(engine: VLLMRollout, model: PreTrainedModel) -> None:
    check_what_sleeps(engine, lambda version: engine.load_weights(model.named_parameters(), version), [request(0, (2, 3))])
