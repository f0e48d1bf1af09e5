"""Rounds of prompts for dynamic sampling, in one flow of requests: engines without work begin the next round early."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch

from trainer.agents.sessions.session_flow import Flow, Session
from trainer.data.dataset import Prompt, PromptStream
from trainer.rollout.sampler import Requested, Sampler
from trainer.run.timing import Phases
from workers.batch import Batch


@dataclass(slots=True)
class Round:
    """Prompts that are generated together, ``requested``. position: state of the stream before they were drawn.

    first: id of its first request in the flow. ended: responses that are not submitted for scoring yet; their ids are the rows of
    ``requested``. unfinished: number of the others.
    """

    prompts: Sequence[Prompt]
    position: dict[str, int]
    requested: Requested
    first: int = 0
    ended: list[Batch] = field(default_factory=list)
    unfinished: int = 0

    @property
    def end(self) -> int:
        """Id after its last one."""
        return self.first + len(self.requested.questions)


class Rounds:
    """The rounds of a step, scored in the order in which they are drawn.

    While the last responses of a round are generated, most slots of the engines are free. A later round may begin there; it has
    the prompts and seeds that it would have otherwise, and is scored when its turn comes. If the step ends before, its prompts
    return to the stream.
    """

    def __init__(self, sampler: Sampler, step: int, stream: PromptStream, phases: Phases) -> None:
        self._sampler = sampler
        self._step = step
        self._stream = stream
        self._phases = phases
        self._first_epoch = stream.epoch
        self._early: deque[Round] = deque()
        self._flow: Flow | None = None
        self._begun: list[Round] = []
        """Rounds of the flow, in the order of their ids."""

    def next(self, skip: Collection[int]) -> Round:
        """The next round: one that has begun, or a new one without the prompts whose uid is in ``skip``."""
        if self._early:
            return self._early.popleft()
        one = self._draw(skip)
        if one.prompts:
            with self._phases("gen"):
                # The engines are empty. A new flow gives them their weights again if they slept while a reward model scored.
                expected = len(one.requested.questions)
                self._begun = []
                self._flow = self._sampler.flow(self._sampler.sampling, self, expected=expected)
                self._begin(one, self._flow)
                self._flow.start()
        return one

    def generate(self, current: Round, expects: Callable[[int, int], bool]) -> Batch:
        """Scored responses of the round that ``next`` returned, which has prompts; as Sampler.sample_to_train.

        expects: whether the step will need another round, besides the given numbers of rounds and groups without a verdict.
        """
        assert self._flow is not None, "next began the round"
        sampler, parts = self._sampler, list[Batch]()
        with self._phases("gen"):
            while current.unfinished:
                for part in self._flow.wait():
                    self._record(part, (current, *self._early))
                open_groups = len(current.prompts) + sum(len(early.prompts) for early in self._early)
                # One round per tick; not beyond the epoch, where prompts that were kept until then must not be drawn again.
                if (
                    sampler.may_begin_early
                    and not self._flow.waiting
                    and self._stream.epoch == self._first_epoch
                    and expects(1 + len(self._early), open_groups)
                ):
                    self._early.append(self._draw(()))
                    self._begin(self._early[-1], self._flow)
                self._flow.start()  # the engines work while responses are decoded and scored
                parts += [sampler.submit_rows(part, current.requested) for part in current.ended]
                current.ended = []
            parts += [sampler.submit_rows(part, current.requested) for part in current.ended]
        return sampler.finish_training_batch(parts, current.requested, self._step, self._phases)

    def give_back(self) -> int:
        """Stop the rounds that were begun for nothing and return their prompts to the stream; returns their tokens so far."""
        if not self._early or self._flow is None:
            return 0
        with self._phases("gen"):
            sampled = self._flow.discard()
        # To where the first of them was drawn. The next step draws the same prompts, with the seeds of that step.
        self._stream.load(self._early[0].position)
        unused = [*sampled, *(part for early in self._early for part in early.ended)]
        return sum(part.total_tokens for part in unused)

    def _draw(self, skip: Collection[int]) -> Round:
        # Prompts come again when a step needs more than one pass over the data. The number of passes enters the seeds: the same
        # step, prompt and sample would otherwise give the same responses.
        again, position = self._stream.epoch - self._first_epoch, self._stream.state()
        prompts = [prompt for prompt in self._stream.draw() if prompt.uid not in skip]
        purpose = "train" if not again else f"train_again_{again}"
        return Round(prompts, position, self._sampler.request_to_train(prompts, purpose, self._step))

    def _begin(self, one: Round, flow: Flow) -> None:
        questions, each = one.requested.questions, one.requested.each
        one.first = self._begun[-1].end if self._begun else 0
        one.unfinished = len(questions)
        self._begun.append(one)
        for row in range(0, len(questions), each):
            flow.admit(range(one.first + row, one.first + row + each), int(questions.lengths[row]))

    def requests(self, ids: Sequence[int]) -> Batch:
        """See Source. ids of a call are of one round or several."""
        return Batch.concat(
            [one.requested.requests(rows).with_rows(id=torch.tensor(of)) for one, rows, of in self._by_round(ids)]
        )

    def sessions(self, ids: Sequence[int]) -> list[Session]:
        """See Source."""
        found = [session for one, rows, _ in self._by_round(ids) for session in one.requested.sessions(rows)]
        return [replace(session, id=id) for session, id in zip(found, ids, strict=True)]

    def _by_round(self, ids: Sequence[int]) -> Iterator[tuple[Round, list[int], list[int]]]:
        """Rounds, the rows in each, and their ids."""
        for one, of in groupby(ids, key=lambda id: next(one for one in self._begun if id < one.end)):
            same = list(of)
            yield one, [id - one.first for id in same], same

    def _record(self, part: Batch, rounds: Sequence[Round]) -> None:
        """Give each round its responses."""
        for one in rounds:
            rows = part.rows["id"] - one.first
            mine = ((rows >= 0) & (rows < len(one.requested.questions))).nonzero().flatten()
            if len(mine):
                one.ended.append(part.with_rows(id=rows).select(mine))
                one.unfinished -= len(rows[mine].unique())  # a session may have several rows
