"""Loops of verl's interface as sessions: they work on token ids (trainer/agents/token_loops.py), and their calls become rows.

A call is identified by its tokens. After a restart the loop runs again from its beginning, and its calls are answered from the
journal as long as the journal has them.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from configs.load import untyped
from trainer.agents.sessions.agent_kit import AgentSetup
from trainer.agents.sessions.agent_session import AgentLoop, AgentSession, JournalDiffers, SessionEnded, SessionRefused
from trainer.agents.sessions.protocol import SampledTurn
from trainer.agents.token_loops import AgentLoopOutput, AsyncLLMServerManager, TokenOutput
from trainer.agents.tree import ROOT, ConversationTree, Row
from trainer.rewards.scoring import finite


class TokenCalls:
    """The calls of one session's loop, one at a time."""

    def __init__(self, session: AgentSession) -> None:
        """In the event loop of the session's process; the user's loop calls ``sample`` from a thread."""
        self._session = session
        self._home = asyncio.get_running_loop()
        self._runs = False

    async def sample(self, prompt_ids: Sequence[int], limit: int | None) -> TokenOutput:
        """A turn of the model after token ids, of at most ``limit`` tokens.

        Raises JournalDiffers, SessionRefused for a first prompt that is too long, and SessionEnded if no token is left.
        """
        there = asyncio.run_coroutine_threadsafe(self._sample(prompt_ids, limit), self._home)
        try:
            turn = await asyncio.wrap_future(there)
        except (SessionRefused, SessionEnded, JournalDiffers) as error:
            self._session.stopped = error  # the user's loop may take it for an error of its own
            raise
        reason = "completed" if turn.finish_reason == "stop" else "length"
        return TokenOutput(token_ids=turn.token_ids.tolist(), log_probs=turn.log_probs.tolist(), stop_reason=reason)

    async def _sample(self, prompt_ids: Sequence[int], limit: int | None) -> SampledTurn:
        session = self._session
        if self._runs:
            raise SessionEnded("the loop calls generate while another call runs; await one before the next")
        call = session.tree.request_ids(prompt_ids, {"limit": limit})
        task = session.task
        longest = min(len(session.begin(call).prompt_ids) + task.max_tokens, task.max_length)
        room = longest - len(call.prompt_ids)
        if room < 1:
            raise SessionEnded(
                f"data.max_response_length={task.max_tokens}: the loop's prompt leaves no token for a response; both may have "
                f"{longest} tokens"
            )
        most = min(room, limit or room)
        self._runs = True
        try:
            if (turn := session.recorded(call)) is None:
                if session.has_turns or not session.waits <= {(call.key, call.ordinal)}:
                    raise JournalDiffers("the loop makes a call that its journal does not have")
                session.ask(call, most)
                session.settle()
                await session.arrival()
                turn = session.recorded(call)
        finally:
            self._runs = False
        assert turn is not None, "the controller answers the call that waits"
        node = session.tree.nodes[call.node]
        if session.answered > 1:
            session.metrics["tokens/observed"] += len(node.ids)
            session.messages.append({"role": "tool", "content": session.kit.seams.text(node.ids)})
            if node.parent == ROOT:  # a prompt of its own, which nothing continues
                session.mark(session.messages[-1], context=True)
        session.append(session.record(call, turn, None, number=session.answered - 1, most=most))
        return turn


def token_agent(make: Callable[..., Any], setup: AgentSetup) -> AgentLoop:
    """A loop of verl's interface. make: creates its object, one per session."""
    tokenizer = copy(setup.tokenizer)
    # Newer transformers return a dict; loops written for verl expect the ids alone.
    tokenizer.apply_chat_template = partial(setup.tokenizer.apply_chat_template, return_dict=False)  # type: ignore[method-assign]
    config = untyped(setup.run)
    rollout = config.actor_rollout_ref.rollout
    sampling = {name: rollout[name] for name in ("temperature", "top_p", "top_k")} | {"repetition_penalty": 1.0, "logprobs": True}

    async def work(session: AgentSession, calls: TokenCalls) -> dict[str, Any]:
        task, extra = session.task, session.task.extra_info
        row = {
            "raw_prompt": deepcopy(task.prompt), "data_source": task.data_source, "extra_info": deepcopy(extra),
            "reward_model": {"ground_truth": task.ground_truth}, "index": extra.get("index", 0),
            **{name: extra.get(name) or {} for name in ("tools_kwargs", "interaction_kwargs")},
        }  # fmt: skip
        loop = make(
            trainer_config=SimpleNamespace(config=config),
            server_manager=AsyncLLMServerManager(calls.sample, sampling),
            tokenizer=tokenizer,
        )
        found = await loop.run(dict(sampling), **row)
        if not isinstance(found, AgentLoopOutput):
            raise ValueError(f"run returned {type(found).__name__}; it returns AgentLoopOutput")
        if session.stopped is not None:  # the loop has taken it for an error of its own
            return {}
        ids, trained = [*found.prompt_ids, *found.response_ids], [*[0] * len(found.prompt_ids), *found.response_mask]
        session.rows = _rows(session.tree, ids, trained)
        reward = None if found.reward_score is None else finite(found.reward_score)
        if reward is None and found.reward_score is not None:
            raise ValueError(f"reward_score is {found.reward_score}, not a finite number")
        return {"reward": reward, "extra": {"num_turns": found.num_turns} | json.loads(json.dumps(found.extra_fields))}

    async def run(session: AgentSession) -> float | None:
        found: dict[str, Any] = await session.user_code.run(work, session, TokenCalls(session), seconds=math.inf)
        if session.stopped is not None:
            raise session.stopped
        if session.repeats or session.waits:
            raise JournalDiffers("it ended before the last call of its journal")
        session.extra |= found["extra"]
        session.finished = bool(session.messages) and not session.marked()[-1].get("truncated", False)
        reward: float | None = found["reward"]
        return reward

    return run


def _rows(tree: ConversationTree, ids: Sequence[int], trained: Sequence[int]) -> list[Row]:
    """Rows that train only the tokens of ``ids`` with a 1 in ``trained``. Raises ValueError if one was not sampled there."""
    wanted, rows, n = np.array(trained, dtype=bool), list[Row](), 0
    for row in tree.rows(0):
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
    return rows
