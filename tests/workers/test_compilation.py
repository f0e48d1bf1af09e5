"""Seconds of torch.compile are counted once each, and only while something is compiled."""

import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.callback import callback_handler

from workers.compilation import COMPILE_TIME, compiled


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Graphs that are captured, each in a tenth of a second at least, and not translated."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(len(graphs))
        time.sleep(0.1)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    COMPILE_TIME.take()
    yield graphs
    torch.compiler.reset()


def test_time_is_counted_while_a_graph_is_compiled(doubled: list[int]) -> None:
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    compiled(abs)
    torch.compiler.reset()
    compiled(abs)
    began = time.perf_counter()
    run = compiled(twice)
    assert callback_handler.start_callbacks.count(COMPILE_TIME._begin) == 1
    assert run(torch.ones(5)).sum() == 10 and doubled == [0]
    assert 0.1 <= COMPILE_TIME.take() < time.perf_counter() - began
    assert run(torch.ones(7)).sum() == 14 and doubled == [0]
    assert COMPILE_TIME.take() == 0.0
    run(torch.ones(3, dtype=torch.float64))
    assert doubled == [0, 1] and COMPILE_TIME.take() >= 0.1
