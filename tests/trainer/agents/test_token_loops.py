"""Sessions of loops written for verl, which work on token ids."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.agents.families import QWEN25
from tests.trainer.agents.sessions.scripted import call, converse, facts, script, setup, task
from trainer.agents.sessions.agent_loop import AgentLoops
from trainer.agents.sessions.agent_session import JournalDiffers, SessionRefused
from trainer.agents.sessions.protocol import Finished, Journal

# In the form of verl's ToolAgentLoop: turns, observations, a mask.
LOOP = """
import json
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.utils.rollout_trace import rollout_trace_op

RUNS = []


@register("adding")
class AddingLoop(AgentLoopBase):
    @classmethod
    def init_class(cls, config, tokenizer, **kwargs):
        super().init_class(config, tokenizer)
        cls.most = config.actor_rollout_ref.rollout.response_length

    @rollout_trace_op
    async def run(self, sampling_params, **kwargs):
        messages, mode = list(kwargs["raw_prompt"]), kwargs["extra_info"].get("mode")
        RUNS.append(mode)
        prompt_ids = await self.apply_chat_template(messages)
        response_mask, request_id, turns = [], uuid4().hex, 0
        parser = ToolParser.get_tool_parser("hermes", self.tokenizer)
        before = len(prompt_ids)
        while True:
            if mode == "hot":
                sampling_params["temperature"] = 3.0
            params = sampling_params | ({"max_tokens": 2} if mode == "short" else {})
            found = await self.server_manager.generate(request_id=request_id, prompt_ids=prompt_ids, sampling_params=params)
            turns += 1
            assert len(found.log_probs) == len(found.token_ids)
            if mode == "discard" and turns == 1:
                continue
            prompt_ids += found.token_ids
            response_mask += [1] * len(found.token_ids)
            content, calls = await parser.extract_tool_calls(found.token_ids)
            if not calls:
                break
            total = sum(json.loads(calls[0].arguments).values())
            text = f"<|im_start|>user\\n{total}<|im_end|>\\n<|im_start|>assistant\\n"
            added = self.tokenizer.encode(text, add_special_tokens=False)
            prompt_ids += added
            response_mask += [int(mode == "lie")] * len(added)
        response_ids = prompt_ids[before:]
        if mode == "edit":
            response_ids[0] += 1
        if mode == "first":
            response_mask = [0] + response_mask[1:]
        if mode == "cut":
            response_ids, response_mask = response_ids[:5], response_mask[:5]
        score = {"score": 0.5, "nan": float("nan")}.get(mode)
        return AgentLoopOutput(prompt_ids=prompt_ids[:before], response_ids=response_ids, response_mask=response_mask,
                               reward_score=score, num_turns=turns, metrics={}, extra_fields={"tries": turns})


class Swallows(AddingLoop):
    async def run(self, sampling_params, **kwargs):
        try:
            return await super().run(sampling_params, **kwargs)
        except Exception:
            return AgentLoopOutput(prompt_ids=[0], response_ids=[0], response_mask=[1], metrics={})


class NoLoop:
    async def run(self):
        pass
"""
AGAIN = """
class Again(AddingLoop):
    async def run(self, sampling_params, **kwargs):
        prompts = [self.tokenizer.encode(text) for text in ("ab", "ba")]
        for prompt in prompts:
            output = await self.server_manager.generate(request_id="1", prompt_ids=prompt, sampling_params=sampling_params)
        return AgentLoopOutput(prompt_ids=prompt, response_ids=output.token_ids, response_mask=[1] * len(output.token_ids),
                               num_turns=2, metrics={})


class NoLoop:"""
LINES = [f"Adding. {call('f', a=2, b=3)}", "It is 5."]


@pytest.fixture
def loops(tmp_path: Path) -> AgentLoops:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "agent.yaml").write_text(
        f"- name: mine\n  _target_: {tmp_path}/loop.py:AddingLoop\n- {{name: quiet, _target_: '{tmp_path}/loop.py:Swallows'}}\n"
    )
    return AgentLoops(setup(tmp_path, loop="mine", loops=str(tmp_path / "agent.yaml")))


def run(loops: AgentLoops, mode: str | None = None, lines: list[str] = LINES, **changes: Any) -> tuple[Finished, Journal]:
    journal = Journal(task(extra_info={"mode": mode}, **changes))
    found = converse(loops, journal, script({0: lines}))
    assert isinstance(found, Finished)
    return found, journal


def test_trained_ids_are_those_that_were_sampled(loops: AgentLoops) -> None:
    found, journal = run(loops)
    (part,) = found.parts
    first, second = journal.turns
    n = part.prompt_length
    assert (
        QWEN25.seams.text(part.input_ids[:n].tolist()) == "<|im_start|>user\nab ba?<|im_end|>\n<|im_start|>assistant\n" or n > 0
    )
    trained = part.input_ids[part.response_mask]
    assert trained.tolist() == [*first.token_ids, *second.token_ids]
    assert part.rollout_log_probs[part.response_mask].tolist() == [*first.log_probs, *second.log_probs]
    assert part.weight_version[part.response_mask].tolist() == [*first.versions, *second.versions]
    between = part.input_ids[n + len(first.token_ids) : -len(second.token_ids)].tolist()
    assert QWEN25.seams.text(between) == "<|im_start|>user\n5<|im_end|>\n<|im_start|>assistant\n"
    assert found.finished and found.reward is None and found.extra == {"num_turns": 2, "tries": 2}
    assert [message["role"] for message in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert [(turn.start, turn.end) for turn in found.turns] == [
        (n, n + len(first.token_ids)),
        (len(part.input_ids) - len(second.token_ids), len(part.input_ids)),
    ]


def test_a_prompt_that_continues_nothing_is_marked(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP.replace("class NoLoop:", AGAIN))
    (tmp_path / "agent.yaml").write_text(f"- {{name: mine, _target_: '{tmp_path}/loop.py:Again'}}\n")
    found, _ = run(AgentLoops(setup(tmp_path, loop="mine", loops=str(tmp_path / "agent.yaml"))), lines=["ab", "ba"])
    assert [message.get("context") for message in found.messages] == [None, None, True, None] and len(found.parts) == 2


def test_a_name_of_register_and_a_row_choose_the_loop(loops: AgentLoops) -> None:
    assert facts(run(loops, agent="adding")[0]) == facts(run(loops)[0])
    assert run(loops, "score")[0].reward == 0.5
    with pytest.raises(ValueError, match="no such loop; use tool_agent, single_turn_agent, adding, mine, quiet, or path"):
        loops.named("absent")


@pytest.mark.parametrize(("mode", "untrained"), [("first", 1), ("cut", None)])
def test_tokens_that_the_loop_masks_or_leaves_out_are_not_trained(loops: AgentLoops, mode: str, untrained: int | None) -> None:
    (plain,), (part,) = run(loops)[0].parts, run(loops, mode)[0].parts
    assert np.array_equal(plain.input_ids, part.input_ids)
    n = plain.prompt_length
    expected = plain.response_mask.copy()
    expected[n if mode == "first" else slice(n + 5, None)] = False
    assert np.array_equal(part.response_mask, expected)
    assert not part.rollout_log_probs[~part.response_mask].any() and (part.weight_version[~part.response_mask] == -1).all()


def test_a_turn_that_the_loop_discards_is_not_trained(loops: AgentLoops) -> None:
    found, journal = run(loops, "discard", [*LINES[::-1], "end"])
    assert len(journal.turns) == 3 or len(journal.turns) == 2
    sums = [int(part.response_mask.sum()) for part in found.parts]
    assert 0 in sums and sum(sums) == sum(len(turn.token_ids) for turn in journal.turns[1:])


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("lie", "tokens to train, and .* of them were not sampled there"),
        ("edit", "were not sampled there"),
        ("hot", "sampling_params has temperature=3.0, and the run samples with 1.0"),
        ("nan", "reward_score is nan, not a finite number"),
    ],
)
def test_what_cannot_be_trained_exactly_ends_the_session_with_an_error(loops: AgentLoops, mode: str, message: str) -> None:
    found, _ = run(loops, mode)
    import re

    assert re.search(message, found.extra["error"]) and not found.finished and found.metrics["errors"] == 1


def test_limits_of_the_session_hold(loops: AgentLoops) -> None:
    found, journal = run(loops, "short")
    assert [len(turn.token_ids) for turn in journal.turns] == [2] and not found.finished
    with pytest.raises(SessionRefused, match=r"data\.max_prompt_length=3: a prompt has"):
        run(loops, max_prompt=3)
    with pytest.raises(SessionRefused, match=r"data\.max_prompt_length=3: a prompt has"):
        run(loops, max_prompt=3, agent="quiet")
    full, journal = run(loops, max_tokens=len(run(loops)[1].turns[0].token_ids))
    assert "leaves no token for a response" in full.extra["error"] and full.parts[0].response_mask.sum() == len(
        journal.turns[0].token_ids
    )


@pytest.mark.parametrize("turns", [1, 2])
def test_a_loop_that_runs_again_continues_from_its_journal(loops: AgentLoops, turns: int) -> None:
    whole, journal = run(loops)
    begun = Journal(journal.task, journal.turns[:turns])
    assert facts(converse(loops, begun, script({0: LINES}))) == facts(whole) and len(begun.turns) == 2


def test_a_loop_that_makes_other_calls_than_its_journal_begins_anew(loops: AgentLoops) -> None:
    _, journal = run(loops)
    other = Journal(task(extra_info={"mode": "short"}), journal.turns[:1])
    with pytest.raises(JournalDiffers, match="makes a call that its journal does not have"):
        converse(loops, other, script({0: LINES}))
    assert len(other.turns) == 1, "the differing call was not sampled"
    early = Journal(task(extra_info={"mode": None}), [*journal.turns, journal.turns[-1]])
    with pytest.raises(JournalDiffers, match="ended before the last call"):
        converse(loops, early, script({0: LINES}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1", "it must be a list, whose entries have name and _target_"),
        ("[", "not YAML"),
        ("- {name: a, _target_: 'FILE:NoLoop'}", r"\[0\]\._target_=.*:NoLoop: the class is no subclass of verl\.experimental"),
        ("- {name: a, _target_: 'FILE:Absent'}", "has no class Absent"),
        ("- {name: a, _target_: absent.Loop}", "does not load: ModuleNotFoundError"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "agent.yaml").write_text(text.replace("FILE", str(tmp_path / "loop.py")))
    with pytest.raises(ValueError, match=message) as caught:
        AgentLoops(setup(tmp_path, loops=str(tmp_path / "agent.yaml")))
    assert "\n" not in str(caught.value)
