"""Sharded checkpoints: every rank writes what it holds as one safetensors file, as torch.distributed.checkpoint lays it out.

dcp itself could write them too: it gathers all ranks' plans first, and it serialises a rank's file in memory. Here a rank needs
nobody, so it may write in a thread while the others train, and the file is written from the tensors where they lie.
torch.distributed.checkpoint reads them, however many ranks wrote and read. Neither runs a pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from workers.engine.fsdp.sharding import local, offsets

DCP_OFFSETS = "DCP_SHARDING_INFO"  # the key in a file's header where dcp.HuggingFaceStorageReader looks


class Shard:
    """What one rank writes of a state. Of tensors that all ranks hold, the first rank writes.

    state: DTensors cut along rows, or plain tensors. ``tensors`` are views of them until ``to_host``.
    """

    def __init__(self, state: Mapping[str, Tensor], rank: int, world_size: int) -> None:
        mine = {name: tensor for name, tensor in state.items() if isinstance(tensor, DTensor) or rank == 0}
        self.tensors = {name: local(tensor) for name, tensor in mine.items() if local(tensor).numel()}
        self.offsets = {name: offsets(state[name]) for name in self.tensors}
        self.file = f"shard-{rank + 1:05d}-of-{world_size:05d}.safetensors"

    def to_host(self, buffers: dict[str, Tensor]) -> None:
        """Copy the tensors into ``buffers``, those of the last time if there are any: training may go on."""
        for name, tensor in self.tensors.items():
            if name not in buffers:
                buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            buffers[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in self.tensors.values()):
            torch.cuda.synchronize()
        self.tensors = {name: buffers[name] for name in self.tensors}

    def write(self, directory: Path) -> None:
        """Raises OSError."""
        # One entry only: with several their order in the header, and so the bytes, would differ from run to run.
        where = {name: {"saved_offsets": begin} for name, begin in self.offsets.items()}
        try:
            save_file(self.tensors, directory / self.file, metadata={DCP_OFFSETS: json.dumps(where)})
        except SafetensorError as error:
            raise OSError(f"{directory / self.file}: {error}") from error


def load_sharded(state: dict[str, Tensor], path: str) -> None:
    """Fill ``state`` in place, however many ranks wrote it. Collective.

    Raises FileNotFoundError if there is no checkpoint, ValueError if it is not one of this model.
    """
    if not any(Path(path).glob("*.safetensors")):
        raise FileNotFoundError(f"{path}: no checkpoint there")
    saved = saved_tensors(path)
    for name, tensor in state.items():
        if name not in saved:
            raise ValueError(f"{path}: no {name} in this checkpoint: it is another model's")
        if saved[name].shape != tensor.shape:
            raise ValueError(f"{path}: {name} is {tuple(saved[name].shape)} there and {tuple(tensor.shape)} in this model")
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(path))


def saved_tensors(path: str) -> dict[str, Tensor]:
    """{name: a full tensor of that shape and type, without memory} of a checkpoint."""
    found = {}
    for name, entry in dcp.HuggingFaceStorageReader(path).read_metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        found[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
    return found
