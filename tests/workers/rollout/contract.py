"""What every engine must do that has weights of its own, in requests of LENGTH tokens: checks for the tests of each."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.workers.rollout.engines import VOCAB, log_prob_error, make_engine, ragged_prompts, request
from tests.workers.rollout.vllm_workers import LENGTH
from workers.rollout.base import Completion, EngineAsleep, Request, Rollout

REFUSED = [
    (request(5, ()), "request 5: empty prompt"),
    (request(5, [2] * LENGTH), rf"request 5: prompt of {LENGTH} tokens \+ 1 > max_model_len {LENGTH}"),
    (request(5, (2, VOCAB)), f"request 5: token {VOCAB} is outside the vocabulary of {VOCAB}"),
    (request(1, (2, 3)), "request 1: this id is unfinished"),
    (
        request(5, (2,), response_ids=[2] * (LENGTH - 1)),
        rf"request 5: prompt of 1 tokens \+ response of {LENGTH - 1} \+ 1 > max_model",
    ),
    (request(5, (2,), response_ids=(2, -1)), f"request 5: token -1 is outside the vocabulary of {VOCAB}"),
    (request(5, (2,), response_ids=(2, 3), max_tokens=2), "request 5: max_tokens 2 < 3"),
]


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def check_refusal(engine: Rollout, bad: Request, message: str) -> None:
    engine.submit([request(1, (2, 3))])
    with pytest.raises(ValueError, match=message):
        engine.submit([request(3, range(2, 21)), bad])
    assert engine.unfinished == 1, "a refused submission queues nothing"


def check_endings(engine: Rollout) -> None:
    """The model's directory names token 1 as its end; a request that does not is not ended by it."""
    free = engine.generate([request(0, (2, 3, 4), temperature=0.0, stop_token_ids=(), max_tokens=1000)])[0]
    assert (len(free.token_ids), free.finish_reason) == (LENGTH - 3, "length")
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    asked = [
        request(1, (2, 3, 4), temperature=0.0, stop_token_ids=(1, stop), max_tokens=50),
        request(2, (2, 3, 4), temperature=0.0, stop_token_ids=(1, stop), max_tokens=50, ignore_eos=True),
        request(3, (2, 3, 4), temperature=0.0, stop_token_ids=(), max_tokens=1),
        request(4, [2] * (LENGTH - 1), temperature=0.0, stop_token_ids=()),
    ]
    stopped, ignoring, one, longest = engine.generate(asked)
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[: first + 1], "stop")
    assert (ignoring.token_ids, ignoring.finish_reason) == (free.token_ids[:50], "length")
    assert (one.token_ids, one.finish_reason) == (free.token_ids[:1], "length")
    assert (len(longest.token_ids), longest.finish_reason) == (1, "length")


def check_continuation(engine: Rollout, temperature: float) -> None:
    """A response continued from any of its beginnings is the uninterrupted one: same random numbers, same limits.

    Whole and continued responses run together, two of them from the same tokens with different seeds.
    """
    prompts = [(2, 3, 4), (2, 3, 4), *ragged_prompts(3)]
    asked = [request(i, prompt, temperature=temperature, max_tokens=12, ignore_eos=True) for i, prompt in enumerate(prompts)]
    whole = engine.generate(asked)
    begun = [
        replace(one, id=100 * cut + one.id, response_ids=found.token_ids[:cut])
        for cut in (1, 5, 11)
        for one, found in zip(asked, whole, strict=True)
    ]
    # The same beginning with other seeds: equal tokens to compute, different ones to sample.
    twin = replace(begun[len(asked)], id=1, seed=77)
    *again, other = engine.generate([*begun, twin])
    for one, found in zip(begun, again, strict=True):
        wanted, cut = whole[one.id % 100], len(one.response_ids)
        assert (found.token_ids, found.finish_reason) == (wanted.token_ids[cut:], "length")
        assert found.log_probs == pytest.approx(wanted.log_probs[cut:], abs=1e-4)
    assert len(other.token_ids) == 12 - 5 and (other.token_ids != again[len(asked)].token_ids) == (temperature > 0)
    stop = whole[0].token_ids[-1]
    first = whole[0].token_ids.index(stop)
    ended = request(2, prompts[0], temperature=temperature, seed=asked[0].seed, stop_token_ids=(stop,))
    (stopped,) = engine.generate([replace(ended, response_ids=whole[0].token_ids[:first])])
    assert (stopped.token_ids, stopped.finish_reason) == ((stop,), "stop")
    (longest,) = engine.generate([request(3, [2] * (LENGTH - 4), temperature=0.0, stop_token_ids=(), response_ids=(2, 2))])
    assert (len(longest.token_ids), longest.finish_reason) == (2, "length")


def check_seeds(engine: Rollout) -> None:
    """A seed fixes a response, together with others or alone."""
    requests = [request(i, prompt, seed=2**62 + i) for i, prompt in enumerate(ragged_prompts(6))]
    together = engine.generate(requests)
    torch.manual_seed(5)
    alone = [engine.generate([asked])[0] for asked in reversed(requests)]
    assert [c.token_ids for c in together] == [c.token_ids for c in reversed(alone)]
    others = engine.generate([replace(asked, seed=asked.seed + 100) for asked in requests])
    assert [c.token_ids for c in together] != [c.token_ids for c in others]


SAMPLINGS: list[dict[str, object]] = [
    {},
    {"temperature": 0.7, "top_k": 7},
    {"top_p": 0.6},
    {"temperature": 0.0},
    {"temperature": 1.6, "top_k": 20, "top_p": 0.8},
]


def drawn_by_embedded(model: PreTrainedModel) -> tuple[list[Request], dict[int, tuple[int, ...]]]:
    """Requests of each of SAMPLINGS in turn, and the embedded engine's tokens for each by id."""
    prompts = [*ragged_prompts(30), *ragged_prompts(15, longest=200, seed=3)]
    asked = [request(i, prompt, **SAMPLINGS[i % 5], ignore_eos=True, seed=7 - i) for i, prompt in enumerate(prompts)]
    return asked, {done.id: done.token_ids for done in make_engine(model, max_model_len=LENGTH).generate(asked)}


def check_new_tokens(engine: Rollout, give: Callable[[int], object]) -> set[int]:
    """What ``new_tokens`` returns is each token once, with the version of the weights that it was sampled with.

    give: loads or shares weights of a version. Engines that return tokens of running requests late have them when weights change.
    Returns the versions of the longest response: 5, 6 and 7, but fewer where an engine that generates at its own pace had
    finished it before this process changed the weights.
    """
    lengths = {0: 9, 1: 60, 2: 240}  # far apart: an engine of its own pace is still at the next one when weights change
    asked = [request(id, (2 + id, 3), temperature=0.0, ignore_eos=True, max_tokens=length) for id, length in lengths.items()]
    give(5)
    engine.submit(asked)
    done = engine.step()
    seen: dict[int, list[tuple[int, float, int]]] = {one.id: [] for one in asked}
    changes: list[int] = []
    while engine.unfinished:
        if len(changes) < 2 and len(done) >= len(changes):
            changes.append(6 + len(changes))
            give(changes[-1])
        for new in engine.new_tokens():
            assert new.token_ids, "requests without new tokens are left out"
            seen[new.id] += zip(new.token_ids, new.log_probs, new.versions, strict=True)
        assert engine.new_tokens() == []
        done += engine.step()
    assert {completion.id: len(completion.token_ids) for completion in done} == lengths
    for completion in done:
        whole = list(zip(completion.token_ids, completion.log_probs, completion.versions, strict=True))
        assert whole[: len(seen[completion.id])] == seen[completion.id]
        assert list(completion.versions) == sorted(completion.versions)
    longest = next(completion for completion in done if completion.id == 2)
    assert set(longest.versions) <= {5, 6, 7} and (bool(seen[2]) or len(set(longest.versions)) == 1)
    return set(longest.versions)


def check_weights_that_do_not_fit(engine: Rollout, model: PreTrainedModel) -> None:
    weights = weights_of(model)
    weights["model.extra"] = weights.pop("model.norm.weight")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:7]
    with pytest.raises(ValueError) as error:
        engine.load_weights(iter(weights.items()), 2)
    assert "model.norm.weight" in str(error.value).split("unexpected")[0]
    assert "model.extra" in str(error.value).split("unexpected")[1]
    assert "model.embed_tokens.weight (7, 64)" in str(error.value).split("unexpected")[1]
    with pytest.raises(EngineAsleep, match="no weights"):
        engine.step()
    asked = request(0, (2, 3))
    engine.load_weights(model.named_parameters(), 3)
    completion = engine.generate([asked])[0]
    assert completion.versions[-1] == 3 and log_prob_error(model, asked, completion) < 1e-5


def check_what_sleeps(engine: Rollout, give: Callable[[int], object], requests: Sequence[Request]) -> None:
    """give: loads or shares weights of a version. requests: more than three steps of work."""
    engine.submit(requests)
    engine.step()
    engine.sleep()
    engine.sleep()
    with pytest.raises(EngineAsleep, match="weights are asleep"):
        engine.step()
    with pytest.raises(EngineAsleep, match=r"(load|share)_weights: the weights are asleep"):
        give(1)
    engine.wake(weights=False, kv_cache=True)
    with pytest.raises(EngineAsleep, match="weights are asleep"):
        engine.step()
    engine.sleep()
    engine.wake(weights=True, kv_cache=False)
    with pytest.raises(EngineAsleep, match="no weights since"):
        engine.step()
    give(2)
    with pytest.raises(EngineAsleep, match="KV cache is asleep"):
        engine.step()
    engine.wake(weights=False, kv_cache=True)
    engine.step()
    engine.wake(weights=True, kv_cache=True)  # awake already: nothing is lost
    engine.step()


@torch.no_grad()
def log_probs_in_flight(
    models: Mapping[int, PreTrainedModel], asked: Request, completion: Completion, *, keep_cache: bool
) -> list[float]:
    """Log-probs of the tokens by plain transformers, each by the model of its version.

    keep_cache: keys and values of a position are of the model that computed them first; otherwise all are of the token's version.
    """
    found, prompt, cache = [], list(asked.prompt_ids), DynamicCache()
    for place, (token, version) in enumerate(zip(completion.token_ids, completion.versions, strict=True)):
        if keep_cache:
            new = prompt if place == 0 else [completion.token_ids[place - 1]]
            logits = models[version](input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True).logits
        else:
            whole = [*prompt, *completion.token_ids[:place]]
            logits = models[version](input_ids=torch.tensor([whole]), use_cache=False).logits
        found.append(float(logits[0, -1].float().log_softmax(-1)[token]))
    return found


def check_weights_in_flight(engine: Rollout, model: PreTrainedModel, *, keep_cache: bool) -> None:
    """Weights change twice while requests run, wait and arrive. The engine has the weights of ``model``, version 1."""
    models = {1: model}
    for version in (2, 3):
        torch.manual_seed(version)
        models[version] = copy.deepcopy(model)
        with torch.no_grad():
            for weight in models[version].parameters():
                weight.add_(torch.randn_like(weight) * 0.02)

    def load(version: int, keep_cache: bool) -> None:
        engine.load_weights(models[version].named_parameters(), version, keep_cache=keep_cache)

    # More than a block of vLLM's cache on CPU. Two of them run from the first step on, others are the same prompt later.
    long, short, later = ([2 + (i * j) % 50 for j in range(length)] for i, length in ((1, 140), (3, 5), (7, 130)))
    prompts = [long, long, short, later, long, later, long, short]
    requests = [request(i, prompt, ignore_eos=True, max_tokens=14 if i < 4 else 9) for i, prompt in enumerate(prompts)]
    done = []
    engine.submit(requests[:4])
    done += [*engine.step(), *engine.step(), *engine.step()]
    engine.submit(requests[4:5])  # waits while the weights change
    load(2, keep_cache)
    engine.submit(requests[5:7])
    done += [*engine.step(), *engine.step(), *engine.step()]
    load(3, keep_cache)
    engine.submit(requests[7:])
    while engine.unfinished:
        done += engine.step()
    by_id = {completion.id: completion for completion in done}
    assert all([*by_id[i].versions] == [1] * 3 + [2] * 3 + [3] * 8 for i in range(4))
    assert by_id[4].versions[0] >= 2 and by_id[7].versions[0] == 3
    for asked in requests:
        for kept in (True, False):
            expected = log_probs_in_flight(models, asked, by_id[asked.id], keep_cache=kept)
            error = (torch.tensor(expected) - torch.tensor(by_id[asked.id].log_probs)).abs().max()
            if kept == keep_cache or len({*by_id[asked.id].versions}) == 1:
                assert error < 1e-5, (asked.id, error)
            else:
                assert error > 1e-3, "the two would differ"
    # Caches of earlier weights are there with keep_cache, and nothing new shares them.
    new = [request(20 + i, prompt, ignore_eos=True, max_tokens=5) for i, prompt in enumerate((later, long, long))]
    found = engine.generate(new)
    load(3, keep_cache=False)
    assert engine.generate(new) == found
    # A cache that was dropped is not continued: requests that are submitted anew have the keys of the present weights.
    engine.load_weights(model.named_parameters(), 4)
    errors = [log_prob_error(model, asked, completion) for asked, completion in zip(new, engine.generate(new), strict=True)]
    assert max(errors) < 1e-5
