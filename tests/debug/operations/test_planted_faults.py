"""Faults planted on one rank, found in the traces of two runs."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers import operation_faults as faults
from tests.helpers.command import compare
from tests.helpers.operation_faults import FAULTY_RANK, STEP
from tests.helpers.ranks import run_ranks


def _train_both(rank: int, folder: Path, others: dict[str, Any], changes: dict[str, Any]) -> None:
    faults.train(rank, folder / "a", **others)
    faults.train(rank, folder / "b", **others, **changes)


def _runs(folder: Path, world_size: int = 2, others: dict[str, Any] | None = None, **changes: Any) -> Path:
    """The folder of a clean run ``a`` and of a run ``b`` with ``changes``."""
    run_ranks(partial(_train_both, folder=folder, others=others or {}, changes=changes), world_size)
    return folder


def _between_runs(folder: Path) -> Any:
    return compare(folder / "a", folder / "b")


def _found(comparison: Any, step: int = STEP) -> Any:
    assert comparison.operations is not None
    assert comparison.operations.step == step
    return comparison.operations


def _place(found: Any) -> tuple[str, str, str, str, tuple[int, ...]]:
    return found.kind, found.stage, found.module, found.name, found.ranks


@pytest.mark.parametrize("fault", [faults.flip_once, faults.flip_always])
def test_a_kernel_that_flips_a_bit_in_the_forward_pass_is_named(tmp_path: Path, fault: faults.Fault) -> None:
    comparison = _between_runs(_runs(tmp_path, fault=fault))

    found = _found(comparison)
    assert _place(found) == ("output", "forward", "body.0", "planted::product", (FAULTY_RANK,))
    assert found.summary == "forward of body.0 (planted::product): inputs agree, output differs"
    assert found.meaning.startswith("The same kernel gave another result for the same bits")
    assert "cross_check" in found.next_step
    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.phase) == (STEP, "local_gradients")


def test_a_kernel_that_flips_a_bit_in_the_backward_pass_is_named(tmp_path: Path) -> None:
    found = _found(_between_runs(_runs(tmp_path, fault=faults.flip_in_backward)))

    assert _place(found) == ("output", "backward", "body.0", "planted::product", (FAULTY_RANK,))


def test_another_number_of_threads_is_another_kernel(tmp_path: Path) -> None:
    others = {"make": faults.WideSum, "operations": range(1, 2)}

    found = _found(_between_runs(_runs(tmp_path, others=others, threads=2)), step=1)

    assert _place(found) == ("output", "forward", "", "aten::sum", (FAULTY_RANK,))
    assert found.meaning == "Other kernel, or another order of its sums: threads 1 in A, 2 in B."


def test_autocast_is_named(tmp_path: Path) -> None:
    found = _found(_between_runs(_runs(tmp_path, fault=faults.autocast)))

    assert _place(found) == ("sequence", "forward", "first", "aten::_to_copy", (FAULTY_RANK,))
    assert found.meaning == "Other dtype: a cast to bfloat16 only in B (autocast, or a cast in the code)."


def test_a_module_in_eval_mode_is_named(tmp_path: Path) -> None:
    found = _found(_between_runs(_runs(tmp_path, fault=faults.eval_mode)))

    assert (found.kind, found.stage, found.module) == ("sequence", "forward", "body.2")
    assert "eval()" in found.next_step
    assert found.meaning.startswith("Random numbers are drawn only in A (aten::bernoulli_.float)")


def test_dropout_with_another_seed_is_a_generator_at_another_place(tmp_path: Path) -> None:
    found = _found(_between_runs(_runs(tmp_path, others={"operations": range(1, 2)}, seed=50)), step=1)

    assert (found.kind, found.module, found.name) == ("output", "body.2", "aten::bernoulli_.float")
    assert found.meaning.startswith("Random generator at another place: another seed")


def test_a_stale_buffer_is_named(tmp_path: Path) -> None:
    found = _found(_between_runs(_runs(tmp_path, fault=faults.stale_buffer)))

    assert _place(found) == ("input", "forward", "scale", "aten::mul.Tensor", (FAULTY_RANK,))
    assert found.meaning.startswith("Another tensor is passed: 'scale.factor' in A, no parameter in B")


def test_a_write_of_another_thread_to_an_activation_is_named_by_its_neighbours(tmp_path: Path) -> None:
    found = _found(_between_runs(_runs(tmp_path, fault=faults.write_to_activation)))

    assert _place(found) == ("input", "forward", "body.0", "planted::product", (FAULTY_RANK,))
    assert "has changed since in B, which no recorded operation did (a second thread" in found.meaning


def test_a_write_of_another_thread_to_a_weight_is_named(tmp_path: Path) -> None:
    found = _found(_between_runs(_runs(tmp_path, fault=faults.write_to_weight)))

    assert _place(found)[:4] == ("input", "backward", "body.0", "planted::product")
    assert found.meaning.startswith("The weight or buffer 'body.0.weight' agreed in operation ")


def test_a_wrong_extra_operation_is_named(tmp_path: Path) -> None:
    found = _found(_between_runs(_runs(tmp_path, fault=faults.extra_operation)))

    assert found.summary.startswith("1 operation only in B: forward of first (aten::mul_.Tensor)")
    assert found.ranks == (FAULTY_RANK,)


def test_gradients_scaled_after_backward_on_one_rank_are_the_likely_cause(tmp_path: Path) -> None:
    found = _found(_between_runs(_runs(tmp_path, fault=faults.scaled_gradients)))

    assert _place(found) == ("sequence", "after backward", "", "aten::mul_.Tensor", (FAULTY_RANK,))
    assert found.summary == "5 operations only in B: outside of modules, after the backward pass (aten::mul_.Tensor)"
    assert found.meaning.endswith("and the likely cause of the tensors that differ.")


def test_a_copy_of_a_weight_with_equal_bits_is_named_before_the_operations_of_the_backward_pass(tmp_path: Path) -> None:
    found = _found(_between_runs(_runs(tmp_path, fault=faults.copied_weight)))

    assert _place(found) == ("form", "forward", "last", "aten::addmm", (FAULTY_RANK,))
    assert "'last.weight' in A, no parameter in B" in found.meaning


def test_an_extra_operation_without_influence_is_shown_for_runs_that_are_the_same(tmp_path: Path) -> None:
    comparison = _between_runs(_runs(tmp_path, fault=faults.harmless_operation))

    found = _found(comparison)
    assert (comparison.verdict, found.kind, found.ranks) == ("same", "sequence", (FAULTY_RANK,))
    assert found.meaning.endswith("All operations that both sides ran have equal values.")


def test_a_sum_in_the_order_of_threads_is_not_deterministic(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    rows, source = torch.randint(0, 10, (1_000_000,)), torch.randn(1_000_000)
    sums = {torch.zeros(10).index_put_((rows,), source, accumulate=True).sum().item() for _ in range(20)}
    torch.set_num_threads(1)
    if len(sums) == 1:
        pytest.skip("index_put_ is deterministic on this machine")
    folder = _runs(tmp_path, others={"make": faults.Rows, "threads": 2, "operations": range(1, 4)})

    comparison = _between_runs(folder)

    if comparison.operations is None:
        pytest.skip("index_put_ added in the same order in both runs")
    found = comparison.operations
    assert (found.kind, found.stage) == ("output", "backward")
    assert "index_put" in found.name
    assert "not deterministic" in found.meaning


def test_without_recorded_operations_a_note_tells_how_to_record_them(tmp_path: Path) -> None:
    comparison = _between_runs(_runs(tmp_path, others={"operations": ()}, fault=faults.flip_once))

    assert comparison.operations is None
    assert (
        "operations of step 2 were not recorded in A and B; to find the first that differs, record again with "
        "operations=range(2, 3)" in comparison.notes
    )


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


@pytest.mark.parametrize(
    "others",
    [
        {"make": faults.Net, "seed": 7},
        {"make": _normalised},
        {"make": _Checkpointed},
        {"make": partial(_Checkpointed, reentrant=True)},
        {"make": _Tied},
        {"make": _Embedded},
        {"make": _normalised, "micro_batches": 3},
        {"make": _normalised, "loss": _loss_under_autocast},
        {"make": _normalised, "loss": _mean_over_tokens, "sizes": (6, 3)},
    ],
    ids=[
        *("dropout", "batch norm", "checkpoint", "re-entrant checkpoint", "tied", "sparse", "accumulation", "autocast"),
        "uneven",
    ],
)
def test_no_alarm_for_an_equal_run(tmp_path: Path, others: dict[str, Any]) -> None:
    found = _between_runs(_runs(tmp_path, others=others))

    assert (found.verdict, found.operations) == ("same", None)
    assert "operations of step 2 agree" in found.notes
