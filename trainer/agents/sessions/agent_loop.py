"""Sessions in an agent process: what a loop may do, the tool loop, and the result of a session.

Problem: a session must continue after a crash, and at a resume, exactly where it was, and user code is neither deterministic nor
cheap. Idea: a loop is a function of two kinds of facts, turns of the model and outcomes of user code. Both are journaled in
order. A session with a journal runs the same loop, which gets its facts from the journal as long as it has any; rendering,
tokenising and parsing are repeated, and are deterministic.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial, reduce
from itertools import accumulate
from operator import or_
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from configs.load import untyped
from configs.schema.agents import AgentConfig, MultiTurnConfig
from trainer.agents.environments import EnvironmentSession, load_environment, restoration
from trainer.agents.formats import Format, MalformedCall, ToolCall, call_format, opens_thinking, parse_turn
from trainer.agents.interactions import InteractionSession, UserReply
from trainer.agents.isolation import SessionLoop, UserCodeError
from trainer.agents.messages import Message
from trainer.agents.sessions.protocol import Finished, Journal, Part, SampledTurn, Settled, TurnPlace, Wanted
from trainer.agents.token_loops import AgentLoopOutput, AsyncLLMServerManager, TokenOutput, load_token_loops
from trainer.agents.toolbox import ToolBox, ToolLimits, ToolResult
from trainer.agents.tools import AnyTool
from trainer.agents.tree import BrokenConversation, Call, ConversationTree, Row
from trainer.agents.verl_modules import load_function_tools, load_interactions, load_tools, unique
from trainer.data.encoding import Refused
from trainer.data.seam import Seams
from trainer.rewards.scoring import finite
from trainer.run.user_code import load_function

KEY = "actor_rollout_ref.rollout"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class AgentSetup:
    """What an agent process is started with. template_kwargs: of the chat template. run: configuration, for loops of verl."""

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: dict[str, Any]
    multi_turn: MultiTurnConfig
    agent: AgentConfig
    run: dict[str, Any] = field(default_factory=dict)


class AgentKit:
    """What the sessions of a process share: tokenizer, tools, interactions, call format. Loads the files of the user."""

    def __init__(self, setup: AgentSetup) -> None:
        """Raises ValueError, one line, for a file that does not load, or an unknown format or loop."""
        config = self.config = setup.multi_turn
        self.seams = Seams(setup.tokenizer, setup.template_kwargs)
        self.default_loop = setup.agent.default_agent_loop or "tool_agent"
        self.format: Format = call_format(config.format)
        self.tools: list[AnyTool] = []
        self.interactions: dict[str, Any] = {}
        if config.tool_config_path is not None:
            self.tools += load_tools(config.tool_config_path, f"{KEY}.multi_turn.tool_config_path")
        if config.function_tool_path is not None:
            self.tools += load_function_tools(config.function_tool_path, f"{KEY}.multi_turn.function_tool_path")
        unique(self.tools, f"{KEY}.multi_turn.function_tool_path")
        if config.interaction_config_path is not None:
            self.interactions = load_interactions(config.interaction_config_path, f"{KEY}.multi_turn.interaction_config_path")
        self.environment = None
        if config.environment is not None:
            self.environment = load_environment(config.environment, f"{KEY}.multi_turn.environment")
        self._own: dict[str, AgentLoop] = {}
        if (path := setup.agent.agent_loop_config_path) is not None:
            makers = load_token_loops(path, f"{KEY}.agent.agent_loop_config_path")
            self._own = {name: token_agent(make, setup) for name, make in makers.items()}
        self.loop(self.default_loop)

    @property
    def continues(self) -> bool:
        """Whether sessions can be continued from their journals, in another process."""
        return self.environment is None or restoration(self.environment) != "opaque"

    def loop(self, name: str) -> AgentLoop:
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


@dataclass(frozen=True, slots=True)
class Reply:
    """A sampled turn as a loop gets it. calls: none if the turn was truncated."""

    message: Message
    calls: tuple[ToolCall | MalformedCall, ...]
    truncated: bool


class SessionEnded(Exception):
    """The session ends here with what it has; the text is the reason, one line."""


class JournalDiffers(Exception):
    """User code makes other calls than those of its journal, so that the session begins anew. The text is one line."""


class SessionRefused(ValueError):
    """The session cannot be trained on, or its journal is another one's: an error of the run. The text is one line."""


class AgentSession:
    """One trajectory, as its loop sees it.

    messages: the conversation; loops append to it. finished, reward, extra: see Finished; loops set them. metrics: numbers that
    loops add to. user_code: runs all code of the user. answered: number of turns of the model that a call has got. owes: it was
    given a task or a turn, and has not settled since. waits: calls without a turn; remade: those of them that were made here, not
    only in the journal.
    """

    def __init__(
        self,
        journal: Journal,
        kit: AgentKit,
        user_code: SessionLoop,
        ask: Callable[[Wanted | Settled], None],
        died: str | None = None,
        *,
        restarted: bool = False,
    ) -> None:
        """ask: sends a message. died: why no user code runs any more, if so; the session then ends after its journal.

        restarted: it has begun anew, which its first message says.
        """
        self.task, self.kit, self.user_code = journal.task, kit, user_code
        self.tree = ConversationTree(kit.seams, on_break=kit.config.on_break)
        self.messages: list[Message] = [*journal.task.prompt]
        self.finished = False
        self.reward: float | None = None
        self.extra: dict[str, Any] = {}
        self.metrics = defaultdict[str, float](float)
        self.answered = 0
        self._given = [(turn.key, turn.ordinal) for turn in journal.turns]
        self.owes = True
        self.waits, self.remade = {*journal.waits}, set[tuple[int, int]]()
        self._ask, self._died, self._restarted = ask, died, restarted
        self._turns = deque(journal.turns)
        self._outcomes = deque(journal.outcomes)
        self._new: list[Any] = []
        """Outcomes since the last message."""
        self._arrived = asyncio.Event()
        """Set at the next turn, and replaced by a new one."""
        self._stopped: Exception | None = None
        self._rows: list[Row] = []
        """With fewer trained tokens than the tree has, if a loop decides that."""
        self._samples = False
        """Whether a call of ``sample_after`` runs."""
        self._home = asyncio.get_running_loop()
        self._first: Call | None = None
        self._calls: list[tuple[int, Call, int]] = []
        """Node of each turn of the model, its call, and the most tokens that it could have."""
        self._marks: list[tuple[Message, dict[str, Any]]] = []
        self._context = self._used = 0
        """Tokens of the conversation as the model has it, and of all since the first prompt."""

    @property
    def given(self) -> int:
        """Number of turns of the model so far."""
        return len(self._given)

    @property
    def is_full(self) -> bool:
        """Whether the budget of tokens is used up."""
        return self._used >= self.task.max_tokens

    def give(self, turn: SampledTurn) -> None:
        """Add a sampled turn; nothing if no call waits for it, of before the session began anew."""
        if (turn.key, turn.ordinal) not in self.waits:
            return
        self.waits.remove((turn.key, turn.ordinal))
        self._turns.append(turn)
        self._given.append((turn.key, turn.ordinal))
        self.owes = True
        self._arrived.set()
        self._arrived = asyncio.Event()

    async def sample(self, tools: list[Any] | None = None) -> Reply | None:
        """A turn of the model after ``messages``, which it is added to; None if the budget leaves no token for it.

        tools: schemas for the template; without them the turn has no calls. Raises SessionRefused for a first prompt that is too
        long or that the template rejects, SessionEnded for a later one that it rejects. For one call at a time.
        """
        if asyncio.get_running_loop() is not self._home:  # a user's loop, in the thread of its session
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.sample(tools), self._home))
        try:
            return await self._sample(tools)
        except (SessionRefused, SessionEnded) as error:
            self._stopped = error  # the user's loop may take it for an error of its own
            raise

    async def sample_after(self, prompt_ids: Sequence[int], limit: int | None = None) -> SampledTurn:
        """A turn of the model after token ids, of at most ``limit`` tokens. For one call at a time.

        Raises JournalDiffers, SessionRefused for a first prompt that is too long, and SessionEnded if no token is left.
        """
        if asyncio.get_running_loop() is not self._home:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.sample_after(prompt_ids, limit), self._home))
        try:
            return await self._sample_after(prompt_ids, limit)
        except (SessionRefused, SessionEnded, JournalDiffers) as error:
            self._stopped = error  # as in ``sample``
            raise

    async def _sample_after(self, prompt_ids: Sequence[int], limit: int | None) -> SampledTurn:
        if self._samples:
            raise SessionEnded("the loop calls generate while another call runs; await one before the next")
        call = self.tree.request_ids(prompt_ids, {"limit": limit})
        self._begin(call)
        assert self._first is not None
        room = len(self._first.prompt_ids) + self.task.max_tokens - len(call.prompt_ids)
        if room < 1:
            raise SessionEnded(
                f"data.max_response_length={self.task.max_tokens}: the loop's prompt leaves no token for a response"
            )
        most = min(room, limit or room)
        self._samples = True
        try:
            if (turn := self.recorded(call)) is None:
                if self._turns or not self.waits <= {(call.key, call.ordinal)}:
                    raise JournalDiffers("the loop makes a call that its journal does not have")
                self.ask(call, most)
                self.settle()
                await self.arrival()
                turn = self.recorded(call)
        finally:
            self._samples = False
        assert turn is not None, "the controller answers the call that waits"
        observed = self.tree.nodes[call.node].ids
        if self.answered > 1:
            self.metrics["tokens/observed"] += len(observed)
            self.messages.append({"role": "tool", "content": self.kit.seams.text(observed)})
        reply = self.record(call, turn, None, number=self.answered - 1, most=most)
        self.messages.append(reply.message)
        self.mark(reply.message, sampled=True, **({"truncated": True} if reply.truncated else {}))
        return turn

    def train_only(self, ids: Sequence[int], trained: Sequence[int]) -> None:
        """Train only the tokens of this sequence that have a 1 in ``trained``. Raises ValueError if one was not sampled there."""
        wanted, rows, n = np.array(trained, dtype=bool), list[Row](), 0
        for row in self.tree.rows(0):
            most = min(len(ids), len(row.input_ids))
            same = np.logical_and.accumulate(row.input_ids[:most] == np.array(ids[:most], dtype=np.int64))
            kept = np.zeros(len(row.input_ids), dtype=bool)
            kept[:most] = row.response_mask[:most] & same & wanted[:most]
            n += int(kept.sum())
            log_probs, versions = (
                np.where(kept, row.rollout_log_probs, np.float32(0)),
                np.where(kept, row.weight_version, np.int32(-1)),
            )
            rows.append(replace(row, response_mask=kept, rollout_log_probs=log_probs, weight_version=versions))
        if n != wanted.sum():
            raise ValueError(
                f"response_mask has {wanted.sum()} tokens to train, and {wanted.sum() - n} of them were not sampled there; "
                "use 0 for tokens that generate did not return after exactly the tokens before them"
            )
        self._rows = rows

    @property
    def stopped(self) -> Exception | None:
        """Why the session ends, if a call of its user code raised that; the code may have continued."""
        return self._stopped

    async def _sample(self, tools: list[Any] | None) -> Reply | None:
        call = self._first_or_next(tools)
        prompt = len(call.prompt_ids)
        observed = max(0, prompt - self._context) if self.answered else 0
        if self._used + observed >= self.task.max_tokens:
            return None
        self._used += observed
        self.metrics["tokens/observed"] += observed
        most = self.task.max_tokens - self._used
        turn = await self._next(call, most)
        reply = self.record(call, turn, tools, number=self.answered - 1, most=most)
        self.messages.append(reply.message)
        self.mark(reply.message, sampled=True, **({"truncated": True} if reply.truncated else {}))
        self._context = prompt + len(turn.token_ids)
        self._used += len(turn.token_ids)
        return reply

    def record(
        self, call: Call, turn: SampledTurn, tools: list[Any] | None, *, number: int, most: int, stop: str | None = None
    ) -> Reply:
        """Parse a turn, and add it to the tree.

        number: of the turn, part of its calls' ids. most: tokens that it could have had. stop: text at which it was cut.
        """
        truncated = turn.finish_reason != "stop"
        # Without the stop token. With special tokens: formats use some as their markup.
        ids = turn.token_ids.tolist()
        text = self.kit.seams.text(ids if truncated else ids[:-1])
        if stop is not None:
            text = text.partition(stop)[0]
        reply = Reply({"role": "assistant", "content": text}, (), truncated)
        if tools is not None and not truncated:
            thinks = opens_thinking(self.tree.nodes[call.node].text or "")
            parsed = parse_turn(self.kit.format, text, tools, turn=number, in_thinking=thinks)
            reply = Reply(parsed.message(), parsed.calls, truncated)
        self._calls.append((self.tree.record(call, turn, reply.message), call, most))
        self.metrics["turns"] += 1
        self.metrics["tokens/sampled"] += len(turn.token_ids)
        return reply

    async def outcome(self, make: Callable[[], Awaitable[Any]], repeat: Callable[[Any], Awaitable[None]]) -> Any:
        """An outcome of user code, JSON: from the journal, or of ``make``. repeat: rebuilds the state of a journaled one."""
        if self._outcomes:
            found = self._outcomes.popleft()
            await repeat(found)
            return found
        if self._died is not None:
            raise SessionEnded(self._died)
        found = await make()
        self._new.append(found)
        return found

    def mark(self, message: Message, **facts: Any) -> None:
        """Add facts about a message of the conversation for people, which neither the template nor user code sees."""
        self._marks.append((message, facts))

    def marked(self) -> list[Message]:
        """The conversation with its marks: sampled and truncated of turns of the model, status of results, reward of either.

        A message that a loop has replaced since has none: the text there is not what was sampled.
        """
        found = []
        for message in self.messages:
            facts = (facts for marked, facts in self._marks if marked is message)
            found.append(reduce(or_, facts, {**message}))
        return found

    async def run(self, program: AgentLoop | None = None) -> Finished:
        """Run the loop to its end. An exception of user code ends the session with what it has, see ``error`` in extra.

        program: the loop instead of the one that the row or the configuration names.
        """
        chosen = self.task.agent or self.kit.default_loop
        loop = environment_agent if chosen == "tool_agent" and self.kit.environment is not None else self.kit.loop(chosen)
        try:
            self.reward = await (program or loop)(self)
            if self._turns or self._outcomes:
                raise SessionRefused(f"session {self.task.id} ended before its journal: tools, template or settings have changed")
        except SessionEnded as error:
            self._fail(str(error))
        except UserCodeError as error:
            if isinstance(self._stopped, SessionRefused | JournalDiffers):
                raise self._stopped from error
            self._fail(str(self._stopped or error))
        if self._died is not None:
            self.metrics["died"] = 1
        self.metrics.update({f"breaks/{reason}": number for reason, number in self.tree.breaks.items()})
        rows = self._rows or self.tree.rows(0)
        return Finished(
            id=self.task.id,
            parts=self._parts(rows),
            finished=self.finished,
            reward=self.reward,
            extra=self.extra,
            metrics=dict(self.metrics),
            messages=self.marked(),
            outcomes=self._new,
            turns=self._places(rows),
            restarted=self._restarted,
        )

    def _fail(self, reason: str) -> None:
        self.finished = False
        self.extra["error"] = reason
        self.metrics["errors"] += 1

    def _first_or_next(self, tools: list[Any] | None) -> Call:
        try:
            call = self.tree.request(self.messages, tools)
        except BrokenConversation as error:
            raise SessionRefused(str(error)) from error
        except Refused as error:
            if self._first is not None:
                raise SessionEnded(f"after {self.answered} turns: {error}") from error
            raise SessionRefused(str(error)) from error
        self._begin(call)
        return call

    def _begin(self, call: Call) -> None:
        """Check the length of the first prompt."""
        if self._first is None:
            self._first, n, limit = call, len(call.prompt_ids), self.task.max_prompt
            if n > limit:
                raise SessionRefused(
                    f"data.max_prompt_length={limit}: a prompt has {n} tokens with its tools (data source "
                    f"{self.task.data_source}, session {self.task.id}); raise it, or set data.filter_overlong_prompts=true"
                )

    @property
    def repeats(self) -> bool:
        """Whether the journal has calls that were not made again yet."""
        return bool(self._turns) or not self.waits <= self.remade

    def recorded(self, call: Call) -> SampledTurn | None:
        """The turn that the journal has for a call, which gets it, whatever the order of the calls."""
        for place, turn in enumerate(self._turns):
            if (turn.key, turn.ordinal) == (call.key, call.ordinal):
                del self._turns[place]
                self.answered += 1
                return turn
        return None

    def ask(self, call: Call, max_tokens: int) -> None:
        """Ask for a turn of the model. Raises SessionEnded if no user code runs any more."""
        if self._died is not None:
            raise SessionEnded(self._died)
        self.waits.add((call.key, call.ordinal))
        self.remade.add((call.key, call.ordinal))
        ids = np.array(call.prompt_ids, dtype=np.int64)
        self._ask(Wanted(self.task.id, call.key, call.ordinal, ids, max_tokens, self._new, self._restarted))
        self._new, self._restarted = [], False

    def settle(self) -> None:
        """Say that nothing more is asked for before the next turn."""
        self.owes = False
        self._ask(Settled())

    async def arrival(self) -> None:
        """Wait for a turn of the model."""
        await self._arrived.wait()

    async def _next(self, call: Call, max_tokens: int) -> SampledTurn:
        if not self._turns:
            self.ask(call, max_tokens)
            self.settle()
            await self.arrival()
        turn = self._turns.popleft()
        if (turn.key, turn.ordinal) != (call.key, call.ordinal):
            raise SessionRefused(
                f"session {self.task.id}: turn {self.answered} of its journal answers another call (key {turn.key}, here "
                f"{call.key}): tools, template or settings have changed"
            )
        self.answered += 1
        return turn

    def _places(self, rows: Sequence[Row]) -> list[TurnPlace]:
        places: dict[int, tuple[int, int, int]] = {}
        for row in rows:
            ends = [0, *accumulate(len(self.tree.nodes[i].ids) for i in row.nodes)]
            for i, start, end in zip(row.nodes, ends, ends[1:], strict=False):
                places.setdefault(i, (row.part, start, end))  # trained in the first row that has it
        found = {(call.key, call.ordinal): (node, most) for node, call, most in self._calls}
        # In the order in which they were given: the order in which simultaneous calls got their turns depends on the clock.
        return [TurnPlace(*places[found[turn][0]], *turn, found[turn][1]) for turn in self._given if turn in found]

    def _parts(self, rows: Sequence[Row]) -> list[Part]:
        if rows:
            return [_part(row, len(self.tree.nodes[row.nodes[0]].ids)) for row in rows]
        # Nothing was sampled: the prompt alone, without trained tokens.
        call = self._first or self._first_or_next(None)
        n = len(call.prompt_ids)
        empty = np.zeros(n, dtype=bool), np.zeros(n, dtype=np.float32), np.full(n, -1, dtype=np.int32)
        return [Part(np.array(call.prompt_ids, dtype=np.int64), *empty, n)]


def _part(row: Row, prompt_length: int) -> Part:
    return Part(row.input_ids, row.response_mask, row.rollout_log_probs, row.weight_version, prompt_length)


AgentLoop = Callable[[AgentSession], Awaitable[float | None]]
"""Runs a session; returns its reward, or None if the reward function scores it."""


def _isolated(function: AgentLoop) -> AgentLoop:
    """A user's loop, run in the thread of its session: it may block, and raise anything."""

    async def checked(session: AgentSession) -> float | None:
        reward = await function(session)
        number = None if reward is None else finite(reward)
        if reward is not None and number is None:
            raise ValueError(f"the reward is {reward!r:.60}, not a finite number")
        return number

    async def run(session: AgentSession) -> float | None:
        found: float | None = await session.user_code.run(checked, session, seconds=math.inf)
        return found

    return run


def token_agent(make: Callable[..., Any], setup: AgentSetup) -> AgentLoop:
    """A loop of verl's interface, see trainer.agents.token_loops. make: creates its object.

    Its calls are those of ``sample_after``; after a restart it runs again, and its calls are answered from the journal.
    """
    tokenizer = copy(setup.tokenizer)
    # Newer transformers return a dict; loops written for verl expect the ids alone.
    tokenizer.apply_chat_template = partial(setup.tokenizer.apply_chat_template, return_dict=False)  # type: ignore[method-assign]
    config = untyped(setup.run)
    rollout = config.actor_rollout_ref.rollout
    sampling = {name: rollout[name] for name in ("temperature", "top_p", "top_k")} | {"repetition_penalty": 1.0, "logprobs": True}

    async def work(session: AgentSession) -> dict[str, Any]:
        async def sample(ids: list[int], limit: int | None) -> TokenOutput:
            turn = await session.sample_after(ids, limit)
            reason = "completed" if turn.finish_reason == "stop" else "length"
            return TokenOutput(token_ids=turn.token_ids.tolist(), log_probs=turn.log_probs.tolist(), stop_reason=reason)

        task, extra = session.task, session.task.extra_info
        row = {
            "raw_prompt": deepcopy(task.prompt), "data_source": task.data_source, "extra_info": deepcopy(extra),
            "reward_model": {"ground_truth": task.ground_truth}, "index": extra.get("index", 0),
            **{name: extra.get(name) or {} for name in ("tools_kwargs", "interaction_kwargs")},
        }  # fmt: skip
        loop = make(
            trainer_config=SimpleNamespace(config=config),
            server_manager=AsyncLLMServerManager(sample, sampling),
            tokenizer=tokenizer,
        )
        found = await loop.run(dict(sampling), **row)
        if not isinstance(found, AgentLoopOutput):
            raise ValueError(f"run returned {type(found).__name__}; it returns AgentLoopOutput")
        if session.stopped is not None:  # the loop has taken it for an error of its own
            return {}
        session.train_only([*found.prompt_ids, *found.response_ids], [*[0] * len(found.prompt_ids), *found.response_mask])
        reward = None if found.reward_score is None else finite(found.reward_score)
        if reward is None and found.reward_score is not None:
            raise ValueError(f"reward_score is {found.reward_score}, not a finite number")
        return {"reward": reward, "extra": {"num_turns": found.num_turns} | json.loads(json.dumps(found.extra_fields))}

    async def run(session: AgentSession) -> float | None:
        found: dict[str, Any] = await session.user_code.run(work, session, seconds=math.inf)
        if session.stopped is not None:
            raise session.stopped
        if session.repeats or session.waits:
            raise JournalDiffers("it ended before the last call of its journal")
        session.extra |= found["extra"]
        session.finished = bool(session.messages) and not session.marked()[-1].get("truncated", False)
        reward: float | None = found["reward"]
        return reward

    return run


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
            session.messages[:] = await _of_environment(session, environment, lambda: environment.reset(session.task))
            done = environment.error is not None
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
                limits = (config.max_assistant_turns, config.max_user_turns)
                if environment.error is not None or session.answered in limits or session.is_full:
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
