"""Concurrent role execution: order within a pool, overlap between pools, and errors."""

import threading
import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import pytest

from configs.schema.placement import Placement, Pool
from trainer.cluster.concurrency import Together, phases_of
from workers.controller.group import Replies, Transport, WorkerGroup
from workers.controller.rpc import Arguments, Call

SECONDS = 20.0  # more than any of these tests takes


class Workers(Transport):
    """Workers that can only be ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def send(
        self, call: Call[Any], arguments: Mapping[int, Arguments], wanted: Collection[int], seconds: float | None
    ) -> Replies:
        raise AssertionError("not called in this test")

    def close(self) -> None:
        self.ended.set()


def groups(**of_role: str) -> tuple[Together, dict[str, Workers]]:
    """of_role: each role's pool."""
    workers = {pool: Workers() for pool in of_role.values()}
    made = {pool: WorkerGroup(pool, 1, transport) for pool, transport in workers.items()}
    return Together({role: made[pool] for role, pool in of_role.items()}, n_gpus=1), workers


def test_one_pool_runs_parts_in_order_in_the_calling_thread() -> None:
    together, _ = groups(actor="all", critic="all")
    seen: list[tuple[str, threading.Thread]] = []

    def part(role: str) -> str:
        seen.append((role, threading.current_thread()))
        return role

    here = threading.current_thread()
    assert together({role: partial(part, role) for role in ("critic", "actor")}) == {
        "critic": "critic",
        "actor": "actor",
    }
    assert seen == [("critic", here), ("actor", here)]
    assert together({}) == {}


def test_pools_work_concurrently_and_each_in_order() -> None:
    together, _ = groups(actor="a", ref="a", critic="b")
    meeting, order = threading.Barrier(2), list[str]()

    def actor() -> str:
        meeting.wait(SECONDS)
        time.sleep(0.1)
        order.append("actor")
        return "actor"

    def ref() -> str:
        order.append("ref")
        return "ref"

    def critic() -> str:
        meeting.wait(SECONDS)
        return "critic"

    found = together({"actor": actor, "ref": ref, "critic": critic})
    assert list(found) == ["actor", "ref", "critic"], "in the order of the arguments, whichever ends first"
    assert order == ["actor", "ref"]


@pytest.mark.parametrize("pool", ["a", "b"])
def test_error_of_one_pool_is_raised_at_once_and_the_others_are_ended(pool: str) -> None:
    """A part that is running ends when its workers end, as a call on Ray does."""
    together, workers = groups(actor="a", critic="b")
    other, role = ("b", "actor") if pool == "a" else ("a", "critic")
    gone = threading.Event()

    def fails() -> None:
        raise ValueError(f"{role} is broken")

    def waits() -> None:
        workers[other].ended.wait(SECONDS)
        gone.set()

    begun = time.monotonic()
    parts = {"actor": waits, "critic": waits} | {role: fails}
    with pytest.raises(ValueError, match=f"{role} is broken"):
        together(parts)
    assert time.monotonic() - begun < SECONDS / 2
    assert workers[other].ended.is_set() and not workers[pool].ended.is_set()
    assert gone.is_set(), "no thread remains"


def test_spans_record_the_pools_of_their_phase() -> None:
    def pool(name: str, *roles: str) -> Pool:
        return Pool(name, roles, 1, 1, 1.0, 0, 0, "")

    phases = phases_of(Placement((pool("a", "actor", "ref"), pool("b", "critic"), pool("c", "rollout"))))
    for name in ("gen", "reward", "ref", "values", "sync"):
        with phases(name):
            pass
    assert [(span.phase, span.pools) for span in phases.spans] == [
        ("gen", ("c",)), ("reward", ()), ("ref", ("a",)), ("values", ("b",)), ("sync", ("a", "c"))
    ]  # fmt: skip
    assert all(time.time() - 60 < span.start <= span.end <= time.time() + 1 for span in phases.spans)
    phases.clear()
    assert phases.spans == [] and phases.seconds == {}
