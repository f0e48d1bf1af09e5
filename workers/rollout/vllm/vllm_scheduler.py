"""vLLM's scheduler with short paths for what nearly all requests of a rollout do in nearly all steps: decode one more token.

vLLM (0.26 to 0.33) handles each request in each step as if it could be anything: a prefill, speculative, structured, multimodal.
With 256 requests of a model of 0.5B on an H200 the Python of a step takes 8 to 12 ms, about half of it for this; its kernels take
2 ms.

Short paths change no decision, no token and no cache block. Steps and requests for which one of their conditions does not hold
go through vLLM's own code.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

STALE = ("num_stale_output_tokens", "async_tokens_to_discard")  # vLLM's name since 0.27 or later, and before


class Token(NamedTuple):
    """The next token of the request that vLLM calls ``name``."""

    name: str
    token_id: int
    log_prob: float


class DecodeScheduler:
    """Replaces methods of a scheduler of vLLM.

    Requires what sampling_arguments asks for: of each token its log-prob alone, no min_tokens, repetition check or grammar, and
    max_tokens with which a response fits into max_model_len.
    """

    def __init__(self, scheduler: Any, *, only_slots: bool) -> None:
        """only_slots: shorten allocate_slots alone."""
        self._scheduler = scheduler
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        self._taken: list[Token] = []
        self._pattern: Any = None
        """A step of vLLM's own in which no request is new or preempted."""
        manager = scheduler.kv_cache_manager
        self._ahead = int(isinstance(scheduler, AsyncScheduler))
        """The scheduler counts a token as computed, and a placeholder as output, when it schedules it."""
        if not has_short_paths(scheduler):
            return
        self._block = manager.coordinator.block_size
        self._stale = next(name for name in STALE if hasattr(a_request(), name))
        self._allocate, self._none = manager.allocate_slots, manager.empty_kv_cache_blocks
        manager.allocate_slots = self.allocate_slots
        if only_slots:
            return
        scheduler.schedule, scheduler.update_from_output = self.schedule, self.update_from_output

    def take(self) -> list[Token]:
        """Tokens since the last call that vLLM's outputs lack; none of them ends a response."""
        taken, self._taken = self._taken, []
        return taken

    def allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """Where a token neither begins nor fills a block there is nothing to allocate and nothing to cache."""
        if num_new_tokens == 1 and 0 < request.num_computed_tokens % self._block < self._block - 1:
            return self._none
        return self._allocate(request, num_new_tokens, *args, **kwargs)

    # Scheduling

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._pattern is not None and self._is_settled():
            return self._next_step()
        step = self._schedule(*args, **kwargs)
        if not (step.scheduled_new_reqs or step.preempted_req_ids):
            self._pattern = step
        return step

    def _is_settled(self) -> bool:
        """All running requests decode one token, none is admitted, preempted or omitted: it has its last token under way."""
        scheduler = self._scheduler
        running = scheduler.running
        if not 0 < len(running) <= scheduler.max_num_scheduled_tokens or scheduler.pause_state != PauseState.UNPAUSED:
            return False
        if scheduler.get_request_counts()[1] and len(running) < scheduler.max_num_running_reqs:
            return False
        if not scheduler.prev_step_scheduled_req_ids.issuperset([request.request_id for request in running]):
            return False
        begun = 0
        for request in running:
            computed, under_way = request.num_computed_tokens, request.num_output_placeholders
            if len(request._all_token_ids) + under_way - computed != 1 or request.is_prefill_chunk:
                return False
            if under_way and computed + 2 - under_way >= request.num_prompt_tokens + request.max_tokens:
                return False
            begun += computed % self._block == 0
        return bool(begun <= scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _next_step(self) -> Any:
        scheduler = self._scheduler
        manager, running, block, ahead = scheduler.kv_cache_manager, scheduler.running, self._block, self._ahead
        scheduler.current_step += 1
        names = [request.request_id for request in running]
        computed = [request.num_computed_tokens for request in running]
        blocks: list[Any] = [None] * len(running)
        for place, count in enumerate(computed):
            if count % block in (0, block - 1):
                blocks[place] = self._allocate(running[place], 1).get_block_ids(allow_none=True)
        step = copy.copy(self._pattern)
        step.scheduled_cached_reqs = CachedRequestData(
            req_ids=names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=blocks,
            num_computed_tokens=computed,
            num_output_tokens=[len(request._output_token_ids) + request.num_output_placeholders for request in running],
        )
        step.num_scheduled_tokens, step.total_num_scheduled_tokens = dict.fromkeys(names, 1), len(names)
        if hasattr(manager, "get_num_common_prefix_blocks"):  # until 0.26 or later, for cascade attention
            step.num_common_prefix_blocks = manager.get_num_common_prefix_blocks(names[0])
        step.new_block_ids_to_zero = scheduler._get_new_block_ids_to_zero()
        step.finished_req_ids, scheduler.finished_req_ids = scheduler.finished_req_ids, set()
        if len(scheduler.prev_step_scheduled_req_ids) > len(names):
            scheduler.prev_step_scheduled_req_ids.intersection_update(names)
        for request in running:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += ahead
        return step

    # Output

    def update_from_output(self, step: Any, output: Any) -> Any:
        """vLLM's own for requests of which more happens than that a token comes."""
        if output.logprobs is None or not output.sampled_token_ids or output.logprobs.cu_num_generated_tokens is not None:
            return self._update(step, output)
        left = self._take_plain(step.num_scheduled_tokens, output)
        if len(left) < len(step.num_scheduled_tokens):
            step = copy.copy(step)
            step.num_scheduled_tokens = left
        return self._update(step, output)

    def _take_plain(self, scheduled: Mapping[str, int], output: Any) -> dict[str, int]:
        """Take the tokens of requests that continue; returns the others with their numbers of tokens."""
        left, taken = {}, self._taken
        requests, block, ahead, stale = self._scheduler.requests, self._block, self._ahead, self._stale
        rows, sampled, log_probs = output.req_id_to_index, output.sampled_token_ids, output.logprobs.logprobs[:, 0].tolist()
        for name, count in scheduled.items():
            request, row = requests.get(name), rows[name]
            if count == 1 and request is not None and request.prefill_stats is None:
                tokens, response, params = request._all_token_ids, request._output_token_ids, request.sampling_params
                if (
                    len(response) + 1 < request.max_tokens
                    and len(sampled[row]) == 1
                    and sampled[row][0] not in params.stop_token_ids
                    and sampled[row][0] != params.eos_token_id
                    and not getattr(request, stale)
                ):
                    (token,) = sampled[row]
                    response.append(token)
                    tokens.append(token)
                    request.num_in_flight_tokens -= 1
                    request.num_output_placeholders -= ahead
                    if len(tokens) % block == 0:
                        request.update_block_hashes()
                    taken.append(Token(name, token, log_probs[row]))
                    continue
            left[name] = count
        return left


def has_short_paths(scheduler: Any) -> bool:
    """Caches without other rules: of several kinds of layers, of windows, of speculative decoding, of connectors."""
    coordinator = scheduler.kv_cache_manager.coordinator
    kinds = [type(coordinator), *map(type, coordinator.single_type_managers)]
    return (
        type(scheduler) in (Scheduler, AsyncScheduler)
        and kinds == [UnitaryKVCacheCoordinator, FullAttentionManager]
        and not (scheduler.num_lookahead_tokens or scheduler.num_spec_tokens or scheduler.use_pp or scheduler.use_v2_model_runner)
        and not (scheduler.connector or scheduler.ec_connector or scheduler.log_stats)
    )


def a_request() -> Request:
    return Request("", [0], SamplingParams(max_tokens=1), None)
