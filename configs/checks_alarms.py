"""Alarms that cannot do what they are asked to do."""

from collections.abc import Collection, Iterator
from dataclasses import asdict

from configs.schema.alarms import SFTAlarmsConfig
from configs.schema.ppo import PPOConfig


def alarm_problems(config: PPOConfig) -> Iterator[str]:
    for name, alarm in asdict(config.alarms).items():
        if name != "max_rollbacks" and alarm["action"] == "rollback" and config.trainer.save_freq <= 0:
            yield f"alarms.{name}.action=rollback: without trainer.save_freq there is nothing to go back to; set it, or take stop"


def alarm_notes(config: PPOConfig, typed: Collection[str]) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    if any(key.startswith("alarms.entropy.") for key in typed) and not actor.calculate_entropy and not actor.entropy_coeff:
        yield "alarms.entropy has no effect: actor/entropy is not measured; set actor_rollout_ref.actor.calculate_entropy=true"


def sft_alarm_problems(alarms: SFTAlarmsConfig) -> Iterator[str]:
    if alarms.nonfinite.action == "rollback":
        yield "alarms.nonfinite.action=rollback: supervised training does not go back; stop, and resume with other settings"
