"""The Megatron engine: one model, cut over tensor, pipeline, context and data parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.batch import Batch
from workers.engine.attention import PackedRows
from workers.engine.base import EngineMesh, EngineSpec, Loss, TrainEngine

if not torch.cuda.is_available():
    from workers.engine.megatron.cpu import pretend_cuda

    pretend_cuda()

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from workers.engine.hf_model import empty_model, model_config
from workers.engine.logprob import (
    VocabShard,
    head_log_probs,
    head_sum_pi_squared,
    head_top_log_probs,
)
from workers.engine.megatron.context import ContextCut
from workers.engine.megatron.exchange import Exchange
from workers.engine.megatron.model import Packed, PackedGPT, build_chunks, padded_vocab, transformer_config
from workers.engine.megatron.optimizer import MegatronAdamW
from workers.engine.megatron.parallel import join
from workers.metric import Metric, Metrics, join_metrics
from workers.plan import MicroBatches

OUTPUTS = {"lm": {"log_probs", "entropy", "sum_pi_squared", "top_log_probs", "all_log_probs"}, "value": {"values"}}


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """rows: the micro-batch, on the device; chosen: which rows of the share, () for a dummy. The rest is for the model, tokens of
    this rank only, padded."""

    rows: Batch
    chosen: tuple[int, ...]
    input_ids: Tensor
    positions: Tensor
    packed: Packed


class MegatronEngine(TrainEngine):
    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.device = torch.device("cuda", torch.cuda.current_device()) if spec.device == "cuda" else torch.device("cpu")
        self.mesh: EngineMesh = join(spec.megatron, spec.seed)
        self.hf_config = model_config(spec.model, spec.head)
        self.config = transformer_config(self.hf_config, spec.megatron, recompute=spec.model.enable_gradient_checkpointing)
        self.config.finalize_model_grads_func = lambda model, tokens, **kwargs: finalize_model_grads(model, None, **kwargs)
        chunks = [chunk.to(self.device) for chunk in build_chunks(self.config, self.hf_config, spec.head)]
        self.exchange = Exchange(chunks, self.hf_config, spec.head)
        self.exchange.load(spec.model)
        self._rotary = rotary_of(spec, self.device)
        self._chunks: list[PackedGPT] = chunks
        self._optimizer: MegatronAdamW | None = None
        self._model: list[Any] = list(chunks)
        if spec.optimizer is None:
            for chunk in chunks:
                chunk.requires_grad_(False)
        else:
            ddp = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=spec.megatron.use_distributed_optimizer
            )
            self._model = [DistributedDataParallel(self.config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
            self._optimizer = MegatronAdamW(self._model, spec.optimizer, self.config, spec.megatron)
        for chunk in self._model:
            chunk.train(spec.optimizer is not None)  # recomputation looks at it; there is no dropout

    # What a rank computes of a micro-batch

    def forward(self, batch: Batch, plan: MicroBatches, outputs: set[str]) -> Batch | None:
        assert outputs and outputs <= OUTPUTS[self.spec.head], f"a {self.spec.head} head answers {OUTPUTS[self.spec.head]}"
        placed = batch.with_tokens(_place=torch.arange(batch.total_tokens)).with_rows(_place=torch.arange(len(batch)))
        with torch.no_grad():
            found = self._run(placed, plan, lambda micro, results: (micro, results), outputs, backward=False)
        if not self.mesh.is_output_rank:
            return None
        wide = {"top_log_probs": (batch.total_tokens, 2), "all_log_probs": (batch.total_tokens, self.hf_config.vocab_size)}
        tokens = {name: torch.zeros(wide.get(name, (batch.total_tokens,))) for name in sorted(outputs)}
        rows = {"last_value": torch.zeros(len(batch))} if self.spec.head == "value" else {}
        for micro, results in found:
            if micro.chosen:
                for columns, place in ((tokens, micro.rows.tokens["_place"]), (rows, micro.rows.rows["_place"])):
                    for name, column in columns.items():
                        column[place.cpu()] = results[name].float().cpu()
        return Batch(lengths=batch.lengths, tokens=tokens, rows=rows, meta=dict(batch.meta))

    def train_step(self, batch: Batch, plan: MicroBatches, loss: Loss) -> Metrics:
        assert self._optimizer is not None, "this engine was built without an optimizer"
        metrics = self.accumulate(batch, plan, loss)
        norm = self._optimizer.norm()
        if not math.isfinite(norm):
            raise FloatingPointError(f"optimizer step {self._optimizer.steps}: the norm of the gradient is {norm}")
        lr = self._optimizer.step()
        return metrics | {"grad_norm": Metric.max(norm), "lr": Metric.max(lr)}

    def accumulate(self, batch: Batch, plan: MicroBatches, loss: Loss) -> Metrics:
        """Leaves the gradient, summed over micro-batches and ranks, in the parameters' main_grad."""
        for chunk in self._model:
            chunk.zero_grad_buffer()
        assert self._optimizer is not None
        self._optimizer.zero_grad()

        def weighted(micro: MicroBatch, results: dict[str, Tensor]) -> tuple[Tensor, Tensor, Metrics]:
            token_loss, metrics = loss(results, micro.rows)
            weight = micro.rows.tokens["loss_weight"]
            total = torch.where(weight != 0, weight * token_loss, 0.0).sum()
            metrics = {**metrics, "loss": Metric.sum(total.detach())} if micro.chosen else {}
            return total, torch.zeros((), dtype=torch.int, device=self.device), metrics

        parts: list[Metrics] = self._run(batch, plan, weighted, set(loss.needs), backward=True)
        return join_metrics([{"loss": Metric.sum(0.0)}, *(part for part in parts if part)])

    def _run(self, batch: Batch, plan: MicroBatches, reduce: Any, outputs: set[str], *, backward: bool) -> list[Any]:
        """``reduce`` of each micro-batch and its results, on the last stage; elsewhere nothing. Collective over the model's ranks."""
        stages = self.spec.megatron.pipeline_model_parallel_size
        plan = [*plan]
        if self.spec.megatron.virtual_pipeline_model_parallel_size:  # the interleaved schedule goes round the stages
            plan += [()] * (-len(plan) % stages)
        micro_batches = [self._micro_batch(batch, tuple(chosen)) for chosen in plan]

        def step(data: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
            micro = next(data)
            hidden = model(micro.input_ids[None], micro.positions[None], None, packed_seq_params=micro.packed)

            def finish(hidden: Tensor, non_loss_data: bool = False) -> Any:
                return reduce(micro, self._results(micro, hidden, outputs))

            return hidden, finish

        several = len(self._model) > 1
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(micro_batches) for _ in self._model] if several else iter(micro_batches),
            model=self._model,
            num_microbatches=len(micro_batches),
            seq_length=max(len(micro.input_ids) for micro in micro_batches),
            micro_batch_size=1,
            forward_only=not backward,
            collect_non_loss_data=not backward,
        )

    def _micro_batch(self, batch: Batch, chosen: tuple[int, ...]) -> MicroBatch:
        """The longest row first; padded with one more row until context and sequence parallelism divide the tokens."""
        if chosen:
            part = batch.select(sorted(chosen, key=lambda row: (-int(batch.lengths[row]), row)))
        else:
            part = dummy(batch)
        rows = Batch(
            lengths=part.lengths,
            tokens={name: column.to(self.device) for name, column in part.tokens.items()},
            rows={name: column.to(self.device) for name, column in part.rows.items()},
            meta=part.meta,
        )
        cp, tp = self.spec.megatron.context_parallel_size, self.spec.megatron.tensor_model_parallel_size
        unit = (2 * cp if cp > 1 else 1) * (tp if self.config.sequence_parallel else 1)
        padding = -part.total_tokens % unit
        lengths = part.lengths.tolist() + ([padding] if padding else [])
        ids = torch.cat([rows.tokens["input_ids"], rows.tokens["input_ids"].new_zeros(padding)])
        positions = torch.cat([part.positions(), torch.arange(padding)]).to(self.device)
        cut = ContextCut.of(lengths, parallel_state.get_context_parallel_group(), self.device) if cp > 1 else None
        if cut is not None:
            ids, positions = ids[cut.place], positions[cut.place]
        cos, sin = (table[0] for table in self._rotary(torch.zeros((), dtype=self.config.params_dtype, device=self.device), positions[None]))
        packed = Packed(qkv_format="thd", rows=PackedRows.of(lengths, self.device), cut=cut, cos=cos, sin=sin)
        return MicroBatch(rows, chosen, ids, positions, packed)

    def _results(self, micro: MicroBatch, hidden: Tensor, outputs: set[str]) -> dict[str, Tensor]:
        """hidden (T of this rank, 1, H), of the last layer -> {output: (T, ...)} of whole rows, equal on the ranks of the last stage."""
        chunk = self._chunks[-1]
        total = micro.rows.total_tokens
        value = self.spec.head == "value"
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=not value)
        elif not value:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        hidden = hidden[:, 0]
        cut = micro.packed.cut
        if value:
            after = chunk.output_layer(hidden.to(chunk.output_layer.weight.dtype))[:, 0]
            after = (after if cut is None else cut.gather_alike(after))[:total]
            positions = micro.rows.positions().to(self.device)
            ends = micro.rows.lengths.cumsum(0).to(self.device) - 1
            return {"values": torch.where(positions == 0, 0.0, after.roll(1)), "last_value": after.index_select(0, ends)}
        # What each of this rank's tokens predicts is the next token of its row, on whichever rank that is.
        wanted = micro.rows.tokens["response_mask"].bool() & (micro.rows.positions().to(self.device) > 0)
        before = torch.zeros(sum_of(micro.packed), dtype=torch.bool, device=self.device)
        before[: total - 1] = wanted[1:]
        target = torch.zeros(len(before), dtype=torch.int64, device=self.device)
        target[: total - 1] = micro.rows.tokens["input_ids"][1:]
        if cut is not None:
            before, target = before[cut.place], target[cut.place]
        here = before.nonzero()[:, 0]
        found = self._head(hidden.index_select(0, here), target[here], micro.rows.meta["temperature"], outputs)
        results = {}
        for name, out in found.items():
            placed = out.new_zeros(len(hidden), *out.shape[1:]).index_copy(0, here, out)
            whole = placed if cut is None else cut.gather_alike(placed)
            results[name] = whole[:total].roll(1, 0)
        return results

    def _head(self, hidden: Tensor, targets: Tensor, temperature: float, outputs: set[str]) -> dict[str, Tensor]:
        size, rows = self.hf_config.vocab_size, self._chunks[-1].head_weight()
        group = parallel_state.get_tensor_model_parallel_group()
        per_rank = padded_vocab(size, group.size()) // group.size()
        start = group.rank() * per_rank
        weight = rows[: min(per_rank, size - start)]  # the padding takes no part
        shard = VocabShard(group, start, len(weight)) if group.size() > 1 else None
        log_probs, entropy = head_log_probs(
            hidden, weight, None, targets, temperature=temperature, want_entropy="entropy" in outputs, shard=shard
        )
        found = {"log_probs": log_probs} if entropy is None else {"log_probs": log_probs, "entropy": entropy}
        if "sum_pi_squared" in outputs:
            found["sum_pi_squared"] = head_sum_pi_squared(hidden, weight, None, temperature=temperature, shard=shard)
        if "top_log_probs" in outputs:
            found["top_log_probs"] = head_top_log_probs(hidden, weight, None, temperature=temperature, shard=shard)
        if "all_log_probs" in outputs:
            logits = tensor_parallel.gather_from_tensor_model_parallel_region((hidden @ rows.T).float())[:, :size]
            found["all_log_probs"] = (logits / temperature).log_softmax(-1)
        return found

    # Weights

    def export_weights(self, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        return self.exchange.export(dtype)

    def live_weights(self) -> dict[str, Tensor] | None:
        return None

    def move(self, *, params: Any = None, grads: Any = None, optimizer: Any = None) -> None:
        pass

    def save(self, path: str) -> None:
        raise NotImplementedError

    def load(self, path: str) -> None:
        raise NotImplementedError

    def export_hf(self, path: str) -> None:
        raise NotImplementedError

    def flops(self, lengths: list[int], *, backward: bool) -> float:
        return 0.0


def sum_of(packed: Packed) -> int:
    """Tokens of the micro-batch, padding included."""
    assert packed.rows is not None
    return sum(rows * length for rows, length in packed.rows.blocks)


def dummy(batch: Batch) -> Batch:
    """One row of two zeros, with every column of ``batch``."""
    return Batch(
        lengths=torch.tensor([2]),
        tokens={name: column.new_zeros(2, *column.shape[1:]) for name, column in batch.tokens.items()},
        rows={name: column.new_zeros(1, *column.shape[1:]) for name, column in batch.rows.items()},
        meta=batch.meta,
    )


def rotary_of(spec: EngineSpec, device: torch.device) -> torch.nn.Module:
    """transformers' own rotary embedding of this model: (any tensor of the wanted dtype, positions (1, T)) -> cos, sin (1, T, D)."""
    config = model_config(spec.model, spec.head)
    body = empty_model(spec.model, config, spec.head, torch.float32).hf.base_model
    return type(body.rotary_emb)(config=config).to(device)  # type: ignore[operator,union-attr]
