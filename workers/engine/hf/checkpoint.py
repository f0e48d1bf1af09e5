"""Sharded checkpoints: every rank writes its shards as safetensors files in the layout of torch.distributed.checkpoint.

torch.distributed.checkpoint (dcp) could write them too, but it gathers the plans of all ranks first and serialises a rank's file
in memory. Here a rank needs no other rank, so it can write in a thread while training continues, directly from the tensors. dcp
reads the files, whatever the numbers of writing and reading ranks. Neither side uses pickle.
"""

from __future__ import annotations

import json
import time
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

from workers.engine.base import Saved, SavedFile
from workers.engine.hf.hf_model import write_description
from workers.engine.saving import declare_written, in_background, in_threads, saved_files, write_tensors
from workers.engine.staging import copied, shortage

if TYPE_CHECKING:
    from peft import LoraConfig

INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's files
ADAPTER = "adapter."  # prefix of LoRA weights in a checkpoint; peft's names follow
SHARD = 5 * 10**9  # bytes per file of an exported model that is written from a stream
FILE = 2 * 10**9  # bytes per file of a checkpoint
WRITERS = 4  # files that a rank writes concurrently, each hashed in its own thread; training needs cores too
READERS = 8  # files that a rank reads concurrently
DCP_OFFSETS = "DCP_SHARDING_INFO"  # key in a file's header that dcp.HuggingFaceStorageReader reads


class Shard:
    """The part of a state that one rank writes. The shards of all ranks contain each tensor exactly once.

    parts: {name: (this rank's part, its offset in the full tensor by dimension)}. A file has at most FILE bytes, or one larger
    tensor: several threads write, hash and read them concurrently, since hashing one file is the work of one core.
    """

    def __init__(self, parts: Mapping[str, tuple[Tensor, Sequence[int]]], rank: int, world_size: int) -> None:
        # A rank may have no row of a small tensor; the parts of the other ranks are the whole of it.
        self.tensors = {name: part for name, (part, _) in parts.items() if part.numel()}
        self.offsets = {name: list(parts[name][1]) for name in self.tensors}
        self.name = f"shard-{rank + 1:05d}-of-{world_size:05d}"

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def files(self) -> dict[str, list[str]]:
        """{file name: names of its tensors}. A single file has the shard's name, several are numbered."""
        groups: list[list[str]] = [[]]
        size = 0
        for name, tensor in self.tensors.items():
            if groups[-1] and size + tensor.nbytes > FILE:
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += tensor.nbytes
        if len(groups) == 1:
            return {f"{self.name}.safetensors": groups[0]}
        return {f"{self.name}-part-{i:05d}.safetensors": names for i, names in enumerate(groups, 1)}

    def write(self, directory: Path) -> list[SavedFile]:
        """Write all files of this shard; they are on disk when this returns. Raises OSError that names the file."""

        def one(described: tuple[str, list[str]]) -> SavedFile:
            file, names = described
            where = {name: {"saved_offsets": self.offsets[name]} for name in names}
            tensors = {name: self.tensors[name] for name in names}
            try:
                return write_tensors(directory / file, tensors, {DCP_OFFSETS: json.dumps(where)})
            except OSError as error:  # an OSError of write() does not name its file
                raise OSError(error.errno, error.strerror, str(directory / file)) from error

        return in_threads(one, [*self.files().items()], WRITERS)


def save_shard(
    shard: Shard,
    directory: Path,
    shell: PreTrainedModel | None,
    *,
    adapter: LoraConfig | None = None,
    background: bool,
) -> Future[Saved]:
    """Write a rank's part of a checkpoint, see TrainEngine.save. Collective if ``background``.

    shell: meta-device model whose config this rank writes; None on other ranks. adapter: written by the same rank.
    """
    # Collective: all ranks save in the same way.
    waited_for = shortage(shard.bytes) if background else None
    # Copies must be complete before this returns: training changes the tensors in place.
    if staged := background and waited_for is None:
        shard.tensors = copied(shard.tensors)

    def write() -> Saved:
        started = time.monotonic()
        directory.mkdir(exist_ok=True)
        written = shard.write(directory)
        described = write_description(shell, directory) if shell is not None else []
        if shell is not None and adapter is not None:
            described.append(write_adapter_config(adapter, directory))
        files = [*written, *saved_files(directory, described)]
        # Last: it declares that everything above is on disk.
        if staged:
            declare_written(directory, shard.name, files)
        return Saved(files=files, seconds=time.monotonic() - started, waited_for=waited_for)

    saving = in_background(write)
    # Without copies the threads read the live tensors, which the next update would change.
    if not staged:
        wait([saving])
    return saving


def write_adapter_config(adapter: LoraConfig, directory: Path) -> str:
    """Write adapter_config.json as peft does; returns the file's name."""
    adapter.save_pretrained(str(directory))
    return ADAPTER_CONFIG


def load_sharded(state: dict[str, Tensor], path: str) -> None:
    """Fill ``state`` in place from a checkpoint of any number of ranks. Collective.

    Raises FileNotFoundError if there is no checkpoint, ValueError if it belongs to another model.
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
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(path, thread_count=READERS))


def saved_tensors(path: str) -> dict[str, Tensor]:
    """Tensors of a checkpoint as meta tensors: {name: shape and dtype without memory}."""
    found = {}
    for name, entry in dcp.HuggingFaceStorageReader(path).read_metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        found[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
    return found


def write_model(shell: PreTrainedModel | None, weights: Iterable[tuple[str, Tensor]], directory: Path, most: int = SHARD) -> None:
    """Write a Hugging Face directory from a stream of full weights; at most ``most`` bytes of them are held at a time.

    The rank that has ``shell`` writes, in the shell's dtype. Collective: weights are gathered on every rank. The number of files
    is known only at the end; they are then renamed.
    """
    written: list[dict[str, Tensor]] = []  # meta tensors of what is on disk
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
        remove_weights(directory)
        if len(written) > 1:
            places = {name: file for file, part in zip(names, written, strict=True) for name in part}
            total = sum(tensor.nbytes for part in written for tensor in part.values())
            (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2))
        else:
            names = ["model.safetensors"]
        for i, name in enumerate(names):
            (directory / f"part-{i}.safetensors").rename(directory / name)
        write_description(shell, directory)
    # Other ranks return only when the files exist.
    dist.barrier()


def remove_weights(directory: Path) -> None:
    """Remove the weights of an earlier model: what the new one does not replace, a reader could take for a part of it."""
    for path in (directory / "model.safetensors", *directory.glob("model-?????-of-?????.safetensors"), directory / INDEX):
        path.unlink(missing_ok=True)


class Files:
    """The tensors of a directory, a model or a checkpoint, read one at a time."""

    def __init__(self, directory: str, place: str) -> None:
        """place: name of the directory in messages."""
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
        """Assemble the full tensor on the CPU. Raises ValueError if it does not exist."""
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
        # The parts cover the tensor, so its shape is the largest end along each dimension.
        whole = torch.empty([max(sizes) for sizes in zip(*ends, strict=True)], dtype=parts[0][0].dtype)
        for (part, begin), end in zip(parts, ends, strict=True):
            whole[tuple(slice(*span) for span in zip(begin, end, strict=True))] = part
        return whole
