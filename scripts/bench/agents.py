"""Conversations with engines that answer at once: turns per second, and CPU time of the controller per turn.

    python scripts/bench/agents.py                  # JSON on stdout
    python scripts/bench/agents.py --processes 4 --sessions 4000
    python scripts/bench/agents.py --processes 2 --seconds 10
    python scripts/bench/agents.py --quick          # a smoke version

Every session has --turns turns, of which all but the last call a tool; the results come back at once. The tokenizer is that of
data_preprocess.tiny_model with a chat template for tools. Sampler, sessions, agent processes, scheduler and flow are the
trainer's; an engine answers every request with the same call at the end of its tick.

turns_per_s: in wall time. controller_ms, process_ms: CPU time per turn of the controller, without that of the engine, and of all
agent processes together: 1000 / process_ms turns per second are what one core can do. --seconds: for so long a session that ends
is followed by another one; turns_per_core_s: turns by CPU second of controller and agent processes together.
"""

import argparse
import json
import os
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from data_preprocess.tiny_model import character_tokenizer
from scripts.bench.rollout_flow import Settings, SimulatedEngine, Simulation
from trainer.agents.sessions.agent_kit import AgentSetup
from trainer.agents.sessions.pool import AgentPool
from trainer.agents.sessions.session_flow import AgentSessions
from trainer.data.dataset import Prompt
from workers.batch import Batch
from workers.controller.group import WorkerInfo
from workers.controller.local_backend import LocalBackend
from workers.rollout.base import Sampling

TOOL = '''
from trainer.agents.tools import tool

@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: A number.
        b: Another number.
    """
    return a + b
'''
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": {{ c.function.name | tojson }}, '
    '"arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}{{ eos_token }}{% endfor %}'
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MOST = 2_000
"""Sessions per second that are prepared."""
CALL = '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 34}}</tool_call>'


def setup(folder: Path, processes: int, turns: int) -> AgentSetup:
    (folder / "tools.py").write_text(TOOL)
    tokenizer: PreTrainedTokenizerBase = character_tokenizer(None)
    tokenizer.chat_template = TEMPLATE
    keys = (
        "multi_turn.enable=true", f"multi_turn.function_tool_path={folder / 'tools.py'}", f"agent.num_workers={processes}",
        f"multi_turn.max_assistant_turns={turns}",
    )  # fmt: skip
    rollout = compose("ppo_trainer", PPOConfig, [f"actor_rollout_ref.rollout.{key}" for key in keys]).actor_rollout_ref.rollout
    return AgentSetup(tokenizer, {}, rollout.multi_turn, rollout.agent)


def tokens_of(tokenizer: Any, text: str) -> dict[str, np.ndarray]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    n = len(ids)
    return {
        "input_ids": np.array(ids, dtype=np.int64),
        "rollout_log_probs": np.full(n, -0.5, dtype=np.float32),
        "weight_version": np.zeros(n, dtype=np.int32),
    }


def cpu_of(pids: list[int]) -> float:
    """CPU seconds of processes so far, with their threads."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class CallingEngine(SimulatedEngine):
    """Answers every request with ``tokens`` at the end of its tick. cpu_seconds: of all calls."""

    cpu_seconds = 0.0

    def __init__(self, info: WorkerInfo, settings: Settings, tokens: dict[str, np.ndarray]) -> None:
        super().__init__(info, settings)
        self._tokens = {name: torch.from_numpy(column) for name, column in tokens.items()}

    def advance(self, prompts: Batch | None, sampling: Sampling, steps: int) -> Batch:
        start = time.process_time()
        ids = torch.zeros(0, dtype=torch.int64) if prompts is None else prompts.rows["id"]
        n = len(self._tokens["input_ids"])
        ended = Batch(
            lengths=torch.full((len(ids),), n),
            tokens={name: column.repeat(len(ids)) for name, column in self._tokens.items()},
            rows={"id": ids, "finished": torch.ones_like(ids)},
        )
        CallingEngine.cpu_seconds += time.process_time() - start
        return ended.with_meta({"seconds": 1.0, "sequence_seconds": 1.0})


def measure(processes: int, sessions: int, turns: int, seconds: float = 0.0) -> dict[str, Any]:
    settings = Settings(
        prompts=1, n=1, prompt_tokens=8, max_tokens=512, slots=sessions, replicas=1, oversubmit=1.0, max_age=1,
        train=0.0, steps=1, warm_up=0, a=0.0, b=0.0, c=0.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary, LocalBackend() as backend:
        given = setup(Path(temporary), processes, turns)
        engine = (CallingEngine, tokens_of(given.tokenizer, CALL))
        run = Simulation(settings, backend, Path(temporary), "one round", engine=engine)
        with AgentPool(given) as pool:
            pool.wait_ready()
            pids = [process.pid for process in pool._homes]
            run.sampler.agents = AgentSessions(pool, max_prompt=100_000, max_tokens=100_000)
            prompts = [
                Prompt(id, (id,), "", "bench", "46", {}, [{"role": "user", "content": f"12 + 34, {id}"}])
                for id in range(sessions + int(seconds * MOST))
            ]
            requested = run.sampler.request_to_train(prompts, "train", 1)
            before, begun, own = cpu_of(pids), time.perf_counter(), time.process_time()
            CallingEngine.cpu_seconds = 0.0
            flow, finished = run.sampler.flow(run.sampler.sampling, requested, expected=sessions), list[Batch]()
            waiting = iter(range(len(prompts)))
            for id in islice(waiting, sessions):
                flow.admit([id], 1)
            while flow.start():
                ended = flow.wait()
                finished += ended
                if time.perf_counter() - begun < seconds:
                    for id in islice(waiting, sum(map(len, ended))):
                        flow.admit([id], 1)
            own = time.process_time() - own - CallingEngine.cpu_seconds
            wall, used = time.perf_counter() - begun, cpu_of(pids) - before
    n = sum(int(facts["metrics"]["turns"]) for part in finished for facts in part.objects["session"])
    ended_sessions, tokens = sum(map(len, finished)), sum(part.total_tokens for part in finished)
    return {"processes": processes, "sessions": ended_sessions, "turns": n / ended_sessions,
            "tokens_per_session": tokens / ended_sessions, "turns_per_s": n / wall, "controller_ms": 1e3 * own / n,
            "process_ms": 1e3 * used / n, "turns_per_core_s": n / (own + used)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="agent processes (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=1000, help="at the same time (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="of the model per session (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.0, help="of new sessions for those that end (default: none)")
    parser.add_argument("--quick", action="store_true", help="20 sessions of 3 turns")
    args = parser.parse_args()
    if args.quick:
        args.sessions, args.turns = 20, 3
    print(json.dumps(measure(args.processes, args.sessions, args.turns, args.seconds) | {"load": os.getloadavg()}, indent=1))


if __name__ == "__main__":
    main()
