"""Sessions of a recorded step, for its replay: what the agents answered then, without agent processes and without user code.

Idea: seeds and engines determine what the model writes, and a session that got the same turns gets the same answers. So a turn
is compared with the recorded one, and the record has what came next. A session whose turn differs ends there: only user code
could answer it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from trainer.agents.sessions.protocol import Finished, Journal, Part, SampledTurn, Task, TurnPlace, Wanted
from trainer.agents.sessions.session_flow import AgentSessions, Session
from trainer.data.dataset import Prompt
from workers.batch import Batch


def record_of(finished: Sequence[Batch]) -> Batch | None:
    """Record of the sessions of a step, from rows of ``finished_rows``; None without sessions.

    A row per part: tokens input_ids (T,), rows part, prompt_length, finished (B,), objects session (facts, at the first part).
    """
    if not finished:
        return None
    rows = Batch.concat(finished)
    facts = [one if part == 0 else None for one, part in zip(rows.objects["session"], rows.rows["part"].tolist(), strict=True)]
    names = ("part", "prompt_length", "finished")
    ids = rows.tokens["input_ids"].to(torch.int32)
    return Batch(rows.lengths, {"input_ids": ids}, {name: rows.rows[name] for name in names}, {"session": facts})


@dataclass(frozen=True, slots=True)
class Recording:
    """A session of the record. ids, prompt_lengths: of its parts. facts: of ``finished_rows``."""

    ids: list[np.ndarray]
    prompt_lengths: list[int]
    finished: bool
    facts: Mapping[str, Any]


@dataclass(slots=True)
class RepeatedSession:
    """A session that repeats a recording, one call at a time. turns: those that the model has sampled now."""

    id: int
    recording: Recording
    turns: list[SampledTurn] = field(default_factory=list)

    def answer(self) -> Wanted | Finished:
        """What the session answered to its last turn."""
        places = [TurnPlace(*place) for place in self.recording.facts["turns"]]
        made = [*zip(places, self.turns, strict=False)]
        if made and not np.array_equal(made[-1][1].token_ids, self._recorded(made[-1][0])):
            return self._ended(made, whole=False)
        if len(made) == len(places):
            return self._ended(made, whole=True)
        wanted = places[len(made)]
        prompt = self.recording.ids[wanted.part][: wanted.start]
        return Wanted(self.id, wanted.key, wanted.ordinal, prompt, wanted.max_tokens)

    def _recorded(self, place: TurnPlace) -> np.ndarray:
        return self.recording.ids[place.part][place.start : place.end]

    def _ended(self, made: Sequence[tuple[TurnPlace, SampledTurn]], *, whole: bool) -> Finished:
        """The result, with what was sampled now. whole: as it was recorded; otherwise without what follows the last turn."""
        facts, parts = self.recording.facts, list[Part]()
        for part, (ids, prompt_length) in enumerate(zip(self.recording.ids, self.recording.prompt_lengths, strict=True)):
            here = [(place, turn) for place, turn in made if place.part == part]
            if not whole:
                if not here:
                    continue
                last, turn = max(here, key=lambda one: one[0].end)
                ids = np.concatenate([ids[: last.start], turn.token_ids])
            n = len(ids)
            mask, log_probs, versions = np.zeros(n, dtype=bool), np.zeros(n, np.float32), np.full(n, -1, np.int32)
            for place, turn in here:
                at = slice(place.start, place.start + len(turn.token_ids))
                mask[at], log_probs[at], versions[at] = True, turn.log_probs, turn.versions
            parts.append(Part(ids, mask, log_probs, versions, prompt_length))
        return Finished(
            id=self.id,
            parts=parts,
            finished=whole and self.recording.finished,
            reward=facts["reward"],
            extra=facts["extra"],
            metrics=facts["metrics"],
            messages=facts["messages"],
            turns=[place for place, _ in made],
        )


class RecordedAgents:
    """The agents of a record: answers as session_flow.Agents has them."""

    continues = True
    seconds_waited = 0.0

    def __init__(self, record: Batch) -> None:
        """record: of ``record_of``."""
        self.recordings: dict[int, Recording] = {}
        """By the seed of the session."""
        self.sessions: dict[int, RepeatedSession] = {}
        ids = [row.numpy().astype(np.int64) for row in record.split_rows("input_ids")]
        starts = [*(record.rows["part"] == 0).nonzero().flatten().tolist(), len(record)]
        lengths, finished = record.rows["prompt_length"].tolist(), record.rows["finished"].tolist()
        for start, end in pairwise(starts):
            facts = record.objects["session"][start]
            recording = Recording(ids[start:end], lengths[start:end], bool(finished[start]), facts)
            self.recordings[facts["seed"]] = recording

    def wait_ready(self) -> None:
        """Nothing starts."""

    def start(self, sessions: Sequence[Task | Journal]) -> None:
        """Sessions that ``RecordedSessions`` has made."""
        assert all(isinstance(task, Task) and task.id in self.sessions for task in sessions), "nothing is in flight"

    def reply(self, turns: Mapping[int, Sequence[SampledTurn]]) -> None:
        for id, of_session in turns.items():
            self.sessions[id].turns += of_session

    def collect(self, wait: Collection[int], others: Collection[int] = ()) -> list[Wanted | Finished]:
        return [self.sessions[id].answer() for id in wait]

    def ready(self, others: Collection[int], seconds: float = 0.0) -> list[Wanted | Finished]:
        raise AssertionError("a replay runs in step")

    def stop(self, sessions: Iterable[int]) -> None:
        for id in sessions:
            del self.sessions[id]

    def journal(self, session: int) -> Journal:
        raise AssertionError("a replay saves nothing")


class RecordedSessions(AgentSessions):
    """Makes sessions that repeat the recorded ones with their seeds."""

    pool: RecordedAgents

    def session(self, id: int, prompt: Prompt, seed: int, greedy: bool) -> Session:
        """Raises ValueError, one line, for a session that was not recorded."""
        session = super().session(id, prompt, seed, greedy)
        recording = self.pool.recordings.get(seed)
        if recording is None:
            raise ValueError(
                f"trainer.replay.mode=rollout: the dump has no conversation of row {prompt.uid} with this seed (it was "
                "stopped, or its prompt has changed), and a replay calls no tools; use trainer.replay.mode=train"
            )
        self.pool.sessions[session.task.id] = RepeatedSession(session.task.id, recording)
        return session
