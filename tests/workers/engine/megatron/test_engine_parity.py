"""Five optimizer steps, cut in every way, against plain transformers and torch's AdamW in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification

from tests.workers.engine.fsdp.cases import training_batch
from tests.workers.engine.fsdp.test_engine_parity import plain_training
from tests.workers.engine.megatron.cases import OUTPUTS
from tests.workers.engine.megatron.rank import CRITICS, TRAINED
from tests.workers.engine.toy import ADAMW, plain_model

RanksOf = Callable[[int], list[dict[str, Any]]]
CASES = [pytest.param(size, name, id=name) for size, cases in TRAINED.items() for name in cases]


@pytest.fixture(scope="module")
def plain(models: dict[str, str]) -> Callable[[str], tuple[dict[str, Tensor], dict[str, Tensor], nn.Module]]:
    """Of a model: metrics and parameters of five steps in plain code, and the model as it was before."""
    made: dict[str, Any] = {}

    def of(model: str) -> Any:
        if model not in made:
            made[model] = *plain_training(models[model], 5), plain_model(models[model])
        return made[model]

    return of


@pytest.mark.parametrize(("size", "name"), CASES)
def test_training(ranks_of: RanksOf, plain: Any, size: int, name: str) -> None:
    """Loss and gradient norm within 1e-5, parameters within 1e-4."""
    metrics, weights, before = plain(TRAINED[size][name][0])
    found = [rank[name] for rank in ranks_of(size)]
    answering = [rank for rank in found if rank["is_output_rank"]]
    assert sorted(rank["dp_rank"] for rank in answering) == list(range(len(answering)))
    loss = sum(rank["metrics"]["loss"] for rank in answering)
    torch.testing.assert_close(loss, metrics["loss"], rtol=0, atol=1e-5)
    for rank in found:
        torch.testing.assert_close(rank["metrics"]["grad_norm"], metrics["grad_norm"], rtol=1e-5, atol=0)
        assert rank["round trip"].keys() == rank["weights"].keys() == weights.keys()
        for key, weight in weights.items():
            assert torch.equal(rank["round trip"][key], before.state_dict()[key]), f"{key}: changed on the way in and out"
            torch.testing.assert_close(
                rank["weights"][key], weight, rtol=0, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}"
            )


@pytest.mark.parametrize(("size", "name"), CASES)
def test_answers(ranks_of: RanksOf, plain: Any, size: int, name: str) -> None:
    """Before training, every output of every row, within 1e-5."""
    model = plain(TRAINED[size][name][0])[2]
    rows = 0
    for answer in (rank[name]["before"] for rank in ranks_of(size) if rank[name]["is_output_rank"]):
        columns = {key: answer[key].split(answer["lengths"].tolist()) for key in ("input_ids", "response_mask", *OUTPUTS)}
        for row, ids in enumerate(columns["input_ids"]):
            with torch.no_grad():
                log_p = (model(input_ids=ids[None]).logits[0, :-1] / 0.7).log_softmax(-1)
            wanted = {
                "log_probs": log_p.gather(1, ids[1:, None])[:, 0],
                "entropy": -(log_p.exp() * log_p).sum(-1),
                "sum_pi_squared": log_p.exp().square().sum(-1),
                "top_log_probs": log_p.topk(2).values,
                "all_log_probs": log_p,
            }
            mask = columns["response_mask"][row][1:].bool()
            for key, values in wanted.items():
                ours = columns[key][row]
                torch.testing.assert_close(
                    ours[1:][mask], values[mask], rtol=0, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
                )
                assert not ours[0].any() and not ours[1:][~mask].any()
            rows += 1
    assert rows == len(training_batch(0))


def plain_critic(path: str, steps: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A token classifier of transformers, trained row by row: the model, and metrics."""
    model = AutoModelForTokenClassification.from_pretrained(path, num_labels=1, dtype=torch.float32).eval()
    for parameter in model.score.parameters():
        nn.init.zeros_(parameter)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": ADAMW.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=ADAMW.lr, betas=ADAMW.betas, foreach=False, fused=False)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        batch = training_batch(step)
        columns = [batch.split_rows(name) for name in ("input_ids", "advantages", "loss_weight")]
        total = 0.0
        for ids, targets, weight in zip(*columns, strict=True):
            after = model(input_ids=ids[None]).logits[0, :, 0]
            before = torch.cat([after.new_zeros(1), after[:-1]])
            loss = (weight * (before - targets) ** 2).sum()
            loss.backward()
            total += float(loss)
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), ADAMW.clip_grad)))
        optimizer.step()
    return model, {"loss": torch.tensor(losses, dtype=torch.float64), "grad_norm": torch.tensor(norms, dtype=torch.float64)}


@pytest.fixture(scope="module")
def critic(models: dict[str, str]) -> tuple[nn.Module, dict[str, Tensor]]:
    return plain_critic(models["qwen2"], 3)


@pytest.mark.parametrize("name", CRITICS[2])
def test_a_critic(ranks_of: RanksOf, critic: tuple[nn.Module, dict[str, Tensor]], name: str) -> None:
    """Loss, norm, parameters, and the value of the state before each token and after each row."""
    model, metrics = critic
    found = [rank[f"critic {name}"] for rank in ranks_of(2)]
    (answering,) = [rank for rank in found if rank["is_output_rank"]]
    torch.testing.assert_close(answering["metrics"]["loss"], metrics["loss"], rtol=0, atol=1e-5)
    weights = dict(model.named_parameters())
    for rank in found:
        torch.testing.assert_close(rank["metrics"]["grad_norm"], metrics["grad_norm"], rtol=1e-5, atol=0)
        assert rank["weights"].keys() == weights.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(rank["weights"][key], weight.detach(), rtol=0, atol=1e-4)
    after = answering["after"]
    lengths = after["lengths"].tolist()
    for ids, values, last in zip(
        after["input_ids"].split(lengths), after["values"].split(lengths), after["last_value"], strict=True
    ):
        with torch.no_grad():
            wanted = model(input_ids=ids[None]).logits[0, :, 0]
        torch.testing.assert_close(values, torch.cat([wanted.new_zeros(1), wanted[:-1]]), rtol=0, atol=1e-5)
        torch.testing.assert_close(last, wanted[-1], rtol=0, atol=1e-5)
