"""LoRA (Hu et al. 2021): a product of two thin matrices beside a frozen one, by peft."""

from __future__ import annotations

from pathlib import Path

from peft import LoraConfig

from configs.schema.common import ModelConfig


def adapter_config(model: ModelConfig) -> LoraConfig | None:
    """What the model's adapter is; None: it has none. Of ``lora_adapter_path``, what is written there.

    Raises FileNotFoundError if there is no adapter at that path.
    """
    if model.lora_adapter_path is not None:
        path = Path(model.lora_adapter_path).expanduser()
        if not (path / "adapter_config.json").is_file():
            raise FileNotFoundError(
                f"model.lora_adapter_path {path}: no adapter_config.json there (expected a directory of peft's)"
            )
        found = LoraConfig.from_pretrained(str(path))
        assert isinstance(found, LoraConfig)
        return found
    if not model.lora_rank:
        return None
    return LoraConfig(r=model.lora_rank, lora_alpha=model.lora_alpha, target_modules=model.target_modules)  # type: ignore[arg-type]
