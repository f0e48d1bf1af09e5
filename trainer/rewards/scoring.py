"""Records of responses and scores, calls of score functions, count of failures. Scoring processes import it: no torch."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Lock, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from trainer.run.user_code import describe

if TYPE_CHECKING:
    from trainer.run.events import Events

ARGUMENTS = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})
BATCH_ARGUMENTS = frozenset(f"{name}s" for name in ARGUMENTS)
Item = TypeVar("Item")
Result = TypeVar("Result")
ScoreFunction = Callable[..., Any]
"""verl's signature, called by keyword: (data_source, solution_str, ground_truth, extra_info) -> number, or dict with "score".

Over whole batches (takes_batches): (data_sources, solution_strs, ground_truths, extra_infos) -> one of these each, in order.
"""


class Response(NamedTuple):
    """A response to be scored.

    solution_str: decoded without special tokens. finished: ended with a stop token, not truncated at the length limit.

    Only for servers, else empty: prompt: the rendered prompt. written: the response with special tokens, if that differs from
    solution_str. messages: the unrendered prompt, a text or a conversation. ids: token ids of prompt and response. words: hash of
    the tokenizer that produced them. whole: messages are those of a conversation up to the last turn of the model, not a prompt.
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
    tokenizer_id: str = ""
    whole: bool = False

    @property
    def query(self) -> str:
        """Text of prompt and response, including special tokens."""
        return self.prompt + (self.written or self.solution_str)


@dataclass(frozen=True, slots=True)
class Score:
    """Score of one response.

    error: reason of a failure; ``value`` is then None, or reward.timeout_score after a timeout. extra: other numbers returned by
    the function, logged as metrics.
    """

    value: float | None
    extra: dict[str, float]
    error: str | None
    timed_out: bool = False


@dataclass(slots=True)
class ScoringProgress:
    """Progress of one call of Rewards.score, counted in responses; read by the display while the call runs."""

    asked: int = 0
    done: int = 0
    late: int = 0

    def add(self, scores: Collection[Score]) -> None:
        self.done += len(scores)
        self.late += sum(score.timed_out for score in scores)

    def __str__(self) -> str:
        return f"{self.done} of {self.asked} answers" + (f", {self.late} late" if self.late else "")


class Rewards(Protocol):
    """Source of scores, a context manager: local processes (RewardRunner) or servers (RemoteRewards).

    submit queues responses and returns at once; scoring begins while others are still generated. keys: of these responses, unique
    among those that are not finished. finish waits for the scores of some of them; the others remain. score does both, in order,
    and needs the keys from 0.
    """

    progress: ScoringProgress

    def start(self) -> None: ...

    def wait_ready(self) -> None: ...

    def submit(self, answers: Sequence[Response], keys: Sequence[int]) -> None: ...

    def finish(self, keys: Sequence[int]) -> list[Score]: ...

    def score(self, answers: Sequence[Response]) -> list[Score]: ...

    def __enter__(self) -> Rewards: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def score_one(function: ScoreFunction, answer: Response) -> Score:
    """Score one response; an exception of the function becomes the error of the score.

    ``finished`` is passed in extra_info, so that functions keep verl's signature.
    """
    try:
        result = function(
            data_source=answer.data_source,
            solution_str=answer.solution_str,
            ground_truth=answer.ground_truth,
            extra_info=_extra_info(answer),
        )
        return _to_score(awaited(result))
    except (Exception, SystemExit) as error:  # a user's function may raise anything; it is reported as a failed reward
        return Score(None, {}, describe(error))


def takes_batches(function: ScoreFunction) -> bool:
    """Whether the function scores whole batches: it has a parameter ``solution_strs``."""
    return "solution_strs" in inspect.signature(function).parameters


def score_batch(function: ScoreFunction, answers: Sequence[Response]) -> list[Score]:
    """Score responses by a function over whole batches; an exception becomes the error of each."""
    try:
        results = list(
            awaited(
                function(
                    data_sources=[answer.data_source for answer in answers],
                    solution_strs=[answer.solution_str for answer in answers],
                    ground_truths=[answer.ground_truth for answer in answers],
                    extra_infos=[_extra_info(answer) for answer in answers],
                )
            )
        )
    except (Exception, SystemExit) as error:  # as in score_one
        return [Score(None, {}, describe(error))] * len(answers)
    if len(results) != len(answers):
        return [Score(None, {}, f"the function returned {len(results)} rewards for {len(answers)} responses")] * len(answers)
    return [_to_score(result) for result in results]


def score_all(function: ScoreFunction, answers: Sequence[Response], threads: int) -> Iterator[Score]:
    """Scores in order, each as soon as it and all before it are known. threads: responses scored concurrently."""
    if takes_batches(function):
        return iter(score_batch(function, answers))
    return in_threads(partial(score_one, function), answers, threads)


class DaemonThreads(Generic[Item, Result]):
    """Applies a function to items in at most ``threads`` threads, which end when no item is left.

    Daemon threads instead of an executor: at exit an executor would wait for requests to a judge that are in flight.
    """

    def __init__(self, function: Callable[[Item], Result], threads: int) -> None:
        self._function = function
        self._threads = threads
        self._todo: deque[tuple[Item, Future[Result]]] = deque()
        self._running = 0
        self._lock = Lock()

    def add(self, item: Item) -> Future[Result]:
        result = Future[Result]()
        with self._lock:
            self._todo.append((item, result))
            starts = self._running < self._threads
            self._running += starts
        if starts:
            Thread(target=self._work, daemon=True).start()
        return result

    def clear(self) -> None:
        """Drop the items that no thread has begun."""
        with self._lock:
            self._todo.clear()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._todo:
                    self._running -= 1
                    return
                item, result = self._todo.popleft()
            try:
                result.set_result(self._function(item))
            except BaseException as error:  # raised again by result() in the consumer
                result.set_exception(error)


def in_threads(function: Callable[[Item], Result], items: Sequence[Item], threads: int) -> Iterator[Result]:
    """Apply ``function`` to the items in ``threads`` threads (1: this one); yield results in order as soon as they are known."""
    if threads == 1:
        yield from map(function, items)
        return
    workers = DaemonThreads(function, threads)
    try:
        for result in [workers.add(item) for item in items]:
            yield result.result()
    finally:
        workers.clear()  # the consumer may have stopped early


def awaited(result: Any) -> Any:
    """Result of a function; that of an async one is computed in an event loop of its own."""
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _extra_info(answer: Response) -> dict[str, Any]:
    return answer.extra_info | {"finished": answer.finished}


def _to_score(result: Any) -> Score:
    extra: dict[str, float] = {}
    if isinstance(result, dict):
        if "score" not in result:
            return Score(None, {}, f'the reward is a dict without "score": it has {", ".join(map(str, result)) or "nothing"}')
        numbers = {str(name): finite(value) for name, value in result.items() if name != "score"}
        extra = {name: number for name, number in numbers.items() if number is not None}  # only numbers become metrics
        result = result["score"]
    value = finite(result)
    if value is None:
        return Score(None, {}, f"the reward is {result!r:.60}, not a finite number within float32")
    return Score(value, extra, None)


MOST = 3.4028234663852886e38  # of float32
"""Largest score or extra number: batches have them in float32, where more is infinite and the advantages of the group NaN."""


def finite(value: Any) -> float | None:
    """Convert a number of any library to float; None for text, NaN, infinity, what float32 cannot hold, and everything else."""
    # float() would accept the text "1.5", and a function that returns text has an error.
    if isinstance(value, str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= MOST else None  # not of NaN either


def check_some_scored(scores: Sequence[Score], of_what: str) -> None:
    """Raises ValueError, with the first error, if there is no score at all."""
    if scores and all(score.value is None for score in scores):
        raise ValueError(f"all {len(scores)} rewards of {of_what} failed; the first: {scores[0].error}")


MOST_REPORTED = 10
"""Maximum number of kinds of failure reported per run: a function may raise a different message each time."""


class Failures:
    """Counts failed rewards per step, and records the first failure of each kind as an event."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._reported: set[str] = set()
        self.start_step()

    def start_step(self) -> None:
        self._asked = self._failed = self._timed_out = 0

    def add(self, step: int, purpose: str, scores: Sequence[Score]) -> None:
        """Count the scores and failures. The first failure of each kind becomes an event (console, events.jsonl, report)."""
        errors = [score.error for score in scores if score.error is not None]
        self._asked += len(scores)
        self._failed += len(errors)
        self._timed_out += sum(score.timed_out for score in scores)
        for error in errors:
            if len(self._reported) < MOST_REPORTED and kind_of(error) not in self._reported:
                self._reported.add(kind_of(error))
                self._events.add(step, "reward", f"{len(errors)} of {len(scores)} rewards of {purpose} failed: {error}")

    def metrics(self) -> dict[str, float]:
        """Fractions of all responses scored in the step, including greedy baselines and dropped groups."""
        asked = max(self._asked, 1)
        return {"reward/failed_share": self._failed / asked, "reward/timed_out_share": self._timed_out / asked}


def kind_of(error: str) -> str:
    """Kind of an error: the start of its text and the location at its end, without the message in between."""
    return f"{error[:12]} {error.rpartition('(')[2]}"
