"""Inputs of the rows: models with random weights in real shapes, a byte tokenizer, prompts and a reward. Nothing from a hub.

python -m scripts.gpu.make DIR 7b 1.5b-reward moe       # each into a directory of DIR; on the GPU where there is one
python -m scripts.gpu.make DIR 72b-plan                 # the files of a model without its weights: enough for a dry run
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging

from data_preprocess.tiny_model import character_tokenizer
from data_preprocess.writer import rl_row, write
from scripts.bench.shapes import SHAPES

LONGEST = 32768
REWARD = '''"""A rule that scores random responses differently."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7 / 7
'''
MIXTURES: dict[str, dict[str, Any]] = {
    "moe": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
            "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1024, "intermediate_size": 1024,
            "norm_topk_prob": True, "vocab_size": 151936, "tie_word_embeddings": True},
    "tiny-moe": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                 "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64,
                 "norm_topk_prob": True, "vocab_size": 320, "tie_word_embeddings": True},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", metavar="SHAPE[-reward][-plan]")
    args = parser.parse_args()
    logging.disable_progress_bar()
    make_data(args.folder / "data")
    for name in args.models:
        make_model(args.folder / name, name)


def shape_config(shape: str) -> PretrainedConfig:
    """shape: of scripts/bench/shapes.py, of MIXTURES, or one of the former with the number of its layers behind it: 72b-2."""
    common = {"max_position_embeddings": LONGEST, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    if shape in MIXTURES:
        return Qwen3MoeConfig(**common, **MIXTURES[shape])
    name, _, layers = shape.partition("-")
    sizes = SHAPES[name] | ({"num_hidden_layers": int(layers)} if layers else {})
    return Qwen2Config(**common, **sizes)


def make_model(folder: Path, name: str) -> None:
    """A directory for AutoModel in bfloat16 (on a CPU in float32), unless it is there; it gets its name when it is whole."""
    if folder.exists():
        return
    began = time.perf_counter()
    shape, is_plan = name.removesuffix("-plan"), name.endswith("-plan")
    is_reward = shape.endswith("-reward")
    config = shape_config(shape.removesuffix("-reward"))
    if is_reward:
        config.num_labels = 1
    kind = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    torch.manual_seed(0)
    with torch.device("meta" if is_plan else device):
        model = kind.from_config(config, dtype=torch.bfloat16 if is_plan else dtype)
    partial = folder.with_name(f".{folder.name}.partial")
    if is_plan:
        save_plan(partial, model)
    else:
        with torch.no_grad():
            for weight, parameter in model.named_parameters():
                if weight.endswith("bias"):
                    parameter.normal_(0.0, 0.1)
        model.save_pretrained(partial, max_shard_size="4GB")
    character_tokenizer(None).save_pretrained(partial)
    partial.rename(folder)
    parameters, seconds = sum(parameter.numel() for parameter in model.parameters()), time.perf_counter() - began
    print(f"{folder}: {parameters / 1e9:.3g} billion parameters in {seconds:.1f} s", file=sys.stderr)


def save_plan(folder: Path, model: PreTrainedModel) -> None:
    """The configuration, and a file of weights that is as long as it says and takes no room on the disk."""
    model.config.save_pretrained(folder)
    header, end = {}, 0
    for name, parameter in model.named_parameters():
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [end, end + 2 * parameter.numel()]}
        end += 2 * parameter.numel()
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def make_data(folder: Path) -> None:
    """prompts.parquet, of 120 to 460 bytes; long.parquet, of 30,000 to 32,000; short.parquet, of at most 60; reward.py."""
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    with redirect_stdout(sys.stderr):
        for name, least, most in (("prompts", 120, 460), ("long", 30000, 32000), ("short", 20, 60)):
            if not (folder / f"{name}.parquet").exists():
                count = 32 if name == "long" else 512
                write([problem(draw, index, draw.randint(least, most)) for index in range(count)], str(folder), name)


def problem(draw: random.Random, index: int, length: int) -> dict[str, Any]:
    """A question about sums of ``length`` bytes."""
    text, total = f"{index}:", 0
    while len(text) < length:
        number = draw.randint(2, 999)
        text, total = f"{text} Ann buys {number} eggs.", total + number
    return rl_row(data_source="gpu", prompt=text[:length], ability="math", ground_truth=str(total), split="train", index=index)


if __name__ == "__main__":
    main()
