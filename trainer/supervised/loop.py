"""The supervised loop, on the engine, the plan and the logs that PPO uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from configs.checks import world_size
from configs.schema.sft import SFTConfig
from trainer.algorithms.weights import token_weights
from trainer.checkpoint import Checkpoint, CheckpointWriter
from trainer.data.order import DataOrder
from trainer.data.sft import SFTDataset
from trainer.determinism import KernelWatch
from trainer.metrics import Phases
from trainer.remote import RemoteModel
from trainer.tracking import Tracker
from workers.batch import Batch
from workers.metric import Metrics, plain_numbers


@dataclass
class SupervisedLoop:
    """Built by assemble.py; ``fit`` runs it."""

    config: SFTConfig
    run_dir: Path
    data: SFTDataset
    held_out: SFTDataset | None
    order: DataOrder
    model: RemoteModel
    tracker: Tracker
    phases: Phases
    kernels: KernelWatch | None
    resume: Checkpoint | None
    total_steps: int
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def fit(self) -> None:
        if self.resume is not None:
            self.model.load(str(self.resume.role("model")))
            self.step = self.resume.step
        for step, batch in self.remaining_steps():
            with self.phases("step"):
                weights = token_weights("token-mean", batch.tokens["response_mask"], batch.lengths, norm_length=1)
                metrics = self.model.train_step(batch.with_tokens(loss_weight=weights), columns=())
            self.after(step, batch, metrics)

    def remaining_steps(self) -> Iterator[tuple[int, Batch]]:
        """Steps count from 1; which rows a step sees is a function of the step alone."""
        for step in range(self.step + 1, self.total_steps + 1):
            self.phases.seconds.clear()
            batch = self.data.batch(self.order.batch(step - 1))
            yield step, batch.with_meta({"temperature": 1.0})

    def after(self, step: int, batch: Batch, metrics: Metrics) -> None:
        """Validate, log, and save: a checkpoint's step is always in the log already."""
        config, is_last = self.config.trainer, step == self.total_steps
        values = {name if "/" in name else f"train/{name}": value for name, value in plain_numbers(metrics).items()}
        values["training/epoch"] = (step - 1) // self.order.steps_per_epoch
        if self.held_out is not None and config.test_freq > 0 and (is_last or step % config.test_freq == 0):
            with self.phases("testing"):
                values["val/loss"] = self.validation_loss()
        seconds = self.phases.seconds
        values |= {f"timing_s/{phase}": spent for phase, spent in seconds.items()}
        values["perf/throughput"] = batch.total_tokens / (seconds["step"] * world_size(config))
        if self.kernels is not None:
            self.kernels.look(step)
        self.tracker.log(values, step)
        if config.save_freq > 0 and (is_last or step % config.save_freq == 0):
            self.save(step)

    def validation_loss(self) -> float:
        """Mean cross-entropy of the answers' tokens over all held-out rows."""
        assert self.held_out is not None
        batch = self.held_out.batch(range(len(self.held_out))).with_meta({"temperature": 1.0})
        log_probs = self.model.forward(batch, ["log_probs"]).tokens["log_probs"].double()
        return float(-log_probs.sum() / batch.tokens["response_mask"].sum())

    def save(self, step: int) -> None:
        config = self.config.trainer
        writer = CheckpointWriter(
            self.run_dir,
            step,
            config=asdict(self.config),
            state={},
            world_size=world_size(config),
            keep={"model": config.max_ckpt_to_keep},
        )
        with self.phases("save_checkpoint"), writer as folder:
            self.model.save(str(folder / "model"))
