"""A Ray cluster on this host: each node is a process with some of the GPUs."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

import psutil

from workers.controller.ports import free_port
from workers.controller.ray.ray_places import SLOT

START_SECONDS = 60.0


class Cluster:
    """Ray cluster. nodes: 1, with both GPUs; 2, each with one. environment: further variables of the drivers."""

    def __init__(self, folder: Path, environment: Mapping[str, str], nodes: int, cpu: bool) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._inherited, self._nodes, self._cpu, self._folder = environment, nodes, cpu, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._short = TemporaryDirectory(prefix="gpu_")  # Ray's sockets want a short path

    def __enter__(self) -> Cluster:
        try:
            for node in range(self._nodes):
                self._start(node)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for process in reversed(self._processes):
            family = [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
            for member in (*family, process):
                try:
                    member.kill()
                except psutil.NoSuchProcess:
                    continue
            process.wait()
        self._short.cleanup()

    def _start(self, node: int) -> None:
        size = 2 // self._nodes
        port = self.address.partition(":")[2]
        how = ["--head", f"--port={port}", "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={self._short.name}"]
        slots = [f'--resources={{"{SLOT}": {size}}}'] if self._cpu else [f"--num-gpus={size}"]
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", *(how if node == 0 else [f"--address={self.address}"]),
            "--node-ip-address=127.0.0.1", "--num-cpus=4", "--block", *slots, f"--object-store-memory={2**28}",
        ]  # fmt: skip
        visible = {} if self._cpu else {"CUDA_VISIBLE_DEVICES": ",".join(str(node * size + i) for i in range(size))}
        log = self._folder / f"node_{node}.log"
        with log.open("wb") as output:
            environment = {**self._inherited, **self.environment, **visible}
            self._processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + START_SECONDS
        while b"Ray runtime started" not in log.read_bytes():
            if self._processes[-1].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"a Ray node did not start: {log}")
            time.sleep(0.1)
