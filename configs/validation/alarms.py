"""Validate the actions of training-health alarms."""

from collections.abc import Iterator
from dataclasses import asdict

from configs.schema.alarms import SFTAlarmsConfig
from configs.schema.ppo import PPOConfig


def alarm_problems(config: PPOConfig) -> Iterator[str]:
    """Problems of the `alarms` block of PPO: rollbacks that have no checkpoint to restore."""
    for name, alarm in asdict(config.alarms).items():
        if name != "max_rollbacks" and alarm["action"] == "rollback" and config.trainer.save_freq <= 0:
            yield f"alarms.{name}.action=rollback: no checkpoint to restore; set trainer.save_freq, or use action=stop"
    if config.alarms.end_token.action == "rollback":
        yield (
            "alarms.end_token.action=rollback: checked before the first step, when there is no checkpoint to restore; use "
            "action=stop"
        )


def sft_alarm_problems(alarms: SFTAlarmsConfig) -> Iterator[str]:
    """Problems of the `alarms` block of supervised training."""
    if alarms.nonfinite.action == "rollback":
        yield (
            "alarms.nonfinite.action=rollback: supervised training has no rollback; use action=stop, and resume with other "
            "settings"
        )
