"""What is scored, what comes back, and how one answer gets its score. Loads no torch: scoring processes start with it."""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Thread
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

from trainer.user_code import describe

ARGUMENTS = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})
BATCH_ARGUMENTS = frozenset(f"{name}s" for name in ARGUMENTS)
Item = TypeVar("Item")
Result = TypeVar("Result")
ScoreFunction = Callable[..., Any]
"""verl's signature, called by keyword: (data_source, solution_str, ground_truth, extra_info) -> number, or dict with "score".

One of whole batches (takes_batches): (data_sources, solution_strs, ground_truths, extra_infos) -> as many of these, in order.
"""


class Answer(NamedTuple):
    """solution_str: the answer decoded without special tokens. finished: it ended with a stop token, not at the length limit.

    Where they are known, for servers: prompt: the text before it. written: the answer with its special tokens and the stop token,
    where that is more than solution_str. messages: what the prompt was made of, a text or a conversation. ids: prompt and answer
    as tokens, of a tokenizer whose rules are ``words``.
    """

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]
    finished: bool
    prompt: str = ""
    written: str = ""
    messages: Any = None
    ids: list[int] | None = None
    words: str = ""

    @property
    def query(self) -> str:
        """Prompt and answer as the policy's tokens read, special tokens included."""
        return self.prompt + (self.written or self.solution_str)


@dataclass(frozen=True, slots=True)
class Score:
    """error: why the function gave no value; ``value`` is then None, or reward.timeout_score of one that timed out. extra: the
    other numbers that the function gave, for the metrics."""

    value: float | None
    extra: dict[str, float]
    error: str | None
    timed_out: bool = False


@dataclass(slots=True)
class Progress:
    """Of one call of Rewards.score, in answers; read by the display while the call runs."""

    asked: int = 0
    done: int = 0
    late: int = 0

    def add(self, scores: Collection[Score]) -> None:
        self.done += len(scores)
        self.late += sum(score.timed_out for score in scores)

    def __str__(self) -> str:
        return f"{self.done} of {self.asked} answers" + (f", {self.late} late" if self.late else "")


class Rewards(Protocol):
    """What gives scores: processes of ours (RewardRunner), or servers (RemoteRewards). A context manager."""

    progress: Progress

    def start(self) -> None: ...

    def wait_ready(self) -> None: ...

    def score(self, answers: Sequence[Answer]) -> list[Score]: ...

    def __enter__(self) -> Rewards: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def judge(function: ScoreFunction, answer: Answer) -> Score:
    """The score of one answer; whatever the function raises becomes the score's error.

    The function finds ``finished`` in extra_info, so that one that wants it keeps verl's signature.
    """
    try:
        result = function(
            data_source=answer.data_source,
            solution_str=answer.solution_str,
            ground_truth=answer.ground_truth,
            extra_info=_extra_info(answer),
        )
        return _to_score(result)
    except (Exception, SystemExit) as error:  # a user's function may raise anything; it is told, not swallowed
        return Score(None, {}, describe(error))


def takes_batches(function: ScoreFunction) -> bool:
    """Whether it is to be called once for all answers: it has an argument ``solution_strs``."""
    return "solution_strs" in inspect.signature(function).parameters


def judge_batch(function: ScoreFunction, answers: Sequence[Answer]) -> list[Score]:
    """The scores by a function of whole batches; whatever it raises becomes the error of each."""
    try:
        results = list(
            function(
                data_sources=[answer.data_source for answer in answers],
                solution_strs=[answer.solution_str for answer in answers],
                ground_truths=[answer.ground_truth for answer in answers],
                extra_infos=[_extra_info(answer) for answer in answers],
            )
        )
    except (Exception, SystemExit) as error:  # as in judge
        return [Score(None, {}, describe(error))] * len(answers)
    if len(results) != len(answers):
        return [Score(None, {}, f"{len(results)} rewards came back for {len(answers)} answers")] * len(answers)
    return [_to_score(result) for result in results]


def judge_all(function: ScoreFunction, answers: Sequence[Answer], threads: int) -> Iterator[Score]:
    """The scores in order, each as soon as it and those before it are known. threads: answers judged at a time."""
    if takes_batches(function):
        return iter(judge_batch(function, answers))
    return in_threads(partial(judge, function), answers, threads)


def in_threads(function: Callable[[Item], Result], items: Sequence[Item], threads: int) -> Iterator[Result]:
    """``function`` of each item in order, as soon as it and those before are known. threads: at work at a time; 1: this one."""
    if threads == 1:
        yield from map(function, items)
        return
    todo = deque((item, Future[Result]()) for item in items)
    results = [result for _, result in todo]

    def work() -> None:
        with suppress(IndexError):  # nothing is left to do
            while True:
                item, result = todo.popleft()
                try:
                    result.set_result(function(item))
                except BaseException as error:  # whoever waits for the result gets it
                    result.set_exception(error)

    try:
        for _ in range(min(threads, len(items))):
            Thread(target=work, daemon=True).start()  # the end of the process waits for no judge; for an executor's it would
        for result in results:
            yield result.result()
    finally:
        todo.clear()


def _extra_info(answer: Answer) -> dict[str, Any]:
    return answer.extra_info | {"finished": answer.finished}


def _to_score(result: Any) -> Score:
    extra: dict[str, float] = {}
    if isinstance(result, dict):
        if "score" not in result:
            return Score(None, {}, f'the reward is a dict without "score": it has {", ".join(map(str, result)) or "nothing"}')
        numbers = {str(name): finite(value) for name, value in result.items() if name != "score"}
        extra = {name: number for name, number in numbers.items() if number is not None}  # text is no metric
        result = result["score"]
    value = finite(result)
    if value is None:
        return Score(None, {}, f"the reward is {result!r:.60}, not a finite number")
    return Score(value, extra, None)


def finite(value: Any) -> float | None:
    """A number of any library as a float; None for text, NaN, infinity and everything else."""
    if isinstance(value, str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
