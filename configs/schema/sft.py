"""The typed tree of `trainer.main_sft`. The YAML twin is configs/sft_trainer.yaml; a test holds the two equal."""

from dataclasses import dataclass

from configs.schema.supervised import SupervisedConfig, SupervisedDataConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class SFTDataConfig(SupervisedDataConfig):
    messages_key: str | None
    prompt_key: str
    response_key: str


@dataclass(slots=True, kw_only=True, frozen=True)
class SFTConfig(SupervisedConfig):
    data: SFTDataConfig
