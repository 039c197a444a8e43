"""Faults planted on one rank, found in the traces of two runs. An operation has one number in every comparison."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel
from legacy_ddp.debug import Recorder, cross_check
from tests.helpers.command import command, compare
from tests.helpers.cross_faults import BackwardDouble, Double, Net, batch_of, flip, kernel_replaced, loss_of
from tests.helpers.recorded import Recorded
from tests.helpers.shared_jobs import once, run_cases

STEP, FAULTY_RANK = 2, 1


def _nothing(_: nn.Module) -> None:
    """No fault."""


def _write_to_weight(module: nn.Module) -> None:
    """A second thread writes to a weight between its forward and its backward pass."""

    def write(*_: object) -> None:
        handle.remove()
        thread = threading.Thread(target=lambda: module.last.weight.data[0].add_(1.0))
        thread.start()
        thread.join()

    handle = module.last.register_forward_hook(write)


@contextmanager
def _scaled_gradients(module: nn.Module) -> Iterator[None]:
    yield
    for parameter in module.parameters():
        parameter.grad.mul_(0.5)


def _wrong_kernel(_: nn.Module) -> AbstractContextManager[None]:
    return kernel_replaced(lambda tensor: flip(tensor * 2))


def _prepared(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss whose batch needs an operation before the forward pass."""
    return loss_of(model, {**batch, "inputs": batch["inputs"] * 0.5})


Fault = Callable[[nn.Module], AbstractContextManager[None] | None]
# A fault in step 2 of run B, its kind and place, and the beginning of what is told.
CASES: dict[str, tuple[Fault, tuple[str, ...], str]] = {
    "a write of another thread to a weight": (
        _write_to_weight,
        ("input", "backward", "last", "aten::mm"),
        "The weight or buffer 'last.weight' agreed in ",
    ),
    "gradients scaled after backward": (
        _scaled_gradients,
        ("sequence", "after backward", "", "aten::mul_.Tensor"),
        "Operations only in B: other code",
    ),
}
# A wrong kernel in a forward pass behind another operation, and in a backward pass without one.
KERNEL_CASES = {"forward": (Double, _prepared), "backward": (BackwardDouble, loss_of)}


def _record(
    rank: int, folder: Path, fault: Fault, make: Callable[[], nn.Module] = nn.Tanh, run: Any = loss_of
) -> LegacyDistributedDataParallel:
    """Run A, and run B with the fault; the model. ``make``: the module in the middle."""
    for name, planted in (("a", _nothing), ("b", fault)):
        model = LegacyDistributedDataParallel(Net(make()), checks=Checks(divergence="ignore"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with Recorder(model, folder / name, optimizer=optimizer, operations=[STEP]):
            for step in range(1, STEP + 2):
                optimizer.zero_grad()
                block = planted(model.module) if (rank, step) == (FAULTY_RANK, STEP) else None
                with block or nullcontext():
                    run(model, batch_of(rank)).backward()
                model.all_reduce()
                optimizer.step()
    return model


def _record_case(rank: int, folder: Path, name: str) -> str:
    """Record a case. For a kernel, also the text of a cross-check with this kernel."""
    if name not in KERNEL_CASES:
        _record(rank, folder / name, CASES[name][0])
        return ""
    make, run = KERNEL_CASES[name]
    model = _record(rank, folder / name, _wrong_kernel, make, run)
    with _wrong_kernel(model) if rank == FAULTY_RANK else nullcontext():
        return " ".join(str(cross_check(model, run, batch_of(rank))).split())


@once
def _recorded(base: Path) -> tuple[Path, dict[str, list[str]]]:
    folder = Path(mkdtemp(dir=base))
    return folder, run_cases(_record_case, 2, {name: (folder, name) for name in (*CASES, *KERNEL_CASES)})


@pytest.fixture
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """A folder with runs ``a`` and ``b`` of each case, and texts of cross-checks."""
    return _recorded(tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("name", CASES)
def test_the_first_different_operation_on_the_faulty_rank_is_named(recorded: Any, name: str) -> None:
    fault, place, text = CASES[name]

    comparison = compare(recorded[0] / name / "a", recorded[0] / name / "b")

    found = comparison.operations
    assert (found.step, found.ranks) == (STEP, (FAULTY_RANK,))
    assert (found.kind, found.stage, found.module, found.name) == place
    assert found.meaning.startswith(text)
    assert (comparison.first.step, comparison.first.phase) == (STEP, "local_gradients")
    if fault is _scaled_gradients:
        assert found.summary.startswith("4 operations only in B: outside of modules, after the backward pass (aten::mu")
        assert found.meaning.endswith("and the likely cause of the tensors that differ.")


@pytest.mark.parametrize("stage", KERNEL_CASES)
def test_diff_and_cross_check_number_an_operation_alike(recorded: Any, stage: str) -> None:
    folder, told = recorded[0] / stage, recorded[1][stage][0]
    text = " ".join(command("diff", folder / "a", folder / "b").stdout.split())

    operations = Recorded(folder / "a", FAULTY_RANK).operations[STEP]
    place = (stage, "middle", "cross_faults::double")
    number = 1 + [(item.stage, item.module, item.name) for item in operations].index(place)
    where = f"{stage} of middle (cross_faults::double): inputs agree, output differs"
    assert f"on rank {FAULTY_RANK}: {len(operations)}, the first that differs: {where} (operation {number})" in text
    assert f"where: {where}, operation {number} of {len(operations)};" in told
