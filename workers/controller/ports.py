"""TCP ports at which ranks meet: outside the range of the kernel, held until they are used."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from pathlib import Path

PORTS_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")  # ports of outgoing connections, chosen by the kernel
RANK_PORTS = range(20000, 30000)


def hold_port() -> socket.socket:
    """Reserve a free port: returns a bound socket that holds it until it is closed.

    No other process can bind the port or get it for a connection meanwhile. A listener that sets SO_REUSEADDR, as
    socket.create_server and torch's stores do, can still be opened on it.
    """
    low, high = map(int, PORTS_OF_CONNECTIONS.read_text().split())
    ports = ports_outside(low, high)
    while True:
        held = socket.socket()
        try:
            held.bind(("", random.SystemRandom().choice(ports)))
        except OSError:  # the port is in use
            held.close()
            continue
        # Only after bind: set before it, two holders could share a port.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return held


def ports_outside(low: int, high: int) -> Sequence[int]:
    """Candidate ports for ranks, without low ... high, the range in which the kernel opens connections.

    All are above the ports of Ray's workers and below Kubernetes' NodePorts (30000). If none would be left, the range is not
    excluded.
    """
    return [port for port in RANK_PORTS if not low <= port <= high] or RANK_PORTS


def free_port() -> int:
    """A port that was free a moment ago; for tests and benchmarks. Programs keep the socket of ``hold_port`` instead."""
    with hold_port() as held:
        return int(held.getsockname()[1])
