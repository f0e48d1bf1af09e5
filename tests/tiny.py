"""Tiny models made on the spot: real transformers architectures, random weights."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

ARCHITECTURES: dict[str, type[PretrainedConfig]] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}


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
    if architecture == "qwen3":
        sizes["head_dim"] = 8
    return ARCHITECTURES[architecture](**(sizes | changes))


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
