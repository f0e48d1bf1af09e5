"""What is read when, and what comparing finds."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from workers.rollout.verification import (
    CALL,
    TURNS,
    Findings,
    HeldWeight,
    Lines,
    PlainWeight,
    WeightMismatch,
    WeightSample,
    check_places,
    compare_all,
    compare_identity,
    due,
    everything,
    same_bits,
)


class Counted(HeldWeight):
    """No numbers: how many lines there are, and what they cost."""

    def __init__(self, lines: int, cost: int = 1, computed: bool = False, line_bytes: int = 4) -> None:
        self.lines, self.cost, self.computed, self.line_bytes = lines, cost, computed, line_bytes
        self.names = ("counted",)

    def expected(self, part: int, tensor: Tensor, start: int, stop: int) -> Any:
        raise AssertionError("only counted")

    def read(self, start: int, stop: int) -> list[Tensor]:
        raise AssertionError("only counted")


def read(lines: Sequence[Lines]) -> list[list[Tensor]]:
    return [chosen.held.read(chosen.start, chosen.stop) for chosen in lines]


held_weights = st.lists(st.builds(Counted, st.integers(0, 300), st.integers(1, 1000), st.booleans()), max_size=12)


@given(held_weights, st.integers(0, 1000))
def test_any_64_turns_in_a_row_read_every_line_once(weights: list[Counted], first: int) -> None:
    seen = {id(held): [0] * held.lines for held in weights}
    for turn in range(first, first + TURNS):
        for lines in due(weights, turn):
            for line in range(lines.start, lines.stop):
                seen[id(lines.held)][line] += 1
    assert all(count == 1 for counts in seen.values() for count in counts)


@given(held_weights, st.integers(0, 1000))
def test_a_turn_costs_a_64th_in_one_piece(weights: list[Counted], turn: int) -> None:
    chosen = list(due(weights, turn))
    for computed in (False, True):
        alike = [held for held in weights if held.computed == computed]
        taken = [lines for lines in chosen if lines.held in alike]
        cost = sum((lines.stop - lines.start) * lines.held.cost for lines in taken)
        share = sum(held.lines * held.cost for held in alike) / TURNS
        assert abs(cost - share) <= max((held.cost for held in alike), default=0) + 1
        inner = alike[alike.index(taken[0].held) + 1 : alike.index(taken[-1].held)] if taken else []
        assert [lines.held for lines in taken[1:-1]] == [held for held in inner if held.lines], "none is passed over"


def test_many_small_weights_are_not_read_in_one_turn() -> None:
    """A call for each costs more than its bytes."""
    weights = [
        PlainWeight("large", lambda: torch.zeros(2**20)),
        *(PlainWeight("small", lambda: torch.zeros(4)) for _ in range(64)),
    ]
    assert weights[0].cost == 4 and weights[1].cost == 4 + CALL / 4
    assert max(len(list(due(weights, turn))) for turn in range(TURNS)) <= 3


@given(st.integers(0, 300), st.integers(0, 2**25))
def test_everything_is_every_line_once(lines: int, line_bytes: int) -> None:
    held = Counted(lines, line_bytes=line_bytes)
    assert [line for part in everything(held) for line in range(part.start, part.stop)] == list(range(lines))
    assert all(part.nbytes <= 2**24 or part.stop - part.start == 1 for part in everything(held))


@given(st.integers(0, 6 * 5 - 1))
def test_one_number_that_is_off_is_found_within_64_turns(place: int) -> None:
    """Wherever it is: by sampling once, by reading all at once."""
    trainers = torch.randn(6, 5)
    engines = trainers.clone()
    engines.view(-1)[place] += 1e-6
    held = [PlainWeight("weight", lambda: engines)]
    found = []
    for turn in range(TURNS):
        sample, findings = WeightSample(list(due(held, turn))), Findings()
        sample.take("weight", trainers)
        sample.compare(findings, read)
        found.append(bool(findings.wrong))
    assert sum(found) == 1
    findings = Findings()
    compare_all(held, iter([("weight", trainers)]), findings, read)
    assert findings.wrong.keys() == {"weight"} and findings.nbytes == engines.nbytes


def test_expected_values_are_copied_before_the_trainer_continues() -> None:
    trainers = torch.ones(64)
    sample, found = WeightSample([Lines(PlainWeight("weight", lambda: torch.ones(64)), 0, 64)]), Findings()
    sample.take("weight", trainers)
    trainers.zero_()
    sample.compare(found, read)
    assert not found.wrong


def test_equal_is_equal_after_the_cast() -> None:
    trainers = torch.randn(40, 3)
    held = [
        PlainWeight("weight", lambda: trainers.bfloat16()),
        PlainWeight("weight", lambda: trainers.bfloat16()[10:20], lambda whole: whole[10:20]),
        PlainWeight("weight", lambda: trainers.bfloat16().float(), dtype=torch.bfloat16),
        PlainWeight("scalar", lambda: torch.tensor(3.0)),
    ]
    found = Findings()
    compare_all(held, iter([("weight", trainers), ("scalar", torch.tensor(3.0))]), found, read)
    assert not found.wrong and found.nbytes == 2 * 120 + 2 * 30 + 4 * 120 + 4


def test_numbers_that_are_none_are_off_unless_the_trainer_has_them() -> None:
    found = Findings()
    found.compare("both", torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]), 0.0)
    assert not found.wrong
    found.compare("one", torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 1.0]), 0.0)
    assert found.wrong == {"one": (1, 2, math.inf)}


@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 8), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_bits_are_compared_wherever_they_lie(start: int, size: int, place: int, dtype: torch.dtype) -> None:
    one = torch.randn(20).to(dtype)
    other = torch.cat([torch.zeros(3, dtype=dtype), one])[3:]
    assert same_bits(one[start : start + size], other[start : start + size])
    other[start + place % size] += 1
    assert not same_bits(one[start : start + size], other[start : start + size])
    assert not same_bits(one[:size], one[: size + 1])
    assert not same_bits(one, one.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize])), "of another type"


def test_rounding_is_no_error_and_anything_beyond_it_is() -> None:
    found = Findings()
    found.compare("fine", torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0]), torch.tensor([0.5, 0.0]))
    assert not found.wrong
    found.compare("off", torch.tensor([1.0, 2.25]), torch.tensor([1.5, 2.0]), torch.tensor([0.5, 0.0]))
    assert found.wrong == {"off": (1, 2, 0.25)}


def test_the_line_that_ends_a_run() -> None:
    found = Findings()
    found.raise_if_wrong(7, "vllm", 3)
    found.compare("model.norm.weight", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), 0.0)
    found.compare("lm_head.weight", torch.tensor([1.0]), torch.tensor([4.0]), 0.0)
    with pytest.raises(WeightMismatch) as error:
        found.raise_if_wrong(7, "vllm", 3)
    assert str(error.value) == (
        "model.norm.weight in vllm on rank 3 is not the trainer's, weights of version 7: 1 of 2 numbers read are off, "
        "by 0.5 at most; 2 tensors are off in all"
    )


def test_shared_weights_are_the_same_memory() -> None:
    trainers = torch.ones(3, 2)
    found = Findings()
    compare_identity([PlainWeight("weight", lambda: trainers)], {"weight": trainers}, found)
    assert not found.wrong and found.nbytes == trainers.nbytes
    compare_identity([PlainWeight("weight", lambda: trainers.clone())], {"weight": trainers}, found)
    assert found.wrong.keys() == {"weight"}


def test_what_has_no_known_place_is_named() -> None:
    held = [PlainWeight("known", lambda: torch.ones(2)), PlainWeight("odd", lambda: torch.ones(2))]
    check_places([], ["known"])  # this rank holds nothing
    check_places(held, ["odd", "known"])
    with pytest.raises(ValueError, match=r"keeps new, odd \(2 in all\); verify_weights=off"):
        check_places(held, ["known", "new"])
    with pytest.raises(ValueError, match="keeps 2 rows of odd, and not 3"):
        held[1].expected(0, torch.ones(3), 0, 1)
