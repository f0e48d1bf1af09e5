"""Remote calls: a method and its arguments, their distribution over ranks, their format between processes, and their execution.

Independent of the backend and of what workers compute. Imports no ray, torch or numpy: commands that start no worker stay light.
"""

from __future__ import annotations

import io
import pickle
import pkgutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import cloudpickle

from workers.start_times import START

if TYPE_CHECKING:
    import numpy as np
    import torch

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
T = TypeVar("T")


# The call: what the controller asks for.


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """A method of a worker, or of one of its roles, with arguments. Made by ``worker_call`` and ``role_call``.

    role: key of ``worker.roles``; None: a method of the worker itself. method: its name, which is what is sent.
    """

    role: str | None
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def worker_call(method: Callable[Concatenate[Any, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
    """Call of a worker's method, ``worker_call(Worker.build_model, role, spec, loss)``; the types of arguments are checked."""
    return Call(None, method.__name__, args, kwargs)


def role_call(role: str, method: Callable[Concatenate[Any, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
    """Call of a method of a role, ``role_call("actor", ModelRole.load, path)``."""
    return Call(role, method.__name__, args, kwargs)


class Sharded(list[Any]):
    """Argument with one item per shard. Any other argument goes to all ranks unchanged."""


def sharded(items: Sequence[T]) -> T:
    """The argument whose value on shard s is items[s]. Typed as an item, because that is what the worker's method receives."""
    return cast(T, Sharded(items))


# Distribution over ranks. Pure functions.

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of one rank: (positional, keyword)."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Assignment of shards to the ranks of a group.

    The tp and pp ranks of one replica get the same shard, and one of them returns its result. shard_of_rank[r]: shard of rank
    r. output_ranks[s]: rank that returns the result of shard s. Raises ValueError if a shard has no rank, or if the rank that
    answers for a shard does not hold it.
    """

    shard_of_rank: tuple[int, ...]
    output_ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        shards = set(self.shard_of_rank)
        if shards != set(range(self.n_shards)):
            raise ValueError(f"the mesh has {self.n_shards} answering ranks, its ranks get shards {sorted(shards)}")
        for shard, rank in enumerate(self.output_ranks):
            if not 0 <= rank < self.world_size or self.shard_of_rank[rank] != shard:
                holders = [r for r, held in enumerate(self.shard_of_rank) if held == shard]
                raise ValueError(f"rank {rank} cannot answer for shard {shard}: ranks {holders} hold it")

    @property
    def world_size(self) -> int:
        return len(self.shard_of_rank)

    @property
    def n_shards(self) -> int:
        return len(self.output_ranks)


def split(mesh: Mesh, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Arguments]:
    """Arguments of each rank. Raises ValueError if a Sharded argument does not have one item per shard.

    Ranks with the same shard get the same objects.
    """
    for name, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Sharded) and len(value) != mesh.n_shards:
            label = repr(name) if isinstance(name, str) else str(name)
            raise ValueError(
                f"argument {label} has {len(value)} items, the mesh {mesh.n_shards} shards over {mesh.world_size} ranks"
            )

    def pick(value: Any, shard: int) -> Any:
        return value[shard] if isinstance(value, Sharded) else value

    # Once per shard, not per rank: a backend packs arguments once for all ranks that get the same object.
    by_shard: list[Arguments] = [
        (tuple(pick(value, shard) for value in args), {name: pick(value, shard) for name, value in kwargs.items()})
        for shard in range(mesh.n_shards)
    ]
    return [by_shard[shard] for shard in mesh.shard_of_rank]


# Format between processes: a small pickle, and separately the bytes of tensors and arrays. Tensors are sent as numpy buffers:
# torch's own pickling copies them through a slow path (8 x slower than numpy).


@dataclass(frozen=True, slots=True)
class PackedMessage:
    """A packed value.

    data: the pickle. buffers: uint8, one for each tensor or array in it, in order; views, not copies.
    """

    data: bytes
    buffers: tuple[np.ndarray, ...]

    @property
    def nbytes(self) -> int:
        return len(self.data) + sum(buffer.nbytes for buffer in self.buffers)


def pack(value: Any) -> PackedMessage:
    """Pack any value that cloudpickle takes.

    Tensors lose their graph and their device: they arrive on the CPU. A view is sent without the rest of its storage.
    """
    import numpy as np

    buffers: list[pickle.PickleBuffer] = []
    with io.BytesIO() as stream:
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
        data = stream.getvalue()
    return PackedMessage(data, tuple(np.asarray(buffer.raw()) for buffer in buffers))


def unpack(message: PackedMessage) -> Any:
    """The packed value in memory of its own: writable, and independent of the memory of the message.

    The copy costs 20-50 ms per 100 MB. Without it an in-place change would silently reach the data of other ranks in Ray's
    object store, and a batch that is kept would keep its part of the store allocated.
    """
    return pickle.loads(message.data, buffers=[buffer.copy() for buffer in message.buffers])


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")  # if it is not loaded there are no tensors, and importing it takes a second
        if torch is not None and type(value) is torch.Tensor and value.layout is torch.strided:
            return _reduce_tensor(value)
        return super().reducer_override(value)


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Reduce a tensor to a buffer of its bytes, its dtype and its shape."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return _build_tensor, (pickle.PickleBuffer(flat.numpy().data), tensor.dtype, tuple(tensor.shape))


def _build_tensor(buffer: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    if not buffer.size:  # an empty buffer cannot be viewed as another dtype
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(buffer).view(dtype).reshape(shape)


# Execution on the worker's side.


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a call on one rank.

    method: that failed (``__init__``: the constructor of the worker). message: "<class>: <text>" of the exception, or what is
    known of a process that died. traceback: as formatted in the worker. error: the exception, if it is in this process.
    process_died: the process died, and its node is known to live: another one could start in its place.
    """

    method: str
    message: str
    traceback: str
    error: BaseException | None
    process_died: bool = False


class Executor:
    """Holds one worker and executes packed calls on it."""

    def __init__(self) -> None:
        self.worker: Any = None
        # Failure of the constructor, returned by every later call: an error of ``start`` itself may never be read, because a
        # group is usable while its workers are being built.
        self._failed_start: Failure | None = None

    def start(self, info: object, worker: PackedMessage, arguments: PackedMessage) -> PackedMessage | Failure:
        """Import and construct the worker.

        info: WorkerInfo, its first argument. worker: the packed class, or its name "package.module:Class". arguments: packed
        Arguments.
        """

        def build() -> None:
            START.take()  # discards the times of an earlier worker in this process
            named = unpack(worker)
            args, kwargs = unpack(arguments)
            with START("imports"):
                kind = pkgutil.resolve_name(named) if isinstance(named, str) else named
            self.worker = kind(info, *args, **kwargs)

        result = guarded("__init__", build)
        self._failed_start = result if isinstance(result, Failure) else None
        return result

    def call(self, role: str | None, method: str, wanted: bool, arguments: PackedMessage) -> PackedMessage | Failure:
        """Call a method of the worker, or of its role, and pack the result.

        arguments: packed Arguments. wanted: whether the result of this rank is used; if not, None is packed instead of it.
        """
        if self._failed_start:
            return self._failed_start

        def work() -> Any:
            args, kwargs = unpack(arguments)
            target = self.worker if role is None else self.worker.roles[role]
            result = methodcaller(method, *args, **kwargs)(target)
            return result if wanted else None

        return guarded(method, work)

    def close(self) -> None:
        """Close the worker, so that it leaves what it shares with other workers. Needed where the process continues."""
        if self.worker is not None:
            self.worker.close()


def guarded(method: str, work: Callable[[], Any]) -> PackedMessage | Failure:
    """Call ``work`` and pack its result, or return a Failure.

    Catches SystemExit too: sys.exit in a library must not end a rank without a message.
    """
    try:
        return pack(work())
    except (Exception, SystemExit) as error:
        return Failure(method, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)), error)
