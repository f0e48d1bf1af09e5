"""The embedded engine's model with shared or copied weights, and the check that a stream of weights fits a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.schema.common import ModelConfig
from workers.engine.hf.hf_model import empty_model, make_buffers, model_config, vocab_size
from workers.rollout.cached_attention import CACHED_ATTENTION, probe_cache_shape
from workers.rollout.verification import HeldWeight, PlainWeight


class ExpectedWeights:
    """Names and shapes of the weights that a model requires. Tied weights may arrive under any of their names, or all of them.

    first_name: {name: first name of the same tensor}. shapes: {first name: shape}.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """weights: {name: tensor}; tied names refer to the same tensor object (state_dict(keep_vars=True))."""
        self._shapes: dict[str, torch.Size] = {}
        tied: dict[int, list[str]] = {}
        for name, tensor in weights.items():
            self._shapes[name] = tensor.shape
            tied.setdefault(id(tensor), []).append(name)  # by identity: without keep_vars each name gets a tensor of its own
        self._tied = list(tied.values())
        self.first_name = {name: names[0] for names in self._tied for name in names}
        self.shapes = {names[0]: self._shapes[names[0]] for names in self._tied}

    def fitting(self, weights: Iterator[tuple[str, Tensor]], came: dict[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that fit, and record all names and shapes in ``came`` for ``check``.

        Misfits are skipped instead of raised: the stream is collective, and other ranks wait until it is consumed.
        """
        for name, tensor in weights:
            came[name] = tensor.shape
            if self._shapes.get(name) == tensor.shape:
                yield name, tensor.detach()

    def check(self, came: Mapping[str, torch.Size]) -> None:
        """Raises ValueError, naming weights that are missing, unexpected or of another shape."""
        # A tied weight is missing only if it came under none of its names.
        missing = [
            f"{names[0]} {tuple(self._shapes[names[0]])}" for names in self._tied if not any(name in came for name in names)
        ]
        unexpected = [f"{name} {tuple(shape)}" for name, shape in came.items() if self._shapes.get(name) != shape]
        if missing or unexpected:
            raise ValueError(
                f"weights for the rollout do not fit the model: {len(missing)} missing {missing[:5]}, "
                f"{len(unexpected)} unexpected or of another shape {unexpected[:5]}"
            )


@dataclass(slots=True)
class _Weight:
    """A tensor and the module attributes that use it, more than one if it is tied.

    empty: its placeholder on the meta device. owned: the copy if it was loaded, None if it is shared or dropped.
    """

    names: list[str]
    places: list[tuple[nn.Module, str]]
    empty: Tensor
    owned: Tensor | None = None

    def bind(self, tensor: Tensor) -> None:
        """Make all places use ``tensor``."""
        for module, leaf in self.places:
            if leaf in module._parameters:
                # A new Parameter: the data of one on the meta device cannot be replaced by a tensor of another device.
                module._parameters[leaf] = nn.Parameter(tensor.detach(), requires_grad=False)
            else:
                module._buffers[leaf] = tensor


def bound(module: nn.Module, leaf: str) -> Tensor:
    """The parameter or buffer that ``module`` currently uses under ``leaf``."""
    tensor = module._parameters[leaf] if leaf in module._parameters else module._buffers[leaf]
    assert tensor is not None, "it is in the model's state"
    return tensor


class EngineModel:
    """A transformers model whose weights are shared by the trainer or copied from it, and can be dropped.

    Built from the config alone: no weights are read from disk, and parameters stay on the meta device until they arrive.
    """

    def __init__(self, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.module: PreTrainedModel = empty_model(model, model_config(model, "lm"), "lm", dtype).hf
        self.module.set_attn_implementation(CACHED_ATTENTION)
        self.vocab_size = vocab_size(model)
        self.cache_shape = probe_cache_shape(self.module)
        # Group by tensor identity: tied names share one _Weight, so that loading any of them serves all places.
        weights: dict[int, _Weight] = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            weight = weights.setdefault(id(tensor), _Weight([], [], tensor))
            path, _, leaf = name.rpartition(".")
            weight.names.append(name)
            weight.places.append((self.module.get_submodule(path), leaf))
        self._weights = list(weights.values())
        self._by_name = {name: weight for weight in self._weights for name in weight.names}
        self.expected = ExpectedWeights(self.module.state_dict(keep_vars=True))
        make_buffers(self.module, device)  # such as rotary tables, which no stream of weights contains

    def share(self, tensors: dict[str, Tensor]) -> bool:
        """Use these tensors without a copy. Returns False if one has another dtype or device; raises ValueError as load does."""
        self.expected.check({name: tensor.shape for name, tensor in tensors.items()})
        matching = all(
            tensor.dtype == self._by_name[name].empty.dtype and tensor.device.type == self.device.type
            for name, tensor in tensors.items()
        )
        if matching:
            self.drop()  # frees earlier copies
            for name, tensor in tensors.items():
                self._by_name[name].bind(tensor)
        return matching

    @torch.no_grad()
    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Copy weights from a stream.

        Raises ValueError at the end of the stream, naming weights that are missing, unexpected or of another shape.
        """
        came: dict[str, torch.Size] = {}
        for name, tensor in self.expected.fitting(tensors, came):
            weight = self._by_name[name]
            if weight.owned is None:  # allocated when it first arrives, reused in later syncs
                weight.owned = torch.empty_like(weight.empty, device=self.device)
                weight.bind(weight.owned)
            weight.owned.copy_(tensor)
        self.expected.check(came)

    def held(self) -> list[HeldWeight]:
        """Every place of every weight for verification; a tied weight has several, and each of them is verified."""
        return [
            PlainWeight(weight.names[0], partial(bound, module, leaf))
            for weight in self._weights
            for module, leaf in weight.places
        ]

    @property
    def owned_bytes(self) -> int:
        """Bytes of weights that were copied, not shared."""
        return sum(weight.owned.nbytes for weight in self._weights if weight.owned is not None)

    def drop(self) -> None:
        """Drop all weights; frees the memory of copies."""
        for weight in self._weights:
            weight.owned = None
            weight.bind(weight.empty)
