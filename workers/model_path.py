"""Check that a model's files exist and are complete before anything is started or loaded. Does not import torch."""

import json
import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from configs.schema.common import ModelConfig, TokenizedModelConfig

TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "*.tiktoken",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
CONNECT_SECONDS = 5.0
EXPECTED = "expected a Hugging Face model directory, or a hub name like Qwen/Qwen3-0.6B"


def silence_hub() -> None:
    """Silence per-attempt log lines of huggingface_hub: the caller reports an unreachable hub in one line."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def model_path(model: ModelConfig) -> str:
    """Return a checked directory, or a hub name unchanged. Raises FileNotFoundError, and ValueError for pickled weights."""
    return str(_model_directory(model.path, "model.path") or model.path)


def read_ahead(place: str) -> None:
    """Prefetch a directory's weights into the page cache, in the background, while processes start. A hub name is ignored."""
    path = Path(place).expanduser()

    def ask() -> None:  # a thread: on a busy disk posix_fadvise itself may block
        for file in sorted(path.glob("*.safetensors")):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    threading.Thread(target=ask, name="read ahead", daemon=True).start()


def no_directory(place: str) -> str:
    """Describe, for a hub name that cannot be resolved, that it is no local directory, and list its sibling directories."""
    above = Path(place).parent
    if above == Path(".") or not above.is_dir():
        return "no such directory here"
    siblings = ", ".join(sorted(path.name for path in above.iterdir() if path.is_dir()))
    return f"no such directory here ({above} has {siblings or 'none'})"


def check_files(place: str, key: str) -> None:
    """Check that a model directory is complete, or that a hub name is in the hub's cache or the hub is in reach.

    key: configuration key of ``place``, for messages. Raises as ``model_path`` does, and ValueError for incomplete files.
    """
    path = _model_directory(place, key)
    if path is None:
        _check_hub(place, key)
        return
    try:
        _read_object(path / "config.json", (path / "config.json").read_bytes())
        _check_weights(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}={place}: {error}; copy or download it again") from error


def _check_hub(place: str, key: str) -> None:
    """Raise FileNotFoundError if a hub name is not in the cache and the hub takes no connection."""
    from huggingface_hub import try_to_load_from_cache  # imported late: most models are directories

    if isinstance(try_to_load_from_cache(place, "config.json"), str):
        return
    if unreachable := hub_unreachable():
        raise FileNotFoundError(f"{key}={place}: {no_directory(place)}, not in the hub's cache, and {unreachable}; {EXPECTED}")


def hub_unreachable() -> str | None:
    """Why the hub takes no connection, within CONNECT_SECONDS; huggingface_hub would try for half a minute.

    None if it takes one, behind a proxy, and with HF_HUB_OFFLINE, which huggingface_hub reports at once.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return None
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname or "", hub.port or (80 if hub.scheme == "http" else 443)), CONNECT_SECONDS).close()
    except OSError as error:
        return f"no connection to {hub.hostname}: {error}"
    return None


def check_tokenizer(model: TokenizedModelConfig, key: str) -> None:
    """Raise FileNotFoundError if a directory has no tokenizer; a hub name is not checked. key: of the model, for messages."""
    name, place = ("path", model.path) if model.tokenizer_path is None else ("tokenizer_path", model.tokenizer_path)
    path = _directory(place, f"{key}.{name}")
    if path is not None and not any(any(path.glob(pattern)) for pattern in TOKENIZER):
        raise FileNotFoundError(
            f"{key}.{name}={place}: no tokenizer there (tokenizer.json, tokenizer_config.json); set {key}.tokenizer_path to a "
            "directory or hub name that has the model's"
        )


def _model_directory(place: str, key: str) -> Path | None:
    """As _directory, and require config.json and *.safetensors in it. Raises ValueError for pickled weights."""
    path = _directory(place, key)
    for pattern in ("config.json", "*.safetensors"):
        if path is not None and not any(path.glob(pattern)):
            if pickles := sorted(found.name for found in path.glob("*.bin")):
                raise ValueError(
                    f"{key}={place}: no *.safetensors there, and {pickles[0]} is a pickle, which is not read; "
                    "write safetensors with transformers' save_pretrained"
                )
            raise FileNotFoundError(f"{key}={place}: no {pattern} there ({EXPECTED})")
    return path


def _directory(place: str, key: str) -> Path | None:
    """Return the directory, or None for a hub name. Raises FileNotFoundError for a path that is no directory."""
    path = Path(place).expanduser()
    if path.is_dir():
        return path
    if place.startswith(("/", ".", "~")) or place.count("/") > 1 or path.exists():
        problem = "a file, not a directory" if path.exists() else "no such directory"
        raise FileNotFoundError(f"{key}={place}: {problem} ({EXPECTED})")
    return None


def _check_weights(path: Path) -> None:
    """Check that all parts of the weights exist and have the size that their headers declare. Raises ValueError.

    Only the headers are read: an interrupted copy or download shows as a size that differs from the last tensor's end.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        parts = set(_read_object(index, index.read_bytes()).get("weight_map", {}).values())
        if gone := sorted(part for part in parts if not (path / part).is_file()):
            raise ValueError(f"{len(gone)} of {len(parts)} parts of the weights are not there, such as {gone[0]}")
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = _read_object(file, opened.read(length) if length < size else b"")
        # safetensors: 8 bytes with the header's length, the header, then the data; offsets count from the start of the data.
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        if size != (whole := 8 + length + max(ends, default=0)):
            raise ValueError(f"{file.name} has {size:,} of its {whole:,} bytes")


def _read_object(file: Path, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file.name} is not what its name says") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} is not what its name says")
    return found
