"""A model that writes what a script says, sessions in this process, and the tools of their tests."""

import asyncio
import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from configs.schema.agents import AgentConfig, MultiTurnConfig
from tests.trainer.agents.families import QWEN25, Family
from trainer.agents.isolation import SessionLoop
from trainer.agents.sessions.agent_kit import AgentSetup
from trainer.agents.sessions.agent_loop import AgentLoops
from trainer.agents.sessions.agent_session import AgentSession
from trainer.agents.sessions.protocol import Finished, Journal, SampledTurn, Settled, Task, Wanted

TOOLS = '''
import asyncio, os, threading, time
from trainer.agents.tools import tool
CALLS = []

@tool
def add(a: int, b: int = 1):
    """Add.

    Args:
        a: A number.
        b: Another.
    """
    CALLS.append((a, b))
    return str(a + b), 0.25 * a

@tool
async def later(text: str) -> str:
    """Echo.

    Args:
        text: The text.
    """
    await asyncio.sleep(0)
    return text

@tool
def harm(how: str) -> str:
    """Do harm.

    Args:
        how: In which way.
    """
    if how == "raise":
        raise RuntimeError("no network")
    if how == "hang":
        threading.Event().wait()
    if how == "exit":
        os._exit(7)
    if how == "crash":
        import ctypes
        ctypes.string_at(0)
    if how == "flood":
        return "x" * 10**8
    if how == "fork":
        os.fork()
    if how == "print":
        print("printed", flush=True)
    if how.startswith("once:"):
        if not os.path.exists(how[5:]):
            open(how[5:], "w").close()
            os._exit(8)
    return "survived"
'''
STATEFUL = '''
from trainer.agents.tools import BaseTool, ToolResponse

class Counter(BaseTool):
    """Adds up what its calls get."""
    log = []
    state = {}

    async def create(self, instance_id=None, **kwargs):
        self.state[instance_id] = kwargs.get("start", 0)
        self.log.append(("create", instance_id))
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.log.append(("execute", instance_id, parameters["by"]))
        self.state[instance_id] += parameters["by"]
        return ToolResponse(text=f"sum {self.state[instance_id]}"), 0.5, {"by": parameters["by"]}

    async def calc_reward(self, instance_id, **kwargs):
        return self.state[instance_id] / 8

    async def release(self, instance_id, **kwargs):
        self.log.append(("release", instance_id))
        del self.state[instance_id]
'''
TOOL_YAML = """
tools:
  - class_name: {folder}/stateful.py:Counter
    config: {{type: native}}
    tool_schema:
      type: function
      function:
        name: count
        description: Count.
        parameters: {{type: object, properties: {{by: {{type: integer, description: By.}}}}, required: [by]}}
"""
USER = '''
from trainer.agents.interactions import BaseInteraction

class Teacher(BaseInteraction):
    """Objects until it has been asked often enough."""
    seen = {}

    async def start_interaction(self, instance_id=None, patience=2, **kwargs):
        self.seen[instance_id] = patience
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        self.seen[instance_id] -= 1
        if self.seen[instance_id] == 7:
            raise ValueError("no user")
        done = self.seen[instance_id] <= 0
        return done, f"Why, after {len(messages)}? {self.seen[instance_id]}", 0.5 * self.seen[instance_id], {}
'''
USER_YAML = "interaction: [{{name: teacher, class_name: '{folder}/user.py:Teacher', config: {{}}}}]\n"


def multi_turn(**changes: Any) -> MultiTurnConfig:
    fields: dict[str, Any] = {
        "enable": True,
        "max_assistant_turns": None,
        "max_user_turns": None,
        "max_parallel_calls": 2,
        "max_tool_response_length": 64,
        "tool_response_truncate_side": "middle",
        "format": "hermes",
        "tool_config_path": None,
        "function_tool_path": None,
        "interaction_config_path": None,
        "environment": None,
        "tool_timeout": 60.0,
        "on_break": "split",
    }
    return MultiTurnConfig(**(fields | changes))


def setup(
    folder: Path,
    *files: str,
    family: Family = QWEN25,
    workers: int = 1,
    loop: str = "tool_agent",
    loops: str | None = None,
    program: str | None = None,
    **changes: Any,
) -> AgentSetup:
    """files: of "tools", "stateful", "user"."""
    (folder / "tools.py").write_text(TOOLS)
    (folder / "stateful.py").write_text(STATEFUL)
    (folder / "stateful.yaml").write_text(TOOL_YAML.format(folder=folder))
    (folder / "user.py").write_text(USER)
    (folder / "user.yaml").write_text(USER_YAML.format(folder=folder))
    keys = {"tools": "function_tool_path", "stateful": "tool_config_path", "user": "interaction_config_path"}
    names = {"tools": "tools.py", "stateful": "stateful.yaml", "user": "user.yaml"}
    changes = {keys[file]: str(folder / names[file]) for file in files} | changes
    agent = AgentConfig(
        num_workers=workers, default_agent_loop=loop, agent_loop_config_path=loops, program=program, memory_limit_mb=16_384
    )
    rollout = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "response_length": 4000}
    run = {"actor_rollout_ref": {"rollout": rollout}, "data": {"apply_chat_template_kwargs": {}}}
    return AgentSetup(family.tokenizer, {}, multi_turn(**changes), agent, run)


def task(id: int = 0, prompt: str = "ab ba?", **changes: Any) -> Task:
    fields: dict[str, Any] = {
        "prompt": [{"role": "user", "content": prompt}],
        "data_source": "test",
        "ground_truth": "1",
        "extra_info": {},
        "agent": None,
        "max_prompt": 4_000,
        "max_tokens": 4_000,
    }
    return Task(id=id, **(fields | changes))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def sampled(wanted: Wanted, text: str, *, family: Family = QWEN25, reason: str = "stop") -> SampledTurn:
    """A turn of this text, with log-probs and versions that follow from the call; cut at the budget."""
    rng = Random(wanted.key + wanted.ordinal)
    ids = family.seams.ids(text)
    if reason == "stop":
        ids += family.seams.ids("<|im_end|>")
    if len(ids) > wanted.max_tokens:
        ids, reason = ids[: wanted.max_tokens], "length"
    n = len(ids)
    log_probs = np.array([-rng.random() for _ in range(n)], dtype=np.float32)
    versions = np.full(n, rng.randrange(5), dtype=np.int32)
    return SampledTurn(wanted.key, wanted.ordinal, np.array(ids, dtype=np.int64), log_probs, versions, reason)  # type: ignore[arg-type]


Model = Callable[[Wanted, int], SampledTurn]
"""Turn of the model to a call; the number of turns before it."""


def script(lines: Mapping[int, list[str]]) -> Model:
    """A model with lines for each session; «end» after the last one."""

    def model(wanted: Wanted, turn: int) -> SampledTurn:
        texts = lines[wanted.id]
        return sampled(wanted, texts[turn] if turn < len(texts) else "end")

    return model


def converse(loops: AgentLoops, journal: Journal, model: Model, *, most: int | None = None) -> Finished | Wanted:
    """Run a session in this process until it ends, or wants more turns than ``most``; the journal grows."""

    async def main() -> Finished | Wanted:
        wanted: asyncio.Queue[Wanted | Settled] = asyncio.Queue()
        loop = SessionLoop()
        session = AgentSession(copy.deepcopy(journal), loops.kit, loop, wanted.put_nowait)
        running = asyncio.create_task(session.run(loops.of(journal.task)))
        try:
            while True:
                asked = asyncio.create_task(wanted.get())
                await asyncio.wait({running, asked}, return_when=asyncio.FIRST_COMPLETED)
                answer: Wanted | Settled | Finished = asked.result() if asked.done() else await running
                asked.cancel()
                if isinstance(answer, Settled):
                    continue
                journal.outcomes += json.loads(json.dumps(answer.outcomes))
                if isinstance(answer, Finished) or (most is not None and len(journal.turns) >= most):
                    return answer
                journal.turns.append(model(answer, len(journal.turns)))
                session.give(journal.turns[-1])
        finally:
            running.cancel()
            await asyncio.wait({running})
            loop.close()

    return asyncio.run(main())


def facts(finished: Finished) -> Any:
    """Everything that must be bitwise equal, as one value."""
    parts = [
        [(array.dtype.str, array.tobytes()) for array in (p.input_ids, p.response_mask, p.rollout_log_probs, p.weight_version)]
        + [p.prompt_length]
        for p in finished.parts
    ]
    timeless = {name: value for name, value in finished.metrics.items() if not name.endswith("seconds")}
    return parts, json.dumps([finished.id, finished.finished, finished.reward, finished.extra, finished.messages]), timeless
