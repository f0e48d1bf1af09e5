from types import SimpleNamespace
from typing import Any, cast

import torch

from trainer.parity.measure import OUTPUTS, Generated, judged
from workers.batch import Batch


def test_a_response_has_its_sampled_tokens_alone() -> None:
    """The first row has an observation between its sampled tokens, the second ends with one."""
    mask = torch.tensor([int(mark) for mark in "0110101110"]).float()
    ids, zeros = torch.arange(len(mask)), torch.zeros(len(mask))
    rows = {"uid": torch.tensor([4, 7]), "finished": torch.tensor([1, 0])}
    batch = Batch(torch.tensor([5, 5]), {"input_ids": ids, "response_mask": mask, "rollout_log_probs": zeros}, rows)
    actor = SimpleNamespace(forward=lambda batch, outputs: Batch(batch.lengths, dict.fromkeys(OUTPUTS, zeros)))
    answers = judged(cast(Any, actor), Generated(batch, limit=9, seconds=1.0, cached=None)).answers
    assert [row.tolist() for row in answers.split(answers.token_ids)] == [[1, 2, 4], [6, 7, 8]]
