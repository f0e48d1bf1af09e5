"""Rollout engines, by name."""

from workers.rollout.base import Rollout, RolloutSpec

ENGINES = ("embedded",)


def make_rollout(spec: RolloutSpec) -> Rollout:
    """The engine ``spec.rollout.name``. Raises ValueError for a name that is none."""
    match spec.rollout.name:
        case "embedded":
            from workers.rollout.embedded import EmbeddedRollout

            return EmbeddedRollout(spec)
    raise ValueError(f"actor_rollout_ref.rollout.name={spec.rollout.name}: no such engine; known: {', '.join(ENGINES)}")
