"""This rank's part of a Megatron model, under Hugging Face's names: from files, to other ranks, and to files.

A line of the table at a time, and a few read ahead, so that no rank ever holds more than those lines' whole tensors.
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
from workers.engine.megatron.weights import WeightLine, table
from workers.engine.saving import read_ahead

VALUE_HEAD = ("score.weight", "score.bias")
FUSED_NORMS = {  # Transformer Engine's
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
AHEAD = 4  # lines that threads read while another is put in its place
NOT_WEIGHTS = "rotary_emb.inv_freq"  # a buffer that older files have


class Exchange:
    def __init__(self, chunks: Sequence[PackedGPT], shell: PackedModel) -> None:
        """chunks: of this rank. shell: transformers' model, which has names and shapes. Collective over the pipeline's ranks."""
        self.shapes = {name: tensor.shape for name, tensor in shell.hf.state_dict().items()}
        self.params = {name: param for chunk in chunks for name, param in global_names(chunk)}
        self.tp = parallel_state.get_tensor_model_parallel_group()
        self.pp = parallel_state.get_pipeline_model_parallel_group()
        held: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{} for _ in range(self.pp.size())]
        dist.all_gather_object(held, {name: (param.shape, param.dtype) for name, param in self.params.items()}, group=self.pp)
        self.owners = {name: (stage, *place) for stage, names in reversed([*enumerate(held)]) for name, place in names.items()}
        self.lines = [line for line in table(shell.hf.config, shell.head) if line.ours in self.owners]
        unknown = self.owners.keys() - {line.ours for line in self.lines}
        assert not unknown, f"the table of weights lacks {sorted(unknown)}"

    @property
    def own_lines(self) -> list[WeightLine]:
        """Each of Hugging Face's tensors once: of tied ones the first."""
        first = {line.theirs: line for line in reversed(self.lines)}
        return [line for line in self.lines if first[line.theirs] is line]

    def fill(self, files: Files, put: Callable[[Tensor, Tensor], None], prefix: str = "") -> None:
        """``put(parameter, part)`` for each parameter of this rank, with this rank's part of what the files have of it.

        prefix: of the names in the files; none in a model's, where a value head may be missing and is left as it is. Raises
        ValueError for what else is missing or does not fit.
        """

        def read(line: WeightLine) -> Tensor:
            theirs = [files.read(prefix + name) for name in line.theirs]
            for name, tensor in zip(line.theirs, theirs, strict=True):
                if tensor.shape != self.shapes[name]:
                    sizes = f"{tuple(tensor.shape)} there and {tuple(self.shapes[name])} in this model"
                    raise ValueError(f"{files.place}: {prefix}{name} is {sizes}")
            return line.layout.cut(theirs, self.tp.rank(), self.tp.size())

        lines = [line for line in self.lines if line.ours in self.params]
        if not prefix:
            lines = [line for line in lines if line.theirs[0] not in VALUE_HEAD or line.theirs[0] in files]
        for line, part in zip(lines, read_ahead(read, lines, AHEAD), strict=True):
            put(self.params[line.ours], part)

    def refuse_strangers(self, files: Files) -> None:
        """Raises ValueError for weights in the files that the table does not know: the model does more than Megatron would."""
        known = {name for line in self.lines for name in line.theirs} | {"lm_head.weight", *VALUE_HEAD}
        strangers = sorted(name for name in files if name not in known and not name.endswith(NOT_WEIGHTS))
        if strangers:
            raise ValueError(
                f"{files.place}: strategy=megatron does not know {len(strangers)} of its weights, such as {strangers[0]}; "
                "strategy=fsdp takes it"
            )

    def export(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face's names and whole tensors, on every rank; see TrainEngine.export_weights. Collective."""
        for line in self.own_lines:
            stage, shape, kept = self.owners[line.ours]
            crossing = dtype if dtype is not None and dtype.itemsize < kept.itemsize else kept
            if self.pp.rank() == stage:
                part = self.params[line.ours].detach().to(crossing).contiguous()
            else:
                part = torch.empty(shape, dtype=crossing, device=torch.cuda.current_device())
            if self.pp.size() > 1:
                dist.broadcast(part, dist.get_global_rank(self.pp, stage), group=self.pp)
            parts = [part]
            if line.layout.dim is not None and self.tp.size() > 1:
                parts = [torch.empty_like(part) for _ in range(self.tp.size())]
                dist.all_gather(parts, part, group=self.tp)
            yield from zip(line.theirs, line.join(parts), strict=True)

    def parts(self, whole: Callable[[Tensor], Tensor | None], prefix: str = "") -> Iterator[tuple[str, tuple[Tensor, list[int]]]]:
        """Hugging Face's names, this rank's part, and where it begins in the whole. Every tensor is with one rank.

        whole: something shaped as the parameter that it gets; None: another rank has it. What all tensor-parallel ranks have, the
        first gives.
        """
        for line in self.own_lines:
            if self.pp.rank() != self.owners[line.ours][0]:
                continue
            ours = whole(self.params[line.ours])
            if ours is None or (line.layout.dim is None and self.tp.rank() > 0):
                continue
            for name, (part, start) in zip(line.theirs, line.layout.uncut(ours, self.tp.rank(), self.tp.size()), strict=True):
                yield prefix + name, (part.contiguous(), [start if dim == line.layout.dim else 0 for dim in range(part.dim())])


def global_names(chunk: PackedGPT) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Layers count from the first of the model, not of the stage; norms have the names of layers that are not fused."""
    for name, param in chunk.named_parameters():
        if name.startswith("decoder.layers."):
            _, _, local, rest = name.split(".", 3)
            name = f"decoder.layers.{chunk.decoder.layers[int(local)].layer_number - 1}.{FUSED_NORMS.get(rest, rest)}"
        yield name, param
