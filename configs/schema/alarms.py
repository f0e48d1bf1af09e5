"""Schema of training-health alarms: bounds, and the action when an alarm fires."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from configs.schema.common import Checked, NonNegative, NonNegativeFloat, Positive


@dataclass(slots=True, kw_only=True, frozen=True)
class AlarmConfig:
    """An alarm fires after its metric was beyond ``bound`` for ``patience`` consecutive steps."""

    action: Literal["off", "warn", "stop", "rollback"]
    bound: NonNegativeFloat | None  # None disables the alarm; the sign of the comparison belongs to the alarm
    patience: Positive


@dataclass(slots=True, kw_only=True, frozen=True)
class AlarmsConfig:
    """The alarms of a PPO run; trainer/resilience/alarms.py defines what each of them measures."""

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
    staleness: AlarmConfig
    idle: AlarmConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class SFTAlarmsConfig(Checked):
    """The alarms of supervised training, which has neither rewards nor a policy to monitor."""

    nonfinite: AlarmConfig

    def problems(self) -> Iterator[str]:
        if self.nonfinite.action == "rollback":
            yield (
                "alarms.nonfinite.action=rollback: supervised training has no rollback; use action=stop, and resume with other "
                "settings"
            )
