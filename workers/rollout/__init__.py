"""Rollout engines, by name."""

from importlib.util import find_spec

from workers.controller.group import WorkerInfo
from workers.rollout.base import Rollout, RolloutSpec

ENGINES = ("embedded", "vllm")


def check_installed(engine: str) -> None:
    """Raises ValueError, which says what to run, if the engine's package is not there."""
    if engine == "vllm" and find_spec("vllm") is None:
        raise ValueError(
            "actor_rollout_ref.rollout.name=vllm: vLLM is not installed here; "
            "run scripts/install_engine.sh vllm cpu, or on a machine with a GPU scripts/install_engine.sh vllm cuda"
        )


def make_rollout(spec: RolloutSpec, place: WorkerInfo) -> Rollout:
    """The engine ``spec.rollout.name``, on this rank. Raises ValueError for a name that is none, or one that is not installed."""
    check_installed(spec.rollout.name)
    match spec.rollout.name:
        case "embedded":
            from workers.rollout.embedded import EmbeddedRollout

            return EmbeddedRollout(spec)
        case "vllm":
            from workers.rollout.vllm import VLLMRollout

            return VLLMRollout(spec, place)
    raise ValueError(f"actor_rollout_ref.rollout.name={spec.rollout.name}: no such engine; known: {', '.join(ENGINES)}")
