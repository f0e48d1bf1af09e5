"""Checks of a model's files: problems are reported in one line, before anything is loaded."""

import json
import os
import socket
from pathlib import Path

import pytest
from huggingface_hub import constants

from data_preprocess import tiny_model
from tests import tiny
from tests.tiny import save_tiny_model, tiny_config
from workers.model_path import check_files, check_tokenizer, model_path, no_directory


@pytest.mark.parametrize("path", ["/no/such/model", "./nothing", "~/nothing", "a/b/c"])
def test_missing_local_path_is_not_looked_up_on_the_hub(path: str) -> None:
    with pytest.raises(FileNotFoundError, match="no such directory"):
        model_path(tiny.model_config(path))


def test_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json there"):
        model_path(tiny.model_config(str(tmp_path)))
    tiny_config().save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors there"):
        model_path(tiny.model_config(str(tmp_path)))


def test_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_tiny_model(tmp_path / "mine")
    assert model_path(tiny.model_config("~/mine")) == str(tmp_path / "mine")


def test_hub_name_is_unchanged() -> None:
    assert model_path(tiny.model_config("Qwen/Qwen3-0.6B")) == "Qwen/Qwen3-0.6B"
    check_tokenizer(tiny.model_config("Qwen/Qwen3-0.6B"), "model")


def test_hub_name_is_refused_at_once_without_cache_and_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, int]] = []

    def refuse(address: tuple[str, int], timeout: float) -> None:
        tried.append(address)
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example:8443")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    with pytest.raises(
        FileNotFoundError, match=r"^model.path=a/b: .* not in the hub's cache, and no connection to hub.example: "
    ):
        check_files("a/b", "model.path")
    assert tried == [("hub.example", 8443)]
    monkeypatch.setenv("https_proxy", "http://proxy.example:1")
    check_files("a/b", "model.path")
    monkeypatch.delenv("https_proxy")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--a--b" / "refs").mkdir()
    (tmp_path / "models--a--b" / "refs" / "main").write_text("1")
    check_files("a/b", "model.path")
    assert len(tried) == 1, "behind a proxy, and with a cache, nothing is connected"


def wrong(path: Path) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        check_files(str(path), "actor.model.path")
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"actor.model.path={path}: ")
    return line.removeprefix(f"actor.model.path={path}: ")


def test_incomplete_files_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    check_files(str(tmp_path), "actor.model.path")
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    size = f"{len(whole):,}"
    weights.write_bytes(whole[:-1])
    assert wrong(tmp_path) == f"model.safetensors has {len(whole) - 1:,} of its {size} bytes; copy or download it again"
    for text in (b"", b"version https://git-lfs.github.com/spec/v1\n", whole[:20]):
        weights.write_bytes(text)
        assert wrong(tmp_path).startswith("model.safetensors is not what its name says; ")
    weights.write_bytes(whole)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    assert wrong(tmp_path).startswith("1 of 2 parts of the weights are not there, such as model-2.safetensors")
    index.unlink()
    index.write_text("{}")
    check_files(str(tmp_path), "actor.model.path")
    weights.write_bytes(whole + b"\0")
    assert wrong(tmp_path).startswith(f"model.safetensors has {len(whole) + 1:,} of its {size} bytes")
    only_about = b'{"__metadata__": {"format": "pt"}}'
    weights.write_bytes(len(only_about).to_bytes(8, "little") + only_about)
    check_files(str(tmp_path), "actor.model.path")
    (tmp_path / "config.json").write_text("[]")
    assert wrong(tmp_path).startswith("config.json is not what its name says")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    assert "Is a directory" in wrong(tmp_path)
    assert "a file, not a directory" in wrong(weights)


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken", "vocab.json", "vocab.txt", "spiece.model"])
def test_tokenizer_of_an_older_format_is_accepted(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    check_tokenizer(tiny.model_config(str(tmp_path)), "model")


@pytest.mark.parametrize("name", ["base", "a/b"])
def test_existing_file_is_not_taken_for_a_hub_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match=f"model.path={name}: a file, not a directory"):
        check_files(name, "model.path")


def test_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    model, other = save_tiny_model(tmp_path / "model"), tmp_path / "tokenizer"
    with pytest.raises(FileNotFoundError) as error:
        check_tokenizer(tiny.model_config(model), "critic.model")
    assert str(error.value).startswith(f"critic.model.path={model}: no tokenizer there")
    assert "set critic.model.tokenizer_path to " in str(error.value)
    with pytest.raises(FileNotFoundError, match=r"^critic\.model\.tokenizer_path=\S+: no such directory"):
        check_tokenizer(tiny.model_config(model, tokenizer_path=str(other)), "critic.model")
    tiny_model.character_tokenizer("01").save_pretrained(other)
    check_tokenizer(tiny.model_config(model, tokenizer_path=str(other)), "critic.model")


def test_unknown_hub_name_is_reported_as_a_possible_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("warm", "base"):
        (tmp_path / "data" / name).mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    assert no_directory("data/wram") == "no such directory here (data has base, warm)"
    assert no_directory("empty/base") == "no such directory here (empty has none)"
    assert no_directory("Qwen/Qwen3-0.6B") == no_directory("gpt2") == "no such directory here"
