"""Validate conversations with tools and environments; see configs/validation/programs.py."""

from collections.abc import Collection, Iterator

from configs.schema.agents import MultiTurnConfig
from configs.schema.ppo import PPOConfig
from configs.validation.rollout import ROLLOUT

KEY, AGENT = f"{ROLLOUT}.multi_turn", f"{ROLLOUT}.agent"

LOOPS = ("tool_agent", "single_turn_agent")


def _sources(turns: MultiTurnConfig) -> dict[str, str | None]:
    """Where the messages between the model's turns come from, by key."""
    return {
        "tool_config_path": turns.tool_config_path,
        "function_tool_path": turns.function_tool_path,
        "interaction_config_path": turns.interaction_config_path,
        "environment": turns.environment,
    }


def agent_problems(config: PPOConfig) -> Iterator[str]:
    """Problems of multi_turn and agent."""
    rollout = config.actor_rollout_ref.rollout
    turns, loop, program = rollout.multi_turn, rollout.agent.default_agent_loop, rollout.agent.program
    loops = rollout.agent.agent_loop_config_path
    sources = _sources(turns)
    if program is not None and ":" not in program:
        yield f"{AGENT}.program={program}: it must be FILE.py:FUNCTION"
    if loop is not None and loop not in LOOPS and ":" not in loop and loops is None:
        yield f"{AGENT}.default_agent_loop={loop}: no such loop; use {', '.join(LOOPS)}, or FILE.py:FUNCTION"
    if not turns.enable:
        for name, value in sources.items():
            if value is not None:
                yield f"{KEY}.{name}={value}: it is used with {KEY}.enable=true only; set it, or leave {name} out"
        if loop not in (None, "single_turn_agent"):
            yield f"{AGENT}.default_agent_loop={loop}: it is used with {KEY}.enable=true only; set it, or leave it out"
        if loops is not None:
            yield f"{AGENT}.agent_loop_config_path={loops}: it is used with {KEY}.enable=true only; set it, or leave it out"
        if program is not None:
            yield f"{AGENT}.program={program}: it is used with {KEY}.enable=true only; set it, or leave it out"
        return
    given = [name for name, value in sources.items() if value is not None]
    if program is not None and given:
        yield f"{AGENT}.program={program}: a program has its own tools and messages; leave {', '.join(given)} out"
    if program is not None and loop is not None:
        yield f"{AGENT}.program={program}: it is run in place of {AGENT}.default_agent_loop={loop}; leave one out"
    if program is not None and loops is not None:
        yield f"{AGENT}.program={program}: it is run in place of {AGENT}.agent_loop_config_path={loops}; leave one out"
    others = [name for name, value in sources.items() if value is not None and name != "environment"]
    if turns.environment is not None and others:
        own = "an environment has its own tools and messages"
        yield f"{KEY}.environment={turns.environment}: {own}; leave {', '.join(others)} out"


def agent_notes(config: PPOConfig, typed: Collection[str]) -> Iterator[str]:
    """Options of conversations that have no effect."""
    turns, agent = config.actor_rollout_ref.rollout.multi_turn, config.actor_rollout_ref.rollout.agent
    own = (agent.default_agent_loop, agent.agent_loop_config_path, agent.program)
    if turns.enable and not any((*own, *_sources(turns).values())):
        yield f"{KEY}.enable=true: there are neither tools nor an interaction or environment, so conversations have a single turn"
    if not turns.enable:
        unused = (key for key in sorted(typed) if key.startswith((f"{KEY}.", f"{AGENT}.")) and key != f"{KEY}.enable")
        yield from (f"{key} has no effect without {KEY}.enable=true" for key in unused)
