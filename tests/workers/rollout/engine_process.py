"""A worker's process with one rollout engine, controlled by a pipe and observed from outside."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import psutil
import torch
from transformers import AutoModelForCausalLM

from tests.workers.rollout.engines import request, spec_of
from tests.workers.rollout.vllm_workers import greedy_errors, place
from workers.roles.rollout_engines import make_rollout
from workers.roles.worker import Worker


def serve(pipe: Connection, path: str, settings: dict[str, Any]) -> None:
    """Answers to the calls of EngineProcess, until one is None."""
    torch.set_num_threads(1)
    worker = Worker(place(), "cpu", 600.0)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    engine = make_rollout(spec_of(path, **settings), worker.info)
    cache_bytes = engine.stats()["cache_bytes"]
    pipe.send(cache_bytes)
    while (call := pipe.recv()) is not None:
        name, *arguments = call
        match name:
            case "sleep":
                answer: Any = engine.sleep()
            case "wake":
                answer = engine.wake(weights=True, kv_cache=False)
            case "load":  # weights of another version are other weights
                (version,) = arguments
                with torch.no_grad():
                    model.lm_head.weight[2:].add_(0.02 * torch.randn_like(model.lm_head.weight[2:]))
                answer = engine.load_weights(model.named_parameters(), version)
                engine.wake(weights=False, kv_cache=True)
            case "fill":  # the cache with repetitions of one prompt
                count, length = arguments
                engine.generate([request(i, [2 + i % 7] * length, max_tokens=2, ignore_eos=True) for i in range(count)])
                answer = engine.stats()["cache_bytes"]
            case "greedy":
                answer = max(greedy_errors(model, engine, [(2, 3, 4), (5, 6, 7, 8, 9), (10,)]))
        pipe.send(answer)
    engine.close()
    worker.close()


class EngineProcess:
    """As a context manager it ends its process."""

    def __init__(self, path: Path, **settings: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, expected = context.Pipe()
        self._process = context.Process(target=serve, args=(expected, str(path), settings))
        self._process.start()
        expected.close()
        self.cache_bytes = self._pipe.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.send(None)
        self._process.join(60)
        self._process.kill()

    def call(self, *call: Any) -> Any:
        self._pipe.send(call)
        return self._pipe.recv()

    def rss(self) -> int:
        """Bytes of this process and of all that it started, as the system counts them."""
        process = psutil.Process(self._process.pid)
        return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
