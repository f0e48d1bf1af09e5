"""The FSDP2 engine: parameters, gradients and optimizer state sharded over the data-parallel ranks."""

from __future__ import annotations

import math
import traceback
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from configs.schema.common import FSDPConfig
from workers.batch import Batch
from workers.engine.attention import PackedRows
from workers.engine.base import EngineMesh, EngineSpec, Loss, SavedFile, TrainEngine
from workers.engine.fsdp.checkpoint import Shard, load_sharded
from workers.engine.fsdp.offload import Offloadable, Place
from workers.engine.fsdp.optimizer import ShardedAdamW, global_norm
from workers.engine.fsdp.sharding import fill, full, like, local, recompute_layers, shard
from workers.engine.hf_model import DTYPES, PackedModel, empty_model, load_model, model_config, write_description
from workers.engine.out_of_memory import OutOfMemory, RepeatableOutOfMemory, is_out_of_memory
from workers.engine.saving import in_background, saved_files
from workers.metric import Metric, Metrics, join_metrics
from workers.plan import MicroBatches

CAN_RESET = "reset_iter_state" in vars(FSDPModule)  # torch 2.13 and later
OUTPUTS = {"lm": {"log_probs", "entropy", "sum_pi_squared", "top_log_probs", "all_log_probs"}, "value": {"values"}}


class FSDPEngine(TrainEngine):
    """One model, sharded over all ranks of the default process group: a mesh of one dimension, ``dp``."""

    def __init__(self, spec: EngineSpec, fsdp: FSDPConfig) -> None:
        assert dist.is_initialized(), "FSDPEngine: torch.distributed is not initialised"
        self.spec = spec
        self.fsdp = fsdp
        self.device = torch.device("cuda", torch.cuda.current_device()) if spec.device == "cuda" else torch.device("cpu")
        rank, world = dist.get_rank(), dist.get_world_size()
        self.mesh = EngineMesh(rank=rank, world_size=world, dp_rank=rank, dp_size=world, is_output_rank=True)
        self._device_mesh = init_device_mesh(spec.device, (world,), mesh_dim_names=("dp",))
        self._model, self._shell = self._build()
        # While parameters are gathered, others take their place in the modules: from here on, these are the parameters.
        self._params = dict(self._model.hf.named_parameters())
        self._weights: dict[str, Tensor] = self._model.hf.state_dict(keep_vars=True)  # tied names and buffers too
        self._host: dict[str, Tensor] = {}  # copies that a thread writes from
        self._optimizer: ShardedAdamW | None = None
        if spec.optimizer is not None:
            self._optimizer = ShardedAdamW({name: local(param) for name, param in self._params.items()}, spec.optimizer)
        self._places = {
            "params": Offloadable(local(param) for param in self._params.values()),
            "optimizer": Offloadable(self._optimizer.moments().values() if self._optimizer else ()),
        }
        if fsdp.optimizer_offload:
            self._places["optimizer"].move("cpu")

    def _build(self) -> tuple[PackedModel, PreTrainedModel | None]:
        """The sharded model; and on rank 0 its twin without memory, which knows how transformers would write it."""
        model, fsdp, head = self.spec.model, self.fsdp, self.spec.head
        dtype = DTYPES[fsdp.model_dtype]
        config = model_config(model, head)
        saved_dtype = config.dtype or dtype
        sharded = empty_model(model, config, head, dtype).requires_grad_(self.spec.optimizer is not None)
        source = load_model(model, config, head, dtype) if self.mesh.rank == 0 else None
        if model.enable_gradient_checkpointing:
            recompute_layers(sharded)
        shard(sharded, self._device_mesh, fsdp)
        sharded.to_empty(device=self.device)
        sharded.hf.tie_weights()
        fill(sharded, source)
        if source is None:
            return sharded, None
        return sharded, source.hf.to(device="meta", dtype=saved_dtype)  # type: ignore[call-arg] # a wrapped method

    def forward(self, batch: Batch, plan: MicroBatches, outputs: set[str]) -> Batch | None:
        self._assert_here("params")
        assert outputs and outputs <= OUTPUTS[self.spec.head], f"a {self.spec.head} head answers {OUTPUTS[self.spec.head]}"
        vocabulary = self._model.hf.config.get_text_config().vocab_size
        wide = {"top_log_probs": (batch.total_tokens, 2), "all_log_probs": (batch.total_tokens, vocabulary)}
        tokens = {name: torch.zeros(wide.get(name, (batch.total_tokens,))) for name in sorted(outputs)}
        rows = {"last_value": torch.zeros(len(batch))} if self.spec.head == "value" else {}
        placed = batch.with_tokens(_place=torch.arange(batch.total_tokens)).with_rows(_place=torch.arange(len(batch)))
        with torch.no_grad():
            for chosen in plan:
                micro_batch = self._micro_batch(placed, chosen)
                results = self._run(micro_batch, outputs)
                if chosen:
                    for columns, place in ((tokens, micro_batch.tokens["_place"]), (rows, micro_batch.rows["_place"])):
                        for name, column in columns.items():
                            column[place.cpu()] = results[name].float().cpu()
        self._free_gathered()
        return Batch(lengths=batch.lengths, tokens=tokens, rows=rows, meta=dict(batch.meta))

    def train_step(self, batch: Batch, plan: MicroBatches, loss: Loss) -> Metrics:
        assert self._optimizer is not None, "this engine was built without an optimizer"
        with self._undone_without_memory():
            metrics = self.accumulate(batch, plan, loss)
            grads = {name: local(param.grad) for name, param in self._params.items() if param.grad is not None}
            loss_here = metrics["loss"]
            assert isinstance(loss_here, Metric)
            # A loss may be infinite where its gradient is not: as 0 * loss it is part of the one number that all ranks decide by.
            norm = float(global_norm([*grads.values(), torch.tensor([0.0 * loss_here.value], device=self.device)], self.device))
        metrics |= {"grad_norm": Metric.max(norm), "skipped_updates": Metric.max(not math.isfinite(norm))}
        if math.isfinite(norm):
            with self._optimizer_here():
                metrics["lr"] = Metric.max(self._optimizer.step(grads, norm))
        self.move(grads="cpu")
        return metrics

    def accumulate(self, batch: Batch, plan: MicroBatches, loss: Loss) -> Metrics:
        """The first half of a train step: leaves the gradient, summed over micro-batches and ranks, in the parameters.

        Metrics: the loss's own, and ``loss``: this rank's part of sum(loss_weight * token_loss).
        """
        self._assert_here("params")
        parts: list[Metrics] = [{"loss": Metric.sum(0.0)}]
        for i, chosen in enumerate(plan):
            self._reduce_gradients(i == len(plan) - 1)
            micro_batch = self._micro_batch(batch, chosen)
            token_loss, metrics = loss(self._run(micro_batch, loss.needs), micro_batch)
            weight = micro_batch.tokens["loss_weight"]
            # A token without weight takes no part, whatever its loss: 0 * inf is not 0.
            total = torch.where(weight != 0, weight * token_loss, 0.0).sum()
            total.backward()
            if chosen:
                parts.append({**metrics, "loss": Metric.sum(total.detach())})
        return join_metrics(parts)

    @contextmanager
    def _undone_without_memory(self) -> Iterator[None]:
        """If memory runs out within, that is told as OutOfMemory; where this rank is alone, nothing is left of the step."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold the graph
            said = str(error).splitlines()[0]
            if self.mesh.world_size > 1 or (isinstance(self._model, FSDPModule) and not CAN_RESET):
                raise OutOfMemory(said) from None
            self._drop_step()
            raise RepeatableOutOfMemory(said) from None

    def _drop_step(self) -> None:
        """After an exception anywhere in ``accumulate``: no gradient, nothing gathered, and the memory back."""
        if isinstance(self._model, FSDPModule):
            self._model.reset_iter_state()
            # Gradients of earlier micro-batches outlive that, in private places (torch 2.13): a dummy row carries them to where
            # they can be dropped.
            self._reduce_gradients(True)
            empty = torch.zeros(0, dtype=torch.int64)
            nobody = Batch(lengths=empty, tokens={"input_ids": empty, "response_mask": empty}, meta={"temperature": 1.0})
            outputs = self._run(self._micro_batch(nobody, ()), {"log_probs"})
            outputs["values" if self.spec.head == "value" else "log_probs"].sum().backward()
        self.move(grads="cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _reduce_gradients(self, last: bool) -> None:
        """Gradients cross ranks once, in the last micro-batch; before it they add up unsharded."""
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(last)
            self._model.set_is_last_backward(last)
            # Parameters that may stay gathered from forward to backward may stay until the last backward.
            self._model.set_reshard_after_backward(last or self.fsdp.reshard_after_forward)

    def _free_gathered(self) -> None:
        """No backward will do it; and a load would leave what is still gathered stale."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _micro_batch(self, batch: Batch, chosen: Sequence[int]) -> Batch:
        """These rows, the longest first, with columns on the device (lengths stay); no rows: one dummy row of zeros."""
        if chosen:
            part = batch.select(sorted(chosen, key=lambda row: (-int(batch.lengths[row]), row)))
        else:
            part = Batch(
                lengths=torch.tensor([2]),
                tokens={name: column.new_zeros(2, *column.shape[1:]) for name, column in batch.tokens.items()},
                rows={name: column.new_zeros(1, *column.shape[1:]) for name, column in batch.rows.items()},
                meta=batch.meta,
            )
        return Batch(
            lengths=part.lengths,
            tokens={name: column.to(self.device) for name, column in part.tokens.items()},
            rows={name: column.to(self.device) for name, column in part.rows.items()},
            meta=part.meta,
        )

    def _run(self, micro_batch: Batch, outputs: Collection[str]) -> dict[str, Tensor]:
        input_ids, positions = micro_batch.tokens["input_ids"], micro_batch.positions().to(self.device)
        rows = PackedRows.of(micro_batch.lengths.tolist(), self.device)
        if self.spec.head == "value":
            return self._model(input_ids, positions, rows)
        predicted = (micro_batch.tokens["response_mask"].bool() & (positions > 0)).nonzero()[:, 0]
        temperature = micro_batch.meta["temperature"]
        return self._model(input_ids, positions, rows, predicted, temperature=temperature, outputs=outputs)

    def export_weights(self, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        self._assert_here("params")
        for name, weight in self._own_weights().items():
            yield name, full(weight, dtype)

    def _own_weights(self) -> dict[str, Tensor]:
        """Each weight once, under the first of its names."""
        names: dict[int, str] = {}
        for name, weight in self._weights.items():
            names.setdefault(id(weight), name)
        return {name: self._weights[name] for name in names.values()}

    def live_weights(self) -> dict[str, Tensor] | None:
        self._assert_here("params")
        if self.mesh.world_size > 1:
            return None
        return {name: local(weight) for name, weight in self._weights.items()}

    def move(self, *, params: Place | None = None, grads: Place | None = None, optimizer: Place | None = None) -> None:
        if grads == "cpu":
            for param in self._params.values():
                param.grad = None
        if params is not None:
            self._places["params"].move(params)
        if optimizer is not None and not self.fsdp.optimizer_offload:
            self._places["optimizer"].move(optimizer)

    def _assert_here(self, part: str) -> None:
        assert self._places[part].place == "device", f"{part} are on the host: move({part}='device') comes first"

    @contextmanager
    def _optimizer_here(self) -> Iterator[None]:
        """With optimizer_offload the state is on the device in here alone."""
        if self.fsdp.optimizer_offload:
            self._places["optimizer"].move("device")
        self._assert_here("optimizer")
        yield
        if self.fsdp.optimizer_offload:
            self._places["optimizer"].move("cpu")

    def save(self, path: str, *, background: bool = False) -> Future[list[SavedFile]]:
        self._assert_here("params")
        with self._optimizer_here():
            shard = Shard(self._checkpoint_state(), self.mesh.rank, self.mesh.world_size)
            if background:
                shard.to_host(self._host)
            saving = in_background(partial(self._write, shard, Path(path)))
            if not background:
                wait([saving])
        return saving

    def _write(self, shard: Shard, directory: Path) -> list[SavedFile]:
        directory.mkdir(exist_ok=True)
        shard.write(directory)
        written = [shard.file]
        if self._shell is not None:
            written += write_description(self._shell, directory)
        return saved_files(directory, written)

    def load(self, path: str) -> None:
        self._assert_here("params")
        with self._optimizer_here():
            state = self._checkpoint_state()
            load_sharded(state, path)
        if self._optimizer is not None:
            self._optimizer.set_steps(int(state["optimizer.steps"]))

    def _checkpoint_state(self) -> dict[str, Tensor]:
        """Views of what is live, and the count of steps, which is all of the schedule's state."""
        state: dict[str, Tensor] = {f"model.{name}": weight.detach() for name, weight in self._own_weights().items()}
        if self._optimizer is not None:
            state["optimizer.steps"] = torch.tensor(self._optimizer.steps)
            for (kind, name), moment in self._optimizer.moments().items():
                state[f"optimizer.{kind}.{name}"] = like(self._params[name], moment)
        return state

    def export_hf(self, path: str) -> None:
        state = {}
        for name, weight in self.export_weights():
            if self._shell is not None:
                state[name] = weight.to("cpu", self._shell.dtype) if weight.is_floating_point() else weight.cpu()
        if self._shell is not None:
            self._shell.save_pretrained(path, state_dict=state)
        dist.barrier()

    def flops(self, lengths: list[int], *, backward: bool) -> float:
        """The embedding is a lookup and costs nothing, unless it is the head too. The head counts for every token, as the
        field counts it, though only response tokens pass it here. Attention is causal: half of each square.
        """
        config = self._model.hf.config.get_text_config()
        n_params = sum(param.numel() for param in self._params.values())
        if not (self.spec.head == "lm" and config.tie_word_embeddings):
            n_params -= config.vocab_size * config.hidden_size
        head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
        pair = 2 * config.num_hidden_layers * config.num_attention_heads * head_dim
        forward = sum(2.0 * n_params * length + pair * length * length for length in lengths)
        return 3 * forward if backward else forward
