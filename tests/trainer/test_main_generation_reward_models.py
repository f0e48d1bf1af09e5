"""Best of n by a reward model."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from tests.reward_models import make_reward_model, plain_scores, tokenizer_of
from tests.runs import make_task
from trainer import main_generation

N = 4


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_task(tmp_path_factory.mktemp("task"), train_size=16, test_size=8, sft_size=16)
    make_reward_model(folder / "scorer", seed=1)
    return folder


def arguments(task: Path, run_dir: Path, *overrides: str) -> list[str]:
    return [
        f"data.path={task}/test.parquet", f"actor_rollout_ref.model.path={task}/base", "actor_rollout_ref.rollout.dtype=float32",
        "data.max_prompt_length=8", "data.max_response_length=8", "data.batch_size=4", f"actor_rollout_ref.rollout.n={N}",
        "reward.num_workers=0", "trainer.device=cpu", "trainer.backend=local", "trainer.n_gpus_per_node=1",
        f"trainer.default_local_dir={run_dir}", f"reward.models.a.path={task}/scorer",
        "reward.reward_model.fsdp_config.dtype=float32", *overrides,
    ]  # fmt: skip


def read(*files: Path) -> list[dict[str, Any]]:
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def test_best_response_is_chosen_by_the_model_and_has_the_scorers_score(task: Path, tmp_path: Path) -> None:
    """Two shards: the engine is synced again after the model has scored."""
    assert (
        main_generation.PROGRAM(arguments(task, tmp_path, "reward.weight=0", f"selection.best_of_n={tmp_path}/best.parquet")) == 0
    )
    rows, tokenizer = read(*sorted((tmp_path / "answers").glob("*.parquet"))), tokenizer_of(f"{task}/scorer")
    assert len(rows) == 8
    best = {row["uid"]: row for row in read(tmp_path / "best.parquet")}
    of_text: list[tuple[float, float]] = []  # (score, plain score) of responses whose text has all of their tokens
    for row in rows:
        texts = [
            row["prompt"][0]["content"] + text + ("<eos>" if why == "stop" else "")
            for text, why in zip(row["responses"], row["finish_reasons"], strict=True)
        ]
        plain = plain_scores(f"{task}/scorer", [torch.tensor(tokenizer(text)["input_ids"]) for text in texts])
        for text, n, got, wanted in zip(texts, row["lengths"], row["scores"], plain.tolist(), strict=True):
            if len(tokenizer(text)["input_ids"]) == row["prompt_length"] + n:
                of_text.append((got, wanted))
        assert row["scores"] == [parts["a"] for parts in row["score_parts"]]
        truth = row["reward_model"]["ground_truth"]
        assert [parts["acc"] for parts in row["score_parts"]] == [float(text == truth) for text in row["responses"]]
        first = row["scores"].index(max(row["scores"]))
        chosen = best[row["uid"]]
        assert (chosen["responses"], chosen["score_parts"]) == ([row["responses"][first]], [row["score_parts"][first]])
    assert len(of_text) > len(rows) and [got for got, _ in of_text] == pytest.approx([wanted for _, wanted in of_text], abs=1e-5)


def test_prompts_without_a_scorer_need_no_ground_truth(task: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "502913="}\n{"prompt": "311="}\n')
    words = (
        f"data.path={prompts}",
        "data.output_format=jsonl",
        "reward.scorer=none",
        f"selection.best_of_n={tmp_path}/best.parquet",
    )
    assert main_generation.PROGRAM(arguments(task, tmp_path, *words)) == 0
    for row in read(tmp_path / "best.parquet"):
        assert len(row["responses"]) == 1 and row["score_parts"] == [{"a": row["scores"][0]}]


@pytest.mark.parametrize(
    ("override", "output"),
    [
        (
            "reward.models.a.normalize=running",
            "reward.models.a.normalize=running: uses statistics over training steps; use stored or",
        ),
        ("reward.models.a.path={task}/base", "reward.models.a: model.path={task}/base: Qwen2ForCausalLM has no score head"),
    ],
)
def test_invalid_reward_model_is_reported(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, output: str
) -> None:
    assert main_generation.PROGRAM(arguments(task, tmp_path, "selection.score=true", override.format(task=task))) == 2
    assert output.format(task=task) in capsys.readouterr().err
    assert not (tmp_path / "answers").exists()
