"""One SGLang engine over its life, driven from this process: parity with transformers, requests that come and go, weights."""

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler

import numpy as np
import psutil
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
    check_weights_that_do_not_fit,
    check_what_sleeps,
    drawn_by_embedded,
    weights_of,
)
from tests.workers.rollout.engines import log_prob_error, ragged_prompts, request, spec_of
from tests.workers.rollout.vllm_workers import CPU_BUILD, LENGTH, greedy_errors, make_small, place
from workers.roles.rollout_engines import make_rollout
from workers.rollout.base import Completion, EngineAsleep, Request
from workers.rollout.sglang.sglang_calls import EngineDied
from workers.rollout.sglang.sglang_engine import SGLangRollout, WeightInSGLang, agreed
from workers.rollout.verification import Lines

pytestmark = CPU_BUILD


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return make_small(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def shared(model: PreTrainedModel) -> Iterator[SGLangRollout]:
    before = states()
    engine = make_rollout(spec_of(model.config._name_or_path, name="sglang", max_model_len=LENGTH, slots=16), place())
    assert states() == before, "starting leaves no trace in this process"
    assert isinstance(engine, SGLangRollout)
    yield engine
    engine.close()


def states() -> list[object]:
    signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)]
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(), dict(os.environ), *signals]


@pytest.fixture
def engine(shared: SGLangRollout, model: PreTrainedModel) -> SGLangRollout:
    """Awake, with the weights of ``model``, version 1, and nothing to do."""
    shared.wake(weights=True, kv_cache=True)
    shared.abort()
    shared.load_weights(model.named_parameters(), 1)
    shared.stats()
    return shared


def test_greedy_is_generate_before_and_after_weights_change(engine: SGLangRollout, model: PreTrainedModel) -> None:
    """A prefix that outlived its weights would show: the same prompts come again."""
    prompts = [*ragged_prompts(5), *ragged_prompts(2, longest=200, seed=3)]
    originals = weights_of(model)
    try:
        assert max(greedy_errors(model, engine, prompts)) < 1e-5
        for version, sleeping in ((2, False), (3, True)):
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(torch.randn_like(weight) * 0.03)
            if sleeping:
                engine.sleep()
                engine.wake(weights=True, kv_cache=False)
            engine.load_weights(model.named_parameters(), version)
            engine.wake(weights=False, kv_cache=True)
            assert max(greedy_errors(model, engine, prompts)) < 1e-5
    finally:
        model.load_state_dict(originals, strict=False)


def test_log_probs_are_of_the_whole_vocabulary_at_the_temperature(engine: SGLangRollout, model: PreTrainedModel) -> None:
    settings = [{}, {"temperature": 0.7}, {"temperature": 1.5, "top_k": 5}, {"top_p": 0.8}, {"temperature": 0.0}]
    requests = [request(i, prompt, **settings[i % 5]) for i, prompt in enumerate(ragged_prompts(15))]
    for batch in (requests, requests[:1], requests[4:5]):
        for asked, completion in zip(batch, engine.generate(batch), strict=True):
            assert log_prob_error(model, asked, completion) < 1e-5


def test_draws_follow_temperature_top_k_and_top_p(engine: SGLangRollout) -> None:
    greedy, narrow, sure = engine.generate(
        [request(0, (2, 3, 4), temperature=0.0), request(1, (2, 3, 4), temperature=2.0, top_k=1),
         request(2, (2, 3, 4), temperature=2.0, top_p=1e-6)]
    )  # fmt: skip
    assert narrow.token_ids == sure.token_ids == greedy.token_ids
    hot = engine.generate([request(i, (2, 3, 4), temperature=2.0) for i in range(8)])
    assert len({completion.token_ids for completion in hot}) > 4


@pytest.mark.parametrize(("bad", "message"), REFUSED)
def test_what_submit_refuses(engine: SGLangRollout, bad: Request, message: str) -> None:
    check_refusal(engine, bad, message)


def test_why_an_answer_ends(engine: SGLangRollout) -> None:
    check_endings(engine)


def test_continued_response_equals_the_uninterrupted_one(engine: SGLangRollout) -> None:
    check_continuation(engine, temperature=1.0)


def test_a_seed_fixes_a_response_in_any_batch(engine: SGLangRollout) -> None:
    check_seeds(engine)


def test_draws_are_the_embedded_engines(engine: SGLangRollout, model: PreTrainedModel) -> None:
    """Also of responses that are recalled, because weights change."""
    asked, expected = drawn_by_embedded(model)
    for some in (asked, asked[::5], asked[1::5]):
        assert [c.token_ids for c in engine.generate(some)] == [expected[request.id] for request in some]
    engine.submit(asked)
    done: list[Completion] = []
    while engine.unfinished:
        done += engine.step()
        engine.load_weights(model.named_parameters(), 2)
    assert {completion.id: completion.token_ids for completion in done} == expected


def test_the_models_own_end_token_ends_nothing_unasked(engine: SGLangRollout, model: PreTrainedModel) -> None:
    ends = engine.generate(
        [request(i, prompt, stop_token_ids=(), temperature=3.0, max_tokens=200) for i, prompt in enumerate(ragged_prompts(8))]
    )
    assert any(model.config.eos_token_id in completion.token_ids[:-1] for completion in ends)
    assert {completion.finish_reason for completion in ends} == {"length"}


def test_abort_gives_what_there_is(engine: SGLangRollout) -> None:
    requests = [request(i, (2 + i, 3, 4), temperature=0.0, ignore_eos=True, max_tokens=240 if i else 2) for i in range(12)]
    expected = engine.generate(requests)
    engine.submit(requests)
    (short,) = engine.step()
    assert short.id == 0
    (one,) = engine.abort([4, 99])
    assert (one.id, one.finish_reason) == (4, "abort")
    n = len(one.token_ids)
    assert 1 <= n < 240 and len(one.log_probs) == n
    assert one.token_ids == expected[4].token_ids[:n]
    assert engine.unfinished == 10
    assert [completion.id for completion in engine.abort()] == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    assert engine.unfinished == 0 and engine.step() == []
    assert [c.token_ids for c in engine.generate(requests)] == [c.token_ids for c in expected], "ids are free again"


def test_what_waits_can_be_aborted(engine: SGLangRollout) -> None:
    engine.submit([request(i, (2, 3), ignore_eos=True, max_tokens=100 + i) for i in range(20)])  # 16 at once
    engine.step()
    answers = engine.abort([17, 18, 19])
    assert [(answer.id, answer.finish_reason) for answer in answers] == [(17, "abort"), (18, "abort"), (19, "abort")]
    engine.submit([request(30, (2, 3))])
    (unbegun,) = engine.abort([30])
    assert (unbegun.token_ids, unbegun.finish_reason) == ((), "abort")


def test_new_tokens_are_returned_once_with_their_version(engine: SGLangRollout, model: PreTrainedModel) -> None:
    """On a busy machine SGLang may finish every response while this process waits for a core: another attempt then."""
    attempts = (
        check_new_tokens(engine, lambda version: engine.load_weights(model.named_parameters(), version)) for _ in range(8)
    )
    assert any(versions == {5, 6, 7} for versions in attempts)


def test_running_responses_continue_with_new_weights(engine: SGLangRollout, model: PreTrainedModel) -> None:
    lengths = (3, 40, 90, 140, 200)  # far apart: SGLang continues while this process is busy with something else
    requests = [request(i, prompt, temperature=0.0, ignore_eos=True, max_tokens=length)
                for i, (prompt, length) in enumerate(zip(ragged_prompts(5), lengths, strict=True))]  # fmt: skip
    expected = engine.generate(requests)
    engine.submit(requests)
    done = engine.step()
    engine.load_weights(model.named_parameters(), version=2)
    done += engine.step()
    engine.sleep()
    engine.wake(weights=True, kv_cache=True)
    engine.load_weights(model.named_parameters(), version=3)
    while engine.unfinished:
        done += engine.step()
    by_id = {completion.id: completion for completion in done}
    for wanted in expected:
        got = by_id[wanted.id]
        assert (got.token_ids, got.finish_reason) == (wanted.token_ids, "length")
        assert torch.allclose(torch.tensor(got.log_probs), torch.tensor(wanted.log_probs), atol=1e-5)
    assert (by_id[0].versions[-1], by_id[4].versions[-1]) == (1, 3)


def test_an_answer_that_ended_as_it_was_recalled_is_not_gone_on_with(engine: SGLangRollout) -> None:
    """Whether SGLang says abort or stop of an answer whose last token is its stop token is a matter of a moment."""
    for max_tokens in (1, 2, 3):
        asked = [request(i, (2, 3, 4), temperature=0.0, max_tokens=max_tokens if i % 2 else 30) for i in range(10)]
        expected = engine.generate(asked)
        engine.submit(asked)
        done: list[Completion] = []
        while engine.unfinished:
            done += engine.step()
            engine._recall()
        assert {c.id: c.token_ids for c in done} == {c.id: c.token_ids for c in expected}
        assert all(len(c.log_probs) == len(c.token_ids) for c in done)


def test_stats_count_and_start_again(engine: SGLangRollout) -> None:
    engine.generate([request(i, (2, 3, 4), ignore_eos=True, max_tokens=5) for i in range(2)])
    first, second = engine.stats(), engine.stats()
    assert (first["prompt_tokens"], first["response_tokens"]) == (6, 10)
    assert first["cache_bytes"] == 16 * LENGTH * 2 * 2 * 2 * 32 * 4 and second["response_tokens"] == 0


def test_weights_that_do_not_fit_are_named(engine: SGLangRollout, model: PreTrainedModel) -> None:
    check_weights_that_do_not_fit(engine, model)


def test_buckets_of_any_size_load_the_same(
    engine: SGLangRollout, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (1, 20_000):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.01)
        monkeypatch.setattr(engine, "bucket_bytes", size)
        engine.load_weights(((name, weight.double()) for name, weight in model.named_parameters()), 2)
        assert max(greedy_errors(model, engine, ragged_prompts(3))) < 1e-5


def test_what_is_read_is_what_sglang_computes_with(engine: SGLangRollout, model: PreTrainedModel) -> None:
    """Fused, tied, or alone; whole, and any part of it. A single number that is another one shows."""
    weights = {held.names[0]: held for held in engine.held_weights(exact=True)}
    assert weights.keys() == {name for name, _ in model.named_parameters()}
    for name, weight in model.named_parameters():
        flat = weight.detach().flatten()
        ranges = [(0, len(flat)), (len(flat) // 3, len(flat) // 2), (len(flat) - 1, len(flat))]
        for (start, stop), got in zip(ranges, engine.read_weights([(weights[name], *ends) for ends in ranges]), strict=True):
            assert torch.equal(got, flat[start:stop]), name
    name = "model.layers.1.self_attn.k_proj.weight"
    other = model.get_parameter(name).detach().clone()
    other[3, 5] += 1
    assert engine.engine is not None
    engine.engine.call("begin_update")
    engine.engine.call("update", [bytes(ForkingPickler.dumps([(name, other)]))])
    engine.engine.call("end_update")
    ((got,),) = engine.read_held([Lines(weights[name], 0, other.numel())])
    assert torch.equal(got, other.flatten()) and int((got != model.get_parameter(name).flatten()).sum()) == 1


def test_weights_that_sglang_has_no_place_for_are_reported(engine: SGLangRollout) -> None:
    with pytest.raises(RuntimeError, match=r"copies nothing of model\.extra(.|\n)*cannot be read; verify_weights=off"):
        engine.read_weights([(WeightInSGLang("model.extra", (3,), torch.float32), 0, 3)])
    assert engine.generate([request(0, (2, 3))]), "it lives on"


def test_what_sglang_refuses_is_raised(engine: SGLangRollout) -> None:
    """Outside a bracket SGLang takes no weights, says so in its result, and raises nothing."""
    assert engine.engine is not None
    with pytest.raises(RuntimeError, match=r"SGLang failed in update:(.|\n)*must run between"):
        engine.engine.call("update", [b""])
    with pytest.raises(RuntimeError, match="no weight-update session is open"):
        engine.engine.call("end_update")


def test_after_a_failure_the_next_sync_is_its_own(engine: SGLangRollout, model: PreTrainedModel) -> None:
    assert engine.engine is not None
    engine.engine.call("begin_update")
    with pytest.raises(RuntimeError, match=r"SGLang failed in begin_update:(.|\n)*already open"):
        engine.load_weights(model.named_parameters(), 2)
    engine.engine.call("end_update")
    with pytest.raises(RuntimeError, match=r"SGLang failed in load:(.|\n)*KeyError: 9"):
        engine.engine.ranks[0].call("load", 9, torch.empty(0), [])
    engine.load_weights(model.named_parameters(), 3)
    assert max(greedy_errors(model, engine, ragged_prompts(2))) < 1e-5


def test_logits_that_are_not_finite_are_an_error(engine: SGLangRollout, model: PreTrainedModel) -> None:
    weights = weights_of(model)
    weights["model.norm.weight"].fill_(torch.nan)
    engine.load_weights(iter(weights.items()), 7)
    with pytest.raises(FloatingPointError, match=r"request 3: .* not finite \(weights of version 7\)"):
        engine.generate([request(3, (2, 3), temperature=0.0)])


def test_step_says_what_sleeps(engine: SGLangRollout, model: PreTrainedModel) -> None:
    check_what_sleeps(
        engine,
        lambda version: engine.load_weights(model.named_parameters(), version),
        [request(i, (2, 3), ignore_eos=True, max_tokens=2 + 60 * i) for i in range(3)],
    )
    assert engine.unfinished == 0


def test_idle_it_burns_no_core(engine: SGLangRollout) -> None:
    engine.generate([request(0, (2, 3))])

    def seconds() -> float:
        times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
        return sum(time.user + time.system for time in times)

    before = seconds()
    time.sleep(2)
    assert seconds() - before < 0.4


def test_ranks_have_to_agree() -> None:
    none = torch.nan
    copies = torch.tensor([[1.0, none, 3.0, none, 5.0], [1.0, 2.0, 4.0, none, none], [1.0, none, 3.0, none, none]])
    assert agreed(copies).nan_to_num(-1.0).tolist() == [1.0, 2.0, -1.0, -1.0, 5.0]


def test_other_ranks_of_a_replica_take_part_and_answer_nothing(model: PreTrainedModel) -> None:
    spec = spec_of(model.config._name_or_path, name="sglang", max_model_len=LENGTH, tensor_model_parallel_size=2)
    other = make_rollout(spec, replace(place(), rank=1, local_rank=1, world_size=2))
    assert isinstance(other, SGLangRollout) and other.engine is None
    other.sleep()
    other.wake(weights=True, kv_cache=False)
    weights = model.named_parameters()
    other.load_weights(weights, 1)
    assert next(weights, None) is None, "the export is collective: every rank draws from it to its end"
    with pytest.raises(EngineAsleep, match="KV cache"):
        other.generate([request(0, (2, 3))])
    other.wake(weights=False, kv_cache=True)
    assert other.generate([request(0, (2, 3))]) == [] and other.unfinished == 0 and other.abort() == []
    with pytest.raises(ValueError, match="empty prompt"):
        other.generate([request(0, ())])


def test_an_engine_that_dies_at_work_is_named(engine: SGLangRollout) -> None:
    """Ends the engine: the last test."""
    assert engine.engine is not None
    engine.submit([request(i, (2, 3), ignore_eos=True, max_tokens=2 + 250 * i) for i in range(2)])
    engine.step()
    server = psutil.Process(engine.engine._process.pid)
    (victim,) = (child for child in server.children() if "scheduler" in child.name())
    victim.suspend()
    engine.engine._send("step", ([],))
    victim.kill()
    with pytest.raises(EngineDied, match=rf"SGLang died in step: process {server.pid} ended with 1\n"):
        engine.engine._answer("step")
    with pytest.raises(EngineDied):
        engine.step()
