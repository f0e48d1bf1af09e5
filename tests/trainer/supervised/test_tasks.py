"""Reward models are trained, resumed, exported and loaded again."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from configs.compose import compose
from configs.schema.supervised import DPOConfig, RewardModelConfig, SFTConfig
from data_preprocess import sort_digits
from tests.runs import make_task, metrics_of, repeatable
from tests.tiny import model_config
from trainer import main_export, main_reward_model
from trainer.rewards.models.reward_models import STATISTICS
from trainer.supervised.dpo_task import DPOTask
from trainer.supervised.tasks import RewardModelTask, SFTTask, with_padding

PROGRAMS: list[Any] = [
    ("sft_trainer", SFTConfig, SFTTask, "sft"),
    ("reward_model_trainer", RewardModelConfig, RewardModelTask, "preferences"),
    ("dpo_trainer", DPOConfig, DPOTask, "preferences"),
]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"))


def run(task: Path, run_dir: Path, *overrides: str) -> list[dict[str, float]]:
    words = [
        "recipe=sort_digits", "trainer.backend=local", f"data.train_files={task}/preferences.parquet",
        f"data.val_files={task}/preferences_test.parquet", f"model.path={task}/base", "data.train_batch_size=16",
        "trainer.test_freq=1", f"trainer.default_local_dir={run_dir}", "trainer.save_freq=1", "trainer.resume_mode=auto",
        "trainer.total_training_steps=4", *overrides,
    ]  # fmt: skip
    assert main_reward_model.PROGRAM(words) == 0
    return metrics_of(run_dir)


def scores(model: Path, data: Path) -> torch.Tensor:
    """Scores of transformers, in padded batches: of the chosen and the rejected responses, (P, 2)."""
    scorer = AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = pq.read_table(data).to_pylist()
    texts = [row["prompt"][0]["content"] + row[name] + tokenizer.eos_token for row in rows for name in ("chosen", "rejected")]
    with torch.no_grad():
        return scorer(**tokenizer(texts, padding=True, return_tensors="pt")).logits.double().view(-1, 2)


def statistics(model: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((model / STATISTICS).read_text())
    return found


def test_resumed_bitwise_and_exported_with_its_scores(task: Path, tmp_path: Path) -> None:
    whole = run(task, tmp_path / "whole", f"trainer.export_dir={tmp_path}/model")
    assert [step["val/accuracy"] for step in whole][-1] != 0.5 and whole[0]["train/loss"] == pytest.approx(0.6931472)
    saving = "trainer.checkpoint.async_save=true"
    run(task, tmp_path / "broken", saving, "trainer.total_training_steps=2")
    assert repeatable(run(task, tmp_path / "broken", saving)) == repeatable(whole)

    assert main_export.PROGRAM([f"checkpoint={tmp_path}/broken", f"output={tmp_path}/exported"]) == 0
    found = [scores(tmp_path / name, task / "preferences_test.parquet") for name in ("model", "exported")]
    assert torch.equal(*found)
    reported, last = statistics(tmp_path / "exported"), whole[-1]
    assert reported == statistics(tmp_path / "model") and (reported["answers"], reported["data"]) == (64, "validation")
    assert reported["mean"] == last["val/score_mean"] == pytest.approx(float(found[0].mean()), abs=1e-6)
    assert reported["std"] == last["val/score_std"] == pytest.approx(float(found[0].std(correction=0)), abs=1e-6)
    assert last["val/score_difference"] == pytest.approx(float((found[0][:, 0] - found[0][:, 1]).mean()), abs=1e-6)
    differences = found[0][:, 0] - found[0][:, 1]
    assert last["val/loss"] == pytest.approx(float(-differences.sigmoid().log().mean()), abs=1e-6)
    assert last["val/accuracy"] == float((differences > 0).double().mean())


def test_padding_token_is_the_tokenizers_unless_it_is_eos(task: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(task / "base")
    model = model_config(str(task / "base"), override_config={"rms_norm_eps": 1e-5})
    assert with_padding(model, tokenizer).override_config == {"pad_token_id": 0, "rms_norm_eps": 1e-5}
    tokenizer.pad_token = tokenizer.eos_token
    assert with_padding(model, tokenizer) == model
    tokenizer.add_special_tokens({"pad_token": "<beyond the vocabulary>"})
    assert with_padding(model, tokenizer) == model


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(("program", "kind", "make", "data"), PROGRAMS, ids=[program for program, *_ in PROGRAMS])
def test_tokens_that_the_model_does_not_have_are_refused_before_it_is_loaded(
    task: Path, tmp_path: Path, program: str, kind: Any, make: Any, data: str, split: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(task / "base")
    tokenizer.add_tokens(["@"])
    row = {"prompt": "1", "chosen": "2", "response": "@", "rejected": "@"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    files = [f"data.train_files={task}/{data}.parquet", f"data.val_files={task}/{data}.parquet", "trainer.test_freq=1"]
    words = [*files, f"data.{split}_files={tmp_path}/rows.jsonl", f"model.path={task}/base", "data.prompt_key=prompt"]
    with pytest.raises(
        ValueError, match=rf"rows\.jsonl, row 0: it contains token {len(tokenizer) - 1}, and the model's vocabulary has \d+; set"
    ):
        make(compose(program, kind, words), tokenizer)


def test_statistics_are_of_the_training_pairs_without_held_out_pairs(task: Path, tmp_path: Path) -> None:
    steps = run(task, tmp_path / "run", "data.val_files=[]", "trainer.test_freq=-1", "trainer.total_training_steps=1")
    reported = statistics(tmp_path / "run/global_step_1/model")
    assert (reported["answers"], reported["data"]) == (128, "train") and "val/loss" not in steps[0]
    assert main_export.PROGRAM([f"checkpoint={tmp_path}/run", f"output={tmp_path}/exported"]) == 0
    assert reported["mean"] == pytest.approx(float(scores(tmp_path / "exported", task / "preferences.parquet").mean()), abs=1e-6)
    run(task, tmp_path / "unseen", "trainer.test_freq=-1", "trainer.total_training_steps=1")
    unseen = statistics(tmp_path / "unseen/global_step_1/model")
    assert (unseen["answers"], unseen["data"]) == (64, "validation"), "held out, though nothing was validated"


def test_diverged_run_dumps_its_pairs(task: Path, tmp_path: Path) -> None:
    words = [
        "recipe=sort_digits", "trainer.backend=local", f"data.train_files={task}/preferences.parquet", "data.val_files=[]",
        f"model.path={task}/base", "data.train_batch_size=16", "trainer.test_freq=-1", f"trainer.default_local_dir={tmp_path}",
        "optim.lr=1e30",
    ]  # fmt: skip
    assert main_reward_model.PROGRAM(words) == 3
    kept = sorted((tmp_path / "logs/nonfinite").glob("*.safetensors"))
    assert kept and load_file(kept[0])["rows.side"].tolist() == [1, -1] * 16


PAIR_BY_PAIR = ("data.micro_batch_size_per_gpu=1", "data.use_dynamic_bsz=false")
ENGINES = {
    "two workers of Ray's, pair by pair": ("trainer.backend=ray", "trainer.n_gpus_per_node=2", *PAIR_BY_PAIR),
    "megatron": ("engine.strategy=megatron",),
}


@pytest.mark.parametrize("name", [pytest.param(next(iter(ENGINES)), marks=pytest.mark.soak), "megatron"])
def test_other_engines_and_more_workers_give_the_same_losses(task: Path, tmp_path: Path, name: str) -> None:
    """No pair is split, and the mean is over all of them."""
    one = run(task, tmp_path / "one")
    two = run(task, tmp_path / "two", *ENGINES[name], f"trainer.export_dir={tmp_path}/model")
    found = scores(tmp_path / "model", task / "preferences_test.parquet")
    assert float(found.mean()) == pytest.approx(two[-1]["val/score_mean"], abs=1e-5)
    names = ("train/loss", "train/grad_norm", "train/accuracy", "val/loss", "val/score_mean", "val/score_std")
    for mine, others in zip(one, two, strict=True):
        assert {name: mine[name] for name in names} == pytest.approx({name: others[name] for name in names}, rel=1e-3, abs=1e-5)


def test_margin_and_centering_reach_the_loss(task: Path, tmp_path: Path) -> None:
    rows = pq.read_table(task / "preferences.parquet").to_pylist()
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row | {"by": 2.0}) + "\n" for row in rows))
    overrides = (f"data.train_files={tmp_path}/pairs.jsonl", "data.margin_key=by", "data.val_files=[]", "trainer.test_freq=-1")
    (step,) = run(task, tmp_path / "margin", *overrides, "trainer.total_training_steps=1")
    assert step["train/loss"] == pytest.approx(2.1269280)  # -log sigmoid(-2): all scores are still 0
    plain, centered = (
        run(task, tmp_path / f"centered_{value}", f"loss.center_rewards_coefficient={value}", "optim.lr=1e-2")
        for value in (0.0, 1.0)
    )
    assert abs(centered[-1]["val/score_mean"]) < abs(plain[-1]["val/score_mean"])


@pytest.mark.soak
def test_recipe_distinguishes_right_from_slightly_wrong(tmp_path: Path) -> None:
    """From random weights; the recipe begins with the warm start. Measured: 0.951, and 0.957."""
    task = make_task(tmp_path / "task")
    sizes = ["--train_size=1", "--test_size=1", "--sft_size=0", "--preferences_size=8192"]
    sort_digits.main([f"--local_save_dir={task}", *sizes])
    recipe = ("data.train_batch_size=128", "trainer.total_training_steps=64", "trainer.test_freq=64", "trainer.save_freq=-1")
    last = run(task, tmp_path / "run", *recipe)[-1]
    assert last["val/accuracy"] > 0.9 and last["val/calibration_error"] < 0.1
