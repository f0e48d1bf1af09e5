"""The engine of docs/how_to/engine.md samples the embedded engine's tokens, and the page's instructions work."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from examples.plain_engine import PlainRollout
from tests.layout.source import PACKAGES, ROOT
from tests.layout.test_readme import blocks, commands
from tests.runs import make_task, metrics_of
from tests.workers.rollout.engines import make_engine, make_model, ragged_prompts, request, spec_of
from workers.rollout.base import EngineAsleep

PAGE = "docs/how_to/engine.md"


def plain_engine(model: PreTrainedModel, max_model_len: int = 128) -> PlainRollout:
    engine = PlainRollout(spec_of(model.config._name_or_path, max_model_len=max_model_len))
    engine.load_weights(iter(model.named_parameters()), version=1)
    return engine


def test_it_samples_the_embedded_engines_tokens(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    settings = [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}, {"ignore_eos": True}]
    requests = [request(i, prompt, max_tokens=10, **settings[i % 5]) for i, prompt in enumerate(ragged_prompts(10))]
    embedded, plain = make_engine(model).generate(requests), plain_engine(model).generate(requests)
    for expected, actual in zip(embedded, plain, strict=True):
        assert (expected.token_ids, expected.finish_reason) == (actual.token_ids, actual.finish_reason)
        assert actual.log_probs == pytest.approx(expected.log_probs, abs=1e-5)


def test_responses_end_at_the_models_limit(tmp_path: Path) -> None:
    engine = plain_engine(make_model(tmp_path), max_model_len=16)
    (completion,) = engine.generate([request(0, range(2, 12), max_tokens=100, ignore_eos=True)])
    assert (len(completion.token_ids), completion.finish_reason) == (6, "length")


def test_it_generates_only_when_awake_with_current_weights(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    engine = plain_engine(model)
    engine.submit([request(0, [2, 3]), request(1, [4])])
    engine.step()
    engine.sleep()
    with pytest.raises(EngineAsleep):
        engine.step()
    engine.wake(weights=True, kv_cache=True)
    with pytest.raises(EngineAsleep):
        engine.step()
    engine.load_weights(iter((name, torch.zeros_like(tensor)) for name, tensor in model.named_parameters()), version=2)
    assert all(not held.read(0, held.lines)[0].any() for held in engine.held_weights(exact=True))
    (completion,) = engine.abort([1])
    assert (completion.id, completion.finish_reason, completion.versions, engine.unfinished) == (1, "abort", (1,), 1)


def test_engine_runs_as_the_page_describes(tmp_path: Path) -> None:
    """In a copy of the tree: add the file and the lines, then run."""
    task, tree = make_task(tmp_path / "task"), tmp_path / "tree"
    for folder in (*PACKAGES, "examples"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (diff,) = blocks(PAGE, "diff")
    (tree / "plain.diff").write_text(diff)
    put, apply, run = commands(PAGE)
    mine = [f"data.train_files={task}/train.parquet", f"data.val_files={task}/test.parquet", "trainer.backend=local"]
    mine += [f"actor_rollout_ref.model.path={task}/base", "trainer.logger=[]", "reward.num_workers=0"]
    environment = os.environ | {"PYTHONPATH": str(tree), "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    for words in (put, apply, [sys.executable, *run[1:], *mine]):
        done = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    steps = metrics_of(tree / "runs/plain")
    assert len(steps) == 2 and all(step["training/rollout_log_probs_diff_mean"] < 1e-5 for step in steps)
