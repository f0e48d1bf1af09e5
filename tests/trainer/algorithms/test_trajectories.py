"""The view of rows as trajectories, against plain Python."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.algorithms.parts import in_parts
from tests.trainer.algorithms.plain import defaults
from trainer.algorithms.advantages import ADVANTAGES, AdvantageInputs
from trainer.algorithms.trajectories import Trajectories
from workers.batch import Batch

rows_of_trajectories = st.lists(
    st.tuples(st.integers(-5, 5), st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=12, unique_by=lambda row: row[:2]
)


def batch_of(rows: list[tuple[int, int, int]]) -> Batch:
    """rows: (trajectory, part, tokens). The tokens are numbered; the group is a function of the trajectory."""
    number, part, lengths = (torch.tensor(column) for column in zip(*rows, strict=True))
    total = int(lengths.sum())
    return Batch(
        lengths, {"x": torch.arange(total).double(), "wide": torch.rand(total, 3)},
        {"trajectory": number, "part": part, "group": number // 3, "score": torch.arange(len(rows)).float()},
        {"text": [f"row {i}" for i in range(len(rows))]}, {"temperature": 0.5},
    )  # fmt: skip


@given(rows_of_trajectories)
def test_joined_rows_are_the_parts_in_order(rows: list[tuple[int, int, int]]) -> None:
    batch = batch_of(rows)
    view = Trajectories.of(batch)
    of_row = batch.split_rows("x")
    numbers = list(dict.fromkeys(number for number, _, _ in rows))
    parts = [sorted((part, i) for i, (number, part, _) in enumerate(rows) if number == wanted) for wanted in numbers]
    joined = view.joined(batch)
    assert [row.tolist() for row in joined.split_rows("x")] == [
        [x for _, i in of_one for x in of_row[i].tolist()] for of_one in parts
    ]
    assert view.last.tolist() == [of_one[-1][1] for of_one in parts]
    assert view.of_row.tolist() == [numbers.index(number) for number, _, _ in rows]
    assert torch.equal(joined.rows["score"], view.last.float()) and joined.meta == batch.meta
    assert joined.objects["text"] == [f"row {i}" for i in view.last.tolist()]
    assert torch.equal(joined.lengths, view.lengths)
    assert torch.equal(view.split(joined.tokens["wide"]), batch.tokens["wide"])
    again = view.split_columns(joined.tokens)
    assert torch.equal(again.lengths, batch.lengths) and torch.equal(again.tokens["x"], batch.tokens["x"])
    assert view.are_rows == (len(numbers) == len(rows))


@given(rows_of_trajectories)
def test_gradients_pass_through_the_view(rows: list[tuple[int, int, int]]) -> None:
    batch = batch_of(rows)
    view, weights = Trajectories.of(batch), torch.rand(batch.total_tokens, dtype=torch.float64)
    leaf = batch.tokens["x"].clone().requires_grad_()
    (view.split(view.gather(leaf).square()) * weights).sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, 2 * leaf.detach() * weights)


@pytest.mark.parametrize("rows", [{}, {"trajectory": torch.tensor([4, 2, 9])}, {"part": torch.tensor([0, 0, 0])}])
def test_batch_of_single_rows_is_not_copied(rows: dict[str, Tensor]) -> None:
    batch = Batch(torch.tensor([2, 3, 1]), {"x": torch.arange(6.0)}, rows)
    view = Trajectories.of(batch)
    assert view.are_rows and view.joined(batch) is batch and view.gather(batch.tokens["x"]) is batch.tokens["x"]
    assert view.lengths is batch.lengths and view.split(batch.tokens["x"]) is batch.tokens["x"]


def test_rows_of_one_trajectory_have_one_group_and_different_parts() -> None:
    with pytest.raises(AssertionError, match="same part"):
        Trajectories.of(batch_of([(1, 0, 2), (2, 0, 2), (1, 0, 3)]))
    batch = batch_of([(1, 0, 2), (2, 0, 2), (1, 1, 3)])
    with pytest.raises(AssertionError, match="different groups"):
        Trajectories.of(batch.with_rows(group=torch.tensor([0, 0, 1])))


def plain_gae(rewards: list[float], values: list[float], last_value: float, gamma: float, lam: float) -> list[float]:
    """Unwhitened, over the trained tokens of one trajectory."""
    advantages, ahead, following = [], 0.0, last_value
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        ahead = reward + gamma * following - value + gamma * lam * ahead
        advantages.append(ahead)
        following = value
    return advantages[::-1]


@given(st.integers(0, 10_000))
def test_gae_runs_through_the_parts_with_the_last_value_of_the_last(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (4,), generator=g)
    total = int(lengths.sum())
    columns = {name: torch.randn(total, generator=g, dtype=torch.float64) for name in ("rewards", "values")}
    mask = (torch.rand(total, generator=g) < 0.7).double()
    batch = Batch(lengths, columns | {"response_mask": mask}, {"last_value": torch.randn(4, generator=g, dtype=torch.float64)})
    parts = in_parts(batch, seed)
    view = Trajectories.of(parts)
    whole = view.joined(parts)
    config = replace(defaults().algorithm, gamma=0.9, lam=0.7)
    found = ADVANTAGES["gae"](
        AdvantageInputs(
            token_rewards=whole.tokens["rewards"], response_mask=whole.tokens["response_mask"], lengths=whole.lengths,
            uid=torch.zeros(4), values=whole.tokens["values"], last_value=whole.rows["last_value"],
        ), config,
    )  # fmt: skip
    # Returns minus values are the advantages before the whitening.
    trained = parts.tokens["response_mask"].bool()
    advantages = (view.split(found.returns) - parts.tokens["values"])[trained][parts.tokens["serial"][trained].argsort()]
    expected: list[float] = []
    for row in range(4):
        of_row = batch.select([row])
        here = of_row.tokens["response_mask"].bool()
        rewards, values = (of_row.tokens[name][here].tolist() for name in ("rewards", "values"))
        expected += plain_gae(rewards, values, float(of_row.rows["last_value"]), 0.9, 0.7)
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)
