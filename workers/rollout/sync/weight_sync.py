"""Weight synchronisation from trainer to rollout engine: full weights, shared weights or a LoRA adapter, with verification.

Three paths. Shared: the engine uses the trainer's tensors, nothing is copied. Full: tensors are exported (gathered, merged and
cast) one at a time and loaded by the engine, so that the peak is about two buckets. Adapter: the base weights go over once and
only the adapter follows each step. Verification (verification.py) reads the engine's side after each of them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from configs.schema.ppo import RolloutEngineConfig
from workers.engine.base import Weights
from workers.engine.hf.hf_model import DTYPES
from workers.metric import Metric, Metrics
from workers.rollout.base import Rollout
from workers.rollout.verification import (
    TURNS,
    Findings,
    HeldWeight,
    Lines,
    WeightSample,
    check_places,
    compare_all,
    compare_identity,
    due,
)

if TYPE_CHECKING:
    from peft import LoraConfig


class WeightSource(Protocol):
    """The trainer as seen by an engine: a colocated TrainEngine, or a channel.Receiver. TrainEngine documents the methods."""

    adapter_config: LoraConfig | None

    def live_weights(self) -> dict[str, Tensor] | None: ...

    def export_weights(self, *, dtype: torch.dtype | None = None, kind: Weights = "merged") -> Iterator[tuple[str, Tensor]]: ...


class Stopwatch:
    """Context manager that accumulates the seconds spent in it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *exception: Any) -> None:
        self.seconds += time.perf_counter() - self._start


class WeightSync:
    """Transfer the weights of one trainer to one engine, once per call.

    Remembers which lines the next sample verifies, and whether the engine has base weights for an adapter.
    """

    def __init__(self, rollout: Rollout, source: WeightSource, config: RolloutEngineConfig, rank: int) -> None:
        self.rollout, self.source, self.config, self.rank = rollout, source, config, rank
        self._places: Sequence[HeldWeight] | None = None
        self._turns: list[list[Lines]] = []
        self._found: Collection[str] = ()  # names of the stream that were last checked against the engine's
        self._version = -1
        self._turn = 0
        self._base_is_there = False  # the engine holds the base weights that an adapter applies to

    def __call__(self, version: int, *, keep_cache: bool = False) -> tuple[bool, Metrics]:
        """Synchronise the weights of step ``version``. Collective over the ranks of trainer and engine.

        keep_cache: see Rollout.load_weights.

        Returns whether the engine now uses the trainer's own tensors, and metrics of the verification (empty if it is off).
        Raises ValueError for weights that do not fit, and WeightMismatch if verification fails.
        """
        found, watch = Findings(), Stopwatch()
        live, adapter = self.source.live_weights(), self._adapter_alone
        shared = live is not None and self.rollout.share_weights(live, version)
        if adapter is not None:
            if not self._base_is_there:
                self._load(version, found, watch, keep_cache=keep_cache)
            # Unless the base survives sleep, the next sync has to load it again.
            self._base_is_there = self._base_stays
            self._load_adapter(adapter, version, found, watch, keep_cache=keep_cache)
        elif not shared:
            self._load(version, found, watch, keep_cache=keep_cache)
        elif live is not None and self.config.verify_weights != "off":
            with watch:
                compare_identity(self._held_weights(), live, found)
        # Only now: exporting is collective, and a rank that raised earlier would leave the others waiting in a gather.
        found.raise_if_wrong(version, self.config.name, self.rank)
        if self.config.verify_weights == "off":
            return shared, {}
        return shared, {
            "timing_s/verify_weights": Metric.max(watch.seconds),
            "rollout/verified_bytes": Metric.sum(found.nbytes),
        }

    @property
    def _adapter_alone(self) -> LoraConfig | None:
        """The adapter if it is synchronised by itself (lora_sync=adapter); None: full weights, any adapter merged into them."""
        return self.source.adapter_config if self.config.lora_sync == "adapter" else None

    def _load(self, version: int, found: Findings, watch: Stopwatch, *, keep_cache: bool) -> None:
        with watch:
            # After a rollback restart at the turn of the version, so that a rolled-back and a resumed run verify the same lines.
            # Otherwise count syncs, since the same version may be synchronised repeatedly.
            went_back = version < self._version
            self._turn = version if self._version < 0 or went_back else self._turn + 1
            self._version = version
            sampled = self.config.verify_weights == "sample" and not self._base_stays
            sample = WeightSample(self._due() if sampled else [])
        came: dict[str, None] = {}  # names of the stream, in order

        def sampled_stream() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self._stream():
                came[name] = None
                # Before the engine gets the tensor: a loader that changes its input in place would hide its own error.
                if name in sample.names:
                    with watch:
                        sample.take(name, tensor)
                yield name, tensor

        self.rollout.load_weights(sampled_stream(), version, **_kept(keep_cache))
        if self.config.verify_weights == "off":
            return
        with watch:
            if came.keys() != self._found:  # in the first sync, and whenever the names of the stream change
                check_places(self._held_weights(), came)
                self._found = came.keys()
            if sampled:
                sample.compare(found, self.rollout.read_held)
            else:
                # A second pass gathers the weights again: the expected values of all lines would be a second copy of the model.
                compare_all(self._held_weights(), self._stream(), found, self.rollout.read_held)

    @property
    def _base_stays(self) -> bool:
        """The base weights are loaded only once. Then they are verified completely: no later sync could continue a sample."""
        return self._adapter_alone is not None and (self.rollout.keeps_weights or not self.config.free_cache_engine)

    def _load_adapter(self, adapter: LoraConfig, version: int, found: Findings, watch: Stopwatch, *, keep_cache: bool) -> None:
        """Load the adapter and verify all of it: it is small enough to compare completely in each sync."""
        # Collected, because it is read twice: by the engine and by the verification.
        weights = dict(self.source.export_weights(kind="adapter"))
        self.rollout.load_adapter(adapter, iter(weights.items()), version, **_kept(keep_cache))
        if self.config.verify_weights != "off":
            with watch:
                held = self.rollout.held_adapter()
                check_places(held, weights)
                compare_all(held, iter(weights.items()), found, self.rollout.read_held)

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the exported weights, renamed for the engine, one tensor at a time.

        Together with what an engine buffers until a layer or a bucket is complete, this stays below two buckets of memory.
        """
        kind: Weights = "merged" if self._adapter_alone is None else "full"
        return iter(self.rollout.to_engine_names(self.source.export_weights(dtype=DTYPES[self.config.dtype], kind=kind)))

    def _due(self) -> list[Lines]:
        """The lines to verify in this turn.

        Selected for all turns at once: selection visits all weights, which is slow right after a load has evicted the CPU caches.
        """
        self._turns = self._turns or [list(due(self._held_weights(), turn)) for turn in range(TURNS)]
        return self._turns[self._turn % TURNS]

    def _held_weights(self) -> Sequence[HeldWeight]:
        if self._places is None:
            self._places = self.rollout.held_weights(exact=self.config.verify_weights == "full")
        return self._places


def _kept(keep_cache: bool) -> dict[str, bool]:
    """The argument keep_cache if it is set: engines that were written before it do not take it."""
    return {"keep_cache": True} if keep_cache else {}
