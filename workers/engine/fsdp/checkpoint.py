"""Sharded checkpoints: torch.distributed.checkpoint in safetensors, so that loading reads tensors and runs no pickle."""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def save_sharded(state: dict[str, Tensor], path: str) -> None:
    """Each rank writes its shards of ``state`` (DTensors, or plain tensors that all ranks hold). Collective."""
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(path, save_distributed=True))


def load_sharded(state: dict[str, Tensor], path: str) -> None:
    """Fill ``state`` in place, however many ranks wrote it. Collective.

    Raises FileNotFoundError if there is no checkpoint, ValueError if it is not one of this model.
    """
    if not any(Path(path).glob("*.safetensors")):
        raise FileNotFoundError(f"{path}: no checkpoint there")
    reader = dcp.HuggingFaceStorageReader(path)
    saved = reader.read_metadata().state_dict_metadata
    for name, tensor in state.items():
        if name not in saved:
            raise ValueError(f"{path}: no {name} in this checkpoint: it is another model's")
        found = saved[name]
        assert isinstance(found, TensorStorageMetadata)
        if found.size != tensor.shape:
            raise ValueError(f"{path}: {name} is {tuple(found.size)} there and {tuple(tensor.shape)} in this model")
    dcp.load(state, storage_reader=reader)
