"""Weight transfer to rollout engines in other processes: a process group of the trainer's first rank and the engine ranks.

Engines in a pool of their own have a channel for each replica, so that a replica that died can be replaced without the others.
A pass over the weights serves all replicas that want it: they are gathered once.

Problem: trainer and engines may differ in number of ranks, sharding and tensor parallelism, and a rank of either side may fail in
the middle of a sync. All calls are collective, so a rank that just raised would leave the others waiting until the timeout.

Idea: the receivers drive. A sync is a sequence of passes over the weights. Before each pass all ranks agree (all-reduce MIN) on
whether there is one; the first receiver then broadcasts what it wants, and the trainer broadcasts bucket after bucket. A receiver
that fails keeps consuming the current pass and then votes against the next one; a trainer that fails broadcasts its error in
place of a bucket. Headers travel as JSON over gloo, buckets over NCCL on CUDA and gloo on CPU.

Cost: every receiver gets all weights and keeps its shard, and the trainer's first rank sends them once to each channel. Each
bucket carries a checksum of its bytes.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
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

TRAINER, FIRST_RECEIVER = 0, 1
"""Ranks in the channel: the trainer, and the first engine rank, which announces the requested pass for all. Rank n of the
engines' process group is rank n + 1 here."""


class ChannelLost(RuntimeError):
    """Another rank of the channel left, died or never joined; its own error states the cause."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Rendezvous of a trainer and the engine ranks of a channel, ``receivers``. adapter: the trainer's LoRA config, if any."""

    address: str
    port: int
    receivers: int
    adapter: LoraConfig | None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Received weights. intact: their checksum equals the sender's."""

    weights: list[tuple[str, Tensor]]
    intact: bool


class Channel:
    """One rank's end of the channel. All methods are collective over the channel and raise ChannelLost."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: Literal["cpu", "cuda"], limit: timedelta) -> None:
        """limit: timeout for each wait on the other ranks."""
        self.rank, self.device = rank, device
        self._store, self._size, self._limit = store, size, limit
        self._gloo: dist.ProcessGroup | None = None
        self._nccl: dist.ProcessGroup | None = None

    @classmethod
    def offered(cls, address: str, receivers: int, device: Literal["cpu", "cuda"], limit: timedelta) -> tuple[Channel, int]:
        """Create the trainer's end; returns it and its port. It listens on ``address`` only."""
        # The store would listen on all interfaces: it gets a socket that is already bound. Port 0: the kernel chooses a free one.
        listener = socket.create_server((address, 0))
        port: int = listener.getsockname()[1]
        store = dist.TCPStore(
            address, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return cls(store, TRAINER, 1 + receivers, device, limit), port

    @classmethod
    def joined(cls, meeting: Rendezvous, rank: int, device: Literal["cpu", "cuda"], limit: timedelta) -> Channel:
        """Create an engine rank's end. rank: in the engines' own process group."""
        store = dist.TCPStore(meeting.address, meeting.port, timeout=limit, wait_for_workers=False)
        return cls(store, 1 + rank, 1 + meeting.receivers, device, limit)

    @property
    def _header_group(self) -> dist.ProcessGroup:
        """The gloo group for headers and votes, created on first use."""
        self._gloo = self._gloo or self.join_process_group("gloo")
        return self._gloo

    @property
    def _bucket_group(self) -> dist.ProcessGroup:
        """The group for buckets: NCCL on CUDA, created on first use; the gloo group on CPU."""
        if self.device == "cpu":
            return self._header_group
        self._nccl = self._nccl or self.join_process_group("nccl")
        return self._nccl

    def join_process_group(self, backend: Literal["gloo", "nccl"]) -> dist.ProcessGroup:
        """Join a process group over the channel; blocks until all ranks have joined, so this happens in the first sync.

        Builds the backend directly: torch's default group belongs to the trainer or to the engines, and must not know this one.
        """
        # Both backends rendezvous through one store: the prefix keeps their keys apart.
        store = dist.PrefixStore(backend, self._store)
        if backend == "gloo":
            return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, self.rank, self._size, self._limit))
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._limit
        return cast(dist.ProcessGroup, dist.ProcessGroupNCCL(store, self.rank, self._size, options))

    def abandon(self) -> None:
        """Give up a channel whose receivers have died. NCCL's resources stay in use until they are released."""
        if self._nccl is not None:
            self._nccl.abort()

    def run_collective(self, start: Callable[[], dist.Work]) -> None:
        """Run one collective. trainer/cluster/hang_report.py recognises waiting ranks by this name and join_process_group."""
        try:
            start().wait()
        except RuntimeError as error:  # torch raises it both for a lost connection and for a timeout
            raise ChannelLost(f"the channel between trainer and rollout engines: {error}") from error

    def vote(self, wanted: bool) -> bool:
        """Vote: True if every rank passes True."""
        answer = torch.tensor(int(wanted))
        self.run_collective(lambda: self._header_group.allreduce(answer, dist.ReduceOp.MIN))
        return bool(answer)

    def broadcast_json(self, source: int, value: Any = None) -> Any:
        """Broadcast a JSON value from rank ``source``; returns it on all ranks. value: the value, on the source only."""
        # The length goes first: receivers need it to allocate the buffer.
        text = torch.frombuffer(bytearray(json.dumps(value), "utf-8"), dtype=torch.uint8)
        length = torch.tensor(len(text))
        self.run_collective(lambda: self._header_group.broadcast(length, source))
        if self.rank != source:
            text = torch.empty(int(length), dtype=torch.uint8)
        self.run_collective(lambda: self._header_group.broadcast(text, source))
        return json.loads(text.numpy().tobytes())

    def send(self, header: list[Any], flat: Tensor) -> None:
        """Broadcast a bucket: what ``receive`` has to know of it, and its bytes."""
        # Header first: receivers allocate the buffer from its size.
        self.broadcast_json(TRAINER, header)
        self.run_collective(lambda: self._bucket_group.broadcast(flat, TRAINER))

    def receive(self) -> Bucket | None:
        """Receive the next bucket, or None at the end of the pass.

        Its tensors are views of one buffer that is not reused: an engine may keep them until a layer is complete.
        """
        match self.broadcast_json(TRAINER):
            case []:
                return None
            case [tensors, size, sent]:
                flat = torch.empty(size, dtype=torch.uint8, device=self.device)
                self.run_collective(lambda: self._bucket_group.broadcast(flat, TRAINER))
                weights = [(name, place(flat, start, getattr(torch, of), shape)) for name, of, shape, start in tensors]
                return Bucket(weights, intact=checksum(flat) == sent)
            case failed:
                raise ChannelLost(f"the trainer gives no more weights: {failed}")


def narrower(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Dtype for the transfer of a tensor that the receiver casts to ``dtype``: the narrower of the two, never a widening."""
    narrows = dtype is not None and tensor.is_floating_point() and dtype.itemsize < tensor.itemsize
    return dtype if dtype is not None and narrows else tensor.dtype


def nbytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    """Bytes of a tensor in a bucket."""
    return tensor.numel() * narrower(tensor, dtype).itemsize


def place(flat: Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """View bytes of ``flat`` (uint8) from ``start`` as a tensor of this dtype and shape."""
    whole = torch.empty(shape, dtype=dtype, device="meta")
    return flat[start : start + whole.nbytes].view(dtype).view(shape)


def checksum(flat: Tensor) -> int:
    """Sum of bytes as int64 words, modulo 2^64. The number of bytes must be a multiple of ALIGNMENT."""
    return int(flat.view(torch.int64).sum())


def send(weights: Sequence[tuple[str, Tensor]], dtype: torch.dtype | None, channels: Sequence[Channel]) -> None:
    """Send a bucket to all channels; an empty one ends the pass. dtype: wider floating-point tensors are cast to it."""
    if not weights:
        for channel in channels:
            channel.broadcast_json(TRAINER, [])
        return
    dtypes = [narrower(tensor, dtype) for _, tensor in weights]
    places = starts([nbytes(tensor, dtype) for _, tensor in weights], ALIGNMENT)
    flat = torch.zeros(places[-1], dtype=torch.uint8, device=channels[0].device)
    tensors = []
    for (name, tensor), of, start in zip(weights, dtypes, places, strict=False):
        place(flat, start, of, tensor.shape).copy_(tensor.detach())
        tensors.append([name, str(of).removeprefix("torch."), list(tensor.shape), start])
    header = [tensors, len(flat), checksum(flat)]
    for channel in channels:
        channel.send(header, flat)


class Sender:
    """The trainer's side of all channels.

    Only its first rank is in them; the others (no channels) take part in gathering the weights.
    """

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self._channels: dict[int, Channel] = {}

    def connect(self, replica: int, channel: Channel) -> None:
        """Use this channel for a replica from now on; an earlier one is abandoned."""
        if replica in self._channels:
            self._channels[replica].abandon()
        self._channels[replica] = channel

    def serve(self, replicas: Collection[int] | None = None) -> None:
        """Serve passes until the engines want no more. Collective over the trainer's ranks. replicas: None: all."""
        passes = self._passes([channel for replica, channel in self._channels.items() if replicas is None or replica in replicas])
        while (wanted := self._next(passes)) is not None:
            self._send_pass(*wanted)

    def _passes(self, channels: Collection[Channel]) -> Iterator[tuple[list[Any], list[Channel]]]:
        """(request, channels to serve) of each pass; replicas with equal requests share a pass."""
        while channels:
            # The trainer always votes for another pass: only receivers end a sync.
            wanted = [(channel, channel.broadcast_json(FIRST_RECEIVER)) for channel in channels if channel.vote(True)]
            channels = [channel for channel, _ in wanted]
            while wanted:
                request = wanted[0][1]
                yield request, [channel for channel, own in wanted if own == request]
                wanted = [(channel, own) for channel, own in wanted if own != request]

    def _next(self, passes: Iterator[tuple[list[Any], list[Channel]]]) -> tuple[list[Any], list[Channel]] | None:
        """The next pass, its request (dtype, kind, bucket bytes) on all ranks of the trainer; None ends the sync."""
        request: list[Any] = [None]
        channels: list[Channel] = []
        try:
            request[0], channels = next(passes, (None, []))
        finally:  # also if a channel is lost: the trainer's other ranks wait in this broadcast
            dist.broadcast_object_list(request, 0, device=torch.device("cpu"))
        return None if request[0] is None else (request[0], channels)

    def _send_pass(self, request: list[Any], channels: Sequence[Channel]) -> None:
        """Send one pass over the weights, in buckets of a limited number of bytes."""
        named, kind, limit = request
        dtype = None if named is None else getattr(torch, named)
        weights = self._engine.export_weights(dtype=dtype, kind=kind)
        if not channels:  # export_weights is collective: iterate to the end without using the tensors
            for _ in weights:
                pass
            return
        try:
            for bucket in buckets(weights, lambda item: nbytes(item[1], dtype), limit):
                send(bucket, dtype, channels)
                bucket.clear()  # releases the tensors before the next bucket is gathered
        except ChannelLost:
            raise
        except Exception as error:
            # Receivers wait for a header: send the cause instead.
            for channel in channels:
                channel.broadcast_json(TRAINER, f"{type(error).__name__}: {error}")
            raise
        send([], dtype, channels)


class Receiver:
    """The side of an engine rank: a weight_sync.WeightSource for weights from another process."""

    def __init__(self, channel: Channel, adapter: LoraConfig | None, bucket_bytes: int) -> None:
        """bucket_bytes: size limit of a bucket; a larger tensor is a bucket of its own."""
        self.adapter_config = adapter
        self._channel, self._bucket_bytes = channel, bucket_bytes
        self._in_pass = False

    def live_weights(self) -> None:
        """None: tensors of another process cannot be shared."""

    def export_weights(self, *, dtype: torch.dtype | None = None, kind: Weights = "merged") -> Iterator[tuple[str, Tensor]]:
        """Request and receive one pass, within ``sync``. Also raises WeightMismatch for a bucket with a wrong checksum."""
        # Vote first: a receiver that failed in an earlier pass takes part in the vote, but sends and receives nothing after it.
        if not self._channel.vote(True):
            raise ChannelLost("another rank of the rollout engines has ended this sync")
        named = None if dtype is None else str(dtype).removeprefix("torch.")
        self._channel.broadcast_json(FIRST_RECEIVER, [named, kind, self._bucket_bytes])
        self._in_pass = True
        while (bucket := self._next()) is not None:
            if not bucket.intact:
                first, last = bucket.weights[0][0], bucket.weights[-1][0]
                raise WeightMismatch(f"the bucket with {first} to {last} did not come as the trainer sent it")
            yield from bucket.weights

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Context of one sync, in which passes can be requested. On leaving it, also by an error, the trainer's sync ends too."""
        self._in_pass = False
        try:
            yield
        except ChannelLost:  # no rank waits for this one: the connection is lost, or the vote has ended the sync
            raise
        except BaseException:
            self._end_pass()
            raise
        self._end_pass()

    def _end_pass(self) -> None:
        """Consume the rest of the current pass, then vote against another: the other ranks wait for this one in both."""
        while self._in_pass:
            self._next()
        self._channel.vote(False)

    def _next(self) -> Bucket | None:
        """Receive a bucket, and keep track of whether the pass continues."""
        bucket = self._channel.receive()
        self._in_pass = bucket is not None
        return bucket
