"""Conversations about a GSM8K question."""

import asyncio
from pathlib import Path

import pytest

from trainer.agents.interactions import InteractionSession, UserReply
from trainer.agents.isolation import SessionLoop
from trainer.agents.native.gsm8k_interaction import Gsm8kInteraction
from trainer.agents.verl_modules import load_interactions


def converse(file: Path, kwargs: dict[str, str], *turns: str) -> list[UserReply]:
    async def main() -> list[UserReply]:
        loop, interaction = SessionLoop(), load_interactions(str(file), "interaction_config_path")["gsm8k"]
        assert isinstance(interaction, Gsm8kInteraction)
        async with InteractionSession(interaction, loop, session="s", kwargs=kwargs, seconds=60.0) as session:
            found = [await session.reply([{"role": "assistant", "content": text}]) for text in turns]
        loop.close()
        assert interaction._truths == {}
        return found

    return asyncio.run(main())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """In verl's form, with the name of verl's class."""
    path = tmp_path / "interaction.yaml"
    path.write_text(
        "interaction: [{name: gsm8k, class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction, config: {}}]\n"
    )
    return path


def test_a_conversation_continues_until_the_answer_is_right(file: Path) -> None:
    replies = converse(file, {"ground_truth": "1,800"}, "4", "#### 4", "#### 1800")
    assert [(reply.done, reply.score) for reply in replies] == [(False, 0.0), (False, 0.0), (True, 1.0)]
    assert "not correct" in replies[0].text and replies[2].text == "Your answer is correct."


def test_a_row_without_ground_truth_ends_with_an_error(file: Path) -> None:
    (reply,) = converse(file, {}, "#### 4")
    assert reply.done and reply.error is not None and "interaction_kwargs has no ground_truth" in reply.error
