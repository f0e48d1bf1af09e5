"""The trainer's weights for rollout engines in other processes: a process group of the trainer's first rank and all of theirs.

In a sync the trainer gives passes over its weights for as long as all engines want one. Words go by gloo, buckets on the device
that the weights are on. A rank that is at its end says so: nobody waits for it, on neither side.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from workers.engine.base import TrainEngine, Weights
from workers.rollout.sync.buckets import ALIGNMENT, buckets, starts
from workers.rollout.verification import WeightMismatch

if TYPE_CHECKING:
    from peft import LoraConfig

TRAINER, SPOKESMAN = 0, 1
"""Ranks in the channel: the trainer's, and the first of the engines', whose wish stands for that of all. Rank n of the engines'
process group is n + 1."""


class ChannelLost(RuntimeError):
    """Another rank of the channel has left it, died or not come: its own error says why."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where engines get a trainer's weights. receivers: how many ranks they are. adapter: the trainer's, if it has one."""

    address: str
    port: int
    receivers: int
    adapter: LoraConfig | None


@dataclass(frozen=True, slots=True)
class Bucket:
    """intact: it came as it left."""

    weights: list[tuple[str, Tensor]]
    intact: bool


class Channel:
    """One rank's end. All methods are collective over the channel; they raise ChannelLost."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: Literal["cpu", "cuda"], limit: timedelta) -> None:
        """limit: so long a rank waits for the others."""
        self.rank, self.device = rank, device
        self._store, self._size, self._limit = store, size, limit
        self._gloo: dist.ProcessGroup | None = None
        self._nccl: dist.ProcessGroup | None = None

    @classmethod
    def offered(cls, address: str, receivers: int, device: Literal["cpu", "cuda"], limit: timedelta) -> tuple[Channel, int]:
        """The trainer's end, and the port where others find it. It listens on ``address`` only."""
        listener = socket.create_server((address, 0))
        port: int = listener.getsockname()[1]
        store = dist.TCPStore(
            address, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return cls(store, TRAINER, 1 + receivers, device, limit), port

    @classmethod
    def joined(cls, meeting: Meeting, rank: int, device: Literal["cpu", "cuda"], limit: timedelta) -> Channel:
        """The end of an engine's rank; ``rank``: in the engines' own process group."""
        store = dist.TCPStore(meeting.address, meeting.port, timeout=limit, wait_for_workers=False)
        return cls(store, 1 + rank, 1 + meeting.receivers, device, limit)

    @property
    def _words(self) -> dist.ProcessGroup:
        self._gloo = self._gloo or self.meet_others("gloo")
        return self._gloo

    @property
    def _weights(self) -> dist.ProcessGroup:
        if self.device == "cpu":
            return self._words
        self._nccl = self._nccl or self.meet_others("nccl")
        return self._nccl

    def meet_others(self, backend: Literal["gloo", "nccl"]) -> dist.ProcessGroup:
        """In the first sync. A backend by itself, which is used like a group: torch's default groups know nothing of it."""
        store = dist.PrefixStore(backend, self._store)
        if backend == "gloo":
            return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, self.rank, self._size, self._limit))
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._limit
        return cast(dist.ProcessGroup, dist.ProcessGroupNCCL(store, self.rank, self._size, options))

    def wait_for_others(self, start: Callable[[], dist.Work]) -> None:
        """In here and in meet_others this rank waits for others: trainer/cluster/hang_report.py knows both by their names."""
        try:
            start().wait()
        except RuntimeError as error:  # torch's words for a rank that is gone, and for one that is late
            raise ChannelLost(f"the channel between trainer and rollout engines: {error}") from error

    def all_want(self, wanted: bool) -> bool:
        """Whether every rank says so."""
        answer = torch.tensor(int(wanted))
        self.wait_for_others(lambda: self._words.allreduce(answer, dist.ReduceOp.MIN))
        return bool(answer)

    def tell(self, source: int, words: Any = None) -> Any:
        """What the rank ``source`` says. words: its own, as JSON has them."""
        text = torch.frombuffer(bytearray(json.dumps(words), "utf-8"), dtype=torch.uint8)
        length = torch.tensor(len(text))
        self.wait_for_others(lambda: self._words.broadcast(length, source))
        if self.rank != source:
            text = torch.empty(int(length), dtype=torch.uint8)
        self.wait_for_others(lambda: self._words.broadcast(text, source))
        return json.loads(text.numpy().tobytes())

    def send(self, weights: Sequence[tuple[str, Tensor]], dtype: torch.dtype | None) -> None:
        """A bucket; none of them: the pass is over. dtype: those that are wider go in it."""
        if not weights:
            return self.tell(TRAINER, [])
        dtypes = [narrower(tensor, dtype) for _, tensor in weights]
        places = starts([nbytes(tensor, dtype) for _, tensor in weights], ALIGNMENT)
        flat = torch.zeros(places[-1], dtype=torch.uint8, device=self.device)
        header = []
        for (name, tensor), of, start in zip(weights, dtypes, places, strict=False):
            place(flat, start, of, tensor.shape).copy_(tensor.detach())
            header.append([name, str(of).removeprefix("torch."), list(tensor.shape), start])
        self.tell(TRAINER, [header, len(flat), checksum(flat)])
        self.wait_for_others(lambda: self._weights.broadcast(flat, TRAINER))

    def receive(self) -> Bucket | None:
        """The next bucket; None: the pass is over. Its tensors share memory that nothing else is put in."""
        match self.tell(TRAINER):
            case []:
                return None
            case [header, size, sent]:
                flat = torch.empty(size, dtype=torch.uint8, device=self.device)
                self.wait_for_others(lambda: self._weights.broadcast(flat, TRAINER))
                weights = [(name, place(flat, start, getattr(torch, of), shape)) for name, of, shape, start in header]
                return Bucket(weights, intact=checksum(flat) == sent)
            case failed:
                raise ChannelLost(f"the trainer gives no more weights: {failed}")


def narrower(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """What a tensor goes in that will be copied into ``dtype``."""
    narrows = dtype is not None and tensor.is_floating_point() and dtype.itemsize < tensor.itemsize
    return dtype if dtype is not None and narrows else tensor.dtype


def nbytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return tensor.numel() * narrower(tensor, dtype).itemsize


def place(flat: Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A view of bytes."""
    whole = torch.empty(shape, dtype=dtype, device="meta")
    return flat[start : start + whole.nbytes].view(dtype).view(shape)


def checksum(flat: Tensor) -> int:
    """Of bytes, a multiple of ALIGNMENT."""
    return int(flat.view(torch.int64).sum())


class Sender:
    """The trainer's side. Its first rank is in the channel; the others take part in what the weights are gathered by."""

    def __init__(self, engine: TrainEngine, channel: Channel | None) -> None:
        self._engine, self._channel = engine, channel

    def serve(self) -> None:
        """Give passes until an engine wants no more. Collective over the trainer's ranks."""
        while (wanted := self._next()) is not None:
            self._give(*wanted)

    def _next(self) -> tuple[str | None, Weights, int] | None:
        told: list[Any] = [None]
        try:
            if self._channel is not None and self._channel.all_want(True):
                told = [self._channel.tell(SPOKESMAN)]
        finally:  # also if nobody is there any more: the other ranks wait
            dist.broadcast_object_list(told, 0, device=torch.device("cpu"))
        return told[0]

    def _give(self, named: str | None, kind: Weights, limit: int) -> None:
        dtype = None if named is None else getattr(torch, named)
        weights = self._engine.export_weights(dtype=dtype, kind=kind)
        if self._channel is None:
            for _ in weights:
                pass
            return
        try:
            for bucket in buckets(weights, lambda item: nbytes(item[1], dtype), limit):
                self._channel.send(bucket, dtype)
                bucket.clear()
        except ChannelLost:
            raise
        except Exception as error:
            self._channel.tell(TRAINER, f"{type(error).__name__}: {error}")
            raise
        self._channel.send([], dtype)


class Receiver:
    """The side of an engine's rank: a source of weights (weight_sync.WeightSource) that come from elsewhere."""

    def __init__(self, channel: Channel, adapter: LoraConfig | None, bucket_bytes: int) -> None:
        """bucket_bytes: so much comes at a time, if no tensor is larger."""
        self.adapter_config = adapter
        self._channel, self._bucket_bytes = channel, bucket_bytes
        self._in_pass = False

    def live_weights(self) -> None:
        """They are another process's."""

    def export_weights(self, *, dtype: torch.dtype | None = None, kind: Weights = "merged") -> Iterator[tuple[str, Tensor]]:
        """A pass, in ``sync``. Also raises WeightMismatch for a bucket that came otherwise than it left."""
        if not self._channel.all_want(True):
            raise ChannelLost("another rank of the rollout engines has ended this sync")
        named = None if dtype is None else str(dtype).removeprefix("torch.")
        self._channel.tell(SPOKESMAN, [named, kind, self._bucket_bytes])
        self._in_pass = True
        while (bucket := self._next()) is not None:
            if not bucket.intact:
                first, last = bucket.weights[0][0], bucket.weights[-1][0]
                raise WeightMismatch(f"the bucket with {first} to {last} did not come as the trainer sent it")
            yield from bucket.weights

    @contextmanager
    def sync(self) -> Iterator[None]:
        """In here passes can be had; afterwards the trainer is at its end too, however this one's was."""
        self._in_pass = False
        try:
            yield
        except ChannelLost:
            raise
        except BaseException:
            self._leave()
            raise
        self._leave()

    def _leave(self) -> None:
        """The others are not kept waiting for the rest of a pass."""
        while self._in_pass:
            self._next()
        self._channel.all_want(False)

    def _next(self) -> Bucket | None:
        bucket = self._channel.receive()
        self._in_pass = bucket is not None
        return bucket
