"""Small engines, batches and losses, and the same mathematics in plain transformers code, one row at a time."""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from configs.schema.common import ModelConfig
from tests.tiny import fsdp_config, model_config
from workers.batch import Batch
from workers.engine.base import EngineSpec, OptimizerSpec
from workers.engine.fsdp.fsdp_engine import FSDPEngine
from workers.engine.fsdp.sharding import full
from workers.metric import Metric
from workers.plan import Limits, MicroBatches, make_plan
from workers.roles.train_engines import make_engine

VOCABULARY = 61
ADAMW = OptimizerSpec(
    lr=1e-4,
    betas=(0.9, 0.999),
    weight_decay=0.01,
    schedule="constant",
    warmup_steps=0,
    total_steps=10,
    min_lr_ratio=0.0,
    num_cycles=0.5,
    clip_grad=1.0,
)


@contextmanager
def one_rank(directory: Path, backend: str = "gloo") -> Iterator[None]:
    """A process group of this process alone."""
    # A file of its own: what a former group left in one would be taken for this group's.
    dist.init_process_group(backend, init_method=f"file://{directory / uuid.uuid4().hex}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def toy_engine(
    path: str,
    head: str = "lm",
    *,
    dtype: str = "float32",
    optimizer: OptimizerSpec | None = ADAMW,
    device: str = "cpu",
    **changes: Any,
) -> FSDPEngine:
    """changes: fields of ModelConfig and FSDPConfig."""
    of_model = {field.name for field in fields(ModelConfig)}
    spec = EngineSpec(
        model=model_config(path, **{name: value for name, value in changes.items() if name in of_model}),
        head=head,
        sharding=fsdp_config(dtype, **{name: value for name, value in changes.items() if name not in of_model}),
        optimizer=optimizer,
        device=device,
        seed=1,
    )
    engine = make_engine(spec)
    assert isinstance(engine, FSDPEngine)
    return engine


def toy_batch(lengths: Sequence[int], *, seed: int = 0, masked: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Batch:
    """Rows with response masks full of holes; rows ``masked`` have none set. loss_weight: 1 / trained tokens. entropy_mask: every
    third token of a row."""
    draw = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    batch = Batch(lengths=torch.tensor(lengths, dtype=torch.int64), meta={"temperature": 0.7})
    response = (torch.rand(total, generator=draw) < 0.6) & (batch.positions() > 0)
    for row in masked:
        response &= batch.segment_ids() != row
    return batch.with_tokens(
        input_ids=torch.randint(0, VOCABULARY, (total,), generator=draw),
        response_mask=response.long(),
        entropy_mask=batch.positions() % 3 == 0,
        advantages=torch.randn(total, generator=draw, dtype=torch.float64).to(dtype),
        old_log_probs=(-3.0 - torch.rand(total, generator=draw, dtype=torch.float64)).to(dtype),
        loss_weight=response / response.sum().clamp(min=1),
    )


class ToyLoss:
    """A policy gradient with an entropy bonus: both outputs matter, and each token differently."""

    needs = frozenset({"log_probs", "entropy"})

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        ratio = (outputs["log_probs"] - micro_batch.tokens["old_log_probs"]).exp()
        loss = -micro_batch.tokens["advantages"] * ratio - 0.1 * outputs["entropy"]
        return loss, {"ratio": Metric.token_mean(ratio, micro_batch.tokens["response_mask"])}


class Shifted(ToyLoss):
    """A loss that need not be finite, and a gradient that is."""

    def __init__(self, shift: float) -> None:
        self.shift = shift

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        loss, metrics = super().__call__(outputs, micro_batch)
        return loss + self.shift, metrics


class LocalMeanLoss(ToyLoss):
    """What must not be done: the mean over the tokens that happen to be in this micro-batch."""

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        loss, metrics = super().__call__(outputs, micro_batch)
        return loss / micro_batch.tokens["response_mask"].sum().clamp(min=1), metrics


class ValueLoss:
    needs = frozenset({"values"})

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        return (outputs["values"] - micro_batch.tokens["advantages"]) ** 2, {}


def cut(batch: Batch, n_ranks: int = 1, **limits: int) -> tuple[list[Batch], list[MicroBatches]]:
    """Each rank's rows and micro-batches."""
    plan = make_plan(batch.lengths.tolist(), n_ranks, Limits(**limits))
    return plan.split(batch), list(plan.micro_batches)


def gradients(engine: FSDPEngine, batch: Batch, plan: MicroBatches, loss: Any) -> dict[str, Tensor]:
    """The gradient of every trainable parameter, in full, and gone from the engine."""
    engine.accumulate(batch, plan, loss)
    grads = [(name, param.grad) for name, param in engine._params.items() if param.requires_grad]
    found = {name: full(grad).cpu().clone() for name, grad in grads}
    engine.move(grads="cpu")
    return found


def distance(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """||a - b|| / ||b|| over all tensors together."""
    assert some.keys() == others.keys()
    apart = sum(float((some[name].double() - others[name].double()).square().sum()) for name in others)
    size = sum(float(other.double().square().sum()) for other in others.values())
    return (apart / size) ** 0.5


def exact_norm(self: Any, states: Tensor) -> Tensor:
    """Forward of a norm in the dtype of its input: transformers' own take float32, in which other rounding is 1e-7."""
    scaled: Tensor = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * scaled


def plain_model(path: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()


def plain_outputs(model: nn.Module, row: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log-probs and entropy of the tokens of one row after its first: (L - 1,) each."""
    log_p = (model(input_ids=row[None]).logits[0, :-1] / temperature).log_softmax(-1)
    return log_p.gather(1, row[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def plain_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of ToyLoss, row by row, backward included: gradients add up in the model."""
    total = torch.zeros((), dtype=torch.float64)
    columns = [batch.split_rows(name) for name in ("input_ids", "response_mask", "advantages", "old_log_probs", "loss_weight")]
    for ids, mask, advantages, old, weight in zip(*columns, strict=True):
        if len(ids) < 2:
            continue
        log_probs, entropy = plain_outputs(model, ids, batch.meta["temperature"])
        token_loss = -advantages[1:] * (log_probs - old[1:]).exp() - 0.1 * entropy
        loss = (token_loss * weight[1:] * mask[1:]).sum()
        loss.backward()
        total += loss.detach()
    return total


def plain_gradients(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad()
    plain_loss(model, batch)
    return {name: param.grad.clone() for name, param in model.named_parameters()}
