"""Device-memory scheduling: which tensors are on the device in which phase, for all roles of this process.

Colocated roles and a rollout engine share one device. Before each phase ``MemoryScheduler.enter`` moves parameters, gradients and
optimizer state between device and host, and lets the rollout engine sleep or wake. The cost is the time of these transfers;
``MemoryScheduler.seconds`` has that of sleep, wake and release.

phase      active role's parameters   other roles   optimizer                 rollout engine
forward    on device                  may be away   may be away               asleep
train      on device                  may be away   active role's on device   asleep
sync       on device                  may be away   may be away               weights awake, in whichever process it is
generate   may be away                may be away   may be away               awake

«May be away»: on the host if the role's param_offload or optimizer_offload is set. The rollout engine stays awake with
free_cache_engine=false, and if its process has no model. Two full copies of the weights plus a KV cache never coexist where
the actor is offloaded.

Engines such as vLLM and SGLang take device memory from the driver, and count as free only what torch's caching allocator has
returned to it. After an update the allocator still holds the memory of the activations, often most of the GPU: it is released
before the engine takes any (measured: 39 GB free before the release, 116 GB after it; the engine needs 99).
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
class ResidentModel:
    """A model role on the device, and which parts of it are offloaded when it is not active."""

    engine: TrainEngine
    param_offload: bool
    optimizer_offload: bool


class GCTime:
    """Seconds that this process spends in Python's garbage collector, counted until ``close``."""

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


class MemoryScheduler:
    """Scheduler of device memory for the roles of this process."""

    def __init__(self, device: Literal["cpu", "cuda"] = "cpu") -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        """Duration of sleep, wake and release of cached memory since the last ``take_seconds``."""
        self.phase: Phase = "rest"
        self._resident_models: dict[str, ResidentModel] = {}
        self._rollout: Rollout | None = None
        self._rollout_sleeps = True
        self._weights_shared_by: str | None = None
        self.frozen = False
        """Objects of this process are exempt from garbage collection; see _freeze_permanent."""

    def add_model(self, role: str, resident: ResidentModel) -> None:
        """Add a model role, and offload it as far as it may be."""
        assert role not in self._resident_models, f"role {role} is here already"
        self._resident_models[role] = resident
        self._place(active=None, training=False)

    def add_rollout(self, rollout: Rollout, *, free_cache_engine: bool) -> None:
        """Add the rollout engine. With free_cache_engine it sleeps until its first weights arrive."""
        assert self._rollout is None, "one rollout engine a process"
        self._rollout, self._rollout_sleeps = rollout, free_cache_engine
        if free_cache_engine:
            self._sleep(rollout)

    def release_cached_memory(self) -> None:
        """Return memory that torch's allocator caches without using it to the driver, for engines that ask the driver."""
        if self.device == "cuda":
            with self._timed("release_memory"):
                torch.cuda.empty_cache()

    def take_seconds(self) -> dict[str, float]:
        """Return ``seconds`` by name, and reset them."""
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
        # Before the engine allocates: it fails if torch's cache still holds the memory.
        if rollout.takes_driver_memory and self._rollout_sleeps:
            self.release_cached_memory()
        with self._timed("engine_wake"):
            rollout.wake(weights=weights, kv_cache=kv_cache)

    def _freeze_permanent(self) -> None:
        """Exempt from garbage collection, once, what is there after the first update: models, engine, compiled code.

        Nearly all of it lives as long as this process, and an engine that sleeps collects garbage so that all memory is released
        (vLLM): 0.4 s over 760,000 objects.
        """
        if self._rollout is not None and self._rollout.takes_driver_memory and self._rollout_sleeps and not self.frozen:
            gc.collect()
            gc.freeze()
            self.frozen = True

    def enter(self, phase: Phase, role: str | None = None) -> None:
        """Move all state to where ``phase`` of ``role`` needs it. Memory is released before any is taken.

        role: the active model (forward, train), or the model whose weights the rollout engine gets (sync).
        """
        assert role is None or role in self._resident_models, (
            f"phase {phase}: no role {role} here, only {sorted(self._resident_models)}"
        )
        match phase:
            case "forward" | "train":
                # First, so that the engine's memory is free when the role's tensors come back.
                if self._rollout is not None and self._rollout_sleeps and self.phase in ("sync", "generate"):
                    self._sleep(self._rollout)
                self._place(active=role, training=phase == "train")
            case "sync":
                if self.phase == "train":
                    self._freeze_permanent()
                self._place(active=role, training=False)
                if self._rollout is not None:
                    # Not the KV cache: the trainer's parameters are on the device now.
                    self._wake(self._rollout, weights=True, kv_cache=False)
            case "generate":
                assert self._rollout is not None, "phase generate: no rollout engine here"
                assert self.phase in ("sync", "generate") or not self._rollout_sleeps, (
                    f"phase generate after {self.phase}: the rollout engine slept and has no weights; sync first"
                )
                # An engine that shares a role's tensors reads them while it generates: they must be on the device.
                self._place(active=self._weights_shared_by, training=False)
                # The KV cache last, when the trainer's parameters have left.
                if self.phase != "generate":
                    self._wake(self._rollout, weights=False, kv_cache=True)
            case "rest":
                self._place(active=None, training=False)
        self.phase = phase

    @contextmanager
    def parameters_on_device(self, role: str) -> Iterator[None]:
        """Keep the role's parameters on the device within the block, in whatever phase: to save them."""
        resident = self._resident_models[role]
        resident.engine.move(params="device")
        yield
        # Shared tensors stay: the rollout engine may be using them.
        if resident.param_offload and role != self._weights_shared_by:
            resident.engine.move(params="cpu")

    def share_weights_of(self, role: str | None) -> None:
        """Set the role whose own tensors the rollout engine uses; they stay on the device while it generates. None: no role."""
        self._weights_shared_by = role

    def _place(self, *, active: str | None, training: bool) -> None:
        """Offload inactive roles, and whatever the active one does not need; then bring the active role to the device."""
        # Gradients of roles that do not train are dropped by this move: they are not needed after the step.
        for role, resident in self._resident_models.items():
            if role != active:
                resident.engine.move(
                    params="cpu" if resident.param_offload else None,
                    grads="cpu",
                    optimizer="cpu" if resident.optimizer_offload else None,
                )
            elif not training:
                resident.engine.move(grads="cpu", optimizer="cpu" if resident.optimizer_offload else None)
        # After all others have left: their memory is free now.
        if active is not None:
            at_work: Literal["device"] | None = "device" if training else None
            self._resident_models[active].engine.move(params="device", grads=at_work, optimizer=at_work)
