"""Schema of `trainer.main_export`. Defaults are in configs/export.yaml; a test compares the keys."""

from dataclasses import dataclass
from typing import Literal

from configs.schema.common import ProgramConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class ExportConfig:
    # Not validated against known names: the roles are those of the checkpoint, which trainer.main_export reads first.
    checkpoint: str
    output: str
    trust_remote_code: bool
    merge: bool
    role: str | None
    which: Literal["trained", "ema"]
    trainer: ProgramConfig
