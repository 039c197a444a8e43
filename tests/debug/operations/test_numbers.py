"""An operation has one number, in the texts of every comparison."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from legacy_ddp.debug import Recorder, cross_check
from tests.helpers.command import command
from tests.helpers.cross_faults import KERNELS, BackwardDouble, Double, Net, batch_of, flip, loss_of
from tests.helpers.ranks import run_ranks
from tests.helpers.recorded import Recorded

FAULTY_RANK = 1


def _prepared(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss whose batch needs an operation before the forward pass."""
    return loss_of(model, {**batch, "inputs": batch["inputs"] * 0.5})


# A wrong kernel in a forward pass behind such an operation, and in a backward pass without it.
KINDS = {"forward": (Double, _prepared), "backward": (BackwardDouble, loss_of)}


def _record(model: nn.Module, folder: Path, rank: int, run: Any) -> None:
    with Recorder(model, folder, operations=[1]):
        run(model, batch_of(rank)).backward()
        model.all_reduce()
        model.zero_grad()


def _compared(rank: int, folder: Path) -> dict[str, str]:
    """For a kernel of each stage two recorded runs, in the second a wrong kernel on one rank, and the text of a
    cross-check with this kernel."""
    found = {}
    for stage, (module, run) in KINDS.items():
        model = LegacyDistributedDataParallel(Net(module()))
        _record(model, folder / stage / "good", rank, run)
        with KERNELS.replaced(lambda tensor: flip(tensor * 2) if rank == FAULTY_RANK else tensor * 2):
            _record(model, folder / stage / "bad", rank, run)
            found[stage] = " ".join(str(cross_check(model, run, batch_of(rank))).split())
    return found


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("numbers")
    return folder, run_ranks(_compared, 2, folder)[0]


@pytest.mark.parametrize("stage", KINDS)
def test_diff_and_cross_check_number_an_operation_alike(job: tuple[Path, dict[str, str]], stage: str) -> None:
    folder, told = job
    text = " ".join(command("diff", folder / stage / "good", folder / stage / "bad").stdout.split())

    operations = Recorded(folder / stage / "good", FAULTY_RANK).operations[1]
    place = (stage, "middle", "cross_faults::double")
    number = 1 + [(item.stage, item.module, item.name) for item in operations].index(place)
    where = f"{stage} of middle (cross_faults::double): inputs agree, output differs"
    assert f"on rank {FAULTY_RANK}: {len(operations)}, the first that differs: {where} (operation {number})" in text
    assert f"where: {where}, operation {number} of {len(operations)};" in told[stage]
