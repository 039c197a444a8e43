"""An operation has one number, in the texts of every comparison."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel
from legacy_ddp.debug import Recorder, cross_check
from tests.helpers.command import command, compare
from tests.helpers.cross_faults import KERNELS, BackwardDouble, Double, Net, batch_of, flip, loss_of
from tests.helpers.ranks import run_ranks
from tests.helpers.recorded import Recorded

FAULTY_RANK = 1


def _prepared(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss whose batch needs an operation before the forward pass."""
    return loss_of(model, {**batch, "inputs": batch["inputs"] * 0.5})


# A wrong kernel in a forward pass behind such an operation, and in a backward pass without it.
KINDS = {"forward": (Double, _prepared), "backward": (BackwardDouble, loss_of)}


def _record(model: nn.Module, folder: Path, rank: int, run: Any = _prepared, *, micro_batches: int = 1) -> None:
    with Recorder(model, folder, operations=[1]):
        for _ in range(micro_batches):
            run(model, batch_of(rank)).backward()
        model.all_reduce()
        model.zero_grad()


def _compared(rank: int, folder: Path) -> dict[str, str]:
    """For a kernel of each stage two recorded runs, in the second a wrong kernel on one rank, and the text of a
    cross-check with this kernel."""
    found = {}
    for stage, (module, run) in KINDS.items():
        model = LegacyDistributedDataParallel(Net(module()), checks=Checks(uneven="allow"))
        _record(model, folder / stage / "good", rank, run)
        with KERNELS.replaced(lambda tensor: flip(tensor * 2) if rank == FAULTY_RANK else tensor * 2):
            _record(model, folder / stage / "bad", rank, run)
            found[stage] = " ".join(str(cross_check(model, run, batch_of(rank))).split())
    # Between ranks: more micro-batches on one rank, and on the other rank dropout in eval mode.
    model.module.drop.train(rank != FAULTY_RANK)
    _record(model, folder / "uneven", rank, micro_batches=2 - rank)
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


def test_a_diff_of_ranks_counts_the_operations_that_it_does_not_compare(job: tuple[Path, dict[str, str]]) -> None:
    folder, _ = job
    found = compare(folder / "uneven").operations
    assert found is not None

    for rank in range(2):
        operations = Recorded(folder / "uneven", rank).operations[1]
        assert found.counts[found.labels.index(f"rank {rank}")] == len(operations)
        for row in found.rows:
            number = row.numbers[found.labels.index(f"rank {rank}")]
            if number is not None:
                recorded = operations[number - 1]
                assert (row.stage, row.module, row.name) == (
                    recorded.stage,
                    recorded.module,
                    recorded.name.removesuffix(".default"),
                )
