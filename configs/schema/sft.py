"""Schema of `trainer.main_sft`. Defaults are in configs/sft_trainer.yaml; a test compares the keys."""

from dataclasses import dataclass

from configs.schema.supervised import SupervisedConfig, SupervisedDataConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class SFTDataConfig(SupervisedDataConfig):
    # If set, prompt_key and response_key are not used.
    messages_key: str | None
    prompt_key: str
    response_key: str


@dataclass(slots=True, kw_only=True, frozen=True)
class SFTConfig(SupervisedConfig):
    data: SFTDataConfig
