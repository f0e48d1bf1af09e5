"""Parity with plain transformers, and what must not change an answer."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny import ARCHITECTURES, MIXTURES
from tests.workers.rollout.engines import (
    VOCAB,
    hf_logits,
    log_prob_error,
    make_engine,
    make_model,
    ragged_prompts,
    request,
    spec_of,
)
from workers.controller.group import WorkerInfo
from workers.roles.rollout_engines import make_rollout
from workers.rollout.base import Request
from workers.rollout.embedded import embedded_engine
from workers.rollout.embedded.embedded_engine import EmbeddedRollout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return make_model(tmp_path_factory.mktemp("model"))


def group_requests(prompts: list[tuple[int, ...]], n: int, **sampling: object) -> list[Request]:
    """n answers to each prompt, of unequal length limits."""
    return [request(i, prompts[i // n], **({"max_tokens": 3 + i * 7 % 40} | sampling)) for i in range(len(prompts) * n)]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MIXTURES])
def test_greedy_is_generate_token_by_token(architecture: str, tied: bool, tmp_path: Path) -> None:
    model = make_model(tmp_path, architecture, tie_word_embeddings=tied)
    engine = make_engine(model, slots=3)  # fewer than requests: rows leave and enter
    requests = [request(i, prompt, temperature=0.0) for i, prompt in enumerate(ragged_prompts(8))]
    for asked, completion in zip(requests, engine.generate(requests), strict=True):
        ids = torch.tensor([asked.prompt_ids])
        reference = model.generate(ids, do_sample=False, max_new_tokens=24, attention_mask=torch.ones_like(ids), eos_token_id=1)
        assert list(completion.token_ids) == reference[0, ids.shape[1] :].tolist()
        assert log_prob_error(model, asked, completion) < 1e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("slots", [3, 64])
def test_log_probs_are_those_of_plain_transformers(architecture: str, slots: int, tmp_path: Path) -> None:
    model = make_model(tmp_path, architecture)
    engine = make_engine(model, slots=slots)
    requests = group_requests(ragged_prompts(5, longest=80), 3)
    settings = [{}, {"temperature": 0.7}, {"temperature": 1.5, "top_k": 5}, {"top_p": 0.8}, {"temperature": 0.0}]
    requests = [request(r.id, r.prompt_ids, max_tokens=r.sampling.max_tokens, **settings[r.id % 5]) for r in requests]
    completions = engine.generate(requests)
    assert len({completion.token_ids for completion in completions}) > 10
    for asked, completion in zip(requests, completions, strict=True):
        assert log_prob_error(model, asked, completion) < 1e-5


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                                       "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                       "original_max_position_embeddings": 32}}),
        ("llama", {"attention_bias": True, "head_dim": 12}),
    ],
    ids=["sliding window", "llama3 rope", "yarn rope", "head_dim"],
)  # fmt: skip
def test_other_shapes_of_these_models(architecture: str, changes: dict[str, object], tmp_path: Path) -> None:
    model = make_model(tmp_path, architecture, **changes)
    requests = group_requests(ragged_prompts(4), 2)
    for asked, completion in zip(requests, make_engine(model, slots=5).generate(requests), strict=True):
        assert log_prob_error(model, asked, completion) < 1e-5


def test_bfloat16_is_near_transformers_in_bfloat16(tmp_path: Path) -> None:
    model = make_model(tmp_path, dtype=torch.bfloat16).bfloat16()
    requests = group_requests(ragged_prompts(4), 4)
    engine = make_engine(model, dtype="bfloat16")
    assert max(log_prob_error(model, *pair) for pair in zip(requests, engine.generate(requests), strict=True)) < 0.1


def test_answers_do_not_depend_on_order_slots_or_company(model: PreTrainedModel) -> None:
    requests = group_requests(ragged_prompts(6), 4, stop_token_ids=())
    expected = {c.id: c.token_ids for c in make_engine(model).generate(requests)}
    assert len(set(expected.values())) == len(expected)
    shuffled = random.Random(5).sample(requests, len(requests))
    assert {c.id: c.token_ids for c in make_engine(model).generate(shuffled)} == expected
    for slots in (1, 5, 24):
        assert {c.id: c.token_ids for c in make_engine(model, slots=slots).generate(requests)} == expected
    engine = make_engine(model)
    for asked in requests[::7]:
        assert engine.generate([asked])[0].token_ids == expected[asked.id]
    again = [Request(r.id, r.prompt_ids, r.sampling, r.seed + 1) for r in requests]
    other = {c.id: c.token_ids for c in engine.generate(again)}
    assert sum(other[id] == expected[id] for id in expected) < len(expected) / 4


def test_repeated_runs_are_bitwise_identical(model: PreTrainedModel) -> None:
    requests = group_requests(ragged_prompts(6, longest=90), 4)
    engine = make_engine(model, slots=7)
    first = engine.generate(requests)
    engine.generate(group_requests(ragged_prompts(9, seed=1), 5))  # other work, another size of cache
    assert engine.generate(requests) == first
    assert make_engine(model, slots=7).generate(requests) == first
    engine.sleep()
    engine.wake(weights=True, kv_cache=True)
    assert engine.share_weights(dict(model.named_parameters()), 1)
    assert engine.generate(requests) == first


def test_global_random_states_stay_as_they_are(model: PreTrainedModel) -> None:
    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    make_engine(model, slots=4).generate(group_requests(ragged_prompts(3), 2))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def prefilled_tokens(engine: EmbeddedRollout, requests: list[Request]) -> int:
    """Tokens that went through the model, less those of decoding."""
    seen: list[int] = []
    hook = engine.model.module.get_input_embeddings().register_forward_hook(lambda _, args, out: seen.append(args[0].numel()))
    completions = engine.generate(requests)
    hook.remove()
    return sum(seen) - sum(len(completion.token_ids) for completion in completions)


def test_a_groups_prompt_is_computed_once(model: PreTrainedModel) -> None:
    prompts = [tuple(range(2, 2 + length)) for length in (10, 20, 30)]
    requests = group_requests(prompts, 8, ignore_eos=True)
    # The prompt's last token yields the first token of all its answers.
    assert prefilled_tokens(make_engine(model), requests) == 60 - 24
    # With few slots a member enters while another runs, and decodes the last token of its prompt itself.
    few = prefilled_tokens(make_engine(model, slots=4), requests)
    assert 60 - 24 <= few <= 60
    assert prefilled_tokens(make_engine(model), group_requests(ragged_prompts(24), 1)) == sum(map(len, ragged_prompts(24))) - 24


def test_prompts_beyond_the_budget_of_a_step_wait(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = group_requests(ragged_prompts(6), 2)
    expected = make_engine(model).generate(requests)
    monkeypatch.setattr(embedded_engine, "PROMPT_TOKENS_AT_ONCE", 30)
    engine = make_engine(model)
    engine.submit(requests)
    engine.step()
    assert 0 < engine.rows.n < len(requests)
    done = {completion.id: completion for completion in engine.abort([])}
    while engine.unfinished:
        done.update((completion.id, completion) for completion in engine.step())
    assert [done[r.id].token_ids for r in requests] == [completion.token_ids for completion in expected]


def test_attention_reads_little_beyond_what_rows_hold(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few slots and very unequal lengths: rows of all ages run together."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.geometric(1 / 64, 150), 256)
    requests = [request(i, (3, 4, 5), max_tokens=int(length), ignore_eos=True) for i, length in enumerate(lengths)]
    engine = make_engine(model, slots=12, max_model_len=300)
    read, needed, made = [], [], embedded_engine.StepAttention

    def counting(cache: object, cached: np.ndarray, prompts: list[int]) -> object:
        attention = made(cache, cached, prompts)  # type: ignore[arg-type]
        read.append(sum(span.rows * (span.stop - span.start) for span in attention.spans))
        needed.append(int((cached + 1).sum()))
        return attention

    monkeypatch.setattr(embedded_engine, "StepAttention", counting)
    completions = engine.generate(requests)
    assert [len(completion.token_ids) for completion in completions] == lengths.tolist()
    # All rows padded to the longest would read 2.3 times what they hold. Chunks of 64 alone cost half a chunk a row.
    assert sum(read) < 1.6 * sum(needed)


def test_built_from_the_config_alone(model: PreTrainedModel, tmp_path: Path) -> None:
    """No weight is read, rotary frequencies are right although the model is made on meta, and override_config applies."""
    model.config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights here")
    engine = EmbeddedRollout(spec_of(str(tmp_path)))
    assert all(parameter.is_meta for parameter in engine.model.module.parameters())
    reference = dict(model.named_buffers())
    for name, buffer in engine.model.module.named_buffers():
        assert torch.equal(buffer, reference[name]), name

    override = {"rope_parameters": {"rope_type": "default", "rope_theta": 17.0}}
    changed = EmbeddedRollout(spec_of(str(tmp_path), override_config=override))
    exponents = torch.arange(0, 8, 2) / 8
    assert torch.allclose(changed.model.module.model.rotary_emb.inv_freq, 1 / 17.0**exponents)
    with pytest.raises(ValueError, match="hiden_size"):
        EmbeddedRollout(spec_of(str(tmp_path), override_config={"hiden_size": 64}))


def test_engine_by_name(model: PreTrainedModel) -> None:
    spec = spec_of(model.config._name_or_path)
    place = WorkerInfo(0, 1, 0, 0, "127.0.0.1", 0)
    assert isinstance(make_rollout(spec, place), EmbeddedRollout)
    object.__setattr__(spec.rollout, "name", "vlm")
    with pytest.raises(ValueError, match=r"vlm.*embedded"):
        make_rollout(spec, place)


def test_logits_that_are_not_finite_name_the_request(model: PreTrainedModel) -> None:
    engine = make_engine(model)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    weights["model.norm.weight"][3] = float("nan")
    engine.load_weights(iter(weights.items()), version=9)
    engine.submit([request(77, (2, 3))])
    with pytest.raises(FloatingPointError, match=r"request 77.*version 9"):
        engine.step()


def test_stats_count_since_the_last_call(model: PreTrainedModel) -> None:
    engine = make_engine(model)
    engine.generate([request(i, (2, 3, 4), max_tokens=5, ignore_eos=True) for i in range(4)])
    stats = engine.stats()
    assert stats["cache_bytes"] > 0
    counted = {"prompt_tokens": 12, "cached_tokens": 9, "response_tokens": 20, "decode_steps": 5}
    assert {**stats, "cache_bytes": 0} == counted | {"cache_bytes": 0}
    assert set(engine.stats().values()) == {0.0}


def test_a_prompt_that_comes_while_a_like_one_runs_is_cached_but_for_its_last_token(model: PreTrainedModel) -> None:
    engine = make_engine(model)
    engine.submit([request(0, (2, 3, 4), ignore_eos=True), request(1, (5, 6), ignore_eos=True)])
    engine.step()
    assert engine.prefilled == 5
    engine.submit([request(2, (2, 3, 4))])
    engine.step()
    assert engine.stats()["cached_tokens"] == 2 and engine.prefilled == 0
    engine.submit([request(3, (5, 6), response_ids=(2, 3))])
    engine.step()
    assert engine.prefilled == 4
    engine.abort()


def test_vocabulary_of_the_helpers(model: PreTrainedModel) -> None:
    asked = request(0, (2, 3), max_tokens=2)
    completion = make_engine(model).generate([asked])[0]
    assert hf_logits(model, asked, completion).shape == (len(completion.token_ids), VOCAB)
