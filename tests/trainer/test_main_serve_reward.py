"""The program: invalid arguments, its output, and how it ends."""

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.serving import address, program
from tests.trainer.rewards.config import reward_config
from trainer import main_serve_reward
from trainer.rewards.remote.remote_rewards import RemoteRewards
from trainer.rewards.scoring import Response, Score

# Starts child processes, as a careless user function may.
FUNCTION = """
import subprocess, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "child":
        subprocess.Popen(["sleep", "600"])
    if solution_str == "wait":
        time.sleep(600)
    return 0.5
"""


@pytest.mark.parametrize(
    ("number", "code", "busy"), [(signal.SIGTERM, 143, True), pytest.param(signal.SIGINT, 130, False, marks=pytest.mark.soak)]
)
def test_signal_ends_the_server_and_its_child_processes(number: int, code: int, busy: bool, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    words = [f"reward.scorer={tmp_path}/mine.py:compute_score", "reward.num_workers=2", "server.log_every=2"]
    with program(*words, f"trainer.default_local_dir={tmp_path}/run") as server:
        url = address(server)
        remote = RemoteRewards([url], reward_config(remote={"batch_size": 2, "retries": 0, "timeout": 60.0}).remote)
        answers = [Response("", text, None, {}, True) for text in ("child", "a", "b", "c")]
        assert remote.score(answers) == [Score(0.5, {}, None)] * 4
        family = psutil.Process(server.pid).children(recursive=True)
        assert {process.name() for process in family} >= {"sleep"} and len(family) == 3
        waiting = socket.create_connection(("127.0.0.1", int(re.findall(r":(\d+)/", url)[0])), 10.0)
        if busy:  # during a request, which gets an error reply
            body = json.dumps({"query": ["wait"]}).encode()
            head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            waiting.sendall(b"POST /get_reward HTTP/1.1\r\n" + head.encode() + body)
            time.sleep(0.5)
        server.send_signal(number)
        if busy:
            reply = waiting.makefile("rb").read()  # until the connection closes
            assert reply.startswith(b"HTTP/1.1 503") and b"the server is stopping" in reply
        waiting.close()
        _, message = server.communicate(timeout=30.0)
        assert server.returncode == code
        _, alive = psutil.wait_procs(family, timeout=5.0)
        assert alive == []
    assert (
        re.match(r"reward server: 2 requests, 4 answers, 0 failed, [\d,.]+ answers/s\n", message) and "Traceback" not in message
    )


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["reward.scorer=nowhere.py:f", "server.port=0"], r".*nowhere\.py.*"),
        (["server.port={taken}"], r"server\.host=127\.0\.0\.1 server\.port=\d+: .*in use"),
        (
            ["server.host=0.0.0.0"],
            r"server\.host=0\.0\.0\.0: reachable from other machines without a token; .*SERVER_TOKEN",
        ),
        (["server.host=nowhere.invalid"], r"server\.host=nowhere\.invalid: reachable from other machines"),
        (["server.token_env=SHORT_TOKEN"], r"SHORT_TOKEN: a token of 5 characters is too easy to guess; use at least 8"),
        (["server.token_env=MINE"], r"server\.token_env=MINE: the variable's name must end like that of a secret"),
        (["reward.remote_urls=[http://127.0.0.1:1]"], r"reward\.remote_urls: there is no such key"),
    ],
)
def test_invalid_configuration_is_a_one_line_error(
    overrides: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("REWARD_SERVER_TOKEN", raising=False)
    monkeypatch.setenv("SHORT_TOKEN", "abcde")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # used also for other errors: a server that missed them would not start here
        typed = [f"server.port={port}", *(override.format(taken=port) for override in overrides)]
        words = ["reward.num_workers=0", f"trainer.default_local_dir={tmp_path}", *typed]
        assert main_serve_reward.PROGRAM(words) == 2
    output = capsys.readouterr().err.splitlines()
    assert len(output) == 1 and re.match(f"error: {line}", output[0]), output


def test_missing_extra_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("trainer.serving.listener.find_spec", lambda name: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main_serve_reward.PROGRAM(["reward.scorer=gsm8k", f"server.port={taken.getsockname()[1]}"]) == 2
    output = capsys.readouterr().err
    assert (
        output.startswith("error: fastapi and uvicorn: not installed here; run pip install 'tandem[serve]'")
        and output.count("\n") == 1
    )


def test_dry_run_starts_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_SERVER_TOKEN", "correct-horse")
    assert main_serve_reward.PROGRAM(["reward.scorer=math", "server.host=0.0.0.0", "trainer.dry_run=config"]) == 0
    assert capsys.readouterr().out.startswith("configuration is fine: ")
    assert os.environ["REWARD_SERVER_TOKEN"] not in main_serve_reward.PROGRAM.help()
