"""One short training after the other, whoever starts the ranks: ``lightning_starts.py FOLDER trainer=STRATEGY ...``."""

import atexit
import os
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric

from tests.helpers.fabric_jobs import make_net, state, train
from tests.helpers.lightning_jobs import accumulating as by_trainer
from tests.helpers.lightning_scenarios import RANKS


def train_by_fabric(fabric: Fabric, path: Path) -> None:
    """What a user gives to ``fabric.launch``: it runs on every rank."""
    model, _ = train(fabric, make_net(), window=3)
    if fabric.is_global_zero:
        torch.save(state(model), path)


if __name__ == "__main__":
    # Registered first, so it runs last: after what the strategies have left to do at exit.
    atexit.register(lambda: print("process group at exit:", torch.distributed.is_initialized()))
    folder = Path(sys.argv[1])
    for argument in sys.argv[2:]:
        framework, name = argument.split("=")
        path = folder / f"{framework}-{name}.pt"
        if framework == "fabric":
            Fabric(accelerator="cpu", devices=RANKS, strategy=name).launch(train_by_fabric, path)
            continue
        weights = by_trainer(name, folder)["state"]
        if os.environ.get("SLURM_PROCID", "0") == "0":  # rank 0, or who started all ranks and gets its weights back
            torch.save(weights, path)
