"""The embedded rollout engine: transformers' own modules, a cache and a scheduler of ours, in the trainer's process.

One step is one forward over flat tokens: one of each running answer, and whole prompts of requests that enter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from workers.rollout.base import Completion, Request, Rollout, RolloutSpec, check_requests
from workers.rollout.cached_attention import StepAttention
from workers.rollout.embedded.running_batch import FinishReason, RowSequence, RunningRows
from workers.rollout.kv_cache import KVCache
from workers.rollout.malloc_trim import give_back_free_memory
from workers.rollout.sampling import sample, uniforms
from workers.rollout.sync.expected_weights import BorrowedModel
from workers.rollout.verification import HeldWeight

PROMPT_TOKENS_AT_ONCE = 8192  # a step's prompts, not counting repeated ones; bounds the memory of activations
WORTH_GIVING_BACK = 64 << 20  # bytes; the process pays for it with all that the trainer's next step takes anew
COUNTERS = ("prompt_tokens", "response_tokens", "decode_steps", "cache_bytes", "cached_tokens")
MOVE_COST = 3  # of a chunk, in reads of a chunk by attention: what putting rows in order must earn back


class EmbeddedRollout(Rollout):
    def __init__(self, spec: RolloutSpec) -> None:
        self.device = torch.device(spec.device)
        dtype = getattr(torch, spec.rollout.dtype)
        self.max_rows, self.max_length = spec.rollout.max_num_seqs, spec.max_model_len
        self.model = BorrowedModel(spec.model, dtype, self.device)
        self.cache = KVCache(self.model.cache_shape, self.max_rows, self.max_length, dtype, self.device)
        self.rows = RunningRows(self.max_rows, self.max_length, self.model.vocab_size)
        self._waiting: deque[RowSequence] = deque()
        self._ids: set[int] = set()
        self._submitted = 0
        self._excess = 0
        self._counters = dict.fromkeys(COUNTERS, 0.0)

    # Requests

    def submit(self, requests: Sequence[Request]) -> None:
        """Also raises ValueError for an id that is unfinished. On any error none of the requests is queued."""
        ids = check_requests(requests, self._ids, max_length=self.max_length, vocab_size=self.model.vocab_size)
        for request in requests:
            self._waiting.append(RowSequence(request, self._submitted))
            self._submitted += 1
        self._ids = ids

    @property
    def unfinished(self) -> int:
        return len(self._ids)

    @torch.inference_mode()
    def abort(self, ids: Sequence[int] | None = None) -> list[Completion]:
        """In order of submission. An id that is not unfinished is passed over: it may have ended meanwhile."""
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
        """Raises FloatingPointError, naming a request, where the model's logits are not finite."""
        self._check_awake()
        if not self._ids:
            return []
        self._put_in_order()
        rows, kept = self.rows, self.rows.n
        holders, prompts, repeated = self._enter()
        longest = int(rows["cached"].max()) + 1
        self.cache.reserve(rows.n, longest, kept=kept, expected_rows=rows.n + len(self._waiting))
        forks = np.arange(kept, kept + len(holders))
        self.cache.copy(holders, forks, rows["cached"][forks])

        decoding = kept + len(holders)
        attention = StepAttention(self.cache, rows["cached"][:decoding].copy(), [len(prompt) for prompt in prompts])
        self._excess += attention.excess
        logits = self._forward(attention, [rows["last_token"][:decoding], *prompts])
        if len(repeated):
            source, target = repeated + decoding, np.arange(rows.n - len(repeated), rows.n)
            self.cache.copy(source, target, rows["cached"][target] + 1)
            logits = logits[self._tensor(np.concatenate([np.arange(target[0]), source]))]

        draws = uniforms(rows["key"], rows["count"])
        token_ids, log_probs = sample(logits, rows["temperature"], rows["top_k"], rows["top_p"], draws)
        answer = torch.stack([token_ids.double(), log_probs.double()]).cpu().numpy()  # one transfer; exact below 2^53
        return self._append(answer[0].astype(np.int64), answer[1].astype(np.float32))

    def _put_in_order(self) -> None:
        """The rows that reach furthest first, once rows out of place have cost attention as much as moving them will."""
        if not self._excess:
            return
        chunks = self.cache.chunks_of(self.rows["cached"] + 1)
        wrong = np.flatnonzero(chunks != np.sort(chunks)[::-1])
        if self._excess >= MOVE_COST * chunks[wrong].sum():
            self._move(wrong[np.argsort(-chunks[wrong], kind="stable")], wrong)
            self._excess = 0

    def _enter(self) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
        """Waiting requests become rows, in order of submission, while there is room.

        First those whose prompt a running row has in the cache: they copy it and decode its last token. Then one for each
        other prompt, the longest first, then the repeats of these. Returns the running row of each of the first, the
        prompts, and which prompt each repeat repeats.
        """
        rows = self.rows
        room = min(self.max_rows - rows.n, len(self._waiting))
        running = {sequence.request.prompt_ids: row for row, sequence in enumerate(rows.sequences)} if room else {}
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
                if groups and tokens > PROMPT_TOKENS_AT_ONCE:
                    break
                groups[known] = []
            groups[known].append(self._waiting.popleft())
        prompts = sorted(groups, key=len, reverse=True)
        repeats = [(i, sequence) for i, prompt in enumerate(prompts) for sequence in groups[prompt][1:]]
        entered = forks + [groups[prompt][0] for prompt in prompts] + [sequence for _, sequence in repeats]
        rows.add(entered)
        self._counters["prompt_tokens"] += sum(len(s.request.prompt_ids) for s in entered if not s.token_ids)
        found = [(fork, 1) for fork in forks] + [(sequence, 0) for _, sequence in repeats]  # a fork computes its last token
        self._counters["cached_tokens"] += sum(len(s.request.prompt_ids) - anew for s, anew in found if not s.token_ids)
        holders = np.array([running[fork.known] for fork in forks], dtype=np.int64)
        return holders, [np.array(prompt) for prompt in prompts], np.array([i for i, _ in repeats], dtype=np.int64)

    def _forward(self, attention: StepAttention, token_ids: list[np.ndarray]) -> Tensor:
        """token_ids: the decoding rows' last tokens, and each prompt. The next token's logits of each: (rows + prompts, V)."""
        ends = np.cumsum([len(ids) for ids in token_ids])
        wanted: Tensor | int = 0  # all
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
        by_stop = {sequence.request.id for sequence in rows["sequence"][stopped]}
        self._remove(ended)
        return self._completed(sequences, ["stop" if s.request.id in by_stop else "length" for s in sequences])

    def _remove(self, gone: np.ndarray) -> None:
        """gone: bool (n,). The last rows fill the holes."""
        left = len(gone) - int(gone.sum())
        self._move(left + np.flatnonzero(~gone[left:]), np.flatnonzero(gone[:left]))
        self.rows.truncate(left)

    def _move(self, source: np.ndarray, target: np.ndarray) -> None:
        self.cache.copy(source, target, self.rows["cached"][source])
        self.rows.move(source, target)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    # Weights and memory

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Raises ValueError, naming weights that are missing, unexpected or of another shape; the engine then has none."""
        self._begin_weights("load_weights")
        self.model.load(weights)
        self._weights_there, self._version = True, version

    def share_weights(self, weights: dict[str, Tensor], version: int) -> bool:
        """False for another dtype or device than the engine's. Raises ValueError as load_weights does."""
        self._begin_weights("share_weights")
        self._weights_there = self.model.share(weights)
        if self._weights_there:
            self._version = version
        return self._weights_there

    def held_weights(self, *, exact: bool) -> Sequence[HeldWeight]:
        return self.model.held()

    def _begin_weights(self, call: str) -> None:
        """Running answers wait for the new weights: what they have is kept, and computed anew."""
        self._check_takes_weights(call)
        self._weights_there = False
        self._requeue()

    def _requeue(self) -> None:
        self._waiting.extendleft(reversed(self.rows.collect(np.arange(self.rows.n))))
        self.rows.truncate(0)
        self._excess = 0

    def sleep(self) -> None:
        """Unfinished requests stay, and go on where they are once the engine works again."""
        self._requeue()
        freed = self.cache.nbytes + self.model.owned_bytes
        self.cache.drop()
        self.model.drop()
        if self.device.type == "cpu" and freed >= WORTH_GIVING_BACK:
            give_back_free_memory()
        self._weights_awake = self._weights_there = self._cache_awake = False

    def wake(self, *, weights: bool, kv_cache: bool) -> None:
        """The cache takes memory as requests need it, weights as they are loaded."""
        self._weights_awake |= weights
        self._cache_awake |= kv_cache

    def close(self) -> None:
        self.sleep()

    def stats(self) -> dict[str, float]:
        """cache_bytes is the largest since the last call; a prompt counts for each request that has it."""
        counters = dict(self._counters)
        self._counters = dict.fromkeys(counters, 0.0)
        return counters
