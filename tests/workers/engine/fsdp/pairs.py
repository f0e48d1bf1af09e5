"""Pairs of rows for a reward head, their cuts, and the loss in plain transformers code."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from configs.schema.supervised import PairLossConfig
from tests.workers.engine.toy import toy_batch
from trainer.algorithms.losses.preference_losses import CHOSEN, REJECTED, BradleyTerryLoss
from workers.batch import Batch
from workers.plan import Limits, MicroBatches, make_plan

LOSS = PairLossConfig(center_rewards_coefficient=0.05)
CUTS = {
    "one": {"max_tokens": 2000},
    "by tokens": {"max_tokens": 330},
    "pair by pair": {"max_rows": 1},
    "by pairs": {"max_rows": 4},
}


def reward_loss() -> BradleyTerryLoss:
    return BradleyTerryLoss(LOSS)


def pair_batch() -> Batch:
    """Seven pairs of rows of 1 to 300 tokens, with margins."""
    batch = toy_batch([1, 300, 2, 37, 120, 5, 64, 211, 3, 90, 17, 33, 40, 41])
    margin = torch.linspace(-0.5, 1.0, 7, dtype=torch.float64).repeat_interleave(2)
    rows = {"uid": torch.arange(7).repeat_interleave(2), "side": torch.tensor([CHOSEN, REJECTED] * 7), "margin": margin}
    weight = torch.zeros(batch.total_tokens, dtype=torch.float64)
    weight[batch.lengths.cumsum(0)[::2] - 1] = 1 / 7
    return batch.with_rows(**rows).with_tokens(loss_weight=weight)


def pair_cuts(batch: Batch, n_ranks: int) -> dict[str, tuple[list[Batch], list[MicroBatches]]]:
    """Each rank's rows and micro-batches, by every cut; and with an empty slot."""
    lengths, pairs = batch.lengths.view(-1, 2).sum(1).tolist(), torch.arange(len(batch)).view(-1, 2).tolist()
    plans = {name: make_plan(lengths, n_ranks, Limits(**limits)).of_rows(pairs) for name, limits in CUTS.items()}
    found = {name: (plan.split(batch), list(plan.micro_batches)) for name, plan in plans.items()}
    shares, cuts = found["by tokens"]
    return found | {"with empty slots": (shares, [((), *cut, ()) for cut in cuts])}


def save_reward_model(path: Path, model: str) -> str:
    """The language model with a head that is not zero."""
    torch.manual_seed(5)
    scorer = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    torch.nn.init.normal_(scorer.score.weight, std=0.5)
    scorer.save_pretrained(path)
    return str(path)


def plain_scores(path: str, batch: Batch, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, Tensor]:
    """transformers' model, and its scores (B,), a row at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()
    model.config.pad_token_id = None
    return model, torch.cat([model(input_ids=row[None]).logits[:, 0] for row in batch.split_rows("input_ids")])


def plain_pair_gradients(path: str, dtype: torch.dtype) -> dict[str, Tensor]:
    batch = pair_batch()
    model, scores = plain_scores(path, batch, dtype)
    chosen, rejected = scores.view(-1, 2).unbind(1)
    margin = batch.rows["margin"][::2]
    apart = chosen - rejected - margin
    loss = (1 + (-apart).exp()).log() + LOSS.center_rewards_coefficient * (chosen + rejected).square()
    loss.mean().backward()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
