"""Loops of sessions by name: one turn, tools with a simulated user, an environment, and those of the user's files."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from trainer.agents.environments import EnvironmentSession
from trainer.agents.formats import MalformedCall, ToolCall
from trainer.agents.interactions import InteractionSession, UserReply
from trainer.agents.sessions.agent_kit import KEY, AgentKit, AgentSetup
from trainer.agents.sessions.agent_session import AgentLoop, AgentSession, SessionEnded, SessionRefused
from trainer.agents.sessions.protocol import Task
from trainer.agents.sessions.token_calls import token_agent
from trainer.agents.token_loops import load_token_loops
from trainer.agents.toolbox import ToolBox, ToolLimits, ToolResult
from trainer.rewards.scoring import finite
from trainer.run.user_code import load_function

_T = TypeVar("_T")


async def single_turn_agent(session: AgentSession) -> None:
    """One turn of the model."""
    reply = await session.sample()
    session.finished = reply is not None and not reply.truncated
    session.extra["num_turns"] = session.answered + 1


async def tool_agent(session: AgentSession) -> None:
    """verl's ToolAgentLoop: turns of the model, their calls and a simulated user's replies, until there is neither."""
    config, task, extra = session.kit.config, session.task, session.extra
    limits = ToolLimits(
        config.max_parallel_calls, config.max_tool_response_length, config.tool_response_truncate_side, config.tool_timeout
    )
    name, kwargs = f"session_{task.id}", task.extra_info.get("tools_kwargs") or {}
    box = ToolBox(session.kit.tools, limits, session=name, loop=session.user_code, kwargs=kwargs)
    scores: list[float] = []
    replies = 0  # of tools, all of a turn together, and of the user
    try:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(box)
            user = _interaction(session, name)
            if user is not None:
                await stack.enter_async_context(user)
            while (reply := await session.sample(box.schemas)) is not None:
                last = session.answered == config.max_assistant_turns or replies == config.max_user_turns
                if reply.truncated or last or session.is_full or not (reply.calls or user):
                    session.finished = not reply.truncated and not reply.calls and user is None
                    break
                replies += 1
                if reply.calls:
                    for result in await _results(session, box, reply.calls):
                        session.messages.append(result.message())
                        reward = {"reward": result.reward} if result.reward else {}
                        session.mark(session.messages[-1], status=result.status, **reward)
                    continue
                assert user is not None
                answer = await _user_reply(session, user)
                if answer.score is not None:
                    scores.append(answer.score)
                    session.mark(reply.message, reward=answer.score)
                if answer.error is not None:
                    raise SessionEnded(answer.error)
                session.messages.append({"role": "user", "content": answer.text})
                if answer.done:
                    session.finished = True
                    break
    finally:
        rewards: dict[str, Any] = {**box.rewards} | ({"user_turn_rewards": scores} if session.kit.interactions else {})
        extra["num_turns"] = session.answered + replies + 1
        extra["tool_rewards"] = box.data.tool_rewards
        extra["turn_scores"] = scores
        extra["rollout_reward_scores"] = rewards
        session.metrics.update({f"calls/{status}": number for status, number in box.counts.items()})


def _interaction(session: AgentSession, name: str) -> InteractionSession | None:
    interactions = session.kit.interactions
    if not interactions:
        return None
    kwargs: Mapping[str, Any] = session.task.extra_info.get("interaction_kwargs") or {}
    chosen = kwargs.get("name", next(iter(interactions)) if len(interactions) == 1 else None)
    if chosen not in interactions:
        raise SessionRefused(
            f"extra_info.interaction_kwargs.name={chosen} in data source {session.task.data_source}: no such interaction; "
            f"{KEY}.multi_turn.interaction_config_path has {', '.join(interactions)}"
        )
    seconds = session.kit.config.tool_timeout
    return InteractionSession(interactions[chosen], session.user_code, session=name, kwargs=kwargs, seconds=seconds)


async def _results(session: AgentSession, box: ToolBox, calls: Sequence[ToolCall | MalformedCall]) -> list[ToolResult]:
    async def make() -> Any:
        return {"tools": [asdict(result) for result in await box.run(calls, session.messages)]}

    async def repeat(found: Any) -> None:
        await box.repeat(calls, [ToolResult(**result) for result in found["tools"]], session.messages)

    found = await session.outcome(make, repeat)
    results = [ToolResult(**result) for result in found["tools"]]
    for result in results:
        if result.status in ("ok", "arguments", "timeout", "error"):  # others name no tool
            session.metrics[f"tool/{result.name}/calls"] += 1
            session.metrics[f"tool/{result.name}/errors"] += result.status != "ok"
            session.metrics[f"tool/{result.name}/seconds"] += result.seconds
    return results


async def _user_reply(session: AgentSession, user: InteractionSession) -> UserReply:
    async def make() -> Any:
        start = time.monotonic()
        reply = await user.reply(session.messages)
        return {"user": asdict(reply), "seconds": time.monotonic() - start}

    async def repeat(found: Any) -> None:
        await user.repeat(session.messages)

    found = await session.outcome(make, repeat)
    session.metrics["interaction/seconds"] += found["seconds"]
    return UserReply(**found["user"])


async def environment_agent(session: AgentSession) -> float | None:
    """Turns of the model and replies of an environment; returns the sum of its rewards, also if a limit ends the session."""
    config = session.kit.config
    assert session.kit.environment is not None, "AgentKit chooses this loop with an environment"
    async with EnvironmentSession(session.kit.environment, session.user_code, seconds=config.tool_timeout) as environment:
        try:
            messages = await _of_environment(session, environment, lambda: environment.reset(session.task))
            # Without them the session ends with the prompt of its row.
            if not (done := environment.error is not None):
                session.messages[:] = messages
            while not done and (reply := await session.sample(environment.tools or None)) is not None:
                # A turn that was truncated has no reward either: the environment never sees it.
                if reply.truncated:
                    break
                step = await _of_environment(session, environment, partial(environment.step, reply.message))
                assert isinstance(step.messages, list), "a text is a user's message"
                if environment.error is None:
                    session.mark(reply.message, reward=step.reward)
                session.messages += step.messages
                done = session.finished = step.done and environment.error is None
                # A turn of the user is between two of the model: the last reply of the environment is none.
                n_turns, n_between = session.answered, session.answered - 1
                reached = n_turns == config.max_assistant_turns or n_between == config.max_user_turns
                if environment.error is not None or reached or session.is_full:
                    break
        finally:
            session.extra["num_turns"] = 2 * session.answered + 1
            session.extra["turn_scores"] = environment.rewards
            session.extra["environment"] = environment.info
            session.metrics.update({f"environment/{kind}": number for kind, number in environment.counts.items()})
        if environment.error is not None:
            raise SessionEnded(environment.error)
        return math.fsum(environment.rewards)


async def _of_environment(session: AgentSession, environment: EnvironmentSession, call: Callable[[], Awaitable[_T]]) -> _T:
    """Result of a call of the environment, from the journal or live."""
    found: list[_T] = []

    async def make() -> Any:
        start = time.monotonic()
        found.append(await call())
        session.metrics["environment/seconds"] += time.monotonic() - start
        return environment.outcome

    async def repeat(outcome: Any) -> None:
        environment.repeat([outcome])
        found.append(await call())

    await session.outcome(make, repeat)
    return found[0]


LOOPS: Mapping[str, AgentLoop] = {"tool_agent": tool_agent, "single_turn_agent": single_turn_agent}


class AgentLoops:
    """The loops that the rows and the configuration may name, and the kit of their sessions."""

    def __init__(self, setup: AgentSetup) -> None:
        """Load the files of the user. Raises ValueError, one line, for one that does not load, or an unknown format or loop."""
        self.kit = AgentKit(setup)
        self._default = setup.agent.default_agent_loop or "tool_agent"
        self._own: dict[str, AgentLoop] = {}
        if (path := setup.agent.agent_loop_config_path) is not None:
            makers = load_token_loops(path, f"{KEY}.agent.agent_loop_config_path")
            self._own = {name: token_agent(make, setup) for name, make in makers.items()}
        self.named(self._default)

    def of(self, task: Task) -> AgentLoop:
        """The loop of a task. Raises ValueError, one line, if its row names one that does not exist."""
        chosen = task.agent or self._default
        return environment_agent if chosen == "tool_agent" and self.kit.environment is not None else self.named(chosen)

    def named(self, name: str) -> AgentLoop:
        """The loop of a name in agent_loop_config_path or LOOPS, or of a user's function: path/to/file.py:function.

        Raises ValueError, one line.
        """
        if name in LOOPS and name not in self._own:
            return LOOPS[name]
        path, colon, function = name.rpartition(":")
        if name not in self._own:
            if not colon:
                there = ", ".join([*LOOPS, *self._own])
                raise ValueError(f"{KEY}.agent.default_agent_loop={name}: no such loop; use {there}, or path/to/file.py:function")
            self._own[name] = _isolated(load_function(path, function, f"{KEY}.agent.default_agent_loop={name}"))
        return self._own[name]


def _isolated(function: AgentLoop) -> AgentLoop:
    """A user's loop, run in the thread of its session: it may block, and raise anything."""

    async def checked(session: AgentSession) -> float | None:
        try:
            reward = await function(session)
        finally:
            wrong = _take_out(session)
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)} of the session must be JSON, for checkpoints; convert numbers of NumPy with int()"
            )
        number = None if reward is None else finite(reward)
        if reward is not None and number is None:
            raise ValueError(f"the reward is {reward!r:.60}, not a finite number")
        return number

    async def run(session: AgentSession) -> float | None:
        found: float | None = await session.user_code.run(checked, session, seconds=math.inf)
        return found

    return run


def _take_out(session: AgentSession) -> list[str]:
    """Take what is no JSON, as which a checkpoint keeps them, out of ``extra`` and the messages; returns their places."""
    wrong = [f"extra[{name!r}]" for name, value in session.extra.items() if not _is_json(value)]
    wrong += [f"messages[{i}]" for i, message in enumerate(session.messages) if not _is_json(message)]
    session.extra = {name: value for name, value in session.extra.items() if _is_json(value)}
    session.messages[:] = [message for message in session.messages if _is_json(message)]
    return wrong


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
