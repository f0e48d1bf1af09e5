"""The trainer's weights go to the rollout engine a bucket at a time, and are proven to be there."""

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
    """The trainer as an engine sees it: a TrainEngine beside it, or a channel.Receiver. See TrainEngine for what these are."""

    adapter_config: LoraConfig | None

    def live_weights(self) -> dict[str, Tensor] | None: ...

    def export_weights(self, *, dtype: torch.dtype | None = None, kind: Weights = "merged") -> Iterator[tuple[str, Tensor]]: ...


class Stopwatch:
    """Adds up the seconds spent in it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *exception: Any) -> None:
        self.seconds += time.perf_counter() - self._start


class WeightSync:
    """From one trainer to one engine, again and again."""

    def __init__(self, rollout: Rollout, source: WeightSource, config: RolloutEngineConfig, rank: int) -> None:
        self.rollout, self.source, self.config, self.rank = rollout, source, config, rank
        self._places: Sequence[HeldWeight] | None = None
        self._turns: list[list[Lines]] = []
        self._found: Collection[str] = ()  # names that have their places
        self._version = -1
        self._turn = 0
        self._base_is_there = False  # of what an adapter lies beside

    def __call__(self, version: int) -> tuple[bool, Metrics]:
        """Whether the engine now works with the trainer's own tensors; and what was verified, unless nothing is. Collective.

        Raises WeightMismatch once all ranks have their weights, ValueError for weights that do not fit.
        """
        found, watch = Findings(), Stopwatch()
        live, adapter = self.source.live_weights(), self._adapter_alone
        shared = live is not None and self.rollout.share_weights(live, version)
        if adapter is not None:
            if not self._base_is_there:
                self._load(version, found, watch)
            self._base_is_there = self._base_stays
            self._load_adapter(adapter, version, found, watch)
        elif not shared:
            self._load(version, found, watch)
        elif live is not None and self.config.verify_weights != "off":
            with watch:
                compare_identity(self._held_weights(), live, found)
        found.raise_if_wrong(version, self.config.name, self.rank)
        if self.config.verify_weights == "off":
            return shared, {}
        return shared, {
            "timing_s/verify_weights": Metric.max(watch.seconds),
            "rollout/verified_bytes": Metric.sum(found.nbytes),
        }

    @property
    def _adapter_alone(self) -> LoraConfig | None:
        """The adapter that goes to the engine by itself; None: whole weights go, with it if there is one."""
        return self.source.adapter_config if self.config.lora_sync == "adapter" else None

    def _load(self, version: int, found: Findings, watch: Stopwatch) -> None:
        with watch:
            went_back = version < self._version  # a rollback: what is verified is what a resumed run verifies
            self._turn = version if self._version < 0 or went_back else self._turn + 1
            self._version = version
            sampled = self.config.verify_weights == "sample" and not self._base_stays
            sample = WeightSample(self._due() if sampled else [])
        came: dict[str, None] = {}

        def sampled_stream() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self._stream():
                came[name] = None
                if name in sample.names:
                    with watch:
                        sample.take(name, tensor)
                yield name, tensor

        self.rollout.load_weights(sampled_stream(), version)
        if self.config.verify_weights == "off":
            return
        with watch:
            if came.keys() != self._found:
                check_places(self._held_weights(), came)
                self._found = came.keys()
            if sampled:
                sample.compare(found, self.rollout.read_held)
            else:
                compare_all(self._held_weights(), self._stream(), found, self.rollout.read_held)

    @property
    def _base_stays(self) -> bool:
        """It comes once: no later sync could read the rest of a sample."""
        return self._adapter_alone is not None and (self.rollout.keeps_weights or not self.config.free_cache_engine)

    def _load_adapter(self, adapter: LoraConfig, version: int, found: Findings, watch: Stopwatch) -> None:
        """It is small: all of it is verified each time."""
        weights = dict(self.source.export_weights(kind="adapter"))
        self.rollout.load_adapter(adapter, iter(weights.items()), version)
        if self.config.verify_weights != "off":
            with watch:
                held = self.rollout.held_adapter()
                check_places(held, weights)
                compare_all(held, iter(weights.items()), found, self.rollout.read_held)

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        """A tensor at a time: with what an engine keeps until a layer or a bucket is whole, two buckets are not passed."""
        kind: Weights = "merged" if self._adapter_alone is None else "full"
        return iter(self.rollout.in_its_names(self.source.export_weights(dtype=DTYPES[self.config.dtype], kind=kind)))

    def _due(self) -> list[Lines]:
        """Found for all turns at once: a sync empties the processor's caches, and going through all weights then takes time."""
        self._turns = self._turns or [list(due(self._held_weights(), turn)) for turn in range(TURNS)]
        return self._turns[self._turn % TURNS]

    def _held_weights(self) -> Sequence[HeldWeight]:
        if self._places is None:
            self._places = self.rollout.held_weights(exact=self.config.verify_weights == "full")
        return self._places
