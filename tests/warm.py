"""A Python that has already imported the programs' dependencies: programs are forked from it and begin at once.

``with warm_python(folder) as python:`` gives the path of a stand-in for ``python -m MODULE ARGUMENT...``. Otherwise ten programs
in sequence spend most of their time on imports.
"""

import fcntl
import json
import os
import runpy
import socket
import subprocess
import sys
import termios
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.layout.source import ROOT

CLIENT = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
    code = int(server.recv(16))
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)
"""


@contextmanager
def warm_python(folder: Path) -> Iterator[str]:
    address, client = str(folder / "server"), folder / "python"
    client.write_text(CLIENT.format(python=sys.executable, address=address))
    client.chmod(0o755)
    command = [sys.executable, "-m", "tests.warm", address]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            yield str(client)
        finally:
            server.kill()


def serve(address: str) -> None:
    import trainer.checkpoint.export
    import trainer.generation.generate
    import trainer.ppo.ppo_builder
    import trainer.supervised.supervised_builder  # noqa: F401

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while True:
            client, _ = listener.accept()
            with client:
                asked, streams, _, _ = socket.recv_fds(client, 1 << 20, 3)
                child = os.fork()
                if child == 0:
                    run(*json.loads(asked), streams)
                for stream in streams:
                    os.close(stream)
                _, status = os.waitpid(child, 0)
                client.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def run(words: list[str], directory: str, environment: dict[str, str], streams: list[int]) -> None:
    """Run in the child, which ends here."""
    code: object = 1
    try:
        for i, stream in enumerate(streams):
            os.dup2(stream, i)
        if os.isatty(0):  # make this process receive its keys
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = words[1:]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve(sys.argv[1])
