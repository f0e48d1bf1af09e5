"""When a run counts as sick, and what is done then."""

from dataclasses import dataclass
from typing import Literal

from configs.schema.common import NonNegative, NonNegativeFloat, Positive


@dataclass(slots=True, kw_only=True, frozen=True)
class AlarmConfig:
    action: Literal["off", "warn", "stop", "rollback"]
    bound: NonNegativeFloat | None
    patience: Positive


@dataclass(slots=True, kw_only=True, frozen=True)
class AlarmsConfig:
    """What each measures: trainer/alarms.py."""

    max_rollbacks: NonNegative
    nonfinite: AlarmConfig
    reward: AlarmConfig
    entropy: AlarmConfig
    policy_kl: AlarmConfig
    ref_kl: AlarmConfig
    mismatch: AlarmConfig
    grad_norm: AlarmConfig
    length: AlarmConfig
    clip_ratio: AlarmConfig
    failed_rewards: AlarmConfig
    zero_signal: AlarmConfig
    no_learning: AlarmConfig
    validation: AlarmConfig
    truncated: AlarmConfig
    end_token: AlarmConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class SFTAlarmsConfig:
    nonfinite: AlarmConfig
