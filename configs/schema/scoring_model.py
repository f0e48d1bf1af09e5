"""Schema of reward models."""

from dataclasses import dataclass
from typing import Any, Literal

from configs.schema.common import ForwardSizes, Positive, ShardedConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class ReadingModelConfig(ShardedConfig, ForwardSizes):
    """Location of a reward model, its input format, and the size of its micro-batches."""

    path: str | None
    tokenizer_path: str | None
    chat_template: str | None
    apply_chat_template_kwargs: dict[str, Any]
    max_length: Positive | None
    truncation: Literal["fail", "left", "right"]
    trust_remote_code: bool
    override_config: dict[str, Any]


@dataclass(slots=True, kw_only=True, frozen=True)
class ScoringModelConfig(ReadingModelConfig):
    """A reward model of a run: an entry of reward.models merged over reward.reward_model."""

    urls: list[str]
    weight: float
    kind: Literal["sequence", "token"]
    normalize: Literal["running", "stored"] | None
    clip: tuple[float, float] | None


@dataclass(slots=True, kw_only=True, frozen=True)
class ScoringModelDefaults(ScoringModelConfig):
    """The block reward.reward_model: defaults of all entries, and a reward model itself if enabled."""

    enable: bool
