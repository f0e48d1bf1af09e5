"""What one engine answers and refuses, on one rank; and options that must change nothing, on two."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, GenerationConfig

from tests.tiny import save_tiny_model
from tests.workers.engine.fsdp.cases import assert_snapshots, exported, shards, train
from tests.workers.engine.hf.test_hf_model import values_row_by_row
from tests.workers.engine.toy import (
    Shifted,
    ToyLoss,
    ValueLoss,
    cut,
    distance,
    gradients,
    plain_model,
    plain_outputs,
    toy_batch,
    toy_engine,
)
from workers.batch import Batch
from workers.metric import Metric, plain_numbers

LENGTHS = [4, 30, 1, 17, 30, 2]


class PolicyLoss:
    needs = frozenset({"log_probs"})

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        return -micro_batch.tokens["advantages"] * outputs["log_probs"], {}


def test_needs_a_process_group(models: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="not initialised"):
        toy_engine(models["qwen2"])


@pytest.mark.parametrize("limits", [{"max_tokens": 100}, {"max_tokens": 34}, {"max_rows": 1}])
def test_forward_answers_in_the_order_asked(group: None, models: dict[str, str], limits: dict[str, int]) -> None:
    engine, batch = toy_engine(models["qwen2"], optimizer=None), toy_batch(LENGTHS, masked=[0])
    (share,), (plan,) = cut(batch, 1, **limits)
    found = engine.forward(share, plan, {"log_probs", "entropy"})
    assert found is not None and found.tokens.keys() == {"log_probs", "entropy"} and not found.rows
    assert {column.dtype for column in found.tokens.values()} == {torch.float32}
    model = plain_model(models["qwen2"])
    for row, (ids, mask) in enumerate(zip(share.split_rows("input_ids"), share.split_rows("response_mask"), strict=True)):
        for name, expected in zip(("log_probs", "entropy"), plain_outputs(model, ids, 0.7), strict=True):
            actual = found.split_rows(name)[row]
            assert actual[0] == 0.0
            torch.testing.assert_close(actual[1:], expected.detach() * mask[1:], rtol=0, atol=1e-5)


def test_the_first_token_of_a_row_has_no_log_prob(group: None, models: dict[str, str]) -> None:
    """Whatever its mask says: nothing precedes it in its row, only another row's end."""
    engine, batch = toy_engine(models["qwen2"], optimizer=None), toy_batch(LENGTHS)
    (share,), (plan,) = cut(batch.with_tokens(response_mask=torch.ones(sum(LENGTHS))), 1, max_tokens=100)
    found = engine.forward(share, plan, {"log_probs"})
    assert found is not None
    assert torch.equal(found.tokens["log_probs"] == 0.0, share.positions() == 0)


def test_forward_computes_what_is_asked_alone(group: None, models: dict[str, str]) -> None:
    engine, batch = toy_engine(models["qwen2"], optimizer=None), toy_batch(LENGTHS)
    (share,), (plan,) = cut(batch, 1, max_rows=2)
    found = engine.forward(share, plan, {"log_probs"})
    assert found is not None and found.tokens.keys() == {"log_probs"}
    with pytest.raises(AssertionError, match="lm head has the outputs"):
        engine.forward(share, plan, {"values"})


def test_the_two_best_log_probs_are_those_of_the_whole_distribution(group: None, models: dict[str, str]) -> None:
    engine, batch = toy_engine(models["qwen2"], optimizer=None), toy_batch(LENGTHS)
    (share,), (plan,) = cut(batch, 1, max_rows=2)
    found = engine.forward(share, plan, {"log_probs", "top_log_probs", "all_log_probs"})
    assert found is not None
    answered = found.tokens["log_probs"] != 0
    best = found.tokens["all_log_probs"].topk(2).values
    assert answered.sum() > 20 and not found.tokens["top_log_probs"][~answered].any()
    torch.testing.assert_close(found.tokens["top_log_probs"][answered], best[answered], rtol=0, atol=1e-6)


def test_forward_of_nothing(group: None, models: dict[str, str]) -> None:
    """A rank without rows runs its dummy slots and answers with nothing."""
    engine = toy_engine(models["qwen2"], optimizer=None)
    found = engine.forward(toy_batch(LENGTHS).select([]), ((), ()), {"log_probs"})
    assert found is not None and len(found) == 0 and found.tokens["log_probs"].shape == (0,)


def test_values(group: None, models: dict[str, str], tmp_path: Path) -> None:
    engine, batch = toy_engine(models["qwen2"], "value"), toy_batch(LENGTHS)
    train(engine, range(2), ValueLoss())
    (share,), (plan,) = cut(batch, 1, max_tokens=34)
    found = engine.forward(share, plan, {"values"})
    assert found is not None and found.tokens.keys() == {"values"} and found.rows.keys() == {"last_value"}
    # Of an earlier model in several files, whose index would be read.
    for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_text("{}")
    engine.export_hf(str(tmp_path))
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    with torch.no_grad():
        for row, after in enumerate(values_row_by_row(str(tmp_path), share)):
            values = found.split_rows("values")[row]
            assert values[0] == 0.0
            torch.testing.assert_close(values[1:], after[:-1], rtol=0, atol=1e-5)
            torch.testing.assert_close(found.rows["last_value"][row], after[-1], rtol=0, atol=1e-5)


def test_empty_slots_change_nothing(group: None, models: dict[str, str]) -> None:
    engine, batch = toy_engine(models["qwen2"]), toy_batch(LENGTHS)
    plans = [((0, 1, 2), (3, 4, 5)), ((), (0, 1, 2), (), (3, 4, 5), ())]
    metrics = []
    for plan in plans:
        metrics.append(engine.accumulate(batch, plan, ToyLoss()))
        engine.move(grads="cpu")
    assert metrics[0] == metrics[1]
    grads = [gradients(engine, batch, plan, ToyLoss()) for plan in plans]
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


def test_metrics_are_those_of_the_whole_mini_batch(group: None, models: dict[str, str]) -> None:
    found = []
    for limits in ({"max_tokens": 100}, {"max_rows": 1}):
        (share,), (plan,) = cut(toy_batch(LENGTHS), 1, **limits)
        found.append(toy_engine(models["qwen2"]).train_step(share, plan, ToyLoss()))
    for metrics in found:
        assert {name: metric.reduce for name, metric in metrics.items()} == {
            "ratio": "mean",
            "loss": "sum",
            "grad_norm": "max",
            "lr": "max",
            "skipped_updates": "max",
        }
    for name, metric in found[0].items():
        assert found[1][name].value == pytest.approx(metric.value, rel=1e-5)


class Poisoned(ToyLoss):
    """Infinite where the token has no weight."""

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        loss, metrics = super().__call__(outputs, micro_batch)
        return loss + torch.where(micro_batch.tokens["loss_weight"] != 0, 0.0, torch.inf), metrics


class Measured(PolicyLoss):
    """Entropy of selected tokens in addition."""

    needs = frozenset({"log_probs", "sampled_entropy"})

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        loss, _ = super().__call__(outputs, micro_batch)
        at = micro_batch.tokens["entropy_mask"] * micro_batch.tokens["response_mask"]
        return loss, {"entropy": Metric.token_mean(outputs["sampled_entropy"], at)}


@pytest.mark.parametrize("max_tokens", [100, 34])
def test_measuring_the_entropy_changes_no_bit_of_the_gradient(group: None, models: dict[str, str], max_tokens: int) -> None:
    engine, batch = toy_engine(models["qwen2"]), toy_batch(LENGTHS, masked=[0])
    (share,), (plan,) = cut(batch, 1, max_tokens=max_tokens)
    plain, measured = (gradients(engine, share, plan, loss) for loss in (PolicyLoss(), Measured()))
    assert all(torch.equal(plain[name], measured[name]) for name in plain)
    whole = engine.forward(share, plan, {"entropy"})
    assert whole is not None
    at = batch.tokens["entropy_mask"] & batch.tokens["response_mask"].bool()
    reported = plain_numbers(engine.train_step(share, plan, Measured()))["entropy"]
    assert reported == pytest.approx(float(whole.tokens["entropy"][at].double().mean()), rel=1e-6)


def test_a_token_without_weight_takes_no_part(group: None, models: dict[str, str]) -> None:
    engine, batch = toy_engine(models["qwen2"]), toy_batch(LENGTHS)
    (share,), (plan,) = cut(batch, 1, max_tokens=50)
    found = []
    for loss in (ToyLoss(), Poisoned()):
        found.append((engine.accumulate(share, plan, loss)["loss"], gradients(engine, share, plan, loss)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(grad, found[1][1][name]) for name, grad in found[0][1].items())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("what", ["gradient", "loss alone"])
def test_what_is_not_finite_is_skipped_and_leaves_no_trace(group: None, models: dict[str, str], value: float, what: str) -> None:
    """Neither in the parameters, nor in the moments, nor in the schedule: the next update is what it would have been."""
    loss = ToyLoss() if what == "gradient" else Shifted(value)
    spoilt, untouched = toy_engine(models["qwen2"]), toy_engine(models["qwen2"])
    (share,), (plan,) = cut(toy_batch(LENGTHS), 1, max_tokens=50)
    broken = share.with_tokens(advantages=torch.full((share.total_tokens,), value)) if what == "gradient" else share
    for engine in (spoilt, untouched):
        train(engine, range(2))
    before = shards(spoilt)
    metrics = plain_numbers(spoilt.train_step(broken, plan, loss))
    assert metrics["skipped_updates"] == 1.0 and not math.isfinite(metrics["grad_norm"]) and "lr" not in metrics
    assert all(torch.equal(tensor, before[name]) for name, tensor in shards(spoilt).items())
    assert all(param.grad is None for param in spoilt._params.values())
    after = [train(engine, range(2, 4)) for engine in (spoilt, untouched)]
    assert all(torch.equal(column, after[1][name]) for name, column in after[0].items())
    assert all(torch.equal(tensor, shards(untouched)[name]) for name, tensor in shards(spoilt).items())


def test_one_ranks_broken_row_is_skipped_by_both(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    """Further training of both is bitwise identical too."""
    _, ranks = two_ranks
    for kind in ("gradient", "loss alone"):
        one, other = (rank["skipping"][kind] for rank in ranks)
        assert one["broken here"] != other["broken here"], "one of them saw nothing wrong"
        assert one["skipped"] == other["skipped"] == [0.0, 1.0, 0.0]
        for rank in (one, other):
            assert all(torch.equal(weight, rank["before"][name]) for name, weight in rank["after the skip"].items())
        assert all(torch.equal(weight, other["weights"][name]) for name, weight in one["weights"].items())
        assert not any(torch.equal(weight, one["before"][name]) for name, weight in one["weights"].items())


def test_a_reference_is_never_trained(group: None, models: dict[str, str]) -> None:
    engine = toy_engine(models["qwen2"], optimizer=None)
    assert not any(param.requires_grad for param in engine._params.values())
    with pytest.raises(AssertionError, match="without an optimizer"):
        train(engine, range(1))


def test_what_is_away_cannot_work(group: None, models: dict[str, str]) -> None:
    engine = toy_engine(models["qwen2"])
    (share,), (plan,) = cut(toy_batch(LENGTHS), 1, max_tokens=50)
    before = exported(engine)
    engine.move(params="cpu", grads="cpu", optimizer="cpu")
    calls: list[Any] = [
        lambda: engine.forward(share, plan, {"log_probs"}),
        lambda: engine.train_step(share, plan, ToyLoss()),
        lambda: list(engine.export_weights()),
        lambda: engine.live_weights(),
        lambda: engine.save("nowhere"),
    ]
    for call in calls:
        with pytest.raises(AssertionError, match="params are on the host"):
            call()
    engine.move(params="device")
    assert all(torch.equal(weight, before[name]) for name, weight in exported(engine).items())
    with pytest.raises(AssertionError, match="optimizer are on the host"):
        engine.train_step(share, plan, ToyLoss())
    engine.move(optimizer="device", grads="cpu")
    engine.train_step(share, plan, ToyLoss())


def test_offloaded_optimizer_state_comes_for_its_step_alone(group: None, models: dict[str, str], tmp_path: Path) -> None:
    engine = toy_engine(models["qwen2"], optimizer_offload=True)
    places = [engine._places["optimizer"].place]
    for action in (lambda: train(engine, range(1)), lambda: engine.move(optimizer="device"), lambda: engine.save(str(tmp_path))):
        action()
        places.append(engine._places["optimizer"].place)
    assert places == ["cpu"] * 4


def test_live_weights_are_the_ones_that_are_trained(group: None, models: dict[str, str]) -> None:
    engine = toy_engine(models["qwen3"])
    live = engine.live_weights()
    assert live is not None and live.keys() == AutoModelForCausalLM.from_pretrained(models["qwen3"]).state_dict().keys()
    assert live["lm_head.weight"].data_ptr() == live["model.embed_tokens.weight"].data_ptr()
    addresses = {name: weight.data_ptr() for name, weight in live.items()}
    before = {name: weight.clone() for name, weight in live.items()}
    train(engine, range(1))
    assert not any(torch.equal(weight, before[name]) for name, weight in live.items())
    now = engine.live_weights()
    assert now is not None and {name: weight.data_ptr() for name, weight in now.items()} == addresses
    weights = exported(engine)
    assert weights.keys() == live.keys() - {"lm_head.weight"}, "a tied weight once"
    assert all(torch.equal(weight, live[name]) for name, weight in weights.items())


def test_a_head_of_its_own_in_a_model_that_ties_it_is_refused_or_taken(
    group: None, models: dict[str, str], tmp_path: Path
) -> None:
    shutil.copytree(models["qwen3"], tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    weights["lm_head.weight"] = -weights["model.embed_tokens.weight"]
    save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lm_head\.weight differ there, .* set tie_word_embeddings: false in the model's override"
    ):
        toy_engine(str(tmp_path / "model"))
    engine = toy_engine(str(tmp_path / "model"), override_config={"tie_word_embeddings": False})
    assert torch.equal(exported(engine)["lm_head.weight"], weights["lm_head.weight"].float())
    toy_engine(str(tmp_path / "model"), "value")  # a critic has no such head


@pytest.mark.parametrize(("architecture", "dtype"), [("qwen2", torch.float32), ("qwen3", torch.bfloat16)])
def test_exported_directory_loads_in_transformers(
    group: None, models: dict[str, str], tmp_path: Path, architecture: str, dtype: torch.dtype
) -> None:
    """In the dtype the files were in."""
    engine = toy_engine(models[architecture])
    train(engine, range(1))
    engine.export_hf(str(tmp_path))
    found, given = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path, models[architecture]))
    assert found.dtype == given.dtype == dtype
    same = {"_name_or_path", "transformers_version"}
    assert {k: v for k, v in found.config.to_dict().items() if k not in same} == {
        k: v for k, v in given.config.to_dict().items() if k not in same
    }
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == 1
    weights = exported(engine)
    assert all(torch.equal(param, weights[name].to(dtype)) for name, param in found.named_parameters())
    ids = torch.arange(12) % 61
    (share,), (plan,) = cut(toy_batch([12]).with_tokens(input_ids=ids), 1, max_rows=1)
    actual = engine.forward(share, plan, {"log_probs"})
    with torch.no_grad():
        expected, _ = plain_outputs(found.eval(), ids, 0.7)
    assert actual is not None
    difference = (actual.tokens["log_probs"][1:] - expected) * share.tokens["response_mask"][1:]
    assert difference.abs().max() < (1e-5 if dtype == torch.float32 else 0.1)


def test_exported_critic_is_a_token_classifier(group: None, models: dict[str, str], tmp_path: Path) -> None:
    engine = toy_engine(models["qwen3"], "value")
    train(engine, range(1), ValueLoss())
    engine.export_hf(str(tmp_path))
    found = AutoModelForTokenClassification.from_pretrained(tmp_path)
    assert found.score.weight.shape == (1, 32) and found.score.weight.any()
    weights = {name: weight.clone() for name, weight in toy_engine(str(tmp_path), "value").export_weights()}
    assert all(torch.equal(weights[name], param) for name, param in found.float().named_parameters())


def test_bfloat16_compute_is_close_to_float32(group: None, models: dict[str, str]) -> None:
    """Parameters, gradients and optimizer state stay float32."""
    (share,), (plan,) = cut(toy_batch([40, 3, 25, 11, 60, 18]), 1, max_tokens=80)
    exact, mixed = (toy_engine(models["qwen2"], dtype=dtype, model_dtype="float32") for dtype in ("float32", "bfloat16"))
    apart = distance(gradients(mixed, share, plan, ToyLoss()), gradients(exact, share, plan, ToyLoss()))
    assert 1e-4 < apart < 0.05
    assert {tensor.dtype for tensor in shards(mixed).values()} == {torch.float32}
    outputs = [engine.forward(share, plan, {"log_probs"}) for engine in (exact, mixed)]
    log_probs = [output.tokens["log_probs"] for output in outputs if output is not None]
    assert 0 < (log_probs[0] - log_probs[1]).abs().max() < 0.2


def test_a_critics_head_is_exact_under_bfloat16(group: None, models: dict[str, str]) -> None:
    engine = toy_engine(models["qwen2"], "value", dtype="bfloat16", model_dtype="float32")
    train(engine, range(2), ValueLoss())
    seen: list[torch.dtype] = []
    engine._model.value_head.register_forward_hook(
        lambda module, args, out: seen.extend([args[0].dtype, module.weight.dtype, out.dtype])
    )
    (share,), (plan,) = cut(toy_batch(LENGTHS), 1, max_tokens=100)
    engine.forward(share, plan, {"values"})
    assert seen == [torch.float32] * 3


@pytest.mark.parametrize("head", ["lm", "value"])
def test_recomputed_layers_give_the_same_bits(group: None, models: dict[str, str], head: str) -> None:
    loss = ToyLoss() if head == "lm" else ValueLoss()
    found = []
    for recompute in (False, True):
        engine = toy_engine(models["qwen2"], head, enable_gradient_checkpointing=recompute)
        train(engine, range(2), loss)
        found.append(shards(engine))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_recomputing_keeps_less(group: None, models: dict[str, str]) -> None:
    kept = []
    (share,), (plan,) = cut(toy_batch([60] * 10), 1, max_rows=10)
    for recompute in (False, True):
        engine, sizes = toy_engine(models["qwen2"], enable_gradient_checkpointing=recompute), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            engine.accumulate(share, plan, ToyLoss())
        kept.append(sum(sizes))
    assert kept[1] < kept[0]


def test_dropout_is_off(group: None, tmp_path: Path) -> None:
    """The loss of a step is a function of weights and batch alone."""
    path = save_tiny_model(tmp_path, "qwen2", attention_dropout=0.5)
    (share,), (plan,) = cut(toy_batch(LENGTHS), 1, max_tokens=50)
    engine = toy_engine(path)
    found = [gradients(engine, share, plan, ToyLoss()) for _ in range(2)]
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())


def test_the_same_twice(group: None, models: dict[str, str]) -> None:
    found = []
    for _ in range(2):
        engine = toy_engine(models["qwen2"])
        train(engine, range(3))
        found.append(shards(engine))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_no_draw_is_taken_from_the_global_state(group: None, models: dict[str, str]) -> None:
    before = torch.get_rng_state()
    engine = toy_engine(models["qwen2"], "value")
    train(engine, range(1), ValueLoss())
    assert torch.equal(torch.get_rng_state(), before)


def test_flops(group: None, models: dict[str, str]) -> None:
    """2 a parameter and token, embedding lookup left out, and 2 x layers x heads x head_dim a pair within a row."""
    lengths, attention = [10, 7], 2 * 2 * 4 * 8 * (10 * 10 + 7 * 7)
    for path, head, lookup in ((models["qwen2"], "lm", 61 * 32), (models["qwen3"], "lm", 0), (models["qwen3"], "value", 61 * 32)):
        engine = toy_engine(path, head, optimizer=None)
        size = sum(weight.numel() for _, weight in engine.export_weights()) - lookup
        assert engine.flops(lengths, backward=False) == 2 * size * 17 + attention
        assert engine.flops(lengths, backward=True) == 3 * engine.flops(lengths, backward=False)


@pytest.mark.parametrize("option", ["recomputed", "gathered", "offloaded", "inputs offloaded"])
def test_options_change_nothing_on_two_ranks(two_ranks: tuple[Path, list[dict[str, Any]]], option: str) -> None:
    for rank in two_ranks[1]:
        plain, other = rank["options"]["plain"], rank["options"][option]
        assert all(torch.equal(weight, other[name]) for name, weight in plain.items())


def test_mlps_in_pieces_change_little_on_two_ranks(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in two_ranks[1]:
        assert distance(rank["options"]["in pieces"], rank["options"]["plain"]) < 1e-6


def test_nothing_gathered_outlives_a_load(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in two_ranks[1]:
        before, after = rank["options"]["forward before and after a load"]
        assert torch.equal(before, after) and before.any()


def test_values_of_two_ranks(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    """Also on the rank that holds no row of the head."""
    for rank in two_ranks[1]:
        assert rank["value_head"]["last_value"].all()


@pytest.mark.parametrize("head", ["lm", "value"])
def test_gathered_weights_are_the_weights(two_ranks: tuple[Path, list[dict[str, Any]]], head: str) -> None:
    """Cast before they cross only where that is narrower."""
    for rank in two_ranks[1]:
        found = rank["export"][head]
        plain = found.pop("plain")
        assert any(len(weight) % 2 for weight in plain.values())
        for way, weights in found.items():
            assert weights.keys() == plain.keys(), way
            for name, weight in weights.items():
                assert weight.dtype == (torch.bfloat16 if way == "cast" else torch.float32)
                assert torch.equal(weight, plain[name].to(weight.dtype)), (way, name)


def test_what_needs_no_gathering_is_no_copy(group: None, models: dict[str, str]) -> None:
    engine = toy_engine(models["qwen2"])
    live = engine.live_weights()
    assert live is not None
    for name, weight in engine.export_weights(dtype=torch.bfloat16):
        assert weight.data_ptr() == live[name].data_ptr() and not weight.requires_grad


def test_forward_under_a_snapshot_of_two_ranks_is_that_of_its_time(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    """With parameters that the engine keeps gathered after a forward pass, and on the host between phases."""
    for rank in two_ranks[1]:
        assert_snapshots(rank["snapshots"])
