"""PPO-ptx: beside the policy's loss on its own answers, the next-token loss of other texts.

Ouyang et al. 2022, arXiv:2203.02155, eq. 2: the objective gets + gamma E_x~pretrain[log pi(x)].
"""

from __future__ import annotations

from torch import Tensor

from trainer.algorithms.actor_loss import ActorLoss, ActorLossConfig
from workers.batch import Batch
from workers.metric import Metric, Metrics


class ActorAndPtxLoss:
    """The factory that a LossSpec names. Rows whose tokens["ptx"] (T,) is set are texts, with their own loss_weight, which
    holds the coefficient; the policy's loss and its metrics see the other rows alone.
    """

    def __init__(self, config: ActorLossConfig) -> None:
        self.policy = ActorLoss(config)
        self.needs = self.policy.needs

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, Metrics]:
        is_text = micro_batch.tokens["ptx"].bool()
        loss = -outputs["log_probs"]
        metrics: Metrics = {"actor/ptx_loss": Metric.token_mean(loss, micro_batch.tokens["response_mask"] * is_text)}
        answers = (~is_text[micro_batch.offsets[:-1]]).nonzero().flatten().cpu()
        if not len(answers):
            return loss, metrics
        policy_loss, told = self.policy({name: value[~is_text] for name, value in outputs.items()}, micro_batch.select(answers))
        return loss.to(policy_loss.dtype).masked_scatter(~is_text, policy_loss), metrics | told
