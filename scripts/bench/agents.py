"""Agent processes with a model that answers at once: turns per second, and CPU time of the controller per turn.

    python scripts/bench/agents.py                  # JSON on stdout
    python scripts/bench/agents.py --processes 4 --sessions 4000
    python scripts/bench/agents.py --quick          # a smoke version

Every session has --turns turns, of which all but the last call a tool; the results come back at once. The tokenizer is that of
data_preprocess.tiny_model with a chat template for tools. Turns of the model are made before the measurement, so that the
controller's time is that of trainer.agents.sessions.pool alone. All sessions are answered together, as at the end of a tick.

turns_per_s: in wall time, after the first answers. controller_ms, process_ms: CPU time per turn of the controller, and of all
agent processes together: 1000 / process_ms turns per second are what one core can do.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from data_preprocess.tiny_model import character_tokenizer
from trainer.agents.sessions.agent_loop import AgentSetup
from trainer.agents.sessions.pool import AgentPool
from trainer.agents.sessions.protocol import Finished, SampledTurn, Task, Wanted

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
CALL = '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 34}}</tool_call>'


def setup(folder: Path, processes: int) -> AgentSetup:
    (folder / "tools.py").write_text(TOOL)
    tokenizer: PreTrainedTokenizerBase = character_tokenizer(None)
    tokenizer.chat_template = TEMPLATE
    keys = (
        "multi_turn.enable=true", f"multi_turn.function_tool_path={folder / 'tools.py'}", f"agent.num_workers={processes}",
        "agent.memory_limit_mb=null",
    )  # fmt: skip
    rollout = compose("ppo_trainer", PPOConfig, [f"actor_rollout_ref.rollout.{key}" for key in keys]).actor_rollout_ref.rollout
    return AgentSetup(tokenizer, {}, rollout.multi_turn, rollout.agent)


def tokens_of(tokenizer: Any, text: str) -> dict[str, np.ndarray]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    n = len(ids)
    return {
        "token_ids": np.array(ids, dtype=np.int64),
        "log_probs": np.full(n, -0.5, dtype=np.float32),
        "versions": np.zeros(n, dtype=np.int32),
    }


def cpu_of(pids: list[int]) -> float:
    """CPU seconds of processes so far, with their threads."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(processes: int, sessions: int, turns: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        given = setup(Path(temporary), processes)
        call, end = tokens_of(given.tokenizer, CALL), tokens_of(given.tokenizer, "46")
        tasks = [
            Task(id, [{"role": "user", "content": f"12 + 34, {id}"}], "bench", "46", {}, None, 100_000, 100_000)
            for id in range(sessions)
        ]
        with AgentPool(given) as pool:
            pool.wait_ready()
            pool.start(tasks)
            waiting = pool.collect(range(sessions))
            pids = [process.pid for process in pool._homes]
            before, begun, own = cpu_of(pids), time.perf_counter(), 0.0
            for turn in range(turns):
                tokens = call if turn < turns - 1 else end
                replies = {
                    wanted.id: SampledTurn(wanted.key, wanted.ordinal, finish_reason="stop", **tokens)
                    for wanted in waiting
                    if isinstance(wanted, Wanted)
                }
                start = time.process_time()
                pool.reply(replies)
                waiting = pool.collect(range(sessions))
                own += time.process_time() - start
            wall, used = time.perf_counter() - begun, cpu_of(pids) - before
        assert all(isinstance(answer, Finished) for answer in waiting)
    n = sessions * turns
    prompt = [len(answer.parts[0].input_ids) for answer in waiting if isinstance(answer, Finished)]
    return {"processes": processes, "sessions": sessions, "turns": turns, "tokens_per_session": float(np.mean(prompt)),
            "turns_per_s": n / wall, "controller_ms": 1e3 * own / n, "process_ms": 1e3 * used / n}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="agent processes (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=1000, help="at the same time (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="of the model per session (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="20 sessions of 3 turns")
    args = parser.parse_args()
    if args.quick:
        args.sessions, args.turns = 20, 3
    print(json.dumps(measure(args.processes, args.sessions, args.turns) | {"load": os.getloadavg()}, indent=1))


if __name__ == "__main__":
    main()
