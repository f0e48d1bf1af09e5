"""Interaction that asks for another answer to a GSM8K question until it is right, as verl's of this name."""

from typing import Any

from trainer.agents.interactions import BaseInteraction
from trainer.rewards.rules import gsm8k


class Gsm8kInteraction(BaseInteraction):
    """Scores the last turn; a right answer ends the conversation. interaction_kwargs: ground_truth."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._truths: dict[str, str] = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any) -> str:
        """Raises ValueError without a ground truth."""
        assert instance_id is not None, "every session names its instance"
        if ground_truth is None:
            raise ValueError("interaction_kwargs has no ground_truth")
        self._truths[instance_id] = str(ground_truth)
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        answer = next((message["content"] for message in reversed(messages) if message["role"] == "assistant"), "")
        score = gsm8k.score(answer, self._truths[instance_id])
        text = "Your answer is correct." if score else "Your answer is not correct. Think again, and give another one."
        return score == 1.0, text, score, {}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self._truths[instance_id]
