"""Load weights by rows: every rank reads only the rows it holds, in the stored dtype, from the safetensors files.

Rows of a tensor are one byte range of a file, so a shard is read in a few large reads by several threads, and converted on the
device that it is for. Beyond its own shards a rank holds only pieces of PIECE bytes.

Which tensor of the model a stored name refers to is decided by transformers' own rules. Experts are separate tensors in a file
and rows of one tensor in the model: byte ranges too. A weight that transformers would convert in any other way is read completely
by every rank and converted by transformers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from configs.schema.common import ModelConfig
from workers.model_path import model_path

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PIECE = 2**25  # bytes per read
READERS = 4  # threads per rank: one copies to the device while others read
TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file. begin: offset of its first byte."""

    path: Path
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """One read: fill ``target``, flat and contiguous, with the elements of ``stored`` that start at index ``begin``."""

    target: Tensor
    stored: Stored
    begin: int


def weight_files(model: ModelConfig) -> list[Path]:
    """Paths of the model's safetensors files; a hub model is downloaded. Raises OSError if a file is missing."""
    place = model_path(model)
    folder = Path(place) if Path(place).is_dir() else Path(snapshot_download(place, allow_patterns=["*.json"]))
    index = folder / INDEX
    # A hub model may also hold its weights in other formats, so the index decides what is downloaded.
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [WHOLE]
    if not Path(place).is_dir():
        snapshot_download(place, allow_patterns=names)
    for name in names:
        if not (folder / name).is_file():
            raise OSError(f"model.path={model.path}: no file named {name} there; copy or download the model again")
    return [folder / name for name in names]


def tensors_in(file: Path) -> dict[str, Stored]:
    """Parse the header of a file: {name: Stored}. Raises ValueError for an unknown dtype."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    if unknown := next((name for name, entry in header.items() if entry["dtype"] not in TYPES), None):
        raise ValueError(f"{file}: {unknown} is stored as {header[unknown]['dtype']}; known types are {', '.join(TYPES)}")
    return {
        name: Stored(file, 8 + length + entry["data_offsets"][0], TYPES[entry["dtype"]], tuple(entry["shape"]))
        for name, entry in header.items()
    }


class StoredWeights:
    """The weights of a model in its files, by the model's parameter names.

    conversions: the conversions of transformers that were used; transformers inverts them when it writes the model. missing:
    names of the model that no file has; ``fill`` sets them to zero.
    """

    def __init__(self, hf: PreTrainedModel, files: Sequence[Path], place: str) -> None:
        """hf: the model on the meta device, as transformers builds it. place: name of the files in messages.

        Raises ValueError for a weight whose shape differs from the model's.
        """
        self.place, self.folder = place, files[0].parent
        self._hf = hf
        self._blocks: dict[str, list[Stored]] = {}
        """{name in the model: stored tensors that make it up, concatenated in element order}."""
        self._converted: dict[str, tuple[WeightConverter, Mapping[str, list[Stored]], str]] = {}
        # keep_vars: all names of a tied weight refer to one object, by whose id ``first`` finds them.
        state: dict[str, Tensor] = hf.state_dict(keep_vars=True)
        sources = {name: stored for file in files for name, stored in tensors_in(file).items()}
        mapping = get_model_conversion_mapping(hf)
        found = self._named(sources, state, mapping)
        self.conversions = [one for one in mapping if one.was_used()]
        by_pattern = {pattern: one for one in mapping if isinstance(one, WeightConverter) for pattern in one.source_patterns}
        for name, parts in found.items():
            if None in parts:
                self._blocks[name] = parts[None]
            else:
                self._convert(name, by_pattern[next(pattern for pattern in parts if pattern is not None)], parts)
        for name, blocks in self._blocks.items():
            self._check_shape(name, blocks, tuple(state[name].shape))
        first: dict[int, str] = {}
        for name, tensor in state.items():  # a tied weight may be stored under any of its names
            if name in self:
                first.setdefault(id(tensor), name)
        self._stands_for = {name: first[id(tensor)] for name, tensor in state.items() if id(tensor) in first}
        # Stored more than once: pairs of the name that is read and one that is not.
        pairs = [(kept, name) for name, kept in self._stands_for.items() if name != kept]
        self._ignored = [pair for pair in pairs if all(name in self._blocks for name in pair)]
        self.missing = sorted(state.keys() - self._stands_for.keys())

    def __contains__(self, name: str) -> bool:
        return name in self._blocks or name in self._converted

    def check_ties(self) -> None:
        """Raise ValueError if a tied weight is stored under two names with different values: only one is read.

        transformers would not tie such weights. Both are read, a piece at a time; the result is the same on every rank.
        """
        for kept, name in self._ignored:
            one, other = self._blocks[kept], self._blocks[name]
            n, dtype = sum(block.numel for block in one), torch.promote_types(one[0].dtype, other[0].dtype)
            for start in range(0, n, PIECE // dtype.itemsize):
                pair = [torch.empty(min(PIECE // dtype.itemsize, n - start), dtype=dtype) for _ in range(2)]
                read([*pieces_of(pair[0], start, one), *pieces_of(pair[1], start, other)])
                # As the less precise of both has them; a NaN equals itself.
                narrow = min(one[0].dtype, other[0].dtype, key=lambda dtype: dtype.itemsize)
                if not torch.equal(*(part.to(narrow).nan_to_num() for part in pair)):
                    raise ValueError(
                        f"{self.place}: {kept} and {name} differ there, and its config ties them, so {name} would be ignored; "
                        "set tie_word_embeddings: false in the model's override_config to use both, or remove it from the files"
                    )

    def _named(
        self, sources: Mapping[str, Stored], state: Mapping[str, Tensor], mapping: Sequence[Any]
    ) -> dict[str, dict[str | None, list[Stored]]]:
        """Match stored tensors to the model as transformers does: {name in the model: {conversion pattern or None: tensors}}."""
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        prefix, found = self._hf.base_model_prefix, dict[str, dict[str | None, list[Stored]]]()
        known: dict[str, Any] = dict(state)
        # By number, as transformers does: experts are concatenated in this order, and expert 10 comes after expert 9.
        for key in sorted(sources, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, known)
            # A renaming that matches nothing is ignored if the stored name itself is one of the model's.
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], prefix, known)
            if name in state:  # others are not weights of this model, such as an lm_head where a critic is loaded
                found.setdefault(name, {}).setdefault(pattern, []).append(sources[key])
        return found

    def _convert(self, name: str, converter: WeightConverter, parts: Mapping[Any, list[Stored]]) -> None:
        """Register a weight that transformers makes from several stored tensors.

        If the conversion is a plain concatenation (experts), the result is a sequence of byte ranges and can be read by rows. To
        detect that, the conversion runs on small tensors of consecutive numbers: each group of four numbers of the result must be
        one input. Otherwise the inputs are read completely and converted by transformers.
        """
        whole = {
            pattern: [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in some] for pattern, some in parts.items()
        }
        made = self._apply(name, converter, whole)
        flat = [one for some in parts.values() for one in some]
        if len(made) == 1 and len({one.shape for one in flat}) == 1 and len(flat[0].shape) == 2:
            numbers = iter(torch.arange(4 * len(flat)).view(-1, 2, 2))
            (probe,) = self._apply(
                name, converter, {pattern: [next(numbers) for _ in some] for pattern, some in parts.items()}
            ).values()
            rows = probe.reshape(-1, 4)
            if torch.equal(rows, rows[:, :1] + torch.arange(4)):
                self._blocks[name] = [flat[int(first) // 4] for first in rows[:, 0]]
                return
        for target in made:
            self._converted[target] = (converter, parts, name)

    def _apply(self, name: str, converter: WeightConverter, tensors: Mapping[Any, list[Tensor]]) -> dict[str, Tensor]:
        """Run transformers' conversion on tensors: {name in the model: result}.

        On a copy of the converter, which collects the tensors in its own state.
        """
        one = deepcopy(converter)
        for pattern, some in tensors.items():
            for tensor in some:
                one.add_tensor(name, name, pattern, tensor)  # type: ignore[arg-type] # as transformers does when it writes
        made: dict[str, Any] = one.convert(name, model=self._hf, config=self._hf.config)
        return {target: tensor[0] if isinstance(tensor, list) else tensor for target, tensor in made.items()}

    def _check_shape(self, name: str, blocks: Sequence[Stored], shape: tuple[int, ...]) -> None:
        fits = blocks[0].shape == shape if len(blocks) == 1 else sum(one.numel for one in blocks) == math.prod(shape)
        if not fits:
            there = " + ".join(str(one.shape) for one in blocks[:2]) + (" ..." if len(blocks) > 2 else "")
            raise ValueError(f"{self.place}: {name} is {there} there and {shape} in this model; take the files of its config")

    @torch.no_grad()
    def fill(self, targets: Mapping[str, tuple[Tensor, int]]) -> None:
        """Read weights into tensors. Raises ValueError for a truncated file.

        targets: {name in the model: (contiguous tensor, index of its first element in the full tensor)}.
        """
        pieces: list[Piece] = []
        converted: dict[str, dict[str, Tensor]] = {}
        for name, (tensor, start) in targets.items():
            flat, name = tensor.view(-1), self._stands_for.get(name, name)
            if name in self.missing:
                flat.zero_()
                continue
            if name in self._blocks:
                pieces += pieces_of(flat, start, self._blocks[name])
                continue
            converter, parts, first = self._converted[name]
            if first not in converted:
                # Keep only the latest conversion: it holds complete tensors.
                converted = {first: self._apply(first, converter, read_whole(parts))}
            flat.copy_(converted[first][name].flatten()[start : start + len(flat)])
        read(pieces)


def pieces_of(target: Tensor, start: int, blocks: Sequence[Stored]) -> list[Piece]:
    """Split the read of ``target``, flat: elements from ``start`` on of the concatenated blocks, at most PIECE bytes each."""
    pieces, stop = [], start + len(target)
    for block, begin in zip(blocks, accumulate((block.numel for block in blocks), initial=0), strict=False):
        most = PIECE // block.dtype.itemsize
        first, last = max(start, begin), min(stop, begin + block.numel)
        for at in range(first, last, most):
            pieces.append(Piece(target[at - start : min(at + most, last) - start], block, at - begin))
    return pieces


def read_whole(parts: Mapping[Any, list[Stored]]) -> dict[Any, list[Tensor]]:
    """Read complete tensors to the CPU, in their stored dtype, keyed as ``parts`` is."""
    whole = {pattern: [torch.empty(one.shape, dtype=one.dtype) for one in some] for pattern, some in parts.items()}
    pairs = [pair for pattern, some in parts.items() for pair in zip(whole[pattern], some, strict=True)]
    read([piece for tensor, one in pairs for piece in pieces_of(tensor.view(-1), 0, [one])])
    return whole


def read(pieces: Sequence[Piece]) -> None:
    """Execute the reads in READERS threads; each target is filled in its own dtype on its own device."""
    gpu = next((piece.target.device for piece in pieces if piece.target.is_cuda), None)
    here = partial(torch.cuda.set_device, gpu) if gpu is not None else None  # a new thread starts on device 0
    with ExitStack() as opened, ThreadPoolExecutor(READERS, initializer=here) as threads:
        paths = dict.fromkeys(piece.stored.path for piece in pieces)
        files = {path: opened.enter_context(path.open("rb", buffering=0)).fileno() for path in paths}
        for _ in threads.map(lambda piece: _read_piece(piece, files[piece.stored.path]), pieces):
            pass


@torch.no_grad()
def _read_piece(piece: Piece, file: int) -> None:
    """Read one piece. The dtype is converted on the device: the bytes that cross to it are the stored ones."""
    target, dtype = piece.target, piece.stored.dtype
    in_place = target.dtype == dtype and target.device.type == "cpu"
    staged = target if in_place else torch.empty(len(target), dtype=dtype, pin_memory=target.is_cuda)
    read_bytes(file, staged.view(torch.uint8).numpy(), piece.stored.begin + piece.begin * dtype.itemsize, piece.stored.path)
    if not in_place:
        target.copy_(staged.to(target.device))


def read_bytes(file: int, buffer: Any, begin: int, path: Path) -> None:
    """Fill ``buffer`` from offset ``begin``. Raises ValueError if the file ends before it is full."""
    view = memoryview(buffer)
    while view:
        # A read may return fewer bytes than requested. preadv takes an offset: threads share the file descriptor.
        count = os.preadv(file, [view], begin)
        if not count:
            raise ValueError(f"{path} ends before byte {begin + len(view):,}; copy or download it again")
        view, begin = view[count:], begin + count
