"""From run directories to Hugging Face directories, with the user's command; transformers loads the result."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from tests.runs import make_task, run_ppo
from trainer import main_export
from trainer.checkpoint.export import check


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"))


@pytest.fixture(scope="module")
def run_dir(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps with a critic, the second saved, and copied."""
    folder = tmp_path_factory.mktemp("run")
    copies = f"trainer.checkpoint.remote_dir=file://{folder}/copies"
    run_ppo(task, folder / "run", "algorithm=ppo", "trainer.save_freq=2", "trainer.checkpoint.async_save=true", copies)
    return folder / "run"


def export(output: Path, *words: str) -> int:
    return main_export.PROGRAM([*words, f"output={output}"])


@torch.no_grad()
def log_probs(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.arange(12)[None]).logits.log_softmax(-1)


def trained(task: Path, run_dir: Path) -> torch.nn.Module:
    """The starting model with the checkpoint's weights, loaded by hand."""
    model = AutoModelForCausalLM.from_pretrained(task / "base")
    (shard,) = (run_dir / "global_step_2/actor").glob("*.safetensors")
    weights = {name.removeprefix("model."): value for name, value in load_file(shard).items() if name.startswith("model.")}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    return model.eval()


@pytest.mark.parametrize("place", ["checkpoint", "run", "copy", "copies"])
def test_exported_actor_has_the_trained_log_probs(place: str, task: Path, run_dir: Path, tmp_path: Path) -> None:
    copies = f"file://{run_dir.parent}/copies"
    places = {"checkpoint": f"{run_dir}/global_step_2", "run": run_dir, "copy": f"{copies}/global_step_2", "copies": copies}
    assert export(tmp_path / "model", f"checkpoint={places[place]}") == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert torch.equal(log_probs(model), log_probs(trained(task, run_dir)))
    assert not torch.equal(log_probs(model), log_probs(AutoModelForCausalLM.from_pretrained(task / "base").eval()))
    actual, base = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "model", task / "base"))
    chat = [{"role": "user", "content": "31"}]
    assert actual.get_vocab() == base.get_vocab() and actual.chat_template == base.chat_template
    assert actual.apply_chat_template(chat, tokenize=False) == base.apply_chat_template(chat, tokenize=False)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_exported_critic_is_a_token_classifier(run_dir: Path, tmp_path: Path) -> None:
    assert export(tmp_path / "critic", f"checkpoint={run_dir}", "role=critic") == 0
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    (shard,) = (run_dir / "global_step_2/critic").glob("*.safetensors")
    assert critic.config.num_labels == 1 and critic.score.weight.abs().max() > 0
    assert torch.equal(critic.score.weight, load_file(shard)["model.score.weight"])


def test_invalid_export_arguments_are_one_line_errors(run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").mkdir()
    for words, reported in (
        (["checkpoint=nowhere"], "checkpoint=nowhere: there is no such directory"),
        ([f"checkpoint={tmp_path}"], "neither a checkpoint nor a run directory that has one; trainer.save_freq=50 writes some"),
        ([f"checkpoint={run_dir}", "role=ref"], "role=ref: "),
        ([f"checkpoint={run_dir}", f"output={tmp_path / 'there'}"], "is there already"),
    ):
        assert main_export.PROGRAM([f"output={tmp_path / 'model'}", *words]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert reported in line
    assert not (tmp_path / "model").exists()


def test_export_that_transformers_cannot_load_is_removed(run_dir: Path, tmp_path: Path) -> None:
    """The check is transformers' own loading: missing and additional weights are found."""
    assert export(tmp_path / "model", f"checkpoint={run_dir}") == 0
    file = tmp_path / "model/model.safetensors"
    weights = load_file(file)
    norm = weights.pop("model.norm.weight")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"transformers finds missing keys: \['model.norm.weight'\]"):
        check(tmp_path / "model", trust_remote_code=False)
    save_file(weights | {"model.norm.weight": norm, "model.other": norm.clone()}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected keys: \['model.other'\]"):
        check(tmp_path / "model", trust_remote_code=False)
