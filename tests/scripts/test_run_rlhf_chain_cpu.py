"""The RLHF chain: its stages with a stand-in for Python, then in a short run; learning is a soak test."""

import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from tests.layout.source import ROOT
from tests.runs import metrics_of
from tests.warm import warm_python
from trainer.evaluation.chain import FIGURES, STAGES
from trainer.generation.shards import shard_files

SCRIPT = ROOT / "scripts/run_rlhf_chain_cpu.sh"
OUTPUTS = ("--local_save_dir", "--save_dir", "trainer.export_dir", "selection.preferences", "output", "trainer.default_local_dir")
# Writes the programs' output files, with the arguments and the hashes of the inputs. FAIL names a module that ends halfway.
STAND_IN = f"""#!{sys.executable}
import hashlib, os, re, sys
from pathlib import Path
words = sys.argv[2:]
pairs = dict(zip(words, words[1:])) | dict(word.split("=", 1) for word in words if "=" in word)
outputs = [Path(pairs[name]) for name in {OUTPUTS!r} if name in pairs]
named = [Path(part) for word in words for part in re.split(r"[=,\\[\\]]", word) if part.startswith("/")]
read = [file for path in named for file in ([path] if path.is_file() else sorted(path.glob("*"))) if file.suffix]
made = " ".join(words + [hashlib.md5(file.read_bytes()).hexdigest() for file in read])
with open(sys.argv[0] + ".calls", "a") as calls:
    print(words[0], *outputs, file=calls)
for place in outputs:
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.suffix:
        place.write_text(made)
        continue
    place.mkdir(exist_ok=True)
    for name in ("model.safetensors", "train.parquet", "test.parquet", "sft.parquet", "preferences.parquet",
                 "preferences_test.parquet", "latest_checkpointed_iteration.txt", "metrics.jsonl"):
        (place / name).write_text(made)
sys.exit(os.environ.get("FAIL") == words[0])
"""
MADE_FROM = {
    "data": set(),
    "base": set(),
    "sft": {"base/model", "data/sft.parquet"},
    "pairs": {"sft/model", "data/train.parquet"},
    "reward": {"sft/model", "pairs/pairs.parquet", "data/preferences.parquet", "data/preferences_test.parquet"},
    "ppo": {"sft/model", "reward/model", "data/train.parquet", "data/test.parquet", "data/sft.parquet"},
    "policy": {"ppo/latest_checkpointed_iteration.txt", "ppo/metrics.jsonl"},
    "sft_answers": {"sft/model", "reward/model", "data/test.parquet"},
    "policy_answers": {"policy/model", "reward/model", "data/test.parquet"},
}
SMALL = {"SFT_STEPS": "64", "REWARD_STEPS": "4", "PPO_STEPS": "2", "COMPARED": "128", "TESTED": "64", "ANSWERS": "4"}
FEW = (
    "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "data.train_max_samples=256",
    "trainer.critic_warmup=0",
)  # fmt: skip


def run(folder: Path, *words: str, python: str = sys.executable, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHON": python, "FOLDER": str(folder)} | environment
    return subprocess.run([str(SCRIPT), *words], env=variables, capture_output=True, text=True)


class Programs:
    """The script with the stand-in for Python."""

    def __init__(self, root: Path) -> None:
        self.python, self.folder = root / "python", root / "chain"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)
        self.calls_file = root / "python.calls"
        self.code = 0

    def __call__(self, *words: str, **environment: str) -> list[str]:
        """Run the script; return the stages that it ran."""
        self.calls_file.write_text("")
        self.code = run(self.folder, *words, python=str(self.python), **environment).returncode
        calls = [line.split() for line in self.calls_file.read_text().splitlines()]
        if self.code == 0:
            assert calls.pop() == ["trainer.evaluation.chain"]
        return [Path(made[0]).relative_to(self.folder).parts[0] for _, *made in calls]


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


def test_stages_run_once_and_in_order(programs: Programs) -> None:
    assert set(MADE_FROM) == set(STAGES)
    assert programs() == list(STAGES)
    assert programs() == []


def test_a_changed_stage_runs_again_with_all_that_depend_on_it(programs: Programs) -> None:
    programs()
    other = "algorithm.kl_ctrl.kl_coef=1"
    assert programs(other) == ["ppo", "policy", "policy_answers"]
    (programs.folder / "sft/model/model.safetensors").write_text("another")
    assert programs(other) == ["pairs", "reward", "ppo", "policy", "sft_answers", "policy_answers"]
    assert programs(other, SEED="2") == list(STAGES[1:]), "the problems are the same for every seed"


@pytest.mark.parametrize(("module", "stage", "kept"), [("main_ppo", "ppo", True), ("main_export", "policy", False)])
def test_a_stopped_stage_keeps_its_files_except_the_export(programs: Programs, module: str, stage: str, kept: bool) -> None:
    programs(FAIL=f"trainer.{module}")
    assert programs.code != 0 and not (programs.folder / stage / "stage").exists()
    (programs.folder / stage / "left").touch()
    assert programs() and programs.code == 0
    assert (programs.folder / stage / "left").exists() is kept
    programs("trainer.save_freq=7", FAIL="trainer.main_ppo")
    assert programs.code != 0 and not (programs.folder / "ppo/left").exists(), "with other arguments it starts from scratch"


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a short run of the whole chain."""
    folder = tmp_path_factory.mktemp("chain")
    with warm_python(tmp_path_factory.mktemp("warm")) as python:
        done = run(folder, *FEW, python=python, **SMALL)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"report: {folder}/report.html" in done.stdout
    return folder


def test_every_stage_reads_the_outputs_of_earlier_stages(chain: Path) -> None:
    for name in STAGES:
        lines = (chain / name / "stage").read_text().splitlines()[1:-1]
        files = {Path(path): digest for digest, path in (line.split("  ") for line in lines)}
        read = {str(path.parent if path.parent.name == "model" else path) for path in files}
        assert read == MADE_FROM[name]
        for path, digest in files.items():
            assert hashlib.sha256((chain / path).read_bytes()).hexdigest() == digest
    config = {name: yaml.safe_load((chain / name / "config.yaml").read_text()) for name in ("sft", "reward", "ppo")}
    assert config["sft"]["model"]["path"] == f"{chain}/base/model"
    assert config["reward"]["model"]["path"] == f"{chain}/sft/model"
    assert config["ppo"]["actor_rollout_ref"]["model"]["path"] == f"{chain}/sft/model"
    assert config["ppo"]["critic"]["model"]["path"] == config["ppo"]["reward"]["reward_model"]["path"] == f"{chain}/reward/model"
    assert config["ppo"]["data"]["ptx_files"] == [f"{chain}/data/sft.parquet"]
    for name, model in (("pairs", "sft"), ("sft_answers", "sft"), ("policy_answers", "policy")):
        manifest = json.loads((chain / name / "answers/manifest.json").read_text())
        assert manifest["actor_rollout_ref.model.path"] == f"{chain}/{model}/model"
        assert name == "pairs" or manifest["reward.reward_model.path"] == f"{chain}/reward/model"
    weights = {(chain / name / "model/model.safetensors").read_bytes() for name in ("base", "sft", "reward", "policy")}
    assert len(weights) == 4, "each stage trained"


def test_ppo_uses_all_its_models_and_stays_finite(chain: Path) -> None:
    for name in ("sft", "reward", "ppo"):
        assert all(math.isfinite(value) for step in metrics_of(chain / name) for value in step.values())
    last = metrics_of(chain / "ppo")[-1]
    used = ("critic/vf_loss", "actor/reward_kl_penalty", "actor/ptx_loss", "reward/reward_model/mean", "reward/acc/mean")
    assert set(used) <= last.keys()
    assert last["val/accuracy"] == last["val-core/sort_digits/acc/mean@1"], "accuracy is the rule's score"


def test_report_agrees_with_the_scored_responses(chain: Path) -> None:
    ways = json.loads((chain / FIGURES).read_text())["ways"]
    assert list(ways) == [
        "fine-tuned", "fine-tuned, best of 4", "fine-tuned, best of 4 by the truth", "PPO", "PPO, best of 4",
    ]  # fmt: skip
    for name, way in (("sft", "fine-tuned"), ("policy", "PPO")):
        rows = [row for path in shard_files(chain / f"{name}_answers/answers") for row in pq.read_table(path).to_pylist()]
        parts = [part for row in rows for part in row["score_parts"]]
        assert len(parts) == 64 * 4
        assert ways[way]["truth"]["value"] == pytest.approx(sum(part["acc"] for part in parts) / len(parts))
        assert ways[way]["model"] == pytest.approx(sum(part["reward_model"] for part in parts) / len(parts))
        best = pq.read_table(chain / f"{name}_answers/best.parquet").to_pylist()
        assert ways[f"{way}, best of 4"]["truth"]["value"] == pytest.approx(
            sum(row["score_parts"][0]["acc"] for row in best) / len(best)
        )
    page = (chain / "report.html").read_text()
    assert all(f"{way['truth']['value']:.3f}" in page and name in page for name, way in ways.items())


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_scores_of_the_reward_model_and_of_the_rule_both_rise(tmp_path: Path) -> None:
    """Median of three seeds, 16 responses to each of 512 held-out prompts."""
    rises = []
    for seed in (1, 2, 3):
        done = run(tmp_path / str(seed), SEED=str(seed))
        assert done.returncode == 0, done.stderr[-2000:]
        figures = json.loads((tmp_path / str(seed) / FIGURES).read_text())
        before, after = figures["ways"]["fine-tuned"], figures["ways"]["PPO"]
        rises.append((after["truth"]["value"] - before["truth"]["value"], after["model"] - before["model"]))
        ways = {name: (round(way["truth"]["value"], 3), round(way["model"], 2)) for name, way in figures["ways"].items()}
        print(f"seed {seed}: {ways}, reward model {figures['reward_model_accuracy']:.3f}, {figures['seconds']} s")
        assert figures["reward_model_accuracy"] >= 0.9
    truth, model = (statistics.median(values) for values in zip(*rises, strict=True))
    assert truth >= 0.15 and model > 0.0, rises
