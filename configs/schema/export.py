"""The typed tree of `trainer.main_export`. The YAML twin is configs/export.yaml; a test holds the two equal."""

from dataclasses import dataclass

from configs.schema.common import ProgramConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class ExportConfig:
    checkpoint: str
    output: str
    trust_remote_code: bool
    merge: bool
    role: str | None
    trainer: ProgramConfig
