"""Alarms that cannot do what they are asked to do."""

from collections.abc import Iterator
from dataclasses import asdict

from configs.schema.alarms import SFTAlarmsConfig
from configs.schema.ppo import PPOConfig


def alarm_problems(config: PPOConfig) -> Iterator[str]:
    for name, alarm in asdict(config.alarms).items():
        if name != "max_rollbacks" and alarm["action"] == "rollback" and config.trainer.save_freq <= 0:
            yield f"alarms.{name}.action=rollback: without trainer.save_freq there is nothing to go back to; set it, or take stop"
    if config.alarms.end_token.action == "rollback":
        yield "alarms.end_token.action=rollback: it is looked at before the first step, where nothing is to go back to; take stop"


def sft_alarm_problems(alarms: SFTAlarmsConfig) -> Iterator[str]:
    if alarms.nonfinite.action == "rollback":
        yield "alarms.nonfinite.action=rollback: supervised training does not go back; stop, and resume with other settings"
