"""PPO-ptx: policy loss plus an auxiliary pretraining loss (next token) on other texts.

Ouyang et al. 2022, arXiv:2203.02155, eq. 2: the objective includes + gamma E_x~pretrain[log pi(x)].
"""

from __future__ import annotations

from torch import Tensor

from trainer.algorithms.losses.actor_loss import ActorLoss, ActorLossConfig
from workers.batch import Batch
from workers.metric import Metric, Metrics


class ActorAndPtxLoss:
    """Policy loss on responses, next-token loss on pretraining texts: (T,); the factory named by a LossSpec.

    Rows with tokens["ptx"] (T,) set are texts; their loss_weight contains the coefficient. The policy loss and its metrics are
    computed on the other rows only.
    """

    def __init__(self, config: ActorLossConfig) -> None:
        self.policy = ActorLoss(config)
        self.needs = self.policy.needs

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, Metrics]:
        is_text = micro_batch.tokens["ptx"].bool()
        loss = -outputs["log_probs"]
        metrics: Metrics = {"actor/ptx_loss": Metric.token_mean(loss, micro_batch.tokens["response_mask"] * is_text)}
        # On the CPU, where the lengths of a micro-batch are.
        responses = (~is_text[micro_batch.offsets[:-1]]).nonzero().flatten().cpu()
        if not len(responses):
            return loss, metrics
        policy_outputs = {name: outputs[name][~is_text] for name in self.needs}
        policy_loss, policy_metrics = self.policy(policy_outputs, micro_batch.select(responses))
        return loss.to(policy_loss.dtype).masked_scatter(~is_text, policy_loss), metrics | policy_metrics
