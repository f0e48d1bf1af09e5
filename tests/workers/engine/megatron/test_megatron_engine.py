"""What is left of an update that must not be applied, and what is refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.workers.engine.fsdp.cases import assert_snapshots
from tests.workers.engine.fsdp.test_fsdp_engine_checkpoint import assert_same_bits
from tests.workers.engine.strike import TOO_MUCH

RanksOf = Callable[[int], list[dict[str, Any]]]


@pytest.mark.parametrize("name", ["gradient", "loss alone"])
def test_no_rank_applies_what_is_not_finite_on_one(ranks_of: RanksOf, name: str) -> None:
    """It is broken on one data-parallel rank, or, the loss alone, on the last stage. The next update is applied by all."""
    for rank in ranks_of(2):
        found = rank["skipping"][name]
        assert [reported["skipped_updates"] for reported in found["step_metrics"]] == [0, 1, 0]
        assert [math.isnan(reported["grad_norm"]) for reported in found["step_metrics"]] == [False, True, False]
        assert ["lr" in reported for reported in found["step_metrics"]] == [True, False, True]
        assert_same_bits(found["before"], found["after"])
        assert any(not torch.equal(weight, found["after"][key]) for key, weight in found["weights"].items())


def test_a_step_that_ran_out_of_memory_can_be_had_again(ranks_of: RanksOf) -> None:
    (found,) = (rank["out_of_memory"] for rank in ranks_of(1))
    assert found["parts"] == 3 and str(TOO_MUCH) in found["message"]
    first, again = found["gradients"]
    assert first.keys() == again.keys()
    assert [name for name, (part, _) in first.items() if not torch.equal(part, again[name][0])] == []


def test_forward_under_a_snapshot_is_that_of_its_time(ranks_of: RanksOf) -> None:
    for rank in ranks_of(2):
        for found in rank["snapshots"].values():
            assert_snapshots(found)


REFUSED = {
    "another cut": "models that share GPUs are cut alike by Megatron",
    "weights that it does not know": "strategy=megatron does not know 1 of its weights, such as model.layers.0.self_attn.sinks",
    "a weight that is missing": "no model.norm.weight there",
    "no checkpoint": "no checkpoint there",
    "no optimizer there": "no optimizer.exp_avg.model.embed_tokens.weight there",
    "another model's": "no model.model.layers.0.self_attn.q_norm.weight there",
    "an actor's": "no model.score.weight there",
    "of another size": "model.model.layers.0.mlp.gate_proj.weight is (64, 32) there and (96, 32) in this model",
    "unknown field": "megatron.override_transformer_config: TransformerConfig has no bias",
}


@pytest.mark.parametrize(("what", "words"), REFUSED.items(), ids=REFUSED.keys())
def test_refused(ranks_of: RanksOf, what: str, words: str) -> None:
    (found,) = (rank["refusals"] for rank in ranks_of(1))
    assert words in found[what] and "\n" not in found[what]
