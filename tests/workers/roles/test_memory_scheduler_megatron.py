"""What of a Megatron actor leaves while others work, as the system counts it, and that training does not notice."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from torch.multiprocessing import spawn

from tests.tiny import save_tiny_model
from tests.workers.engine.megatron.cases import megatron_config
from tests.workers.engine.toy import ToyLoss, cut, toy_batch
from tests.workers.rollout.engines import spec_of
from tests.workers.rollout.vllm_workers import ACTOR_LOSS, actor_spec, place
from workers.roles.model_role import ModelRole
from workers.roles.rollout_role import RolloutRole
from workers.roles.worker import Worker
from workers.rollout.base import Sampling
from workers.rollout.malloc_trim import trim_free_memory

MB = 2**20
SIZES: dict[str, object] = {"hidden_size": 512, "num_hidden_layers": 16, "intermediate_size": 2048, "num_attention_heads": 4}
OFFLOAD = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
AWAY = ("another forward", "sync", "generate", "rest")


def main(offloads: int, path: str) -> None:
    """Two rounds of an actor, a reference and a colocated rollout engine; then every call too early."""
    from workers.engine.megatron.megatron_engine import MegatronEngine  # loading it changes torch: in these processes alone

    torch.set_num_threads(1)
    worker = Worker(place(), "cpu", 600.0)
    sharding = megatron_config(**(OFFLOAD if offloads else {}))
    rollout = spec_of(f"{path}/actor", slots=4)
    worker.build_model("actor", actor_spec(rollout.model, sharding), ACTOR_LOSS)
    worker.build_model("ref", actor_spec(spec_of(f"{path}/ref").model, sharding), None)
    worker.build_rollout("rollout", rollout, "actor")
    batch = toy_batch([9, 5, 12, 7])
    (share,), (plan,) = cut(batch, max_tokens=64)
    actor, engine = worker.roles["actor"], worker.roles["rollout"]
    assert isinstance(actor, ModelRole) and isinstance(actor.engine, MegatronEngine) and isinstance(engine, RolloutRole)
    found: dict[str, Any] = {"rss": [], "metrics": []}
    for version in range(2):
        rss = {}
        metrics = actor.train_step(share, plan)
        rss["train"] = resident()
        worker.roles["ref"].forward(share, plan, ["log_probs"], True)
        rss["another forward"] = resident()
        engine.sync_weights(version)
        rss["sync"] = resident()
        prompts = batch.only(tokens=["input_ids"])
        ids = torch.arange(len(batch))
        prompts.rows |= {"id": ids, "seed": ids, "greedy": torch.zeros(len(batch), dtype=torch.bool)}
        answers = engine.advance(prompts, Sampling(1.0, -1, 1.0, 4, stop_token_ids=(1,)), steps=64)
        rss["generate"] = resident()
        worker.memory_scheduler.enter("rest")
        rss["rest"] = resident()
        found["rss"].append(rss)
        found["metrics"].append({name: metric.value for name, metric in metrics.items()} | {"answers": answers.tokens})
    with worker.memory_scheduler.parameters_on_device("actor"):
        found["weights"] = {name: weight.clone() for name, weight in actor.engine.export_weights()}
    train = partial(actor.engine.train_step, share, plan, ToyLoss())
    found["early"] = [refusal(partial(actor.engine.forward, share, plan, {"log_probs"})), refusal(train)]
    actor.engine.move(params="device", grads="device")
    found["early"].append(refusal(train))
    torch.save(found, f"{path}/{offloads}.pt")
    worker.close()


def refusal(work: Callable[[], object]) -> str:
    """What the engine says to it; nothing if it does it."""
    try:
        work()
    except AssertionError as error:
        return str(error)
    return ""


def resident() -> int:
    """Bytes of this process in memory, without what the C library keeps for later."""
    gc.collect()
    trim_free_memory()
    return int(psutil.Process().memory_info().rss)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Without offload and with, each in a process of its own."""
    path = tmp_path_factory.mktemp("models")
    save_tiny_model(path / "actor", **SIZES)
    save_tiny_model(path / "ref")
    spawn(main, args=(str(path),), nprocs=2)
    stays, leaves = (torch.load(path / f"{offloads}.pt", weights_only=True) for offloads in range(2))
    return stays, leaves


@pytest.mark.soak
def test_gradients_give_their_memory_back_while_others_work(found: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Of 240 MB, all but 5 %.

    Two processes differ by up to 40 MB in what the C library holds, so each phase is compared with ``train`` of the same process.
    """
    stays, leaves = found
    buffer = sum(weight.nbytes for weight in stays["weights"].values())
    assert buffer > 100 * MB
    for here, gone in zip(stays["rss"], leaves["rss"], strict=True):
        assert gone["train"] - gone["another forward"] > 0.95 * buffer
        for phase in AWAY:
            left = (gone["train"] - gone[phase]) - (here["train"] - here[phase])
            assert left == pytest.approx(buffer, rel=0.05), phase


@pytest.mark.soak
def test_training_and_generation_continue_bitwise(found: tuple[dict[str, Any], dict[str, Any]]) -> None:
    stays, leaves = found
    assert stays["metrics"][0]["grad_norm"] > 0 and stays["metrics"][0]["grad_norm"] != stays["metrics"][1]["grad_norm"]
    for here, gone in zip(stays["metrics"], leaves["metrics"], strict=True):
        assert torch.equal(here.pop("answers")["input_ids"], gone.pop("answers")["input_ids"])
        assert here == gone
    assert stays["weights"].keys() == leaves["weights"].keys()
    assert all(torch.equal(stays["weights"][name], weight) for name, weight in leaves["weights"].items())


@pytest.mark.soak
def test_work_with_what_is_away_is_an_error_that_names_it(found: tuple[dict[str, Any], dict[str, Any]]) -> None:
    stays, leaves = found
    assert stays["early"] == ["", "", ""]
    assert leaves["early"] == [
        "params are on the host: move(params='device') comes first",
        "gradients are on the host: move(grads='device') comes first",
        "optimizer are on the host: move(optimizer='device') comes first",
    ]
