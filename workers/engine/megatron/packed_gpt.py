"""Build a Megatron model from a transformers configuration.

Layers are Megatron's wherever they support packed rows. Core attention and, without Transformer Engine, RMSNorm are replaced by
the classes below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    HAVE_TE,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PretrainedConfig

from configs.schema.common import MegatronConfig
from workers.engine.hf.hf_model import DTYPES, PackedModel
from workers.engine.hf.packed_attention import PackedRows, packed_attention
from workers.engine.megatron.context import ContextSharding
from workers.engine.megatron.limits import check_model, overrides
from workers.engine.megatron.parallel import sizes_of
from workers.engine.megatron.weights import head_dim


@dataclass
class Packed(PackedSeqParams):
    """Per-micro-batch data that Megatron passes to every layer. cos, sin: (tokens of this rank, D)."""

    rows: PackedRows | None = None
    cut: ContextSharding | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None


class RMSNorm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019), computed in float32.

    Megatron's own norm refuses sequence parallelism without Transformer Engine.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined] # megatron sums its gradient over tp

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(hidden.dtype)


class PackedAttention(nn.Module):
    """Rotary embedding, as transformers computes it, and attention over packed rows.

    Megatron's own core attention refuses packed rows.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Packed,
        **_: Any,
    ) -> Tensor:
        """query (T, heads, D), key and value (T, kv heads, D) of this rank -> (T, heads, D)."""
        packed = packed_seq_params
        assert packed.cos is not None and packed.sin is not None and packed.rows is not None
        q, k = (rotate(x, packed.cos, packed.sin) for x in (query, key))
        if packed.cut is not None:
            return packed.cut.attention(q, k, value)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, value))
        return packed_attention(self, q, k, v, None, packed_rows=packed.rows)[0][0]


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021, eq. 34, halves paired as in transformers): states (T, heads, D), cos and sin (T, D)."""
    low, high = states.chunk(2, -1)
    return states * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]


class ValueHead(nn.Linear):
    """Linear H -> 1, replicated on every tensor-parallel rank. Initialised to zero, as in the FSDP engine."""

    def reset_parameters(self) -> None:
        for param in self.parameters():
            nn.init.zeros_(param)


class PackedGPT(GPTModel):
    """GPTModel that returns the last hidden states; the engine computes the head."""

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    def head_weight(self) -> Tensor:
        """Weight of the head on this rank: (V / tp, H), padded."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        assert isinstance(weight, Tensor)
        return weight


def transformer_config(hf: PretrainedConfig, config: MegatronConfig, *, recompute: bool) -> TransformerConfig:
    """Translate the configuration. Raises ValueError for an unsupported model (check_model) or an unknown Megatron field."""
    check_model(hf, config)
    heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads
    dtype = DTYPES[config.dtype]
    settings: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": heads,
        "num_query_groups": kv_heads,
        "kv_channels": head_dim(hf),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "qk_layernorm": hf.model_type == "qwen3",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf.model_type == "qwen2",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "sequence_parallel": config.sequence_parallel and config.tensor_model_parallel_size > 1,
        # Micro-batches differ in their number of tokens: stages send shapes first.
        "variable_seq_lengths": True,
        # The interleaved schedule sends in both directions at once. Batched messages wait for a neighbour that runs another
        # batch, and between two ranks, each of which is the other's previous and next, they do not identify which message is
        # which. Separate messages per direction do.
        "overlap_p2p_comm": config.virtual_pipeline_model_parallel_size is not None,
        "batch_p2p_comm": config.virtual_pipeline_model_parallel_size is None,
        "calculate_per_token_loss": True,  # losses are sums, and gradients are summed over ranks
        "moe_token_dispatcher_type": "alltoall",  # required with variable lengths
        # No initial values: Exchange.fill reads every parameter from files, and a value head starts at zero.
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    settings |= sizes_of(config)
    unknown = sorted(config.override_transformer_config.keys() - TransformerConfig.__dataclass_fields__.keys())
    if unknown:
        raise ValueError(f"megatron.override_transformer_config: TransformerConfig has no {', '.join(unknown)}")
    return TransformerConfig(**(settings | overrides(config, recompute=recompute)))


def build_chunks(config: TransformerConfig, shell: PackedModel) -> list[PackedGPT]:
    """This rank's part of the model, with uninitialised weights: one chunk, or one per virtual pipeline stage."""
    hf, head = shell.hf.config, shell.head
    embedding = shell.hf.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    chunks = []
    virtual = config.virtual_pipeline_model_parallel_size
    for stage in range(virtual or 1):
        vp_stage = stage if virtual else None
        chunk = PackedGPT(
            config=config,
            transformer_layer_spec=layer_spec(config, vp_stage),
            vocab_size=padded_vocab(hf.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=bool(hf.tie_word_embeddings) and head == "lm",
            position_embedding_type="none",  # PackedAttention applies the rotation
            vp_stage=vp_stage,
        )
        if chunk.post_process and head != "lm":
            # Instead of Megatron's output layer, which is split over the vocabulary.
            chunk.output_layer = ValueHead(hf.hidden_size, 1, shell.value_head.bias is not None, dtype=config.params_dtype)
        if chunk.pre_process and embedding.padding_idx is not None:
            freeze_padding(chunk.embedding.word_embeddings, embedding.padding_idx)
        mark_cut(chunk)
        chunks.append(chunk)
    return chunks


def freeze_padding(embedding: VocabParallelEmbedding, token: int) -> None:
    """Stop the gradient of the padding token's embedding, as transformers' embedding does for its padding_idx.

    The token gets no gradient from lookups; a tied head still contributes.
    """

    def hook(module: VocabParallelEmbedding, args: tuple[Tensor], embedded: Tensor) -> Tensor:
        ids = args[0]  # (1, T)
        if module.reduce_scatter_embeddings:  # embedded: (T of this rank, 1, H)
            ids = ids.T.chunk(module.tp_group.size())[module.tp_group.rank()]
        return torch.where((ids == token)[..., None], embedded.detach(), embedded)

    embedding.register_forward_hook(hook)


def mark_cut(chunk: nn.Module) -> None:
    """Mark parameters that are split over tensor-parallel ranks: the gradient norm counts them differently.

    Megatron sets the marks when it initialises weights, which is skipped here.
    """
    for module in chunk.modules():
        match module:
            case VocabParallelEmbedding() | ColumnParallelLinear():
                dim = 0
            case RowParallelLinear():
                dim = 1
            case _:
                continue
        if module.weight is not None:  # a tied head has none of its own
            set_tensor_model_parallel_attributes(module.weight, True, dim, 1)


def padded_vocab(size: int, tp: int) -> int:
    """Round the vocabulary up to a multiple of ``tp``, and no further."""
    return -(-size // tp) * tp


def layer_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Layers of Transformer Engine where it is installed, on CUDA in bfloat16; else Megatron's local ones with the RMSNorm above.

    Transformer Engine computes float32 products in TF32, so it is not used for float32. Core attention is PackedAttention in
    both. override_transformer_config.transformer_impl=local selects local layers.
    """
    if HAVE_TE and torch.cuda.is_available() and config.bf16 and config.transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        spec, norm = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm), TENorm
    else:
        spec, norm = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm"), RMSNorm
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
        if config.qk_layernorm:
            attention = spec.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = norm
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    n_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * n_layers, layer_norm=norm)
