"""Weights between Hugging Face's names and this rank's part of a Megatron model, a line of the table at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig

from configs.schema.common import ModelConfig
from workers.engine.hf_model import model_path
from workers.engine.megatron.model import PackedGPT
from workers.engine.megatron.weights import Line, table

INDEX = "model.safetensors.index.json"


class Exchange:
    def __init__(self, chunks: Sequence[PackedGPT], config: PretrainedConfig, head: str) -> None:
        """Collective over the pipeline's ranks."""
        self.head = head
        self.params = {name: param for chunk in chunks for name, param in global_names(chunk)}
        self.lines = table(config, head)
        self.group = parallel_state.get_pipeline_model_parallel_group()
        held: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{} for _ in range(self.group.size())]
        mine = {name: (param.shape, param.dtype) for name, param in self.params.items()}
        dist.all_gather_object(held, mine, group=self.group)
        self.owners = {name: (stage, *place) for stage, names in reversed([*enumerate(held)]) for name, place in names.items()}
        known = {line.ours for line in self.lines}
        unknown = sorted(self.owners.keys() - known)
        assert not unknown, f"the table of weights lacks {unknown}"

    def load(self, model: ModelConfig) -> None:
        """This rank's part of each tensor, from the model's files. Raises ValueError for what is missing or does not fit."""
        rank = parallel_state.get_tensor_model_parallel_rank()
        size = parallel_state.get_tensor_model_parallel_world_size()
        files = Files(model)
        for line in self.lines:
            if line.ours not in self.params:
                continue
            param = self.params[line.ours]
            if self.head == "value" and line.ours.startswith("output_layer") and not files.has(line):
                torch.nn.init.zeros_(param)
                continue
            with torch.no_grad():
                part = line.cut([files.read(name) for name in line.theirs], rank, size)
                if part.shape != param.shape:
                    raise ValueError(f"model.path {model.path}: {line.theirs[0]} does not fit: {tuple(part.shape)}, {tuple(param.shape)}")
                param.copy_(part)

    def export(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole tensors, one line at a time, on every rank. Collective."""
        tp = parallel_state.get_tensor_model_parallel_group()
        seen: set[str] = set()
        for line in self.lines:
            if line.ours not in self.owners or seen & set(line.theirs):
                continue
            seen |= set(line.theirs)
            stage, shape, kept = self.owners[line.ours]
            crossing = dtype if dtype is not None and dtype.itemsize < kept.itemsize else kept
            if self.group.rank() == stage:
                part = self.params[line.ours].detach().to(crossing)
            else:
                part = torch.empty(shape, dtype=crossing, device=torch.cuda.current_device())
            if self.group.size() > 1:
                dist.broadcast(part, dist.get_global_rank(self.group, stage), group=self.group)
            parts = [part]
            if tp.size() > 1:
                parts = list(part.new_empty(tp.size(), *part.shape))
                dist.all_gather(parts, part.contiguous(), group=tp)
            yield from zip(line.theirs, line.join(parts), strict=True)


class Files:
    """The tensors of a Hugging Face directory."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self.folder = Path(model_path(model))
        index = self.folder / INDEX
        if index.exists():
            self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            (path,) = self.folder.glob("*.safetensors")
            with safe_open(path, "pt") as file:
                self._file_of = dict.fromkeys(file.keys(), path.name)

    def has(self, line: Line) -> bool:
        return all(name in self._file_of for name in line.theirs)

    def read(self, name: str) -> Tensor:
        if name not in self._file_of:
            raise ValueError(f"model.path {self.model.path}: weight {name} is not there")
        with safe_open(self.folder / self._file_of[name], "pt") as file:
            return file.get_tensor(name)


def global_names(chunk: PackedGPT) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Layers count from the first of the model, not of the stage."""
    for name, param in chunk.named_parameters():
        if name.startswith("decoder.layers."):
            _, _, local, rest = name.split(".", 3)
            name = f"decoder.layers.{chunk.decoder.layers[int(local)].layer_number - 1}.{rest}"
        yield name, param
