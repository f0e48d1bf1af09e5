"""Requests that come and go, weights that are lent and loaded, sleep."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.workers.rollout.contract import (
    REFUSED,
    check_continuation,
    check_new_tokens,
    check_refusal,
    check_weights_in_flight,
    check_what_sleeps,
)
from tests.workers.rollout.engines import hf_logits, log_prob_error, make_engine, make_model, ragged_prompts, request, spec_of
from tests.workers.rollout.vllm_workers import LENGTH
from workers.rollout.base import Completion, EngineAsleep, Request
from workers.rollout.embedded.embedded_engine import EmbeddedRollout
from workers.rollout.malloc_trim import trim_free_memory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return make_model(tmp_path_factory.mktemp("model"))


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def assert_alike(got: Completion, wanted: Completion) -> None:
    """The same but for rounding: products differ in the last bit where weights lie at another alignment, as in a mapped file."""
    assert (got.token_ids, got.finish_reason) == (wanted.token_ids, wanted.finish_reason)
    assert torch.allclose(torch.tensor(got.log_probs), torch.tensor(wanted.log_probs), atol=1e-5)


# Requests


@pytest.mark.parametrize(("bad", "message"), [*REFUSED, (request(5, (2, 3), max_tokens=0), "request 5: max_tokens 0 < 1")])
def test_what_submit_refuses(model: PreTrainedModel, bad: Request, message: str) -> None:
    check_refusal(make_engine(model, max_model_len=LENGTH), bad, message)


def test_continued_response_equals_the_uninterrupted_one(model: PreTrainedModel) -> None:
    check_continuation(make_engine(model, max_model_len=LENGTH, slots=6), temperature=1.0)


def test_why_an_answer_ends(model: PreTrainedModel) -> None:
    engine = make_engine(model, max_model_len=30)
    free = engine.generate([request(0, (2, 3, 4), temperature=0.0, stop_token_ids=(), max_tokens=100)])[0]
    assert (len(free.token_ids), free.finish_reason) == (27, "length")
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    asked = [
        request(1, (2, 3, 4), temperature=0.0, stop_token_ids=(1, stop), max_tokens=100),
        request(2, (2, 3, 4), temperature=0.0, stop_token_ids=(1, stop), max_tokens=100, ignore_eos=True),
        request(3, (2, 3, 4), temperature=0.0, stop_token_ids=(1, stop), max_tokens=first + 1),
        request(4, (2, 3, 4), temperature=0.0, stop_token_ids=(), max_tokens=1),
        request(5, range(2, 31), temperature=0.0, stop_token_ids=(), max_tokens=100),
    ]
    stopped, ignoring, both, one, full = engine.generate(asked)
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[: first + 1], "stop")
    assert (ignoring.token_ids, ignoring.finish_reason) == (free.token_ids, "length")
    assert both.finish_reason == "stop"
    assert (one.token_ids, one.finish_reason) == (free.token_ids[:1], "length")
    assert (len(full.token_ids), full.finish_reason) == (1, "length")


def test_waiting_requests_enter_in_order(model: PreTrainedModel) -> None:
    engine = make_engine(model, slots=2)
    engine.submit([request(i, (2 + i, 3), max_tokens=2, ignore_eos=True) for i in range(5)])
    ends = []
    while engine.unfinished:
        ends.append([completion.id for completion in engine.step()])
    assert ends == [[], [0, 1], [], [2, 3], [], [4]]


def test_abort_gives_what_there_is(model: PreTrainedModel) -> None:
    engine = make_engine(model, slots=3)
    requests = [request(i, (2 + i, 3, 4), ignore_eos=True, max_tokens=20) for i in range(6)]
    expected = engine.generate(requests)
    engine.submit(requests)
    for _ in range(4):
        assert engine.step() == []
    one, waiting = engine.abort([4, 0, 99])
    assert (one.id, one.token_ids, one.log_probs) == (0, expected[0].token_ids[:4], expected[0].log_probs[:4])
    assert (waiting.id, waiting.token_ids, waiting.finish_reason) == (4, (), "abort")
    assert engine.unfinished == 4
    engine.step()
    rest = engine.abort()
    assert [(c.id, len(c.token_ids)) for c in rest] == [(1, 5), (2, 5), (3, 1), (5, 0)]
    assert engine.unfinished == 0 and engine.step() == []
    assert engine.generate(requests) == expected, "ids are free again and nothing is left behind"


# Weights


@pytest.mark.parametrize("keep_cache", [False, True])
@pytest.mark.parametrize("slots", [64, 5])
def test_weights_change_while_requests_run(model: PreTrainedModel, slots: int, keep_cache: bool) -> None:
    engine = make_engine(model, max_model_len=LENGTH, slots=slots)
    engine.load_weights(model.named_parameters(), 1)
    check_weights_in_flight(engine, model, keep_cache=keep_cache)


def test_shared_weights_are_the_trainers_own(model: PreTrainedModel) -> None:
    engine, lent = make_engine(model), dict(model.named_parameters())
    for name, tensor in engine.model.module.state_dict().items():
        assert tensor.data_ptr() == lent[name].data_ptr(), name
    asked = request(0, (2, 3, 4), temperature=0.0, stop_token_ids=())
    before = engine.generate([asked])[0]
    trained = weights_of(model)
    try:
        with torch.no_grad():  # as an optimizer step does
            for weight in lent.values():
                weight.mul_(1.1)
        assert engine.share_weights(lent, version=2)
        after = engine.generate([asked])[0]
        assert after.versions[-1] == 2 and after.log_probs != before.log_probs
        assert log_prob_error(model, asked, after) < 1e-5
        assert all(weight.requires_grad for weight in lent.values())
    finally:
        model.load_state_dict(trained)


def test_sharing_is_refused_for_another_dtype(model: PreTrainedModel) -> None:
    engine = EmbeddedRollout(spec_of(model.config._name_or_path, dtype="bfloat16"))
    assert engine.share_weights(dict(model.named_parameters()), 1) is False
    with pytest.raises(EngineAsleep, match="no weights"):
        engine.step()
    engine.load_weights(model.named_parameters(), 1)
    assert {weight.dtype for weight in engine.model.module.parameters()} == {torch.bfloat16}
    assert len(engine.generate([request(0, (2, 3))])) == 1


def test_loaded_weights_are_copies(model: PreTrainedModel) -> None:
    engine = make_engine(model)  # shared first: loading must not write into the trainer's tensors
    asked = request(0, (2, 3, 4), stop_token_ids=())
    expected, originals = engine.generate([asked])[0], weights_of(model)
    doubled = {name: weight * 2 for name, weight in originals.items()}
    engine.load_weights(iter(doubled.items()), version=5)
    assert all(torch.equal(weight, originals[name]) for name, weight in model.named_parameters())
    assert engine.generate([asked])[0].log_probs != expected.log_probs
    engine.load_weights(model.named_parameters(), version=6)
    again = engine.generate([asked])[0]
    assert_alike(again, expected)
    assert again.versions[-1] == 6
    with torch.no_grad():
        engine.model.module.get_input_embeddings().weight.zero_()
    assert all(torch.equal(weight, originals[name]) for name, weight in model.named_parameters())


def test_weights_that_do_not_fit_are_named(model: PreTrainedModel) -> None:
    engine = make_engine(model)
    weights = weights_of(model)
    weights["model.extra"] = weights.pop("model.norm.weight")
    weights["lm_head.weight"] = weights["lm_head.weight"][:7]
    for give in (lambda: engine.load_weights(iter(weights.items()), 2), lambda: engine.share_weights(weights, 2)):
        with pytest.raises(ValueError) as error:
            give()
        assert "model.norm.weight" in str(error.value).split("unexpected")[0]
        assert "model.extra" in str(error.value).split("unexpected")[1]
        assert "lm_head.weight (7, 32)" in str(error.value).split("unexpected")[1]
        with pytest.raises(EngineAsleep, match="no weights"):
            engine.step()
    engine.load_weights(model.named_parameters(), 3)
    assert engine.generate([request(0, (2, 3))])[0].versions[-1] == 3


@pytest.mark.parametrize("names", ["one", "both"])
def test_tied_weights_may_come_under_one_name_or_both(names: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, tie_word_embeddings=True)
    weights = dict(model.named_parameters(remove_duplicate=names == "one"))
    assert ("lm_head.weight" in weights) == (names == "both")
    engine, asked = EmbeddedRollout(spec_of(str(tmp_path))), request(0, (2, 3, 4))
    engine.load_weights(iter(weights.items()), 1)
    loaded = engine.generate([asked])[0]
    assert log_prob_error(model, asked, loaded) < 1e-5
    module = engine.model.module
    assert module.lm_head.weight.data_ptr() == module.model.embed_tokens.weight.data_ptr()
    assert engine.share_weights(weights, 1)
    assert_alike(engine.generate([asked])[0], loaded)
    assert module.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_new_tokens_are_returned_once_with_their_version(model: PreTrainedModel) -> None:
    engine = make_engine(model, max_model_len=LENGTH, slots=4)
    assert check_new_tokens(engine, lambda version: engine.load_weights(model.named_parameters(), version)) == {5, 6, 7}


def test_running_responses_continue_with_new_weights(model: PreTrainedModel) -> None:
    requests = [request(i, prompt, ignore_eos=True, max_tokens=12) for i, prompt in enumerate(ragged_prompts(5))]
    expected = make_engine(model, slots=3).generate(requests)
    engine = make_engine(model, slots=3)
    engine.submit(requests)
    done = {}
    for step in range(100):
        if step == 5:
            engine.load_weights(model.named_parameters(), version=2)
        if step == 8:
            engine.sleep()
            engine.wake(weights=True, kv_cache=True)
            assert engine.share_weights(dict(model.named_parameters()), version=3)
        done.update((completion.id, completion) for completion in engine.step())
    assert engine.unfinished == 0
    for wanted in expected:
        got = done[wanted.id]
        assert_alike(got, wanted)
        assert got.versions[-1] == 3


def test_new_weights_compute_the_old_tokens_anew(model: PreTrainedModel, tmp_path: Path) -> None:
    other = make_model(tmp_path, seed=1)
    engine, asked = make_engine(model), request(0, ragged_prompts(1)[0], ignore_eos=True, max_tokens=12)
    engine.submit([asked])
    for _ in range(6):
        assert engine.step() == []
    engine.load_weights(other.named_parameters(), version=2)
    ended: list[Completion] = []
    while not ended:
        ended = engine.step()
    completion = ended[0]
    ids = torch.tensor(completion.token_ids)[:, None]
    with_old, with_new = (hf_logits(m, asked, completion).log_softmax(-1).gather(1, ids)[:, 0] for m in (model, other))
    assert torch.allclose(torch.tensor(completion.log_probs[:6]), with_old[:6], atol=1e-5)
    assert torch.allclose(torch.tensor(completion.log_probs[6:]), with_new[6:], atol=1e-5)


# Sleep


@pytest.mark.parametrize("shared", [True, False])
def test_step_says_what_sleeps(model: PreTrainedModel, shared: bool) -> None:
    lent = dict(model.named_parameters())
    engine = EmbeddedRollout(spec_of(model.config._name_or_path))
    with pytest.raises(EngineAsleep, match="load_weights or share_weights"):
        engine.step()

    def give(version: int) -> object:
        return engine.share_weights(lent, version) if shared else engine.load_weights(iter(lent.items()), version)

    give(1)
    check_what_sleeps(engine, give, [request(0, (2, 3))])
    engine.sleep()
    with pytest.raises(EngineAsleep, match=f"{'share' if shared else 'load'}_weights: the weights are asleep"):
        give(3)


@pytest.mark.parametrize("shared", [True, False])
def test_sleep_gives_memory_back(model: PreTrainedModel, shared: bool) -> None:
    engine, lent = make_engine(model), dict(model.named_parameters())
    if not shared:
        engine.load_weights(iter(lent.items()), 1)
    engine.generate([request(i, (2, 3)) for i in range(9)])
    module = engine.model.module
    held = [weakref.ref(tensor) for tensor in engine.cache.pools]
    held += [] if shared else [weakref.ref(tensor) for tensor in module.parameters()]
    assert all(tensor() is not None for tensor in held)
    kept = {name: weight.clone() for name, weight in lent.items()}
    engine.sleep()
    gc.collect()
    assert held and all(tensor() is None for tensor in held)
    assert engine.cache.nbytes == 0 and all(weight.is_meta for weight in module.parameters())
    assert all(torch.equal(weight, kept[name]) for name, weight in lent.items())


def test_sleep_shows_in_the_memory_of_the_process(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    monkeypatch.setattr("workers.rollout.embedded.embedded_engine.MIN_BYTES_TO_TRIM", 32 << 20)
    engine = make_engine(model, slots=1200, max_model_len=1000)
    engine.submit([request(i, range(2, 60), max_tokens=900, ignore_eos=True) for i in range(1200)])
    gc.collect()  # garbage of earlier tests, freed during the steps below, would hide a part of the cache
    trim_free_memory()  # of tests before: a cache made of that would not show
    start = psutil.Process().memory_info().rss
    while engine.rows.n == 0 or engine.rows["cached"].max() < 64 * 5:
        engine.step()
    tokens = int(engine.rows["cached"].sum())
    used = tokens * 2 * 2 * 2 * 8 * 4  # layers, heads, keys and values, head_dim, bytes
    awake = psutil.Process().memory_info().rss
    engine.sleep()
    asleep = psutil.Process().memory_info().rss
    assert awake - start > used * 0.8
    assert awake - asleep > used * 0.8


def test_a_small_engine_leaves_the_freed_memory_to_the_trainer(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[None] = []
    monkeypatch.setattr("workers.rollout.embedded.embedded_engine.trim_free_memory", lambda: given_back.append(None))
    for amount, times in ((1 << 26, 0), (4 << 10, 1)):
        monkeypatch.setattr("workers.rollout.embedded.embedded_engine.MIN_BYTES_TO_TRIM", amount)
        engine = make_engine(model)
        engine.generate([request(0, (2, 3))])
        engine.sleep()
        assert len(given_back) == times
