"""The gradient of every policy loss, under every aggregation mode, does not depend on how the batch was cut."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from configs.schema.common import AggMode
from tests.trainer.algorithms.parts import in_parts
from tests.trainer.algorithms.plain import defaults
from tests.workers.engine.fsdp.cases import MODES, NORM_LENGTH, all_cuts
from tests.workers.engine.toy import distance, gradients, plain_model, toy_batch, toy_engine
from trainer.algorithms.losses.actor_loss import ActorLoss, ActorLossConfig
from trainer.algorithms.policy_losses import POLICY_LOSSES
from trainer.algorithms.trajectories import PART, Trajectories
from trainer.algorithms.weights import token_weights
from workers.batch import Batch
from workers.engine.fsdp.fsdp_engine import FSDPEngine
from workers.plan import Limits, SharedRows

CHOSEN = ((1, "by row"), (1, "lopsided"), (2, "by tokens"))


def loss_of(loss_mode: str, **correction: object) -> ActorLoss:
    """With entropy bonus and the exact KL to a reference, so that every output of the head is in the gradient."""
    config = defaults()
    models, algorithm = config.actor_rollout_ref, config.algorithm
    policy_loss = replace(models.actor.policy_loss, loss_mode=loss_mode, clip_cov_ratio=0.05, clip_cov_lb=0.1, kl_cov_ratio=0.05)
    actor = replace(models.actor, policy_loss=policy_loss, entropy_coeff=0.01, use_kl_loss=True, kl_loss_type="full")
    correction = replace(algorithm.rollout_correction, rollout_is="token", **correction)
    config = replace(
        config,
        actor_rollout_ref=replace(models, actor=actor),
        algorithm=replace(algorithm, rollout_correction=correction),
    )
    return ActorLoss(ActorLossConfig.of(config, old_log_probs_from_update=False))


def batch_for(engine: FSDPEngine, mode: AggMode, loss: ActorLoss, dtype: torch.dtype = torch.float64) -> Batch:
    """Old log-probs near the model's own, so that some tokens are clipped and some are not; masks with holes, a masked row."""
    batch = toy_batch([1, 60, 2, 37, 90, 5, 44, 31, 3, 70, 17, 33], masked=[4], dtype=dtype)
    own = engine.forward(batch, (tuple(range(12)),), {"log_probs", "all_log_probs"})
    assert own is not None
    draw = torch.Generator().manual_seed(5)
    noise = 0.3 * torch.randn(batch.total_tokens, generator=draw, dtype=torch.float64)
    shifted = own.tokens["all_log_probs"].double() + torch.randn(own.tokens["all_log_probs"].shape, generator=draw).double()
    batch = batch.with_tokens(
        old_log_probs=own.tokens["log_probs"].double() + noise,
        log_probs=own.tokens["log_probs"].double(),
        ref_all_log_probs=shifted.log_softmax(-1),
        is_weights=noise.exp().clamp(max=1.2),
    )
    if loss.needs_preparation:
        batch, _ = loss.prepare(batch, torch.Generator().manual_seed(1))
    return batch.with_tokens(loss_weight=token_weights(mode, batch.tokens["response_mask"], batch.lengths, NORM_LENGTH))


def whole_gradients(model: nn.Module, batch: Batch, loss: ActorLoss) -> dict[str, Tensor]:
    """By transformers, a row at a time; the loss sees the whole mini-batch at once, as it is written in the papers."""
    model.zero_grad()
    log_probs, entropy, everything = [], [], []
    for row in batch.split_rows("input_ids"):
        log_p = (model(input_ids=row[None]).logits[0, :-1] / batch.meta["temperature"]).log_softmax(-1)
        log_p = torch.cat([log_p.new_zeros(1, log_p.shape[1]), log_p])
        log_probs.append(log_p.gather(1, row[:, None])[:, 0])
        entropy.append(-(log_p.exp() * log_p).sum(-1))
        everything.append(log_p)
    outputs = {"log_probs": torch.cat(log_probs), "entropy": torch.cat(entropy), "all_log_probs": torch.cat(everything)}
    token_loss, _ = loss(outputs, batch)
    (token_loss * batch.tokens["loss_weight"]).sum().backward()
    return {name: param.grad.clone() for name, param in model.named_parameters()}


LOSSES = [*POLICY_LOSSES, "bypass"]
# A loss never sees the mode, which is in the tokens' weights: outside soak all modes with one loss, and one mode with each.
CASES = [("vanilla", MODES), *((loss, MODES[3:4]) for loss in LOSSES if loss != "vanilla")]
SOAK = [pytest.param(loss, MODES, marks=pytest.mark.soak, id=f"{loss}-all modes") for loss in LOSSES if loss != "vanilla"]


@pytest.mark.parametrize(("loss_mode", "modes"), [*(pytest.param(*case, id=case[0]) for case in CASES), *SOAK])
def test_no_cut_changes_the_gradient(group: None, models: dict[str, str], loss_mode: str, modes: tuple[AggMode, ...]) -> None:
    engine, model = toy_engine(models["qwen2"], dtype="float64"), plain_model(models["qwen2"], torch.float64)
    if loss_mode == "bypass":  # weights and rejections from fresh log-probs: the mini-batch's normalisers change with them
        rejecting = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.4"}
        loss = loss_of("vanilla", bypass_mode=True, loss_type="reinforce", rollout_is_batch_normalize=True, **rejecting)
    else:
        loss = loss_of(loss_mode)
    apart: dict[str, float] = {}
    for mode in modes:
        batch = batch_for(engine, mode, loss)
        truth = whole_gradients(model, batch, loss)
        for n_ranks in (1, 2):
            for name, (shares, plans) in all_cuts(batch, n_ranks).items():
                if (n_ranks, name) not in CHOSEN:
                    continue
                parts = [gradients(engine, share, plan, loss) for share, plan in zip(shares, plans, strict=True)]
                summed = {key: sum(part[key] for part in parts) for key in truth}
                apart[f"{mode}, {n_ranks} ranks, {name}"] = distance(summed, truth)
    assert {case: value for case, value in apart.items() if not value <= 1e-10} == {}
    assert len(apart) == len(modes) * len(CHOSEN)


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes norms in float32, also in float64: gradients of a context that is computed twice are rounded there."""

    def forward(norm: Any, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)

    monkeypatch.setattr(Qwen2RMSNorm, "forward", forward)


def with_other_contexts(batch: Batch) -> Batch:
    """Other numbers where nothing is trained."""
    noise = 9 * torch.randn(batch.total_tokens, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    trained = batch.tokens["response_mask"].bool()
    names = ("advantages", "old_log_probs", "is_weights")
    return batch.with_tokens(**{name: torch.where(trained, batch.tokens[name], noise) for name in names})


QUICK = ("vanilla", "gspo", "geo_mean")
PARTS = [
    *(pytest.param(loss, "float64", 1e-10, marks=() if loss in QUICK else pytest.mark.soak) for loss in POLICY_LOSSES),
    *(pytest.param(loss, "float32", 1e-6) for loss in QUICK),
]


@pytest.mark.parametrize(("loss_mode", "dtype", "bound"), PARTS)
def test_parts_of_a_trajectory_have_the_gradient_of_one_row(
    group: None, exact_norms: None, models: dict[str, str], loss_mode: str, dtype: str, bound: float
) -> None:
    """Reference: each trajectory as one row, all in one micro-batch. The context of a part is computed again."""
    engine, loss = toy_engine(models["qwen2"], dtype=dtype), loss_of(loss_mode)
    whole = batch_for(engine, "seq-mean-token-mean", loss, getattr(torch, dtype))
    truth = gradients(engine, whole, (tuple(range(len(whole))),), loss)
    parts = with_other_contexts(in_parts(whole, seed=4))
    view = Trajectories.of(parts)
    weights = token_weights("seq-mean-token-mean", view.gather(parts.tokens["response_mask"]), view.lengths, NORM_LENGTH)
    parts = parts.with_tokens(loss_weight=view.split(weights))
    lengths, number = parts.lengths.tolist(), parts.rows["trajectory"]
    needs, apart, torn = "trajectory" in loss.config.needs, dict[str, float](), set()
    rows = SharedRows(lengths, [()] * len(parts), number.tolist() if needs else None)
    tight = Limits(max_tokens=max(rows.unit_tokens()))
    for n_ranks, limits in ((1, Limits(max_rows=1)), (2, Limits(max_tokens=310)), (3, tight)):
        plan = rows.plan(n_ranks, limits)
        torn |= {len(torch.unique(number[part])) < len(torch.unique(number)) for cut in plan.rows_by_rank() for part in cut}
        shares = plan.split(parts.only(tokens=list(parts.tokens), rows=PART))
        found = [gradients(engine, share, cut, loss) for share, cut in zip(shares, plan.micro_batches, strict=True)]
        summed = {key: sum(part[key] for part in found) for key in truth}
        apart[f"{n_ranks} ranks, {limits}"] = distance(summed, truth)
    assert {case: value for case, value in apart.items() if not value <= bound} == {} and torn == {True}
