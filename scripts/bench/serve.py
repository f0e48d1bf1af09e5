"""Tokens per second and CPU time of a model server with concurrent clients, relative to RemoteRollout.generate, as JSON.

    python scripts/bench/serve.py --shape 0.5b                               # a GPU
    python scripts/bench/serve.py --shape 3m --device cpu --dtype float32    # embedded, on a CPU
    python scripts/bench/serve.py --quick                                    # a smoke version

The model has random weights. All responses have --tokens tokens: no token ends them. One engine does all in turn, --rounds
times: ``generate`` gets all --requests at once, the server from --concurrency clients in a process of their own, which send the
next request when they have a reply, and the same again from clients that read it as it is generated. Of each way: tokens_per_s;
cpu_s, seconds of this process and of the engine's processes; and generate's seconds relative to them, the median of the rounds:
wall_ratio and cpu_ratio (1: the server costs nothing, below: it costs so much more). load: of the machine, before and after.
"""

import argparse
import http.client
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
from transformers import AutoModelForCausalLM

from configs.compose import compose
from configs.schema.serve import ServeConfig
from data_preprocess.tiny_model import character_tokenizer
from scripts.bench.shapes import SHAPES, qwen2
from trainer.serving.listener import Listener, bound
from trainer.serving.model_app import model_app
from trainer.serving.model_server import start
from workers.batch import Batch

TOKEN = "token-of-the-bench"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--engine", choices=("embedded", "vllm", "sglang"), default="embedded")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=64, help="of a round")
    parser.add_argument("--tokens", type=int, default=256, help="of a response")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt, about")
    parser.add_argument("--rounds", type=int, default=3, help="after one for warm-up")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.shape, args.device, args.dtype, args.tokens, args.requests, args.rounds = "tiny", "cpu", "float32", 8, 8, 1
    print(json.dumps(measure(args), indent=1))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = save_model(Path(folder), args.shape)
        words = [f"model={model}", f"rollout={args.engine}", "port=0", f"trainer.device={args.device}"]
        words += [f"actor_rollout_ref.rollout.{key}" for key in (f"dtype={args.dtype}", "ignore_eos=true", "max_model_len=2048")]
        config = compose("serve", ServeConfig, [*words, f"trainer.default_local_dir={folder}/served"])
        engine, served = start(config, stack)
        place = stack.enter_context(bound(config.server))
        app = model_app(engine, served, token=TOKEN, most_bytes=1 << 24, health=dict)
        url = stack.enter_context(Listener(place, app, config.server)).url
        stopped = Event()
        working = Thread(target=engine.work, args=(lambda: not stopped.is_set(),), daemon=True)
        working.start()
        context = get_context("spawn")
        pipe, other = context.Pipe()
        client = context.Process(target=clients, args=(url, served.name, args, other), daemon=True)
        client.start()
        other.close()  # if it fails, reading ends
        load, rounds = os.getloadavg()[0], []
        # The server is idle while ``generate`` runs, and the other way round.
        for number in range(args.rounds + 1):
            served_by = partial(serve, pipe, args, number)
            ways = {"generate": partial(generate, engine, served, args, number)}
            ways |= {"served": partial(served_by, stream=False), "streamed": partial(served_by, stream=True)}
            rounds.append({name: with_cpu_seconds(way, client.pid) for name, way in ways.items()})
        pipe.send(None)
        client.join()
        stopped.set()
        working.join()
    return {"settings": vars(args), "load": [round(load, 2), round(os.getloadavg()[0], 2)]} | {
        name: summary([one[name] for one in rounds[1:]], [one["generate"] for one in rounds[1:]], args.requests * args.tokens)
        for name in rounds[0]
    }


def with_cpu_seconds(way: Callable[[], float], client: int | None) -> tuple[float, float]:
    """Seconds that ``way`` returns, and CPU seconds of this process and its children but ``client`` meanwhile."""

    def spent() -> float:
        children = psutil.Process().children(recursive=True)
        engines = [process.cpu_times() for process in children if process.pid != client]
        return time.process_time() + sum(times.user + times.system for times in engines)

    before = spent()
    return way(), spent() - before


def summary(way: Sequence[tuple[float, float]], generate: Sequence[tuple[float, float]], tokens: int) -> dict[str, Any]:
    """Of a way of generating, relative to ``generate``. way, generate: wall and CPU seconds of each round."""
    wall, cpu = ([one[k] / other[k] for one, other in zip(generate, way, strict=True)] for k in (0, 1))
    return {
        "tokens_per_s": round(tokens / statistics.median(one for one, _ in way), 1),
        "cpu_s": round(statistics.median(one for _, one in way), 3),
        "wall_ratio": round(statistics.median(wall), 3),
        "cpu_ratio": round(statistics.median(cpu), 3),
        "wall_ratios": [round(ratio, 3) for ratio in wall],
    }


def save_model(folder: Path, shape: str) -> Path:
    """A model with random weights, and a tokenizer of bytes."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(qwen2(shape), dtype=torch.float32).save_pretrained(folder / "model")
    character_tokenizer(None, with_tools=True).save_pretrained(folder / "model")
    return folder / "model"


def texts(args: argparse.Namespace, round: int) -> list[str]:
    return [f"{round} {number} " + "x" * args.prompt for number in range(args.requests)]


def generate(engine: Any, served: Any, args: argparse.Namespace, round: int) -> float:
    """Seconds of RemoteRollout.generate."""
    rows = [
        served.seams.ids(served.seams.render([{"role": "user", "content": text}], prompt=True)) for text in texts(args, round)
    ]
    prompts = Batch(
        torch.tensor([len(row) for row in rows]),
        tokens={"input_ids": torch.tensor([token for row in rows for token in row])},
        rows={
            "seed": torch.arange(len(rows)),
            "greedy": torch.zeros(len(rows), dtype=torch.bool),
            "max_tokens": torch.full((len(rows),), args.tokens),
        },
    )
    begun = time.perf_counter()
    answers = engine.rollout.generate(prompts, engine.sampling, 1)
    seconds = time.perf_counter() - begun
    assert answers.total_tokens == args.requests * args.tokens
    return seconds


def serve(pipe: Connection, args: argparse.Namespace, round: int, stream: bool) -> float:
    """Seconds of the same requests over HTTP, from the first one to the last reply. pipe: to ``clients``."""
    pipe.send((texts(args, round), stream))
    seconds, tokens = pipe.recv()
    assert tokens == args.requests * args.tokens
    return float(seconds)


def clients(url: str, model: str, args: argparse.Namespace, pipe: Connection) -> None:
    """Send requests over connections that stay open: (texts, stream) from ``pipe``, until None; replies (seconds, tokens)."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    common = {"model": model, "max_tokens": args.tokens, "stream_options": {"include_usage": True}}
    connections = SimpleQueue[http.client.HTTPConnection]()

    def ask(item: tuple[int, str], stream: bool) -> int:
        connection = connections.get()
        body = common | {"messages": [{"role": "user", "content": item[1]}], "seed": item[0], "stream": stream}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        text = connection.getresponse().read().decode()
        connections.put(connection)
        reply = json.loads(text.split("\n\n")[-3].removeprefix("data: ") if stream else text)
        return int(reply["usage"]["completion_tokens"])

    with ThreadPoolExecutor(args.concurrency) as pool:
        while (job := pipe.recv()) is not None:
            asked, stream = job
            for _ in range(args.concurrency):  # the server has closed those of before, which were idle
                connections.put(http.client.HTTPConnection(urlsplit(url).netloc, timeout=600))
            begun = time.perf_counter()
            tokens = sum(pool.map(partial(ask, stream=stream), enumerate(asked)))
            pipe.send((time.perf_counter() - begun, tokens))
            while not connections.empty():
                connections.get().close()


if __name__ == "__main__":
    main()
