"""A worker and a loss with which one of two ranks fails on request."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.workers.engine.toy import ToyLoss
from workers.batch import Batch
from workers.controller.group import WorkerInfo
from workers.metric import Metric
from workers.roles.worker import Worker

NAP = 7.0
COLLECTIVE = 4.0
FAULT = "fault"


class FaultyLoss(ToyLoss):
    """meta["fault"]: the fault of rank 1 in an update."""

    def __init__(self, config: None) -> None:
        """Has no settings."""

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        fault = micro_batch.meta[FAULT] if dist.get_rank() == 1 else "none"
        if fault == "sleeps":
            time.sleep(NAP)
        elif fault != "none":
            os.kill(os.getpid(), signal.Signals[fault])
        return super().__call__(outputs, micro_batch)


class FaultyWorker(Worker):
    def __init__(self, info: WorkerInfo, *args: Any) -> None:
        super().__init__(info, *args)
        self.groups = [dist.new_group(timeout=timedelta(seconds=COLLECTIVE)) for _ in range(2)]

    def enter_alone(self) -> None:
        """A collective that rank 0 enters and rank 1 does not; each time in a new group, since a timed-out one cannot be used."""
        group = self.groups.pop()
        if self.info.rank == 0:
            dist.all_reduce(torch.zeros(1), group=group)
