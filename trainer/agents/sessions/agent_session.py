"""A session in an agent process: the conversation, its tokens and its journal, as a loop sees them, and the session's result.

Problem: a session must continue after a crash, and at a resume, exactly where it was, and user code is neither deterministic nor
cheap. Idea: a loop is a function of two kinds of facts, turns of the model and outcomes of user code. Both are journaled in
order. A session with a journal runs the same loop, which gets its facts from the journal as long as it has any; rendering,
tokenising and parsing are repeated, and are deterministic.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import Any

import numpy as np

from trainer.agents.formats import MalformedCall, ToolCall, opens_thinking, parse_turn
from trainer.agents.isolation import SessionLoop, UserCodeError
from trainer.agents.messages import Message
from trainer.agents.sessions.agent_kit import AgentKit
from trainer.agents.sessions.protocol import Finished, Journal, Part, SampledTurn, Settled, TurnPlace, Wanted
from trainer.agents.tree import BrokenConversation, Call, ConversationTree, Row
from trainer.data.encoding import Refused


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
    only in the journal. stopped: why the session ends, if a call of its user code raised that; the code may have continued. rows:
    those to train, if a loop leaves out tokens that the tree would train.
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
        self.stopped: Exception | None = None
        self.rows: list[Row] = []
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
        """Whether the budget of tokens, or the engine's length, is used up."""
        return self._used >= self.task.max_tokens or self._context >= self.task.max_length

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
            self.stopped = error  # the user's loop may take it for an error of its own
            raise

    async def _sample(self, tools: list[Any] | None) -> Reply | None:
        call = self._first_or_next(tools)
        prompt = len(call.prompt_ids)
        observed = max(0, prompt - self._context) if self.answered else 0
        most = min(self.task.max_tokens - self._used - observed, self.task.max_length - prompt)
        if most <= 0:
            return None
        self._used += observed
        self.metrics["tokens/observed"] += observed
        turn = await self._next(call, most)
        reply = self.record(call, turn, tools, number=self.answered - 1, most=most)
        self.append(reply)
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
        if tools is not None and (not truncated or stop is not None):
            thinks = opens_thinking(self.tree.nodes[call.node].text or "")
            parsed = parse_turn(self.kit.format, text, tools, turn=number, in_thinking=thinks)
            reply = Reply(parsed.message(), parsed.calls, truncated)
        self._calls.append((self.tree.record(call, turn, reply.message), call, most))
        self.metrics["turns"] += 1
        self.metrics["tokens/sampled"] += len(turn.token_ids)
        return reply

    def append(self, reply: Reply) -> None:
        """Add a turn to the conversation, with its marks."""
        self.messages.append(reply.message)
        self.mark(reply.message, sampled=True, **({"truncated": True} if reply.truncated else {}))

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

    async def run(self, loop: AgentLoop) -> Finished:
        """Run a loop to its end. An exception of user code ends the session with what it has, see ``error`` in extra."""
        try:
            self.reward = await loop(self)
            if self._turns or self._outcomes:
                raise SessionRefused(f"session {self.task.id} ended before its journal: tools, template or settings have changed")
        except SessionEnded as error:
            self._fail(str(error))
        except UserCodeError as error:
            if isinstance(self.stopped, SessionRefused | JournalDiffers):
                raise self.stopped from error
            self._fail(str(self.stopped or error))
        if self._died is not None:
            self.metrics["died"] = 1
        self.metrics.update({f"breaks/{reason}": number for reason, number in self.tree.breaks.items()})
        rows = self.rows or self.tree.rows(0)
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
        self.begin(call)
        return call

    def begin(self, call: Call) -> Call:
        """The first call, which is this one if there was none. Raises SessionRefused if its prompt is too long."""
        if self._first is None:
            self._first, n, limit = call, len(call.prompt_ids), self.task.max_prompt
            if n > limit:
                raise SessionRefused(
                    f"data.max_prompt_length={limit}: a prompt has {n} tokens with its tools (data source "
                    f"{self.task.data_source}, session {self.task.id}); raise it, or set data.filter_overlong_prompts=true"
                )
        return self._first

    @property
    def has_turns(self) -> bool:
        """Whether there are turns that no call has got."""
        return bool(self._turns)

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
