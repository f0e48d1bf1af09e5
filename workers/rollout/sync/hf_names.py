"""The names that weights have in files, for engines that load them as from a file.

transformers keeps all experts of a layer in one tensor (E, rows, columns); in a file each is a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


class FileNames:
    def __init__(self, model: PreTrainedModel) -> None:
        """model: on the meta device. What has no experts has the same names in both.

        Raises ValueError for experts that are no rows of the one tensor, so that a file has other numbers than views of it.
        """
        weights = model.state_dict(keep_vars=True)
        self._names: dict[str, list[str]] = {}
        if not any(weight.dim() == 3 for weight in weights.values()):
            return
        for name, weight in weights.items():
            probe = torch.arange(8 * len(weight)).view(-1, 4, 2) if weight.dim() == 3 else weight
            told = revert_weight_conversion(model, {name: probe})
            self._names[name] = list(told)
            if weight.dim() == 3 and not all(torch.equal(mine, told[of_file]) for of_file, mine in self._split(name, probe)):
                raise ValueError(f"{model.config.model_type}: {name} is laid out in files in a way that is not known here")

    def split(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Views; under their own name those that are unknown."""
        for name, weight in weights:
            yield from self._split(name, weight)

    def _split(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """An expert's tensors follow one another along its rows; in a file, all first ones come before all second ones."""
        names = self._names.get(name, [name])
        if weight.dim() != 3 or len(names) % len(weight):
            yield from zip(names, [weight], strict=True)
            return
        experts = (expert for part in weight.chunk(len(names) // len(weight), dim=1) for expert in part)
        yield from zip(names, experts, strict=True)
