"""Rollout role: generates responses to prompts with the weights of a model role."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workers.batch import Batch
from workers.compilation import COMPILE_TIME
from workers.metric import Metric, Metrics
from workers.roles.memory_scheduler import GCTime, MemoryScheduler
from workers.roles.recompute_time import RecomputeTime
from workers.rollout.base import Completion, NewTokens, Request, Rollout, Sampling

# The controller imports this module to name the methods that it calls: it must not load transformers.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from workers.rollout.sync.weight_sync import WeightSync


class RolloutRole:
    """One rank's part of the rollout role. The controller calls its methods by ``rpc.role_call``."""

    def __init__(
        self,
        rollout: Rollout,
        source: str | None,
        memory_scheduler: MemoryScheduler,
        sync: WeightSync,
        during: Callable[[], AbstractContextManager[None]] = nullcontext,
        gc_time: GCTime | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """source: the role in this process whose weights the engine uses; None: it is in another process.

        sync: transfers the weights from it to the engine, within a ``during()``. gc_time: of this process, reported with each
        sync. tokenizer: decodes responses; None: the controller does.
        """
        self.rollout = rollout
        self.source = source
        self.memory_scheduler = memory_scheduler
        self.sync = sync
        self.during = during
        self.gc_time = gc_time
        self.tokenizer = tokenizer
        self.recompute = RecomputeTime()

    def sync_weights(self, version: int, keep_cache: bool = False) -> Metrics:
        """Bring the engine's weights up to date; a source in this process may leave the device afterwards. Collective.

        Unfinished requests continue with the new weights. keep_cache: see Rollout.load_weights.

        Returns metrics: what was verified of the engine's weights; and, since the last sync, the seconds of the slowest rank
        in engine_sleep, engine_wake, release_memory (see MemoryScheduler), gc, compile (where something was compiled) and, if
        responses were submitted again, recompute (see RecomputeTime), which are parts of the phases in which they occurred.
        Raises WeightMismatch.
        """
        with self.during():
            # This sync decides anew whether the engine can share the source's tensors.
            self.memory_scheduler.share_weights_of(None)
            self.memory_scheduler.enter("sync", self.source)
            shared, metrics = self.sync(version, keep_cache=keep_cache)
            if shared:
                self.memory_scheduler.share_weights_of(self.source)
        seconds = self.memory_scheduler.take_seconds()
        if self.gc_time is not None:
            seconds["gc"], self.gc_time.seconds = self.gc_time.seconds, 0.0
        if compiling := COMPILE_TIME.take():
            seconds["compile"] = compiling
        again, spent = self.recompute.again, self.recompute.take()
        if again and self.rollout.prefilled is not None:
            seconds["recompute"] = spent
        return metrics | {f"timing_s/{name}": Metric.max(spent) for name, spent in seconds.items()}

    def advance(
        self, prompts: Batch | None, sampling: Sampling, steps: int, abort: Sequence[int] = (), streams: bool = False
    ) -> Batch:
        """Submit prompts and run the engine for at most ``steps`` steps; returns the responses that ended, as they did.

        prompts: rows of input_ids, with rows["id"] (unique among unfinished requests), rows["seed"], rows["greedy"] (1: greedy,
        whatever ``sampling`` is) and, optional, rows["begun"] (number of last tokens that are the beginning of the response, not
        returned again) and rows of the fields of ``sampling`` in OWN_SAMPLING, which replace them. None: no new ones. abort: ids
        of requests that are ended before. streams: also return the new tokens of unfinished requests.

        Returned tokens: input_ids, rollout_log_probs, weight_version (T,). Returned rows: id, finished (1: terminated, 0:
        truncated); with ``streams`` also ended (bool), of which all tokens are returned. Returned objects, with a tokenizer and
        without ``streams``: response, the text of what is returned.
        """
        self.memory_scheduler.enter("generate")
        if abort:
            self.rollout.abort(abort)
        if prompts is not None:
            self.rollout.submit(requests := requests_of(prompts, sampling))
            self.recompute.again += sum(len(one.prompt_ids) + len(one.response_ids) for one in requests if one.response_ids)
        ended: list[Completion] = []
        # All ranks of a replica have the same requests and take the same number of steps.
        while steps and self.rollout.unfinished:
            began = time.perf_counter()
            ended += self.rollout.step()
            self.recompute.add(time.perf_counter() - began, self.rollout.prefilled or 0)
            steps -= 1
        if not streams:
            found = answers(ended)
            return found if self.tokenizer is None else with_texts(found, self.tokenizer)
        return suspended([*ended, *map(NewTokens.partial, self.rollout.new_tokens())])

    def suspend(self) -> Batch:
        """Take all unfinished requests from the engine; returns what it has sampled for them, with the columns of ``advance``.

        rows["ended"]: whether a response has ended in the meantime, as with SGLang, which generates between the calls too.
        """
        return suspended(self.rollout.abort())

    def stats(self) -> dict[str, float]:
        """The engine's counters since the last call; see Rollout.stats."""
        return self.rollout.stats()


OWN_SAMPLING = ("temperature", "top_k", "top_p", "max_tokens")
"""Fields of Sampling that a request may have of its own."""


def requests_of(prompts: Batch, sampling: Sampling) -> list[Request]:
    columns = [prompts.rows[name].tolist() for name in ("id", "seed")]
    begun = prompts.rows.get("begun", torch.zeros_like(prompts.lengths))
    own = [name for name in OWN_SAMPLING if name in prompts.rows]
    kinds = [*zip(*(prompts.rows[name].tolist() for name in ("greedy", *own)), strict=True)]
    # Made once for all requests that share it.
    of_kind = {}
    for greedy, *values in {*kinds}:
        kind = replace(sampling, **dict(zip(own, values, strict=True))) if own else sampling
        of_kind[greedy, *values] = replace(kind, temperature=0.0) if greedy else kind
    rows = zip(
        map(Tensor.tolist, prompts.split_rows("input_ids")), (prompts.lengths - begun).tolist(), kinds, *columns, strict=True
    )
    return [
        Request(id, tuple(ids[:end]), of_kind[kind], seed, response_ids=tuple(ids[end:])) for ids, end, kind, id, seed in rows
    ]


def answers(completions: list[Completion]) -> Batch:
    """Completions as a flat batch: T tokens in total, one row for each."""
    return Batch(
        lengths=torch.tensor([len(completion.token_ids) for completion in completions], dtype=torch.int64),
        tokens={
            "input_ids": torch.tensor([token for c in completions for token in c.token_ids], dtype=torch.int64),
            "rollout_log_probs": torch.tensor([value for c in completions for value in c.log_probs], dtype=torch.float32),
            "weight_version": torch.tensor([version for c in completions for version in c.versions], dtype=torch.int32),
        },
        rows={
            "id": torch.tensor([c.id for c in completions], dtype=torch.int64),
            "finished": torch.tensor([c.finish_reason == "stop" for c in completions], dtype=torch.int64),
        },
    )


def decode_responses(answers: Batch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Responses as text (B), without stop token and special tokens, as verl decodes the text that it scores."""
    ids, ends = answers.tokens["input_ids"].numpy(), (answers.offsets[1:] - answers.rows["finished"]).tolist()
    written: list[Any] = [ids[start:end] for start, end in zip(answers.offsets.tolist(), ends, strict=False)]
    # NumPy arrays instead of lists: for a list, the tokenizer checks the type of every token. It takes no rows for one empty row.
    return tokenizer.batch_decode(written, skip_special_tokens=True) if written else []


def with_texts(answers: Batch, tokenizer: PreTrainedTokenizerBase) -> Batch:
    """The responses with objects["response"], their texts."""
    return replace(answers, objects={"response": decode_responses(answers, tokenizer)})


def suspended(completions: list[Completion]) -> Batch:
    """What ``Rollout.abort`` returned, with the columns of RolloutRole.suspend."""
    ended = [completion.finish_reason != "abort" for completion in completions]
    return answers(completions).with_rows(ended=torch.tensor(ended, dtype=torch.bool))
