"""Which models Megatron supports and how it can split them. Does not import megatron-core: checked before workers start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig

from configs.schema.common import MegatronConfig
from configs.validation.megatron import LEFT_OUT

FAMILIES = ("llama", "qwen2", "qwen3")
OWN_STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
WHOLE_LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def check_model(hf: PretrainedConfig, config: MegatronConfig) -> None:
    """Raise ValueError listing everything in the model that Megatron, or this engine's table of weights, does not support."""
    if hf.model_type not in FAMILIES:
        raise ValueError(f"strategy=megatron knows {', '.join(FAMILIES)}, not {hf.model_type}; strategy=fsdp takes the model")
    if problems := [*_unsupported(hf.to_dict()), *_undivided(hf, config)]:
        raise ValueError("; ".join(problems))


def overrides(config: MegatronConfig, *, recompute: bool) -> dict[str, Any]:
    """Fields of TransformerConfig that the configuration sets; null leaves a field unset.

    recompute: recompute complete layers, unless the fields select something else.
    """
    asked = config.override_transformer_config
    given = {name: value for name, value in asked.items() if value is not None and name not in LEFT_OUT}
    return WHOLE_LAYERS | given if recompute and "recompute_granularity" not in given else given


def _unsupported(hf: dict[str, Any]) -> Iterator[str]:
    """Yield features of the model's config.json (``hf``) that the engine's layers do not have."""
    takes = "; strategy=fsdp takes the model"
    if "sliding_attention" in (hf.get("layer_types") or ()):
        yield f"strategy=megatron attends to whole rows, and the model has sliding_window={hf['sliding_window']}{takes}"
    if hf["hidden_act"] != "silu":
        yield f"strategy=megatron has the activation silu, and the model hidden_act={hf['hidden_act']}{takes}"
    for name in ("attention_bias", "mlp_bias"):
        if hf.get(name):
            yield f"strategy=megatron has biases where qwen2 has them alone, and the model has {name}=true{takes}"


def _undivided(hf: PretrainedConfig, config: MegatronConfig) -> Iterator[str]:
    """Yield sizes of the model that the parallel sizes do not divide."""
    size = config.tensor_model_parallel_size
    whole = {
        "num_attention_heads": hf.num_attention_heads,
        # A rank holds complete kv heads, see weights.HeadGroups.
        "num_key_value_heads": hf.num_key_value_heads,
        "intermediate_size": hf.intermediate_size,
    }
    if undivided := [f"{name}={count}" for name, count in whole.items() if count % size]:
        fit = ", ".join(str(less) for less in range(1, size) if not any(count % less for count in whole.values()))
        yield f"megatron.tensor_model_parallel_size={size} does not divide the model's {', '.join(undivided)}; {fit} would"
    yield from _layers(hf.num_hidden_layers, config)


def _layers(layers: int, config: MegatronConfig) -> Iterator[str]:
    """Yield an error if the layers do not fit the pipeline stages.

    The first and the last stage may have their own numbers of layers. The other stages have equal numbers, in equal virtual
    parts.
    """
    stages, parts = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    given = {name: config.override_transformer_config.get(name) for name in OWN_STAGES}
    own = {name: count for name, count in given.items() if count is not None}
    rest, others = layers - sum(own.values()), stages - len(own)
    whole = rest == 0 if others == 0 else others > 0 < rest and rest % (others * parts) == 0
    if not whole or any(count < 1 or count % parts for count in own.values()):
        taken = "".join(f", {name}={count}" for name, count in own.items())
        yield (
            f"the model's num_hidden_layers={layers} do not fall into megatron.pipeline_model_parallel_size={stages} stages of "
            f"megatron.virtual_pipeline_model_parallel_size={parts} equal parts{taken}; take sizes that divide the layers"
        )
