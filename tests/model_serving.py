"""Model servers: HTTP over an engine that repeats what it is asked to say, over a real engine, or as the program itself."""

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, cast
from urllib.parse import urlsplit

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from configs.compose import compose
from configs.schema.serve import ServeConfig
from data_preprocess.tiny_model import character_tokenizer
from tests.layout.source import ROOT
from tests.tiny import tiny_config
from trainer.agents.formats import call_format
from trainer.data.seam import Seams
from trainer.rollout.remote_rollout import RemoteRollout
from trainer.serving.listener import Listener, bound
from trainer.serving.model_app import ServedModel, model_app
from trainer.serving.model_engine import ModelEngine
from trainer.serving.model_server import start
from workers.batch import Batch
from workers.rollout.base import Sampling

TOKEN = "correct-horse"
JSON = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}


def serve_config(*overrides: str) -> ServeConfig:
    fixed = ("port=0", "trainer.device=cpu", "actor_rollout_ref.rollout.dtype=float32")
    return compose("serve", ServeConfig, [*fixed, *overrides])


class EchoRollout:
    """A RemoteRollout and its flow, whose model says what follows «say:» in its prompt, ``steps`` tokens a tick.

    Token i of a response has the log-prob -i / 8. tick: seconds of one. hold: the engine waits for it. aborted: requests that
    ``forget`` named before they had ended.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._seams = Seams(tokenizer, {})
        self._eos = cast(int, tokenizer.eos_token_id)
        self._running: dict[int, tuple[list[int], int]] = {}
        self._admitted: list[int] = []
        self.n_replicas = 1
        self.tick = 0.002
        self.hold = Event()
        self.hold.set()
        self.aborted: set[int] = set()
        self.most_running = 0
        self.new: list[Batch] = []

    def flow(self, sampling: Sampling, requests: Callable[[Sequence[int]], Batch], **_: Any) -> "EchoRollout":
        self._requests = requests
        return self

    def admit(self, ids: Sequence[int], prompt_tokens: int) -> None:
        self._admitted += ids

    def forget(self, ids: Sequence[int]) -> None:
        gone = {*ids} & self._running.keys()
        self.aborted |= gone
        self._admitted = [id for id in self._admitted if id not in ids]
        for id in gone:
            del self._running[id]

    def start(self, steps: int, *, streams: bool) -> bool:
        if self._admitted:
            new = self._requests(self._admitted)
            columns = (map(Tensor.tolist, new.split_rows("input_ids")), new.rows["max_tokens"].tolist())
            for id, ids, most in zip(self._admitted, *columns, strict=True):
                said = self._seams.text(ids).rpartition("say:")[2].partition("<eos>")[0]
                self._running[id] = ([*self._seams.ids(said), self._eos][:most], 0)
            self._admitted = []
        self.most_running = max(self.most_running, len(self._running))
        self._steps = steps
        return bool(self._running)

    def wait(self) -> list[Batch]:
        self.hold.wait()
        time.sleep(self.tick)
        ended, news = [], []
        for id, (ids, at) in [*self._running.items()]:
            until = at + self._steps
            if until >= len(ids):
                ended.append((id, ids, 0))
                del self._running[id]
            else:
                news.append((id, ids[at:until], at))
                self._running[id] = ids, until
        self.new = [self._batch(news)]
        return [self._batch(ended)] if ended else []

    def _batch(self, rows: list[tuple[int, list[int], int]]) -> Batch:
        log_probs = [-(first + i) / 8 for _, ids, first in rows for i in range(len(ids))]
        return Batch(
            torch.tensor([len(ids) for _, ids, _ in rows], dtype=torch.int64),
            tokens={
                "input_ids": torch.tensor([token for _, ids, _ in rows for token in ids], dtype=torch.int64),
                "rollout_log_probs": torch.tensor(log_probs, dtype=torch.float32),
            },
            rows={
                "id": torch.tensor([id for id, _, _ in rows], dtype=torch.int64),
                "finished": torch.tensor([int(ids[-1:] == [self._eos]) for _, ids, _ in rows], dtype=torch.int64),
            },
        )


class EchoServer:
    """Address of a server over an EchoRollout."""

    def __init__(self, url: str, rollout: EchoRollout, engine: ModelEngine, stop: Callable[[], None]) -> None:
        self.url, self.rollout, self.engine, self.stop = url, rollout, engine, stop


@contextmanager
def echo_server(*overrides: str, format_name: str = "hermes", most: int = 64, has_seeds: bool = True) -> Iterator[EchoServer]:
    """most: responses that run and wait together."""
    tokenizer = character_tokenizer(None, with_tools=True)
    rollout = EchoRollout(tokenizer)
    sampling = Sampling(1.0, -1, 1.0, 1023, (cast(int, tokenizer.eos_token_id),))
    model = ServedModel(
        "echo", Seams(tokenizer, {}), format_name, call_format(format_name), sampling, 1024, len(tokenizer), has_seeds
    )
    with _served(serve_config(*overrides), ModelEngine(cast(RemoteRollout, rollout), sampling, most=most), model) as found:
        try:
            yield EchoServer(found[0], rollout, found[1], found[2])
        finally:
            rollout.hold.set()


@contextmanager
def model_server(*overrides: str) -> Iterator[tuple[str, ModelEngine]]:
    """Address and engine of a server over a real engine in this process."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        config = serve_config(f"trainer.default_local_dir={folder}", *overrides)
        engine, model = start(config, stack)
        url, *_ = stack.enter_context(_served(config, engine, model))
        yield url, engine


@contextmanager
def _served(
    config: ServeConfig, engine: ModelEngine, model: ServedModel
) -> Iterator[tuple[str, ModelEngine, Callable[[], None]]]:
    stopped = Event()
    working = Thread(target=engine.work, args=(lambda: not stopped.is_set(),), daemon=True)

    def stop() -> None:
        stopped.set()
        working.join()

    most_bytes = int(config.server.max_request_mb * (1 << 20))
    app = model_app(engine, model, token=TOKEN, most_bytes=most_bytes, health=lambda: engine.counts)
    with bound(config.server) as place, Listener(place, app, config.server) as listener:
        working.start()
        try:
            yield listener.url, engine, stop
        finally:
            stop()


def tiny_chat_model(path: Path) -> str:
    """A model directory with a tokenizer for any text and a chat template; its responses are random bytes."""
    from transformers import AutoModelForCausalLM

    tokenizer = character_tokenizer(None, with_tools=True)
    torch.manual_seed(0)
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    AutoModelForCausalLM.from_config(tiny_config(**ids), dtype=torch.float32).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def post(url: str, path: str, body: Any, headers: dict[str, str] = JSON, *, method: str = "POST") -> tuple[int, Any]:
    """Status and reply: JSON, or the text of a stream. body: sent as it is if it is bytes, else as JSON."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body), headers)
        reply = connection.getresponse()
        text = reply.read()
        is_json = (reply.getheader("content-type") or "").startswith("application/json")
        return reply.status, json.loads(text) if is_json else text.decode()
    finally:
        connection.close()


@contextmanager
def serve_program(*overrides: str, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """python -m trainer.main_serve; ``address`` waits until it is ready."""
    fixed = ("rollout=embedded", "port=0", "trainer.device=cpu", "actor_rollout_ref.rollout.dtype=float32")
    command = [sys.executable, "-m", "trainer.main_serve", *fixed, *overrides]
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell makes its background processes ignore it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, preexec_fn=heeds, env=env, **pipes) as started:
        try:
            yield started
        finally:
            started.kill()


def address(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    line = started.stdout.readline()
    match = re.fullmatch(r"serving \S+ at (http://127\.0\.0\.1:\d+) \(process (\d+)\)\n", line)
    assert match and int(match[2]) == started.pid, line
    return match[1]
