"""Megatron engine: one model, split over tensor, pipeline, context and data parallel ranks.

Megatron provides parallel layers, the pipeline schedule and the distributed optimizer. This module feeds it packed micro-batches,
computes losses on the last stage, and writes the same checkpoints as FSDP: Hugging Face names and shards, which any parallel
layout can read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

if not torch.cuda.is_available():
    from workers.engine.megatron.cpu import pretend_cuda

    pretend_cuda()

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from transformers import PreTrainedModel

from configs.schema.common import MegatronConfig
from workers.batch import Batch
from workers.engine.base import EngineMesh, EngineSpec, Loss, OptimizerSpec, Saved, TrainEngine, Weights
from workers.engine.hf.checkpoint import Files, Shard, save_shard, write_model
from workers.engine.hf.hf_model import empty_model, keep_generation_config, model_config, model_files, model_flops
from workers.engine.megatron.exchange import Exchange
from workers.engine.megatron.head import log_probs, values
from workers.engine.megatron.megatron_adamw import Kind, MegatronAdamW
from workers.engine.megatron.packed_gpt import PackedGPT, build_chunks, transformer_config
from workers.engine.megatron.packing import Pack, Rotary, pack
from workers.engine.megatron.parallel import join
from workers.engine.micro_batch import ForwardOutputs, micro_batch, weighted
from workers.engine.offload import Offloadable, Place
from workers.engine.out_of_memory import convert_out_of_memory
from workers.metric import Metric, Metrics, join_metrics
from workers.plan import MicroBatches
from workers.start_times import START

KINDS: dict[str, Kind] = {"model.": "param", "optimizer.exp_avg.": "exp_avg", "optimizer.exp_avg_sq.": "exp_avg_sq"}


class MegatronEngine(TrainEngine):
    """A TrainEngine on megatron-core; see base.TrainEngine for the interface."""

    def __init__(self, spec: EngineSpec, megatron: MegatronConfig) -> None:
        """Collective over all ranks. Raises ValueError for a model that Megatron, or the table of weights, does not support."""
        self.spec = spec
        self.megatron = megatron
        self.device = torch.device("cuda", torch.cuda.current_device()) if spec.device == "cuda" else torch.device("cpu")
        config = model_config(spec.model, spec.head)
        self.config = transformer_config(config, megatron, recompute=spec.model.enable_gradient_checkpointing)
        # None: Megatron would divide gradients by its number of tokens, but losses are weighted sums already.
        self.config.finalize_model_grads_func = lambda model, tokens, **kwargs: finalize_model_grads(model, None, **kwargs)
        self.mesh: EngineMesh = join(megatron, spec.seed)
        shell = empty_model(spec.model, config, spec.head, self.config.params_dtype)
        self._shell: PreTrainedModel = shell.hf.to(dtype=config.dtype or self.config.params_dtype)  # type: ignore[call-arg]
        self._rotary: Rotary = rotary_of(shell.hf).to(self.device)
        self._chunks: list[PackedGPT] = [chunk.to(self.device) for chunk in build_chunks(self.config, shell)]
        self._exchange = Exchange(self._chunks, shell)
        self._model: list[Any] = [*self._chunks]  # the chunks as they are called, wrapped for gradients if trained
        self._optimizer: MegatronAdamW | None = None
        if spec.optimizer is not None:
            self._model, self._optimizer = self._trained(spec.optimizer)
        for chunk in self._model:
            chunk.requires_grad_(self._optimizer is not None)
            chunk.train(self._optimizer is not None)  # recomputation depends on it; there is no dropout
        folder = model_files(spec.model)
        keep_generation_config(self._shell, Path(folder))
        files = Files(folder, f"model.path={spec.model.path}")
        self._exchange.check_known_weights(files)
        with START("read"):
            self._exchange.fill(files, self._put_param)
        self._grads_place: Place = "device"
        # Last: an Offloadable refers to storages, and wrapping a chunk may give its parameters new ones.
        self._places = {"params": Offloadable(self._exchange.params.values()), "optimizer": Offloadable(self._separate_state())}

    def _trained(self, optimizer: OptimizerSpec) -> tuple[list[Any], MegatronAdamW]:
        """Wrap the chunks in DistributedDataParallel and create the optimizer."""
        distributed = self.megatron.use_distributed_optimizer
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
        wrap = partial(DistributedDataParallel, self.config, ddp)
        # Buckets for the first chunk only, as Megatron's own training script sets it.
        model = [wrap(chunk, disable_bucketing=i > 0) for i, chunk in enumerate(self._chunks)]
        return model, MegatronAdamW(model, optimizer, self.config, distributed=distributed)

    # Forward and train steps

    def forward(self, batch: Batch, plan: MicroBatches, outputs: set[str], *, adapter: bool = True) -> Batch | None:
        collected = ForwardOutputs(batch, outputs, self.spec.head, self._shell.config.vocab_size)

        def keep(pack: Pack, results: dict[str, Tensor]) -> None:
            if self.mesh.is_output_rank and not pack.is_dummy:
                collected.put(pack.rows, results)

        with torch.no_grad():
            self._run(collected.batch, plan, outputs, keep, backward=False)
        return collected.batch_of_outputs() if self.mesh.is_output_rank else None

    def train_step(self, batch: Batch, plan: MicroBatches, loss: Loss) -> Metrics:
        assert self._optimizer is not None, "this engine was built without an optimizer"
        with convert_out_of_memory(self._drop_step if self.mesh.world_size == 1 else None):
            metrics = self.accumulate(batch, plan, loss)
            loss_here = metrics["loss"]
            assert isinstance(loss_here, Metric)
            norm = self._optimizer.norm()
            # A loss may be infinite although its gradient is finite, and only the last stage knows it. 0 * it is NaN:
            # all-reduced, one number by which all ranks decide.
            loss_check = torch.tensor(0.0 * (norm + loss_here.value), dtype=torch.float64, device=self.device)
            dist.all_reduce(loss_check)
            norm += float(loss_check)
        metrics |= {"grad_norm": Metric.max(norm), "skipped_updates": Metric.max(not math.isfinite(norm))}
        if math.isfinite(norm):
            self._assert_here("optimizer")
            metrics["lr"] = Metric.max(self._optimizer.step(norm))
        self._optimizer.zero_grad()
        return metrics

    def accumulate(self, batch: Batch, plan: MicroBatches, loss: Loss) -> Metrics:
        """First half of a train step: leave the gradient, summed over micro-batches and ranks, in the parameters' main_grad.

        Metrics: those of the loss, and ``loss``: this shard's part of sum(loss_weight * token_loss), on the last stage.
        """
        assert self._grads_place == "device", "gradients are on the host: move(grads='device') comes first"
        self._zero_grad()

        def reduce(pack: Pack, results: dict[str, Tensor]) -> tuple[Tensor, Tensor, Metrics]:
            total, metrics = weighted(loss, results, pack.rows)
            reported = {} if pack.is_dummy else {**metrics, "loss": Metric.sum(total.detach())}
            # The zero stands for the number of tokens that Megatron expects here, see finalize_model_grads_func.
            return total, torch.zeros((), dtype=torch.int, device=self.device), reported

        metrics_by_part: list[Metrics] = self._run(batch, plan, loss.needs, reduce, backward=True)
        return join_metrics([{"loss": Metric.sum(0.0)}, *filter(None, metrics_by_part)])

    def _run(
        self,
        batch: Batch,
        plan: MicroBatches,
        outputs: Collection[str],
        reduce: Callable[[Pack, dict[str, Tensor]], Any],
        *,
        backward: bool,
    ) -> list[Any]:
        """Apply ``reduce`` to each micro-batch and its results, on the last stage; other stages return nothing.

        Collective over a model: all its ranks run the same micro-batches in the same order.
        """
        self._assert_here("params")
        interleaved = len(self._model) > 1
        if interleaved:  # the interleaved schedule requires a multiple of the number of stages
            plan = (*plan, *[()] * (-len(plan) % self.megatron.pipeline_model_parallel_size))
        packs = [pack(micro_batch(batch, chosen, self.device), self.config, self._rotary, is_dummy=not chosen) for chosen in plan]

        def step(data: Iterator[Pack], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            one = next(data)
            hidden = model(one.input_ids[None], one.positions[None], None, packed_seq_params=one.packed)
            return hidden, lambda hidden, **_: reduce(one, self._results(one, hidden, outputs))

        results: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(packs) for _ in self._model] if interleaved else iter(packs),
            model=self._model,
            num_microbatches=len(packs),
            seq_length=max(len(one.input_ids) for one in packs),
            micro_batch_size=1,
            forward_only=not backward,
            collect_non_loss_data=not backward,
        )
        return results

    def _results(self, pack: Pack, hidden: Tensor, outputs: Collection[str]) -> dict[str, Tensor]:
        if self.spec.head == "value":
            return values(self._chunks[-1], pack, hidden)
        if self.spec.head == "reward":
            return {"scores": values(self._chunks[-1], pack, hidden)["last_value"]}
        return log_probs(self._chunks[-1], pack, hidden, outputs, self._shell.config.vocab_size)

    def _zero_grad(self) -> None:
        assert self._optimizer is not None
        for chunk in self._model:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _drop_step(self) -> None:
        """Undo a failed ``accumulate``: drop gradients and release memory."""
        self._zero_grad()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # Weights

    def export_weights(self, *, dtype: torch.dtype | None = None, kind: Weights = "merged") -> Iterator[tuple[str, Tensor]]:
        self._assert_here("params")
        return self._exchange.export(dtype)

    def live_weights(self) -> dict[str, Tensor] | None:
        return None  # a Megatron tensor contains several Hugging Face tensors

    def trained_tensors(self) -> list[Tensor]:
        return [param.detach() for param in self._exchange.params.values() if param.requires_grad]

    def export_hf(self, path: str) -> None:
        write_model(self._shell if self.mesh.rank == 0 else None, self.export_weights(), Path(path))

    def _put_param(self, param: Tensor, whole: Tensor) -> None:
        """Set a parameter, and the optimizer's float32 copy of it, which would overwrite it in the next step."""
        with torch.no_grad():
            param.copy_(whole)
            if self._optimizer is not None:
                self._optimizer.put("param", param, whole)

    # Device and host

    def move(self, *, params: Place | None = None, grads: Place | None = None, optimizer: Place | None = None) -> None:
        if grads is not None and self.megatron.grad_offload and grads != self._grads_place:
            for chunk in self._model if self._optimizer is not None else ():
                if grads == "cpu":
                    chunk.offload_grad_buffers()
                else:
                    chunk.restore_grad_buffers()
            self._grads_place = grads
        if params is not None:
            self._places["params"].move(params)
        if optimizer is not None:
            self._places["optimizer"].move(optimizer)

    def _assert_here(self, part: str) -> None:
        assert self._places[part].place == "device", f"{part} are on the host: move({part}='device') comes first"

    def _separate_state(self) -> list[Tensor]:
        """Optimizer state with storage of its own.

        In float32 the optimizer's copy of a parameter may be the parameter itself, which must not be offloaded twice.
        """
        params = {param.untyped_storage().data_ptr() for param in self._exchange.params.values()}
        tensors = self._optimizer.tensors() if self._optimizer is not None else []
        return [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in params]

    @contextmanager
    def _optimizer_here(self) -> Iterator[None]:
        """Keep the optimizer state on the device in the block."""
        place = self._places["optimizer"].place
        self._places["optimizer"].move("device")
        yield
        self._places["optimizer"].move(place)

    # Checkpoints: in the format of the FSDP engine, which any parallel layout can read

    def save(self, path: str, *, background: bool = False) -> Future[Saved]:
        self._assert_here("params")
        with self._optimizer_here():
            shard = Shard(self._state(), self.mesh.rank, self.mesh.world_size)
            shell = self._shell if self.mesh.rank == 0 else None
            return save_shard(shard, Path(path), shell, background=background)

    def _state(self) -> dict[str, tuple[Tensor, list[int]]]:
        """This rank's part of a checkpoint. Collective.

        State that several data-parallel ranks hold is distributed over them in turn, so that all of them write.
        """
        optimizer = self._optimizer
        state: dict[str, tuple[Tensor, list[int]]] = {}
        if optimizer is not None and self.mesh.rank == 0:
            state["optimizer.steps"] = (torch.tensor(optimizer.steps), [])
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for prefix, kind in KINDS.items():
            if optimizer is None and kind != "param":
                continue
            # Every rank calls ``of`` for the same parameters in the same order, so all agree on the writer of each.
            turn = cycle(range(group.size()))

            def of(param: Tensor, kind: Kind = kind, turn: Iterator[int] = turn) -> Tensor | None:
                writer = next(turn)
                if optimizer is not None:
                    return optimizer.whole(param, kind, writer)
                return param.detach() if group.rank() == writer else None

            state |= self._exchange.parts(of, prefix)
        return state

    def load(self, path: str) -> None:
        self._assert_here("params")
        files = Files(path, path)
        if not [*files]:
            raise FileNotFoundError(f"{path}: no checkpoint there")
        optimizer = self._optimizer
        with self._optimizer_here(), torch.no_grad():
            self._exchange.fill(files, self._put_param, "model.")
            if optimizer is not None:
                for prefix, kind in KINDS.items():
                    if kind != "param":
                        self._exchange.fill(files, partial(optimizer.put, kind), prefix)
                optimizer.set_steps(int(files.read("optimizer.steps")))

    def flops(self, lengths: list[int], *, backward: bool) -> float:
        n_params = sum(param.numel() for param in self._shell.parameters())
        return model_flops(self._shell.config, self.spec.head, n_params, lengths, backward=backward)


def rotary_of(shell: PreTrainedModel) -> torch.nn.Module:
    """transformers' own rotary embedding of this model: (a tensor of the wanted dtype, positions (1, T)) -> cos, sin."""
    embedding: Any = shell.base_model.rotary_emb
    rotary: torch.nn.Module = type(embedding)(config=shell.config)
    return rotary
