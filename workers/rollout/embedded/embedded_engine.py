"""The embedded rollout engine: transformers' modules with a KV cache and a scheduler, in the trainer's process.

Continuous batching: one step is one forward over flat tokens, one of each running sequence and the whole prompts of requests that
enter. Equal prompts (the responses of a group) are computed once and copied in the cache. If the trainer's weights are not
sharded and have the same dtype, the engine uses them without a copy.

Cost: when weights change or the engine sleeps, the cache is dropped. Unfinished sequences return to the queue with their tokens,
and are processed again like prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from workers.rollout.base import Completion, FinishReason, NewTokens, Request, Rollout, RolloutSpec, check_requests
from workers.rollout.cached_attention import StepAttention
from workers.rollout.embedded.running_batch import RowSequence, RunningRows
from workers.rollout.kv_cache import KVCache
from workers.rollout.malloc_trim import KEPT_BYTES, trim_free_memory
from workers.rollout.sampling import sample, uniforms
from workers.rollout.sync.expected_weights import EngineModel
from workers.rollout.verification import HeldWeight

PROMPT_TOKENS_AT_ONCE = 8192  # prompt tokens per step, repeated prompts counted once; bounds the memory of activations
# Bytes from which sleep returns freed memory to the system. Below, the trainer's next step uses it again, and needs no new pages.
MIN_BYTES_TO_TRIM = KEPT_BYTES
COUNTERS = ("prompt_tokens", "response_tokens", "decode_steps", "cache_bytes", "cached_tokens")
MOVE_COST = 3  # cost of moving a chunk, in units of one read of a chunk by attention


class EmbeddedRollout(Rollout):
    """Rollout engine in the trainer's process and on its device; each rank is an engine of its own."""

    def __init__(self, spec: RolloutSpec) -> None:
        self.device = torch.device(spec.device)
        dtype = getattr(torch, spec.rollout.dtype)
        self.max_rows, self.max_length = spec.rollout.max_num_seqs, spec.max_model_len
        self.model = EngineModel(spec.model, dtype, self.device)
        self.cache = KVCache(self.model.cache_shape, self.max_rows, self.max_length, dtype, self.device)
        self.rows = RunningRows(self.max_rows, self.max_length, self.model.vocab_size)
        self._waiting: deque[RowSequence] = deque()
        self._ids: set[int] = set()
        self._submitted = 0
        self._excess = 0
        self._counters = dict.fromkeys(COUNTERS, 0.0)

    # Requests

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Also raises ValueError for an id that is unfinished. On any error none of the requests is queued."""
        ids = check_requests(requests, self._ids, max_length=self.max_length, vocab_size=self.model.vocab_size)
        for request in requests:
            self._waiting.append(RowSequence(request, order=self._submitted))
            self._submitted += 1
        self._ids = ids

    @property
    def unfinished(self) -> int:
        return len(self._ids)

    def new_tokens(self) -> list[NewTokens]:
        # Requests that were requeued wait with their tokens.
        responses = [*self.rows.collect(np.arange(self.rows.n)), *self._waiting]
        new = [response.take_new(self._version) for response in sorted(responses, key=lambda response: response.order)]
        return [tokens for tokens in new if tokens.token_ids]

    @torch.inference_mode()
    def abort(self, ids: Sequence[int] | None = None) -> list[Completion]:
        """End requests and return their partial responses in order of submission.

        Ids that are not unfinished are ignored: the request may have finished in the meantime.
        """
        chosen = self._ids if ids is None else self._ids.intersection(ids)
        gone = np.array([sequence.request.id in chosen for sequence in self.rows.sequences], dtype=bool)
        aborted = self.rows.collect(np.flatnonzero(gone))
        self._remove(gone)
        aborted += [sequence for sequence in self._waiting if sequence.request.id in chosen]
        self._waiting = deque(sequence for sequence in self._waiting if sequence.request.id not in chosen)
        return self._completed(aborted, ["abort"] * len(aborted))

    def _completed(self, sequences: list[RowSequence], reasons: list[FinishReason]) -> list[Completion]:
        self._ids -= {sequence.request.id for sequence in sequences}
        return [sequence.completion(reason, self._version) for sequence, reason in zip(sequences, reasons, strict=True)]

    # One step

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Run one decode step. Raises FloatingPointError, naming a request, where the model's logits are not finite.

        Rows of the step, in this order: running ones; forks, whose prompt a running row has in the cache; one row for each new
        prompt; repeats of these prompts. The forward computes all but the repeats.
        """
        self._check_awake()
        if not self._ids:
            return []
        # Before anything enters: it moves rows, and the indices below refer to their final places.
        self._put_in_order()
        rows, kept = self.rows, self.rows.n
        holders, prompts, repeated = self._enter()
        self.prefilled = sum(map(len, prompts))
        longest = int(rows["cached"].max()) + 1
        self.cache.reserve(rows.n, longest, kept=kept, expected_rows=rows.n + len(self._waiting))
        # A fork copies the cache of its prompt except for the last token, which it decodes in this step.
        forks = np.arange(kept, kept + len(holders))
        self.cache.copy(holders, forks, rows["cached"][forks])

        decoding = kept + len(holders)
        attention = StepAttention(self.cache, rows["cached"][:decoding].copy(), [len(prompt) for prompt in prompts])
        self._excess += attention.excess
        logits = self._forward(attention, [rows["last_token"][:decoding], *prompts])
        # Repeats copy the complete prompt, which only now is in the cache, and share its logits: each samples with its own seed.
        if len(repeated):
            source, target = repeated + decoding, np.arange(rows.n - len(repeated), rows.n)
            self.cache.copy(source, target, rows["cached"][target] + 1)
            logits = logits[self._tensor(np.concatenate([np.arange(target[0]), source]))]

        draws = uniforms(rows["key"], rows["count"])
        token_ids, log_probs = sample(logits, rows["temperature"], rows["top_k"], rows["top_p"], draws)
        answer = torch.stack([token_ids.double(), log_probs.double()]).cpu().numpy()  # one transfer; exact below 2^53
        return self._append(answer[0].astype(np.int64), answer[1].astype(np.float32))

    def _put_in_order(self) -> None:
        """Sort rows by length, longest first, once attention has wasted as much on unsorted rows as moving them costs."""
        if not self._excess:
            return
        chunks = self.cache.chunks_of(self.rows["cached"] + 1)
        wrong = np.flatnonzero(chunks != np.sort(chunks)[::-1])
        if self._excess >= MOVE_COST * chunks[wrong].sum():
            self._move(wrong[np.argsort(-chunks[wrong], kind="stable")], wrong)
            self._excess = 0

    def _enter(self) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
        """Turn waiting requests into rows, in order of submission, while there is room.

        Row order: forks (a running row has the prompt in its cache), one row per other prompt with the longest first, repeats of
        these prompts. Returns the running row that each fork copies (forks,), the prompts, and the index of the prompt that each
        repeat copies (repeats,).
        """
        rows = self.rows
        room = min(self.max_rows - rows.n, len(self._waiting))
        running: dict[tuple[int, ...], int] = {}
        if room:
            fresh = ((row, one) for row, one in enumerate(rows.sequences) if not one.has_old_keys)
            running = {sequence.request.prompt_ids: row for row, sequence in fresh}
        forks: list[RowSequence] = []
        groups: dict[tuple[int, ...], list[RowSequence]] = {}
        tokens = 0
        for _ in range(room):
            known = self._waiting[0].known
            if known in running:
                forks.append(self._waiting.popleft())
                continue
            if known not in groups:
                tokens += len(known)
                if groups and tokens > PROMPT_TOKENS_AT_ONCE:  # a single longer prompt still enters, by itself
                    break
                groups[known] = []
            groups[known].append(self._waiting.popleft())
        prompts = sorted(groups, key=len, reverse=True)
        repeats = [(i, sequence) for i, prompt in enumerate(prompts) for sequence in groups[prompt][1:]]
        entered = forks + [groups[prompt][0] for prompt in prompts] + [sequence for _, sequence in repeats]
        rows.add(entered)
        # Sequences with tokens were requeued by new weights: their prompt was counted when they first entered.
        self._counters["prompt_tokens"] += sum(len(s.request.prompt_ids) for s in entered if not s.token_ids)
        found = [(fork, 1) for fork in forks] + [(sequence, 0) for _, sequence in repeats]  # a fork computes its last token
        self._counters["cached_tokens"] += sum(len(s.request.prompt_ids) - anew for s, anew in found if not s.token_ids)
        holders = np.array([running[fork.known] for fork in forks], dtype=np.int64)
        return holders, [np.array(prompt) for prompt in prompts], np.array([i for i, _ in repeats], dtype=np.int64)

    def _forward(self, attention: StepAttention, token_ids: list[np.ndarray]) -> Tensor:
        """Logits of the next token of each decoding row and each prompt: (rows + prompts, V).

        token_ids: the decoding rows' last tokens, then the tokens of each prompt.
        """
        ends = np.cumsum([len(ids) for ids in token_ids])
        wanted: Tensor | int = 0  # all positions
        if len(token_ids) > 1:
            wanted = self._tensor(np.concatenate([np.arange(ends[0]), ends[1:] - 1]))
        output = self.model.module(
            input_ids=self._tensor(np.concatenate(token_ids))[None],
            position_ids=self._tensor(attention.positions)[None],
            use_cache=False,
            logits_to_keep=wanted,
            step=attention,
        )
        return output.logits[0]

    def _append(self, token_ids: np.ndarray, log_probs: np.ndarray) -> list[Completion]:
        """Append a token to every row, remove the rows that ended, and return their completions."""
        rows = self.rows
        if not np.isfinite(log_probs).all():
            request = rows["sequence"][np.flatnonzero(~np.isfinite(log_probs))[0]].request
            raise FloatingPointError(
                f"request {request.id}: the model's logits are not finite (weights of version {self._version})"
            )
        self._counters["decode_steps"] += 1
        self._counters["response_tokens"] += rows.n
        self._counters["cache_bytes"] = max(self._counters["cache_bytes"], self.cache.nbytes)
        stopped, ended = rows.append(token_ids, log_probs)
        if not ended.any():
            return []
        sequences = rows.collect(np.flatnonzero(ended))
        # Request ids, not rows: removing rows below renumbers them.
        by_stop = {sequence.request.id for sequence in rows["sequence"][stopped]}
        self._remove(ended)
        return self._completed(sequences, ["stop" if s.request.id in by_stop else "length" for s in sequences])

    def _remove(self, gone: np.ndarray) -> None:
        """Remove the rows in ``gone``, bool (n,), and fill the gaps with the last rows: few copies instead of shifting all."""
        left = len(gone) - int(gone.sum())
        self._move(left + np.flatnonzero(~gone[left:]), np.flatnonzero(gone[:left]))
        self.rows.truncate(left)

    def _move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy rows in cache and table; the cache first, since it needs the lengths before the table changes."""
        self.cache.copy(source, target, self.rows["cached"][source])
        self.rows.move(source, target)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    # Weights and memory

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int, *, keep_cache: bool = False) -> None:
        """Copy weights from the stream.

        Raises ValueError, naming weights that are missing, unexpected or of another shape; the engine then has no weights.
        """
        self._begin_weights("load_weights", keep_cache=keep_cache)
        self.model.load(weights)
        self._weights_there, self._version = True, version

    def share_weights(self, weights: dict[str, Tensor], version: int) -> bool:
        """Use the trainer's tensors. Returns False if dtype or device differ from the engine's. Raises as load_weights does."""
        self._begin_weights("share_weights")
        self._weights_there = self.model.share(weights)
        if self._weights_there:
            self._version = version
        return self._weights_there

    def held_weights(self, *, exact: bool) -> Sequence[HeldWeight]:
        return self.model.held()

    def _begin_weights(self, call: str, *, keep_cache: bool = False) -> None:
        """Requeue running sequences: they keep their tokens, whose keys and values are recomputed with the new weights.

        keep_cache: they stay in their rows instead, and no request that enters later copies their prompts.
        """
        self._check_takes_weights(call)
        self._weights_there = False
        if not keep_cache:
            self._requeue()
            return
        for sequence in self.rows.collect(np.arange(self.rows.n)):
            sequence.stamp(self._version)
            sequence.has_old_keys = True

    def _requeue(self) -> None:
        """Return all rows to the front of the queue, in order of submission."""
        self._waiting.extendleft(reversed(self.rows.collect(np.arange(self.rows.n))))
        for sequence in self._waiting:
            sequence.stamp(self._version)
        self.rows.truncate(0)
        self._excess = 0

    def sleep(self) -> None:
        """Release cache and copied weights. Unfinished requests are kept and resume after wake and new weights."""
        self._requeue()
        freed = self.cache.nbytes + self.model.owned_bytes
        self.cache.drop()
        self.model.drop()
        if self.device.type == "cpu" and freed >= MIN_BYTES_TO_TRIM:
            trim_free_memory()
        self._weights_awake = self._weights_there = self._cache_awake = False

    def wake(self, *, weights: bool, kv_cache: bool) -> None:
        """Allocates nothing: the cache grows as requests need it, and weights are allocated as they are loaded."""
        self._weights_awake |= weights
        self._cache_awake |= kv_cache

    def close(self) -> None:
        self.sleep()

    def stats(self) -> dict[str, float]:
        """Counters since the last call. cache_bytes is the maximum; a prompt counts once for each of its requests."""
        counters = dict(self._counters)
        self._counters = dict.fromkeys(counters, 0.0)
        return counters
