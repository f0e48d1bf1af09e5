"""Agent program: a rollout of an environment of verifiers 0.3, unmodified, in an interpreter of its own.

    python -m venv verifiers && verifiers/bin/pip install 'verifiers==0.3.1'
    export TANDEM_VERIFIERS_PYTHON=verifiers/bin/python
    python -m trainer.main_ppo ... actor_rollout_ref.rollout.agent.program=examples/agent_verifiers.py:run

Its requirements conflict with those of engines, so ``run`` starts this file in that interpreter, where it is ``main``.
"""

import json
import os
import subprocess
import sys
from typing import Any


def run(base_url: str, api_key: str, task: Any) -> float:
    """Return the score of the environment's rubric."""
    row = {"question": task.prompt[-1]["content"], "answer": str(task.ground_truth)}
    client = task.extra_info.get("client", "openai_chat_completions")
    command = [os.environ["TANDEM_VERIFIERS_PYTHON"], __file__, base_url, client, json.dumps(row)]
    ended = subprocess.run(command, env=os.environ | {"KEY": api_key, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(ended.stderr[-300:])
    return float(ended.stdout.rpartition("reward ")[2])


def add(a: int, b: int = 1) -> int:
    """Add.

    Args:
        a: A number.
        b: Another.
    """
    return a + b


async def says(completion: Any, answer: str) -> float:
    return float(answer in str(completion[-1].content))


async def main(base_url: str, client: str, row: str) -> None:
    """One rollout of the environment on the row."""
    import verifiers as vf
    from datasets import Dataset

    env = vf.ToolEnv(dataset=Dataset.from_list([json.loads(row)]), tools=[add], rubric=vf.Rubric(funcs=[says]), max_turns=4)
    found = await env.evaluate(
        client=vf.ClientConfig(client_type=client, api_key_var="KEY", api_base_url=f"{base_url}/v1"),
        model="policy",
        sampling_args={"temperature": 1.0, "max_tokens": 64},
        num_examples=1,
        rollouts_per_example=1,
    )
    (output,) = found["outputs"]
    if output["error"] is not None:
        raise RuntimeError(str(output["error"]))
    print("reward", output["reward"])


if __name__ == "__main__":
    import asyncio

    asyncio.run(main(*sys.argv[1:]))
