"""Batch inference on the quick start's task, complete runs: responses, resuming, selection."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.base.keys import CONFIG_DIR
from tests.runs import make_task
from trainer import main_generation
from trainer.data.preference_dataset import PreferenceDataset
from trainer.data.sft_dataset import SFTDataset

N, ROWS, SHARDS = 4, 32, 4
THERE, ANOTHER = "data.output_path={whole}/answers", "{whole}/answers has answers of another run"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"), train_size=16, test_size=ROWS, sft_size=16)


def arguments(task: Path, run_dir: Path, *overrides: str) -> list[str]:
    return [
        f"data.path={task}/test.parquet", f"actor_rollout_ref.model.path={task}/base", "actor_rollout_ref.rollout.dtype=float32",
        "data.max_prompt_length=8", "data.max_response_length=8", f"data.batch_size={ROWS // SHARDS}",
        f"actor_rollout_ref.rollout.n={N}", f"reward.custom_reward_function.path={task}/reward.py", "reward.num_workers=0",
        "trainer.device=cpu", "trainer.backend=local", "trainer.n_gpus_per_node=1", f"trainer.default_local_dir={run_dir}",
        *overrides,
    ]  # fmt: skip


def generate(task: Path, run_dir: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run to completion and read the shards."""
    assert main_generation.PROGRAM(arguments(task, run_dir, *overrides)) == 0
    return [row for path in sorted((run_dir / "answers").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an uninterrupted run."""
    run_dir = tmp_path_factory.mktemp("whole")
    selected = [f"selection.best_of_n={run_dir}/best.parquet", f"selection.sft={run_dir}/sft.parquet", "selection.min_score=null"]
    generate(task, run_dir, *selected, "selection.max_per_prompt=2")
    return run_dir


def answers(run_dir: Path) -> list[dict[str, Any]]:
    return [row for path in sorted((run_dir / "answers").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def shard_bytes(run_dir: Path) -> dict[str, bytes]:
    others = ("manifest.json", "run.lock")
    return {path.name: path.read_bytes() for path in sorted((run_dir / "answers").iterdir()) if path.name not in others}


def test_every_prompt_has_its_responses(task: Path, whole: Path) -> None:
    data, rows = pq.read_table(task / "test.parquet").to_pylist(), answers(whole)
    assert [row["uid"] for row in rows] == list(range(ROWS)) and len(shard_bytes(whole)) == SHARDS
    for row, source in zip(rows, data, strict=True):
        assert {name: row[name] for name in ("prompt", "data_source", "reward_model", "extra_info")} == {
            name: source[name] for name in ("prompt", "data_source", "reward_model", "extra_info")
        }
        truth = source["reward_model"]["ground_truth"]
        wanted = [sum(a == b for a, b in zip(text, truth)) + text.count("7") / 8 for text in row["responses"]]  # noqa: B905
        assert row["scores"] == wanted and row["reward_errors"] == [None] * N
    assert len({tuple(row["responses"]) for row in rows}) > ROWS / 2, "samples differ between prompts"
    assert sum(len(set(row["responses"])) == N for row in rows) > ROWS / 2, "samples differ within a prompt"


def test_log_probs_and_lengths_are_those_of_the_model(task: Path, whole: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(task / "base"), AutoTokenizer.from_pretrained(task / "base")
    reasons = set()
    for row in answers(whole)[:8]:
        chat = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(chat, add_special_tokens=False)["input_ids"]
        assert row["prompt_length"] == len(prompt)
        for text, length, reason, log_prob in zip(
            row["responses"], row["lengths"], row["finish_reasons"], row["log_probs"], strict=True
        ):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] * (reason == "stop")
            assert length >= len(ids) and (reason == "stop" or length == 8)
            if length > len(ids):  # special tokens inside, which the text excludes
                continue
            reasons.add(reason)
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            each = logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
            assert log_prob == pytest.approx(each.sum().item(), abs=1e-4)
    assert reasons == {"stop", "length"}


def test_sample_depends_only_on_seed_row_and_index(task: Path, whole: Path, tmp_path: Path) -> None:
    rows = generate(task, tmp_path / "a", "data.batch_size=5", "actor_rollout_ref.rollout.n=2", "data.max_samples=12")
    assert [row["responses"] for row in rows] == [row["responses"][:2] for row in answers(whole)[:12]]
    other = generate(task, tmp_path / "b", "trainer.seed=2", "data.max_samples=12")
    assert all(row["responses"] != first["responses"] for row, first in zip(other, answers(whole), strict=False))


def test_best_of_n_has_the_highest_score(whole: Path) -> None:
    best = pq.read_table(whole / "best.parquet").to_pylist()
    for row, kept in zip(answers(whole), best, strict=True):
        first = row["scores"].index(max(row["scores"]))
        assert kept["scores"] == [max(row["scores"])] and kept["responses"] == [row["responses"][first]]
        assert kept["uid"] == row["uid"] and kept["lengths"] == [row["lengths"][first]]


def test_supervised_training_reads_accepted_responses(task: Path, whole: Path) -> None:
    rows = pq.read_table(whole / "sft.parquet").to_pylist()
    ended = {
        (row["prompt"][0]["content"], text)
        for row in answers(whole)
        for text, reason in zip(row["responses"], row["finish_reasons"], strict=True)
        if reason == "stop"
    }
    pairs = [(row["prompt"][0]["content"], row["response"]) for row in rows]
    assert pairs and set(pairs) <= ended and len(set(pairs)) == len(pairs)
    assert max(sum(other == prompt for other, _ in pairs) for prompt, _ in pairs) == 2
    tokenizer = AutoTokenizer.from_pretrained(task / "base")
    data = SFTDataset(
        [str(whole / "sft.parquet")], tokenizer, messages_key=None, tools_key=None, prompt_key="prompt",
        response_key="response", max_length=32, truncation="error", apply_chat_template_kwargs={},
    )  # fmt: skip
    assert len(data) == len(rows)


def test_reward_model_training_reads_the_pairs(
    task: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pairs are selected from existing responses."""
    there = [f"data.output_path={whole}/answers", "selection.max_per_prompt=3"]
    generate(task, tmp_path, *there, f"selection.preferences={tmp_path}/pairs.parquet")
    rows = pq.read_table(tmp_path / "pairs.parquet").to_pylist()
    assert f"preferences: {tmp_path}/pairs.parquet ({len(rows)} pairs)" in capsys.readouterr().out
    scores = {
        (row["prompt"][0]["content"], text): score
        for row in answers(whole)
        for text, score in zip(row["responses"], row["scores"], strict=True)
    }
    asked = [row["prompt"][0]["content"] for row in rows]
    better = [scores[prompt, row["chosen"]] - scores[prompt, row["rejected"]] for prompt, row in zip(asked, rows, strict=True)]
    assert rows and min(better) > 0 and max(map(asked.count, asked)) == 3
    data = PreferenceDataset(
        [str(tmp_path / "pairs.parquet")], AutoTokenizer.from_pretrained(task / "base"), prompt_key="prompt", chosen_key="chosen",
        rejected_key="rejected", margin_key=None, max_length=32, truncation="error", apply_chat_template_kwargs={},
    )  # fmt: skip
    assert len(data) == len(rows) and data.notices == []


def test_invalid_prompt_is_refused_with_its_row(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a worker starts."""
    good, bad = json.dumps({"prompt": "1 2"}), json.dumps({"prompt": ""})
    long = json.dumps({"prompt": "1 2 3 4 5 6 7 8 9"})
    base = json.loads((task / "base/config.json").read_text())
    small = tmp_path / "small"
    shutil.copytree(task / "base", small)
    (small / "config.json").write_text(json.dumps(base | {"vocab_size": 4}))
    for line, model, message in [
        (bad, task / "base", "row 1: the prompt is empty"),
        (long, task / "base", "the first in {path}, row 1"),
        (good, small, "row 0: the prompt contains token"),
    ]:
        path = tmp_path / "prompts.jsonl"
        path.write_text(f"{good}\n{line}\n")
        wrong = [f"data.path={path}", f"actor_rollout_ref.model.path={model}"]
        assert main_generation.PROGRAM([*arguments(task, tmp_path, *wrong), "trainer.backend=ray"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[-1].startswith("error: ") and message.format(path=path) in lines[-1]
    assert not (tmp_path / "answers").exists() and not (tmp_path / "logs").exists()


def test_killed_run_resumes_and_ends_with_the_same_bytes(task: Path, whole: Path, tmp_path: Path) -> None:
    same = ["selection.score=true"]
    command = [sys.executable, "-m", "trainer.main_generation", *arguments(task, tmp_path, *same)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(CONFIG_DIR.parent)}, stdout=subprocess.DEVNULL)
    first = tmp_path / "answers/shard_00000.parquet"
    while not first.exists():
        assert process.poll() is None, "it ended before its first shard"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    there = shard_bytes(tmp_path)
    assert 1 <= len([name for name in there if name.endswith(".parquet")]) < SHARDS, "it was killed between shards"
    (tmp_path / "answers/shard_00002.parquet.partial").write_bytes(b"torn")
    written = first.stat().st_mtime_ns
    assert generate(task, tmp_path, *same) == answers(whole)
    assert shard_bytes(tmp_path) == shard_bytes(whole)
    assert first.stat().st_mtime_ns == written, "existing shards are not generated again"


def test_finished_run_repeats_the_selection_without_an_engine(
    task: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.generation.generate.opened_workers", None)
    other = [f"data.output_path={whole}/answers", f"selection.sft={tmp_path}/sft.jsonl", "selection.min_score=0.5"]
    other += [f"timeouts.{phase}=77" for phase in ("start", "generate", "sync")]  # change no response
    generate(task, tmp_path, *other)
    kept = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert len(kept) > 0 and f"accepted: {tmp_path}/sft.jsonl ({len(kept)} answers to {len(kept)} of {ROWS} prompts)" in (
        capsys.readouterr().out
    )


def test_plain_prompts_in_json_lines_need_no_scores(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["31=", "204="]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"question": prompt}) + "\n" for prompt in prompts))
    overrides = [
        f"data.path={tmp_path}/prompts.jsonl", "data.prompt_key=question", "data.output_format=jsonl",
        "actor_rollout_ref.rollout.do_sample=false", "actor_rollout_ref.rollout.n=2",
    ]  # fmt: skip
    generate(task, tmp_path, *overrides)
    rows = [json.loads(line) for line in (tmp_path / "answers/shard_00000.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == prompts and [row["prompt_length"] for row in rows] == [3, 4]
    assert "scores" not in rows[0] and "data_source" not in rows[0]
    assert all(row["responses"][0] == row["responses"][1] for row in rows), "greedy"
    out, err = capsys.readouterr()
    assert "the 2 responses to a prompt are identical (greedy decoding)" in err and "shard 1/1  answers 4  length " in out


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["trainer.seed=2", "selection.score=true", THERE], f"{ANOTHER}: trainer.seed was 1 and is 2; put it back, or give"),
        (["selection.score=true", "reward.timeout=1", THERE], f"{ANOTHER}: reward.timeout was 30.0 and is 1.0"),
        (["selection.score=true", "data.max_samples=31", THERE], f"{ANOTHER}: data.max_samples was -1 and is 31"),
        ([THERE], f"{ANOTHER}: scored was true and is false"),
    ],
)
def test_invalid_configuration_is_a_one_line_error(
    overrides: list[str], line: str, task: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [override.format(whole=whole) for override in overrides]
    assert main_generation.PROGRAM(arguments(task, tmp_path, *typed)) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {line.format(whole=whole)}") and err.count("\n") == 1


def test_run_whose_rewards_all_fail_writes_no_shard(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.py").write_text("def compute_score(**_):\n    return 'x'\n")
    broken = [f"reward.custom_reward_function.path={tmp_path}/broken.py", "selection.score=true"]
    assert main_generation.PROGRAM(arguments(task, tmp_path, *broken)) == 2
    assert "all 32 rewards of shard 0 failed; the first: the reward is 'x'" in capsys.readouterr().err
    assert list(shard_bytes(tmp_path)) == []
