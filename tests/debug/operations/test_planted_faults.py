"""Faults planted on one rank, found in the traces of two runs."""

from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers import operation_faults as faults
from tests.helpers.command import compare
from tests.helpers.operation_faults import FAULTY_RANK, STEP
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import once, run_cases


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


class _Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.body, self.reentrant = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8)), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.body, x.requires_grad_(), use_reentrant=self.reentrant)
        return out


class _Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table((x.abs() * 5).long().clamp(max=19))
        return out


def _normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))


def _loss_under_autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().mean()


def _mean_over_tokens(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum() / float(x[:, 0].gt(0).sum() + 0.5)


EQUAL: dict[str, dict[str, Any]] = {
    "dropout": {"seed": 7},
    "batch norm": {"make": _normalised},
    "checkpoint": {"make": _Checkpointed},
    "re-entrant checkpoint": {"make": partial(_Checkpointed, reentrant=True)},
    "tied": {"make": _Tied},
    "sparse": {"make": _Embedded},
    "accumulation": {"make": _normalised, "micro_batches": 3},
    "autocast": {"make": _normalised, "loss": _loss_under_autocast},
    "uneven": {"make": _normalised, "loss": _mean_over_tokens, "sizes": (6, 3)},
}
FIRST_STEP = {"operations": range(1, 2)}
PRODUCT = ("body.0", "planted::product")


class Case(NamedTuple):
    """A fault in run B, or other ``changes`` of B; ``others``: of both runs. Then what is told, with its beginning."""

    fault: faults.Fault | None
    place: tuple[str, ...]
    text: str
    others: dict[str, Any] = {}  # noqa: RUF012 - never changed
    changes: dict[str, Any] = {}  # noqa: RUF012
    ranks: tuple[int, ...] = (FAULTY_RANK,)


CASES = {
    "a kernel flips a bit once": Case(
        faults.flip_once, ("output", "forward", *PRODUCT), "The same kernel gave another result for the same bits"
    ),
    "a kernel flips a bit always": Case(
        faults.flip_always, ("output", "forward", *PRODUCT), "The same kernel gave another result for the same bits"
    ),
    "a kernel flips a bit in the backward pass": Case(
        faults.flip_in_backward, ("output", "backward", *PRODUCT), "The same kernel gave another result"
    ),
    "another number of threads": Case(
        None,
        ("output", "forward", "", "aten::sum"),
        "Other kernel, or another order of its sums: threads 1 in A, 2 in B.",
        {"make": faults.WideSum, **FIRST_STEP},
        {"threads": 2},
    ),
    "autocast": Case(
        faults.autocast, ("sequence", "forward", "first", "aten::_to_copy"), "Other dtype: a cast to bfloat16 only in B"
    ),
    "a module in eval mode": Case(
        faults.eval_mode,
        ("sequence", "forward", "body.2"),
        "Random numbers are drawn only in A (aten::bernoulli_.float)",
    ),
    "dropout with another seed": Case(
        None,
        ("output", "forward", "body.2", "aten::bernoulli_.float"),
        "Random generator at another place: another seed",
        FIRST_STEP,
        {"seed": 50},
        ranks=(0, 1),
    ),
    "a stale buffer": Case(
        faults.stale_buffer,
        ("input", "forward", "scale", "aten::mul.Tensor"),
        "Another tensor is passed: 'scale.factor' in A, no parameter in B",
    ),
    "a write of another thread to an activation": Case(
        faults.write_to_activation, ("input", "forward", *PRODUCT), "The input is the output of operation "
    ),
    "a write of another thread to a weight": Case(
        faults.write_to_weight,
        ("input", "backward", *PRODUCT),
        "The weight or buffer 'body.0.weight' agreed in operation ",
    ),
    "a wrong extra operation": Case(
        faults.extra_operation,
        ("sequence", "forward", "first", "aten::mul_.Tensor"),
        "Operations only in B: other code",
    ),
    "gradients scaled after backward": Case(
        faults.scaled_gradients,
        ("sequence", "after backward", "", "aten::mul_.Tensor"),
        "Operations only in B: other code",
    ),
    "a copy of a weight with equal bits": Case(
        faults.copied_weight,
        ("form", "forward", "last", "aten::addmm"),
        "Another tensor with equal bits is passed: 'last.weight' in A, no parameter in B",
    ),
    "an extra operation without influence": Case(
        faults.harmless_operation, ("sequence", "forward", "body.1"), "Operations only in B: other code"
    ),
    "operations that were not recorded": Case(faults.flip_once, (), "", {"operations": ()}),
}


def _train_both(rank: int, folder: Path, others: dict[str, Any], changes: dict[str, Any]) -> None:
    faults.train(rank, folder / "a", **others)
    faults.train(rank, folder / "b", **others, **changes)


@once
def _runs(base: Path) -> Path:
    folder = Path(mkdtemp(dir=base))
    planted = {name: (case.others, {"fault": case.fault, **case.changes}) for name, case in CASES.items()}
    equal = {f"equal: {name}": (others, {}) for name, others in EQUAL.items()}
    run_cases(_train_both, 2, {name: (folder / name, *given) for name, given in (planted | equal).items()})
    return folder


@pytest.fixture
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with a clean run ``a``, and a run ``b`` with the fault of a case or with nothing else."""
    return _runs(tmp_path_factory.getbasetemp())


def _between(runs: Path, name: str) -> Any:
    return compare(runs / name / "a", runs / name / "b")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.place])
def test_the_first_different_operation_on_the_faulty_rank_is_named(runs: Path, name: str) -> None:
    case = CASES[name]
    comparison = _between(runs, name)

    found = comparison.operations
    assert found is not None
    assert (found.step, found.ranks) == (case.others.get("operations", [STEP])[0], case.ranks)
    assert (found.kind, found.stage, found.module, found.name)[: len(case.place)] == case.place
    assert found.meaning.startswith(case.text)
    assert comparison.verdict == ("same" if case.fault is faults.harmless_operation else "different")
    if comparison.first is not None and case.others == {}:
        assert (comparison.first.step, comparison.first.phase) == (STEP, "local_gradients")


def test_gradients_scaled_after_backward_on_one_rank_are_the_likely_cause(runs: Path) -> None:
    found = _between(runs, "gradients scaled after backward").operations

    assert found.summary == "5 operations only in B: outside of modules, after the backward pass (aten::mul_.Tensor)"
    assert found.meaning.endswith("and the likely cause of the tensors that differ.")


def test_a_write_to_an_activation_is_named_by_its_neighbours(runs: Path) -> None:
    found = _between(runs, "a write of another thread to an activation").operations

    assert "has changed since in B, which no recorded operation did (a second thread" in found.meaning


def test_without_recorded_operations_a_note_tells_how_to_record_them(runs: Path) -> None:
    comparison = _between(runs, "operations that were not recorded")

    assert comparison.operations is None
    assert (
        "operations of step 2 were not recorded in A and B; to find the first that differs, record again with "
        "operations=range(2, 3)" in comparison.notes
    )


@pytest.mark.parametrize("name", EQUAL)
def test_no_alarm_for_an_equal_run(runs: Path, name: str) -> None:
    found = _between(runs, f"equal: {name}")

    assert (found.verdict, found.operations) == ("same", None)
    assert "operations of step 2 agree" in found.notes


def test_a_sum_in_the_order_of_threads_is_not_deterministic(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    rows, source = torch.randint(0, 10, (1_000_000,)), torch.randn(1_000_000)
    sums = {torch.zeros(10).index_put_((rows,), source, accumulate=True).sum().item() for _ in range(20)}
    torch.set_num_threads(1)
    if len(sums) == 1:
        pytest.skip("index_put_ is deterministic on this machine")
    others = {"make": faults.Rows, "threads": 2, "operations": range(1, 4)}
    run_ranks(partial(_train_both, folder=tmp_path, others=others, changes={}), 2)

    found = compare(tmp_path / "a", tmp_path / "b").operations

    if found is None:
        pytest.skip("index_put_ added in the same order in both runs")
    assert (found.kind, found.stage) == ("output", "backward")
    assert "index_put" in found.name
    assert "not deterministic" in found.meaning
