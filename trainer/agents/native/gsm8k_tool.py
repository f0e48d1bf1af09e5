"""Tool that checks answers to a GSM8K question, as verl's of this name."""

from typing import Any

from trainer.agents.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from trainer.rewards.rules import gsm8k

_PENALTY = -0.05
"""Reward of an answer that is not better than the one before it."""


class Gsm8kTool(BaseTool):
    """Scores each submitted answer; the reward of the session is that of the last one. create_kwargs: ground_truth."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        self._sessions: dict[str, _Submissions] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Raises ValueError without a ground truth."""
        assert instance_id is not None, "every session names its instance"
        if ground_truth is None:
            raise ValueError("tools_kwargs: create_kwargs has no ground_truth")
        self._sessions[instance_id] = _Submissions(str(ground_truth))
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        session, answer = self._sessions[instance_id], str(parameters.get("answer", ""))
        before, session.answer = session.score, answer if answer.startswith("#### ") else f"#### {answer}"
        session.score = await self.calc_reward(instance_id)
        text = f"Current parsed answer={answer!r} reward={session.score}"
        return ToolResponse(text=text), 0.0 if session.score > before else _PENALTY, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        session = self._sessions[instance_id]
        return gsm8k.score(session.answer, session.ground_truth, "flexible")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._sessions[instance_id]


class _Submissions:
    def __init__(self, ground_truth: str) -> None:
        self.ground_truth, self.answer, self.score = ground_truth, "", 0.0
