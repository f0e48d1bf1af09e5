"""FSDP2 engine: parameters, gradients and optimizer state are sharded over ranks; tokens too with Ulysses.

A train step runs micro-batches one after the other. FSDP gathers units of one or more layers (units.py) for their forward and
backward, and reduces gradients to shards by summing, never averaging (sharding.shard). The optimizer updates local shards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from configs.schema.common import FSDPConfig
from workers.batch import Batch
from workers.engine.base import EngineMesh, EngineSpec, Loss, Saved, TrainEngine, Weights
from workers.engine.fsdp.activations import keep_inputs_on_host, tile_mlps
from workers.engine.fsdp.sharded_adamw import ShardedAdamW, global_norm
from workers.engine.fsdp.sharding import (
    compile_layers,
    compiles,
    copies,
    device_mesh,
    fill,
    full,
    like,
    local,
    parts,
    recompute_layers,
    shard,
)
from workers.engine.hf.checkpoint import ADAPTER, Shard, load_sharded, remove_weights, save_shard
from workers.engine.hf.hf_model import (
    DTYPES,
    PackedModel,
    active_parameters,
    check_packing,
    description,
    empty_model,
    make_buffers,
    model_config,
    model_flops,
    small_twin,
    stored_weights,
)
from workers.engine.hf.moe_aux_loss import ROUTED, LoadBalance
from workers.engine.hf.packed_attention import PackedRows
from workers.engine.micro_batch import PREDICTED, SAMPLED, ForwardOutputs, flat_rows, longest_first, micro_batch, weighted
from workers.engine.offload import Offloadable, Place
from workers.engine.out_of_memory import convert_out_of_memory
from workers.engine.shared_prefixes import SharedPrefixes
from workers.engine.ulysses import TokenSharding
from workers.metric import Metric, Metrics, join_metrics
from workers.plan import MicroBatches
from workers.prefixes import Chain
from workers.start_times import START

if TYPE_CHECKING:
    from workers.engine.fsdp.lora import Adapter

CAN_RESET = "reset_iter_state" in vars(FSDPModule)  # torch >= 2.13


class FSDPEngine(TrainEngine):
    """One model over all ranks of the default process group.

    How parameters are sharded (sharding.device_mesh) and which ranks work on the same rows (ulysses.TokenSharding) are
    independent: a gradient is a sum over all ranks.
    """

    def __init__(self, spec: EngineSpec, fsdp: FSDPConfig) -> None:
        assert dist.is_initialized(), "FSDPEngine: torch.distributed is not initialised"
        self.spec = spec
        self.fsdp = fsdp
        self.device = torch.device("cuda", torch.cuda.current_device()) if spec.device == "cuda" else torch.device("cpu")
        rank, world, sp = dist.get_rank(), dist.get_world_size(), fsdp.ulysses_sequence_parallel_size
        # Consecutive ranks share their rows, as in the groups of TokenSharding.over.
        self.mesh = EngineMesh(
            rank=rank, world_size=world, dp_rank=rank // sp, dp_size=world // sp, is_output_rank=rank % sp == 0
        )
        self._device_mesh = device_mesh(spec.device, fsdp.fsdp_size)
        self._reduces_last_only = fsdp.use_no_sync_for_gradient_accumulation
        self._token_sharding = TokenSharding.over(sp, spec.device)
        self._model, self._shell = self._build()
        # While parameters are gathered, the modules contain the gathered tensors. Keep references to the sharded ones.
        self._params = dict(self._model.hf.named_parameters())
        self._weights: dict[str, Tensor] = self._model.hf.state_dict(keep_vars=True)  # tied names and buffers too
        self._adapter: Adapter | None = None
        if self.adapter_config is not None:
            from workers.engine.fsdp.lora import Adapter

            self._adapter = Adapter(self._model, self.adapter_config)
            self._weights = self._adapter.base
        self._optimizer: ShardedAdamW | None = None
        if spec.optimizer is not None:
            trained = {name: local(param) for name, param in self._params.items() if param.requires_grad}
            self._optimizer = ShardedAdamW(trained, spec.optimizer)
        self._places = {
            "params": Offloadable(local(param) for param in self._params.values()),
            "optimizer": Offloadable(self._optimizer.moments().values() if self._optimizer else ()),
        }
        if fsdp.optimizer_offload:
            self._places["optimizer"].move("cpu")

    def _build(self) -> tuple[PackedModel, PreTrainedModel | None]:
        """Build the sharded model and, on rank 0, its meta-device twin, which defines how transformers would write it.

        The order matters. The adapter's parameters must exist before ``shard`` shards the layers. Recomputation repeats compiled
        layers, so it is set up after their compilation, and before ``shard``, whose hooks must run outside of it. Memory is
        allocated after sharding, for shards only.
        """
        model, fsdp, head = self.spec.model, self.fsdp, self.spec.head
        dtype = DTYPES[fsdp.model_dtype]
        config = model_config(model, head)
        saved_dtype = config.dtype or dtype
        sharded = empty_model(model, config, head, dtype).requires_grad_(self.spec.optimizer is not None)
        weights, shell = stored_weights(sharded, model), None
        if self.mesh.rank == 0:
            # On one rank: the twin is the same on all of them.
            with START("check"):
                check_packing(small_twin(model, config, head), model.path)
                weights.check_ties()
            shell = description(model, config, head, weights).to(dtype=saved_dtype)  # type: ignore[call-arg] # a wrapped method
        # On the CPU and in full: ``fill`` copies this rank's part after the sharding.
        given = make_buffers(sharded.hf, torch.device("cpu"))
        if model.has_adapter:
            from workers.engine.fsdp.lora import add_adapter

            trained = self.spec.optimizer is not None
            initial_model = empty_model(model, config, head, dtype)
            self.adapter_config, initial_weights = add_adapter(
                sharded, initial_model, weights, model, trained=trained, seed=self.spec.seed
            )
            given |= initial_weights
        if compiles(fsdp, self.device.type):
            compile_layers(sharded)
        if model.enable_gradient_checkpointing:
            recompute_layers(sharded)
        if model.enable_activation_offload:
            keep_inputs_on_host(sharded)
        if model.tiled_mlp.enabled:
            tile_mlps(sharded, model.tiled_mlp.num_shards)
        shard(sharded, self._device_mesh, fsdp)
        sharded.to_empty(device=self.device)
        # to_empty() may create new parameters, which breaks ties.
        sharded.hf.tie_weights()
        with START("read"):
            fill(sharded, weights, given)
        return sharded, shell

    def forward(self, batch: Batch, plan: MicroBatches, outputs: set[str], *, adapter: bool = True) -> Batch | None:
        self._assert_here("params")
        collected = ForwardOutputs(batch, outputs, self.spec.head, self._model.hf.config.get_text_config().vocab_size)
        base_only = self._adapter.off() if self._adapter is not None and not adapter else nullcontext()
        chains = self.chains(batch)
        with torch.no_grad(), base_only:
            for chosen in plan:
                rows = micro_batch(collected.batch, chosen, self.device)
                results = self._run(rows, outputs, shared=self._shared(rows, chains, longest_first(batch, chosen)))
                if chosen and self.mesh.is_output_rank:
                    collected.put(rows, results)
        self._free_gathered()
        return collected.batch_of_outputs() if self.mesh.is_output_rank else None

    def train_step(self, batch: Batch, plan: MicroBatches, loss: Loss) -> Metrics:
        assert self._optimizer is not None, "this engine was built without an optimizer"
        # The optimizer steps outside of this block: an update that is half applied cannot be undone.
        # With several ranks the others may wait in a collective that this rank has left: the step cannot be undone.
        can_undo = self.mesh.world_size == 1 and (CAN_RESET or not isinstance(self._model, FSDPModule))
        with convert_out_of_memory(self._drop_step if can_undo else None):
            metrics = self.accumulate(batch, plan, loss)
            grads = {name: local(param.grad) for name, param in self._params.items() if param.grad is not None}
            loss_here = metrics["loss"]
            assert isinstance(loss_here, Metric)
            # A loss may be infinite although its gradient is finite. 0 * loss is then NaN, and part of the norm by which all
            # ranks decide.
            loss_check = torch.tensor([0.0 * loss_here.value], device=self.device)
            norm = float(global_norm([*grads.values(), loss_check], self.device, copies(self._device_mesh)[1]))
        metrics |= {"grad_norm": Metric.max(norm), "skipped_updates": Metric.max(not math.isfinite(norm))}
        if math.isfinite(norm):
            with self._optimizer_here():
                metrics["lr"] = Metric.max(self._optimizer.step(grads, norm))
        # Frees the gradients, also of an update that was not applied.
        self.move(grads="cpu")
        return metrics

    def accumulate(self, batch: Batch, plan: MicroBatches, loss: Loss) -> Metrics:
        """First half of a train step: leave the gradient, summed over micro-batches and ranks, in the parameters.

        Metrics: those of the loss, and ``loss``: this rank's part of sum(loss_weight * token_loss). For a mixture of experts also
        those of LoadBalance, whose auxiliary loss is not part of ``loss``.
        """
        self._assert_here("params")
        # A rank that has only dummy micro-batches reports a loss of 0 too.
        metrics_by_part: list[Metrics] = [{"loss": Metric.sum(0.0)}]
        coefficient, balance = self.spec.model.router_aux_loss_coef, None
        if self._model.top_k is not None:
            # Ulysses ranks hold the same rows: each token counts once.
            tokens = batch.total_tokens if self.mesh.is_output_rank else 0
            balance = LoadBalance(coefficient, self._model.top_k, tokens, self.device)
        chains = self.chains(batch)
        sums: dict[str, Tensor] = {}
        for i, chosen in enumerate(plan):
            self._reduce_gradients(i == len(plan) - 1)
            rows = micro_batch(batch, chosen, self.device)
            shared = self._shared(rows, chains, longest_first(batch, chosen))
            outputs = self._run(rows, loss.needs, routing=None if balance is None else coefficient > 0, shared=shared)
            total, metrics = weighted(loss, outputs, rows)
            if chosen:
                metrics_by_part.append({**metrics, "loss": Metric.sum(total.detach())})
            if balance is not None:
                added, metrics = balance.take(outputs["expert_load"], outputs["router_probs"], real=bool(chosen))
                metrics_by_part.append(metrics)
                total = total + added
            # No division by micro-batches or ranks: loss_weight was computed over the whole mini-batch.
            total.backward()
            # A single micro-batch has nothing to add up, and FSDP accumulates unsharded gradients in float32.
            if len(plan) > 1 and not (self._reduces_last_only and isinstance(self._model, FSDPModule)):
                self._sum_in_float32(sums)
        for name in list(sums):
            # pop(): each float32 sum is freed as soon as its gradient is cast.
            self._params[name].grad = like(self._params[name], sums.pop(name).to(self._params[name].dtype))
        return join_metrics([*metrics_by_part, balance.metrics()] if balance is not None else metrics_by_part)

    def _sum_in_float32(self, sums: dict[str, Tensor]) -> None:
        """Move the gradients of parameters narrower than float32 into ``sums``.

        FSDP and autograd accumulate micro-batches in the dtype of the parameters, and a bfloat16 sum loses addends 256 times
        smaller than itself.
        """
        for name, param in self._params.items():
            if param.grad is not None and param.dtype.itemsize < torch.float32.itemsize:
                shard, param.grad = local(param.grad), None
                sums[name] = sums[name].add_(shard) if name in sums else shard.float()

    def _drop_step(self) -> None:
        """Undo a failed ``accumulate``: drop gradients, reshard gathered parameters, release memory."""
        if isinstance(self._model, FSDPModule):
            self._model.reset_iter_state()
            # Gradients of earlier micro-batches survive that in private state of FSDP (torch 2.13): the backward of a dummy row
            # moves them to the parameters, where they can be dropped.
            self._reduce_gradients(True)
            empty = torch.zeros(0, dtype=torch.int64)
            no_rows = Batch(lengths=empty, tokens={"input_ids": empty, "response_mask": empty}, meta={"temperature": 1.0})
            outputs = self._run(micro_batch(no_rows, (), self.device), {"log_probs"})
            next(iter(outputs.values())).sum().backward()
        self.move(grads="cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _reduce_gradients(self, last: bool) -> None:
        """Select which gradients the next backward reduces over ranks.

        Each micro-batch is reduced over the ranks that share one copy of the model, so that gradients accumulate sharded:
        unsharded they take 4 bytes per parameter on every GPU, however many GPUs there are. Copies (HSDP) are summed in the last
        micro-batch. With use_no_sync_for_gradient_accumulation all reduction waits for the last micro-batch.
        """
        if isinstance(self._model, FSDPModule):
            reduces = last or not self._reduces_last_only
            self._model.set_requires_gradient_sync(reduces)
            self._model.set_requires_all_reduce(last)
            self._model.set_is_last_backward(reduces)
            # Parameters that may stay gathered from forward to backward may stay until the last backward.
            self._model.set_reshard_after_backward(last or self.fsdp.reshard_after_forward)

    def _free_gathered(self) -> None:
        """Reshard parameters that a forward without backward has left gathered.

        They would keep their memory, and a load would update the shards and leave the gathered copies stale.
        """
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _shared(self, rows: Batch, chains: list[Chain] | None, order: Sequence[int]) -> SharedPrefixes | None:
        """Prefix sharing of a micro-batch; None without.

        rows: the micro-batch. chains: of the whole batch, None if no rows share anything. order: indices of the rows in it.
        """
        if chains is None:
            return None
        of_rows = [chains[row] for row in order] or [()]  # a dummy row has no prefix
        # Compiled layers have a graph for shared prefixes and another for whole rows. Few micro-batches of a batch share nothing:
        # gathering their keys and values takes less time than compiling the second.
        unit, always = self.fsdp.ulysses_sequence_parallel_size, self._model.fused
        return SharedPrefixes.of(rows.lengths.tolist(), of_rows, self.device, unit, always=always)

    def _run(
        self, rows: Batch, outputs: Collection[str], *, routing: bool | None = None, shared: SharedPrefixes | None = None
    ) -> dict[str, Tensor]:
        """Run the model on a micro-batch and return its outputs without padding.

        routing: None: no router statistics; else whether they need a gradient.
        """
        # What is split over ranks are the computed tokens.
        padding = -rows.total_tokens % self.fsdp.ulysses_sequence_parallel_size if shared is None else shared.padding
        input_ids, positions, lengths = flat_rows(rows, padding)
        packed, total = PackedRows.of(lengths, self.device, cut=self._token_sharding, shared=shared), rows.total_tokens
        routing_kwargs = {} if routing is None else {"routed": total, "routed_gradient": routing}
        if self.spec.head != "lm":
            results = self._model(input_ids, positions, packed, **routing_kwargs)
            kept = {"values": total, "last_value": len(rows), "scores": len(rows)}
            return {name: out[: kept[name]] if name in kept else out for name, out in results.items()}
        head_kwargs = {"temperature": rows.meta["temperature"], "outputs": outputs, "sampled": rows.meta.get(SAMPLED)}
        results = self._model(input_ids, positions, packed, rows.meta[PREDICTED], **head_kwargs, **routing_kwargs)
        return {name: out if name in ROUTED else out[:total] for name, out in results.items()}

    def export_weights(self, *, dtype: torch.dtype | None = None, kind: Weights = "merged") -> Iterator[tuple[str, Tensor]]:
        self._assert_here("params")
        adapter = self._adapter
        if kind == "adapter":
            assert adapter is not None, "the model has no adapter"
            for name, weight in adapter.own.items():
                yield name, full(weight, dtype)
            return
        for name, weight in self._unique_weights().items():
            yield name, adapter.merged(name, dtype) if adapter is not None and kind == "merged" else full(weight, dtype)

    def _unique_weights(self) -> dict[str, Tensor]:
        """Each weight once, under the first of its names (tied weights have several)."""
        names: dict[int, str] = {}
        for name, weight in self._weights.items():
            names.setdefault(id(weight), name)
        return {name: self._weights[name] for name in names.values()}

    def live_weights(self) -> dict[str, Tensor] | None:
        self._assert_here("params")
        if self.mesh.world_size > 1 or self._adapter is not None:
            return None
        return {name: local(weight) for name, weight in self._weights.items()}

    def trained_tensors(self) -> list[Tensor]:
        return [local(param).detach() for param in self._params.values() if param.requires_grad]

    def move(self, *, params: Place | None = None, grads: Place | None = None, optimizer: Place | None = None) -> None:
        if grads == "cpu":
            for param in self._params.values():
                param.grad = None
        if params is not None:
            self._places["params"].move(params)
        # With optimizer_offload the state comes to the device for an update only, see _optimizer_here.
        if optimizer is not None and not self.fsdp.optimizer_offload:
            self._places["optimizer"].move(optimizer)

    def _assert_here(self, part: str) -> None:
        assert self._places[part].place == "device", f"{part} are on the host: move({part}='device') comes first"

    @contextmanager
    def _optimizer_here(self) -> Iterator[None]:
        """Keep the optimizer state on the device in the block only, if optimizer_offload is set."""
        if self.fsdp.optimizer_offload:
            self._places["optimizer"].move("device")
        self._assert_here("optimizer")
        yield
        if self.fsdp.optimizer_offload:
            self._places["optimizer"].move("cpu")

    def save(self, path: str, *, background: bool = False) -> Future[Saved]:
        self._assert_here("params")
        with self._optimizer_here():
            state = parts(self._checkpoint_state(), self.mesh.rank, copies(self._device_mesh))
            shard = Shard(state, self.mesh.rank, self.mesh.world_size)
            return save_shard(shard, Path(path), self._shell, adapter=self.adapter_config, background=background)

    def load(self, path: str) -> None:
        self._assert_here("params")
        with self._optimizer_here():
            state = self._checkpoint_state()
            load_sharded(state, path)
        if self._optimizer is not None:
            # The moments are views of live state, but the step count was loaded into a tensor of its own.
            self._optimizer.set_steps(int(state["optimizer.steps"]))

    def _checkpoint_state(self) -> dict[str, Tensor]:
        """Live tensors of a checkpoint, as views, without frozen weights.

        The step count is all of the schedule's state.
        """
        if self._adapter is None:
            state: dict[str, Tensor] = {f"model.{name}": weight.detach() for name, weight in self._unique_weights().items()}
        else:
            state = {f"{ADAPTER}{name}": weight.detach() for name, weight in self._adapter.own.items()}
        if self._optimizer is not None:
            state["optimizer.steps"] = torch.tensor(self._optimizer.steps)
            for (kind, name), moment in self._optimizer.moments().items():
                state[f"optimizer.{kind}.{name}"] = like(self._params[name], moment)
        return state

    def export_hf(self, path: str) -> None:
        state = {}
        # All ranks iterate although only rank 0 keeps anything: each weight is gathered by a collective.
        for name, weight in self.export_weights():
            if self._shell is not None:
                state[name] = weight.to("cpu", self._shell.dtype) if weight.is_floating_point() else weight.cpu()
        if self._shell is not None:  # complete: transformers may give weights other names in files than in the model
            remove_weights(Path(path))
            self._shell.save_pretrained(path, state_dict=state)
        dist.barrier()

    def flops(self, lengths: list[int], *, backward: bool) -> float:
        n_params = active_parameters(self._params, self._model.top_k)
        n_trained = sum(weight.numel() for weight in self._adapter.own.values()) if self._adapter is not None else None
        config, head = self._model.hf.config, self.spec.head
        return model_flops(config, head, n_params, lengths, backward=backward, n_trained=n_trained)
