"""Schema of reward models."""

from dataclasses import dataclass
from typing import Any, Literal

from configs.schema.common import MicroBatching, Positive, ShardedConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class ReadingModelConfig(ShardedConfig):
    """Location of a reward model, its input format, and the size of its micro-batches."""

    path: str | None
    tokenizer_path: str | None
    chat_template: str | None
    apply_chat_template_kwargs: dict[str, Any]
    max_length: Positive | None
    truncation: Literal["fail", "left", "right"]
    trust_remote_code: bool
    override_config: dict[str, Any]
    forward_micro_batch_size: Positive | None
    forward_micro_batch_size_per_gpu: Positive | None
    use_dynamic_bsz: bool
    forward_max_token_len_per_gpu: Positive

    @property
    def micro_batching(self) -> MicroBatching:
        return MicroBatching(
            self.forward_micro_batch_size_per_gpu,
            self.forward_micro_batch_size,
            self.use_dynamic_bsz,
            self.forward_max_token_len_per_gpu,
        )


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
