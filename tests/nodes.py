"""A Ray cluster on this machine whose nodes join and leave: each is a process of its own, `ray start --block`."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from workers.controller.ports import free_port
from workers.controller.ray.ray_places import SLOT

HEAD = ("--head", "--include-dashboard=false", "--disable-usage-stats")
START_SECONDS = 60.0


class Nodes:
    def __init__(self, folder: Path, slots: int, temp_dir: str, head: Sequence[str] = HEAD) -> None:
        """Start the head; each node has ``slots`` slots. folder: of logs; temp_dir: Ray's. head: arguments of its start."""
        self.folder = folder
        self.slots = slots
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        """Environment of every process that joins the cluster."""
        self.address = f"127.0.0.1:{free_port()}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self._start(*head, f"--port={self.address.partition(':')[2]}", f"--temp-dir={temp_dir}")

    def join(self) -> subprocess.Popen[bytes]:
        return self._start(f"--address={self.address}")

    def die(self, node: subprocess.Popen[bytes]) -> None:
        """Kill all of its processes, as when a machine is switched off."""
        for process in [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]:
            process.kill()
        node.wait()

    def end(self) -> None:
        for node in reversed(self.processes):
            if node.poll() is None:
                self.die(node)

    def _start(self, *how: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", *how, "--node-ip-address=127.0.0.1", "--num-cpus=1", "--block",
            f'--resources={{"{SLOT}": {self.slots}}}', f"--object-store-memory={80 * 2**20}",
        ]  # fmt: skip
        log = (self.folder / f"node_{len(self.processes)}.log").open("wb")
        self.processes.append(subprocess.Popen(command, env=os.environ | self.environment, stdout=log, stderr=subprocess.STDOUT))
        log.close()
        return self.processes[-1]

    def wait_for_head(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while b"Ray runtime started" not in (self.folder / "node_0.log").read_bytes():
            assert time.monotonic() < deadline and self.processes[0].poll() is None, (self.folder / "node_0.log").read_text()
            time.sleep(0.1)


@contextmanager
def cluster(folder: Path, slots: int, head: Sequence[str] = HEAD) -> Iterator[Nodes]:
    """The head; every joined node ends with the block. Ray's sockets need a short path: they are not in ``folder``."""
    with TemporaryDirectory(prefix="nodes_") as short:
        nodes = Nodes(folder, slots, short, head)
        try:
            nodes.wait_for_head()
            yield nodes
        finally:
            nodes.end()
