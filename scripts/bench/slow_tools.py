"""Conversations whose tool takes a second, on a real engine: throughput over that of responses of one turn.

    python scripts/bench/slow_tools.py --device cuda --engine vllm      # 0.5B, 512 conversations of 4 turns, minutes
    python scripts/bench/slow_tools.py --quick                          # a smoke version

Sampler, sessions, agent processes, scheduler and flow are the trainer's. The length of a turn is geometric, by its seed, whatever
the model (random weights) samples, and its last token is that of the end; every turn but the last calls the tool. One turn: the
same number of responses as the conversations have turns, all of them asked for at once. Modes: one turn; a tool that takes no
time; one that takes --seconds; with the logical clock, which waits for it, and with the wall clock.

tokens_per_s: sampled tokens per wall second. utilisation: that, over the one of one turn. waited: seconds in which the engine
waited for agents. running: mean number of running sequences while the engine works. Prompts grow from turn to turn, which is
part of what conversations cost: see the mode without a delay.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from math import ceil, log, log1p
from pathlib import Path
from typing import Any, cast

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from data_preprocess.tiny_model import character_tokenizer
from scripts.bench.agents import TEMPLATE
from scripts.bench.partial_rollouts import MeasuredEngine
from scripts.bench.rollout_flow import Settings, SimulatedRequest, Simulation
from scripts.bench.shapes import SHAPES
from trainer.agents.sessions.agent_kit import AgentSetup
from trainer.agents.sessions.pool import AgentPool
from trainer.agents.sessions.session_flow import AgentSessions
from trainer.data.dataset import Prompt
from trainer.rollout.sampler import Requested
from workers.batch import Batch
from workers.controller.local_backend import LocalBackend
from workers.roles.rollout_engines import ENGINES
from workers.rollout.base import Sampling
from workers.seeding import seed_of

TOOL = '''
import asyncio

from trainer.agents.tools import tool


@tool
async def look_up() -> str:
    """Look something up."""
    await asyncio.sleep({seconds})
    return "1" * 32


def parse(text, tools):
    """Every response is a call."""
    return "", [{{"name": "look_up", "arguments": {{}}}}]
'''


TOKENIZER = character_tokenizer(None)
TOKENIZER.chat_template = TEMPLATE
END = TOKENIZER.eos_token_id
TOOLS_TOKENS = 256  # of a rendered prompt besides its message


class TurnEngine(MeasuredEngine):
    """A real engine whose responses have geometric lengths by their seeds, with mean ``max_tokens`` / 8, and are terminated."""

    def _requests(self, prompts: Batch) -> list[SimulatedRequest]:
        longest, columns = self._settings.max_tokens, [prompts.rows["id"].tolist(), prompts.rows["seed"].tolist()]
        lengths = prompts.lengths.tolist()
        uniform = [(seed_of("length", seed) + 1) / 2**63 for seed in columns[1]]
        left = [min(longest, max(1, ceil(log(value) / log1p(-8 / longest)))) for value in uniform]
        return [SimulatedRequest(id, 0, length, 0, n, True) for id, length, n in zip(columns[0], lengths, left, strict=True)]

    def advance(self, prompts: Batch | None, sampling: Sampling, steps: int) -> Batch:
        ended = super().advance(prompts, sampling, steps)
        ended.tokens["input_ids"][ended.offsets[1:] - 1] = END
        return ended.with_rows(finished=torch.ones_like(ended.rows["finished"]))


def sessions_of(folder: Path, seconds: float, settings: Settings, turns: int, clock: str, stack: ExitStack) -> AgentSessions:
    """Agent processes with the tool. settings.max_tokens: of a turn."""
    (folder / f"tool_{seconds}.py").write_text(TOOL.format(seconds=seconds))
    file = folder / f"tool_{seconds}.py"
    keys = (
        "multi_turn.enable=true", f"multi_turn.function_tool_path={file}", f"multi_turn.format={file}:parse",
        f"multi_turn.max_assistant_turns={turns}",
    )  # fmt: skip
    rollout = compose("ppo_trainer", PPOConfig, [f"actor_rollout_ref.rollout.{key}" for key in keys]).actor_rollout_ref.rollout
    pool = stack.enter_context(AgentPool(AgentSetup(TOKENIZER, {}, rollout.multi_turn, rollout.agent)))
    pool.wait_ready()
    most = turns * (settings.max_tokens + 64)
    return AgentSessions(pool, max_prompt=settings.prompt_tokens + TOOLS_TOKENS, max_tokens=most, in_step=clock == "logical")


def measure(run: Simulation, settings: Settings, agents: AgentSessions | None, responses: int) -> dict[str, float]:
    """Figures of ``responses`` conversations, or responses of one turn, that are generated together."""
    run.sampler.agents = agents
    run.clock.seconds = run.clock.sequence_seconds = 0.0
    messages = [{"role": "user", "content": "1" * (settings.prompt_tokens // 2)}]
    prompts = [Prompt(row, (row,) * settings.prompt_tokens, "", "", "", {}, messages) for row in range(responses)]
    requested: Requested = run.sampler.request_to_train(prompts, "train", 1)
    flow = run.sampler.flow(run.sampler.sampling, requested, expected=responses)
    start, tokens, ended = time.perf_counter(), 0.0, 0
    for row in range(responses):
        flow.admit([row], settings.prompt_tokens)
    while flow.start():
        for part in flow.wait():
            mask = part.tokens.get("response_mask")
            tokens += part.total_tokens if mask is None else float(mask.sum())
            ended += len(part)
    seconds = time.perf_counter() - start
    assert ended == responses, "all of them ended, in one row each"
    waited = 0.0 if agents is None else agents.pool.seconds_waited
    running = run.clock.sequence_seconds / run.clock.seconds
    found = {"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds, "waited": waited, "running": running}
    print(found, file=sys.stderr, flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--engine", choices=ENGINES, default="embedded", help="(default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    add("--shape", choices=SHAPES, default="0.5b", help="of the model (default: %(default)s)")
    add("--memory", type=float, default=0.7, help="fraction of the GPU for the engine (default: %(default)s)")
    add("--conversations", type=int, default=512, help="(default: %(default)s)")
    add("--turns", type=int, default=4, help="of the model (default: %(default)s)")
    add("--seconds", type=float, default=1.0, help="of a call of the tool (default: %(default)s)")
    for name, default in {"prompt_tokens": 256, "max_tokens": 2048, "slots": 256}.items():
        add(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    add("--quick", action="store_true", help="sizes of seconds on a CPU")
    args = parser.parse_args(argv)
    if args.quick:
        args.shape, args.conversations, args.turns, args.seconds = "tiny", 8, 3, 0.05
        args.prompt_tokens, args.max_tokens, args.slots = 32, 32, 4
    torch.set_num_threads(1)
    settings = Settings(
        prompts=1, n=1, prompt_tokens=args.prompt_tokens, max_tokens=args.max_tokens, slots=args.slots, replicas=1,
        oversubmit=1.0, max_age=1, train=0.0, steps=1, warm_up=0, a=0.0, b=0.0, c=0.0,
    )  # fmt: skip
    modes = {
        "slow, wall": (args.seconds, "wall"), "no delay, wall": (0.0, "wall"),
        "slow, logical": (args.seconds, "logical"), "no delay, logical": (0.0, "logical"),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(**SHAPES[args.shape])).to(torch.bfloat16).save_pretrained(folder / "model")
        # The engine's longest sequence: prompt, turns and results.
        longest = args.prompt_tokens + TOOLS_TOKENS + args.turns * (args.max_tokens + 64)
        engine = (TurnEngine, args.engine, args.device, str(folder / "model"), args.memory, longest)
        run = Simulation(settings, stack.enter_context(LocalBackend()), folder, "one round", engine=cast(Any, engine))
        run.rollout.sync_weights(0)
        measure(run, settings, None, args.slots)  # compiles, captures and allocates
        found = {"one turn": measure(run, settings, None, args.conversations * args.turns)}
        for mode, (seconds, clock) in modes.items():
            agents = sessions_of(folder, seconds, settings, args.turns, clock, stack)
            found[mode] = measure(run, settings, agents, args.conversations)
    for figures in found.values():
        figures["utilisation"] = figures["tokens_per_s"] / found["one turn"]["tokens_per_s"]
    setup = {name: value for name, value in vars(args).items() if name != "quick"}
    print(json.dumps({"settings": setup, "modes": found, "load": os.getloadavg()}, indent=1))


if __name__ == "__main__":
    main()
