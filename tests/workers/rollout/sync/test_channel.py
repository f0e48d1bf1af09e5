"""Trainer and engines' ranks as threads of one process, each with its own end of the channel."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.workers.engine.toy import one_rank
from tests.workers.rollout.engines import ModelSource, make_model, one_off, request, spec_of, spoil_loading, weight_sync
from trainer.cluster.hang_report import ended_in_collective
from workers.metric import plain_numbers
from workers.rollout.embedded.embedded_engine import EmbeddedRollout
from workers.rollout.sync import channel as module
from workers.rollout.sync.channel import Channel, ChannelLost, Receiver, Rendezvous, Sender
from workers.rollout.verification import TURNS, WeightMismatch

DRAW = torch.Generator().manual_seed(0)
WEIGHTS: dict[str, Tensor] = {
    "embed": torch.randn(61, 8, generator=DRAW),
    "half": torch.randn(7, 3, generator=DRAW).bfloat16(),
    "scalar": torch.randn((), generator=DRAW),
    "none": torch.randn(0, 4, generator=DRAW),
    "steps": torch.arange(5),
    "mask": torch.tensor([True, False, True]),
    "turned": torch.randn(9, 5, generator=DRAW).t(),
    "double": torch.randn(3, generator=DRAW, dtype=torch.float64),
}


class Trainer:
    """export_weights, counted. fails: after this number of tensors."""

    def __init__(self) -> None:
        self.asked: list[tuple[torch.dtype | None, str]] = []
        self.fails: int | None = None

    def export_weights(self, *, dtype: torch.dtype | None, kind: str) -> Iterator[tuple[str, Tensor]]:
        self.asked.append((dtype, kind))
        for i, (name, tensor) in enumerate(WEIGHTS.items()):
            if i == self.fails:
                raise FloatingPointError("out of luck")
            yield name, tensor


class Ends:
    """A sender, and receivers in channels of these sizes."""

    def __init__(self, source: Any, *counts: int, bucket_bytes: int = 2**20, seconds: float = 20.0) -> None:
        self._limit, self._bucket_bytes = timedelta(seconds=seconds), bucket_bytes
        self.sender = Sender(source)
        self.receivers = [receiver for replica, count in enumerate(counts) for receiver in self.connect(replica, count)]

    def connect(self, replica: int, count: int) -> list[Receiver]:
        """A channel of the sender for this replica, and its receivers."""
        channel, port = Channel.offered("127.0.0.1", count, "cpu", self._limit)
        self.sender.connect(replica, channel)
        meeting = Rendezvous("127.0.0.1", port, count, None)
        ends = [Channel.joined(meeting, rank, "cpu", self._limit) for rank in range(count)]
        return [Receiver(end, meeting.adapter, self._bucket_bytes) for end in ends]

    def sync(self, *uses: Callable[[Receiver], Any], replicas: Sequence[int] | None = None) -> list[Future[Any]]:
        """Results of the sender, and of each receiver with its use, after all have ended."""

        def receive(receiver: Receiver, use: Callable[[Receiver], Any]) -> Any:
            with receiver.sync():
                return use(receiver)

        with ThreadPoolExecutor(1 + len(uses)) as pool:
            ended = [pool.submit(self.sender.serve, replicas)]
            ended += [pool.submit(receive, *pair) for pair in zip(self.receivers, uses, strict=True)]
            wait(ended)
        return ended


@pytest.fixture(autouse=True)
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The trainer's own, of one rank."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with one_rank(tmp_path):
        yield


def everything(receiver: Receiver) -> dict[str, Tensor]:
    return dict(receiver.export_weights())


def check(came: dict[str, Tensor]) -> None:
    assert list(came) == list(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert came[name].dtype == tensor.dtype and came[name].shape == tensor.shape and torch.equal(came[name], tensor), name


def check_usable(ends: Ends) -> None:
    """After any failure, the next sync works as the first did."""
    for ended in ends.sync(*[everything] * len(ends.receivers))[1:]:
        check(ended.result())


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 300, 2**20])
def test_every_rank_gets_all_weights_as_they_are(count: int, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    send = module.send

    def sent(weights: Sequence[tuple[str, Tensor]], dtype: torch.dtype | None, channels: Sequence[Channel]) -> None:
        sizes.append(sum(tensor.nbytes for _, tensor in weights) if len(weights) != 1 else 0)
        send(weights, dtype, channels)

    monkeypatch.setattr(module, "send", sent)
    ends = Ends(Trainer(), count, bucket_bytes=bucket_bytes)
    for _ in range(2):
        check_usable(ends)
    assert max(sizes) <= bucket_bytes and (len(sizes) > 8 or bucket_bytes > 1)


def test_what_came_stays_when_the_next_bucket_comes() -> None:
    """An engine may keep tensors until a layer is whole."""
    ends = Ends(Trainer(), 1, bucket_bytes=64)
    (_, ended) = ends.sync(lambda receiver: list(receiver.export_weights()))
    check(dict(ended.result()))


def test_as_many_passes_as_are_wanted_each_as_it_is_wanted() -> None:
    trainer = Trainer()
    ends = Ends(trainer, 2)

    def three(receiver: Receiver) -> list[dict[str, Tensor]]:
        wanted: list[Any] = [{}, {"dtype": torch.bfloat16, "kind": "full"}, {"kind": "adapter"}]
        return [dict(receiver.export_weights(**words)) for words in wanted]

    for ended in ends.sync(three, three)[1:]:
        as_is, narrowed, adapter = ended.result()
        check(as_is)
        check(adapter)
        for name, tensor in WEIGHTS.items():
            wanted = tensor.bfloat16() if tensor.is_floating_point() else tensor
            assert narrowed[name].dtype == wanted.dtype and torch.equal(narrowed[name], wanted)
    assert trainer.asked == [(None, "merged"), (torch.bfloat16, "full"), (None, "adapter")]
    ends.sync(lambda receiver: None, lambda receiver: None)[0].result()
    assert len(trainer.asked) == 3


def test_replicas_with_the_same_requests_share_a_pass() -> None:
    trainer = Trainer()
    ends = Ends(trainer, 2, 1)

    def two(receiver: Receiver) -> dict[str, Tensor]:
        return everything(receiver) | dict(receiver.export_weights(kind="adapter"))

    for ended in ends.sync(two, two, everything)[1:]:
        check(ended.result())
    assert trainer.asked == [(None, "merged"), (None, "adapter")]


def test_replicas_with_different_requests_have_passes_of_their_own() -> None:
    trainer = Trainer()
    ends = Ends(trainer, 1, 1)
    _, base, adapter = ends.sync(
        lambda receiver: [dict(receiver.export_weights(kind=kind)) for kind in ("full", "adapter")],
        lambda receiver: dict(receiver.export_weights(kind="adapter")),
    )
    for came in (*base.result(), adapter.result()):
        check(came)
    assert trainer.asked == [(None, "full"), (None, "adapter"), (None, "adapter")]


def test_a_replica_is_served_alone_and_another_takes_its_place() -> None:
    """The channel that a replica had does not delay the sender, though its other end is gone."""
    ends = Ends(Trainer(), 1, 2, seconds=5.0)
    check_usable(ends)
    others = ends.receivers[1:]
    ends.receivers = ends.connect(0, 1)
    for ended in ends.sync(everything, replicas=[0])[1:]:
        check(ended.result())
    ends.receivers += others
    check_usable(ends)


def test_a_replica_that_fails_does_not_end_the_sync_of_others() -> None:
    ends = Ends(Trainer(), 1, 1, bucket_bytes=64)

    def twice(receiver: Receiver) -> dict[str, Tensor]:
        return everything(receiver) | everything(receiver)

    sender, bad, good = ends.sync(half_way, twice)
    assert sender.result() is None
    check(good.result())
    with pytest.raises(OSError, match="no room"):
        bad.result()
    check_usable(ends)


def half_way(receiver: Receiver) -> None:
    for _ in zip(range(2), receiver.export_weights(), strict=False):
        pass
    raise OSError("no room")


def test_a_rank_that_fails_half_way_blocks_no_rank() -> None:
    ends = Ends(Trainer(), 3, bucket_bytes=64)
    sender, good, bad, other = ends.sync(everything, half_way, everything)
    assert sender.result() is None
    check(good.result())
    check(other.result())
    with pytest.raises(OSError, match="no room"):
        bad.result()
    check_usable(ends)


@pytest.mark.parametrize("spokesman_fails", [False, True])
def test_a_request_for_another_pass_after_a_failure_is_refused(spokesman_fails: bool) -> None:
    ends = Ends(Trainer(), 2, bucket_bytes=64)
    uses = [half_way, lambda receiver: [everything(receiver) for _ in range(2)]]
    sender, *ended = ends.sync(*(uses if spokesman_fails else uses[::-1]))
    assert sender.result() is None
    failed, patient = ended if spokesman_fails else ended[::-1]
    with pytest.raises(OSError, match="no room"):
        failed.result()
    with pytest.raises(ChannelLost, match="another rank of the rollout engines has ended this sync"):
        patient.result()
    check_usable(ends)


def test_a_trainer_that_fails_half_way_says_so() -> None:
    trainer = Trainer()
    ends = Ends(trainer, 2, bucket_bytes=64)
    trainer.fails = 3
    sender, *receivers = ends.sync(everything, everything)
    with pytest.raises(FloatingPointError, match="out of luck"):
        sender.result()
    for ended in receivers:
        with pytest.raises(ChannelLost, match="the trainer gives no more weights: FloatingPointError: out of luck"):
            ended.result()
    trainer.fails = None
    assert [ended.result() for ended in ends.sync(*[lambda receiver: None] * 2)] == [None] * 3, "that pass is forgotten"
    check_usable(ends)


class Here(threading.local):
    """Of this thread. rank: in the channel."""

    rank = 0


def test_a_number_that_changes_on_the_way_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(Trainer(), 2, bucket_bytes=600)
    receive, place = Channel.receive, module.place
    here = Here()

    def spoiling(flat: Tensor, *where: Any) -> Tensor:
        view = place(flat, *where)
        if here.rank == 2 and view.shape == WEIGHTS["turned"].shape:
            view[2, 3] += 1e-6
        return view

    def received(channel: Channel) -> Any:
        here.rank = channel.rank
        return receive(channel)

    monkeypatch.setattr(module, "place", spoiling)
    monkeypatch.setattr(Channel, "receive", received)
    sender, good, bad = ends.sync(everything, everything)
    sender.result()
    check(good.result())
    with pytest.raises(WeightMismatch, match="the bucket with half to double did not come as the trainer sent it"):
        bad.result()


def test_a_rank_that_never_comes_is_waited_for_as_long_as_for_others() -> None:
    ends = Ends(Trainer(), 2, seconds=1.0)
    check_usable(ends)
    away = ends.receivers.pop()
    messages = []
    for ended in ends.sync(everything):
        with pytest.raises(ChannelLost) as raised:
            ended.result()
        messages.append(str(raised.value))
    # Whichever of the two gives up first closes the connection on which the other still waits.
    assert any(map(ended_in_collective, messages)), messages
    assert away not in ends.receivers, "it is there, and does not come"


def test_the_trainer_listens_on_its_address_alone() -> None:
    process = psutil.Process()
    before = set(process.net_connections("tcp"))
    channel, port = Channel.offered("127.0.0.1", 1, "cpu", timedelta(seconds=9))
    listening = {c.laddr for c in set(process.net_connections("tcp")) - before if c.status == psutil.CONN_LISTEN}
    assert {(address.ip, address.port) for address in listening} == {("127.0.0.1", port)}
    del channel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return make_model(tmp_path_factory.mktemp("model"))


def engine_of(model: PreTrainedModel) -> EmbeddedRollout:
    return EmbeddedRollout(spec_of(model.config._name_or_path))


@pytest.mark.parametrize("mode", ["off", "sample", "full"])
def test_verification_equals_that_of_a_colocated_engine(model: PreTrainedModel, mode: Any) -> None:
    source, engine, colocated_engine = ModelSource(model), engine_of(model), engine_of(model)
    ends, spec = Ends(source, 1, bucket_bytes=4096), spec_of("somewhere")
    apart = weight_sync(engine, cast(Any, ends.receivers[0]), spec, mode)
    colocated = weight_sync(colocated_engine, ModelSource(model), spec, mode)
    for version in range(3):
        shared, metrics = ends.sync(lambda receiver, version=version: apart(version))[1].result()
        assert shared is False
        _, wanted = colocated(version)
        assert metrics.keys() == wanted.keys()
        assert plain_numbers(metrics).get("rollout/verified_bytes") == plain_numbers(wanted).get("rollout/verified_bytes")
    assert source.given == (6 if mode == "full" else 3) * len(list(model.parameters()))
    asked = [request(i, (2 + i, 3)) for i in range(4)]
    assert engine.generate(asked) == colocated_engine.generate(asked)


@pytest.mark.parametrize("mode", ["full", "sample"])
def test_a_single_wrong_number_is_found_as_in_a_colocated_engine(model: PreTrainedModel, mode: Any) -> None:
    engine = engine_of(model)
    spoil_loading(engine, one_off("model.layers.1.mlp.up_proj.weight", 7))
    ends = Ends(ModelSource(model), 1)
    sync = weight_sync(engine, cast(Any, ends.receivers[0]), spec_of("somewhere"), mode)
    for version in range(TURNS):
        sender, ended = ends.sync(lambda receiver, version=version: sync(version))
        sender.result()
        if ended.exception() is not None:
            break
    with pytest.raises(WeightMismatch, match=r"model.layers.1.mlp.up_proj.weight in embedded on rank 0 is not the trainer's"):
        ended.result()
