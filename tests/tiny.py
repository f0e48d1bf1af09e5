"""Tiny models made by tests: real transformers architectures, random weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from configs.schema.common import FSDPConfig, TiledMLPConfig, TokenizedModelConfig

ARCHITECTURES: dict[str, type[PretrainedConfig]] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
MIXTURES: dict[str, type[PretrainedConfig]] = {"qwen3_moe": Qwen3MoeConfig}


def tiny_config(architecture: str = "qwen2", **changes: object) -> PretrainedConfig:
    sizes: dict[str, object] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 61,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if architecture in ("qwen3", "qwen3_moe"):
        sizes["head_dim"] = 8
    if architecture in MIXTURES:
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return (ARCHITECTURES | MIXTURES)[architecture](**(sizes | changes))


def save_tiny_model(
    path: Path, architecture: str = "qwen2", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object
) -> str:
    """A model directory without tokenizer. Weights are scaled up, so that the distribution over tokens is not flat."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture, **changes), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.1)
            elif "norm" not in name:
                parameter.normal_(0.0, 0.05)
    model.to(dtype).save_pretrained(path)
    return str(path)


def model_config(path: str, **changes: Any) -> TokenizedModelConfig:
    """Configuration of the model at ``path``: all parameters trained, nothing recomputed."""
    fields: dict[str, Any] = {
        "tokenizer_path": None,
        "custom_chat_template": None,
        "trust_remote_code": False,
        "enable_gradient_checkpointing": False,
        "enable_activation_offload": False,
        "tiled_mlp": TiledMLPConfig(enabled=False, num_shards=4),
        "override_config": {},
        "lora_rank": 0,
        "lora_alpha": 16.0,
        "target_modules": "all-linear",
        "lora_adapter_path": None,
        "router_aux_loss_coef": 0.0,
    }
    return TokenizedModelConfig(path=path, **(fields | changes))


def fsdp_config(dtype: str = "float32", **changes: Any) -> FSDPConfig:
    """Sharded over all ranks, everything on the device."""
    fields: dict[str, Any] = {
        "model_dtype": dtype,
        "dtype": dtype,
        "reshard_after_forward": True,
        "use_no_sync_for_gradient_accumulation": False,
        "use_torch_compile": False,
        "param_offload": False,
        "optimizer_offload": False,
        "fsdp_size": -1,
        "ulysses_sequence_parallel_size": 1,
    }
    return FSDPConfig(**(fields | changes))
