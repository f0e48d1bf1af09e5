"""Small Megatron engines, and what ranks find out with them, a cut of the model at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.schema.common import MegatronConfig
from tests.tiny import model_config, save_tiny_model
from tests.workers.engine.fsdp.cases import exported, train, training_batch
from tests.workers.engine.toy import ADAMW, ToyLoss, ValueLoss, cut
from workers.batch import Batch
from workers.engine.base import EngineSpec, Loss, OptimizerSpec
from workers.plan import MicroBatches
from workers.roles.train_engines import make_engine

if TYPE_CHECKING:  # loading it changes torch: in processes of its own alone
    from workers.engine.megatron.megatron_engine import MegatronEngine

OUTPUTS = {"log_probs", "entropy", "sampled_entropy", "sum_pi_squared", "top_log_probs", "all_log_probs"}
SAMPLING = {"temperature": 0.9, "top_p": 0.6, "eos_token_id": [1, 2]}


def save_models(root: Path) -> dict[str, str]:
    """Four layers each; two ranks do not divide the vocabulary of 61. Halves of three layers end in the middle of a matrix."""
    return {
        "qwen2": with_sampling(save_tiny_model(root / "qwen2", "qwen2", num_hidden_layers=4)),
        "tied": save_tiny_model(root / "tied", "qwen2", num_hidden_layers=4, tie_word_embeddings=True),
        "qwen3": save_tiny_model(root / "qwen3", "qwen3", num_hidden_layers=4),
        "llama": save_tiny_model(root / "llama", "llama", num_hidden_layers=4),
        "three": save_tiny_model(root / "three", "qwen2", num_hidden_layers=3),
        "wide": save_tiny_model(root / "wide", "qwen2", num_hidden_layers=4, intermediate_size=96),
        "strange": rewritten(save_tiny_model(root / "strange", "llama"), add="model.layers.0.self_attn.sinks"),
        "incomplete": rewritten(save_tiny_model(root / "incomplete", "llama"), remove="model.norm.weight"),
    }


def with_sampling(path: str) -> str:
    """The model, with settings of generation that transformers reads and refuses to save."""
    (Path(path) / "generation_config.json").write_text(json.dumps(SAMPLING))
    return path


def rewritten(path: str, *, add: str = "", remove: str = "") -> str:
    """The model, with one weight more or less."""
    file = Path(path) / "model.safetensors"
    weights = load_file(file)
    weights = {name: weight for name, weight in weights.items() if name != remove} | ({add: torch.ones(4)} if add else {})
    save_file(weights, file, metadata={"format": "pt"})
    return path


def megatron_config(**changes: Any) -> MegatronConfig:
    """changes: tp, pp, vpp, cp for the long names, and others as they are."""
    short = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "vpp": "virtual_pipeline_model_parallel_size",
        "cp": "context_parallel_size",
    }
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "use_distributed_optimizer": False,
        "dtype": "float32",
        "param_offload": False,
        "grad_offload": False,
        "optimizer_offload": False,
        "override_transformer_config": {},
    }
    return MegatronConfig(**(fields | {short.get(name, name): value for name, value in changes.items()}))


def megatron_engine(
    path: str,
    head: str = "lm",
    *,
    optimizer: OptimizerSpec | None = ADAMW,
    recompute: bool = False,
    device: str = "cpu",
    **changes: Any,
) -> MegatronEngine:
    """changes: see megatron_config."""
    model = model_config(path, enable_gradient_checkpointing=recompute)
    sharding = megatron_config(**changes)
    engine = make_engine(
        EngineSpec(model=model, head=head, sharding=sharding, optimizer=optimizer, device=device, seed=1)  # type: ignore[arg-type]
    )
    return engine  # type: ignore[return-value]


@contextmanager
def ranks(path: Path, name: str, rank: int, size: int, backend: str = "gloo") -> Iterator[None]:
    """A process group of its own: Megatron cuts a group in one way only."""
    dist.init_process_group(backend, init_method=f"file://{path / f'rendezvous_{name}_{size}'}", rank=rank, world_size=size)
    yield
    dist.destroy_process_group()


def answers(engine: MegatronEngine, batch: Batch, outputs: set[str], **limits: int) -> dict[str, Tensor]:
    """Of this rank's share; {} on ranks that do not answer."""
    shares, plans = cut(batch, engine.mesh.dp_size, **limits)
    found = engine.forward(shares[engine.mesh.dp_rank], plans[engine.mesh.dp_rank], outputs)
    assert (found is None) == (not engine.mesh.is_output_rank)
    if found is None:
        return {}
    columns = {name: shares[engine.mesh.dp_rank].tokens[name] for name in ("input_ids", "response_mask")}
    return {"lengths": found.lengths, **columns, **found.tokens, **found.rows}


def trained(path: str, **changes: Any) -> dict[str, Any]:
    """Answers before, five steps of training, and the parameters after; see test_engine_parity."""
    engine = megatron_engine(path, **changes)
    found: dict[str, Any] = {
        "is_output_rank": engine.mesh.is_output_rank,
        "dp_rank": engine.mesh.dp_rank,
        "round trip": exported(engine),
        "before": answers(engine, training_batch(0), OUTPUTS, max_tokens=80),
    }
    reference = megatron_engine(path, optimizer=None, **changes)
    found["reference"] = answers(reference, training_batch(0), OUTPUTS, max_tokens=80)
    found["metrics"] = train(engine, range(5))
    found["weights"] = exported(engine)
    found["holds"] = holds(engine)
    return found


def holds(engine: MegatronEngine) -> dict[str, Any]:
    """What is on this rank: layers, parameters, numbers of the optimizer; and what a step works on there.

    tokens: of each micro-batch, as a layer sees them. attended: how often a layer's attention runs in a step of one micro-batch.
    """
    tokens: list[int] = []
    attended: list[int] = []
    layer = engine._chunks[0].decoder.layers[0]
    hooks = [
        layer.mlp.register_forward_hook(lambda module, args, out: tokens.append(args[0].shape[0])),
        layer.self_attention.core_attention.register_forward_hook(lambda *_: attended.append(1)),
    ]
    shares, _ = cut(training_batch(0), engine.mesh.dp_size, max_tokens=200)
    share = shares[engine.mesh.dp_rank]
    engine.accumulate(share, (tuple(range(len(share))),), ToyLoss())
    for hook in hooks:
        hook.remove()
    assert engine._optimizer is not None
    return {
        "layers": [layer.layer_number for chunk in engine._chunks for layer in chunk.decoder.layers],
        "parameters": sum(param.numel() for chunk in engine._chunks for param in chunk.parameters()),
        "moments": sum(tensor.numel() for tensor in engine._separate_state()),
        "share": share.total_tokens,
        "tokens": tokens[0],
        "attended": len(attended),
    }


def trained_critic(path: str, **changes: Any) -> dict[str, Any]:
    engine = megatron_engine(path, "value", **changes)
    metrics = train(engine, range(3), ValueLoss())
    return {
        "is_output_rank": engine.mesh.is_output_rank,
        "metrics": metrics,
        "weights": exported(engine),
        "after": answers(engine, training_batch(0), {"values"}, max_tokens=80),
    }


def gradient(
    engine: MegatronEngine, shares: Sequence[Batch], plans: Sequence[MicroBatches], loss: Loss | None = None
) -> dict[str, tuple[Tensor, list[int]]]:
    """This rank's parts of the whole gradient, in Hugging Face's names, as a checkpoint has them."""
    engine.accumulate(shares[engine.mesh.dp_rank], plans[engine.mesh.dp_rank], loss or ToyLoss())
    return {name: (part.clone(), begin) for name, (part, begin) in engine._exchange.parts(lambda param: param.main_grad)}
