"""A reward head: scores, gradients of pairs under any cut, files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification, GraniteConfig

from tests.tiny import save_tiny_model
from tests.workers.engine.fsdp.pairs import (
    pair_batch,
    pair_cuts,
    plain_pair_gradients,
    plain_scores,
    reward_loss,
    save_reward_model,
)
from tests.workers.engine.toy import cut, distance, gradients, toy_batch, toy_engine
from workers.engine.hf.hf_model import auto_class

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-6}
DTYPES = [pytest.param(dtype, id=str(dtype)) for dtype in BOUNDS]
LENGTHS = [9, 30, 1, 14]


@pytest.fixture(scope="module")
def scorer(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_reward_model(tmp_path_factory.mktemp("scorer"), models["qwen2"])


def scores(path: str, **changes: Any) -> torch.Tensor:
    engine = toy_engine(path, "reward", **changes)
    (share,), (plan,) = cut(toy_batch(LENGTHS), max_rows=2)
    found = engine.forward(share, plan, {"scores"})
    assert found is not None and not found.tokens and found.rows.keys() == {"scores"}
    return found.rows["scores"]


def test_scores_are_transformers_own(group: None, scorer: str) -> None:
    expected = plain_scores(scorer, toy_batch(LENGTHS))[1]
    torch.testing.assert_close(scores(scorer), expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_pairs_under_any_cut(group: None, scorer: str, dtype: torch.dtype) -> None:
    plain = plain_pair_gradients(scorer, dtype)
    engine = toy_engine(scorer, "reward", dtype=str(dtype).removeprefix("torch."))
    cuts = pair_cuts(pair_batch(), 1)
    apart = {
        name: distance(gradients(engine, shares[0], plans[0], reward_loss()), plain) for name, (shares, plans) in cuts.items()
    }
    assert {name: value for name, value in apart.items() if not value <= BOUNDS[dtype]} == {}
    assert len(apart) == 5 and len({len(plans[0]) for _, plans in cuts.values()}) > 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_pairs_over_two_ranks(
    two_ranks: tuple[Path, list[dict[str, Any]]], models: dict[str, str], dtype: torch.dtype
) -> None:
    found = two_ranks[1][0]["reward_head"]
    plain = plain_pair_gradients(str(two_ranks[0] / "scorer"), dtype)
    apart = {name: distance(grads, plain) for name, grads in found[str(dtype)].items()}
    assert {name: value for name, value in apart.items() if not value <= BOUNDS[dtype]} == {} and len(apart) == 6


def test_the_complete_head_learns_with_an_adapter(group: None, models: dict[str, str]) -> None:
    engine = toy_engine(models["qwen2"], "reward", lora_rank=4)
    (share,), (plan,) = pair_cuts(pair_batch(), 1)["by tokens"]
    before = {name: weight.clone() for name, weight in engine.export_weights(kind="adapter")}
    for _ in range(2):
        engine.train_step(share, plan, reward_loss())
    moved = {name for name, weight in engine.export_weights(kind="adapter") if not torch.equal(weight, before[name])}
    assert moved == before.keys() and any(name.endswith("score.weight") for name in moved)


def test_the_head_is_exact_under_bfloat16(group: None, scorer: str) -> None:
    engine, batch = toy_engine(scorer, "reward", dtype="bfloat16", model_dtype="float32"), pair_batch()
    seen: list[torch.dtype] = []
    engine._model.value_head.register_forward_hook(lambda module, args, out: seen.extend([module.weight.dtype, out.dtype]))
    engine.forward(batch, ((*range(14),),), {"scores"})
    assert seen == [torch.float32] * 2


def test_a_language_models_new_head_starts_at_zero_and_learns(group: None, models: dict[str, str], tmp_path: Path) -> None:
    assert scores(models["qwen3"]).tolist() == [0.0] * 4
    engine, batch = toy_engine(models["qwen3"], "reward"), pair_batch()
    shares, plans = pair_cuts(batch, 1)["by tokens"]
    for _ in range(2):
        metrics = engine.train_step(shares[0], plans[0], reward_loss())
    assert metrics["skipped_updates"].value == 0.0  # type: ignore[union-attr]
    engine.export_hf(str(tmp_path))
    assert AutoConfig.from_pretrained(tmp_path).architectures == ["Qwen3ForSequenceClassification"]
    found = engine.forward(batch, ((*range(14),),), {"scores"})
    assert found is not None and found.rows["scores"].abs().max() > 1e-4
    torch.testing.assert_close(scores(str(tmp_path)), plain_scores(str(tmp_path), toy_batch(LENGTHS))[1], rtol=0, atol=1e-5)


def test_a_token_classifier_is_taken_as_it_is(group: None, models: dict[str, str], tmp_path: Path) -> None:
    """A critic, say: its head has a bias, which a sequence classifier's would drop."""
    torch.manual_seed(3)
    critic = AutoModelForTokenClassification.from_pretrained(models["qwen2"], num_labels=1).eval()
    torch.nn.init.normal_(critic.score.weight, std=0.5)
    torch.nn.init.constant_(critic.score.bias, 3.0)
    critic.save_pretrained(tmp_path)
    expected = torch.stack([critic(input_ids=row[None]).logits[0, -1, 0] for row in toy_batch(LENGTHS).split_rows("input_ids")])
    torch.testing.assert_close(scores(str(tmp_path)), expected, rtol=0, atol=1e-5)


def test_a_classifier_of_several_labels_is_refused(group: None, models: dict[str, str], tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(models["qwen2"], num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Qwen2ForSequenceClassification with 3 labels; a reward model has one"):
        toy_engine(str(tmp_path), "reward")


def test_padding_that_ends_rows_is_none(group: None, tmp_path: Path) -> None:
    """transformers scores the last token that is not padding: it would pass over the end of each row."""
    engine = toy_engine(save_tiny_model(tmp_path / "model", eos_token_id=[7, 0]), "reward")
    engine.export_hf(str(tmp_path / "exported"))
    assert AutoConfig.from_pretrained(tmp_path / "exported").pad_token_id is None
    ended = torch.tensor([[5, 9, 0]])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").eval()
    torch.nn.init.normal_(model.score.weight)
    after = model.score(model.model(input_ids=ended).last_hidden_state)[0, :, 0]
    assert model(input_ids=ended).logits.item() == pytest.approx(after[2].item(), abs=1e-6)


def test_where_transformers_has_no_sequence_classifier_one_is_made() -> None:
    config = GraniteConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=11, num_labels=1
    )
    made = auto_class(config, "reward").from_config(config)
    assert type(made).__name__ == "GraniteForSequenceClassification" and made.score.bias is None
