"""Tokens per second of a model server with concurrent clients, relative to RemoteRollout.generate of the same requests, as JSON.

    python scripts/bench/serve.py --shape 0.5b                               # a GPU
    python scripts/bench/serve.py --shape 3m --device cpu --dtype float32    # embedded, on a CPU
    python scripts/bench/serve.py --quick                                    # a smoke version

The model has random weights. All responses have --tokens tokens: no token ends them. One engine does both in turn, --rounds
times: ``generate`` gets all --requests at once, the server from --concurrency clients in a process of their own, which send the
next request when they have a reply. With --stream they read it token by token. ratio: the median of the rounds' ratios.
"""

import argparse
import http.client
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

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
    parser.add_argument("--stream", action="store_true")
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
        # The server is idle while ``generate`` runs, and the other way round.
        numbers = range(args.rounds + 1)
        pairs = [(generate(engine, served, args, number), serve(url, served.name, args, number)) for number in numbers][1:]
        stopped.set()
        working.join()
    tokens = args.requests * args.tokens
    return {
        "settings": vars(args),
        "generate_tokens_per_s": round(tokens / statistics.median(one for one, _ in pairs), 1),
        "serve_tokens_per_s": round(tokens / statistics.median(other for _, other in pairs), 1),
        "ratio": round(statistics.median(one / other for one, other in pairs), 3),
        "ratios": [round(one / other, 3) for one, other in pairs],
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


def serve(url: str, model: str, args: argparse.Namespace, round: int) -> float:
    """Seconds of the same requests over HTTP, from the first one to the last reply."""
    context = get_context("spawn")
    pipe, other = context.Pipe()
    client = context.Process(target=clients, args=(url, model, texts(args, round), args, other))
    client.start()
    pipe.recv()  # its imports are done
    pipe.send(None)
    seconds, tokens = pipe.recv()
    client.join()
    assert tokens == args.requests * args.tokens
    return float(seconds)


def clients(url: str, model: str, asked: list[str], args: argparse.Namespace, pipe: Any) -> None:
    """Send requests over connections that stay open; sends (seconds, tokens) to ``pipe``."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    common = {"model": model, "max_tokens": args.tokens, "stream": args.stream, "stream_options": {"include_usage": True}}
    connections = SimpleQueue[http.client.HTTPConnection]()
    for _ in range(args.concurrency):
        connections.put(http.client.HTTPConnection(urlsplit(url).netloc, timeout=600))

    def ask(item: tuple[int, str]) -> int:
        connection = connections.get()
        body = common | {"messages": [{"role": "user", "content": item[1]}], "seed": item[0]}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        text = connection.getresponse().read().decode()
        connections.put(connection)
        reply = json.loads(text.split("\n\n")[-3].removeprefix("data: ") if args.stream else text)
        return int(reply["usage"]["completion_tokens"])

    with ThreadPoolExecutor(args.concurrency) as pool:
        pipe.send("ready")
        pipe.recv()
        begun = time.perf_counter()
        tokens = sum(pool.map(ask, enumerate(asked)))
        pipe.send((time.perf_counter() - begun, tokens))


if __name__ == "__main__":
    main()
