"""Tool loops: verl's rules for turns and budgets, exact rows, journals that repeat a session without user code."""

import copy
import dataclasses
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from configs.validation.agents import LOOPS as NAMES
from tests.trainer.agents.families import QWEN3, QWEN25
from tests.trainer.agents.sessions.scripted import (
    Model,
    call,
    converse,
    facts,
    sampled,
    script,
    setup,
    task,
)  # fmt: skip
from trainer.agents.sessions.agent_loop import LOOPS, AgentLoops
from trainer.agents.sessions.agent_session import SessionRefused
from trainer.agents.sessions.protocol import Finished, Journal, SampledTurn, Wanted
from trainer.agents.sessions.saved_sessions import pack
from trainer.agents.sessions.session_flow import finished_rows
from trainer.data.encoding import parsed
from trainer.rollout.responses import decode_sessions
from workers.batch import Batch


def finish(loops: AgentLoops, *lines: str, model: Model | None = None, **changes: Any) -> Finished:
    found = converse(loops, Journal(task(**changes)), model or script({0: [*lines]}))
    assert isinstance(found, Finished)
    return found


def roles(finished: Finished) -> list[str]:
    return [message["role"] for message in finished.messages]


def text(finished: Finished, part: int = 0) -> str:
    return str(QWEN25.tokenizer.decode(finished.parts[part].input_ids.tolist()))


def test_a_conversation_with_calls_is_one_exact_row(tmp_path: Path) -> None:
    loops, turns = AgentLoops(setup(tmp_path, "tools")), list[SampledTurn]()
    lines = [f"ab\n{call('add', a=1, b=2)}\n{call('later', text='hi')}", call("add", a="x"), "<tool_call>{", "3"]

    def model(wanted: Wanted, turn: int) -> SampledTurn:
        turns.append(sampled(wanted, lines[turn]))
        return turns[-1]

    found = finish(loops, model=model)
    (part,) = found.parts
    assert roles(found) == ["user", *["assistant", "tool", "tool"], *["assistant", "tool"] * 2, "assistant"]
    # Only what the template writes around the sampled ids is added, and only sampled ids are trained, each once.
    assert part.input_ids[part.response_mask].tolist() == [id for turn in turns for id in turn.token_ids.tolist()]
    assert np.array_equal(part.rollout_log_probs[part.response_mask], np.concatenate([turn.log_probs for turn in turns]))
    schemas = [tool.schema for tool in loops.kit.tools]
    assert text(found) == QWEN25.seams.render(parsed(found.messages), schemas, prompt=False).removesuffix("\n")
    assert part.prompt_length == np.flatnonzero(part.response_mask)[0]
    assert found.finished and found.reward is None
    # Three turns of tools, four of the model, and the first prompt. Rewards of calls that ran.
    assert found.extra == {"num_turns": 8, "tool_rewards": [0.25, 0.0], "turn_scores": [], "rollout_reward_scores": {}}
    counts = {name: value for name, value in found.metrics.items() if not name.endswith("seconds")}
    observed = len(part.input_ids) - part.prompt_length - part.response_mask.sum()
    assert counts == {
        "turns": 4, "tokens/sampled": part.response_mask.sum(), "tokens/observed": observed,
        "tool/add/calls": 2, "tool/add/errors": 1, "tool/later/calls": 1, "tool/later/errors": 0,
        "calls/ok": 2, "calls/arguments": 1,
        "calls/malformed": 1,
        "calls/malformed/json": 1,
    }  # fmt: skip


def test_unfinished_turns_and_limits_end_a_session(tmp_path: Path) -> None:
    plain = AgentLoops(setup(tmp_path, "tools"))
    add = call("add", a=1)
    truncated = finish(plain, model=lambda wanted, turn: sampled(wanted, add, reason="length"))
    assert not truncated.finished and roles(truncated) == ["user", "assistant"]
    talk = AgentLoops(setup(tmp_path, "user"))
    truncated = finish(talk, model=lambda wanted, turn: sampled(wanted, "ab", reason="length"))
    assert not truncated.finished and roles(truncated) == ["user", "assistant"]
    for changes, lines, expected, ended in [
        ({"max_assistant_turns": 2}, [add] * 5, 2, False),
        ({"max_assistant_turns": 2}, [add, "end"], 2, True),
        ({"max_user_turns": 1}, [add] * 5, 2, False),
        ({"max_parallel_calls": 1}, [add * 3, "end"], 2, True),
    ]:
        found = finish(AgentLoops(setup(tmp_path, "tools", **changes)), *lines)
        assert (found.metrics["turns"], found.finished) == (expected, ended)
    assert found.metrics["calls/excess"] == 2 and found.metrics["tool/add/calls"] == 1


def test_the_budget_counts_sampled_and_observed_tokens(tmp_path: Path) -> None:
    loops, lines = AgentLoops(setup(tmp_path, "tools")), [call("add", a=1), call("later", text="ab " * 9), "end"]
    whole = finish(loops, *lines)
    (part,) = whole.parts
    longest = len(part.input_ids) - part.prompt_length
    ends = np.flatnonzero(np.diff(part.response_mask.astype(int)) == -1) + 1 - part.prompt_length
    starts = np.flatnonzero(np.diff(part.response_mask.astype(int)) == 1)[1:] + 1 - part.prompt_length
    asked: list[Wanted] = []

    def model(wanted: Wanted, turn: int) -> SampledTurn:
        asked.append(wanted)
        return sampled(wanted, lines[turn])

    for budget in sorted({*range(1, longest, 9), *ends, *(ends + 1), *starts, *(starts + 1), longest}):
        asked.clear()
        found = finish(loops, model=model, max_tokens=budget)
        (short,) = found.parts
        n = len(short.input_ids) - short.prompt_length
        assert short.input_ids.tolist() == part.input_ids[: len(short.input_ids)].tolist() and n <= budget
        assert short.response_mask[-1]  # what no turn follows is no part of the row
        for wanted in asked:
            assert wanted.max_tokens == budget - (len(wanted.prompt_ids) - short.prompt_length) > 0
        # An observation that leaves no room for a token is left out; otherwise every token of the budget is used.
        within = [end for end, start in zip(ends, starts, strict=True) if end <= budget <= start]
        assert n == (within[0] if within else budget)
        assert found.finished == (budget == longest)


def test_the_length_of_the_engine_limits_a_conversation_as_the_budget_does(tmp_path: Path) -> None:
    """A request that the engine refuses would end the run."""
    loops, lines = AgentLoops(setup(tmp_path, "tools")), [call("add", a=1), call("later", text="ab " * 9), "end"]
    (part,) = finish(loops, *lines).parts
    longest = len(part.input_ids) - part.prompt_length
    asked: list[Wanted] = []

    def model(wanted: Wanted, turn: int) -> SampledTurn:
        asked.append(wanted)
        return sampled(wanted, lines[turn])

    ends = np.flatnonzero(np.diff(part.response_mask.astype(int)) == -1) + 1 - part.prompt_length
    for budget in sorted({*range(1, longest + 1, 7), *ends.tolist()}):
        asked.clear()
        by_budget, by_length = ({"max_tokens": budget}, {"max_length": part.prompt_length + budget})
        assert facts(finish(loops, model=model, **by_length)) == facts(finish(loops, model=model, **by_budget))
        assert all(len(wanted.prompt_ids) + wanted.max_tokens <= part.prompt_length + budget for wanted in asked)


def test_the_text_of_a_session_in_several_rows_is_that_of_all_its_turns(tmp_path: Path) -> None:
    lines = ["<think>\nab\n</think>\n\none", "<think>\nba\n</think>\n\ntwo"]
    texts = {}
    for family in (QWEN3, QWEN25):
        loops = AgentLoops(setup(tmp_path, "user", family=family))
        found = finish(loops, model=lambda wanted, turn, family=family: sampled(wanted, lines[turn], family=family))
        rows = finished_rows(1, found, seed=1, restarted=False)
        texts[len(rows)] = decode_sessions(rows, family.tokenizer)
    (whole,), (first, last) = texts[1], texts[2]
    replies = [message["content"] for message in found.messages if message["role"] == "user"][1:]
    shown = [line.replace("<think>", "").replace("</think>", "") for line in lines]  # special tokens of the first
    assert last == f"{shown[0]}\n{replies[0]}\n{shown[1]}\n{replies[1]}" and replies[1]
    assert shown[0] in first and shown[1] not in first
    assert all(text in whole for text in (*lines, replies[0]))


def test_a_prompt_of_its_own_between_turns_is_no_part_of_the_text() -> None:
    """A loop on token ids may summarise, and ask again with another prompt."""
    encode = QWEN25.seams.ids
    (first, one), (second, two) = [(encode(prompt), encode(turn)) for prompt, turn in (("ab 1?", "b a"), ("ba 2?", "a b"))]
    turn = {"role": "assistant", "content": "x", "sampled": True}
    messages = [{"role": "user", "content": "ab 1?"}, turn, {"role": "tool", "content": "ba 2?", "context": True}, turn]
    messages.insert(2, {"role": "user", "content": [{"type": "text", "text": "parts"}]})
    places = [(0, len(first), len(first + one), 0, 0, 9), (1, len(second), len(second + two), 1, 0, 9)]
    rows = Batch(
        torch.tensor([len(first + one), len(second + two)]),
        {"input_ids": torch.tensor(first + one + second + two)},
        {"part": torch.tensor([0, 1]), "prompt_length": torch.tensor([len(first), len(second)])},
        {"session": [{"messages": messages, "turns": places}] * 2},
    )
    assert decode_sessions(rows, QWEN25.tokenizer) == ["b a", "b a\nparts\na b"]


def test_a_prompt_that_is_too_long_or_refused_is_an_error_of_the_run(tmp_path: Path) -> None:
    loops = AgentLoops(setup(tmp_path, "tools"))
    n = finish(loops, "end").parts[0].prompt_length
    assert finish(loops, "end", max_prompt=n).finished
    with pytest.raises(SessionRefused, match=rf"^data.max_prompt_length={n - 1}: a prompt has {n} tokens with its tools [^\n]*$"):
        finish(loops, "end", max_prompt=n - 1)
    tokenizer = copy.deepcopy(QWEN25.tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(SessionRefused, match=r"^the chat template rejects it: no; [^\n]*$"):
        finish(AgentLoops(dataclasses.replace(setup(tmp_path), tokenizer=tokenizer)), "end")
    with pytest.raises(ValueError, match=r"default_agent_loop=none: no such loop; use tool_agent, single_turn_agent, or path"):
        AgentLoops(setup(tmp_path, loop="none"))


def test_a_single_turn_has_neither_tools_nor_calls(tmp_path: Path) -> None:
    found = finish(AgentLoops(setup(tmp_path, "tools", "user")), call("add", a=1), agent="single_turn_agent")
    assert roles(found) == ["user", "assistant"] and found.finished and found.extra == {"num_turns": 2}
    assert "add" not in QWEN25.tokenizer.decode(found.parts[0].input_ids[: found.parts[0].prompt_length].tolist())


def test_a_simulated_user_replies_until_the_end(tmp_path: Path) -> None:
    loops = AgentLoops(setup(tmp_path, "tools", "user"))
    lines = ["one", call("add", a=4), "two", "three"]
    info = {"interaction_kwargs": {"name": "teacher", "patience": 3}}
    found = finish(loops, *lines, extra_info=info)
    assert roles(found) == ["user", "assistant", "user", "assistant", "tool", "assistant", "user", "assistant", "user"]
    assert found.finished and found.extra == {
        "num_turns": 9, "tool_rewards": [1.0], "turn_scores": [1.0, 0.5, 0.0],
        "rollout_reward_scores": {"user_turn_rewards": [1.0, 0.5, 0.0]},
    }  # fmt: skip
    failed = finish(loops, *lines, extra_info={"interaction_kwargs": {"patience": 8}})
    assert failed.extra["error"] == "interaction teacher: ValueError: no user (user.py:15)" and failed.metrics["turns"] == 1
    with pytest.raises(SessionRefused, match=r"interaction_kwargs.name=x in data source test: .* has teacher$"):
        finish(loops, extra_info={"interaction_kwargs": {"name": "x"}})


def test_tools_kwargs_reach_the_instance_and_its_reward_the_reward_function(tmp_path: Path) -> None:
    info = {"tools_kwargs": {"count": {"create_kwargs": {"start": 6}}}}
    found = finish(AgentLoops(setup(tmp_path, "stateful")), call("count", by=2), extra_info=info)
    assert found.messages[2]["content"] == "sum 8" and found.extra["rollout_reward_scores"] == {"count": 1.0}


def test_a_template_that_drops_thinking_splits_the_session(tmp_path: Path) -> None:
    loops = AgentLoops(setup(tmp_path, "user", family=QWEN3))
    lines = ["<think>\nab\n</think>\n\none", "<think>\nba\n</think>\n\ntwo"]
    found = finish(loops, model=lambda wanted, turn: sampled(wanted, lines[turn], family=QWEN3))
    assert len(found.parts) == 2 and found.metrics["breaks/template"] == 1
    assert sum(part.response_mask.sum() for part in found.parts) == found.metrics["tokens/sampled"]
    assert [message.get("reasoning_content") for message in found.messages] == [None, "ab", None, "ba", None]
    with pytest.raises(SessionRefused, match=r"^on_break=refuse: "):
        loops = AgentLoops(setup(tmp_path, "user", family=QWEN3, on_break="refuse"))
        finish(loops, model=lambda wanted, turn: sampled(wanted, lines[turn], family=QWEN3))


@pytest.mark.parametrize("family", [QWEN25, QWEN3])
def test_each_turn_has_its_place_in_the_rows(family: Any, tmp_path: Path) -> None:
    loops = AgentLoops(setup(tmp_path, "user", family=family))
    lines, calls = ["<think>\nab\n</think>\n\none", "<think>\nba\n</think>\n\ntwo"], list[Wanted]()

    def model(wanted: Wanted, turn: int) -> SampledTurn:
        calls.append(wanted)
        return sampled(wanted, lines[turn], family=family)

    found = finish(loops, model=model)
    assert len(found.parts) == (2 if family is QWEN3 else 1) and len(found.turns) == len(calls) == 2
    for place, wanted, turn in zip(found.turns, calls, lines, strict=True):
        ids = found.parts[place.part].input_ids
        assert np.array_equal(ids[: place.start], wanted.prompt_ids)
        assert np.array_equal(ids[place.start : place.end], sampled(wanted, turn, family=family).token_ids)
        assert found.parts[place.part].response_mask[place.start : place.end].all()
        assert (place.key, place.ordinal, place.max_tokens) == (wanted.key, wanted.ordinal, wanted.max_tokens)


def test_messages_have_marks_for_people(tmp_path: Path) -> None:
    """Only in the result: neither the template nor user code sees them."""
    marks = ("sampled", "truncated", "status", "reward")

    def marked(found: Finished) -> list[dict[str, Any]]:
        return [{name: message[name] for name in marks if name in message} for message in found.messages]

    loops = AgentLoops(setup(tmp_path, "tools"))
    assert marked(finish(loops, f"{call('add', a=1)}{call('add', a='x')}", "end")) == [
        {}, {"sampled": True}, {"status": "ok", "reward": 0.25}, {"status": "arguments"}, {"sampled": True},
    ]  # fmt: skip
    cut = finish(loops, model=lambda wanted, turn: sampled(wanted, "ab", reason="length"))
    assert marked(cut) == [{}, {"sampled": True, "truncated": True}]
    talk = AgentLoops(setup(tmp_path, "user"))
    assert marked(finish(talk, "one", "one")) == [
        {}, {"sampled": True, "reward": 0.5}, {}, {"sampled": True, "reward": 0.0}, {},
    ]  # fmt: skip
    (tmp_path / "environment.py").write_text(
        "from trainer.agents.environments import Environment\nclass Own(Environment):\n    def reset(self, task):\n"
        "        return [{'role': role, 'content': 'a'} for role in ('user', 'assistant', 'user')]\n"
        "    def step(self, message):\n        return 'again', -0.5, message['content'] == 'two', {}\n"
    )
    found = finish(AgentLoops(setup(tmp_path, environment=f"{tmp_path}/environment.py:Own")), "one", "two")
    assert marked(found) == [*[{}] * 3, {"sampled": True, "reward": -0.5}, {}, {"sampled": True, "reward": -0.5}, {}]
    (tmp_path / "broken.py").write_text(
        "from trainer.agents.environments import Environment\nclass Own(Environment):\n    def reset(self, task):\n"
        "        raise RuntimeError('boom')\n    def step(self, message):\n        return []\n"
    )
    broken = finish(AgentLoops(setup(tmp_path, environment=f"{tmp_path}/broken.py:Own")))
    assert "boom" in broken.extra["error"] and roles(broken) == ["user"] and not broken.parts[0].response_mask.any()
    limited = setup(tmp_path, environment=f"{tmp_path}/environment.py:Own", max_user_turns=1)
    assert finish(AgentLoops(limited), *["one"] * 5).metrics["turns"] == 2, "the reply between them is answered"
    (tmp_path / "own.py").write_text(
        "async def run(session):\n    await session.sample()\n    assert 'sampled' not in session.messages[-1]\n"
        "    session.messages[-1] = {**session.messages[-1], 'content': 'changed'}\n    await session.sample()\n"
    )
    own = finish(AgentLoops(setup(tmp_path, loop=f"{tmp_path}/own.py:run")), "one", "two")
    assert marked(own) == [{}, {}, {"sampled": True}] and "error" not in own.extra, "the text there is not what was sampled"


OWN = """
import asyncio

async def run(session):
    assert asyncio.get_running_loop() is not session._home
    first = await session.sample()
    if first.message["content"] == "raise":
        raise KeyError("own")
    if first.message["content"] == "text":
        return "high"
    if first.message["content"] == "number":
        session.extra |= {"good": 1, "bad": session.tree}
        session.messages.append({"role": "user", "content": {1, 2}})
        return 0.5
    async def number():
        return [3]
    async def nothing(found):
        pass
    (length,) = await session.outcome(number, nothing)
    session.messages.append({"role": "user", "content": "more"})
    await session.sample()
    session.finished = True
    session.extra["length"] = length
    return 0.5
"""


def test_a_loop_of_the_user_runs_and_its_exceptions_end_its_session_alone(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    loops = AgentLoops(setup(tmp_path, loop=f"{tmp_path}/own.py:run"))
    journal = Journal(task())
    found = converse(loops, journal, script({0: ["one", "two"]}))
    assert isinstance(found, Finished) and (found.reward, found.extra, found.finished) == (0.5, {"length": 3}, True)
    assert facts(found) == facts(converse(loops, journal, script({})))  # type: ignore[arg-type]
    raised, wrong = finish(loops, "raise"), finish(loops, "text")
    assert raised.extra == {"error": "KeyError: 'own' (own.py:8)"} and not raised.finished and raised.parts[0].response_mask.any()
    assert wrong.extra["error"].startswith("ValueError: the reward is 'high', not a finite number")
    other = finish(loops, "number")
    assert other.extra.pop("error").startswith("ValueError: extra['bad'], messages[2] of the session must be JSON")
    assert other.extra == {"good": 1} and [message["role"] for message in other.messages] == ["user", "assistant"]
    pack([finished_rows(1, other, seed=1, restarted=False)], [])
    with pytest.raises(SessionRefused, match=r"data.max_prompt_length=1:"):
        finish(loops, "one", max_prompt=1)


def lines_of(rng: Random) -> list[str]:
    """A random session: calls of all kinds, several at once, malformed ones, words."""
    kinds = [
        lambda: call("add", a=rng.randrange(9)),
        lambda: call("count", by=rng.randrange(9)),
        lambda: f"ab {call('count', by=1)}\n{call('add', a=rng.randrange(9), b=2)}",
        lambda: call("harm", how=rng.choice(["raise", "ok"])),
        lambda: rng.choice(["<tool_call>{", call("none"), call("add", a="x")]),
        lambda: rng.choice(["ab", "ba ba"]),
    ]
    return [rng.choice(kinds)() for _ in range(rng.randrange(1, 6))]


@pytest.mark.parametrize("seed", range(8))
def test_a_session_that_is_repeated_at_any_message_is_bitwise_the_same_and_calls_no_function_again(
    tmp_path: Path, seed: int
) -> None:
    rng = Random(seed)
    files = ["tools", "stateful", *(["user"] if seed % 2 else [])]
    loops, lines = AgentLoops(setup(tmp_path, *files)), lines_of(rng)
    given = task(max_tokens=rng.choice([150, 4_000]), extra_info={"interaction_kwargs": {"patience": 3}})
    model = script({0: lines})
    calls = sys.modules[kit_module(loops)].CALLS
    whole = Journal(given)
    expected = converse(loops, whole, model)
    assert isinstance(expected, Finished)
    made = len(calls)
    for most in range(len(whole.turns) + 1):
        calls.clear()
        part = Journal(given)
        converse(loops, part, model, most=most)
        # As a checkpoint may have it: the answer to the last turn is lost, or it is there.
        for lost in (False, True):
            journal = copy.deepcopy(part)
            if lost and most < len(whole.turns):
                journal.turns.append(whole.turns[most])
            before, known = len(calls), len(journal.outcomes)
            again = converse(loops, journal, model)
            assert isinstance(again, Finished) and facts(again) == facts(expected)
            assert timeless(journal.outcomes) == timeless(whole.outcomes)
            assert [turn.token_ids.tolist() for turn in journal.turns] == [turn.token_ids.tolist() for turn in whole.turns]
            # Functions that the journal knows ran before, and not again.
            assert len(calls) - before == made - adds(whole.outcomes[:known])
    ended = converse(loops, whole, model)
    assert isinstance(ended, Finished) and facts(ended) == facts(expected) and not ended.outcomes


def kit_module(loops: AgentLoops) -> str:
    return str(next(tool for tool in loops.kit.tools if tool.name == "add").function.__module__)  # type: ignore[union-attr]


def adds(outcomes: list[Any]) -> int:
    results = [result for outcome in outcomes for result in outcome.get("tools", ())]
    return sum(result["name"] == "add" and result["status"] == "ok" for result in results)


def timeless(outcomes: list[Any]) -> Any:
    return json.loads(json.dumps(outcomes), object_hook=lambda item: {k: v for k, v in item.items() if k != "seconds"})


def test_a_journal_of_other_settings_is_refused(tmp_path: Path) -> None:
    journal = Journal(task())
    converse(AgentLoops(setup(tmp_path, "tools")), journal, script({0: [call("add", a=1)]}))
    with pytest.raises(SessionRefused, match="turn 0 of its journal answers another call"):
        converse(AgentLoops(setup(tmp_path, "tools", "stateful")), journal, script({}))
    with pytest.raises(SessionRefused, match="ended before its journal"):
        converse(AgentLoops(setup(tmp_path, "tools", max_assistant_turns=1)), journal, script({}))


def test_names_of_loops_are_those_that_the_configuration_allows() -> None:
    assert tuple(LOOPS) == NAMES
