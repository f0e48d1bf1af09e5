"""Exports that are pushed to a local hub, through huggingface_hub itself; their model cards."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants

from tests.hub import FakeHub, fake_hub
from tests.runs import make_task, run_ppo
from tests.trainer.supervised.test_supervised_loop import run as run_sft
from trainer import main_export

NAME = "colleagues/sorter"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"))


@pytest.fixture(scope="module")
def run_dir(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_ppo(task, folder, "algorithm=ppo", "trainer.save_freq=2", "data.seed=5", "trainer.experiment_name=sorter")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    with fake_hub(tmp_path / "cache", monkeypatch) as hub:
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub


def export(run_dir: Path, output: Path, *words: str) -> int:
    return main_export.PROGRAM([f"checkpoint={run_dir}", f"output={output}", *words])


def test_exported_model_is_pushed_to_a_private_repository(
    run_dir: Path, tmp_path: Path, hub: FakeHub, capfd: pytest.CaptureFixture[str]
) -> None:
    assert export(run_dir, tmp_path / "model", f"hub={NAME}") == 0
    assert f"pushed to {hub.url}/{NAME}/commit/" in capfd.readouterr().out
    (created,) = hub.created
    assert (created["organization"], created["name"]) == ("colleagues", "sorter")
    assert created.get("private") is True or created.get("visibility") == "private"
    files = {str(path.relative_to(tmp_path / "model")): path.read_bytes() for path in (tmp_path / "model").rglob("*")}
    assert hub.pushed == {NAME: files} and {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= set(files)


def test_model_card_has_the_provenance_of_the_run(task: Path, run_dir: Path, tmp_path: Path) -> None:
    assert export(run_dir, tmp_path / "model") == 0
    code = json.loads((run_dir / "global_step_2/manifest.json").read_text())["code"]
    card = ModelCard.load(tmp_path / "model/README.md")
    assert card.data.to_dict() == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["tandem"]}
    for expected in (
        "# sorter\n",
        "after 2 steps",
        f"| base model | `{task}/base`, a directory of the machine that trained it |",
        "| seeds | data.seed=5, ",
        "trainer.seed=1",
        f"commit {code['commit'] or 'unknown'} |",
        f"```bash\n{code['command']}\n```",
    ):
        assert expected in card.text
    assert export(run_dir, tmp_path / "critic", "role=critic") == 0
    card = ModelCard.load(tmp_path / "critic/README.md")
    assert card.data.pipeline_tag == "token-classification" and "The critic" in card.text


def test_model_card_of_an_adapter_names_its_base_on_the_hub(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_sft(task, tmp_path / "run", "model.lora_rank=2", "trainer.total_training_steps=1")
    manifest = next((tmp_path / "run").glob("global_step_*/manifest.json"))
    edited = json.loads(manifest.read_text())
    edited["config"]["model"]["path"] = "Qwen/Qwen3-0.6B"
    del edited["code"]["command"]  # as of an earlier version
    manifest.write_text(json.dumps(edited))
    assert export(tmp_path / "run", tmp_path / "adapter") == 0
    card = ModelCard.load(tmp_path / "adapter/README.md")
    assert (card.data.base_model, card.data.library_name) == ("Qwen/Qwen3-0.6B", "peft")
    assert "| base model | `Qwen/Qwen3-0.6B` |" in card.text and "Not recorded" in card.text
    assert "The model of a supervised run" in card.text and "LoRA adapter" in card.text


def test_push_that_cannot_succeed_is_refused_before_the_export(
    run_dir: Path, tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def error_of(name: str) -> str:
        assert export(run_dir, tmp_path / "model", f"hub={name}") == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert not (tmp_path / "model").exists() and line.startswith(f"error: hub={name}: ")
        return line

    assert "not OWNER/NAME" in error_of("sorter")
    assert "a--b" in error_of("colleagues/a--b")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in error_of(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("trainer.checkpoint.hub.get_token", lambda: None)
    assert "no token of the hub; log in with `hf auth login`, or set HF_TOKEN" in error_of(NAME)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert "no connection to 127.0.0.1" in error_of(NAME)
    assert hub.requests == []


def test_refused_push_keeps_the_export_and_names_the_command(
    run_dir: Path, tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert export(run_dir, tmp_path / "model", f"hub={NAME}") == 2
    # Progress bars of libraries may be there too.
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("error: "))
    assert line.startswith(f"error: hub={NAME}: the model is in {tmp_path}/model and was not pushed: ") and "401" in line
    assert f"to push it: hf upload {NAME} {tmp_path}/model" in line and "hf_wrong" not in line
    assert (tmp_path / "model/model.safetensors").exists() and hub.pushed == {}
