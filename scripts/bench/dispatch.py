"""Controller overhead: of a step, by batch size and number of workers, and of sending a large batch to workers on Ray.

    python scripts/bench/dispatch.py                                      # a table on stderr, JSON on stdout
    python scripts/bench/dispatch.py --sequences 16384 --workers 64 --megabytes 0
    python scripts/bench/dispatch.py --quick                              # a smoke version

steps: whole runs of trainer.main_ppo in this process, with real data, tokenizer, rewards, plan, loss weights, metrics and logs,
on workers that return at once columns of the right shapes (dummies.py). The time of a step, less the time within those workers,
is then the controller's; serialization counts in full, also on the workers' side. Prompts have 17 tokens, each with 8 responses
of 1 to --longest tokens. Medians over steps, without the first.

store: a batch sent to --readers workers on Ray, each its shard of the plan. Bytes written to Ray's object store, and read from
it, over the bytes of the batch; total seconds, the part in which the controller gathers each worker's rows, and for comparison
memcpy of the same bytes in one thread. Round trips of 100 MB to one worker and back, compared with Ray's own round trips of the
same bytes as numpy arrays and as torch tensors.

turns: generation of --requests responses on one and two replicas that hold all of them at the same time. Milliseconds outside the
replicas per turn, in which each is called once for 32 steps. turns_on_ray: the same on Ray; CPU time of the controller's main
thread per turn, the smallest and the median of the rounds.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import ray
import torch
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from data_preprocess import tiny_model
from data_preprocess.writer import rl_row, write
from scripts.bench.dummies import CLOCK, Dummies
from trainer import main_ppo
from trainer.cluster.watchdog import Watchdog
from trainer.rollout.remote_rollout import RemoteRollout
from trainer.run.timing import WITHIN
from workers.batch import Batch
from workers.controller.group import Backend, WorkerInfo
from workers.controller.local_backend import LocalBackend
from workers.controller.ray.ray_backend import RayBackend
from workers.controller.resource_pool import ResourcePool
from workers.controller.rpc import Mesh, Sharded, worker_call
from workers.plan import Limits, make_plan
from workers.rollout.base import Sampling

N, PROMPT = 8, 17
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) % 7 / 7\n"


def steps(sequences: int, workers: int, count: int, folder: Path) -> dict[str, Any]:
    """Controller time of one step, from ``count`` steps of GRPO with a KL loss."""
    prompts, run_dir = sequences // N, folder / f"run_{sequences}_{workers}"
    digits = np.random.default_rng(0).integers(0, 10, (prompts, PROMPT)).tolist()
    rows = [
        rl_row(data_source="bench", prompt="".join(map(str, line)), ability="", ground_truth="", split="train", index=i)
        for i, line in enumerate(digits)
    ]
    data = write(rows, folder, f"{sequences}")
    CLOCK.marks.clear()
    with mock.patch("trainer.ppo.ppo_builder.open_backend", lambda *_: Dummies()):
        code = main_ppo.PROGRAM(
            [
                "algorithm=grpo", f"data.train_files={data}", f"data.val_files={data}", f"trainer.total_epochs={count + 2}",
                f"data.train_batch_size={prompts}", f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
                f"data.max_prompt_length={PROMPT}", f"data.max_response_length={CLOCK.longest}",
                f"actor_rollout_ref.model.path={folder}/model", f"actor_rollout_ref.rollout.n={N}",
                f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={max(4096, PROMPT + CLOCK.longest)}",
                f"reward.custom_reward_function.path={folder}/reward.py",
                "trainer.device=cpu", f"trainer.n_gpus_per_node={workers}", "trainer.logger=[]", "trainer.val_before_train=false",
                "trainer.save_freq=-1",
                f"trainer.default_local_dir={run_dir}",
            ]
        )  # fmt: skip
    assert code == 0
    logged = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:-1]
    wall, cpu, parts = [], [], []
    for (start, start_cpu, before), (end, end_cpu, after), metrics in zip(
        CLOCK.marks[1:-1], CLOCK.marks[2:], logged, strict=True
    ):
        within = after - before
        wall.append(end - start - within.total())
        cpu.append(end_cpu - start_cpu)
        phases = {name.removeprefix("timing_s/"): value for name, value in metrics.items() if name.startswith("timing_s/")}
        parts.append({name: value - within[name] for name, value in phases.items() if name not in ("step", *WITHIN)})
        parts[-1]["rest"] = wall[-1] - sum(parts[-1].values())
    tokens = statistics.mean(metrics["perf/total_num_tokens"] for metrics in logged)
    seconds = statistics.median(wall)
    return {
        "sequences": sequences,
        "workers": workers,
        "tokens": tokens,
        "controller_s": seconds,
        "controller_cpu_s": statistics.median(cpu),
        "us_per_token": seconds / tokens * 1e6,
        "percent_of_10_s": seconds * 10,
        "phases_s": {name: statistics.median(part[name] for part in parts) for name in parts[0]},
    }


class Reader:
    def __init__(self, info: WorkerInfo) -> None:
        torch.set_num_threads(1)

    def close(self) -> None:
        """Nothing to release."""

    def read(self, batch: Batch) -> int:
        """Bytes of the columns that were received."""
        return sum(column.nbytes for column in (batch.lengths, *batch.tokens.values(), *batch.rows.values()))

    def same(self, value: Any) -> Any:
        return value


def columns(megabytes: int) -> dict[str, torch.Tensor]:
    """Columns of 32 bytes per token in total."""
    tokens = megabytes * 2**20 // 32
    ids = {name: torch.arange(tokens) for name in ("input_ids", "response_mask")}
    return ids | {name: torch.rand(tokens) for name in ("log_probs", "values", "advantages", "returns")}


def store(megabytes: int, workers: int, rounds: int, folder: Path) -> dict[str, Any]:
    sent = columns(megabytes)
    total = len(sent["input_ids"])
    lengths = [1024] * (total // 1024) + [total % 1024] * (total % 1024 > 0)
    batch = Batch(torch.tensor(lengths), sent)
    small = columns(min(megabytes, 100))
    back = Batch(torch.tensor([len(small["values"])]), small)
    arrays = [column.numpy() for column in small.values()]
    nbytes = sum(column.nbytes for column in (batch.lengths, *sent.values()))
    target = {name: torch.empty_like(column) for name, column in sent.items()}
    ray_init = {"object_store_memory": max(2 * nbytes, 200 * 2**20)}
    with RayBackend(run_dir=folder, nnodes=1, n_gpus_per_node=workers + 1, device="cpu", ray_init=ray_init) as backend:
        group = backend.start_group("readers", ResourcePool((workers,), "cpu", "readers"), Reader)
        alone = backend.start_group("alone", ResourcePool((1,), "cpu", "alone"), Reader)
        group.register_mesh("all", Mesh(tuple(range(workers)), tuple(range(workers))))
        group.call(worker_call(Reader.same, None)).result()
        plain = ray.remote(lambda value: value).options(num_cpus=0)
        state = get_state_from_address(ray.get_runtime_context().gcs_address)
        taken, read, gather, times = [], [], [], []

        def dispatch() -> None:
            shares = Sharded()
            gather.append(seconds(lambda: shares.extend(make_plan(lengths, workers, Limits(max_tokens=16384)).split(batch))))
            read.append(sum(group.call(worker_call(Reader.read, shares), mesh="all").result()))

        for _ in range(rounds + 1):
            before = get_memory_info_reply(state).store_stats.cumulative_created_bytes
            times.append((seconds(dispatch), seconds(lambda: [target[name].copy_(sent[name]) for name in sent])))
            taken.append(get_memory_info_reply(state).store_stats.cumulative_created_bytes - before)
        trips: dict[str, Callable[[], object]] = {
            "call": lambda: alone.call(worker_call(Reader.same, None)).result(),
            "batch": lambda: alone.call(worker_call(Reader.same, back)).result(),
            "numpy": lambda: ray.get(plain.remote(arrays)),
            "torch": lambda: ray.get(plain.remote(back)),
        }
        for trip in trips.values():
            trip()
        round_trips = {name: statistics.median(seconds(trip) for _ in range(max(rounds, 3))) for name, trip in trips.items()}
    whole, memcpy = (statistics.median(column) for column in zip(*times[1:], strict=True))
    return {
        "workers": workers,
        "bytes": nbytes,
        "stored_over_bytes": taken[-1] / nbytes,
        "read_over_bytes": read[-1] / nbytes,
        "seconds": whole,
        "gather_s": statistics.median(gather[1:]),
        "memcpy_s": memcpy,
        "over_memcpy": statistics.median(one / other for one, other in times[1:]),
        "round_trip_ms": {name: 1e3 * value for name, value in round_trips.items()},
    }


class FakeEngine:
    """Rollout role whose responses end after ``seed`` steps."""

    def __init__(self, info: WorkerInfo) -> None:
        torch.set_num_threads(1)
        self.rank, self.roles = info.rank, {"rollout": self}
        self.left: dict[int, int] = {}
        self.used = self.calls = 0.0

    def close(self) -> None:
        """Nothing to release."""

    def build_rollout(self, role: str, spec: object, source: str) -> tuple[int, bool]:
        return self.rank, True

    def advance(self, prompts: Batch | None, sampling: Sampling, steps: int) -> Batch:
        started = time.perf_counter()
        if prompts is not None:
            self.left |= zip(prompts.rows["id"].tolist(), prompts.rows["seed"].tolist(), strict=True)
        self.left = {id: steps_left - steps for id, steps_left in self.left.items()}
        ended = [id for id, steps_left in self.left.items() if steps_left <= 0]
        for id in ended:
            del self.left[id]
        lengths, zeros = torch.full((len(ended),), 300), torch.zeros(len(ended), dtype=torch.int64)
        tokens = {"input_ids": zeros.repeat(300), "rollout_log_probs": torch.zeros(300 * len(ended))}
        tokens["weight_version"] = zeros.repeat(300).int()
        result = Batch(lengths, tokens, {"id": torch.tensor(ended, dtype=torch.int64), "finished": zeros})
        self.used, self.calls = self.used + time.perf_counter() - started, self.calls + 1
        return result

    def stats(self) -> dict[str, float]:
        found = {"used": self.used, "calls": self.calls}
        self.used = self.calls = 0.0
        return found


def turns(requests: int, replicas: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Cost of a turn in this process."""
    with LocalBackend() as backend:
        costs, n = generations(backend, requests, replicas, rounds, folder)
    wall = [(whole - used / replicas) / n for whole, _, used in costs]
    return {"requests": requests, "replicas": replicas, "turns": n, "turn_ms": 1e3 * statistics.median(wall)}


def turns_on_ray(requests: int, replicas: int, rounds: int, folder: Path) -> dict[str, Any]:
    """CPU time of the controller's main thread per turn."""
    with RayBackend(run_dir=folder, nnodes=1, n_gpus_per_node=replicas, device="cpu", ray_init={}) as backend:
        costs, n = generations(backend, requests, replicas, rounds, folder)
    cpu = [1e3 * thread / n for _, thread, _ in costs]
    return {"requests": requests, "replicas": replicas, "turns": n, "least_ms": min(cpu), "cpu_ms": statistics.median(cpu)}


def generations(
    backend: Backend, requests: int, replicas: int, rounds: int, folder: Path
) -> tuple[list[tuple[float, float, float]], float]:
    """Of ``rounds`` generations after one for warm-up: seconds, CPU seconds of this thread, seconds of the engines; their turns.

    Response lengths are geometric with a mean of 300 tokens.
    """
    settings = SimpleNamespace(name="embedded", free_cache_engine=False, max_num_seqs=requests, balance="tokens")
    sampling = Sampling(1.0, -1, 1.0, max_tokens=4000, stop_token_ids=())
    rows = {"seed": torch.from_numpy(np.random.default_rng(0).geometric(1 / 300, requests)), "greedy": torch.zeros(requests)}
    prompts = Batch(torch.full((requests,), 100), {"input_ids": torch.zeros(100 * requests, dtype=torch.int64)}, rows)
    limits = dict.fromkeys(("start", "generate", "ask"), 300.0)
    group = backend.start_group("engines", ResourcePool((replicas,), "cpu", "engines"), FakeEngine)
    spec = cast(Any, SimpleNamespace(rollout=settings, run_dir=None))
    rollout = RemoteRollout(group, spec, "actor", Watchdog(limits, folder))
    costs = []
    for _ in range(rounds + 1):
        thread = time.thread_time()
        whole = seconds(lambda: rollout.generate(prompts, sampling, N))
        thread, stats = time.thread_time() - thread, rollout.stats()
        costs.append((whole, thread, stats["used"]))
    return costs[1:], stats["calls"] / replicas


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def line(case: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {1e3 * value:.0f}" for name, value in case["phases_s"].items())
    return (
        f"{case['sequences']:6} sequences, {case['workers']:2} workers: {1e3 * case['controller_s']:7.1f} ms "
        f"(CPU {1e3 * case['controller_cpu_s']:7.1f}), {case['us_per_token']:5.2f} us a token; {parts}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[256, 1024, 4096, 16384], help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64], help="(default: %(default)s)")
    parser.add_argument("--longest", type=int, default=CLOCK.longest, help="maximum tokens of a response (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the batch sent to --readers workers; 0: none")
    parser.add_argument("--readers", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, default=4096, help="responses of the part turns (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="128 and 1024 sequences, 2 workers, 8 MB")
    args = parser.parse_args()
    if args.quick:
        args.sequences, args.workers, args.megabytes, args.readers = [128, 1024], [2], 8, 2
    torch.set_num_threads(1)
    CLOCK.longest = args.longest
    report: dict[str, Any] = {"settings": vars(args), "steps": [], "turns": [], "turns_on_ray": []}
    with tempfile.TemporaryDirectory() as temporary, redirect_stdout(sys.stderr):
        folder = Path(temporary)
        tiny_model.main([f"--save_dir={folder / 'model'}"])
        (folder / "reward.py").write_text(REWARD)
        for workers in args.workers:
            for sequences in (number for number in args.sequences if number >= workers):
                report["steps"].append(steps(sequences, workers, args.steps, folder))
                print(line(report["steps"][-1]))
        for replicas in (1, 2):
            report["turns"].append(turns(args.requests, replicas, args.steps, folder))
            print(
                "{requests} requests, {replicas} replicas: {turns:.0f} turns, {turn_ms:.2f} ms a turn".format(
                    **report["turns"][-1]
                )
            )
        for replicas in (1, 2):
            report["turns_on_ray"].append(turns_on_ray(args.requests, replicas, 4 * args.steps, folder))
            print("on Ray, {replicas} replicas: CPU time {cpu_ms:.2f} ms a turn".format(**report["turns_on_ray"][-1]))
        if args.megabytes:
            report["store"] = store(args.megabytes, args.readers, args.steps, folder)
    print(json.dumps(report | {"load": os.getloadavg()}, indent=1))


if __name__ == "__main__":
    main()
