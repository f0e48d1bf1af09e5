"""The memory dance: who is on the device in which phase, over every role in this process.

phase      actor's parameters   other roles   optimizer             rollout engine
forward    its own on device    may be away   may be away           asleep
train      its own on device    may be away   its own on device     asleep
sync       on device            may be away   may be away           weights awake, wherever it is
generate   may be away          may be away   may be away           awake

«May be away»: on the host if the role's param_offload or optimizer_offload says so. free_cache_engine=false keeps the
rollout engine awake, and so does having no model beside it. Two full copies of the weights plus a KV cache never coexist
where the actor is offloaded.

Engines such as vLLM and SGLang take device memory from the driver, and see as free only what torch's caching allocator has
given back. After an update the allocator still holds the activations' memory, often most of the GPU: it is released before the
engine takes any (measured: 39 GB free before the release, 116 GB after it, where the engine wants 99).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from workers.engine.base import TrainEngine
from workers.rollout.base import Rollout

Phase = Literal["rest", "forward", "train", "sync", "generate"]


@dataclass(slots=True)
class Tenant:
    """A model role on the device, and what of it may leave."""

    engine: TrainEngine
    param_offload: bool
    optimizer_offload: bool


class GCTime:
    """Seconds that this process spends in Python's garbage collector, from now on."""

    def __init__(self) -> None:
        self.seconds = self._start = 0.0
        gc.callbacks.append(self._record)

    def _record(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._start = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._start

    def close(self) -> None:
        gc.callbacks.remove(self._record)


class Residency:
    def __init__(self, device: Literal["cpu", "cuda"] = "cpu") -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        """What sleep, wake and the release of cached memory took since ``take_seconds``."""
        self.phase: Phase = "rest"
        self._tenants: dict[str, Tenant] = {}
        self._rollout: Rollout | None = None
        self._rollout_sleeps = True
        self._weights_shared_by: str | None = None

    def add_model(self, role: str, tenant: Tenant) -> None:
        assert role not in self._tenants, f"role {role} is here already"
        self._tenants[role] = tenant
        self._place(active=None, training=False)

    def add_rollout(self, rollout: Rollout, *, free_cache_engine: bool) -> None:
        """Until its first weights come, it sleeps."""
        assert self._rollout is None, "one rollout engine a process"
        self._rollout, self._rollout_sleeps = rollout, free_cache_engine
        if free_cache_engine:
            self._sleep(rollout)

    def release_cached_memory(self) -> None:
        """Return device memory that torch's allocator holds but no tensor uses to the driver, for those who ask the driver."""
        if self.device == "cuda":
            with self._timed("release_memory"):
                torch.cuda.empty_cache()

    def take_seconds(self) -> dict[str, float]:
        """``seconds`` by name, which then start from 0."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _sleep(self, rollout: Rollout) -> None:
        with self._timed("engine_sleep"):
            rollout.sleep()

    def _wake(self, rollout: Rollout, *, weights: bool, kv_cache: bool) -> None:
        if rollout.takes_driver_memory and self._rollout_sleeps:
            self.release_cached_memory()
        with self._timed("engine_wake"):
            rollout.wake(weights=weights, kv_cache=kv_cache)

    def enter(self, phase: Phase, role: str | None = None) -> None:
        """Move everything to where ``phase`` of ``role`` wants it. Memory is given back before any is taken.

        role: the model that works (forward, train) or whose weights the rollout engine gets (sync).
        """
        assert role is None or role in self._tenants, f"phase {phase}: no role {role} here, only {sorted(self._tenants)}"
        match phase:
            case "forward" | "train":
                if self._rollout is not None and self._rollout_sleeps and self.phase in ("sync", "generate"):
                    self._sleep(self._rollout)
                self._place(active=role, training=phase == "train")
            case "sync":
                self._place(active=role, training=False)
                if self._rollout is not None:
                    self._wake(self._rollout, weights=True, kv_cache=False)
            case "generate":
                assert self._rollout is not None, "phase generate: no rollout engine here"
                assert self.phase in ("sync", "generate") or not self._rollout_sleeps, (
                    f"phase generate after {self.phase}: the rollout engine slept and has no weights; sync first"
                )
                self._place(active=self._weights_shared_by, training=False)
                if self.phase != "generate":
                    self._wake(self._rollout, weights=False, kv_cache=True)
            case "rest":
                self._place(active=None, training=False)
        self.phase = phase

    @contextmanager
    def visit(self, role: str) -> Iterator[None]:
        """The role's parameters are on the device in here, in whatever phase: to be saved."""
        tenant = self._tenants[role]
        tenant.engine.move(params="device")
        yield
        if tenant.param_offload and role != self._weights_shared_by:
            tenant.engine.move(params="cpu")

    def share_weights_of(self, role: str | None) -> None:
        """The rollout engine generates from this role's own tensors: they stay on the device while it does."""
        self._weights_shared_by = role

    def _place(self, *, active: str | None, training: bool) -> None:
        for role, tenant in self._tenants.items():
            if role != active:
                tenant.engine.move(
                    params="cpu" if tenant.param_offload else None,
                    grads="cpu",
                    optimizer="cpu" if tenant.optimizer_offload else None,
                )
            elif not training:
                tenant.engine.move(grads="cpu", optimizer="cpu" if tenant.optimizer_offload else None)
        if active is not None:
            at_work: Literal["device"] | None = "device" if training else None
            self._tenants[active].engine.move(params="device", grads=at_work, optimizer=at_work)
