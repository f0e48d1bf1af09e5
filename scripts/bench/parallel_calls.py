"""Agent programs whose calls are made one after the other, and at the same time: seconds of a session, as JSON.

    python scripts/bench/parallel_calls.py                            # four calls of 64 tokens, an engine of 5 ms a step
    python scripts/bench/parallel_calls.py --calls 1 --seconds 0 --sessions 300   # cost of a call without an engine
    python scripts/bench/parallel_calls.py --quick                    # a smoke version

The program is a coroutine with OpenAI's client. Sampler, sessions, agent process, scheduler and flow are the trainer's; an engine
samples a token of each of its requests per step, and a step takes --seconds, however many requests there are.

seconds: from the first tick to the last. process_ms: CPU time of the agent process per call.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from data_preprocess.tiny_model import character_tokenizer
from scripts.bench.agents import TEMPLATE, cpu_of, tokens_of
from scripts.bench.rollout_flow import Settings, SimulatedEngine, Simulation
from trainer.agents.sessions.agent_kit import AgentSetup
from trainer.agents.sessions.pool import AgentPool
from trainer.agents.sessions.session_flow import AgentSessions
from trainer.data.dataset import Prompt
from workers.batch import Batch
from workers.controller.group import WorkerInfo
from workers.controller.local_backend import LocalBackend
from workers.rollout.base import Sampling

PROGRAM = """
import asyncio
from openai import AsyncOpenAI


async def run(base_url, api_key, task):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        async def ask(text):
            return await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])

        names = [f"{task.id} {n}" for n in range(task.extra_info["calls"])]
        if task.extra_info["parallel"]:
            await asyncio.gather(*map(ask, names))
        else:
            for name in names:
                await ask(name)
    return 1.0
"""


class SteppingEngine(SimulatedEngine):
    """Ends every request after as many steps as ``text`` has tokens."""

    def __init__(self, info: WorkerInfo, settings: Settings, text: dict[str, Any], seconds: float) -> None:
        super().__init__(info, settings)
        self._tokens = {name: torch.from_numpy(column) for name, column in text.items()}
        self._left: dict[int, int] = {}
        """By request: steps that it has yet to run."""
        self._seconds = seconds

    def advance(self, prompts: Batch | None, sampling: Sampling, steps: int) -> Batch:
        length, ended = len(self._tokens["input_ids"]), list[int]()
        self._left |= dict.fromkeys([] if prompts is None else prompts.rows["id"].tolist(), length)
        while steps and self._left:
            time.sleep(self._seconds)
            self._left = {id: left - 1 for id, left in self._left.items()}
            ended += [id for id, left in self._left.items() if left == 0]
            self._left = {id: left for id, left in self._left.items() if left}
            steps -= 1
        ids = torch.tensor(ended, dtype=torch.int64)
        tokens = {name: column.repeat(len(ids)) for name, column in self._tokens.items()}
        found = Batch(torch.full((len(ids),), length), tokens, {"id": ids, "finished": torch.ones_like(ids)})
        return found.with_meta({"seconds": 1.0, "sequence_seconds": 1.0})


def measure(args: argparse.Namespace, *, parallel: bool) -> dict[str, Any]:
    settings = Settings(
        prompts=1, n=1, prompt_tokens=8, max_tokens=512, slots=4 * args.sessions, replicas=1, oversubmit=1.0, max_age=1,
        train=0.0, steps=1, warm_up=0, a=0.0, b=0.0, c=0.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary, LocalBackend() as backend:
        (Path(temporary) / "program.py").write_text(PROGRAM)
        tokenizer: Any = character_tokenizer(None)
        tokenizer.chat_template = TEMPLATE
        keys = ("multi_turn.enable=true", "agent.num_workers=1", f"agent.program={temporary}/program.py:run")
        words = [f"actor_rollout_ref.rollout.{key}" for key in keys]
        rollout = compose("ppo_trainer", PPOConfig, words).actor_rollout_ref.rollout
        engine = (SteppingEngine, tokens_of(tokenizer, "1" * (args.tokens - 1)), args.seconds)
        run = Simulation(settings, backend, Path(temporary), "one round", engine=engine)
        with AgentPool(AgentSetup(tokenizer, {}, rollout.multi_turn, rollout.agent)) as pool:
            pool.wait_ready()
            run.sampler.agents = AgentSessions(pool, max_prompt=1000, max_tokens=1000)
            spec = {"calls": args.calls, "parallel": parallel}
            # One more, before the clock starts: the process imports the client with its first session.
            for n in (1, args.sessions):
                asked = [Prompt(id, (id,), "", "bench", "", spec, [{"role": "user", "content": str(id)}]) for id in range(n)]
                requested = run.sampler.request_to_train(asked, "train", 1)
                flow, finished = run.sampler.flow(run.sampler.sampling, requested, expected=n), list[Batch]()
                before, begun = cpu_of([process.pid for process in pool._homes]), time.perf_counter()
                for id in range(n):
                    flow.admit([id], 1)
                while flow.start():
                    finished += flow.wait()
                seconds, used = time.perf_counter() - begun, cpu_of([process.pid for process in pool._homes]) - before
    made = sum(int(facts["metrics"]["turns"]) for part in finished for facts in part.objects["session"][:1])
    return {"seconds": seconds, "calls": made, "process_ms": 1e3 * used / (args.sessions * args.calls)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1, help="at the same time (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=4, help="of a session (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of a call (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.005, help="of a step (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two calls of 8 tokens")
    args = parser.parse_args()
    if args.quick:
        args.calls, args.tokens = 2, 8
    found = {name: measure(args, parallel=name == "parallel") for name in ("sequential", "parallel")}
    print(json.dumps(found | {"load": os.getloadavg()}, indent=1))


if __name__ == "__main__":
    main()
