import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from workers.controller import ports
from workers.controller.ports import hold_port, ports_outside

BIND = "import socket, sys; socket.socket().bind(('127.0.0.1', int(sys.argv[1])))"


def port_of(held: socket.socket) -> int:
    return int(held.getsockname()[1])


def test_held_port_is_usable_only_by_its_listener() -> None:
    with hold_port() as held:
        port = port_of(held)
        assert subprocess.run([sys.executable, "-c", BIND, str(port)], capture_output=True).returncode == 1, "another program"
        socket.create_server(("127.0.0.1", port)).close()
        for libuv in (True, False):
            dist.TCPStore("127.0.0.1", port, 1, is_master=True, timeout=timedelta(seconds=20), use_libuv=libuv)
    assert subprocess.run([sys.executable, "-c", BIND, str(port)], capture_output=True).returncode == 0


def test_port_chosen_twice_is_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process chooses again."""
    with hold_port() as one, hold_port() as other:
        free = {port_of(one), port_of(other)}
    monkeypatch.setattr(ports, "RANK_PORTS", sorted(free))
    for _ in range(20):  # in every second case both would choose the same port
        with hold_port() as one, hold_port() as other:
            assert {port_of(one), port_of(other)} == free


def test_ports_exclude_kubernetes_and_ephemeral_ranges(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert max(ports_outside(32768, 60999)) < 30000
    assert list(ports_outside(20005, 60999)) == list(range(20000, 20005))
    assert list(ports_outside(1024, 65535)) == list(range(20000, 30000)), "they are held: no connection gets them"
    with hold_port() as held:
        free = port_of(held)
    monkeypatch.setattr(ports, "PORTS_OF_CONNECTIONS", tmp_path / "range")
    monkeypatch.setattr(ports, "RANK_PORTS", [free, free + 1])
    (tmp_path / "range").write_text(f"{free + 1}\t60999\n")
    with hold_port() as held:
        assert port_of(held) == free
