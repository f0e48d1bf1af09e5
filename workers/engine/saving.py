"""Write and hash files: safetensors directly from tensors, in threads, concurrently with training."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import torch
from torch import Tensor

from workers.engine.base import SavedFile

WRITTEN = ".written"
"""Suffix of the file that lists what a rank has written in the background, see ``declare_written``."""

Item = TypeVar("Item")
Result = TypeVar("Result")
PIECE = 2**26  # bytes hashed and written at a time
SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes in a safetensors header."""


def in_background(work: Callable[[], Result]) -> Future[Result]:
    """Run ``work`` in a daemon thread, which does not keep the process alive; returns its result or exception as a Future.

    Not a ThreadPoolExecutor: the interpreter waits for an executor's threads at exit.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        # Raised where the result is read; in the thread it would only be printed.
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="save", daemon=True).start()
    return future


def in_threads(work: Callable[[Item], Result], items: Sequence[Item], threads: int) -> list[Result]:
    """Apply ``work`` to each item in at most ``threads`` daemon threads.

    Returns the results in order, or raises the first error, when all threads have ended.
    """
    # All threads take items from one iterator, so a slow item delays only its own thread.
    waiting, results = iter([*enumerate(items)]), {}

    def run_items() -> None:
        for i, item in waiting:
            results[i] = work(item)

    running = [in_background(run_items) for _ in range(min(threads, len(items)))]
    # No thread may still write when the caller handles an error.
    wait(running)
    for thread in running:
        thread.result()
    return [results[i] for i in range(len(items))]


def read_ahead(read: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """Yield ``read(item)`` in order, while ``threads`` threads read at most ``threads`` items ahead of the consumer."""
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            pending.append(pool.submit(read, item))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> SavedFile:
    """Write a safetensors file from the tensors in place; it is on disk (fsync) when this returns. Raises OSError.

    The hash is computed while the file is written. safetensors' own save_file copies all tensors to the host before it writes the
    first one, and its file would have to be read again for the hash. Here a device tensor is copied when it is written. Raises
    ValueError for a dtype that the format does not have.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # widest dtype first: every tensor is aligned
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        if tensor.dtype not in SAFETENSORS:
            raise ValueError(f"{path}: {name} is {tensor.dtype}; a checkpoint holds {', '.join(map(str, SAFETENSORS))}")
        end += tensor.nbytes
        header[name] = {"dtype": SAFETENSORS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Pad the header to 8 bytes, which aligns the data that follows.
    text += b" " * (-len(text) % 8)
    beginning = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(beginning)
    # One thread: a digest has to take the pieces in the file's order.
    with path.open("wb") as file, ThreadPoolExecutor(1) as hashing:
        file.write(beginning)
        for name in names:
            data = bytes_of(tensors[name])
            for start in range(0, len(data), PIECE):
                piece = data[start : start + PIECE]
                hashed = hashing.submit(digest.update, piece)  # hashing and writing both release the GIL
                file.write(piece)
                hashed.result()
        file.flush()
        os.fsync(file.fileno())
        return SavedFile(name=path.name, size=file.tell(), sha256=digest.hexdigest())


def bytes_of(tensor: Tensor) -> memoryview:
    """View of the tensor's memory if it is contiguous and on the host; else of a copy."""
    # As bytes: numpy has no bfloat16.
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def declare_written(directory: Path, shard: str, files: Sequence[SavedFile]) -> None:
    """Write ``<shard>.written``: all ``files`` of this rank are on disk.

    The controller normally learns it from a call. If the run is killed before that call, its next start reads these files and
    completes the checkpoint. The file appears complete or not at all.
    """
    # Renamed when complete: a kill during the write must not leave a list that lacks files.
    partial = directory / f"{shard}{WRITTEN}.partial"
    with partial.open("w", encoding="utf-8") as file:
        json.dump([asdict(one) for one in files], file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(directory / f"{shard}{WRITTEN}")


def declared_files(directory: Path) -> list[SavedFile] | None:
    """Files that all ranks have declared as written; None if a rank has not, or if none wrote in the background."""
    declared = {path.name.removesuffix(WRITTEN): path for path in directory.glob(f"*{WRITTEN}")}
    # Each name contains the number of ranks: shard-00001-of-00008.
    if not declared or len(declared) < int(next(iter(declared)).rpartition("-")[2]):
        return None
    return [SavedFile(**one) for path in declared.values() for one in json.loads(path.read_text(encoding="utf-8"))]


def saved_files(directory: Path, names: Iterable[str]) -> list[SavedFile]:
    """Flush files to disk (fsync) and return their size and hash, read from the page cache."""
    found = []
    for name in names:
        with (directory / name).open("rb") as file:
            os.fsync(file.fileno())
            found.append(SavedFile(name=name, size=os.fstat(file.fileno()).st_size, sha256=sha256_of(directory / name)))
    return found


def hashes_of(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """sha256 of each file, computed concurrently: {name: hexadecimal}."""
    hashes = in_threads(lambda name: sha256_of(directory / name), names, min(16, os.cpu_count() or 1))
    return dict(zip(names, hashes, strict=True))


def sha256_of(path: Path) -> str:
    """sha256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
