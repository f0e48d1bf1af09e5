"""Validate configurations of trainer.main_parity; see configs/validation/programs.py."""

from collections.abc import Collection
from typing import get_args, get_type_hints

from configs.base.keys import ConfigError, did_you_mean
from configs.schema.parity import ParityConfig
from configs.schema.ppo import RolloutEngineConfig
from configs.validation.batches import longest_in_words
from configs.validation.megatron import megatron_notes, megatron_problems
from configs.validation.model import lora_problems, lora_sync_problems
from configs.validation.parallel import parallel_notes, parallel_problems
from configs.validation.programs import ROLLOUT, engine_notes, engine_problems, worker_problems


def check_parity(config: ParityConfig, typed: Collection[str]) -> list[str]:
    """Validate a parity configuration; see configs.validation.programs.check_ppo."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    roles = {"actor_rollout_ref.actor": config.actor_rollout_ref.actor}
    known = get_args(get_type_hints(RolloutEngineConfig)["name"])
    problems = [
        *worker_problems(config.trainer),
        *parallel_problems(roles, config.trainer),
        *megatron_problems(roles, config.trainer),
        *lora_problems({"actor_rollout_ref.model": (config.actor_rollout_ref.model, config.actor_rollout_ref.actor)}),
    ]
    if rollout.max_model_len is not None and rollout.max_model_len < data.max_prompt_length + data.max_response_length:
        less = f"less than {longest_in_words(data.max_prompt_length, data.max_response_length)}; increase it, or use null"
        problems.append(f"{ROLLOUT}.max_model_len={rollout.max_model_len}: {less}")
    if f"{ROLLOUT}.name" in typed:
        problems.append(f"{ROLLOUT}.name={rollout.name}: the engines are selected by engines=[{rollout.name}]; remove the key")
    if "model" in typed and "actor_rollout_ref.model.path" in typed:
        problems.append("model and actor_rollout_ref.model.path are the same key: set only one of them")
    if not config.engines or len(set(config.engines)) < len(config.engines):
        problems.append(f"engines=[{','.join(config.engines)}]: must list at least one engine, and none twice")
    unknown = [name for name in config.engines if name not in known]
    problems += [f"engines: {name}: unknown engine; known: {', '.join(known)}{did_you_mean(name, known)}" for name in unknown]
    notes = [*parallel_notes(roles), *megatron_notes(roles)]
    for name in config.engines:
        if name in known:
            # Each engine is checked as if it were the only one; its own notes would only repeat with several engines.
            own = config.actor_rollout_ref.rollout_of(name)
            problems += engine_problems(own, config.trainer, {"temperature": rollout.temperature})
            problems += lora_sync_problems(config.actor_rollout_ref.model, own)
            notes += engine_notes(own, typed) if len(config.engines) == 1 else []
    if problems:
        raise ConfigError("\n".join(problems))
    if rollout.do_sample and rollout.temperature == 1.0:
        notes.append(f"{ROLLOUT}.temperature=1: an engine that ignores the temperature is not detected; use for example 0.8")
    if rollout.do_sample and (rollout.top_k != -1 or rollout.top_p != 1.0):
        notes.append(f"bounds.draw_z has no effect: {ROLLOUT}.top_k or top_p truncate the distribution")
    return notes
