import gc
import hashlib
import os
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.tiny import save_tiny_model
from tests.trainer.data.tokenizers import byte_tokenizer
from tests.workers.rollout.engines import spec_of
from workers.controller.group import WorkerInfo
from workers.controller.ports import free_port
from workers.roles.rollout_role import RolloutRole
from workers.roles.worker import Worker, interface_to
from workers.rollout.sync.channel import Channel, Receiver, Rendezvous


def info() -> WorkerInfo:
    return WorkerInfo(rank=0, world_size=1, local_rank=0, node_rank=0, master_addr="127.0.0.1", master_port=free_port())


def test_a_host_listens_on_its_own_address_alone_and_leaves_its_group_when_it_closes() -> None:
    process = psutil.Process()
    before = set(process.net_connections("tcp"))
    for _ in range(2):  # the second finds no group of the first
        place = info()
        worker = Worker(place, "cpu", 600.0)
        assert dist.get_world_size() == 1 and dist.get_backend() == "gloo"
        listening = {c.laddr for c in set(process.net_connections("tcp")) - before if c.status == psutil.CONN_LISTEN}
        assert place.master_port in {address.port for address in listening}
        assert {address.ip for address in listening} == {"127.0.0.1"}
        worker.close()
        assert not dist.is_initialized()


@pytest.mark.parametrize(("chosen", "used"), [(None, "lo"), ("eth7", "eth7")])
def test_gloo_listens_on_the_interface_that_reaches_rank_0(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, used: str
) -> None:
    """By default it takes the address of the host's name, which other machines may not reach. What the user set stays."""
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # it is restored after the test
    monkeypatch.delenv("GLOO_SOCKET_IFNAME") if chosen is None else monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    Worker(replace(info(), master_addr="127.0.1.1"), "cpu", 600.0)
    assert os.environ["GLOO_SOCKET_IFNAME"] == used


def test_the_interface_is_the_one_that_the_kernel_would_send_from() -> None:
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                assert interface_to(one.address) == name


def test_an_address_that_no_interface_has_chooses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    assert interface_to("127.0.0.1") is None


def test_a_part_of_a_gpu_is_reserved_for_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the calls of torch."""
    reported: list[tuple[str, float]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: reported.append(("device", device)))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part: reported.append(("fraction", part)))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    for fraction in (0.25, 1.0):
        Worker(replace(info(), local_rank=3), "cuda", 600.0, memory_fraction=fraction)
    assert reported == [("device", 3), ("fraction", 0.25), ("device", 3)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_file_is_hashed_by_one_rank(tmp_path: Path, world_size: int) -> None:
    names = [f"shard-{i}" for i in range(5)]
    for name in names:
        (tmp_path / name).write_text(name)
    found: dict[str, str] = {}
    for rank in range(world_size):
        worker = SimpleNamespace(info=replace(info(), rank=rank, world_size=world_size))
        part = Worker.hash_files(cast(Any, worker), tmp_path, names)
        assert len(part) <= -(-len(names) // world_size) and not found.keys() & part.keys()
        found |= part
        assert part.keys() == set(names[len(found) - len(part) : len(found)]), "neighbours, as a rank wrote them"
    assert found == {name: hashlib.sha256(name.encode()).hexdigest() for name in names}


def test_a_hosts_memory_is_that_of_its_process_and_of_those_it_started() -> None:
    worker = Worker(info(), "cpu", 600.0)
    with subprocess.Popen(
        [sys.executable, "-c", "x = bytearray(300 * 2**20)\nprint(flush=True)\ninput()"], stdin=-1, stdout=-1
    ) as child:
        assert child.stdout is not None and child.stdout.readline()
        with_child = worker.memory()
        child.kill()
    alone = worker.memory()
    worker.close()
    own = psutil.Process().memory_info().rss
    assert abs(alone - own) < 64 * 2**20 and with_child - alone > 300 * 2**20


def test_an_engine_that_is_apart_does_not_sleep_and_gets_half_a_bucket_at_a_time(tmp_path: Path) -> None:
    worker, spec = Worker(info(), "cpu", 600.0), spec_of(save_tiny_model(tmp_path), update_weights_bucket_megabytes=6)
    spec = replace(spec, tokenizer=byte_tokenizer())
    _, port = Channel.offered("127.0.0.1", 1, "cpu", timedelta(seconds=9))
    try:
        assert spec.rollout.free_cache_engine
        assert worker.build_rollout_apart("rollout", spec, Rendezvous("127.0.0.1", port, 1, None)) == (0, True)
        role = worker.roles["rollout"]
        assert isinstance(role, RolloutRole) and isinstance(role.sync.source, Receiver)
        assert role.rollout._weights_awake and not role.sync.config.free_cache_engine
        assert role.sync.source._bucket_bytes == 3 * 2**20 and role.tokenizer is spec.tokenizer
        worker.memory_scheduler.enter("generate")
    finally:
        worker.close()


def test_an_engine_closes_when_its_reference_cycles_can_be_collected() -> None:
    """Engines collect them to free their memory; objects are exempt from that after the first update."""
    worker, counts = Worker(info(), "cpu", 600.0), []
    gc.unfreeze()
    engine = SimpleNamespace(close=lambda: counts.append(gc.get_freeze_count()), tensor_parallel_size=1)
    worker.roles["rollout"] = RolloutRole(cast(Any, engine), None, worker.memory_scheduler, cast(Any, None))
    gc.freeze()
    worker.memory_scheduler.frozen = True
    worker.close()
    assert counts == [0]
    gc.freeze()  # what the tests froze, see conftest.py


def test_collectives_wait_for_the_configured_time() -> None:
    worker = Worker(info(), "cpu", 77.0)
    try:
        world = dist.group.WORLD
        assert world is not None and world._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    finally:
        worker.close()
