"""Five optimizer steps, cut in every way, against plain transformers and torch's AdamW in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForTokenClassification

from tests.workers.engine.fsdp.cases import training_batch
from tests.workers.engine.fsdp.test_fsdp_engine_parity import plain_optimizer, plain_training
from tests.workers.engine.megatron.cases import OUTPUTS
from tests.workers.engine.megatron.rank import CRITICS, SOAK, TRAINED, soak
from tests.workers.engine.toy import ADAMW, plain_model
from trainer.planner.memory_model import Shape

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
    check_training([rank[name] for rank in ranks_of(size)], *plain(TRAINED[size][name][0]))


@pytest.mark.parametrize(("size", "name"), CASES)
def test_answers(ranks_of: RanksOf, plain: Any, size: int, name: str) -> None:
    check_answers([rank[name] for rank in ranks_of(size)], plain(TRAINED[size][name][0])[2])


@pytest.mark.parametrize(("size", "name"), CASES)
def test_a_rank_holds_its_part_alone(ranks_of: RanksOf, size: int, name: str) -> None:
    """Layers, matrices and moments; and it works on its part of the tokens."""
    check_parts([rank[name] for rank in ranks_of(size)], size, TRAINED[size][name][1])


@pytest.mark.parametrize("name", ["pp2 tied", "pp2 vpp2", "pp2 llama"])
def test_the_memory_model_counts_the_parameters_of_the_largest_stage(
    ranks_of: RanksOf, models: dict[str, str], name: str
) -> None:
    """A tied embedding is on the first stage and on the last."""
    shape = Shape.of(AutoConfig.from_pretrained(models[TRAINED[2][name][0]]).to_dict())
    biases = shape.layers // 2 * (shape.queries + 2 * shape.keys)  # which the model counts, and llama has none
    expected = shape.stage_parameters(2) - (biases if name == "pp2 llama" else 0)
    assert max(rank[name]["holds"]["parameters"] for rank in ranks_of(2)) == expected


@pytest.fixture(scope="module")
def soaked(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("soak")
    torch.multiprocessing.spawn(soak, args=(str(path), models), nprocs=4)
    return [torch.load(path / f"soak_{rank}.pt", weights_only=True) for rank in range(4)]


@pytest.mark.soak
@pytest.mark.parametrize("name", SOAK)
def test_pairs_of_cuts(soaked: list[dict[str, Any]], plain: Any, name: str) -> None:
    found = [rank[name] for rank in soaked]
    check_training(found, *plain(SOAK[name][0]))
    check_answers(found, plain(SOAK[name][0])[2])
    check_parts(found, 4, SOAK[name][1])


def check_parts(found: list[dict[str, Any]], size: int, changes: dict[str, Any]) -> None:
    """Of four layers, on ``size`` ranks."""
    tp, pp, vpp, cp = (changes.get(short, 1) for short in ("tp", "pp", "vpp", "cp"))
    sp = tp if changes.get("sequence_parallel") else 1
    each, copies = 4 // (pp * vpp), size // (tp * pp)  # layers of a virtual stage; ranks with the same parameters
    stages = {tuple((part * pp + stage) * each + i for part in range(vpp) for i in range(1, each + 1)) for stage in range(pp)}
    assert {tuple(rank["holds"]["layers"]) for rank in found} == stages
    unit = sp * (2 * cp if cp > 1 else 1)
    for rank in found:
        holds = rank["holds"]
        assert holds["tokens"] == -(-holds["share"] // unit) * unit // (cp * sp)
        assert holds["attended"] == (2 if changes.get("recompute") else 1) * (pp if vpp > 1 else 1), "dummies fill the stages"
    parameters = sum(rank["holds"]["parameters"] for rank in found)
    whole = sum(weight.numel() for weight in found[0]["weights"].values())
    assert 1.0 <= parameters / copies / whole < 1.15, "what all ranks have are vectors, and a tied embedding"
    kept = sum(rank["holds"]["moments"] for rank in found) / parameters
    assert kept == pytest.approx(2 / copies if changes.get("use_distributed_optimizer") else 2, rel=0.01)


def check_training(
    found: list[dict[str, Any]], metrics: dict[str, Tensor], weights: dict[str, Tensor], before: nn.Module
) -> None:
    """Loss and gradient norm within 1e-5, parameters within 1e-4; and weights that came in and went out are the same."""
    answering = [rank for rank in found if rank["is_output_rank"]]
    assert sorted(rank["dp_rank"] for rank in answering) == list(range(len(answering)))
    loss = sum(rank["metrics"]["loss"] for rank in answering)
    torch.testing.assert_close(loss, metrics["loss"], rtol=0, atol=1e-5)
    for rank in found:
        torch.testing.assert_close(rank["metrics"]["grad_norm"], metrics["grad_norm"], rtol=1e-5, atol=0)
        assert rank["round trip"].keys() == rank["weights"].keys() == weights.keys()
        for key, weight in weights.items():
            assert torch.equal(rank["round trip"][key], before.state_dict()[key]), f"{key}: changed on the way in and out"
            apart = float((rank["weights"][key] - weight).abs().max())
            assert apart <= (1e-6 if "norm" in key else 1e-4), f"{key}: {apart}"  # weight decay alone would be 5e-6


def check_answers(found: list[dict[str, Any]], model: nn.Module) -> None:
    """Every output of every row within 1e-5: of the actor before training, and of a reference."""
    for role in ("before", "reference"):
        answers = [rank[role] for rank in found if rank["is_output_rank"]]
        assert not any(rank[role] for rank in found if not rank["is_output_rank"])
        assert sum(len(answer["lengths"]) for answer in answers) == len(training_batch(0))
        for answer in answers:
            check_rows(answer, model)


def check_rows(answer: dict[str, Tensor], model: nn.Module) -> None:
    columns = {key: answer[key].split(answer["lengths"].tolist()) for key in ("input_ids", "response_mask", *OUTPUTS)}
    for row, ids in enumerate(columns["input_ids"]):
        with torch.no_grad():
            log_p = (model(input_ids=ids[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        wanted = {
            "log_probs": log_p.gather(1, ids[1:, None])[:, 0],
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "sampled_entropy": -(log_p.exp() * log_p).sum(-1) * (torch.arange(1, len(ids)) % 3 == 0),
            "sum_pi_squared": log_p.exp().square().sum(-1),
            "top_log_probs": log_p.topk(2).values,
            "all_log_probs": log_p,
        }
        mask = columns["response_mask"][row][1:].bool()
        for key, values in wanted.items():
            actual = columns[key][row]
            torch.testing.assert_close(
                actual[1:][mask], values[mask], rtol=0, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
            )
            assert not actual[0].any() and not actual[1:][~mask].any()


def plain_critic(path: str, steps: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A token classifier of transformers, trained row by row: the model, and metrics."""
    model = AutoModelForTokenClassification.from_pretrained(path, num_labels=1, dtype=torch.float32).eval()
    for parameter in model.score.parameters():
        nn.init.zeros_(parameter)
    optimizer = plain_optimizer(model)
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
            total += float(loss.detach())
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
