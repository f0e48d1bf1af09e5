"""Agent loop that gives each response a fixed length: max_tokens of its request, with ignore_eos.

RIVAL_LENGTHS names the file with the lengths.
"""

import json
import os
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

with open(os.environ["RIVAL_LENGTHS"]) as file:
    LENGTHS: list[int] = json.load(file)


class ForcedLengths(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        answer = row["extra_info"]["index"] * self.rollout_config.n + row["session_id"]
        return await super().run(sampling_params | {"max_tokens": LENGTHS[answer]}, **row)
