"""Programs of the user as sessions: they call the model over HTTP, and what was sampled for them is trained, token by token.

Problem: a program makes calls when it likes, several at the same time, changes what it sends, and cannot be stopped and saved.
Idea: a call is identified by its content (trainer/agents/tree.py), and so are its seed and its place in the conversation; neither
depends on when it arrives. After a restart the program runs again from its beginning, and its calls are answered from the journal
as long as the journal has them.

The engines work on all calls that a session makes before it settles, from the same tick on. A coroutine has settled when the loop
that it runs in has nothing to do and all that it has sent was read, see ``ProgramCalls._quiet``: however long it computes, the
ticks are the same. What the threads of a function are about to do is not known: it has settled with its first call, and calls
that its other threads make meanwhile enter a later tick. This changes neither their seeds nor their places.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

from trainer.agents.formats import ToolCall
from trainer.agents.gateway.endpoint import Endpoint, SessionClosed
from trainer.agents.isolation import LoopState, UserCodeError
from trainer.agents.sessions.agent_kit import KEY
from trainer.agents.sessions.agent_session import AgentSession, JournalDiffers, Reply, SessionEnded, SessionRefused
from trainer.agents.sessions.protocol import SampledTurn, Task
from trainer.agents.tree import BrokenConversation, Call
from trainer.data.encoding import Refused
from trainer.protocols.common import BadRequest, ChatCompletion, ChatRequest, FinishReason, FunctionCall
from trainer.rewards.scoring import finite
from trainer.run.user_code import load_function
from workers.seeding import seed_of

_TURNS = 16
"""Turns of the endpoint's loop in which it takes what was sent to it: a connection, a request of some hundred kB, its handler."""
_PATIENCE = 0.05
"""Seconds that a coroutine's other threads get to make a call: clients look up things in a thread before their first one."""
Program = Callable[[str, str, Task], float | None]
"""Runs one session, sync or async. Called with base URL, API key and task; returns the reward, or None: it is scored."""


class ProgramRunner:
    """Runs the program once for every session; one for an agent process."""

    def __init__(self, path: str) -> None:
        """path: FILE.py:FUNCTION. Raises ValueError, one line, if it does not load."""
        file, _, function = path.rpartition(":")
        self._program: Program = load_function(file, function, f"{KEY}.agent.program={path}")
        self._endpoint = Endpoint()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with self._endpoint.serving():
            yield

    async def run(self, session: AgentSession) -> float | None:
        """Run a session: see trainer.agents.sessions.agent_session.AgentLoop. Raises JournalDiffers."""
        program, blocks = self._program, not inspect.iscoroutinefunction(self._program)
        calls = ProgramCalls(session, blocks=blocks)
        with self._endpoint.session(calls.answer) as key:
            work = asyncio.ensure_future(session.user_code.run(program, self._endpoint.url, key, session.task, seconds=math.inf))
            try:
                reward = await calls.result(work)
            finally:
                work.cancel()
                calls.close()
                _describe(session)
        if session.repeats:
            raise JournalDiffers("it ended before the last call of its journal")
        number = None if reward is None else finite(reward)
        if reward is not None and number is None:
            raise UserCodeError(f"the reward is {reward!r:.60}, not a finite number")
        return number


class ProgramCalls:
    """The calls of one session's program. blocks: it is a function, with a thread of its own."""

    def __init__(self, session: AgentSession, *, blocks: bool) -> None:
        self._session = session
        self._blocks = blocks
        self._limit = session.kit.config.tool_timeout
        self._progress = asyncio.Condition()
        """Of the repetition of the journal."""
        self._settling: asyncio.Task[None] | None = None
        self._failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._made = self._running = 0
        self._idle_since = asyncio.get_running_loop().time()

    async def result(self, work: asyncio.Future[Any]) -> Any:
        """What the program returns. Raises what ended the session instead.

        A program that makes no call for as long as a tool may take is left behind.
        """
        while not work.done():
            now = asyncio.get_running_loop().time()
            left = self._limit if self._running else self._idle_since + self._limit - now
            if left <= 0:
                self._session.user_code.hung += self._blocks
                raise UserCodeError(f"the program made no call for {self._limit:g} s", late=True)
            await asyncio.wait({work, self._failed}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
        return work.result()

    def close(self) -> None:
        """Stop what is under way."""
        if self._settling is not None:
            self._settling.cancel()

    async def answer(self, request: ChatRequest) -> tuple[str, Sequence[ChatCompletion]]:
        """Completions of a request, see trainer.agents.gateway.endpoint.Answer."""
        self._running += 1
        try:
            # All have their identity before the first one waits.
            calls = [self._call(request) for _ in range(request.sampling.n)]
            name = f"{calls[0].key & (1 << 64) - 1:016x}{calls[0].ordinal}"
            return name, await asyncio.gather(*(self._complete(request, call) for call in calls))
        except (JournalDiffers, SessionEnded, SessionRefused) as error:
            self._fail(error)
            raise SessionClosed(str(error)) from error
        finally:
            self._running -= 1
            self._idle_since = asyncio.get_running_loop().time()

    def _fail(self, error: Exception) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    def _call(self, request: ChatRequest) -> Call:
        most, task = self._session.kit.config.max_assistant_turns, self._session.task
        if most is not None and self._made >= most:
            raise BadRequest(f"the session has made its {most} calls ({KEY}.multi_turn.max_assistant_turns)")
        if not request.messages:
            raise BadRequest("messages: must not be empty", "messages")
        options = asdict(replace(request.sampling, n=1))
        try:
            call = self._session.tree.request(request.messages, request.tools, options)
        except BrokenConversation as error:
            raise SessionRefused(f"session {task.id}: {error}") from error
        except Refused as error:
            raise BadRequest(str(error)) from error
        if self._room(call) < 1:
            n, limit = len(call.prompt_ids), min(task.max_prompt + task.max_tokens, task.max_length)
            raise BadRequest(f"the prompt has {n} tokens; the maximum model length is {limit} ({n} + 1 > {limit})")
        self._made += 1
        return call

    def _room(self, call: Call) -> int:
        """Tokens that a call may sample: a row is its first prompt, and at most data.max_response_length tokens after it."""
        task, tree = self._session.task, self._session.tree
        first = len(tree.nodes[tree.path(call.node)[0]].ids)
        return min(min(first, task.max_prompt) + task.max_tokens, task.max_length) - len(call.prompt_ids)

    def _most(self, request: ChatRequest, call: Call) -> int:
        room = self._room(call)
        return min(room, request.sampling.max_tokens or room)

    async def _complete(self, request: ChatRequest, call: Call) -> ChatCompletion:
        session = self._session
        turn = session.recorded(call)
        if turn is None:
            if (call.key, call.ordinal) not in session.waits:
                await self._repeated("it makes a call that its journal does not have")
            session.ask(call, self._most(request, call))
            await self._progressed()
            while (turn := session.recorded(call)) is None:
                await session.arrival()
        completion = self._completion(request, call, turn)
        await self._progressed()
        return completion

    async def _progressed(self) -> None:
        """Notice that a call was made, or has its turn."""
        async with self._progress:
            self._progress.notify_all()
        if self._session.owes and (self._settling is None or self._settling.done()):
            self._settling = asyncio.create_task(self._settle())

    async def _repeated(self, otherwise: str) -> None:
        """Wait until all calls of the journal were made again. Raises JournalDiffers if none is made for too long."""
        async with self._progress:
            while self._session.repeats:
                try:
                    await asyncio.wait_for(self._progress.wait(), self._limit)
                except TimeoutError as error:
                    raise JournalDiffers(otherwise) from error

    async def _settle(self) -> None:
        """Settle the session when the program can do nothing more before one of its calls has its turn, or after its time."""
        session = self._session
        try:
            await self._repeated("it does not make a call that its journal has")
        except JournalDiffers as error:
            self._fail(error)
            return
        given = -1
        while given != session.given and not self._blocks:
            given = session.given
            with suppress(TimeoutError):
                await asyncio.wait_for(self._quiet(), self._limit)
        # Without a call that waits it is about to make one, or to end.
        if session.waits and session.owes:
            session.settle()

    async def _quiet(self) -> None:
        """Wait until the coroutine's loop has nothing to do, and the endpoint has read all that it has sent."""
        loop, seen, since = asyncio.get_running_loop(), LoopState(-1, 0, 0), 0.0
        while True:
            # Replies that are on their way are sent meanwhile, and what the program has sent before is read.
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            state = await self._session.user_code.state()
            if state is None:
                return
            if state != seen:
                seen, since = state, loop.time()
            elif not state.sending and (not state.threads or loop.time() > since + _PATIENCE):
                return

    def _completion(self, request: ChatRequest, call: Call, turn: SampledTurn) -> ChatCompletion:
        session = self._session
        turn, stop = self._stopped(request, turn)
        # With no more tokens than it has, a replay samples the same turn.
        most = self._most(request, call) if stop is None else len(turn.token_ids)
        number = seed_of(call.key, call.ordinal) % 10**9
        reply = session.record(call, turn, request.tools, number=number, most=most, stop=stop)
        calls = tuple(FunctionCall(one.id, one.name, one.arguments) for one in reply.calls if isinstance(one, ToolCall))
        return ChatCompletion(
            text=reply.message["content"],
            finish_reason=_reason(reply, calls, stop),
            prompt_token_ids=call.prompt_ids,
            token_ids=turn.token_ids.tolist(),
            log_probs=turn.log_probs.tolist(),
            tokens=[session.kit.seams.text([id]) for id in turn.token_ids.tolist()] if request.logprobs else (),
            thinking=reply.message.get("reasoning_content", ""),
            calls=calls,
            stop_sequence=stop,
        )

    def _stopped(self, request: ChatRequest, turn: SampledTurn) -> tuple[SampledTurn, str | None]:
        """The turn up to the token that completes the first stop text, and this text. What follows was sampled in vain."""
        text, ids = self._session.kit.seams.text, turn.token_ids.tolist()
        if turn.finish_reason == "stop":
            del ids[-1]  # a stop token is no part of the text
        whole = text(ids)
        if not any(stop in whole for stop in request.sampling.stop):
            return turn, None
        n = next(n for n in range(1, len(ids) + 1) if any(stop in text(ids[:n]) for stop in request.sampling.stop))
        begun = text(ids[:n])
        stop = min((stop for stop in request.sampling.stop if stop in begun), key=begun.index)
        cut = replace(
            turn, token_ids=turn.token_ids[:n], log_probs=turn.log_probs[:n], versions=turn.versions[:n], finish_reason="length"
        )
        return cut, stop


def _reason(reply: Reply, calls: Sequence[FunctionCall], stop: str | None) -> FinishReason:
    if reply.truncated and stop is None:
        return "length"
    return "tool_calls" if calls else "stop"


def _describe(session: AgentSession) -> None:
    """The session's longest conversation, for reports, and whether its last turn ended by itself."""
    tree = session.tree
    rows = tree.rows(0)
    if rows:
        path = max((row.nodes for row in rows), key=lambda nodes: tree.nodes[nodes[-1]].n_messages)
        session.messages[:] = [message for i in path for message in tree.nodes[i].messages]
        for node in (tree.nodes[i] for i in path if tree.nodes[i].role == "assistant"):
            session.mark(node.messages[0], sampled=True, **({"truncated": True} if node.truncated else {}))
        session.finished = not tree.nodes[rows[-1].nodes[-1]].truncated
    session.extra["num_turns"] = len(session.messages)
