"""A short path of vLLM's model runner for steps in which each request of the step before decodes one more token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def shorten_input_ids(runner: Any) -> None:
    """Replace the runner's _prepare_input_ids, which goes through the requests one by one to find where their last tokens are.

    With steps in flight these are on the device alone. If each request has one token and the place that it had in the step
    before, they are copied as they are, which is what vLLM (0.26 to 0.33) does in the end.
    """
    places = np.arange(runner.max_num_reqs)
    prepare: Callable[..., None] = runner._prepare_input_ids

    def prepare_input_ids(step: Any, num_reqs: int, num_tokens: int, ends: Any) -> None:
        sampled = runner.input_batch.prev_sampled_token_ids
        is_same = num_tokens == num_reqs and np.array_equal(runner.prev_positions.np[:num_reqs], places[:num_reqs])
        if sampled is None or not is_same or runner.enable_prompt_embeds:
            prepare(step, num_reqs, num_tokens, ends)
        else:
            runner.input_ids.gpu[:num_reqs].copy_(sampled[:num_reqs, 0], non_blocking=True)

    runner._prepare_input_ids = prepare_input_ids
