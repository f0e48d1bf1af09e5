"""The short path for a step's input ids: where it copies the tokens of the step before, and where it leaves them to vLLM."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from workers.rollout.vllm.vllm_runner import shorten_input_ids

COUNT = 3


def runner_of(**changes: Any) -> SimpleNamespace:
    """What shorten_input_ids reads of vLLM's runner. calls: those of its own method."""
    runner = SimpleNamespace(
        max_num_reqs=5,
        enable_prompt_embeds=False,
        prev_positions=SimpleNamespace(np=np.array([0, 1, 2, 7, 7])),
        input_ids=SimpleNamespace(gpu=torch.zeros(8, dtype=torch.int32)),
        input_batch=SimpleNamespace(prev_sampled_token_ids=torch.tensor([[5], [6], [7], [8]], dtype=torch.int32)),
        calls=[],
    )
    vars(runner).update(changes)
    runner._prepare_input_ids = lambda *args: runner.calls.append(args)
    shorten_input_ids(runner)
    return runner


def test_tokens_of_requests_in_their_places_are_copied() -> None:
    runner = runner_of()
    runner._prepare_input_ids("step", COUNT, COUNT, np.arange(1, COUNT + 1))
    assert runner.input_ids.gpu.tolist() == [5, 6, 7, 0, 0, 0, 0, 0] and runner.calls == []


@pytest.mark.parametrize(
    ("tokens", "changes"),
    [
        (COUNT + 1, {}),  # a prefill, or drafts
        (COUNT, {"prev_positions": SimpleNamespace(np=np.array([0, 2, 1]))}),
        (COUNT, {"prev_positions": SimpleNamespace(np=np.array([0, 1, -1]))}),
        (COUNT, {"input_batch": SimpleNamespace(prev_sampled_token_ids=None)}),  # no step in flight
        (COUNT, {"enable_prompt_embeds": True}),
    ],
)
def test_others_are_left_to_vllm(tokens: int, changes: dict[str, Any]) -> None:
    runner = runner_of(**changes)
    ends = np.arange(1, COUNT + 1)
    runner._prepare_input_ids("step", COUNT, tokens, ends)
    assert runner.calls == [("step", COUNT, tokens, ends)] and not runner.input_ids.gpu.any()
