"""Write and hash files: safetensors from tensors where they lie, in threads while training goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import torch
from torch import Tensor

from workers.engine.base import SavedFile

Item = TypeVar("Item")
Result = TypeVar("Result")
PIECE = 2**26  # bytes that are hashed and written at a time
SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The names of types in a header."""


def in_background(work: Callable[[], Result]) -> Future[Result]:
    """What ``work`` returns or raises, from a thread that does not keep the process alive."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="save", daemon=True).start()
    return future


def in_threads(work: Callable[[Item], Result], items: Sequence[Item], threads: int) -> list[Result]:
    """``work`` of each item, by as many threads of that kind. Returns, or raises the first error, when all have ended."""
    waiting, results = iter([*enumerate(items)]), {}

    def work_on() -> None:
        for i, item in waiting:
            results[i] = work(item)

    at_work = [in_background(work_on) for _ in range(min(threads, len(items)))]
    wait(at_work)
    for thread in at_work:
        thread.result()
    return [results[i] for i in range(len(items))]


def read_ahead(read: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """``read`` of each item, in order; threads are at most as many items ahead as there are threads."""
    under_way: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            under_way.append(pool.submit(read, item))
            if len(under_way) > threads:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> SavedFile:
    """A safetensors file from the tensors where they lie, on disk when this returns. Its hash is made while it is written.

    safetensors' own save_file brings all tensors to the host before it writes the first one, and its file would have to be read
    again for the hash. Here a tensor of a device is copied when its turn comes. Raises OSError.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # what is wider first: all are aligned
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        if tensor.dtype not in SAFETENSORS:
            raise ValueError(f"{path}: {name} is {tensor.dtype}; a checkpoint holds {', '.join(map(str, SAFETENSORS))}")
        end += tensor.nbytes
        header[name] = {"dtype": SAFETENSORS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    beginning = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(beginning)
    with path.open("wb") as file, ThreadPoolExecutor(1) as hashing:
        file.write(beginning)
        for name in names:
            data = bytes_of(tensors[name])
            for start in range(0, len(data), PIECE):
                piece = data[start : start + PIECE]
                hashed = hashing.submit(digest.update, piece)  # both leave the interpreter's lock to the other
                file.write(piece)
                hashed.result()
        file.flush()
        os.fsync(file.fileno())
        return SavedFile(name=path.name, size=file.tell(), sha256=digest.hexdigest())


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's own memory where that is the host's and in one piece; else a copy's."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def saved_files(directory: Path, names: Iterable[str]) -> list[SavedFile]:
    """Wait until the files are on disk, and take their size and hash from what is in the page cache."""
    found = []
    for name in names:
        with (directory / name).open("rb") as file:
            os.fsync(file.fileno())
            found.append(SavedFile(name=name, size=os.fstat(file.fileno()).st_size, sha256=sha256_of(directory / name)))
    return found


def hashes_of(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """The sha256 of each, several at a time."""
    hashes = in_threads(lambda name: sha256_of(directory / name), names, min(16, os.cpu_count() or 1))
    return dict(zip(names, hashes, strict=True))


def sha256_of(path: Path) -> str:
    """In hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
