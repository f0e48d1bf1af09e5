"""Checkpoint-file names of weights, for engines whose loaders expect the tensors of a file.

transformers fuses all experts of a layer into one tensor (E, rows, columns); a file has one tensor per expert and projection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


class FileNames:
    """Map fused expert tensors to views under the names of files. Models without experts keep their names."""

    def __init__(self, model: PreTrainedModel) -> None:
        """model: on the meta device.

        Raises ValueError if the tensors of a file are not slices of the fused tensor: views of it would be wrong numbers.
        """
        weights = model.state_dict(keep_vars=True)
        self._names: dict[str, list[str]] = {}
        # Fused experts have three dimensions; a model without such weights keeps all names.
        if not any(weight.dim() == 3 for weight in weights.values()):
            return
        for name, weight in weights.items():
            # Distinct numbers, run through transformers' own conversion for saving: they show which slice gets which name.
            probe = torch.arange(8 * len(weight)).view(-1, 4, 2) if weight.dim() == 3 else weight
            converted = revert_weight_conversion(model, {name: probe})
            self._names[name] = list(converted)
            if weight.dim() == 3 and not all(torch.equal(mine, converted[of_file]) for of_file, mine in self._split(name, probe)):
                raise ValueError(f"{model.config.model_type}: {name} is laid out in files in a way that is not known here")

    def split(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield views of the tensors under the names of files; unknown tensors keep their name."""
        for name, weight in weights:
            yield from self._split(name, weight)

    def _split(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Split one tensor. An expert's projections are stacked along its rows; files list a projection of all experts first."""
        names = self._names.get(name, [name])
        if weight.dim() != 3 or len(names) % len(weight):
            yield from zip(names, [weight], strict=True)
            return
        experts = (expert for part in weight.chunk(len(names) // len(weight), dim=1) for expert in part)
        yield from zip(names, experts, strict=True)
