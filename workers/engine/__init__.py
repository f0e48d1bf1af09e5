"""Training engines."""

from workers.engine.base import EngineSpec, TrainEngine


def make_engine(spec: EngineSpec) -> TrainEngine:
    """The engine that ``spec.strategy`` names. Collective: torch.distributed is up and every rank calls."""
    match spec.strategy:
        case "fsdp":
            from workers.engine.fsdp.engine import FSDPEngine

            return FSDPEngine(spec)
        case "megatron":
            from workers.engine.megatron.engine import MegatronEngine

            return MegatronEngine(spec)
