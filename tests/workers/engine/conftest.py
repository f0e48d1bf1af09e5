"""Tiny models on disk, and a process group for tests that build an engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny import save_tiny_model
from tests.workers.engine.toy import one_rank


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories. qwen3's embeddings are tied, and it was saved in bfloat16."""
    root: Path = tmp_path_factory.mktemp("models")
    return {
        "qwen2": save_tiny_model(root / "qwen2", "qwen2"),
        "qwen3": save_tiny_model(root / "qwen3", "qwen3", tie_word_embeddings=True, dtype=torch.bfloat16),
        "llama": save_tiny_model(root / "llama", "llama"),
    }


@pytest.fixture
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one rank."""
    with one_rank(tmp_path_factory.mktemp("group")):
        yield
