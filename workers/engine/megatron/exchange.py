"""Conversion of this rank's part of a Megatron model to and from Hugging Face names: loading, export, checkpoints.

Works through the table of weights (weights.py) line by line with a few lines read ahead, so that a rank holds the full tensors of
those lines only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from workers.engine.hf.checkpoint import Files
from workers.engine.hf.hf_model import PackedModel
from workers.engine.megatron.packed_gpt import PackedGPT
from workers.engine.megatron.weights import WeightMapping, table
from workers.engine.saving import read_ahead

VALUE_HEAD = ("score.weight", "score.bias")
FUSED_NORMS = {  # in layers of Transformer Engine, which fuse them
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
AHEAD = 4  # lines that threads read while another one is copied into the model
NOT_WEIGHTS = "rotary_emb.inv_freq"  # a buffer in files of older versions


class Exchange:
    """The weights of a rank's model chunks, addressed by Hugging Face names."""

    def __init__(self, chunks: Sequence[PackedGPT], shell: PackedModel) -> None:
        """chunks: of this rank. shell: meta-device transformers model with names and shapes. Collective over pipeline ranks."""
        self.shapes = {name: tensor.shape for name, tensor in shell.hf.state_dict().items()}
        self.params = {name: param for chunk in chunks for name, param in global_names(chunk)}
        self.tp = parallel_state.get_tensor_model_parallel_group()
        self.pp = parallel_state.get_pipeline_model_parallel_group()
        # A broadcast needs shape and dtype on the stages that do not hold the parameter.
        held: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{} for _ in range(self.pp.size())]
        dist.all_gather_object(held, {name: (param.shape, param.dtype) for name, param in self.params.items()}, group=self.pp)
        # Reversed: of several stages that hold a parameter the first is its owner.
        self.owners = {name: (stage, *place) for stage, names in reversed([*enumerate(held)]) for name, place in names.items()}
        self.lines = [line for line in table(shell.hf.config, shell.head) if line.param in self.owners]
        unknown = self.owners.keys() - {line.param for line in self.lines}
        assert not unknown, f"the table of weights lacks {sorted(unknown)}"

    @property
    def unique_lines(self) -> list[WeightMapping]:
        """Lines of the table that make up each Hugging Face tensor once; of tied weights the first."""
        first = {line.hf_names: line for line in reversed(self.lines)}
        return [line for line in self.lines if first[line.hf_names] is line]

    def fill(self, files: Files, put: Callable[[Tensor, Tensor], None], prefix: str = "") -> None:
        """Read this rank's part of each parameter and call ``put(parameter, part)``.

        prefix: of the names in the files. A model's files have none, and a value head that they lack keeps its weights. Raises
        ValueError for any other missing or mismatched weight.
        """

        def read(line: WeightMapping) -> Tensor:
            tensors = [files.read(prefix + name) for name in line.hf_names]
            for name, tensor in zip(line.hf_names, tensors, strict=True):
                if tensor.shape != self.shapes[name]:
                    sizes = f"{tuple(tensor.shape)} there and {tuple(self.shapes[name])} in this model"
                    raise ValueError(f"{files.place}: {prefix}{name} is {sizes}")
            return line.layout.shard(tensors, self.tp.rank(), self.tp.size())

        lines = [line for line in self.lines if line.param in self.params]
        if not prefix:
            lines = [line for line in lines if line.hf_names[0] not in VALUE_HEAD or line.hf_names[0] in files]
        for line, part in zip(lines, read_ahead(read, lines, AHEAD), strict=True):
            put(self.params[line.param], part)

    def check_known_weights(self, files: Files) -> None:
        """Raise ValueError for weights in the files that the table does not contain.

        The model then has a part that Megatron would leave out without an error.
        """
        known = {name for line in self.lines for name in line.hf_names} | {"lm_head.weight", *VALUE_HEAD}
        foreign = sorted(name for name in files if name not in known and not name.endswith(NOT_WEIGHTS))
        if foreign:
            raise ValueError(
                f"{files.place}: strategy=megatron does not know {len(foreign)} of its weights, such as {foreign[0]}; "
                "strategy=fsdp takes it"
            )

    def export(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and full tensors on every rank, see TrainEngine.export_weights. Collective.

        The owning pipeline stage broadcasts its part, then tensor-parallel ranks gather their parts. All ranks iterate over the
        same lines in the same order.
        """
        for line in self.unique_lines:
            stage, shape, kept = self.owners[line.param]
            # Cast before communication if that makes the message smaller.
            sent_dtype = dtype if dtype is not None and dtype.itemsize < kept.itemsize else kept
            if self.pp.rank() == stage:
                part = self.params[line.param].detach().to(sent_dtype).contiguous()
            else:
                part = torch.empty(shape, dtype=sent_dtype, device=torch.cuda.current_device())
            if self.pp.size() > 1:
                dist.broadcast(part, dist.get_global_rank(self.pp, stage), group=self.pp)
            parts = [part]
            if line.layout.dim is not None and self.tp.size() > 1:
                parts = [torch.empty_like(part) for _ in range(self.tp.size())]
                dist.all_gather(parts, part, group=self.tp)
            yield from zip(line.hf_names, line.join(parts), strict=True)

    def parts(self, whole: Callable[[Tensor], Tensor | None], prefix: str = "") -> Iterator[tuple[str, tuple[Tensor, list[int]]]]:
        """Yield (Hugging Face name, (this rank's part, its offset in the full tensor)). Each part belongs to one rank only.

        whole: maps a parameter to a tensor of its shape, or to None if another rank writes it. Parts that all tensor-parallel
        ranks hold are written by the first.
        """
        for line in self.unique_lines:
            if self.pp.rank() != self.owners[line.param][0]:
                continue
            part = whole(self.params[line.param])
            if part is None or (line.layout.dim is None and self.tp.rank() > 0):
                continue
            shards = line.layout.unshard(part, self.tp.rank(), self.tp.size())
            for name, (shard, start) in zip(line.hf_names, shards, strict=True):
                yield prefix + name, (shard.contiguous(), [start if dim == line.layout.dim else 0 for dim in range(shard.dim())])


def global_names(chunk: PackedGPT) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of a chunk under model-wide names.

    Layers are numbered from the start of the model, not of the stage. Fused norms get the names of unfused ones.
    """
    for name, param in chunk.named_parameters():
        if name.startswith("decoder.layers."):
            _, _, local, rest = name.split(".", 3)
            name = f"decoder.layers.{chunk.decoder.layers[int(local)].layer_number - 1}.{FUSED_NORMS.get(rest, rest)}"
        yield name, param
