"""Sharded checkpoints: every rank writes what it holds as one safetensors file, as torch.distributed.checkpoint lays it out.

dcp itself could write them too: it gathers all ranks' plans first, and it serialises a rank's file in memory. Here a rank needs
nobody, so it may write in a thread while the others train, and the file is written from the tensors where they lie.
torch.distributed.checkpoint reads them, however many ranks wrote and read. Neither runs a pickle.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel

from workers.engine.base import SavedFile
from workers.engine.hf_model import write_description
from workers.engine.saving import in_background, saved_files, write_tensors

if TYPE_CHECKING:
    from peft import LoraConfig

INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's files
ADAPTER = "adapter."  # begins the names of a LoRA adapter's weights in a checkpoint, peft's names follow
SHARD = 5 * 10**9  # bytes, as transformers cuts a model
DCP_OFFSETS = "DCP_SHARDING_INFO"  # the key in a file's header where dcp.HuggingFaceStorageReader looks


class Shard:
    """What one rank writes of a state: parts of tensors, which together are each tensor once.

    parts: {name: (this rank's part, where it begins in the whole, by dimension)}. ``tensors`` are these until ``to_host``.
    """

    def __init__(self, parts: Mapping[str, tuple[Tensor, Sequence[int]]], rank: int, world_size: int) -> None:
        self.tensors = {name: part for name, (part, _) in parts.items() if part.numel()}
        self.offsets = {name: list(parts[name][1]) for name in self.tensors}
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

    def write(self, directory: Path) -> SavedFile:
        """Raises OSError."""
        where = {name: {"saved_offsets": begin} for name, begin in self.offsets.items()}
        try:
            return write_tensors(directory / self.file, self.tensors, {DCP_OFFSETS: json.dumps(where)})
        except OSError as error:  # that of a write does not name its file
            raise OSError(error.errno, error.strerror, str(directory / self.file)) from error


def save_shard(
    shard: Shard,
    directory: Path,
    shell: PreTrainedModel | None,
    *,
    adapter: LoraConfig | None = None,
    buffers: dict[str, Tensor] | None,
) -> Future[list[SavedFile]]:
    """See TrainEngine.save. shell: what this rank describes, and its adapter. buffers: of saves in the background; None: it is
    waited for."""
    if buffers is not None:
        shard.to_host(buffers)

    def write() -> list[SavedFile]:
        directory.mkdir(exist_ok=True)
        written = shard.write(directory)
        described = write_description(shell, directory) if shell is not None else []
        if shell is not None and adapter is not None:
            described.append(write_adapter_config(adapter, directory))
        return [written, *saved_files(directory, described)]

    saving = in_background(write)
    if buffers is None:
        wait([saving])
    return saving


def write_adapter_config(adapter: LoraConfig, directory: Path) -> str:
    """As peft writes it. Returns the file's name."""
    adapter.save_pretrained(str(directory))
    return ADAPTER_CONFIG


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
    if more := sorted(name for name in saved.keys() - state.keys() if name.startswith(ADAPTER)):
        raise ValueError(f"{path}: {more[0]} is in this checkpoint, and not in this model: its adapter has other modules")
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(path))


def saved_tensors(path: str) -> dict[str, Tensor]:
    """{name: a full tensor of that shape and type, without memory} of a checkpoint."""
    found = {}
    for name, entry in dcp.HuggingFaceStorageReader(path).read_metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        found[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
    return found


def write_model(shell: PreTrainedModel | None, weights: Iterable[tuple[str, Tensor]], directory: Path, most: int = SHARD) -> None:
    """A Hugging Face directory, as the weights come, so that no more than ``most`` bytes of them are held: by the rank that has
    ``shell``, in its dtype. Collective: weights go through every rank.
    """
    written: list[dict[str, Tensor]] = []  # without memory, once they are on disk
    held: dict[str, Tensor] = {}

    def write() -> None:
        save_file(held, directory / f"part-{len(written)}.safetensors", metadata={"format": "pt"})
        written.append({name: weight.to("meta") for name, weight in held.items()})
        held.clear()

    for name, weight in weights:
        if shell is None:
            continue
        directory.mkdir(parents=True, exist_ok=True)
        if held and sum(tensor.nbytes for tensor in held.values()) + weight.numel() * shell.dtype.itemsize > most:
            write()
        held[name] = weight.to("cpu", shell.dtype, copy=True).contiguous()
    if shell is not None:
        write()
        names = [f"model-{i + 1:05d}-of-{len(written):05d}.safetensors" for i in range(len(written))]
        if len(written) > 1:
            places = {name: file for file, part in zip(names, written, strict=True) for name in part}
            total = sum(tensor.nbytes for part in written for tensor in part.values())
            (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2))
        else:
            names = ["model.safetensors"]
        for i, name in enumerate(names):
            (directory / f"part-{i}.safetensors").rename(directory / name)
        write_description(shell, directory)
    dist.barrier()


class Files:
    """The tensors in a directory, of a model or of a checkpoint, read one at a time."""

    def __init__(self, directory: str, place: str) -> None:
        """place: what it is called in messages."""
        self.place = place
        folder = Path(directory)
        index = folder / INDEX
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else None
        self._pieces: dict[str, list[tuple[Path, list[int] | None]]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            if names is None or path.name in names:
                with safe_open(path, "pt") as file:
                    where = json.loads((file.metadata() or {}).get(DCP_OFFSETS, "{}"))
                    for name in file.keys():  # noqa: SIM118 # it is no dict
                        self._pieces.setdefault(name, []).append((path, where[name]["saved_offsets"] if where else None))

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU. Raises ValueError if it is not there."""
        if name not in self._pieces:
            raise ValueError(f"{self.place}: no {name} there: it is another model's")
        parts = []
        for path, begin in self._pieces[name]:
            with safe_open(path, "pt") as file:
                part = file.get_tensor(name)
            parts.append((part, begin or [0] * part.dim()))
        if len(parts) == 1:
            return parts[0][0]
        ends = [[start + size for start, size in zip(begin, part.shape, strict=True)] for part, begin in parts]
        whole = torch.empty([max(sizes) for sizes in zip(*ends, strict=True)], dtype=parts[0][0].dtype)
        for (part, begin), end in zip(parts, ends, strict=True):
            whole[tuple(slice(*span) for span in zip(begin, end, strict=True))] = part
        return whole
