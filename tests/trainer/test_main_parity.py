"""Engines compared in complete runs: equal ones pass, and an engine with one defect fails."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data_preprocess import tiny_model
from tests.runs import make_task
from tests.trainer.report.test_run_report import Page
from tests.workers.rollout.vllm_workers import CPU_BUILD
from trainer import main_parity
from workers.roles import rollout_engines as rollouts
from workers.rollout import sampling
from workers.rollout.base import Completion, Request
from workers.rollout.embedded import embedded_engine
from workers.rollout.embedded.embedded_engine import EmbeddedRollout

ROWS, N = 16, 16
Corrupt = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads of size 32: vLLM has no smaller ones on CPU."""
    folder = make_task(tmp_path_factory.mktemp("task"), train_size=16, test_size=ROWS, sft_size=16)
    tiny_model.main([f"--save_dir={folder / 'heads'}", "--num_attention_heads=3", "--num_key_value_heads=1"])
    return folder


def run(task: Path, run_dir: Path, *overrides: str) -> int:
    code: int = main_parity.PROGRAM(
        [
            f"model={task}/heads", f"data.files={task}/test.parquet", "data.max_prompt_length=8", "data.max_response_length=12",
            f"actor_rollout_ref.rollout.n={N}", "actor_rollout_ref.rollout.dtype=float32",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32", "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            "trainer.device=cpu", "trainer.backend=local", "trainer.n_gpus_per_node=1",
            f"trainer.default_local_dir={run_dir}", *overrides,
        ]
    )  # fmt: skip
    return code


def figures(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "parity.json").read_text())


@CPU_BUILD
@pytest.mark.soak
def test_embedded_and_vllm_agree(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each in its own worker process."""
    assert run(task, tmp_path, "engines=[embedded,vllm]", "trainer.backend=ray") == 0
    found = figures(tmp_path)
    assert found["broken"] == [] and list(found["engines"]) == ["embedded", "vllm"] and found["dtype"] == "float32"
    for engine in found["engines"].values():
        greedy, sampled = engine["greedy"], engine["sampled"]
        assert (greedy["answers"], sampled["answers"]) == (ROWS, ROWS * N)
        assert engine["choices"]["within"] == 1.0 and abs(engine["draw_z"]) < 5
        assert 0 < greedy["differences"]["max_abs"] < 1e-5 and 0 < sampled["differences"]["max_abs"] < 1e-5
        assert 0 < sampled["ends"]["stopped"] < 1 and sampled["ends"]["wrong"] == {}
        assert list(map(int, sampled["ends"]["ended_by"])) == [1] and sampled["ends"]["ended_by"]["1"] == round(
            sampled["ends"]["stopped"] * ROWS * N
        )
        assert engine["memory_with_bytes"] > engine["memory_without_bytes"] > 0 and engine["start_seconds"] > 0
    own, other = found["engines"]["embedded"], found["engines"]["vllm"]
    assert own["greedy"]["agreement"] is None and other["greedy"]["agreement"]["tokens"] == 1.0
    assert other["sampled"]["agreement"]["answers"] == 1.0, "both engines sample by seed and position"
    assert own["sampled"]["cached"] == pytest.approx(1 - 1 / N) and other["sampled"]["cached"] == 0.0
    printed = capsys.readouterr().out
    assert "plainest difference from embedded" in printed and f"report: {tmp_path}/parity.html" in printed
    html = (tmp_path / "parity.html").read_text()
    text = Page(html).text
    assert "embedded, vllm side by side" in text and "within all bounds" in text and "http" not in html
    assert html.count('<div class="card chart">') == 6 and "The tokenizer has no BOS token." in text


def with_sampling(change: Callable[..., tuple[Tensor, Tensor]]) -> Corrupt:
    """The engine samples with ``change(logits, temperature, top_k, top_p, draws)`` instead."""
    return lambda patch: patch.setattr(embedded_engine, "sample", change)


def ignoring_temperature(logits: Tensor, temperature: Any, *others: Any) -> tuple[Tensor, Tensor]:
    return sampling.sample(logits, temperature.clip(max=0) + 1.0 * (temperature > 0), *others)


def log_probs_at_one(logits: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    tokens, _ = sampling.sample(logits, *others)
    return tokens, logits.log_softmax(-1).gather(1, tokens[:, None].long())[:, 0]


def sampled_too_hot(logits: Tensor, temperature: Any, *others: Any) -> tuple[Tensor, Tensor]:
    """With the log-probs that the samples should have had."""
    tokens, _ = sampling.sample(logits, temperature * 1.5, *others)
    right = torch.from_numpy(temperature).where(torch.from_numpy(temperature) > 0, 1.0)[:, None]
    return tokens, (logits / right).log_softmax(-1).gather(1, tokens[:, None].long())[:, 0].float()


def with_completions(change: Callable[[Request, Completion], Completion]) -> Corrupt:
    """Change every response to the first prompt."""
    submit, step = EmbeddedRollout.submit, EmbeddedRollout.step
    first: dict[int, Request] = {}

    def submitted(self: EmbeddedRollout, requests: Sequence[Request]) -> None:
        first.update({request.id: request for request in requests if request.id == 0})
        submit(self, requests)

    def changed(self: EmbeddedRollout) -> list[Completion]:
        return [change(first[0], done) if done.id == 0 else done for done in step(self)]

    def corrupt(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(EmbeddedRollout, "submit", submitted)
        patch.setattr(EmbeddedRollout, "step", changed)

    return corrupt


def another_token(asked: Request, done: Completion) -> Completion:
    return replace(done, token_ids=((done.token_ids[0] + 1) % 10 + 2, *done.token_ids[1:]))


def cut_short(asked: Request, done: Completion) -> Completion:
    return replace(
        done, token_ids=done.token_ids[:1], log_probs=done.log_probs[:1], versions=done.versions[:1], finish_reason="length"
    )


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (with_sampling(ignoring_temperature), ["sampled: a log-prob is", "bounds.log_prob_max.float32=0.0001"]),
        (with_sampling(log_probs_at_one), ["sampled: a log-prob is", "bounds.log_prob_mean.float32=1e-05"]),
        (with_sampling(sampled_too_hot), ["sampled: the samples are too unlikely", "bounds.draw_z=5"]),
        (with_completions(another_token), ["greedy: 0.9", "bounds.token_agreement=1", "row "]),
        (with_completions(cut_short), ["greedy: answers end wrongly: 1 x it is shorter than it may be", "bounds.wrong_ends=0"]),
    ],
    ids=["temperature ignored", "log-probs at temperature 1", "drawn at another temperature", "one token changed", "cut short"],
)
def test_engine_with_a_defect_fails_and_is_named(
    corrupt: Corrupt,
    message: list[str],
    task: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    corrupt(monkeypatch)
    assert run(task, tmp_path) == 3
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert lines and all(line.startswith("error: embedded: ") for line in lines)
    assert all(any(part in line for line in lines) for part in message)
    assert figures(tmp_path)["broken"] == [line.removeprefix("error: ") for line in lines]
    text = Page((tmp_path / "parity.html").read_text()).text
    assert "not equal" in text and all(" ".join(line.removeprefix("error: ").split()) in text for line in lines)


def test_greedy_pass_with_raised_bounds_passes(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_completions(another_token)(monkeypatch)
    raised = ["bounds.log_prob_max.float32=9", "bounds.log_prob_mean.float32=9"]
    assert run(task, tmp_path, "actor_rollout_ref.rollout.do_sample=false", *raised) == 0
    engine = figures(tmp_path)["engines"]["embedded"]
    assert engine["sampled"] is None and engine["draw_z"] is None
    assert 0.9 < engine["choices"]["first"] < 1 == engine["choices"]["within"] and 0 < engine["choices"]["largest_gap"] < 18


def test_doubled_bos_is_found(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((task / "heads/tokenizer_config.json").read_text())
    (tmp_path / "model").mkdir()
    for path in (task / "heads").iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "="}))
    twice = "{% for message in messages %}=={{ message['content'] }}{% endfor %}"
    (tmp_path / "model/chat_template.jinja").write_text(twice)
    assert run(task, tmp_path / "run", f"model={tmp_path}/model", "data.max_prompt_length=16") == 3
    assert f"prompts: {ROWS} begin with = twice" in capsys.readouterr().err
    assert figures(tmp_path / "run")["heads"] == {"bos": "=", "wanted": ROWS, "begun": ROWS, "doubled": ROWS, "lost": 0}


def test_missing_engine_ends_the_run_before_it_starts(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rollouts, "find_spec", lambda name: None)
    assert run(task, tmp_path / "run", "engines=[embedded,vllm]") == 2
    message = capsys.readouterr()
    assert "scripts/install_engine.sh vllm cpu" in message.err and message.out == "" and not (tmp_path / "run").exists()


def test_ignore_eos_generates_to_the_limit(task: Path, tmp_path: Path) -> None:
    assert run(task, tmp_path, "actor_rollout_ref.rollout.ignore_eos=true") == 0
    sampled = figures(tmp_path)["engines"]["embedded"]["sampled"]
    assert sampled["ends"]["stopped"] == 0 and sampled["lengths"]["quantiles"]["0"] == 12 and sampled["ends"]["special"] > 0
