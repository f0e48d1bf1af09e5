"""Training engines."""

from configs.schema.common import FSDPConfig, MegatronConfig
from workers.engine.base import EngineSpec, TrainEngine


def make_engine(spec: EngineSpec) -> TrainEngine:
    """The engine that ``spec.sharding`` is of. Collective: torch.distributed is up and every rank calls."""
    match spec.sharding:
        case FSDPConfig():
            from workers.engine.fsdp.engine import FSDPEngine

            return FSDPEngine(spec, spec.sharding)
        case MegatronConfig():
            from workers.engine.megatron.engine import MegatronEngine

            return MegatronEngine(spec, spec.sharding)
