"""What goes wrong in a job of Lightning: ``lightning_faults.py FOLDER trainer|fabric FAULT``, a script of two ranks.

Faults: ``raise`` and ``hang``, on rank 1 in its third batch.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from legacy_ddp import Checks, LostPeerError
from legacy_ddp.lightning import LegacyDDPFabricStrategy, LegacyDDPStrategy
from tests.helpers.fabric_jobs import start
from tests.helpers.lightning_jobs import Plain, fit

TIMEOUT_SECONDS = 6.0  # long enough for ranks that start on a busy machine


def happen(rank: int, batch_idx: int) -> None:
    if (rank, batch_idx) != (1, 2):
        return
    if fault == "raise":
        raise ValueError("planted on rank 1")
    threading.Event().wait()


class Faulty(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        happen(self.global_rank, batch_idx)
        return super().training_step(batch)


def by_fabric(options: dict[str, Any]) -> None:
    fabric = start(LegacyDDPFabricStrategy(**options))
    model = fabric.setup(torch.nn.Linear(2, 1))
    for batch_idx in range(5):
        happen(fabric.global_rank, batch_idx)
        fabric.backward(model(torch.ones(1, 2)).sum())


if __name__ == "__main__":
    folder, framework, fault = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    (folder / f"pid-{os.environ.get('LOCAL_RANK', '0')}").write_text(str(os.getpid()))
    options = {"timeout_seconds": TIMEOUT_SECONDS, "checks": Checks(report_dir=folder)}
    try:
        if framework == "trainer":
            fit(LegacyDDPStrategy(**options), Faulty(), batches=5)
        else:
            by_fabric(options)
    except LostPeerError as error:  # as by somebody who ends the run in a logger first
        sys.exit(f"{type(error).__name__}: {error}")
